"""Checkpoints of this package's own: a folder of orbax checkpoints, and what else a model needs.

Tensors stand there one by one under Hugging Face's names, neither fused nor quantised: what they
are fused into depends on the mesh, and so the same folder serves every mesh. A process reads the
slices that its devices need (`paged_jax.array_folder` says how, and how a damaged or unfinished
folder is found out). Beside them lie the model's sizes, its end tokens, its advice on sampling and
its tokenizer.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm.auto import tqdm

from paged_jax.array_folder import ArrayFolder, ArrayFolderError, Index
from paged_jax.array_folder_writer import ArrayFolderWriter
from paged_jax.models.checkpoint import Checkpoint, check_tensors, check_token_id
from paged_jax.models.config import GenerationInfo, ModelConfig, ModelLoadError, RopeConfig
from paged_jax.models.params import ParamSpec, list_tensors
from paged_jax.models.registry import MODELS, model_module
from paged_jax.sampling_params import SamplingParams

KIND = "model checkpoint"
CHECKPOINT_DTYPES = ("float32", "bfloat16", "float16")
GGUF_TOKENIZER_FILE = "tokenizer_gguf.json"

# Of a Hugging Face folder, what `Tokenizer.from_folder` reads.
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
)


def save_checkpoint(
    path: str | os.PathLike[str],
    source: Checkpoint,
    *,
    dtype: str = "auto",
    tokenizer_folder: Path | None = None,
    metadata: dict[str, Any] | None = None,
    use_tqdm: bool = True,
) -> int:
    """Writes a model as an orbax checkpoint that `load_model` and `LLM` take.

    Host memory stays near twice one tensor's, or 130 MB if that is more. A process that dies
    half-way leaves `<path>.partial`, which is never taken for a checkpoint and is deleted by the
    next attempt.

    Args:
        path: the folder to be made.
        source: an opened checkpoint of any format, see `loader.open_model`; or a model in memory,
            by `loader.as_checkpoint`.
        dtype: "float32", "bfloat16" or "float16", of the tensors that take the model's dtype (norms
            are float32 always). "auto" is the source's own, or bfloat16 if that is quantised.
        tokenizer_folder: whose tokenizer files are copied; None where the source carries its
            tokenizer itself, or there is none.
        metadata: notes of the user's, of JSON's types; `read_metadata` gives them back.
        use_tqdm: show a progress bar.
    Returns: the bytes of all tensors.
    Raises:
        FileExistsError: there is something at path.
        ValueError: dtype is none of those, or several processes of `jax.distributed` write it.
        ModelLoadError: the source cannot be read.
    """
    if jax.process_count() > 1:
        raise ValueError(
            f"jax.process_count()={jax.process_count()}: a checkpoint is written by one process, "
            "without jax.distributed.initialize"
        )
    if dtype not in ("auto", *CHECKPOINT_DTYPES):
        raise ValueError(f"dtype={dtype!r}: use 'auto' or one of {CHECKPOINT_DTYPES}")
    if dtype == "auto":
        dtype = source.stored_dtype if source.stored_dtype in CHECKPOINT_DTYPES else "bfloat16"
    dtypes = _tensor_dtypes(source.config, dtype)
    specs = model_module(source.config).param_specs(source.config)
    total = sum(np.prod(t.shape) * dtypes[t.name].itemsize for t in list_tensors(specs))
    with ArrayFolderWriter(path, KIND) as writer:
        bar = tqdm(total=int(total), unit="B", unit_scale=True, disable=not use_tqdm)
        for tensor, own in zip(list_tensors(specs), list_tensors(source.specs), strict=True):
            values = source.read(own.name, dtypes[tensor.name])
            writer.add(tensor.name, values)
            bar.update(values.nbytes)
            del values  # Else it would stay while the next one is read.
        bar.close()
        _copy_tokenizer(writer.folder, source, tokenizer_folder)
        writer.commit(
            {
                "config": dataclasses.asdict(source.config),
                "dtype": dtype,
                "generation": dataclasses.asdict(source.generation),
                "metadata": metadata or {},
            }
        )
        return writer.num_bytes


def open_orbax(path: str | os.PathLike[str]) -> Checkpoint:
    """Opens what `save_checkpoint` wrote, and compares all its tensors with the model's.

    Raises:
        FileNotFoundError: there is nothing at path.
        ModelLoadError: the checkpoint is unfinished, damaged, or of something else; a tensor is
            missing, misshapen, unexpected or of another dtype than it should be. Damage within a
            file is found when `read` comes to it, which raises then, naming the tensor.
    """
    folder = _open(path)
    content = folder.content
    try:
        config = _read_config(content["config"])
        dtype, generation = content["dtype"], _read_generation(folder.path, content, config)
    except (KeyError, TypeError, ValueError) as error:
        raise ModelLoadError(
            f"{folder.path}: its description does not make a model ({error}); convert it again, "
            "with this version of paged-jax"
        ) from error
    specs = MODELS[config.architecture].param_specs(config)
    found = {name: stored.shape for name, stored in folder.arrays.items()}
    check_tensors(folder.path, found, specs, is_unused=lambda name: False)
    _check_dtypes(folder, _tensor_dtypes(config, dtype))

    def read(name: str, dtype: np.dtype, index: Index | None = None) -> np.ndarray:
        try:
            return folder.read(name, dtype, index)
        except ArrayFolderError as error:
            raise ModelLoadError(str(error)) from error

    return Checkpoint(
        config=config,
        generation=generation,
        specs=specs,
        stored_dtype=dtype,
        tokenizer_metadata=_read_gguf_tokenizer(folder.path / GGUF_TOKENIZER_FILE),
        read=read,
    )


def read_metadata(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The notes that `save_checkpoint` was given. Raises: as `open_orbax`."""
    return _open(path).content.get("metadata", {})


