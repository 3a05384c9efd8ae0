"""Writes tiny random Llama models to disk: as a Hugging Face folder and as a GGUF file.

The names, shapes and row orders here are written down a second time on purpose, so that tests
compare the loaders with something of its own.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import gguf.quants
import ml_dtypes
import numpy as np
import tokenizers
from safetensors.numpy import save_file
from tokenizers import decoders, models, pre_tokenizers

from paged_jax.models.config import ModelConfig, RopeConfig

NUMPY_DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}

GGUF_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}

LLAMA3_ROPE = RopeConfig(
    theta=500000.0,
    kind="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)


def tiny_config(**overrides: Any) -> ModelConfig:
    """A Llama of two layers, four query heads and two KV heads; rows of 32 or 64 numbers."""
    fields: dict[str, Any] = {
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "rope": RopeConfig(theta=10000.0),
    }
    return ModelConfig(**fields | overrides)


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor, under Hugging Face's names."""
    hidden, ffn, dim = config.hidden_size, config.intermediate_size, config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    for index in range(config.num_layers):
        layer = {
            "input_layernorm": (hidden,),
            "self_attn.q_proj": (config.num_heads * dim, hidden),
            "self_attn.k_proj": (config.num_kv_heads * dim, hidden),
            "self_attn.v_proj": (config.num_kv_heads * dim, hidden),
            "self_attn.o_proj": (hidden, config.num_heads * dim),
            "post_attention_layernorm": (hidden,),
            "mlp.gate_proj": (ffn, hidden),
            "mlp.up_proj": (ffn, hidden),
            "mlp.down_proj": (hidden, ffn),
        }
        for name, shape in layer.items():
            shapes[f"model.layers.{index}.{name}.weight"] = shape
    return shapes


