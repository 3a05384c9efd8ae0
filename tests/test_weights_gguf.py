"""GGUF files: round trips in every tensor type, metadata, and every refusal."""

import logging
import shutil
import struct
import sys
import time

import gguf
import gguf.quants
import jax
import ml_dtypes
import model_files
import numpy as np
import pytest

from paged_jax.models import llama, params
from paged_jax.models.config import ModelLoadError, RopeConfig
from paged_jax.models.loader import GgufSource, load_model
from paged_jax.models.weights_gguf import gguf_metadata, open_gguf
from paged_jax.sampling_params import SamplingParams

CONFIG = model_files.tiny_config()
TENSORS = model_files.random_tensors(CONFIG)


def expected_params(config, tensors, dtype="float32"):
    return params.load_params(
        llama.param_specs(config),
        lambda name, dtype, index=None: tensors[name][index or ...].astype(dtype),
        dtype,
    )


def assert_equal_params(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for found_leaf, expected_leaf in zip(
        jax.tree.leaves(found), jax.tree.leaves(expected), strict=True
    ):
        assert found_leaf.dtype == expected_leaf.dtype
        np.testing.assert_array_equal(found_leaf, expected_leaf)


def write(tmp_path, **options):
    return model_files.write_gguf(tmp_path / "tiny.gguf", CONFIG, TENSORS, **options)


# Values as the format defines them, written number by number and not as the gguf package does.


def half(block: bytes, at: int) -> float:
    return struct.unpack_from("<e", block, at)[0]


def legacy_values(block: bytes, bits: int, has_min: bool) -> list[float]:
    """Q4_0, Q4_1, Q5_0 and Q5_1: 32 numbers, the first half in the low nibbles."""
    scale, at = half(block, 0), 2
    minimum = half(block, 2) if has_min else None
    at += 2 if has_min else 0
    high_bits = int.from_bytes(block[at : at + 4], "little") if bits == 5 else 0
    at += 4 if bits == 5 else 0
    values = []
    for i in range(32):
        byte = block[at + i % 16]
        number = (byte & 15 if i < 16 else byte >> 4) | (high_bits >> i & 1) << 4
        values.append(
            scale * (number - 2 ** (bits - 1)) if minimum is None else scale * number + minimum
        )
    return values


def q8_0_values(block: bytes) -> list[float]:
    return [half(block, 0) * number for number in struct.unpack_from("<32b", block, 2)]


def k_scale_and_min(scales: bytes, j: int) -> tuple[int, int]:
    """Six-bit scale and minimum of group j out of the twelve bytes of Q4_K and Q5_K."""
    if j < 4:
        return scales[j] & 63, scales[j + 4] & 63
    return (
        scales[j + 4] & 15 | scales[j - 4] >> 6 << 4,
        scales[j + 4] >> 4 | scales[j] >> 6 << 4,
    )


def q45_k_values(block: bytes, bits: int) -> list[float]:
    """Q4_K and Q5_K: eight groups of 32; two groups share the nibbles of 32 bytes."""
    scales, high = block[4:16], block[16:48] if bits == 5 else bytes(32)
    low = block[48:] if bits == 5 else block[16:]
    values = []
    for j in range(8):
        scale, minimum = k_scale_and_min(scales, j)
        for i in range(32):
            number = low[j // 2 * 32 + i] >> (j % 2 * 4) & 15 | (high[i] >> j & 1) << 4
            values.append(half(block, 0) * scale * number - half(block, 2) * minimum)
    return values


def q6_k_values(block: bytes) -> list[float]:
    """Q6_K: two halves of 128; low nibbles, pairs of high bits, a scale for every 16 numbers."""
    scales = struct.unpack_from("<16b", block, 192)
    values = []
    for i in range(256):
        part, within = divmod(i, 128)
        quarter, column = divmod(within, 32)
        low = block[part * 64 + quarter % 2 * 32 + column] >> (quarter // 2 * 4) & 15
        high = block[128 + part * 32 + column] >> (quarter * 2) & 3
        values.append(half(block, 208) * scales[i // 16] * ((low | high << 4) - 32))
    return values


# Type -> bytes of a block, where its float16 numbers stand, and its values.
BLOCKS = {
    "Q4_0": (18, (0,), lambda block: legacy_values(block, 4, False)),
    "Q4_1": (20, (0, 2), lambda block: legacy_values(block, 4, True)),
    "Q5_0": (22, (0,), lambda block: legacy_values(block, 5, False)),
    "Q5_1": (24, (0, 2), lambda block: legacy_values(block, 5, True)),
    "Q8_0": (34, (0,), q8_0_values),
    "Q4_K": (144, (0, 2), lambda block: q45_k_values(block, 4)),
    "Q5_K": (176, (0, 2), lambda block: q45_k_values(block, 5)),
    "Q6_K": (210, (208,), q6_k_values),
}


@pytest.mark.parametrize("type_name", BLOCKS)
def test_quantised_types_match_their_definition(tmp_path, type_name):
    """Every matrix made of random blocks; the file's values as the format defines them."""
    config = model_files.tiny_config(
        vocab_size=8, hidden_size=256, intermediate_size=256, num_layers=1, head_dim=64
    )
    block_bytes, halves_at, values_of = BLOCKS[type_name]
    rng = np.random.default_rng(3)
    raw, tensors = {}, {}
    for name, shape in model_files.tensor_shapes(config).items():
        if len(shape) == 1:
            tensors[name] = np.ones(shape, np.float32)
            continue
        blocks_per_row = shape[1] // len(values_of(bytes(block_bytes)))
        blocks = rng.integers(0, 256, (shape[0], blocks_per_row, block_bytes), dtype=np.uint8)
        for at in halves_at:
            scales = rng.uniform(-0.1, 0.1, blocks.shape[:2]).astype(np.float16)
            blocks[..., at : at + 2] = scales[..., None].view(np.uint8)
        values = [values_of(block.tobytes()) for block in blocks.reshape(-1, block_bytes)]
        tensors[name] = np.array(values, np.float32).reshape(shape)
        for proj, heads in (("q_proj", config.num_heads), ("k_proj", config.num_kv_heads)):
            if proj in name:  # both bytes and values were random: only their pairing matters
                blocks = model_files.permute_rope_rows(blocks, heads)
        raw[model_files.gguf_name(name)] = (blocks.reshape(shape[0], -1), type_name)
    path = model_files.write_gguf(tmp_path / "tiny.gguf", config, tensors, raw=raw)
    found = load_model(path, dtype="float32").params
    for leaf, expected in zip(
        jax.tree.leaves(found), jax.tree.leaves(expected_params(config, tensors)), strict=True
    ):
        np.testing.assert_allclose(leaf, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("type_name", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_float_types_round_trip(tmp_path, type_name, tied):
    config = model_files.tiny_config(tie_word_embeddings=tied)
    tensors = model_files.random_tensors(config)
    path = model_files.write_gguf(tmp_path / "tiny.gguf", config, tensors, tensor_type=type_name)
    loaded = load_model(path, dtype="float32")
    rounded = {
        name: values
        if values.ndim == 1
        else values.astype(model_files.NUMPY_DTYPES[type_name]).astype(np.float32)
        for name, values in tensors.items()
    }
    assert_equal_params(loaded.params, expected_params(config, rounded))
    assert loaded.config.tie_word_embeddings is tied


def test_fused_rows_stand_in_groups_of_one_kv_head(tmp_path):
    layer = load_model(write(tmp_path), dtype="float32").params.layers[1]
    q, k, v = (TENSORS[f"model.layers.1.self_attn.{p}_proj.weight"] for p in "qkv")
    expected = [q[:16], k[:8], v[:8], q[16:], k[8:], v[8:]]
    np.testing.assert_array_equal(layer.qkv, np.concatenate(expected))
    gate, up = (TENSORS[f"model.layers.1.mlp.{p}_proj.weight"] for p in ("gate", "up"))
    np.testing.assert_array_equal(layer.gate_up, np.concatenate([gate, up]))


def test_bfloat16_target_reads_in_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr("paged_jax.models.weights_gguf.CHUNK_NUMBERS", 100)
    loaded = load_model(write(tmp_path), dtype="bfloat16")
    assert_equal_params(loaded.params, expected_params(CONFIG, TENSORS, "bfloat16"))
    assert loaded.params.embed.dtype == ml_dtypes.bfloat16


def test_configuration_and_generation_info(tmp_path):
    path = write(
        tmp_path,
        metadata={
            "tokenizer.ggml.eot_token_id": 5,
            "tokenizer.ggml.tokens": ["a", "é", ""],
            "general.sampling.temp": 0.5,
            "general.sampling.top_k": 20,
        },
    )
    loaded = load_model(path)
    assert loaded.config.rope == CONFIG.rope
    assert loaded.config == model_files.tiny_config(rms_norm_eps=float(np.float32(1e-5)))
    assert (loaded.eos_token_ids, loaded.bos_token_id) == ((2, 5), 1)
    assert loaded.generation_defaults == {"temperature": 0.5, "top_k": 20}
    assert loaded.name == "tiny"
    assert isinstance(loaded.tokenizer_source, GgufSource)
    assert loaded.tokenizer_source.path == path
    assert loaded.tokenizer_source.metadata["tokenizer.ggml.tokens"] == ["a", "é", ""]
    assert all(key.startswith("tokenizer.") for key in loaded.tokenizer_source.metadata)


def test_advice_that_cannot_be_followed_is_left_out_with_one_warning(tmp_path, caplog):
    advice = {
        "temp": 0.5,
        "top_k": 20.0,
        "penalty_repeat": 1.5,
        "mirostat": 2,
        "mirostat_tau": 5.0,
        "xtc_probability": 0.0,
        "sequence": "kt",
    }
    metadata = {f"general.sampling.{name}": value for name, value in advice.items()}
    with caplog.at_level(logging.WARNING, logger="paged_jax"):
        loaded = load_model(write(tmp_path, metadata=metadata))
    assert loaded.generation_defaults == {"temperature": 0.5, "top_k": 20}
    assert SamplingParams(**loaded.generation_defaults).top_k == 20
    (record,) = caplog.records
    prefix = "general.sampling."
    left_out = f"{prefix}penalty_repeat=1.5, {prefix}mirostat=2, {prefix}sequence='kt'"
    assert f"tiny.gguf: sampling without {left_out}," in record.getMessage()


def test_negative_token_id_refused(tmp_path):
    content = write(tmp_path).read_bytes()
    key = b"tokenizer.ggml.eos_token_id"
    at = content.index(key) + len(key)
    int32_type = 5
    path = tmp_path / "negative.gguf"
    path.write_bytes(content[:at] + struct.pack("<Ii", int32_type, -1) + content[at + 8 :])
    with pytest.raises(ModelLoadError, match=r"negative.gguf: .*eos_token_id: the token id -1"):
        load_model(path)


def test_architecture_of_a_wrong_type_refused(tmp_path):
    content = write(tmp_path).read_bytes()
    key, name = b"general.architecture", b"llama"
    at = content.index(key) + len(key)
    path = tmp_path / "list.gguf"
    # Type 9 is a list; here one of five bytes (type 0), four bytes longer than the string.
    head = struct.pack("<IIQ", 9, 0, len(name)) + name
    path.write_bytes(content[:at] + head + content[at + 12 + len(name) :])
    with pytest.raises(ModelLoadError, match=r"general.architecture=\[108, .* is not supported"):
        load_model(path)


def test_absent_optional_metadata(tmp_path):
    absent = ("vocab_size", "attention.key_length", "attention.value_length", "rope.freq_base")
    metadata = {f"llama.{key}": None for key in (*absent, "rope.dimension_count")}
    config = open_gguf(write(tmp_path, metadata=metadata)).config
    assert (config.vocab_size, config.head_dim, config.rope.theta) == (96, 8, 10000.0)


@pytest.mark.parametrize(
    ("metadata", "rope"),
    [
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, RopeConfig()),
        (
            {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
            RopeConfig(kind="linear", factor=4.0),
        ),
        ({"rope.scale_linear": 2.0}, RopeConfig(kind="linear", factor=2.0)),
    ],
)
def test_rope_scaling(tmp_path, metadata, rope):
    path = write(tmp_path, metadata={f"llama.{key}": value for key, value in metadata.items()})
    assert open_gguf(path).config.rope == rope


def test_rope_freqs_become_divisors(tmp_path):
    freqs = np.array([1.0, 2.0, 4.5, 8.0], np.float32)
    path = write(tmp_path, raw={"rope_freqs.weight": (freqs, "F32")})
    assert open_gguf(path).config.rope.divisors == (1.0, 2.0, 4.5, 8.0)
    path = write(tmp_path, raw={"rope_freqs.weight": (freqs[:3].copy(), "F32")})
    with pytest.raises(ModelLoadError, match=r"tiny.gguf: rope.divisors has 3 numbers"):
        open_gguf(path)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"llama.block_count": None}, "llama.block_count=None: expected one int"),
        ({"llama.attention.head_count": [4, 4]}, r"head_count=\[4, 4\]: expected one int"),
        ({"llama.attention.head_count_kv": 3}, "num_kv_heads=3 must divide num_heads=4"),
        ({"llama.rope.dimension_count": 4}, "rope.dimension_count=4.*head_dim=8"),
        ({"llama.attention.value_length": 16}, "attention.value_length=16.*head_dim=8"),
        ({"llama.rope.scaling.type": "yarn"}, "rope.scaling.type='yarn': not supported"),
        ({"llama.rope.scaling.type": "longrope"}, "rope.scaling.type='longrope'"),
        ({"llama.expert_count": 8}, "llama.expert_count=8: not supported"),
        ({"llama.attention.sliding_window": 64}, "attention.sliding_window=64: not supported"),
        ({"llama.vocab_size": 97}, r"token_embd.weight has shape \[96, 32\], expected \[97, 32\]"),
        ({"llama.feed_forward_length": 32}, r"blk.0.ffn_gate.weight has shape \[64, 32\]"),
        ({"llama.block_count": 3}, "missing tensors: blk.2.attn_norm.weight, .* and 1 more"),
        ({"llama.block_count": 1}, "does not use: blk.1.attn_norm.weight"),
        ({"llama.block_count": True}, "llama.block_count=True: expected one int"),
        (
            {"llama.rope.freq_base": [1e4]},
            r"rope.freq_base=\[10000.0\]: expected one finite number",
        ),
        ({"llama.rope.freq_base": "1e4"}, "rope.freq_base='1e4': expected one finite number"),
        ({"llama.rope.freq_base": float("nan")}, "rope.freq_base=nan: expected one finite number"),
        ({"llama.rope.scaling.factor": [2.0]}, r"rope.scaling.factor=\[2.0\]: expected one finite"),
        ({"llama.rope.scale_linear": "2"}, "rope.scale_linear='2': expected one finite"),
        ({"tokenizer.ggml.eos_token_id": [2]}, r"eos_token_id: the token id \[2\] must be .* 95"),
        ({"tokenizer.ggml.eos_token_id": "2"}, "eos_token_id: the token id '2' must be"),
        ({"tokenizer.ggml.eos_token_id": True}, "eos_token_id: the token id True must be"),
        ({"tokenizer.ggml.eos_token_id": -1.0}, "eos_token_id: the token id -1.0 must be"),
        ({"tokenizer.ggml.eos_token_id": 96}, "eos_token_id: the token id 96 must be"),
        ({"tokenizer.ggml.eot_token_id": 96}, "eot_token_id: the token id 96 must be"),
        ({"tokenizer.ggml.bos_token_id": 96}, "bos_token_id: the token id 96 must be"),
        ({"general.sampling.temp": 5.0}, "general.sampling.temp=5.0 is no sampling default: .*2"),
        ({"general.sampling.top_k": 20.5}, "general.sampling.top_k=20.5 is no sampling default"),
        ({"general.sampling.top_p": "0.9"}, "general.sampling.top_p='0.9' is no sampling default"),
    ],
)
def test_metadata_refused(tmp_path, metadata, message):
    with pytest.raises(ModelLoadError, match=f"tiny.gguf: .*{message}"):
        load_model(write(tmp_path, metadata=metadata))


def test_other_architecture_refused(tmp_path):
    with pytest.raises(ModelLoadError, match=r"general.architecture='qwen2' is not supported"):
        load_model(write(tmp_path, architecture="qwen2"))


def test_unsupported_tensor_type_refused(tmp_path):
    blocks = np.zeros((96, 17), np.uint8)  # an MXFP4 block holds a row's 32 numbers
    path = write(tmp_path, raw={"token_embd.weight": (blocks, "MXFP4")})
    message = r"'token_embd.weight' has the type MXFP4, which is not supported: .*Q4_0"
    with pytest.raises(ModelLoadError, match=message):
        load_model(path)


def test_bias_refused(tmp_path):
    bias = np.zeros(32, np.float32)
    with pytest.raises(ModelLoadError, match=r"does not use: blk.0.attn_q.bias"):
        load_model(write(tmp_path, raw={"blk.0.attn_q.bias": (bias, "F32")}))


def test_missing_embedding_refused(tmp_path):
    tensors = {name: t for name, t in TENSORS.items() if "embed_tokens" not in name}
    path = model_files.write_gguf(tmp_path / "tiny.gguf", CONFIG, tensors)
    with pytest.raises(ModelLoadError, match=r"missing tensors: token_embd.weight"):
        load_model(path)


def test_truncation_anywhere_is_named(tmp_path):
    content = write(tmp_path).read_bytes()
    cut = tmp_path / "cut.gguf"
    for num_bytes in [*range(0, 4000, 37), len(content) // 2, len(content) - 100]:
        cut.write_bytes(content[:num_bytes])
        with pytest.raises(ModelLoadError, match=r"cut.gguf: (truncated|not a GGUF|missing)"):
            load_model(cut)


def test_corrupt_header_never_hangs_or_leaks_another_error(tmp_path):
    content = write(tmp_path).read_bytes()
    corrupt = tmp_path / "corrupt.gguf"
    rng = np.random.default_rng(0)
    refused = 0
    started = time.monotonic()
    for _ in range(300):
        damaged = bytearray(content)
        at = int(rng.integers(4, 2500))
        damaged[at : at + 4] = rng.bytes(4)
        corrupt.write_bytes(damaged)
        try:
            open_gguf(corrupt)
        except ModelLoadError as error:
            refused += 1
            assert "corrupt.gguf" in str(error)
    assert refused > 150  # the rest hit a name or a number that may be anything
    assert time.monotonic() - started < 20


def test_other_files_refused(tmp_path):
    path = tmp_path / "page.gguf"
    path.write_text("<!doctype html>")
    with pytest.raises(ModelLoadError, match=r"page.gguf: not a GGUF file: it starts with b'<!do'"):
        load_model(path)
    path.write_bytes(b"GGUF" + struct.pack(">I", 3) + bytes(100))
    with pytest.raises(ModelLoadError, match="big-endian GGUF is not supported"):
        load_model(path)
    path.write_bytes(b"GGUF" + struct.pack("<I", 1) + bytes(100))
    with pytest.raises(ModelLoadError, match="GGUF version 1 is not supported"):
        load_model(path)


def test_missing_gguf_package_says_what_to_install(tmp_path, monkeypatch):
    path = write(tmp_path)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ImportError, match=r"pip install 'paged-jax\[gguf\]'"):
        load_model(path)


def test_demo_header_equals_the_gguf_packages_reading(demo_model_path):
    started = time.monotonic()
    found = gguf_metadata(demo_model_path)
    assert time.monotonic() - started < 2
    reader = gguf.GGUFReader(demo_model_path)
    expected = {
        name: field.contents()
        for name, field in reader.fields.items()
        if not name.startswith("GGUF.")
    }
    assert found == expected
    specs = open_gguf(demo_model_path).specs
    assert len(params.list_tensors(specs)) == len(reader.tensors)


@pytest.mark.parametrize("names", [["a.gguf"], ["a.gguf", "b.gguf"], []])
def test_folder_of_gguf_files(tmp_path, names):
    path = write(tmp_path)
    folder = tmp_path / "folder"
    folder.mkdir()
    for name in names:
        shutil.copy(path, folder / name)
    if len(names) == 1:
        assert load_model(folder).name == "a"
        return
    message = "name one of a.gguf, b.gguf" if names else "neither a config.json, nor a .gguf"
    with pytest.raises(FileNotFoundError, match=message):
        load_model(folder)
