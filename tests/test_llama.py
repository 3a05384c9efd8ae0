"""The decoder against float64 numpy, against golden tokens, and against itself in slices."""

import dataclasses
import functools
import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import model_files
import numpy as np
import pytest
from dense_llama import dense_attend, model_logits

from paged_jax.models import layers, llama, params
from paged_jax.models.config import ModelConfig, ModelLoadError, RopeConfig
from paged_jax.models.loader import load_model
from paged_jax.models.registry import MODELS, model_module

GOLDENS = Path(__file__).parent / "goldens"


def as_params(config: ModelConfig, tensors: dict[str, np.ndarray], dtype: str = "float32"):
    return params.load_params(
        llama.param_specs(config),
        lambda name, dtype, index=None: tensors[name][index or ...].astype(dtype),
        dtype,
    )


def numpy_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Angular frequencies, one by one, in the words of the Llama 3.1 release."""
    result = []
    for i in range(head_dim // 2):
        frequency = 1.0 / rope.theta ** (2 * i / head_dim)
        if rope.kind == "linear":
            frequency /= rope.factor
        if rope.kind == "llama3":
            context = rope.original_max_position_embeddings
            assert context and rope.low_freq_factor and rope.high_freq_factor
            wavelength = 2 * math.pi / frequency
            if wavelength > context / rope.low_freq_factor:
                frequency /= rope.factor
            elif wavelength > context / rope.high_freq_factor:
                smooth = (context / wavelength - rope.low_freq_factor) / (
                    rope.high_freq_factor - rope.low_freq_factor
                )
                frequency = (1 - smooth) * frequency / rope.factor + smooth * frequency
        if rope.divisors:
            frequency /= rope.divisors[i]
        result.append(frequency)
    return np.array(result)


def numpy_logits(config: ModelConfig, tensors, token_ids, positions) -> np.ndarray:
    """Llama in float64, head by head, straight from the checkpoint's tensors."""
    weights = {name: values.astype(np.float64) for name, values in tensors.items()}
    dim, group = config.head_dim, config.num_heads // config.num_kv_heads
    angles = positions[:, None] * numpy_frequencies(config.rope, dim)
    turn = np.exp(1j * angles)

    def norm(x, name):
        mean_square = (x * x).mean(-1, keepdims=True)
        return x / np.sqrt(mean_square + config.rms_norm_eps) * weights[f"{name}.weight"]

    def rotate(x):  # a head's halves are the real and the imaginary parts
        turned = (x[:, : dim // 2] + 1j * x[:, dim // 2 :]) * turn
        return np.concatenate([turned.real, turned.imag], axis=1)

    hidden = weights["model.embed_tokens.weight"][token_ids]
    future = np.triu(np.ones((len(token_ids),) * 2, bool), 1)
    for index in range(config.num_layers):
        prefix = f"model.layers.{index}"
        x = norm(hidden, f"{prefix}.input_layernorm")
        q, k, v = (x @ weights[f"{prefix}.self_attn.{p}_proj.weight"].T for p in "qkv")
        heads = []
        for head in range(config.num_heads):
            own = slice(head * dim, (head + 1) * dim)
            shared = slice(head // group * dim, (head // group + 1) * dim)
            scores = rotate(q[:, own]) @ rotate(k[:, shared]).T / math.sqrt(dim)
            scores[future] = -np.inf
            shares = np.exp(scores - scores.max(-1, keepdims=True))
            heads.append(shares / shares.sum(-1, keepdims=True) @ v[:, shared])
        attended = np.concatenate(heads, axis=1)
        hidden = hidden + attended @ weights[f"{prefix}.self_attn.o_proj.weight"].T
        x = norm(hidden, f"{prefix}.post_attention_layernorm")
        gate = x @ weights[f"{prefix}.mlp.gate_proj.weight"].T
        up = x @ weights[f"{prefix}.mlp.up_proj.weight"].T
        inner = gate / (1 + np.exp(-gate)) * up
        hidden = hidden + inner @ weights[f"{prefix}.mlp.down_proj.weight"].T
    head = "model.embed_tokens" if config.tie_word_embeddings else "lm_head"
    return norm(hidden, "model.norm") @ weights[f"{head}.weight"].T


ROPES = {
    "default": RopeConfig(theta=10000.0),
    "linear": RopeConfig(theta=10000.0, kind="linear", factor=4.0),
    "llama3": model_files.LLAMA3_ROPE,
    "divisors": RopeConfig(theta=10000.0, divisors=(1.0, 1.5, 4.0, 8.0)),
}


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES.keys())
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_logits_match_float64_numpy(rope, num_kv_heads, tied):
    config = model_files.tiny_config(rope=rope, num_kv_heads=num_kv_heads, tie_word_embeddings=tied)
    tensors = model_files.random_tensors(config)
    token_ids = np.random.default_rng(1).integers(0, config.vocab_size, 24)
    positions = np.arange(100, 124)
    found = model_logits(as_params(config, tensors), token_ids, positions, config=config)
    expected = numpy_logits(config, tensors, token_ids, positions)
    assert found.dtype == jnp.float32
    assert np.abs(found - expected).max() < 1e-5 * np.abs(expected).max()


def test_bfloat16_stays_near_float32_and_keeps_its_dtypes():
    config = model_files.tiny_config(tie_word_embeddings=False)
    tensors = model_files.random_tensors(config)
    weights = as_params(config, tensors, "bfloat16")
    token_ids, positions = jnp.arange(20), jnp.arange(20)
    hidden, caches = llama.forward(
        weights, token_ids, positions, [7, 8], dense_attend, config=config
    )
    assert hidden.dtype == jnp.bfloat16
    assert caches == (7, 8)
    found = model_logits(weights, token_ids, positions, config=config)
    expected = numpy_logits(config, tensors, token_ids, positions)
    assert found.dtype == jnp.float32
    assert np.abs(found - expected).max() < 0.05 * np.abs(expected).max()


def test_of_the_rows_that_are_wanted_the_hidden_states_are_the_same():
    """Keys and values come to be of all tokens, also in the last layer."""
    config = model_files.tiny_config()
    weights = as_params(config, model_files.random_tensors(config))

    def attend(heads, cache):
        out, _ = dense_attend(heads, cache)
        return out, heads.rows.shape

    arguments = weights, jnp.arange(20), jnp.arange(20), [None, None], attend
    whole, caches = llama.forward(*arguments, config=config)
    rows = jnp.asarray([19, 3, 3, 0])
    found, same_caches = llama.forward(*arguments, config=config, rows=rows)
    np.testing.assert_allclose(found, whole[rows], rtol=1e-5, atol=1e-6)
    assert same_caches == caches and caches[-1][0] == 20


@pytest.mark.parametrize("rope", [ROPES["default"], ROPES["llama3"]], ids=["default", "llama3"])
def test_rope_is_exact_to_float32_far_out(rope):
    positions = np.array([0, 1, 17, 8191, 99_999, 131_071, 131_072, 2**20 - 1])
    cos, sin = jax.jit(layers.rope_tables, static_argnums=(1, 2))(positions, rope, 128)
    angles = positions[:, None] * numpy_frequencies(rope, 128)
    # 3e-7 is a few float32 units in the last place; a float32 product would be off by 4e-3.
    error = np.maximum(np.abs(cos - np.cos(angles)), np.abs(sin - np.sin(angles)))
    assert error[positions <= 131_072].max() < 3e-7
    assert error.max() < 6e-7


def _slice_params(config: ModelConfig, tensors: dict[str, np.ndarray], shard: int, count: int):
    """One device's parameters: each tensor sliced over heads, intermediate size and vocabulary."""
    local = model_files.tiny_config(
        num_heads=config.num_heads // count,
        num_kv_heads=config.num_kv_heads // count,
        intermediate_size=config.intermediate_size // count,
        vocab_size=config.vocab_size // count,
        tie_word_embeddings=config.tie_word_embeddings,
    )
    by_columns = ("o_proj.weight", "down_proj.weight")
    sliced = {
        name: values
        if values.ndim == 1
        else np.split(values, count, axis=1 if name.endswith(by_columns) else 0)[shard]
        for name, values in tensors.items()
    }
    return as_params(local, sliced)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("whole_vocab", [True, False], ids=["whole_vocab", "split_vocab"])
def test_tensor_axis_gives_the_logits_of_one_device(tied, whole_vocab):
    config = model_files.tiny_config(tie_word_embeddings=tied)
    tensors = model_files.random_tensors(config)
    weights = as_params(config, tensors)
    shards = [_slice_params(config, tensors, shard, 2) for shard in range(2)]
    if whole_vocab:
        shards = [s.replace(embed=weights.embed, lm_head=weights.lm_head) for s in shards]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *shards)
    token_ids, positions = np.arange(30, 60), np.arange(30)
    run = functools.partial(model_logits, config=config)
    over_axis = jax.vmap(
        functools.partial(run, tensor_axis="tensor"),
        in_axes=(0, None, None),
        axis_name="tensor",
    )
    found = over_axis(stacked, token_ids, positions)
    expected = run(weights, token_ids, positions)
    np.testing.assert_allclose(found[0], expected, rtol=0, atol=1e-5)
    np.testing.assert_array_equal(found[0], found[1])


def test_one_declaration_gives_abstract_tree_initialiser_and_check():
    config = model_files.tiny_config(tie_word_embeddings=False)
    specs = llama.param_specs(config)
    abstract = params.abstract_params(specs, "bfloat16")
    assert abstract.layers[0].qkv.shape == (2 * (2 + 2) * 8, 32)
    assert abstract.layers[1].gate_up.shape == (2 * 64, 32)
    assert abstract.layers[1].down.dtype == jnp.bfloat16
    assert abstract.final_norm.dtype == jnp.float32
    initial = params.init_params(specs, jax.random.key(0), "bfloat16")
    params.check_params(initial, specs, "bfloat16")
    assert np.asarray(initial.final_norm == 1).all()
    assert not np.array_equal(initial.layers[0].out, initial.layers[1].out)
    expected_count = sum(math.prod(shape) for shape in model_files.tensor_shapes(config).values())
    assert sum(leaf.size for leaf in jax.tree.leaves(initial)) == expected_count


def test_check_params_names_what_differs():
    specs = llama.param_specs(model_files.tiny_config())
    good = params.init_params(specs, jax.random.key(0), "float32")
    with pytest.raises(ModelLoadError, match=r"embed: found float32\[5, 32\].*float32\[96, 32\]"):
        params.check_params(good.replace(embed=jnp.zeros((5, 32))), specs, "float32")
    with pytest.raises(ModelLoadError, match="another tree"):
        params.check_params(good.replace(layers=good.layers[:1]), specs, "float32")
    with pytest.raises(ValueError, match="dtype='float16' is not supported"):
        params.init_params(specs, jax.random.key(0), "float16")


def test_forward_refuses_a_wrong_number_of_caches():
    config = model_files.tiny_config()
    weights = params.init_params(llama.param_specs(config), jax.random.key(0), "float32")
    with pytest.raises(ValueError, match="caches has 1 entries; the model has 2 layers"):
        llama.forward(weights, jnp.arange(3), jnp.arange(3), [None], dense_attend, config=config)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"num_heads": 3}, "num_kv_heads=2 must divide num_heads=3"),
        ({"head_dim": 7}, "head_dim=7 must be even"),
        ({"vocab_size": 0}, "vocab_size=0"),
        ({"hidden_size": 2.5}, "hidden_size=2.5"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps=0.0"),
        ({"max_position_embeddings": 2**20 + 1}, "max_position_embeddings=1048577"),
        ({"rope": RopeConfig(divisors=(1.0,))}, "rope.divisors has 1 numbers.*needs 4"),
    ],
)
def test_model_config_refuses(overrides, message):
    with pytest.raises(ValueError, match=message):
        model_files.tiny_config(**overrides)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "yarn"}, "rope.kind='yarn'"),
        ({"theta": 0.0}, "rope.theta=0.0"),
        ({"kind": "linear", "factor": -1.0}, "rope.factor=-1.0"),
        ({"factor": 2.0}, "rope.factor=2.0 needs kind"),
        ({"low_freq_factor": 1.0}, "rope.low_freq_factor=1.0 needs kind 'llama3'"),
        ({"kind": "llama3", "factor": 8.0}, "rope.low_freq_factor=None"),
        ({"divisors": (0.0,)}, "rope.divisors"),
    ],
)
def test_rope_config_refuses(fields, message):
    with pytest.raises(ValueError, match=message):
        RopeConfig(**fields)