def random_tensors(config: ModelConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """float32 tensors under Hugging Face's names, so large that every part of a layer counts."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, shape in tensor_shapes(config).items():
        if len(shape) == 1:
            values = 1.0 + 0.2 * rng.standard_normal(shape)
        else:
            values = rng.standard_normal(shape) / np.sqrt(shape[-1])
        tensors[name] = values.astype(np.float32)
    return tensors


def hf_config_json(config: ModelConfig, **overrides: Any) -> dict[str, Any]:
    """The content of config.json in its older form; an override of None takes a field away."""
    fields: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": config.tie_word_embeddings,
        "rope_theta": config.rope.theta,
        "rope_scaling": rope_scaling_json(config.rope),
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return {name: value for name, value in (fields | overrides).items() if value is not None}


def rope_scaling_json(rope: RopeConfig) -> dict[str, Any] | None:
    """config.json's rope_scaling, without theta; None for the default kind."""
    if rope.kind == "default":
        return None
    scaling: dict[str, Any] = {"rope_type": rope.kind, "factor": rope.factor}
    if rope.kind == "llama3":
        scaling["low_freq_factor"] = rope.low_freq_factor
        scaling["high_freq_factor"] = rope.high_freq_factor
        scaling["original_max_position_embeddings"] = rope.original_max_position_embeddings
    return scaling


def write_byte_folder(folder: Path, config: ModelConfig) -> Path:
    """A Hugging Face folder of random weights, with a tokenizer whose tokens are bytes."""
    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    write_hf_folder(folder, config, random_tensors(config))
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def write_hf_folder(
    folder: Path,
    config: ModelConfig,
    tensors: Mapping[str, np.ndarray],
    *,
    dtype: str = "F32",
    num_shards: int = 1,
    config_overrides: Mapping[str, Any] | None = None,
    generation: Mapping[str, Any] | None = None,
) -> Path:
    """Writes config.json, the safetensors (dtype F32, F16 or BF16) and, if given, the generation
    config. Tensors that are not floating point keep their dtype. Returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    config_json = hf_config_json(config, **(config_overrides or {}))
    (folder / "config.json").write_text(json.dumps(config_json))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(dict(generation)))
    stored = {
        name: values.astype(NUMPY_DTYPES[dtype]) if values.dtype == np.float32 else values
        for name, values in tensors.items()
    }
    if num_shards == 1:
        save_file(stored, folder / "model.safetensors")
        return folder
    weight_map = {}
    for shard in range(num_shards):
        file_name = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        names = list(stored)[shard::num_shards]
        save_file({name: stored[name] for name in names}, folder / file_name)
        weight_map |= dict.fromkeys(names, file_name)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def gguf_name(name: str) -> str:
    """llama.cpp's name of a tensor that Hugging Face calls `name`."""
    top = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in top:
        return top[name]
    _, _, index, rest = name.split(".", 3)
    return f"blk.{index}.{GGUF_LAYER_NAMES[rest.removesuffix('.weight')]}.weight"


def permute_rope_rows(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Row order of llama.cpp's Q and K: within a head row i of the first half goes to 2 i, row i
    of the second to 2 i + 1."""
    head_dim = rows.shape[0] // num_heads
    permuted = np.empty_like(rows)
    for head in range(num_heads):
        for i in range(head_dim // 2):
            permuted[head * head_dim + 2 * i] = rows[head * head_dim + i]
            permuted[head * head_dim + 2 * i + 1] = rows[head * head_dim + head_dim // 2 + i]
    return permuted


def gguf_metadata_of(config: ModelConfig) -> dict[str, Any]:
    """The `llama.*` metadata that llama.cpp's converter writes."""
    return {
        "llama.block_count": config.num_layers,
        "llama.context_length": config.max_position_embeddings,
        "llama.embedding_length": config.hidden_size,
        "llama.feed_forward_length": config.intermediate_size,
        "llama.attention.head_count": config.num_heads,
        "llama.attention.head_count_kv": config.num_kv_heads,
        "llama.attention.key_length": config.head_dim,
        "llama.attention.value_length": config.head_dim,
        "llama.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "llama.rope.dimension_count": config.head_dim,
        "llama.rope.freq_base": config.rope.theta,
        "llama.vocab_size": config.vocab_size,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def write_gguf(
    path: Path,
    config: ModelConfig,
    tensors: Mapping[str, np.ndarray],
    *,
    tensor_type: str = "F32",
    raw: Mapping[str, tuple[np.ndarray, str]] | None = None,
    metadata: Mapping[str, Any] | None = None,
    architecture: str = "llama",
) -> Path:
    """Writes a GGUF file as llama.cpp's converter would, norms always in F32. Returns the path.

    Args:
        tensors: under Hugging Face's names; Q and K rows are permuted here.
        tensor_type: type of the matrices, one that gguf.quants.quantize can write.
        raw: bytes and type by GGUF name, to be stored as they are; they replace tensors or join
            them.
        metadata: more entries, or other values; None takes an entry away.
    """
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in (gguf_metadata_of(config) | dict(metadata or {})).items():
        _add_metadata(writer, key, value)
    stored = dict(raw or {})
    for name, values in tensors.items():
        if gguf_name(name) not in stored:
            stored[gguf_name(name)] = _encode(name, values, config, tensor_type)
    for name, (values, type_name) in stored.items():
        writer.add_tensor(name, values, raw_dtype=gguf.GGMLQuantizationType[type_name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _encode(
    name: str, values: np.ndarray, config: ModelConfig, tensor_type: str
) -> tuple[np.ndarray, str]:
    if values.ndim == 1:
        return values, "F32"
    if name.endswith("q_proj.weight"):
        values = permute_rope_rows(values, config.num_heads)
    if name.endswith("k_proj.weight"):
        values = permute_rope_rows(values, config.num_kv_heads)
    quantization_type = gguf.GGMLQuantizationType[tensor_type]
    return gguf.quants.quantize(values, quantization_type), tensor_type


def _add_metadata(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif value is not None:
        writer.add_array(key, value)
