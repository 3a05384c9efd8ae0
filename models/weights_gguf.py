"""Llama weights and configuration from a GGUF file, quantised tensors dequantised while read."""

import importlib
import math
import os
from typing import Any

import numpy as np

from paged_jax.models.checkpoint import (
    Checkpoint,
    check_tensors,
    check_token_id,
    sampling_defaults,
)
from paged_jax.models.config import GenerationInfo, ModelConfig, ModelLoadError, RopeConfig
from paged_jax.models.gguf_file import GgufHeader, GgufTensor, gguf_metadata, read_header
from paged_jax.models.int4 import INT4_COLUMNS, Int4Rows, int4_rows_of_ggml
from paged_jax.models.params import rename_tensors
from paged_jax.models.registry import MODELS

__all__ = ["gguf_metadata", "open_gguf"]

SUPPORTED_TYPES = (
    "F32",
    "F16",
    "BF16",
    "Q4_0",
    "Q4_1",
    "Q5_0",
    "Q5_1",
    "Q8_0",
    "Q4_K",
    "Q5_K",
    "Q6_K",
)

# Dequantising goes through float32: this many numbers at a time, so that an embedding table never
# exists in float32 beside its bfloat16 copy.
CHUNK_NUMBERS = 1 << 22

# Hugging Face's tensor names on the left, as the models declare them.
GLOBAL_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
LAYER_NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}
ROPE_FREQS = "rope_freqs.weight"

# Metadata that would change the outputs, with the one value under which it does not.
NEUTRAL_METADATA = {
    "expert_count": 0,
    "embedding_scale": 1.0,
    "residual_scale": 1.0,
    "logit_scale": 1.0,
    "attention.clamp_kqv": 0.0,
    "attention.scale": 0.0,
    "attention.sliding_window": 0,
}

# Metadata that is sampling defaults, by the name SamplingParams has for it; the values under which
# other such metadata changes nothing; and what only matters beside other metadata.
SAMPLING_PREFIX = "general.sampling."
SAMPLING_NAMES = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}
NEUTRAL_SAMPLING = {"general.sampling.mirostat": 0, "general.sampling.xtc_probability": 0.0}
DEPENDENT_SAMPLING = (
    "general.sampling.penalty_last_n",
    "general.sampling.mirostat_tau",
    "general.sampling.mirostat_eta",
    "general.sampling.xtc_threshold",
)


def open_gguf(path: str | os.PathLike[str]) -> Checkpoint:
    """Opens a GGUF file and compares all of it with the model it describes.

    Raises:
        FileNotFoundError: no such file.
        ImportError: the gguf package is missing.
        ModelLoadError: the file is not GGUF, truncated or corrupt; its architecture, a tensor type
            or a RoPE scaling is not supported; a tensor is missing, misshapen or unexpected; a
            token id or a sampling default is out of range.
    """
    header = read_header(path)
    architecture = header.metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in MODELS:
        raise ModelLoadError(
            f"{path}: general.architecture={architecture!r} is not supported: "
            f"use a model of {sorted(MODELS)}"
        )
    reader = _TensorReader(header)
    config = _read_config(header, reader)
    specs = rename_tensors(MODELS[architecture].param_specs(config), _gguf_name)
    found = {name: tensor.shape for name, tensor in header.tensors.items()}
    check_tensors(header.path, found, specs, is_unused=_is_unused)
    reader.check_bounds()
    reader.set_rope_permuted_heads(config)
    return Checkpoint(
        config=config,
        generation=_read_generation(header, config.vocab_size),
        specs=specs,
        stored_dtype=reader.stored_dtype("token_embd.weight"),
        tokenizer_metadata={
            key: value for key, value in header.metadata.items() if key.startswith("tokenizer.")
        },
        read=reader.read,
        read_int4=reader.read_int4,
    )


def _gguf_name(name: str) -> str:
    if name in GLOBAL_NAMES:
        return GLOBAL_NAMES[name]
    _, _, index, suffix = name.split(".", 3)  # model.layers.<index>.<suffix>
    return f"blk.{index}.{LAYER_NAMES[suffix]}"


def _is_unused(name: str) -> bool:
    # rope_freqs is read into the configuration; attn_rot_embd is a table of inverse frequencies
    # that early converters copied along.
    return name == ROPE_FREQS or name.endswith(".attn_rot_embd.weight")


