"""int8 matrices against float64, and a model in int8 against itself in float32."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_files import tiny_config
from tiny_engine import GREEDY, check_idle, prompts_of, run, tiny_llm, tiny_model

from paged_jax.models import llama
from paged_jax.models.layers import linear, vocab_parallel_embedding
from paged_jax.models.params import abstract_params, check_params, load_params
from paged_jax.models.quantized import (
    INT8_MODES,
    Quantization,
    QuantizedMatrix,
    hadamard_size,
    quantize_matrix,
    quantize_rows,
    rotate_blocks,
    xla_multiply,
)

RNG = np.random.default_rng(0)


def random(*shape: int) -> np.ndarray:
    """Normal numbers whose rows differ in size a thousandfold."""
    sizes = 10.0 ** RNG.uniform(-2, 1, (*shape[:-1], 1))
    return (RNG.standard_normal(shape) * sizes).astype(np.float32)


def rotated(x: np.ndarray, size: int) -> np.ndarray:
    """float64, each block of `size` columns times a Hadamard matrix: entry (i, j) by i AND j."""
    signs = [[(-1.0) ** (i & j).bit_count() for j in range(size)] for i in range(size)]
    return (np.asarray(x, np.float64).reshape(-1, size) @ np.array(signs)).reshape(x.shape)


def stored(matrix: QuantizedMatrix) -> np.ndarray:
    """float64[out, in]: what the integers stand for, in the basis they are in."""
    return np.asarray(matrix.values, np.float64) * np.asarray(matrix.scale, np.float64)[:, None]


def dequantized(matrix: QuantizedMatrix) -> np.ndarray:
    """float64[out, in]."""
    return rotated(stored(matrix), matrix.hadamard_size)


@pytest.mark.parametrize("mode", INT8_MODES)
def test_each_row_is_rounded_to_half_a_step_of_its_own_scale(mode):
    weight = random(40, 96)
    weight[7] = 0
    matrix = quantize_matrix(weight, mode, "float32")
    assert matrix.values.dtype == jnp.int8 and matrix.shape == (40, 96)
    assert matrix.hadamard_size == (32 if mode == "int8" else 1)
    weight = rotated(weight, matrix.hadamard_size) / matrix.hadamard_size
    step = np.abs(weight).max(axis=1, keepdims=True) / 127
    assert np.all(np.abs(stored(matrix) - weight) <= 0.5001 * step)
    # The whole range is used, but for the row of zeros, and -128 is not.
    assert sorted(np.abs(np.asarray(matrix.values, int)).max(axis=1))[:2] == [0, 127]
    assert np.asarray(matrix.scale)[7] == 0


@pytest.mark.parametrize("num_rows", [1, 3, 8, 33])
def test_an_int8_product_is_that_of_the_rounded_factors_exactly(num_rows):
    """Integers are summed exactly, so that only the scaling rounds."""
    x, weight = random(num_rows, 96), random(40, 96)
    matrix = quantize_matrix(weight, "int8", "float32")
    turned = rotated(x, matrix.hadamard_size).astype(np.float32)
    values, scale = (np.asarray(a, np.float64) for a in quantize_rows(jnp.asarray(turned)))
    expected = (values * scale[:, None]) @ stored(matrix).T
    out = np.asarray(jax.jit(linear)(x, matrix))
    # A sum rounded in another order may fall to the other side of a step.
    assert np.linalg.norm(out - expected) < 2e-4 * np.linalg.norm(expected)
    # And near the product of the factors themselves: 1% of its norm.
    exact = x.astype(np.float64) @ weight.T.astype(np.float64)
    assert np.linalg.norm(out - exact) < 0.015 * np.linalg.norm(exact)


@pytest.mark.parametrize("num_columns", [576, 1536, 96, 40, 7])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_rotation_changes_no_product(num_columns, dtype):
    """Whole numbers of few bits: nothing rounds, so that the products are exact."""
    x = RNG.integers(-1, 2, (5, num_columns)).astype(np.float32)
    weight = RNG.integers(-1, 2, (6, num_columns)).astype(np.float32)
    size = hadamard_size(num_columns, "int8")
    assert num_columns % size == 0 and size == min(num_columns & -num_columns, 128)
    turned = np.asarray(rotate_blocks(jnp.asarray(x, dtype), size))
    np.testing.assert_array_equal(turned, rotated(x, size))
    product = turned @ (rotated(weight, size).T / size)
    np.testing.assert_allclose(product, x @ weight.T, atol=1e-5)
    # The sizes of blocks that a kernel may have its own way with, and XLA's way, are one.
    matrix = quantize_matrix(random(6, num_columns), "int8", dtype)
    ours, xlas = (
        np.asarray(f(jnp.asarray(x, dtype))) for f in (matrix.multiply, multiply_in_xla(matrix))
    )
    np.testing.assert_allclose(ours, xlas, rtol=1e-2, atol=2e-3 * np.abs(xlas).max())


def multiply_in_xla(matrix: QuantizedMatrix) -> Any:
    return lambda x: xla_multiply(matrix, x).astype(x.dtype)


def test_channels_that_stand_out_cost_the_others_little():
    """Rotated, and as it would be: half of the error and less with 2 large channels of 576."""
    x, weight = RNG.standard_normal((64, 576)), RNG.standard_normal((200, 576))
    x[:, [17, 300]] *= 40
    weight[:, [17, 300]] /= 40
    exact = x @ weight.T
    matrix = quantize_matrix(weight.astype(np.float32), "int8", "float32")
    values, scale = quantize_rows(jnp.asarray(x, jnp.float32))
    as_it_is = np.asarray(values, np.float64) * np.asarray(scale, np.float64)[:, None] @ weight.T
    out = np.asarray(linear(jnp.asarray(x, jnp.float32), matrix))
    errors = [np.linalg.norm(y - exact) / np.linalg.norm(exact) for y in (out, as_it_is)]
    # The weights' rounding is in the first alone.
    assert errors[0] < 0.5 * errors[1] and errors[0] < 0.05


def test_quantising_again_gives_the_same_bits():
    weight = random(3000, 1536)  # More numbers than are quantised at a time.
    one, two = (quantize_matrix(weight, "int8", "float32") for _ in range(2))
    half = quantize_matrix(weight[2900:], "int8", "float32")
    np.testing.assert_array_equal(one.values, two.values)
    np.testing.assert_array_equal(one.scale, two.scale)
    np.testing.assert_array_equal(one.values[2900:], half.values)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weight_only_rounds_no_activation(dtype):
    x, weight = jnp.asarray(random(5, 96), dtype), random(40, 96)
    matrix = quantize_matrix(weight, "int8_weight_only", dtype)
    expected = np.asarray(x, np.float64) @ dequantized(matrix).T
    out = linear(x, matrix)
    assert out.dtype == x.dtype
    limit = 1e-6 if dtype == "float32" else 5e-3
    assert np.linalg.norm(np.asarray(out, np.float64) - expected) < limit * np.linalg.norm(expected)
    wide = linear(x, matrix, out_dtype=jnp.dtype(jnp.float32))
    assert wide.dtype == jnp.float32
    np.testing.assert_allclose(wide, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


def test_rows_of_a_table_come_back_in_the_models_dtype():
    table = random(50, 16)
    ids = jnp.array([3, 49, 0, 3])
    for dtype in ("float32", "bfloat16"):
        matrix = quantize_matrix(table, "int8", dtype)
        rows = vocab_parallel_embedding(matrix, ids, vocab_size=50, tensor_axis=None)
        assert rows.dtype == dtype
        expected = dequantized(matrix)[np.asarray(ids)]
        np.testing.assert_allclose(np.asarray(rows, np.float64), expected, rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_row_that_is_no_numbers_stays_none_and_touches_no_other(bad):
    x, weight = random(4, 32), random(8, 32)
    x[2, 5] = bad
    out = np.asarray(linear(jnp.asarray(x), quantize_matrix(weight, "int8", "float32")))
    assert np.isnan(out[2]).all() and np.isfinite(out[[0, 1, 3]]).all()


@pytest.mark.parametrize("mode", INT8_MODES)
def test_loading_quantises_matrices_and_leaves_norms(mode):
    config = tiny_config()
    specs = llama.param_specs(config)
    read = lambda name, dtype, index=None: RNG.standard_normal(shapes[name]).astype(dtype)
    shapes = {t.name: t.shape for spec in jax.tree.leaves(
        specs, is_leaf=lambda n: hasattr(n, "tensors")) for t in spec.tensors}  # fmt: skip
    params = load_params(specs, read, "float32", mode)
    assert isinstance(params.embed, QuantizedMatrix) and params.embed.mode == mode
    assert params.layers[0].attn_norm.dtype == jnp.float32
    wanted = abstract_params(specs, "float32", mode)
    assert jax.tree.structure(params) == jax.tree.structure(wanted)
    same = jax.tree.map(lambda a, b: a.shape == b.shape and a.dtype == b.dtype, params, wanted)
    assert all(jax.tree.leaves(same))
    with pytest.raises(Exception, match="another tree"):
        check_params(params, specs, "float32")


def quantized_model(mode: Quantization) -> Any:
    """The tiny model with its matrices in int8."""
    model = tiny_model()
    params = jax.tree.map(
        lambda w: quantize_matrix(np.asarray(w), mode, "float32") if w.ndim == 2 else w,
        model.params,
    )
    return type(model)(**{**vars(model), "params": params, "quantization": mode})


@pytest.mark.parametrize("mode", INT8_MODES)
def test_the_engine_serves_a_model_in_int8(mode):
    prompts = prompts_of([5, 17, 30])
    llm = tiny_llm(quantized_model(mode), warmup=False)
    outputs = run(llm, prompts)
    check_idle(llm)
    # Weights rounded to float32 again, and no quantised activations: the same but for those.
    model = quantized_model(mode)
    params = jax.tree.map(
        lambda w: jnp.asarray(dequantized(w), jnp.float32) if isinstance(w, QuantizedMatrix) else w,
        model.params,
        is_leaf=lambda w: isinstance(w, QuantizedMatrix),
    )
    plain = tiny_llm(
        type(model)(**{**vars(model), "params": params, "quantization": None}), warmup=False
    )
    expected = run(plain, prompts)
    ours = [t for o in outputs for t in o.outputs[0].token_ids]
    theirs = [t for o in expected for t in o.outputs[0].token_ids]
    assert len(ours) == len(prompts) * GREEDY.max_tokens  # pyright: ignore[reportOperatorIssue]
    if mode == "int8_weight_only":
        assert ours == theirs
    else:  # Greedy texts part at the first near-tie; their first tokens are alike mostly.
        agree = sum(a == b for a, b in zip(ours, theirs, strict=True))
        assert agree >= len(ours) // 4


def test_an_option_that_contradicts_the_model_is_refused():
    with pytest.raises(ValueError, match="quantization='int8_weight_only', and the model was"):
        tiny_llm(quantized_model("int8"), quantization="int8_weight_only", warmup=False)
    with pytest.raises(ValueError, match="quantization='int3': it must be one of"):
        tiny_llm(quantization="int3", warmup=False)
