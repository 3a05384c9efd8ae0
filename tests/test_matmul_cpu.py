"""The C++ products against numpy's, against XLA's, in larger programs, and when they are chosen."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import shutil
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from paged_jax.models import int4, layers
from paged_jax.models.layers import linear
from paged_jax.models.quantized import (
    hadamard_matrix,
    quantize_matrix,
    quantize_rows,
    rotate_blocks,
    xla_multiply,
)
from pallas_kernels import matmul_cpu, tpu_runtime
from pallas_kernels.matmul_cpu import Fused
from pallas_kernels.native_build import build_library

pytestmark = pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="no C++ compiler is found"
)
RNG = np.random.default_rng(0)
# [N, in, out]: nothing, one number, ends within a word, a vector, a block and a panel.
# More rows than some are multiplied in another way (with x turned), 16 at a time.
SHAPES = [(0, 7, 5), (1, 1, 1), (1, 64, 5), (7, 576, 577), (33, 130, 33), (300, 1537, 70)]
SHAPES += [(12, 68, 50), (16, 1540, 97), (32, 64, 48), (300, 132, 70)]
INT4_SHAPES = [(0, 32, 5), (1, 32, 1), (1, 576, 50), (5, 64, 16), (13, 1536, 33), (300, 96, 70)]
# What a CPU must have to run a build, and the name of the build's int8 product.
BUILDS = {
    "x86-64": (set(), "portable"),
    "x86-64-v3": ({"avx2", "fma", "bmi2"}, "avx2"),
    "x86-64-v4": ({"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512cd"}, "avx512"),
    "native": (set(), None),
}


def cpu_features() -> set[str]:
    path = pathlib.Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return {word for line in lines if line.startswith("flags") for word in line.split()}


@functools.cache
def target_of(build: str) -> str | None:
    """The name under which a build for some CPU is registered; None for this machine's own."""
    features, product = BUILDS[build]
    if build == "native":
        assert matmul_cpu.missing_reason() is None
        return None
    if not features <= cpu_features() or "sse2" not in cpu_features():
        pytest.skip(f"this CPU does not run {build}")
    with pytest.MonkeyPatch.context() as changes:
        changes.setenv("CXX", f"c++ -march={build}")
        library = build_library(matmul_cpu.SOURCE, matmul_cpu.HEADERS)
    assert matmul_cpu.register(library, f"matmul_{build}") == product
    return f"matmul_{build}"


def random(*shape: int) -> np.ndarray:
    """Normal numbers whose rows differ in size a thousandfold."""
    sizes = 10.0 ** RNG.uniform(-2, 1, (*shape[:-1], 1))
    return (RNG.standard_normal(shape) * sizes).astype(np.float32)


def matrix_of(weight: np.ndarray, mode: str | None) -> Any:
    """The weight in one of the forms that matrices have; None: as it is."""
    if mode is None:
        return jnp.asarray(weight)
    if mode == "int4":
        return int4.quantize_int4(weight, "float32")
    return quantize_matrix(weight, mode, "float32")  # pyright: ignore[reportArgumentType]


def uses_kernel(function, *arguments) -> bool:
    return "paged_matmul_" in jax.jit(function).lower(*arguments).as_text()