def _open(path: str | os.PathLike[str]) -> ArrayFolder:
    try:
        return ArrayFolder(path, KIND)
    except ArrayFolderError as error:
        raise ModelLoadError(str(error)) from error


def _tensor_dtypes(config: ModelConfig, dtype: str) -> dict[str, np.dtype]:
    """The dtype in which each tensor is stored."""
    specs = model_module(config).param_specs(config)
    params = jax.tree.leaves(specs, is_leaf=lambda node: isinstance(node, ParamSpec))
    return {t.name: jnp.dtype(spec.dtype or dtype) for spec in params for t in spec.tensors}


def _check_dtypes(folder: ArrayFolder, wanted: dict[str, np.dtype]) -> None:
    for name, stored in folder.arrays.items():
        if stored.dtype != wanted[name]:
            raise ModelLoadError(
                f"{folder.path}: tensor {name!r} is stored as {stored.dtype}, and the checkpoint "
                f"says {wanted[name]}: convert it again"
            )


def _copy_tokenizer(target: Path, source: Checkpoint, folder: Path | None) -> None:
    if source.tokenizer_metadata is not None:
        text = json.dumps(source.tokenizer_metadata, default=list)  # packed strings
        (target / GGUF_TOKENIZER_FILE).write_text(text, encoding="utf-8")
    elif folder is not None:
        for name in _TOKENIZER_FILES:
            if (folder / name).is_file():
                shutil.copyfile(folder / name, target / name)


def _read_gguf_tokenizer(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelLoadError(
            f"{path}: not valid JSON ({error}); convert the model again"
        ) from error


def _read_config(fields: dict[str, Any]) -> ModelConfig:
    rope = dict(fields["rope"])
    if rope.get("divisors") is not None:
        rope["divisors"] = tuple(rope["divisors"])
    config = ModelConfig(**{**fields, "rope": RopeConfig(**rope)})
    model_module(config)
    return config


def _read_generation(path: Path, content: dict[str, Any], config: ModelConfig) -> GenerationInfo:
    fields = content["generation"]
    eos, bos = tuple(fields["eos_token_ids"]), fields["bos_token_id"]
    for name, ids in (("eos_token_ids", eos), ("bos_token_id", () if bos is None else (bos,))):
        for token_id in ids:
            check_token_id(path, name, token_id, config.vocab_size)
    SamplingParams(**fields["defaults"])  # Raises here, not at the first request.
    return GenerationInfo(eos_token_ids=eos, bos_token_id=bos, defaults=fields["defaults"])
