"""load_model: a model by path or hub id, in whichever format it is stored."""

import dataclasses
import os
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np

from paged_jax.array_folder import is_array_folder
from paged_jax.models.checkpoint import Checkpoint
from paged_jax.models.config import GenerationInfo, ModelConfig
from paged_jax.models.params import (
    DTYPES,
    ParamSpec,
    check_quantization,
    load_params,
    spread_params,
    tensors_of,
)
from paged_jax.models.partition import TENSOR_AXIS, split_config
from paged_jax.models.quantized import Quantization
from paged_jax.models.registry import model_module
from paged_jax.models.weights_gguf import open_gguf
from paged_jax.models.weights_hf import open_folder
from paged_jax.models.weights_orbax import open_orbax
from paged_jax.tokenizer import Tokenizer

# org/name, or org/name:file.gguf for one file of a repository.
HUB_ID = re.compile(r"(?P<repo>[\w-][\w.-]*/[\w.-]+)(:(?P<file>[^:]+\.gguf))?")
HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "*.model"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class GgufSource:
    """A model in one GGUF file. metadata: its `tokenizer.*` entries as plain Python values."""

    path: Path
    metadata: dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class FolderSource:
    """A folder, Hugging Face's or a checkpoint's, tokenizer.json and chat template in it."""

    path: Path


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model ready to run.

    config: its sizes.
    params: the architecture's pytree of weights on the default device, such as LlamaParams.
    dtype: "float32" or "bfloat16", of the weights (norm weights are always float32) and of what
        is computed with them.
    quantization: "int8" or "int8_weight_only" where matrices are stored in int8, "int4" in int4,
        see `models/quantized.py` and `models/int4.py`; None where not.
    eos_token_ids: any of these ends a text; empty where the checkpoint names none.
    bos_token_id: None where the checkpoint names none.
    generation_defaults: the checkpoint's advice on sampling (generation_config.json, or a GGUF
        file's general.sampling.*), as keyword arguments that SamplingParams accepts. It is advice,
        not a request: what the engine cannot honour is left out with a logged warning.
    tokenizer_source: where the tokenizer and chat template are.
    name: what the model was asked for as, without folders.
    mesh: the devices that the weights are spread over, whole on each row of the axis "data" and cut
        over the axis "tensor" (`models/partition.py`); None: they are on one device.
    """

    config: ModelConfig
    params: Any
    dtype: str
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    generation_defaults: dict[str, Any]
    tokenizer_source: GgufSource | FolderSource
    name: str
    quantization: Quantization | None = None
    mesh: jax.sharding.Mesh | None = None

    def load_tokenizer(self) -> Tokenizer:
        """The model's tokenizer, chat template included.

        Raises: FileNotFoundError, ValueError as `Tokenizer.from_folder` and `from_gguf`.
        """
        if isinstance(self.tokenizer_source, GgufSource):
            return Tokenizer.from_gguf(self.tokenizer_source.metadata)
        return Tokenizer.from_folder(self.tokenizer_source.path)


def load_model(
    model: str | os.PathLike[str],
    *,
    dtype: str = "auto",
    quantization: Quantization | None = None,
    revision: str | None = None,
    mesh: jax.sharding.Mesh | None = None,
) -> LoadedModel:
    """Loads configuration and weights of a model.

    Args:
        model: a .gguf file; a Hugging Face folder, or one that holds just a .gguf file; an orbax
            checkpoint of `save_checkpoint`; a hub id "org/name"; or one file of a hub repository,
            "org/name:file.gguf".
        dtype: "float32", "bfloat16" or "auto". Auto is float32 on CPU, where bfloat16 is slower;
            elsewhere float32 for a float32 checkpoint and bfloat16 for any other.
        quantization: "int8" keeps matrices in int8 and quantises activations on the way, whatever
            the checkpoint's own format; "int8_weight_only" leaves the activations alone; "int4"
            keeps a GGUF file's Q4_1 and Q4_0 tensors as they are and rounds others; None
            quantises nothing.
        revision: branch, tag or commit, for hub ids only.
        mesh: devices to spread the weights over, as `paged_jax.sharding.make_mesh` makes it; each
            process reads only what its own devices hold. None: one device.
    Raises:
        FileNotFoundError: nothing by this name here or on the hub.
        ImportError: a GGUF file without the gguf package.
        ModelLoadError: the checkpoint is broken or of a kind that is not supported.
        ValueError: dtype, quantization or revision is not one of those above, or the model cannot
            be cut over so many devices.
    """
    check_quantization(quantization)
    if dtype not in (*DTYPES, "auto"):
        raise ValueError(f"dtype={dtype!r} is not supported: use 'auto' or one of {DTYPES}")
    checkpoint, path, name = open_model(model, revision)
    source: GgufSource | FolderSource = FolderSource(path=path)
    if checkpoint.tokenizer_metadata is not None:
        source = GgufSource(path=path, metadata=checkpoint.tokenizer_metadata)
    dtype = _choose_dtype(checkpoint) if dtype == "auto" else dtype
    if mesh is not None:
        split_config(checkpoint.config, mesh.shape[TENSOR_AXIS])
    return LoadedModel(
        config=checkpoint.config,
        params=load_params(
            checkpoint.specs,
            checkpoint.read,
            dtype,
            quantization,
            mesh=mesh,
            read_int4=checkpoint.read_int4,
        ),
        dtype=dtype,
        eos_token_ids=checkpoint.generation.eos_token_ids,
        bos_token_id=checkpoint.generation.bos_token_id,
        generation_defaults=checkpoint.generation.defaults,
        tokenizer_source=source,
        name=name,
        quantization=quantization,
        mesh=mesh,
    )


def open_model(
    model: str | os.PathLike[str], revision: str | None = None
) -> tuple[Checkpoint, Path, str]:
    """Opens a model without reading its weights; arguments and errors as of `load_model`.

    Returns: the checkpoint, where it is on this machine, and its name.
    """
    path, name = _locate(model, revision)
    if is_array_folder(path):
        return open_orbax(path), path, name
    return (open_folder(path) if path.is_dir() else open_gguf(path)), path, name


def spread_model(model: LoadedModel, mesh: jax.sharding.Mesh) -> LoadedModel:
    """A model of one device, cut and spread over a mesh as `load_model` does it.

    Raises:
        ValueError: the model is on a mesh already, or quantised (its parts have scales of their
            own), or cannot be cut over so many devices.
    """
    if model.mesh is not None or model.quantization is not None:
        what = f"is on {model.mesh}" if model.mesh else f"has quantization={model.quantization!r}"
        raise ValueError(
            f"the model {what}, and is wanted on {mesh}; load it with load_model(..., mesh=...)"
        )
    split_config(model.config, mesh.shape[TENSOR_AXIS])
    declared = model_module(model.config).param_specs(model.config)
    params = spread_params(model.params, declared, mesh, model.dtype)
    return dataclasses.replace(model, params=params, mesh=mesh)


def as_checkpoint(model: LoadedModel) -> Checkpoint:
    """A model in memory, one that was trained say, for `save_checkpoint`: the model's own dtype.

    Raises: ValueError: its weights are quantised, or spread over a mesh.
    """
    if model.quantization is not None or model.mesh is not None:
        raise ValueError(
            f"quantization={model.quantization!r}, mesh={model.mesh}: load the model without either"
        )
    specs = model_module(model.config).param_specs(model.config)
    is_spec = lambda node: isinstance(node, ParamSpec)
    by_name = {
        tensor.name: (leaf, spec)
        for leaf, spec in zip(
            jax.tree.leaves(model.params), jax.tree.leaves(specs, is_leaf=is_spec), strict=True
        )
        for tensor in spec.tensors
    }

    def read(name: str, dtype: np.dtype, index: tuple[slice, ...] | None = None) -> np.ndarray:
        return tensors_of(*by_name[name])[name][index or ...].astype(dtype, copy=False)

    source = model.tokenizer_source
    return Checkpoint(
        config=model.config,
        generation=GenerationInfo(
            eos_token_ids=model.eos_token_ids,
            bos_token_id=model.bos_token_id,
            defaults=model.generation_defaults,
        ),
        specs=specs,
        stored_dtype=model.dtype,
        tokenizer_metadata=source.metadata if isinstance(source, GgufSource) else None,
        read=read,
    )


def _choose_dtype(checkpoint: Checkpoint) -> str:
    if jax.default_backend() == "cpu" or checkpoint.stored_dtype == "float32":
        return "float32"
    return "bfloat16"


def _locate(model: str | os.PathLike[str], revision: str | None) -> tuple[Path, str]:
    """The local .gguf file or Hugging Face folder that `model` means, and the model's name."""
    path = Path(model).expanduser()
    if path.exists() or is_array_folder(path):
        if revision is not None:
            raise ValueError(f"revision={revision!r} is for hub ids; {path} is here: leave it out")
        path = _gguf_within(path) if path.is_dir() else path
        # Not resolve(): in the hub's cache that would lead to a file named after its hash.
        absolute = Path(os.path.abspath(path))
        return path, absolute.stem if path.is_file() else absolute.name
    match = HUB_ID.fullmatch(os.fspath(model))
    if match is None or (match["file"] is None and match["repo"].endswith(".gguf")):
        raise FileNotFoundError(
            f"no model at {path.absolute()}: give a .gguf file, a Hugging Face folder, or a hub id "
            "such as 'org/name'"
        )
    return _download(match["repo"], match["file"], revision, path), os.fspath(model)


