"""A GGUF file as a Hugging Face folder in float32, for engines that read no GGUF.

    python scripts/peers_export.py model.gguf folder

The tensors are those that the engine itself computes with, dequantised once, so that a float32
peer answers with the same tokens. Beside them: config.json, generation_config.json, tokenizer.json.
"""

import json
import os
import pathlib
import sys
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from paged_jax.models.checkpoint import Checkpoint
from paged_jax.models.config import RopeConfig
from paged_jax.models.params import list_tensors
from paged_jax.models.registry import MODELS
from paged_jax.models.weights_gguf import open_gguf
from paged_jax.tokenizer_gguf import build_tokenizer


def export_folder(gguf: str | os.PathLike[str], folder: str | os.PathLike[str]) -> pathlib.Path:
    """Writes the folder, or finds it finished from an earlier call.

    Args:
      gguf: a .gguf file.
      folder: where to; made if it is not there. It holds 4 bytes for each of the model's numbers.

    Returns: the folder.
    Raises:
      ValueError: the model's RoPE scaling has no form in a config.json.
      paged_jax.models.config.ModelLoadError: the file cannot be read.
    """
    folder = pathlib.Path(folder)
    finished = folder / "config.json"  # Written last.
    if finished.exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint = open_gguf(gguf)
    config = _config(checkpoint)
    module = MODELS[checkpoint.config.architecture]
    # Both declarations list the same tensors in the same order, under the names of either format.
    names = zip(
        list_tensors(module.param_specs(checkpoint.config)),
        list_tensors(checkpoint.specs),
        strict=True,
    )
    float32 = np.dtype(np.float32)
    tensors = {hf.name: checkpoint.read(own.name, float32) for hf, own in names}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert checkpoint.tokenizer_metadata is not None
    tokenizer = build_tokenizer(checkpoint.tokenizer_metadata)
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    eos = list(checkpoint.generation.eos_token_ids)
    _write(folder / "generation_config.json", {"eos_token_id": eos})
    _write(finished, config)
    return folder


def _config(checkpoint: Checkpoint) -> dict[str, Any]:
    """What a config.json says of the model."""
    config, generation = checkpoint.config, checkpoint.generation
    return {
        "architectures": [MODELS[config.architecture].HF_ARCHITECTURE],
        "model_type": config.architecture,
        "torch_dtype": "float32",
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
        "bos_token_id": generation.bos_token_id,
        "eos_token_id": list(generation.eos_token_ids),
        **_rope(config.rope),
    }


def _rope(rope: RopeConfig) -> dict[str, Any]:
    if rope.kind not in ("default", "linear") or rope.divisors is not None:
        raise ValueError(
            f"rope.kind={rope.kind!r} with divisors={rope.divisors is not None}: only plain and "
            "linear scaling can be exported; compare with llama.cpp alone"
        )
    fields: dict[str, Any] = {"rope_theta": rope.theta}
    if rope.kind == "linear":
        fields["rope_scaling"] = {"rope_type": "linear", "factor": rope.factor}
    return fields


def _write(path: pathlib.Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python scripts/peers_export.py model.gguf folder")
    print(export_folder(sys.argv[1], sys.argv[2]))
