"""A checkpoint on disk, of whatever format: what it holds and how to read a tensor of it."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from paged_jax.models.config import GenerationInfo, ModelConfig, ModelLoadError
from paged_jax.models.params import list_tensors

# Faults listed in one error; a wrong file would otherwise give one line per tensor.
MAX_FAULTS_LISTED = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """An opened checkpoint whose tensors have been compared with the model's declaration.

    specs: the model's tree of ParamSpec, under this checkpoint's tensor names.
    stored_dtype: "float32", "float16", "bfloat16", or "quantized".
    tokenizer_metadata: a GGUF file's `tokenizer.*` entries; None where the tokenizer has files of
        its own beside the weights.
    read: gives the named tensor, converted to the dtype asked for.
    """

    config: ModelConfig
    generation: GenerationInfo
    specs: Any
    stored_dtype: str
    tokenizer_metadata: dict[str, Any] | None
    read: Callable[[str, np.dtype], np.ndarray]


def check_tensors(
    path: Path,
    found: Mapping[str, tuple[int, ...]],
    specs: Any,
    *,
    is_unused: Callable[[str], bool],
) -> None:
    """Compares the names and shapes of a checkpoint's tensors with those of the model.

    Args:
        path: the file or folder, for the message.
        found: shape of each tensor of the checkpoint.
        specs: tree of ParamSpec under this checkpoint's names.
        is_unused: True for a tensor that the model does not need although it is there.
    Raises: ModelLoadError naming every tensor that is missing, misshapen or unexpected.
    """
    wanted = {tensor.name: tensor.shape for tensor in list_tensors(specs)}
    missing = [name for name in wanted if name not in found]
    if missing:
        raise ModelLoadError(
            f"{path}: missing tensors: {_listed(missing)}; the file is incomplete, or its "
            "configuration describes another model: fetch or convert it again"
        )
    misshapen = [
        f"{name} has shape {list(found[name])}, expected {list(shape)}"
        for name, shape in wanted.items()
        if found[name] != shape
    ]
    if misshapen:
        raise ModelLoadError(
            f"{path}: misshapen tensors: {_listed(misshapen)}; the file does not fit its own "
            "configuration: fetch or convert it again"
        )
    unexpected = [name for name in found if name not in wanted and not is_unused(name)]
    if unexpected:
        raise ModelLoadError(
            f"{path}: tensors that this architecture does not use: {_listed(unexpected)}; "
            "without them the model would answer wrongly: use a checkpoint without them"
        )


def _listed(items: Iterable[str]) -> str:
    items = list(items)
    shown = ", ".join(items[:MAX_FAULTS_LISTED])
    left_out = len(items) - MAX_FAULTS_LISTED
    return f"{shown} and {left_out} more" if left_out > 0 else shown
