"""Llama weights and configuration from a Hugging Face folder: config.json and safetensors."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from paged_jax.models.checkpoint import (
    Checkpoint,
    check_tensors,
    check_token_id,
    sampling_defaults,
)
from paged_jax.models.config import GenerationInfo, ModelConfig, ModelLoadError, RopeConfig
from paged_jax.models.registry import MODELS

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
STORED_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}

# Fields of config.json that would change the model, with the values under which they do not.
NEUTRAL_FIELDS = {
    "hidden_act": ("silu", "swish"),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "pretraining_tp": (1,),
    "partial_rotary_factor": (1.0,),
    "quantization_config": (),
}

# Fields of generation_config.json that are sampling defaults, by the name SamplingParams has for
# them; and those that it has none for, with the values under which they change nothing.
SAMPLING_NAMES = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
OTHER_SAMPLING_FIELDS = {
    "typical_p": 1.0,
    "top_h": None,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "penalty_alpha": 0.0,
    "guidance_scale": 1.0,
    "encoder_repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "exponential_decay_length_penalty": None,
    "num_beams": 1,
    "min_length": 0,
    "min_new_tokens": 0,
    "stop_strings": None,
    "bad_words_ids": None,
    "sequence_bias": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
}


def open_folder(path: str | os.PathLike[str]) -> Checkpoint:
    """Opens a folder and compares all its tensors with the model its config.json describes.

    Raises:
        FileNotFoundError: no config.json.
        ModelLoadError: a file is corrupt; the architecture, a setting, a RoPE kind or a tensor
            type is not supported; a tensor is missing, misshapen or unexpected; a token id or a
            sampling default is out of range; there are no safetensors.
    """
    folder = Path(path)
    raw = _read_json(folder / "config.json")
    config = _read_config(folder / "config.json", raw)
    specs = MODELS[config.architecture].param_specs(config)
    reader = _SafetensorsReader(folder)
    check_tensors(
        folder,
        reader.shapes(),
        specs,
        is_unused=lambda name: _is_unused(name, config.tie_word_embeddings),
    )
    return Checkpoint(
        config=config,
        generation=_read_generation(folder, raw, config.vocab_size),
        specs=specs,
        stored_dtype=reader.stored_dtype("model.embed_tokens.weight"),
        tokenizer_metadata=None,
        read=reader.read,
    )


def read_config(path: str | os.PathLike[str]) -> ModelConfig:
    """The model that a config.json describes, or that of the folder it is in; weights apart.

    Raises:
        FileNotFoundError: there is no such file.
        ModelLoadError: it is broken, or describes a model that is not supported.
    """
    path = Path(path)
    path = path / "config.json" if path.is_dir() else path
    return _read_config(path, _read_json(path))


def _is_unused(name: str, tied: bool) -> bool:
    # Early conversions stored each layer's inverse frequencies, which follow from the
    # configuration; a tied model may be saved with its output matrix once more.
    return name.endswith("rotary_emb.inv_freq") or (tied and name == "lm_head.weight")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # the latter when nested too deeply
        raise ModelLoadError(f"{path}: not valid JSON ({error}); fetch it again") from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"{path}: holds a JSON {type(content).__name__}, expected an object")
    return content


def _read_config(path: Path, raw: dict[str, Any]) -> ModelConfig:
    for field, neutral in NEUTRAL_FIELDS.items():
        value = raw.get(field)
        if value is not None and value not in neutral:
            wanted = " or ".join(map(repr, neutral)) or "a checkpoint without it"
            raise ModelLoadError(f"{path}: {field}={value!r} is not supported: use {wanted}")
    num_heads = _require(path, raw, "num_attention_heads")
    hidden_size = _require(path, raw, "hidden_size")
    head_dim = raw.get("head_dim")
    if head_dim is None:
        if num_heads < 1 or hidden_size % num_heads:
            raise ModelLoadError(
                f"{path}: num_attention_heads={num_heads} must divide hidden_size={hidden_size}, "
                "or head_dim be given"
            )
        head_dim = hidden_size // num_heads
    try:
        return ModelConfig(
            architecture=_read_architecture(path, raw),
            vocab_size=_require(path, raw, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_require(path, raw, "intermediate_size"),
            num_layers=_require(path, raw, "num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=_get(raw, "num_key_value_heads", num_heads),
            head_dim=head_dim,
            rms_norm_eps=_get(raw, "rms_norm_eps", 1e-6),
            max_position_embeddings=_get(raw, "max_position_embeddings", 2048),
            tie_word_embeddings=_get(raw, "tie_word_embeddings", False),
            rope=_read_rope(path, raw),
        )
    except ModelLoadError:
        raise
    except ValueError as error:
        raise ModelLoadError(f"{path}: {error}") from error


def _read_architecture(path: Path, raw: dict[str, Any]) -> str:
    known = {module.HF_ARCHITECTURE: name for name, module in MODELS.items()}
    found = raw.get("architectures")
    if isinstance(found, list) and len(found) == 1 and isinstance(found[0], str):
        if found[0] in known:
            return known[found[0]]
    raise ModelLoadError(
        f"{path}: architectures={found!r} is not supported: use a model of {sorted(known)}"
    )


def _read_rope(path: Path, raw: dict[str, Any]) -> RopeConfig:
    """From the newer field rope_parameters, or the older rope_theta and rope_scaling."""
    field = "rope_parameters" if raw.get("rope_parameters") is not None else "rope_scaling"
    scaling = _get(raw, field, {})
    if not isinstance(scaling, dict):
        raise ModelLoadError(f"{path}: {field}={scaling!r} must be an object")
    theta = _get(scaling, "rope_theta", _get(raw, "rope_theta", 10000.0))
    theta = _require(path, {"rope_theta": theta}, "rope_theta", float)
    # "type" is the older name of "rope_type".
    kind = _get(scaling, "rope_type", _get(scaling, "type", "default"))
    if scaling.get("partial_rotary_factor") not in (None, 1.0):
        raise ModelLoadError(f"{path}: {field}.partial_rotary_factor is not supported: use 1.0")
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(theta=theta, kind=kind, factor=_require(path, scaling, "factor", float))
    if kind == "llama3":
        return RopeConfig(
            theta=theta,
            kind=kind,
            factor=_require(path, scaling, "factor", float),
            low_freq_factor=_require(path, scaling, "low_freq_factor", float),
            high_freq_factor=_require(path, scaling, "high_freq_factor", float),
            original_max_position_embeddings=_require(
                path, scaling, "original_max_position_embeddings"
            ),
        )
    raise ModelLoadError(
        f"{path}: {field}.rope_type={kind!r} is not supported: use 'default', 'linear' or 'llama3'"
    )


def _read_generation(folder: Path, raw: dict[str, Any], vocab_size: int) -> GenerationInfo:
    """From generation_config.json and, for token ids that it does not name, config.json."""
    path = folder / "generation_config.json"
    generation = _read_json(path) if path.exists() else {}

    def locate(field: str) -> tuple[Path, Any]:
        if generation.get(field) is not None:
            return path, generation[field]
        return folder / "config.json", raw.get(field)

    eos_path, eos = locate("eos_token_id")
    eos = [] if eos is None else eos if isinstance(eos, list) else [eos]
    eos = [check_token_id(eos_path, "eos_token_id", token_id, vocab_size) for token_id in eos]
    bos_path, bos = locate("bos_token_id")
    if bos is not None:
        check_token_id(bos_path, "bos_token_id", bos, vocab_size)
    return GenerationInfo(
        eos_token_ids=tuple(dict.fromkeys(eos)),
        bos_token_id=bos,
        defaults=_read_sampling_defaults(path, generation),
    )


def _read_sampling_defaults(path: Path, generation: dict[str, Any]) -> dict[str, Any]:
    do_sample = generation.get("do_sample")
    if do_sample is not None and not isinstance(do_sample, bool):
        raise ModelLoadError(f"{path}: do_sample={do_sample!r} must be true or false; correct it")
    found = {
        field: generation[field]
        for field in (*SAMPLING_NAMES, *OTHER_SAMPLING_FIELDS)
        if field in generation
    }
    defaults = sampling_defaults(path, found, SAMPLING_NAMES, OTHER_SAMPLING_FIELDS)
    if do_sample is False:
        # Greedy, whatever else the file says about which tokens to draw from.
        for name in ("top_p", "top_k", "min_p"):
            defaults.pop(name, None)
        defaults["temperature"] = 0.0
    return defaults


def _get(fields: dict[str, Any], name: str, default: Any) -> Any:
    """A field's value, or the default where it is absent or null."""
    value = fields.get(name)
    return default if value is None else value


