"""Hugging Face folders and hub ids: round trips, configuration forms, and every refusal."""

import json
import logging

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
from paged_jax.sampling_params import SamplingParams

CONFIG = model_files.tiny_config()
TENSORS = model_files.random_tensors(CONFIG)


def expected_params(config, tensors, dtype="float32"):
    return params.load_params(
        llama.param_specs(config),
        lambda name, dtype, index=None: tensors[name][index or ...].astype(dtype),
        dtype,
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


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        ({"max_new_tokens": 256, "min_p": 0.05}, {"max_tokens": 256, "min_p": 0.05}),
        ({"top_k": 50.0, "max_new_tokens": 8.0}, {"top_k": 50, "max_tokens": 8}),
        ({"top_k": -1, "temperature": 1}, {"top_k": 0, "temperature": 1.0}),
        ({"do_sample": True, "temperature": 0.6}, {"temperature": 0.6}),
        ({"do_sample": False}, {"temperature": 0.0}),
        (
            {"do_sample": False, "temperature": 0.9, "top_p": 0.5, "top_k": 9, "max_new_tokens": 7},
            {"temperature": 0.0, "max_tokens": 7},
        ),
        (
            {"typical_p": 1.0, "num_beams": 1, "suppress_tokens": [], "max_length": 4096},
            {},
        ),
        (dict.fromkeys(("do_sample", "temperature", "max_new_tokens", "repetition_penalty")), {}),
    ],
)
def test_generation_defaults_make_sampling_params(tmp_path, caplog, generation, expected):
    defaults = load_model(write(tmp_path, generation=generation)).generation_defaults
    assert defaults == expected
    assert all(type(defaults[name]) is type(value) for name, value in expected.items())
    params = SamplingParams(**defaults)
    assert all(getattr(params, name) == value for name, value in expected.items())
    assert not caplog.records


def test_advice_that_cannot_be_followed_is_left_out_with_one_warning(tmp_path, caplog):
    generation = {"temperature": 0.6, "repetition_penalty": 1.1, "num_beams": 4, "typical_p": 1.0}
    with caplog.at_level(logging.WARNING, logger="paged_jax"):
        loaded = load_model(write(tmp_path, generation=generation))
    assert SamplingParams(**loaded.generation_defaults).temperature == 0.6
    assert "repetition_penalty" not in loaded.generation_defaults
    (record,) = caplog.records
    for part in ("generation_config.json", "repetition_penalty=1.1", "num_beams=4"):
        assert part in record.getMessage()
    assert "typical_p" not in record.getMessage()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 5.0),
        ("temperature", -0.1),
        ("temperature", "hot"),
        ("temperature", True),
        ("temperature", [0.5]),
        ("temperature", float("nan")),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_k", 50.5),
        ("top_k", -2),
        ("top_k", "50"),
        ("min_p", 2),
        ("max_new_tokens", 0),
        ("max_new_tokens", float("inf")),
        ("repetition_penalty", "high"),
        ("repetition_penalty", 0.0),
        ("do_sample", "false"),
        ("do_sample", 0),
    ],
)
def test_sampling_defaults_out_of_range_are_named(tmp_path, field, value):
    folder = write(tmp_path, generation={field: value})
    with pytest.raises(ModelLoadError) as caught:
        load_model(folder)
    for part in ("generation_config.json", f"{field}={value!r}", "must be", "correct it"):
        assert part in str(caught.value)


@pytest.mark.parametrize("value", [True, -1, 96, 2.0, "</s>", [2, -1], [2, True], [[2]], [None]])
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_eos_token_ids_outside_the_vocabulary_refused(tmp_path, file, value):
    where = "config_overrides" if file == "config.json" else "generation"
    folder = write(tmp_path, **{where: {"eos_token_id": value}})
    with pytest.raises(
        ModelLoadError, match=rf"tiny.{file}: eos_token_id: the token id .* from 0 to 95, .*correct"
    ):
        load_model(folder)


@pytest.mark.parametrize("value", [True, -1, 96, "<s>", [1]])
def test_bos_token_id_outside_the_vocabulary_refused(tmp_path, value):
    with pytest.raises(ModelLoadError, match=r"config.json: bos_token_id: the token id .* 95"):
        load_model(write(tmp_path, config_overrides={"bos_token_id": value}))


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
        ({"rope_theta": "10000"}, "rope_theta='10000' must be one float"),
        ({"rope_theta": [10000.0]}, r"rope_theta=\[10000.0\] must be one float"),
        ({"rope_theta": float("inf")}, "rope_theta=inf must be one finite float"),
        ({"rope_theta": 10**400}, "rope_theta=10*0 must be one finite float"),
        ({"rope_theta": -1.0}, "rope.theta=-1.0 must be a finite number above 0"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps='1e-5' must lie between 0 and 1"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings='false' must be True or False"),
        ({"architectures": [["LlamaForCausalLM"]]}, r"architectures=\[\['Llama.* is not supported"),
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


@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "model.safetensors.index.json"]
)
@pytest.mark.parametrize(
    "content",
    ['{"a": ' + "[" * 200_000 + "]" * 200_000 + "}", '{"a": ' + "9" * 5000 + "}"],
    ids=["nested", "digits"],
)
def test_extreme_json_named(tmp_path, name, content):
    folder = write(tmp_path, num_shards=2)
    (folder / name).write_text(content)
    with pytest.raises(ModelLoadError, match=f"{name}: not valid JSON .*fetch it again"):
        load_model(folder)


@pytest.mark.parametrize("value", [["model.safetensors"], 5, None, True, {}, "", "..", ".", "a/b"])
def test_weight_map_without_file_names_refused(tmp_path, value):
    index = write(tmp_path, num_shards=2) / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    index.write_text(json.dumps({"weight_map": weight_map | {"model.norm.weight": value}}))
    with pytest.raises(ModelLoadError, match=r"index.json: weight_map\['model.norm.weight'\]=.*"):
        load_model(index.parent)


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
    refuse(weight_map | {"model.norm.weight": "x" * 5000}, "names x*, which is missing")
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