def check_product(out: jax.Array, x: np.ndarray, weight: np.ndarray, limit: float) -> None:
    """Against float64; errors are measured by the sums of the sizes of what is summed."""
    x, weight = x.astype(np.float64), weight.astype(np.float64)
    assert out.shape == (x.shape[0], weight.shape[0]) and out.dtype == jnp.float32
    error = np.abs(np.asarray(out, np.float64) - x @ weight.T)
    assert np.all(error <= limit * (np.abs(x) @ np.abs(weight.T)))


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_quantised_products_are_exact_but_for_the_scaling(build, shape) -> None:
    num_rows, size, num_out = shape
    x = random(num_rows, size)
    weight = RNG.integers(-127, 128, (num_out, size), dtype=np.int8)
    scale = RNG.uniform(0.5, 2, num_out).astype(np.float32)
    if num_rows:  # The farthest sums, a row of zeros, and ties of the rounding.
        x[0], weight[0] = 3.0, 127
    if num_rows > 5:
        x[1], x[2, 0] = 0.0, np.float32(127)
        x[2, 1:] = RNG.integers(-126, 126, size - 1) + np.float32(0.5)
    inverse = np.divide(127, np.abs(x).max(1), out=np.zeros(num_rows, np.float32), where=x.any(1))
    values = np.rint(x * inverse[:, None]).astype(np.int64)
    sums = values @ weight.astype(np.int64).T
    expected = sums * (np.abs(x).max(1) / np.float32(127))[:, None].astype(np.float64) * scale
    out = matmul_cpu.matmul(
        jnp.asarray(x), jnp.asarray(weight), jnp.asarray(scale), quantizes_x=True,
        target=target_of(build),
    )  # fmt: skip
    np.testing.assert_allclose(out, expected, rtol=4e-7)


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("size", [2, 8, 16, 128])
def test_rows_are_transformed_before_they_are_rounded(build, size) -> None:
    """Small integers, whose transform is exact; the weight shows every number of it."""
    x = RNG.integers(-9, 10, (5, 3 * size)).astype(np.float32)
    weight = np.eye(3 * size, dtype=np.int8)
    out = matmul_cpu.matmul(
        jnp.asarray(x), jnp.asarray(weight), quantizes_x=True, hadamard_size=size,
        target=target_of(build),
    )  # fmt: skip
    real = x @ np.kron(np.eye(3), hadamard_matrix(size))
    largest = np.abs(real).max(axis=1, keepdims=True)
    values = np.rint(real.astype(np.float32) * (np.float32(127) / largest.astype(np.float32)))
    np.testing.assert_allclose(out, values * largest / 127, rtol=4e-7)


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_float_products(build, shape) -> None:
    num_rows, size, num_out = shape
    x, weight, target = random(num_rows, size), random(num_out, size), target_of(build)
    multiply = functools.partial(matmul_cpu.matmul, target=target)
    check_product(multiply(jnp.asarray(x), jnp.asarray(weight)), x, weight, 3e-6)
    narrow_x, narrow = (jnp.asarray(a, jnp.bfloat16) for a in (x, weight))
    check_product(multiply(narrow_x, narrow), np.asarray(narrow_x), np.asarray(narrow), 3e-6)
    matrix = quantize_matrix(weight, "int8_weight_only", "float32")
    real = np.asarray(matrix.values, np.float64) * np.asarray(matrix.scale, np.float64)[:, None]
    check_product(multiply(jnp.asarray(x), matrix.values, matrix.scale), x, real, 3e-6)


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("shape", INT4_SHAPES, ids=str)
def test_int4_products_are_exact_but_for_the_scaling(build, shape) -> None:
    """Against float64, with x rounded here as the kernel is to round it."""
    num_rows, size, num_out = shape
    x = random(num_rows, size)
    rows = int4.quantize_rows(random(num_out, size))
    rows.scale[0, 0] = 2.0**-24  # The smallest that float16 has, and a negative minimum.
    if num_rows:  # A group of zeros, and ties of the rounding.
        x[0, :32] = 0
        x[0, -32:] = np.arange(32) + np.float32(0.5)
        x[0, -1] = 127
    groups = x.reshape(num_rows, size // 32, 32)
    largest = np.abs(groups).max(axis=-1, initial=0)
    inverse = np.divide(np.float32(127), largest, out=np.zeros_like(largest), where=largest > 0)
    real_x = np.rint(groups * inverse[..., None]).astype(np.float64)
    real_x *= (largest / np.float32(127))[..., None].astype(np.float64)
    low, high = rows.nibbles & 15, rows.nibbles >> 4
    weight = np.concatenate([low, high], axis=-1).astype(np.float64)
    weight = weight * rows.scale[..., None].astype(np.float64)
    weight = (weight + rows.minimum[..., None].astype(np.float64)).reshape(num_out, size)
    blocks = jnp.asarray(int4.pack_rows(rows, "float32").blocks)
    for dtype in ("float32", "bfloat16") if num_rows == 5 else ("float32",):
        if dtype == "bfloat16":  # Numbers that are the same in both.
            x = np.rint(real_x.reshape(x.shape) * 4).clip(-127, 127).astype(np.float32)
            x[:, ::32] = 127
            real_x = x
        out = matmul_cpu.matmul_int4(
            jnp.asarray(x, dtype), blocks, num_out, target=target_of(build)
        )
        check_product(out, real_x.reshape(x.shape), weight, 3e-6)


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize(
    "shape", [(1, 64, 1), (1, 576, 577), (7, 130, 33), (40, 132, 1000)], ids=str
)
def test_the_largest_of_each_row_is_that_of_the_product(build, shape) -> None:
    """Bit for bit, also where equal ones, a NaN, infinities or nothing but those stand."""
    num_rows, size, num_out = shape
    x, target = random(num_rows, size), target_of(build)
    weight = random(num_out, size)
    weight[num_out // 2 :] = weight[: num_out - num_out // 2]  # each twice, or nearly
    weight[num_out // 3] = 0
    x[num_rows // 2] = np.abs(x[num_rows // 2])
    for mode in ("int8", "int8_weight_only", None):
        matrix = matrix_of(-np.abs(weight) if mode is None else weight, mode)
        scale = np.asarray(getattr(matrix, "scale", np.ones(num_out, np.float32)))
        values = getattr(matrix, "values", matrix)
        for bad in (1.0, np.nan, np.inf, -np.inf):
            spoilt = scale.copy()
            with np.errstate(invalid="ignore"):  # A row of zeros has the scale 0.
                spoilt[-1] *= np.float32(bad)
            arguments = jnp.asarray(x), values, jnp.asarray(spoilt)
            keywords: dict[str, Any] = dict(quantizes_x=mode == "int8", target=target)
            rows = np.asarray(matmul_cpu.matmul(*arguments, **keywords))
            columns, numbers = matmul_cpu.largest(*arguments, **keywords)
            expected = np.where(np.isnan(rows).any(1), np.isnan(rows).argmax(1), rows.argmax(1))
            np.testing.assert_array_equal(columns, expected)
            np.testing.assert_array_equal(numbers, rows[np.arange(num_rows), expected])


def test_the_largest_among_zeros_of_both_signs_is_the_first() -> None:
    weight = jnp.asarray([[-1.0], [-0.0], [0.0], [0.0]], jnp.float32)
    columns, numbers = matmul_cpu.largest(jnp.ones((2, 1), jnp.float32), weight)
    np.testing.assert_array_equal(columns, [1, 1])
    np.testing.assert_array_equal(numbers, [0.0, 0.0])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("mode", ["int8", "int8_weight_only", "int4", None])
def test_what_is_no_number_spoils_its_own_row_only(mode, bad) -> None:
    x, weight = random(40, 96), random(50, 96)
    matrix = matrix_of(weight, mode)
    clean = np.asarray(linear(jnp.asarray(x), matrix))
    x[13, 5] = bad
    out = np.asarray(linear(jnp.asarray(x), matrix))
    assert not np.isfinite(out[13]).any()
    assert mode not in ("int8", "int4") or np.isnan(out[13]).all()
    others = np.arange(40) != 13
    np.testing.assert_array_equal(out[others], clean[others])


@pytest.mark.parametrize("mode", ["int8", "int8_weight_only", "int4", None])
def test_a_row_has_the_same_bits_in_every_batch(mode) -> None:
    """Whatever the tiles, the threads, the neighbours, and which factor is turned."""
    x, matrix = jnp.asarray(random(700, 608)), matrix_of(random(200, 608), mode)
    # One row of float32 is XLA's elsewhere.
    multiply = lambda x: matmul_cpu.matmul(x, matrix) if mode is None else linear(x, matrix)
    whole = np.asarray(multiply(x))
    for _ in range(5):
        np.testing.assert_array_equal(multiply(x), whole)
    for first, count in ((0, 1), (5, 13), (9, 8), (40, 32), (300, 257), (699, 1)):
        np.testing.assert_array_equal(multiply(x[first:][:count]), whole[first:][:count])


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("num_rows", [1, 7, 40])
def test_what_is_fused_is_done_to_the_rows(build, num_rows) -> None:
    """Against float64: before the product, after it, and both; columns that end in a vector."""
    size, num_out, target = 203, 50, target_of(build)
    x, weight = random(num_rows, size), random(num_out, size)
    norm_weight = RNG.uniform(0.5, 2, size).astype(np.float32)
    wide = x.astype(np.float64)
    normed = wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + 1e-5) * norm_weight
    multiply = functools.partial(matmul_cpu.matmul, weight=jnp.asarray(weight), target=target)
    norm = Fused(norm_weight=jnp.asarray(norm_weight), norm_eps=1e-5)
    product = multiply(jnp.asarray(x), fused=norm)
    check_product(product, normed, weight, 4e-6)
    # The sum with the residual is rounded once more, and nothing else.
    residual = random(num_rows, num_out)
    both = dataclasses.replace(norm, residual=jnp.asarray(residual))
    out = multiply(jnp.asarray(x), fused=both)
    np.testing.assert_array_equal(out, np.asarray(product) + residual)


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("num_rows", [1, 7, 40])
@pytest.mark.parametrize("num_out", [2, 26, 110, 192])
def test_swiglu_of_a_product(build, num_rows, num_out) -> None:
    """Against float64 of the product's own numbers: halves that end in a vector, a tile, a group.

    The first columns are where a careless exponential overflows.
    """
    size, target = 68, target_of(build)
    x, weight = random(num_rows, size), random(num_out, size)
    weight[0], weight[num_out // 2 - 1] = 200, -200
    x[0] = RNG.uniform(0.5, 1, size)
    matrix = quantize_matrix(weight, "int8", "float32")
    quantised = dict(quantizes_x=True, hadamard_size=matrix.hadamard_size)
    for arguments, options in (
        ((jnp.asarray(weight),), {}),
        ((matrix.values, matrix.scale), quantised),
        ((matrix.values, matrix.scale), {}),
    ):
        multiply = functools.partial(matmul_cpu.matmul, jnp.asarray(x), *arguments, target=target)
        product = np.asarray(multiply(**options), np.float64)
        gate, up = np.split(product, 2, axis=1)
        expected = np.exp(-np.logaddexp(0, -gate)) * gate * up
        out = multiply(**options, fused=Fused(is_swiglu=True))
        assert out.shape == expected.shape and np.abs(gate[0]).max() > 1000
        np.testing.assert_allclose(out, expected, rtol=2e-6, atol=1e-30)


@pytest.mark.parametrize("build", BUILDS)
def test_swiglu_of_an_int4_product(build) -> None:
    x, target = random(21, 96), target_of(build)
    packed = int4.quantize_int4(random(96, 96), "float32")
    multiply = functools.partial(
        matmul_cpu.matmul_int4, jnp.asarray(x), packed.blocks, 96, target=target
    )
    gate, up = np.split(np.asarray(multiply(), np.float64), 2, axis=1)
    out = multiply(fused=Fused(is_swiglu=True))
    np.testing.assert_allclose(
        out, np.exp(-np.logaddexp(0, -gate)) * gate * up, rtol=2e-6, atol=1e-30
    )


@pytest.mark.parametrize("mode", ["int8", "int8_weight_only", "int4", None])
def test_a_model_layers_fused_products_are_the_plain_ones(mode) -> None:
    x, residual = jnp.asarray(random(70, 96)), jnp.asarray(random(70, 50))
    norm_weight = jnp.asarray(RNG.uniform(0.5, 2, 96).astype(np.float32))
    matrix, gate_up = matrix_of(random(50, 96), mode), matrix_of(random(128, 96), mode)
    # A sum rounded in another order may fall to the other side of a step of int8.
    atol = 1e-6 if mode in (None, "int8_weight_only") else 1e-3
    functions = [
        (lambda x: layers.norm_linear(x, norm_weight, matrix, 1e-5), atol,
         lambda x: linear(layers.rms_norm(x, norm_weight, 1e-5), matrix)),
        (lambda x: layers.add_linear(residual[: len(x)], x, matrix, None), atol,
         lambda x: residual + linear(x, matrix)),
        # A factor for the gate, one for what it gates, and the function between them.
        (lambda x: layers.norm_swiglu_linear(x, norm_weight, gate_up, 1e-5), 3 * atol,
         lambda x: layers.swiglu(linear(layers.rms_norm(x, norm_weight, 1e-5), gate_up))),
    ]  # fmt: skip
    for fused, limit, plain in functions:
        assert uses_kernel(fused, x)
        out, expected = np.asarray(fused(x)), np.asarray(plain(x))
        sizes = np.abs(expected).max(axis=1, keepdims=True)
        np.testing.assert_allclose(out / sizes, expected / sizes, rtol=0, atol=limit)
        for count in (2, 20, 33):
            np.testing.assert_array_equal(fused(x[:count]), out[:count])
        # In bfloat16 the plain functions are what there is.
        narrow = x.astype(jnp.bfloat16)
        assert fused(narrow).shape == out.shape


def test_many_products_at_once_do_not_mix() -> None:
    """Independent calls of one program may run side by side on XLA's threads."""
    xs = [jnp.asarray(random(20 + i, 300)) for i in range(6)]
    matrices = [quantize_matrix(random(500, 300), "int8", "float32") for _ in xs]
    together = jax.jit(lambda xs, ws: [linear(x, w) for x, w in zip(xs, ws, strict=True)])
    for _ in range(5):
        for x, matrix, out in zip(xs, matrices, together(xs, matrices), strict=True):
            np.testing.assert_array_equal(out, linear(x, matrix))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_int8_as_xla_computes_it(dtype) -> None:
    x = jnp.asarray(random(2, 9, 200), dtype)
    matrix = quantize_matrix(random(70, 200), "int8", dtype)
    out = jax.jit(linear)(x, matrix)
    assert out.dtype == x.dtype and out.shape == (2, 9, 70)
    expected = xla_multiply(matrix, x.reshape(18, 200)).reshape(2, 9, 70)
    np.testing.assert_allclose(
        np.asarray(out, np.float32), expected, rtol=1e-6 if dtype == "float32" else 8e-3
    )
    wide = linear(x, matrix, out_dtype=jnp.dtype(jnp.float32))
    np.testing.assert_allclose(wide, expected, rtol=1e-6)
    # The same integers, that is to say.
    assert matrix.hadamard_size == 8
    values, scale = quantize_rows(rotate_blocks(x.reshape(18, 200), 8))
    sums = np.asarray(values, np.int64) @ np.asarray(matrix.values, np.int64).T
    exact = sums * np.asarray(scale, np.float64)[:, None] * np.asarray(matrix.scale)
    np.testing.assert_allclose(wide.reshape(18, 70), exact, rtol=1e-6)


def test_under_vmap_and_shard_map_and_in_a_loop() -> None:
    x, matrix = jnp.asarray(random(4, 6, 64)), quantize_matrix(random(64, 64), "int8", "float32")
    expected = linear(x, matrix)
    np.testing.assert_array_equal(jax.vmap(lambda x: linear(x, matrix))(x), expected)
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])
    rows = PartitionSpec("data")
    split = jax.shard_map(
        linear, mesh=mesh, in_specs=(rows, PartitionSpec()), out_specs=rows, check_vma=False
    )
    np.testing.assert_array_equal(jax.jit(split)(x, matrix), expected)
    steps = lambda x: jax.lax.scan(lambda x, _: (linear(x, matrix), None), x, length=3)[0]
    again = linear(linear(expected, matrix), matrix)
    np.testing.assert_array_equal(jax.jit(steps)(x), again)


def test_weights_are_read_where_they_are() -> None:
    """No copy of a weight among the program's temporaries."""
    x, matrix = jnp.asarray(random(4, 512)), quantize_matrix(random(2048, 512), "int8", "float32")
    memory = jax.jit(linear).lower(x, matrix).compile().memory_analysis()
    assert memory is not None and memory.temp_size_in_bytes < matrix.values.nbytes / 8


def test_chosen_on_cpu_but_not_for_a_tpu_or_a_dtype() -> None:
    x, matrix = jnp.asarray(random(4, 64)), quantize_matrix(random(8, 64), "int8", "float32")
    assert uses_kernel(lambda x: linear(x, matrix), x)
    assert not uses_kernel(lambda x: linear(x, matrix), x.astype(jnp.float16))
    with tpu_runtime.force_compile():
        assert not uses_kernel(lambda x: linear(x, matrix), x)
    packed = int4.quantize_int4(random(8, 64), "float32")
    assert uses_kernel(lambda x: linear(x, packed), x)
    assert not uses_kernel(lambda x: linear(x, packed), x.astype(jnp.float16))
    # Floats only for the numbers of rows where it is faster.
    for dtype, expected in (("float32", [False, True, True]), ("bfloat16", [True, False, False])):
        weight = jnp.asarray(random(8, 64), dtype)
        multiply = lambda x, weight=weight: linear(x, weight)
        rows = [jnp.zeros((n, 64), dtype) for n in (1, 8, 600)]
        assert [uses_kernel(multiply, x) for x in rows] == expected


def test_arguments_that_do_not_fit_are_named() -> None:
    x, weight = jnp.zeros((4, 64)), jnp.zeros((8, 64))
    with pytest.raises(ValueError, match=r"x \(4, 64\) and weight \(8, 63\) do not fit"):
        matmul_cpu.matmul(x, weight[:, :63])
    with pytest.raises(ValueError, match="quantizes_x needs int8 weights, these are float32"):
        matmul_cpu.matmul(x, weight, quantizes_x=True)
    with pytest.raises(ValueError, match=r"weight_scale has shape \(7,\); give one for each row"):
        matmul_cpu.matmul(x, weight, jnp.ones(7))
    with pytest.raises(ValueError, match="uint8: blocks of int4 are for matmul_int4"):
        matmul_cpu.matmul(x, weight.astype(jnp.uint8))
    with pytest.raises(ValueError, match=r"residual is float32\[4, 9\]; give float32\[4, 8\]"):
        matmul_cpu.matmul(x, weight, fused=Fused(residual=jnp.zeros((4, 9))))
    with pytest.raises(ValueError, match="residual or is_swiglu, not both"):
        both = Fused(residual=jnp.zeros((4, 8)), is_swiglu=True)
        matmul_cpu.matmul(x, weight, fused=both)
    with pytest.raises(ValueError, match="the weight has 7 rows; give an even number"):
        matmul_cpu.matmul(x, weight[:7], fused=Fused(is_swiglu=True))
    blocks = jnp.zeros((1, 2, 320), jnp.uint8)
    with pytest.raises(ValueError, match=r"num_out=17 give \(2, 2, 320\)"):
        matmul_cpu.matmul_int4(x, blocks, 17)
    with pytest.raises(ValueError, match="num_out=16; give a multiple of 32"):
        matmul_cpu.matmul_int4(x, blocks, 16, fused=Fused(is_swiglu=True))
    with pytest.raises(ValueError, match=r"x has shape \(4, 33\); give \[N, a multiple of 32\]"):
        matmul_cpu.matmul_int4(x[:, :33], blocks, 8)


def test_a_team_serves_one_call_and_threads_of_xla_the_others() -> None:
    """Products side by side in several threads of Python, for a while."""
    x, matrix = jnp.asarray(random(40, 320)), quantize_matrix(random(900, 320), "int8", "float32")
    multiply = jax.jit(linear)
    expected = np.asarray(multiply(x, matrix))

    def work(_: int) -> bool:
        outs = [np.asarray(multiply(x, matrix)) for _ in range(30)]
        return all(np.array_equal(out, expected) for out in outs)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))