def _require(path: Path, fields: dict[str, Any], name: str, kind: type = int) -> Any:
    value: Any = fields.get(name)
    accepted = (int, float) if kind is float else kind
    if not isinstance(value, accepted) or isinstance(value, bool):
        raise ModelLoadError(f"{path}: {name}={value!r} must be one {kind.__name__}")
    # JSON as Python reads it knows inf, nan and whole numbers beyond all floats.
    if kind is float and not abs(value) <= sys.float_info.max:
        raise ModelLoadError(f"{path}: {name}={value!r} must be one finite float")
    return kind(value)


class _SafetensorsReader:
    """The tensors of one folder, memory-mapped, whichever of its files each lies in."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._paths: dict[str, Path] = {}  # by tensor
        self._slices: dict[str, Any] = {}  # by tensor; shape and dtype without the data
        if (folder / INDEX_FILE).exists():
            self._open_shards()
        elif (folder / SINGLE_FILE).exists():
            handle = _open_safetensors(folder / SINGLE_FILE)
            for name in handle.keys():
                self._add(name, folder / SINGLE_FILE, handle)
        else:
            raise _no_weights(folder)

    def _add(self, name: str, path: Path, handle: Any) -> None:
        self._paths[name], self._slices[name] = path, handle.get_slice(name)

    def _open_shards(self) -> None:
        index = self._folder / INDEX_FILE
        weight_map = _read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ModelLoadError(f"{index}: no weight_map in it; fetch it again")
        shards = {}
        for name, file_name in weight_map.items():
            is_name = isinstance(file_name, str) and file_name not in ("", "..")
            if not (is_name and Path(file_name).name == file_name):
                raise ModelLoadError(
                    f"{index}: weight_map[{name!r}]={file_name!r} is not the name of a file "
                    "beside it; fetch it again"
                )
        for file_name in dict.fromkeys(weight_map.values()):
            # Not Path.exists, which raises for a name longer than the system allows.
            if not os.path.isfile(self._folder / file_name):
                raise ModelLoadError(f"{index}: names {file_name}, which is missing; fetch it")
            shards[file_name] = _open_safetensors(self._folder / file_name)
        stored = {file_name: set(shard.keys()) for file_name, shard in shards.items()}
        for name, file_name in weight_map.items():
            if name not in stored[file_name]:
                raise ModelLoadError(
                    f"{index}: names tensor {name} in {file_name}, which does not hold it; "
                    "fetch both again"
                )
            self._add(name, self._folder / file_name, shards[file_name])

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(stored.get_shape()) for name, stored in self._slices.items()}

    def stored_dtype(self, name: str) -> str:
        stored = self._slices[name].get_dtype()
        if stored not in STORED_DTYPES:
            raise ModelLoadError(
                f"{self._folder}: tensor {name!r} has the type {stored}, which is not supported: "
                f"use {', '.join(STORED_DTYPES)}"
            )
        return STORED_DTYPES[stored]

    def read(
        self, name: str, dtype: np.dtype, index: tuple[slice, ...] | None = None
    ) -> np.ndarray:
        """The named tensor, or the part that `index` names, converted to dtype."""
        self.stored_dtype(name)
        # Opened anew, so that the pages that were read do not stay in memory until the last one.
        with _open_safetensors(self._paths[name]) as handle:
            if index is None:
                return handle.get_tensor(name).astype(dtype, copy=False)
            return handle.get_slice(name)[index].astype(dtype, copy=False)


def _open_safetensors(path: Path) -> Any:
    try:
        return safe_open(path, framework="numpy")
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelLoadError(
            f"{path}: corrupt or truncated safetensors file ({error}); fetch it again"
        ) from error


def _no_weights(folder: Path) -> ModelLoadError:
    others = sorted(
        path.name for path in folder.iterdir() if path.suffix in (".bin", ".pth", ".pt", ".msgpack")
    )
    if others:
        return ModelLoadError(
            f"{folder}: weights only as {', '.join(others)}, which is not supported: convert them "
            "to safetensors (transformers: save_pretrained(..., safe_serialization=True))"
        )
    return ModelLoadError(
        f"{folder}: neither {SINGLE_FILE} nor {INDEX_FILE} in it: fetch the model's safetensors"
    )
