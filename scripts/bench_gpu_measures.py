"""What `bench_gpu` measures on a device: errors, bandwidth, seconds of a layer's attention."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import bench_gpu_engine
import jax
import jax.numpy as jnp
import numpy as np
from bench_gpu_cases import Case, make_arrays

from pallas_kernels import gpu_runtime, ragged_paged_attention

# Of bfloat16 outputs: 8 bits of digits, and weights that are rounded to 8 bits too.
MAX_RELATIVE_ERROR = 6e-3
CALLS_A_PROGRAM = 16
IMPLEMENTATIONS = ("gpu", "jax", "xla")


def device() -> dict[str, Any]:
    """Which device and jax; and why the kernels are not compiled for it, if so."""
    found = dict(device=jax.local_devices()[0].device_kind, jax=jax.__version__)
    reason = gpu_runtime.missing_reason() or gpu_runtime.device_reason()
    return found if reason is None else dict(found, no_kernels=reason)


def device_answers() -> bool:
    """Whether this process's device still computes: after some faults it never does again."""
    return int(jnp.arange(3).sum()) == 3


def check_conformance(case: Case) -> dict[str, Any]:
    """The largest relative error of a row, kernels against XLA in float32."""
    arrays, options = make_arrays(case, num_pools=1)
    q, (pool,), batch = arrays

    def attend(q, pool, batch, implementation):
        return ragged_paged_attention(
            q, pool, *batch, **options, implementation=implementation, decode_only=case.is_decode
        )

    out = jax.jit(attend, static_argnums=3)(q, pool, batch, "gpu")
    wide = q.astype(jnp.float32)
    # The other pool is as exact; a float32 one of 8-bit numbers would not fit everywhere.
    exact_pool = pool if case.is_scaled else pool.astype(jnp.float32)
    # XLA would multiply with TF32 on a GPU, which has 11 bits.
    with jax.default_matmul_precision("highest"):
        expected = jax.jit(attend, static_argnums=3)(wide, exact_pool, batch, "xla")
    out, expected = np.asarray(out, np.float64), np.asarray(expected, np.float64)
    sizes = np.linalg.norm(expected, axis=-1)
    errors = np.linalg.norm(out - expected, axis=-1) / np.maximum(sizes, 1e-6)
    error = float(errors.max())
    is_right = error < MAX_RELATIVE_ERROR
    if not is_right:  # Rows tell which launch, and which end of a sequence.
        wrong = np.flatnonzero(~(errors.max(axis=-1) < MAX_RELATIVE_ERROR))
        return dict(
            relative_error=error if np.isfinite(error) else str(error),
            is_right=False,
            num_wrong_rows=len(wrong),
            wrong_rows=wrong[:8].tolist(),
        )
    return dict(relative_error=error, is_right=True)


def copy_bandwidth(num_elements: int, repeats: int) -> dict[str, Any]:
    """Bytes read and written a second by a copy, which should be much larger than any cache."""
    array = jnp.ones(num_elements, jnp.bfloat16)
    seconds = least_seconds(jax.jit(jnp.negative), array, repeats=repeats)
    return dict(bytes_per_second=2 * array.nbytes / seconds)


def takes(implementation: str, case: Case) -> bool:
    """Whether a case is timed with one of IMPLEMENTATIONS: jax's own takes decodes alone."""
    if implementation == "jax":
        return case.is_decode and not case.is_scaled
    return implementation == "gpu" or case.with_xla


def time_attention(implementation: str, case: Case, repeats: int) -> dict[str, Any]:
    """Seconds of one layer's attention."""
    (q, pools, batch), options = make_arrays(case, num_pools=2)
    # XLA's path may take many times as long.
    calls = 2 if implementation == "xla" else CALLS_A_PROGRAM
    if implementation == "jax":
        attend, pools = _of_jax(pools, options["scale"])
    else:

        def attend(q, pool, batch):
            return ragged_paged_attention(
                q,
                pool,
                *batch,
                **options,
                implementation=implementation,
                decode_only=case.is_decode,
            )

    program = jax.jit(_repeated(attend, calls))
    seconds = least_seconds(program, q, pools, batch, repeats=repeats) / calls
    return dict(seconds=seconds)


def _of_jax(pools: Any, scale: float) -> tuple[Callable[..., jax.Array], Any]:
    """jax's own kernel, and the pools as it has them: keys and values each for themselves."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention

    heads = pools[0].shape[1] // 2
    halves = [
        tuple(half.swapaxes(0, 1) for half in (pool[:, :heads], pool[:, heads:])) for pool in pools
    ]

    def attend(q, pool, batch):
        return paged_attention(q * scale, *pool, batch[1], batch[0])

    return attend, halves


def _repeated(attend: Callable[..., jax.Array], calls: int) -> Callable[..., jax.Array]:
    """As many layers in one program, one after the other, each over another pool than the last."""

    def layers(q: jax.Array, pools: Any, batch: Any) -> jax.Array:
        for layer in range(calls):
            out = attend(q, pools[layer % len(pools)], batch)
            q = (0.5 * q + 0.5 * out).astype(q.dtype)
        return q

    return layers


def least_seconds(function: Callable[..., Any], *args: Any, repeats: int) -> float:
    """Of a compiled call, the least of some, after one that warms up."""
    jax.block_until_ready(function(*args))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(function(*args))
        times.append(time.perf_counter() - start)
    return min(times)


def run_engine(is_tiny: bool) -> Iterator[dict[str, Any]]:
    """See `bench_gpu_engine.run`."""
    return bench_gpu_engine.run(is_tiny=is_tiny)