def _gguf_within(folder: Path) -> Path:
    """The folder itself, or the one .gguf file in it if it holds no model in another form."""
    if (folder / "config.json").exists() or is_array_folder(folder):
        return folder
    gguf_files = sorted(folder.glob("*.gguf"))
    if len(gguf_files) == 1:
        return gguf_files[0]
    if gguf_files:
        names = ", ".join(file.name for file in gguf_files)
        raise FileNotFoundError(f"{folder} holds several models: name one of {names}")
    raise FileNotFoundError(
        f"{folder} holds neither a config.json, nor a .gguf file, nor an orbax checkpoint of "
        "scripts/convert_checkpoint.py: give a model's own folder"
    )


def _download(repo: str, file: str | None, revision: str | None, tried: Path) -> Path:
    import huggingface_hub  # slow to import, and only needed here

    try:
        if file is not None:
            return Path(huggingface_hub.hf_hub_download(repo, file, revision=revision))
        folder = huggingface_hub.snapshot_download(
            repo, revision=revision, allow_patterns=HUB_PATTERNS
        )
    except (OSError, ValueError) as error:
        raise FileNotFoundError(
            f"no model at {tried.absolute()}, and {repo!r} could not be fetched from the hub "
            f"({error}): check the name, the network, or log in if the model is gated"
        ) from error
    if not (Path(folder) / "config.json").exists():
        raise FileNotFoundError(
            f"hub repository {repo!r} has no config.json; for one of its GGUF files give "
            f"'{repo}:<file>.gguf'"
        )
    return Path(folder)
