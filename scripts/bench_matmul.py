"""Speed of the C++ matrix products on CPU against XLA's own, in one process, taking turns.

    python scripts/bench_matmul.py --shapes=demo --rows=1,8,32,256

Each line is a product x[rows, in] @ weight[out, in].T: milliseconds of both (the best of many), the
ratio (above 1 the kernel is faster), and the kernel's rate in weight bytes read and in operations.
The weights take turns with copies of themselves, so that they come from memory as in a model and
not from a cache.
"""

import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from paged_jax.models import int4, quantized
from paged_jax.models.int4 import Int4Matrix
from paged_jax.models.quantized import QuantizedMatrix
from pallas_kernels import matmul_cpu

SHAPES = {  # [out, in]
    "demo": [(960, 576), (576, 576), (3072, 576), (576, 1536), (49152, 576)],
    "8b": [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)],
}
MODES = ("int8", "int8_weight_only", "int4", "float32", "bfloat16")

NAMES = flags.DEFINE_list("shapes", ["demo"], f"Of {sorted(SHAPES)}.")
ROWS = flags.DEFINE_list("rows", ["1", "8", "32", "64", "256", "512", "1024"], "Rows of x.")
MODE = flags.DEFINE_list("modes", list(MODES), f"Of {list(MODES)}.")
SECONDS = flags.DEFINE_float("seconds", 1.0, "For each product.", lower_bound=0.0)
CACHE_BYTES = flags.DEFINE_integer("cache_bytes", 64 << 20, "Weights that no cache holds.")


def make_weights(mode: str, shape: tuple[int, int]) -> list:
    """Copies of one weight that together are larger than a cache."""
    rng = np.random.default_rng(0)
    if mode in ("float32", "bfloat16"):
        weight = jnp.asarray(rng.standard_normal(shape, np.float32), mode)
        num_bytes = weight.nbytes
    elif mode == "int4":
        weight = int4.quantize_int4(rng.standard_normal(shape, np.float32), "float32")
        num_bytes = weight.blocks.nbytes
    else:
        values = jnp.asarray(rng.integers(-127, 128, shape, np.int8))
        weight = QuantizedMatrix(values, jnp.ones(shape[0]), mode, "float32")  # pyright: ignore
        num_bytes = values.nbytes
    num_copies = min(1 + CACHE_BYTES.value // num_bytes, 400)
    return [jax.tree.map(jnp.array, weight) for _ in range(num_copies)]


def kernel_multiply(mode: str, x: jax.Array, weight) -> jax.Array:
    if isinstance(weight, QuantizedMatrix | Int4Matrix):
        return weight.multiply_by_kernel(x)
    return matmul_cpu.matmul(x, weight)


def plain_multiply(mode: str, x: jax.Array, weight) -> jax.Array:
    if isinstance(weight, QuantizedMatrix):
        return quantized.xla_multiply(weight, x)
    if isinstance(weight, Int4Matrix):
        return int4.xla_multiply(weight, x)
    precision = jax.lax.Precision.HIGHEST if mode == "float32" else None
    return jax.lax.dot_general(x, weight, (((1,), (1,)), ((), ())), precision=precision)


def best_seconds(mode: str, x: jax.Array, weights: list) -> list[float]:
    """Of the kernel and of XLA, which take turns; seconds a product."""
    # Several products a call, or the call itself would be a good part of the time; and little of
    # each returned, or new memory for the results would be.
    num_in_call = min(len(weights), 16)

    def make_call(form: Callable) -> Callable:
        def products(x: jax.Array, weights: list) -> list[jax.Array]:
            return [jax.lax.optimization_barrier(form(mode, x, w))[:, :1] for w in weights]

        return jax.jit(products)

    forms = [make_call(form) for form in (kernel_multiply, plain_multiply)]
    groups = [
        weights[i : i + num_in_call] for i in range(0, len(weights) - num_in_call + 1, num_in_call)
    ]
    for form in forms:
        jax.block_until_ready(form(x, groups[0]))
    best = [float("inf")] * len(forms)
    until = time.perf_counter() + SECONDS.value
    turn = 0
    while time.perf_counter() < until or turn < 3:
        for i, form in enumerate(forms):
            started = time.perf_counter()
            jax.block_until_ready(form(x, groups[turn % len(groups)]))
            best[i] = min(best[i], (time.perf_counter() - started) / num_in_call)
        turn += 1
    return best


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    if matmul_cpu.missing_reason() is not None:
        raise app.UsageError(matmul_cpu.missing_reason())
    print(
        f"{'mode':18}{'out':>7}{'in':>7}{'rows':>6}{'kernel ms':>11}{'XLA ms':>9}"
        f"{'ratio':>7}{'GB/s':>7}{'GOP/s':>8}"
    )
    for mode in MODE.value:
        for shape in (shape for name in NAMES.value for shape in SHAPES[name]):
            weights = make_weights(mode, shape)
            for num_rows in map(int, ROWS.value):
                dtype = "bfloat16" if mode == "bfloat16" else "float32"
                x = np.random.default_rng(1).standard_normal((num_rows, shape[1]))
                kernel, plain = best_seconds(mode, jnp.asarray(x, dtype), weights)
                num_bytes = jax.tree.leaves(weights[0])[0].nbytes
                operations = 2 * num_rows * shape[0] * shape[1]
                print(
                    f"{mode:18}{shape[0]:7}{shape[1]:7}{num_rows:6}{kernel * 1e3:11.3f}"
                    f"{plain * 1e3:9.3f}{plain / kernel:7.2f}{num_bytes / kernel / 1e9:7.1f}"
                    f"{operations / kernel / 1e9:8.0f}",
                    flush=True,
                )


if __name__ == "__main__":
    app.run(main)
