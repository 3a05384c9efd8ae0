"""A checkpoint on disk, of whatever format: what it holds and how to read a tensor of it."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from paged_jax.log import logger
from paged_jax.models.config import GenerationInfo, ModelConfig, ModelLoadError
from paged_jax.models.params import ReadInt4, ReadTensor, list_tensors
from paged_jax.sampling_params import NotYetSupported, SamplingParams

# Faults listed in one error; a wrong file would otherwise give one line per tensor.
MAX_FAULTS_LISTED = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """An opened checkpoint whose tensors have been compared with the model's declaration.

    specs: the model's tree of ParamSpec, under this checkpoint's tensor names.
    stored_dtype: "float32", "float16", "bfloat16", or "quantized".
    tokenizer_metadata: a GGUF file's `tokenizer.*` entries; None where the tokenizer has files of
        its own beside the weights.
    read: gives the named tensor, or a part of it, converted to the dtype asked for.
    read_int4: gives the named tensor, or a part of it, as it is stored in 4 bits, or None where it
        is not. None in formats that have no such tensors.
    """

    config: ModelConfig
    generation: GenerationInfo
    specs: Any
    stored_dtype: str
    tokenizer_metadata: dict[str, Any] | None
    read: ReadTensor
    read_int4: ReadInt4 | None = None


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


def check_token_id(path: Path, field: str, token_id: Any, vocab_size: int) -> int:
    """The token id that a field names. Raises: ModelLoadError unless it is in the vocabulary."""
    is_integer = isinstance(token_id, int) and not isinstance(token_id, bool)
    if not (is_integer and 0 <= token_id < vocab_size):
        raise ModelLoadError(
            f"{path}: {field}: the token id {token_id!r} must be a whole number from 0 to "
            f"{vocab_size - 1}, the last of the vocabulary; correct it, or take it out"
        )
    return token_id


def sampling_defaults(
    path: Path,
    found: Mapping[str, Any],
    names: Mapping[str, str],
    neutral: Mapping[str, Any],
) -> dict[str, Any]:
    """A checkpoint's advice on sampling, as keyword arguments that SamplingParams accepts.

    It is advice and not a request: what the engine cannot honour is left out with one warning,
    where the same value in a request of the user's would be refused.

    Args:
        path: the file, for messages.
        found: the sampling fields of the file; those that are None count as absent.
        names: the field of SamplingParams that a field of the file stands for. Others can only be
            left out.
        neutral: values under which fields without such a name change nothing: no warning.
    Raises: ModelLoadError naming the file, the field and its value where SamplingParams refuses
        the type or the range.
    """
    defaults: dict[str, Any] = {}
    left_out = []
    for field, value in found.items():
        if value is None:
            continue
        if field not in names:
            if value != [] and value != neutral.get(field):
                left_out.append(f"{field}={value!r}")
            continue
        name = names[field]
        try:
            params = SamplingParams(**{name: _whole_as_int(value, name)})
        except NotYetSupported:
            left_out.append(f"{field}={value!r}")
        except ValueError as error:
            raise ModelLoadError(
                f"{path}: {field}={value!r} is no sampling default: {error}; correct it in the "
                "file, or take it out"
            ) from error
        else:
            defaults[name] = getattr(params, name)
    if left_out:
        logger.warning(
            "%s: sampling without %s, which the model advises and which is not supported",
            path,
            ", ".join(left_out),
        )
    return defaults


def _whole_as_int(value: Any, name: str) -> Any:
    # Some writers of JSON put every number down as 50.0.
    is_whole = isinstance(value, float) and value.is_integer()
    return int(value) if is_whole and name in ("top_k", "max_tokens") else value


def _listed(items: Iterable[str]) -> str:
    items = list(items)
    shown = ", ".join(items[:MAX_FAULTS_LISTED])
    left_out = len(items) - MAX_FAULTS_LISTED
    return f"{shown} and {left_out} more" if left_out > 0 else shown