def test_config_is_hashable_and_sizes_the_cache():
    config = model_files.tiny_config()
    assert hash(config) == hash(model_files.tiny_config())
    assert config.kv_bytes_per_token(4) == 2 * 2 * 2 * 8 * 4
    assert model_module(config) is MODELS["llama"]
    with pytest.raises(ValueError, match="architecture='mamba' is not supported"):
        model_module(model_files.tiny_config(architecture="mamba"))


def test_llama3_checkpoint_gives_the_logits_of_transformers():
    folder = GOLDENS / "tiny_llama3"  # made by scripts/make_goldens.py
    golden = json.loads((folder / "golden.json").read_text())
    loaded = load_model(folder, dtype="float32")
    token_ids = np.array(golden["token_ids"])
    expected = np.array(golden["last_logits"])

    def error(config):
        logits = model_logits(loaded.params, token_ids, np.arange(len(token_ids)), config=config)
        return np.abs(logits[-len(expected) :] - expected).max()

    assert error(loaded.config) < 1e-4
    unscaled = dataclasses.replace(loaded.config, rope=RopeConfig(theta=loaded.config.rope.theta))
    assert error(unscaled) > 0.01
    assert loaded.eos_token_ids == (2, 3)


@pytest.fixture(scope="module")
def demo(demo_model_path):
    return load_model(demo_model_path, dtype="float32")


@pytest.mark.parametrize("index", [0, 2, 4, 8])
def test_demo_model_predicts_the_golden_tokens(demo, index):
    golden = json.loads((GOLDENS / "smollm2_135m_q4_1_greedy.json").read_text())[index]
    prompt, output = golden["prompt_token_ids"], golden["output_token_ids"]
    token_ids = np.zeros(128, np.int32)  # causal: what follows the last token changes nothing
    token_ids[: len(prompt) + len(output)] = prompt + output
    found = model_logits(demo.params, token_ids, np.arange(128), config=demo.config)
    predicted = np.asarray(found).argmax(-1)[len(prompt) - 1 :][: len(output)]
    is_clear = np.array(golden["margins"]) >= 0.01
    np.testing.assert_array_equal(predicted[is_clear], np.array(output)[is_clear])
