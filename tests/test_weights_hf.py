"""Hugging Face folders and hub ids: round trips, configuration forms, and every refusal."""

import json

import huggingface_hub
import jax
import jax.numpy as jnp
import model_files
import numpy as np
import pytest

from paged_jax.models import llama, loader, params
from paged_jax.models.config import ModelLoadError, RopeConfig
from paged_jax.models.loader import FolderSource, load_model
from paged_jax.models.weights_hf import open_folder

CONFIG = model_files.tiny_config()
TENSORS = model_files.random_tensors(CONFIG)


def expected_params(config, tensors, dtype="float32"):
    return params.load_params(
        llama.param_specs(config), lambda name, dtype: tensors[name].astype(dtype), dtype
    )


def write(tmp_path, **options):
    return model_files.write_hf_folder(tmp_path / "tiny", CONFIG, TENSORS, **options)


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("stored", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_round_trip(tmp_path, num_shards, stored, tied):
    config = model_files.tiny_config(tie_word_embeddings=tied, rope=model_files.LLAMA3_ROPE)
    tensors = model_files.random_tensors(config)
    folder = model_files.write_hf_folder(
        tmp_path / "tiny", config, tensors, dtype=stored, num_shards=num_shards
    )
    rounded = {
        name: values.astype(model_files.NUMPY_DTYPES[stored]) for name, values in tensors.items()
    }
    for dtype in ("float32", "bfloat16"):
        loaded = load_model(folder, dtype=dtype)
        assert loaded.config == config
        expected = expected_params(config, rounded, dtype)
        params.check_params(loaded.params, llama.param_specs(config), dtype)
        jax.tree.map(np.testing.assert_array_equal, loaded.params, expected)
    assert loaded.tokenizer_source == FolderSource(path=folder)
    assert loaded.name == "tiny"


@pytest.mark.parametrize(
    ("backend", "stored", "expected"),
    [
        ("cpu", "BF16", "float32"),
        ("cpu", "F16", "float32"),
        ("tpu", "F32", "float32"),
        ("tpu", "F16", "bfloat16"),
        ("gpu", "BF16", "bfloat16"),
    ],
)
def test_auto_dtype(tmp_path, monkeypatch, backend, stored, expected):
    folder = write(tmp_path, dtype=stored)
    monkeypatch.setattr(loader.jax, "default_backend", lambda: backend)
    assert load_model(folder, dtype="auto").params.embed.dtype == jnp.dtype(expected)


LLAMA3_JSON = model_files.rope_scaling_json(model_files.LLAMA3_ROPE) or {}


@pytest.mark.parametrize(
    ("fields", "rope"),
    [
        ({"rope_theta": None}, RopeConfig(theta=10000.0)),
        ({"rope_theta": 5e5}, RopeConfig(theta=5e5)),
        (
            {"rope_scaling": {"type": "linear", "factor": 2}},
            RopeConfig(kind="linear", factor=2.0),
        ),
        ({"rope_theta": 5e5, "rope_scaling": LLAMA3_JSON}, model_files.LLAMA3_ROPE),
        (
            {"rope_theta": None, "rope_parameters": {"rope_theta": 5e5, **LLAMA3_JSON}},
            model_files.LLAMA3_ROPE,
        ),
        (
            {"rope_theta": None, "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
            RopeConfig(theta=5e5),
        ),
    ],
)
def test_rope_forms(tmp_path, fields, rope):
    assert open_folder(write(tmp_path, config_overrides=fields)).config.rope == rope


def test_optional_fields_take_their_defaults(tmp_path):
    config = model_files.tiny_config(num_kv_heads=4, tie_word_embeddings=False, rms_norm_eps=1e-6)
    absent = ("num_key_value_heads", "head_dim", "tie_word_embeddings", "rms_norm_eps")
    folder = model_files.write_hf_folder(
        tmp_path / "tiny",
        config,
        model_files.random_tensors(config),
        config_overrides=dict.fromkeys(absent),
    )
    assert open_folder(folder).config == config


@pytest.mark.parametrize(
    ("config_overrides", "generation", "eos", "bos"),
    [
        ({}, None, (2,), 1),
        ({"eos_token_id": [2, 3]}, None, (2, 3), 1),
        ({"eos_token_id": None, "bos_token_id": None}, None, (), None),
        ({}, {"eos_token_id": [7, 8], "bos_token_id": 0}, (7, 8), 0),
        ({}, {"eos_token_id": 9}, (9,), 1),
        ({}, {"temperature": 0.5}, (2,), 1),
    ],
)
def test_generation_info(tmp_path, config_overrides, generation, eos, bos):
    loaded = load_model(write(tmp_path, config_overrides=config_overrides, generation=generation))
    assert (loaded.eos_token_ids, loaded.bos_token_id) == (eos, bos)


def test_generation_defaults_are_the_sampling_fields(tmp_path):
    generation = {"temperature": 0.6, "top_p": 0.9, "top_k": None, "transformers_version": "5"}
    loaded = load_model(write(tmp_path, generation=generation))
    assert loaded.generation_defaults == {"temperature": 0.6, "top_p": 0.9}


def test_harmless_extra_tensors_are_left_out(tmp_path):
    extra = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32),
        "lm_head.weight": TENSORS["model.embed_tokens.weight"].copy(),
    }
    folder = model_files.write_hf_folder(tmp_path / "tiny", CONFIG, TENSORS | extra)
    assert load_model(folder).params.lm_head is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architectures": ["Qwen2ForCausalLM"]}, r"architectures=\['Qwen2ForCausalLM'\]"),
        ({"architectures": None}, "architectures=None is not supported"),
        ({"attention_bias": True}, "attention_bias=True is not supported: use False"),
        ({"mlp_bias": True}, "mlp_bias=True"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported: use 'silu'"),
        ({"pretraining_tp": 2}, "pretraining_tp=2"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config={'quant_method"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_scaling.rope_type='yarn'"),
        ({"rope_scaling": {"type": "dynamic"}}, "rope_scaling.rope_type='dynamic'"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_parameters.rope_type='longrope'"),
        ({"rope_scaling": {"type": "linear"}}, "factor=None must be one float"),
        ({"rope_scaling": "linear"}, "rope_scaling='linear' must be an object"),
        ({"rope_scaling": {"type": "linear", "factor": 0.0}}, "rope.factor=0.0"),
        ({"hidden_size": None}, "hidden_size=None must be one int"),
        ({"num_key_value_heads": 3}, "num_kv_heads=3 must divide num_heads=4"),
        ({"head_dim": None, "num_attention_heads": 5}, "num_attention_heads=5 must divide"),
        ({"eos_token_id": "</s>"}, "token id '</s>'"),
        ({"num_hidden_layers": 3}, "missing tensors: model.layers.2.*and 1 more; the file"),
        ({"num_hidden_layers": 1}, "does not use: model.layers.1.input_layernorm.weight"),
        (
            {"vocab_size": 90},
            r"misshapen tensors: model.embed_tokens.weight has shape \[96, 32\], "
            r"expected \[90, 32\]",
        ),
    ],
)
def test_config_refused(tmp_path, fields, message):
    with pytest.raises(ModelLoadError, match=f"tiny.*: .*{message}"):
        load_model(write(tmp_path, config_overrides=fields))


def test_unsupported_tensor_type_refused(tmp_path):
    tensors = TENSORS | {"model.layers.0.mlp.up_proj.weight": np.ones((64, 32), np.int8)}
    folder = model_files.write_hf_folder(tmp_path / "tiny", CONFIG, tensors)
    with pytest.raises(ModelLoadError, match=r"'model.layers.0.mlp.up_proj.weight' .* type I8"):
        load_model(folder)


@pytest.mark.parametrize("damage", ["header", "truncated", "empty", "length"])
def test_corrupt_safetensors_named(tmp_path, damage):
    path = write(tmp_path) / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(
        {
            "header": content[:8] + b"\xff" * 40 + content[48:],
            "truncated": content[:-1000],
            "empty": b"",
            "length": b"\xff" * 8 + content[8:],
        }[damage]
    )
    with pytest.raises(ModelLoadError, match=r"model.safetensors: corrupt or truncated"):
        load_model(path.parent)


def test_corrupt_json_named(tmp_path):
    folder = write(tmp_path)
    (folder / "generation_config.json").write_text("{")
    with pytest.raises(ModelLoadError, match=r"generation_config.json: not valid JSON"):
        load_model(folder)
    (folder / "config.json").write_text("[]")
    with pytest.raises(ModelLoadError, match=r"config.json: holds a JSON list"):
        load_model(folder)


def test_broken_shards_named(tmp_path):
    folder = write(tmp_path, num_shards=2)
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    shard = folder / "model-00002-of-00002.safetensors"

    def refuse(weight_map, message):
        index.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(ModelLoadError, match=message):
            load_model(folder)

    weight_map = content["weight_map"]
    swapped = weight_map | {"model.norm.weight": weight_map["model.embed_tokens.weight"]}
    refuse(swapped, "names tensor model.norm.weight in model-00001.*does not hold it")
    outside = weight_map | {"model.norm.weight": "../other.safetensors"}
    refuse(outside, "'../other.safetensors' is not the name of a file beside it")
    refuse(None, "no weight_map")
    shard.unlink()
    refuse(weight_map, f"names {shard.name}, which is missing")


def test_only_pickled_weights_refused(tmp_path):
    folder = write(tmp_path)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match=r"only as pytorch_model.bin.*convert them"):
        load_model(folder)
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(ModelLoadError, match=r"neither model.safetensors nor"):
        load_model(folder)


def test_nothing_there_names_what_was_tried(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no model at .*absent.gguf: give a .gguf file"):
        load_model(tmp_path / "absent.gguf")
    with pytest.raises(FileNotFoundError, match=r"no model at .*models/absent.gguf: give"):
        load_model("models/absent.gguf")


def test_hub_id(tmp_path, monkeypatch):
    folder = write(tmp_path)
    asked = {}

    def snapshot_download(repo, **options):
        asked.update(repo=repo, **options)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    loaded = load_model("some-org/some.model-1B", revision="v2")
    assert loaded.name == "some-org/some.model-1B"
    assert (asked["repo"], asked["revision"]) == ("some-org/some.model-1B", "v2")
    assert "*.safetensors" in asked["allow_patterns"]
    (folder / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"no config.json; .*'org/name:<file>.gguf'"):
        load_model("org/name")


def test_hub_gguf_file(tmp_path, monkeypatch):
    path = model_files.write_gguf(tmp_path / "tiny.gguf", CONFIG, TENSORS)
    asked = []

    def hf_hub_download(repo, file, revision):
        asked.append((repo, file, revision))
        return str(path)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", hf_hub_download)
    assert load_model("org/name:q4/tiny.gguf").name == "org/name:q4/tiny.gguf"
    assert asked == [("org/name", "q4/tiny.gguf", None)]


def test_hub_failure_names_both_attempts(monkeypatch):
    def snapshot_download(repo, **options):
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    message = r"no model at .*org/name, and 'org/name' could not be fetched .*no network"
    with pytest.raises(FileNotFoundError, match=message):
        load_model("org/name")


def test_arguments_refused(tmp_path):
    folder = write(tmp_path)
    with pytest.raises(ValueError, match="dtype='float16' is not supported"):
        load_model(folder, dtype="float16")
    with pytest.raises(ValueError, match="revision='main' is for hub ids"):
        load_model(folder, revision="main")
