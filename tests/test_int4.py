"""int4 matrices against float64, as GGUF files have them, and a model in int4."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_files import tiny_config
from tiny_engine import GREEDY, check_idle, prompts_of, run, tiny_llm, tiny_model

from paged_jax.models import int4, llama
from paged_jax.models.int4 import INT4_COLUMNS, Int4Matrix, Int4Rows
from paged_jax.models.layers import linear, vocab_parallel_embedding
from paged_jax.models.params import abstract_params, load_params
from paged_jax.models.quantized import QuantizedMatrix

RNG = np.random.default_rng(0)


def random(*shape: int) -> np.ndarray:
    """Normal numbers whose rows differ in size a thousandfold."""
    sizes = 10.0 ** RNG.uniform(-2, 1, (*shape[:-1], 1))
    return (RNG.standard_normal(shape) * sizes).astype(np.float32)


def dequantized(rows: Int4Rows) -> np.ndarray:
    """float64[out, in]: scale * q + minimum, from the definition."""
    values = np.concatenate([rows.nibbles & 15, rows.nibbles >> 4], axis=-1).astype(np.float64)
    scale, minimum = (a.astype(np.float64)[..., None] for a in (rows.scale, rows.minimum))
    return (values * scale + minimum).reshape(rows.shape)


def test_each_group_is_rounded_to_half_a_step_between_its_ends():
    weight = random(40, 96)
    weight[7], weight[8] = 0, 0.25
    rows = int4.quantize_rows(weight)
    assert rows.shape == weight.shape and rows.scale.dtype == np.float16
    groups = weight.reshape(40, 3, 32)
    spread = np.ptp(groups, axis=-1, keepdims=True)
    # Float16 rounds the ends too: by a two-thousandth of them.
    limit = spread / 15 * 0.51 + np.abs(groups).max(axis=-1, keepdims=True) / 1000
    assert np.all(np.abs(dequantized(rows).reshape(40, 3, 32) - groups) <= limit)
    np.testing.assert_array_equal(dequantized(rows)[7:9], weight[7:9])


def test_quantising_what_was_quantised_changes_nothing():
    rows = int4.quantize_rows(random(3000, 1536))  # More than is quantised at a time.
    again = int4.quantize_rows(dequantized(rows).astype(np.float32))
    for name in ("nibbles", "scale", "minimum"):
        np.testing.assert_array_equal(getattr(again, name), getattr(rows, name))


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
def test_rows_of_a_file_keep_their_numbers(kind):
    """Every byte may occur; ggml's own reading of it is the gguf package's."""
    gguf = pytest.importorskip("gguf")
    blocks = RNG.integers(0, 256, (6, 3, 18 if kind == "Q4_0" else 20), np.uint8)
    factors = RNG.uniform(-2, 2, (6, 3, 1 if kind == "Q4_0" else 2)).astype(np.float16)
    blocks[..., : 2 * factors.shape[-1]] = factors.view(np.uint8)
    quantization_type = gguf.GGMLQuantizationType[kind]
    expected = gguf.quants.dequantize(blocks.reshape(6, -1), quantization_type)
    rows = int4.int4_rows_of_ggml(blocks, has_minimum=kind == "Q4_1")
    np.testing.assert_array_equal(dequantized(rows).astype(np.float32), expected)


@pytest.mark.parametrize("num_out", [1, 16, 40])
def test_a_matrix_gives_its_rows_and_products(num_out):
    rows = int4.quantize_rows(random(num_out, 96))
    matrix = jax.tree.map(jnp.asarray, int4.pack_rows(rows, "float32"))
    real = dequantized(rows)
    assert matrix.shape == (num_out, 96)
    ids = jnp.arange(num_out)[::-1].reshape(1, -1)
    table = vocab_parallel_embedding(matrix, ids, vocab_size=num_out, tensor_axis=None)
    np.testing.assert_array_equal(table[0], real[::-1].astype(np.float32))
    x = random(5, 96)
    exact = x.astype(np.float64) @ real.T
    sizes = np.abs(x).astype(np.float64) @ np.abs(real.T)
    plain = np.asarray(jax.jit(int4.xla_multiply)(matrix, jnp.asarray(x)))
    assert np.all(np.abs(plain - exact) <= 1e-6 * sizes)
    # The activations' rounding: half a 127th of each group's largest at the most.
    out = np.asarray(jax.jit(linear)(jnp.asarray(x), matrix))
    assert np.linalg.norm(out - exact) < 0.01 * np.linalg.norm(sizes)
    for dtype in ("float32", "bfloat16"):
        narrow = linear(jnp.asarray(x, dtype)[None], matrix, out_dtype=jnp.dtype(jnp.float32))
        assert narrow.shape == (1, 5, num_out) and narrow.dtype == jnp.float32
        assert linear(jnp.asarray(x, dtype), matrix).dtype == dtype


def test_a_large_channel_costs_its_neighbours_only():
    x, weight = RNG.standard_normal((8, 320)), RNG.standard_normal((30, 320))
    x[:, 17] *= 300
    rows = int4.quantize_rows(weight.astype(np.float32))
    matrix = jax.tree.map(jnp.asarray, int4.pack_rows(rows, "float32"))
    cleared = x.copy()
    cleared[:, :32] = 0  # The large channel's group.
    exact = cleared @ dequantized(rows).T
    error = np.asarray(linear(jnp.asarray(cleared, jnp.float32), matrix)) - exact
    assert np.linalg.norm(error) < 0.01 * np.linalg.norm(exact)
    group = x - cleared
    with_group = np.asarray(linear(jnp.asarray(x, jnp.float32), matrix), np.float64)
    alone = np.asarray(linear(jnp.asarray(group, jnp.float32), matrix), np.float64)
    np.testing.assert_allclose(with_group - alone, exact + error, atol=1e-6 * np.abs(alone).max())


def shapes_of(specs: Any) -> dict[str, tuple[int, ...]]:
    leaves = jax.tree.leaves(specs, is_leaf=lambda n: hasattr(n, "tensors"))
    return {t.name: t.shape for spec in leaves for t in spec.tensors}


def test_loading_takes_the_files_own_rows_and_leaves_the_vocabulary_in_int8():
    specs = llama.param_specs(tiny_config())
    shapes = shapes_of(specs)
    tensors = {name: random(*shape) for name, shape in shapes.items()}
    read = lambda name, dtype, index=None: tensors[name][index or ...].astype(dtype)
    params = load_params(specs, read, "float32", "int4")
    assert isinstance(params.embed, QuantizedMatrix) and params.embed.mode == "int8"
    layer = params.layers[0]
    fitting = [m for m in (layer.qkv, layer.out, layer.gate_up, layer.down)
               if m.shape[1] % INT4_COLUMNS == 0]  # fmt: skip
    assert fitting and all(isinstance(m, Int4Matrix) for m in fitting)
    wanted = abstract_params(specs, "float32", "int4")
    assert jax.tree.structure(params) == jax.tree.structure(wanted)
    same = jax.tree.map(lambda a, b: a.shape == b.shape and a.dtype == b.dtype, params, wanted)
    assert all(jax.tree.leaves(same))
    # A file's own rows, here of twice the numbers, are what is loaded; None for some of them.
    own = lambda name, index: None if "up_proj" in name else int4.quantize_rows(2 * tensors[name])
    doubled = load_params(specs, read, "float32", "int4", read_int4=own)
    plain = doubled.layers[0].gate_up.take_rows(jnp.arange(layer.gate_up.shape[0]))
    half = shapes["model.layers.0.mlp.gate_proj.weight"][0]
    expected = np.concatenate([
        2 * tensors["model.layers.0.mlp.gate_proj.weight"],
        tensors["model.layers.0.mlp.up_proj.weight"],
    ])  # fmt: skip
    error = np.abs(plain - expected)
    assert error[:half].max() < 0.1 * np.abs(expected).max() and error[half:].max() < 4
    queries = doubled.layers[0].qkv.take_rows(jnp.arange(layer.qkv.shape[0]))
    single = layer.qkv.take_rows(jnp.arange(layer.qkv.shape[0]))
    np.testing.assert_allclose(queries, 2 * single, rtol=1e-6)


def test_the_engine_serves_a_model_in_int4():
    model = tiny_model()
    quantize = lambda w: int4.quantize_int4(np.asarray(w), "float32")
    fits = lambda w: w.ndim == 2 and int4.can_hold(w.shape)
    params = model.params.replace(
        layers=tuple(
            jax.tree.map(lambda w: quantize(w) if fits(w) else w, layer)
            for layer in model.params.layers
        )
    )
    assert any(isinstance(m, Int4Matrix) for m in vars(params.layers[0]).values())
    widened = jax.tree.map(
        lambda m: m.take_rows(jnp.arange(m.shape[0])) if isinstance(m, Int4Matrix) else m,
        params,
        is_leaf=lambda m: isinstance(m, Int4Matrix),
    )
    prompts = prompts_of([5, 17, 30])
    texts = []
    for tree, quantization in ((params, "int4"), (widened, None)):
        changed = type(model)(**{**vars(model), "params": tree, "quantization": quantization})
        llm = tiny_llm(changed, warmup=False)
        outputs = run(llm, prompts)
        check_idle(llm)
        texts.append([t for o in outputs for t in o.outputs[0].token_ids])
    ours, theirs = texts
    assert len(ours) == len(prompts) * GREEDY.max_tokens  # pyright: ignore[reportOperatorIssue]
    # Greedy texts part at the first near-tie; their first tokens are alike mostly.
    assert sum(a == b for a, b in zip(ours, theirs, strict=True)) >= len(ours) // 4
