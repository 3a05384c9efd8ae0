"""Orbax checkpoints of models: the same model comes back, on any mesh, and faults are named."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from model_files import (
    LLAMA3_ROPE,
    random_tensors,
    tensor_shapes,
    tiny_config,
    write_gguf,
    write_hf_folder,
)

from paged_jax import array_folder_writer
from paged_jax.array_folder import MANIFEST_FILE
from paged_jax.array_folder_writer import ArrayFolderWriter
from paged_jax.models.config import ModelLoadError, RopeConfig
from paged_jax.models.loader import GgufSource, as_checkpoint, load_model, open_model
from paged_jax.models.weights_orbax import (
    GGUF_TOKENIZER_FILE,
    open_orbax,
    read_metadata,
    save_checkpoint,
)

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(array_folder_writer, "_CHUNK_BYTES", 2048)
    monkeypatch.setattr(array_folder_writer, "_GROUP_BYTES", 1 << 15)


def save(source, path, **options):
    checkpoint, folder, _ = open_model(source)
    folder = folder if folder.is_dir() else None
    return save_checkpoint(path, checkpoint, tokenizer_folder=folder, use_tqdm=False, **options)


@pytest.fixture
def hf_folder(tmp_path):
    config = tiny_config(tie_word_embeddings=False, rope=LLAMA3_ROPE)
    generation = {"eos_token_id": [2, 7], "temperature": 0.5, "top_k": 40}
    return write_hf_folder(
        tmp_path / "hf", config, random_tensors(config), generation=generation, dtype="BF16"
    )


def check_same_params(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_a_checkpoint_loads_as_its_source_does(hf_folder, tmp_path, dtype, quantization):
    save(hf_folder, tmp_path / "saved")
    given = load_model(hf_folder, dtype=dtype, quantization=quantization)
    loaded = load_model(tmp_path / "saved", dtype=dtype, quantization=quantization)
    check_same_params(loaded.params, given.params)
    fields = ("config", "eos_token_ids", "bos_token_id", "generation_defaults", "quantization")
    for field in fields:
        assert getattr(loaded, field) == getattr(given, field), field
    assert loaded.eos_token_ids == (2, 7)
    assert loaded.generation_defaults == {"temperature": 0.5, "top_k": 40}
    assert loaded.name == "saved"


def test_a_gguf_file_with_its_tokenizer(tmp_path):
    config = tiny_config(rope=RopeConfig(divisors=(1.0, 1.5, 2.0, 8.0)))
    tokens = ["<s>", "</s>", "\u0120a", "\U0001f600"]
    write_gguf(
        tmp_path / "m.gguf",
        tiny_config(),
        random_tensors(config),
        tensor_type="Q8_0",
        raw={"rope_freqs.weight": (np.array(config.rope.divisors, np.float32), "F32")},
        metadata={"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.model": "gpt2"},
    )
    save(tmp_path / "m.gguf", tmp_path / "saved", dtype="float32")
    given, loaded = load_model(tmp_path / "m.gguf"), load_model(tmp_path / "saved")
    check_same_params(loaded.params, given.params)
    assert loaded.config == given.config
    assert loaded.config.rope.divisors == config.rope.divisors
    assert isinstance(loaded.tokenizer_source, GgufSource)
    assert isinstance(given.tokenizer_source, GgufSource)
    assert loaded.tokenizer_source.metadata == given.tokenizer_source.metadata
    assert loaded.tokenizer_source.metadata["tokenizer.ggml.tokens"] == tokens
    (tmp_path / "saved" / GGUF_TOKENIZER_FILE).write_text('{"half')
    with pytest.raises(ModelLoadError, match=r"tokenizer_gguf.json: not valid JSON"):
        open_orbax(tmp_path / "saved")


def test_a_model_in_memory(hf_folder, tmp_path):
    model = load_model(hf_folder, dtype="float32")
    trained = jax.tree.map(lambda w: w + 1, model.params)
    model = dataclasses.replace(model, params=trained)
    save_checkpoint(tmp_path / "saved", as_checkpoint(model), use_tqdm=False)
    loaded = load_model(tmp_path / "saved", dtype="float32")
    check_same_params(loaded.params, trained)
    assert loaded.eos_token_ids == (2, 7)
    assert loaded.generation_defaults == {"temperature": 0.5, "top_k": 40}
    with pytest.raises(ValueError, match="quantization='int8', mesh=None: load the model without"):
        as_checkpoint(load_model(hf_folder, quantization="int8"))


def test_dtypes(hf_folder, tmp_path):
    opened = {}
    for dtype in ("auto", "float32", "float16"):
        save(hf_folder, tmp_path / dtype, dtype=dtype)
        opened[dtype] = open_orbax(tmp_path / dtype)
    assert [c.stored_dtype for c in opened.values()] == ["bfloat16", "float32", "float16"]
    name = "model.layers.1.mlp.up_proj.weight"
    values = {d: c.read(name, jnp.dtype("float32")) for d, c in opened.items()}
    np.testing.assert_array_equal(values["auto"], values["float32"])
    np.testing.assert_array_equal(values["float16"], values["float32"].astype(np.float16))
    assert opened["auto"].read(name, jnp.dtype("bfloat16")).dtype == ml_dtypes.bfloat16
    with pytest.raises(ValueError, match="dtype='int8': use 'auto' or one of"):
        save(hf_folder, tmp_path / "x", dtype="int8")
    with pytest.raises(ModelLoadError, match=f"'{name}' is stored as bfloat16 and was asked for a"):
        opened["auto"].read(name, np.dtype(np.int8))


def test_any_mesh_shape_restores_by_slices(hf_folder, tmp_path):
    """As each process of a mesh does: every device's part is the source's."""
    save(hf_folder, tmp_path / "saved", dtype="float32")
    given, opened = open_model(hf_folder)[0], open_orbax(tmp_path / "saved")
    float32 = np.dtype(np.float32)
    for name, shape in tensor_shapes(given.config).items():
        whole = given.read(name, float32)
        for num_parts in (2, 3, 4):
            for dimension, size in enumerate(shape):
                for part in range(num_parts):
                    ends = [size * i // num_parts for i in (part, part + 1)]
                    index = (*[slice(None)] * dimension, slice(*ends))
                    np.testing.assert_array_equal(opened.read(name, float32, index), whole[index])


def test_metadata_and_tokenizer_files_come_along(hf_folder, tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (hf_folder / name).write_text(f"content of {name}")
    save(hf_folder, tmp_path / "saved", metadata={"run": 7})
    assert read_metadata(tmp_path / "saved") == {"run": 7}
    assert (tmp_path / "saved" / "tokenizer.json").read_text() == "content of tokenizer.json"
    assert (tmp_path / "saved" / "chat_template.jinja").exists()
    assert not (tmp_path / "saved" / "config.json").exists()


def test_llm_of_a_checkpoint_answers_as_the_source_does(tmp_path):
    from tiny_engine import ByteTokenizer, prompts_of, run, tiny_llm, tokens_of

    config = tiny_config(vocab_size=260)
    write_hf_folder(tmp_path / "hf", config, random_tensors(config))
    save(tmp_path / "hf", tmp_path / "saved")
    prompts = prompts_of([5, 17])
    llms = [
        tiny_llm(tmp_path / name, tokenizer=ByteTokenizer(), warmup=False)
        for name in ("hf", "saved")
    ]
    tokens = [tokens_of(run(llm, prompts)) for llm in llms]
    assert tokens[0] == tokens[1]


def edit_manifest(folder, edit):
    manifest = json.loads((folder / MANIFEST_FILE).read_text())
    edit(manifest)
    (folder / MANIFEST_FILE).write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda m: m["arrays"].pop("model.norm.weight"), "missing tensors: model.norm.weight;"),
        (
            lambda m: m["content"]["config"].update(intermediate_size=32),
            r"misshapen tensors: .*gate_proj.weight has shape \[64, 32\], expected \[32, 32\]",
        ),
        (
            lambda m: m["content"]["config"].update(num_layers=1),
            "tensors that this architecture does not use: model.layers.1.input_layernorm",
        ),
        (
            lambda m: m["content"].update(dtype="float32"),
            "embed_tokens.weight' is stored as bfloat16, and the checkpoint says float32",
        ),
        (lambda m: m["content"]["config"].update(experts=4), "does not make a model .*experts"),
        (lambda m: m["content"]["config"].update(architecture="gpt"), "architecture='gpt' is not"),
        (lambda m: m["content"].pop("generation"), "does not make a model .*generation"),
        (lambda m: m["content"]["generation"].update(eos_token_ids=[999]), "token id 999 must be"),
        (
            lambda m: m["content"]["generation"]["defaults"].update(top_p=7.0),
            "does not make a model .*top_p=7.0",
        ),
        (lambda m: m.update(kind="prefix snapshot"), "is a prefix snapshot: give the path of a mo"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(hf_folder, tmp_path, edit, message):
    save(hf_folder, tmp_path / "saved")
    edit_manifest(tmp_path / "saved", edit)
    with pytest.raises(ModelLoadError, match=message):
        load_model(tmp_path / "saved")


def test_damage_is_refused_by_tensor(hf_folder, tmp_path):
    save(hf_folder, tmp_path / "saved")
    [path] = (tmp_path / "saved").glob("arrays/*/model.layers.1.mlp.up_proj.weight/1.0")
    content = bytearray(path.read_bytes())
    content[100] ^= 4
    path.write_bytes(content)
    with pytest.raises(
        ModelLoadError, match=r"'model.layers.1.mlp.up_proj.weight': .* not what was written"
    ):
        load_model(tmp_path / "saved")
    path.write_bytes(content[:99])
    with pytest.raises(ModelLoadError, match=r"up_proj.weight'.* has 99 bytes, and 2048 were"):
        open_orbax(tmp_path / "saved")


def test_an_unfinished_checkpoint_is_refused_by_llm(hf_folder, tmp_path):
    """What a kill leaves; tests/test_array_folder.py kills for it."""
    from paged_jax import LLM

    writer = ArrayFolderWriter(tmp_path / "saved", "model checkpoint")
    writer.add("model.norm.weight", np.ones(32, np.float32))
    writer._flush()
    for path in (tmp_path / "saved", str(tmp_path / "saved")):
        with pytest.raises(ModelLoadError, match=r"saved was never finished: writing stopped half"):
            LLM(path)
    with pytest.raises(ModelLoadError, match=r"is no whole model checkpoint, .*: write or copy it"):
        LLM(tmp_path / "saved.partial")
    save(hf_folder, tmp_path / "saved")
    assert not (tmp_path / "saved.partial").exists()
    with pytest.raises(FileExistsError, match="saved exists: delete it, or give another path"):
        save(hf_folder, tmp_path / "saved")


def test_an_unreadable_source_leaves_nothing(hf_folder, tmp_path):
    checkpoint = open_model(hf_folder)[0]

    def read(name, dtype, index=None):
        if "layers.1" in name:
            raise ModelLoadError("the source's disk")
        return checkpoint.read(name, dtype)

    broken = dataclasses.replace(checkpoint, read=read)
    with pytest.raises(ModelLoadError, match="the source's disk"):
        save_checkpoint(tmp_path / "saved", broken, use_tqdm=False)
    assert {path.name for path in tmp_path.iterdir()} == {"hf"}


def test_the_script(hf_folder, tmp_path):
    command = [sys.executable, ROOT / "scripts" / "convert_checkpoint.py", f"--model={hf_folder}"]
    options = [f"--output={tmp_path / 'saved'}", "--dtype=float32", '--metadata={"run": 8}']
    done = subprocess.run([*command, *options], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "hf (bfloat16) -> " in done.stdout and "MB on disk" in done.stdout
    assert read_metadata(tmp_path / "saved") == {"source": "hf", "run": 8}
    assert open_orbax(tmp_path / "saved").stored_dtype == "float32"