def _read_config(header: GgufHeader, reader: "_TensorReader") -> ModelConfig:
    metadata = _ArchitectureMetadata(header)
    for key, neutral in NEUTRAL_METADATA.items():
        value = metadata.get(key, neutral)
        if value != neutral:
            raise metadata.refused(key, value, f"not supported: only {neutral!r} is")
    if "token_embd.weight" not in header.tensors:
        raise ModelLoadError(
            f"{header.path}: missing tensors: token_embd.weight; convert the model again"
        )
    embed = header.tensors["token_embd.weight"]
    hidden_size = metadata.require("embedding_length", int)
    num_heads = metadata.require("attention.head_count", int)
    head_dim = metadata.get("attention.key_length", hidden_size // max(num_heads, 1))
    for key in ("attention.value_length", "rope.dimension_count"):
        value = metadata.get(key, head_dim)
        if value != head_dim:
            raise metadata.refused(key, value, f"not supported: it must be head_dim={head_dim}")
    try:
        return ModelConfig(
            architecture=metadata.architecture,
            vocab_size=metadata.get("vocab_size", embed.shape[0]),
            hidden_size=hidden_size,
            intermediate_size=metadata.require("feed_forward_length", int),
            num_layers=metadata.require("block_count", int),
            num_heads=num_heads,
            num_kv_heads=metadata.get("attention.head_count_kv", num_heads),
            head_dim=head_dim,
            rms_norm_eps=metadata.require("attention.layer_norm_rms_epsilon", float),
            max_position_embeddings=metadata.require("context_length", int),
            tie_word_embeddings="output.weight" not in header.tensors,
            rope=_read_rope(metadata, reader),
        )
    except ModelLoadError:
        raise
    except ValueError as error:
        raise ModelLoadError(f"{header.path}: {error}; convert the model again") from error


def _read_rope(metadata: "_ArchitectureMetadata", reader: "_TensorReader") -> RopeConfig:
    theta = metadata.positive("rope.freq_base", 10000.0)
    # As in llama.cpp, a factor without a type is linear; scale_linear is the factor's older name.
    kind = metadata.get("rope.scaling.type", "linear")
    if kind not in ("none", "linear"):
        raise metadata.refused("rope.scaling.type", kind, "not supported: use 'none' or 'linear'")
    factor = 1.0
    if kind == "linear":
        factor = metadata.positive(
            "rope.scaling.factor", metadata.positive("rope.scale_linear", 1.0)
        )
    divisors = None
    if ROPE_FREQS in reader.header.tensors:
        reader.check_bounds([ROPE_FREQS])
        divisors = tuple(reader.read(ROPE_FREQS, np.dtype(np.float32)).ravel().tolist())
    return RopeConfig(
        theta=theta, kind="default" if factor == 1.0 else "linear", factor=factor, divisors=divisors
    )


def _read_generation(header: GgufHeader, vocab_size: int) -> GenerationInfo:
    def token_id(name: str) -> int | None:
        key = f"tokenizer.ggml.{name}_token_id"
        if key not in header.metadata:
            return None
        return check_token_id(header.path, key, header.metadata[key], vocab_size)

    # Chat models end a turn with a token of its own (eot) or, before a tool's answer, with eom.
    eos_token_ids = [token_id(name) for name in ("eos", "eot", "eom")]
    found = {
        key: value
        for key, value in header.metadata.items()
        if key.startswith(SAMPLING_PREFIX) and key not in DEPENDENT_SAMPLING
    }
    return GenerationInfo(
        eos_token_ids=tuple(dict.fromkeys(id for id in eos_token_ids if id is not None)),
        bos_token_id=token_id("bos"),
        defaults=sampling_defaults(header.path, found, SAMPLING_NAMES, NEUTRAL_SAMPLING),
    )


class _ArchitectureMetadata:
    """The metadata under the architecture's own prefix, such as `llama.block_count`."""

    def __init__(self, header: GgufHeader) -> None:
        self.path = header.path
        self.metadata = header.metadata
        self.architecture: str = header.metadata["general.architecture"]

    def get(self, key: str, default: Any) -> Any:
        return self.metadata.get(f"{self.architecture}.{key}", default)

    def require(self, key: str, kind: type) -> Any:
        value = self.get(key, None)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise self.refused(key, value, f"expected one {kind.__name__}: convert the model again")
        return value

    def positive(self, key: str, default: float) -> float:
        """A number above 0, which converters write as a float or as a whole number."""
        value = self.get(key, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (is_number and 0 < value < math.inf):
            raise self.refused(
                key, value, "expected one finite number above 0: convert the model again"
            )
        return float(value)

    def refused(self, key: str, value: Any, reason: str) -> ModelLoadError:
        return ModelLoadError(f"{self.path}: {self.architecture}.{key}={value!r}: {reason}")


class _TensorReader:
    """Dequantises tensors of one file, a few rows at a time, straight into the target dtype."""

    def __init__(self, header: GgufHeader) -> None:
        self.header = header
        self._gguf = _import_gguf()
        self._num_heads: dict[str, int] = {}

    def set_rope_permuted_heads(self, config: ModelConfig) -> None:
        """Says how many heads the projections have whose rows the file stores permuted."""
        for index in range(config.num_layers):
            self._num_heads[f"blk.{index}.attn_q.weight"] = config.num_heads
            self._num_heads[f"blk.{index}.attn_k.weight"] = config.num_kv_heads

    def stored_dtype(self, name: str) -> str:
        type_name = self._quantization_type(self.header.tensors[name]).name
        stored = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
        return stored.get(type_name, "quantized")

    def check_bounds(self, names: list[str] | None = None) -> None:
        """Raises ModelLoadError for a tensor of unsupported type or beyond the file's end."""
        for name in self.header.tensors if names is None else names:
            tensor = self.header.tensors[name]
            end_bytes = tensor.offset_bytes + self._row_bytes(tensor) * _num_rows(tensor)
            if end_bytes > self.header.file_bytes:
                raise ModelLoadError(
                    f"{self.header.path}: truncated: tensor {name!r} ends at byte {end_bytes}, "
                    f"and the file has {self.header.file_bytes} bytes; fetch it again"
                )

    def read(
        self, name: str, dtype: np.dtype, index: tuple[slice, ...] | None = None
    ) -> np.ndarray:
        """The named tensor in dtype, its rows in Hugging Face's order.

        index: the part that is wanted, a slice of whole heads where the rows are heads'; other rows
            are not looked at.
        """
        tensor = self.header.tensors[name]
        quantization_type = self._quantization_type(tensor)
        num_rows, row_length = _num_rows(tensor), tensor.shape[-1]
        rows, columns = slice(0, num_rows), slice(0, row_length)
        if index is not None:
            rows, columns = index if len(index) == 2 else (rows, *index)
        stored = self._stored_rows(tensor)[rows]
        values = np.empty((len(stored), columns.stop - columns.start), dtype)
        rows_per_chunk = max(1, CHUNK_NUMBERS // row_length)
        for start in range(0, len(stored), rows_per_chunk):
            chunk = slice(start, start + rows_per_chunk)
            numbers = self._gguf.quants.dequantize(np.asarray(stored[chunk]), quantization_type)
            values[chunk] = numbers[:, columns]
        values = self._in_order(name, values)
        return values if len(tensor.shape) > 1 else values[0]

    def read_int4(self, name: str, index: tuple[slice, ...] | None) -> Int4Rows | None:
        """The named matrix as the file has it, its rows in Hugging Face's order.

        Returns: None where it is stored in another way than 4 bits with a scale for each 32
            columns, or where `index` cuts through these.
        """
        tensor = self.header.tensors[name]
        type_name = self._quantization_type(tensor).name
        if type_name not in ("Q4_0", "Q4_1"):
            return None
        rows, columns = index or (slice(None), slice(0, tensor.shape[1]))
        if columns.start % INT4_COLUMNS or columns.stop % INT4_COLUMNS:
            return None
        stored = self._in_order(name, np.asarray(self._stored_rows(tensor)[rows]))
        blocks = stored.reshape(len(stored), tensor.shape[1] // INT4_COLUMNS, -1)
        return int4_rows_of_ggml(
            blocks[:, columns.start // INT4_COLUMNS : columns.stop // INT4_COLUMNS],
            has_minimum=type_name == "Q4_1",
        )

    def _stored_rows(self, tensor: GgufTensor) -> np.ndarray:
        """uint8[rows, bytes of a row], mapped from the file."""
        return np.memmap(
            self.header.path,
            dtype=np.uint8,
            mode="r",
            offset=tensor.offset_bytes,
            shape=(_num_rows(tensor), self._row_bytes(tensor)),
        )

    def _in_order(self, name: str, rows: np.ndarray) -> np.ndarray:
        """Rows of whole heads of the named tensor, whatever is in them, in Hugging Face's order."""
        if name not in self._num_heads:
            return rows
        num_rows = _num_rows(self.header.tensors[name])
        return _undo_rope_permutation(rows, self._num_heads[name] * len(rows) // num_rows)

    def _quantization_type(self, tensor: GgufTensor) -> Any:
        types = {int(member): member for member in self._gguf.GGMLQuantizationType}
        found = types.get(tensor.type_id)
        if found is None or found.name not in SUPPORTED_TYPES:
            raise ModelLoadError(
                f"{self.header.path}: tensor {tensor.name!r} has the type "
                f"{found.name if found else tensor.type_id}, which is not supported: "
                f"use a file with {', '.join(SUPPORTED_TYPES)}"
            )
        return found

    def _row_bytes(self, tensor: GgufTensor) -> int:
        quantization_type = self._quantization_type(tensor)
        block_numbers, block_bytes = self._gguf.GGML_QUANT_SIZES[quantization_type]
        if tensor.shape[-1] % block_numbers:
            raise ModelLoadError(
                f"{self.header.path}: tensor {tensor.name!r} has rows of {tensor.shape[-1]} "
                f"numbers, and {quantization_type.name} needs a multiple of {block_numbers}: "
                "the file is corrupt, fetch it again"
            )
        return tensor.shape[-1] // block_numbers * block_bytes


def _num_rows(tensor: GgufTensor) -> int:
    return math.prod(tensor.shape[:-1])


def _undo_rope_permutation(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """[H * D, E]: from llama.cpp's order of rows within each head back to Hugging Face's.

    llama.cpp rotates neighbouring rows (2 i, 2 i + 1), Hugging Face rows (i, i + D / 2).
    """
    pairs = rows.reshape(num_heads, -1, 2, rows.shape[-1])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _import_gguf() -> Any:
    try:
        gguf = importlib.import_module("gguf")
        importlib.import_module("gguf.quants")
    except ImportError as error:
        raise ImportError(
            "reading a GGUF file needs the gguf package: pip install 'paged-jax[gguf]'"
        ) from error
    return gguf
