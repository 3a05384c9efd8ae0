"""The C++ products against numpy's, against XLA's, in larger programs, and when they are chosen."""

from __future__ import annotations

import functools
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from paged_jax.models.layers import linear
from paged_jax.models.quantized import (
    hadamard_matrix,
    quantize_matrix,
    quantize_rows,
    rotate_blocks,
    xla_multiply,
)
from pallas_kernels import matmul_cpu, tpu_runtime
from pallas_kernels.native_build import build_library

pytestmark = pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="no C++ compiler is found"
)
RNG = np.random.default_rng(0)
# [N, in, out]: nothing, one number, ends within a word, a vector, a block and a panel.
SHAPES = [(0, 7, 5), (1, 1, 1), (1, 64, 5), (7, 576, 577), (33, 130, 33), (300, 1537, 70)]
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


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("mode", ["int8", "int8_weight_only", None])
def test_what_is_no_number_spoils_its_own_row_only(mode, bad) -> None:
    x, weight = random(40, 96), random(50, 96)
    matrix = jnp.asarray(weight) if mode is None else quantize_matrix(weight, mode, "float32")
    clean = np.asarray(linear(jnp.asarray(x), matrix))
    x[13, 5] = bad
    out = np.asarray(linear(jnp.asarray(x), matrix))
    assert not np.isfinite(out[13]).any()
    assert mode != "int8" or np.isnan(out[13]).all()
    others = np.arange(40) != 13
    np.testing.assert_array_equal(out[others], clean[others])


@pytest.mark.parametrize("mode", ["int8", "int8_weight_only", None])
def test_a_row_has_the_same_bits_in_every_batch(mode) -> None:
    """Whatever the tiles, the threads and the neighbours."""
    x, weight = jnp.asarray(random(700, 600)), random(200, 600)
    values, scale = jnp.asarray(weight), None
    if mode is not None:
        matrix = quantize_matrix(weight, mode, "float32")
        values, scale = matrix.values, matrix.scale
    multiply = lambda x: matmul_cpu.matmul(x, values, scale, quantizes_x=mode == "int8")
    whole = np.asarray(multiply(x))
    for _ in range(5):
        np.testing.assert_array_equal(multiply(x), whole)
    for first, count in ((0, 1), (5, 13), (300, 257), (699, 1)):
        np.testing.assert_array_equal(multiply(x[first:][:count]), whole[first:][:count])


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
    # Floats only for the numbers of rows where it is faster.
    weight = jnp.asarray(random(8, 64))
    multiply = lambda x: linear(x, weight)
    assert [uses_kernel(multiply, jnp.zeros((n, 64))) for n in (1, 8, 65)] == [False, True, False]


def test_arguments_that_do_not_fit_are_named() -> None:
    x, weight = jnp.zeros((4, 64)), jnp.zeros((8, 64))
    with pytest.raises(ValueError, match=r"x \(4, 64\) and weight \(8, 63\) do not fit"):
        matmul_cpu.matmul(x, weight[:, :63])
    with pytest.raises(ValueError, match="quantizes_x needs int8 weights, these are float32"):
        matmul_cpu.matmul(x, weight, quantizes_x=True)
    with pytest.raises(ValueError, match=r"weight_scale has shape \(7,\); give one for each row"):
        matmul_cpu.matmul(x, weight, jnp.ones(7))
