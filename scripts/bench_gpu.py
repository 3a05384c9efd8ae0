"""The GPU kernels on a GPU: right at real shapes, then timed, then under the engine.

    python scripts/bench_gpu.py --output gpu.json

Takes less than 8 minutes: what the time no longer allows for is left out, and named. Needs a
Hopper GPU and jax 0.11.2 or newer. With --smoke it runs a few tiny shapes wherever it is, the
kernels interpreted where there is no GPU: a test of the script.

1. Conformance: the kernels against the XLA path in float32 over the same numbers.
2. Decode, prefill and mixed batches, of Llama-3-8B's heads: as bytes of keys and values a second
   beside the bandwidth of a large copy, and as floating-point operations a second; against jax's
   own paged attention and the XLA path.
3. The engine, end to end, with a random Llama-3-8B in bfloat16.

The last line is one JSON object, also written to --output.
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable
from typing import Any

import bench_gpu_engine
import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from bench_gpu_cases import CONFORMANCE, SMOKE_CASES, TIMED, Case, make_arrays

from pallas_kernels import gpu_runtime, ragged_paged_attention

OUTPUT = flags.DEFINE_string("output", "", "File for the JSON object; none if empty.")
SECONDS = flags.DEFINE_float(
    "seconds", 450.0, "Of all: checks begin in the first third, timings before the last quarter."
)
SMOKE = flags.DEFINE_bool("smoke", False, "Tiny shapes, to test the script anywhere.")
ENGINE = flags.DEFINE_bool("engine", True, "Whether to run the engine too.")
REPEATS = flags.DEFINE_integer("repeats", 8, "Timings of each program; the least counts.")

# Of bfloat16 outputs: 8 bits of digits, and weights that are rounded to 8 bits too.
MAX_RELATIVE_ERROR = 6e-3
CALLS_A_PROGRAM = 16


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    reason = gpu_runtime.missing_reason() or gpu_runtime.device_reason()
    if reason is not None and not SMOKE.value:
        raise app.UsageError(f"{reason}; --smoke tests the script without a GPU")
    clock = Clock(SECONDS.value)
    device = jax.local_devices()[0]
    report: dict[str, Any] = dict(
        date=time.strftime("%Y-%m-%d"), device=device.device_kind, jax=jax.__version__
    )
    report["conformance"] = [
        clock.run(case.name, lambda case=case: check_conformance(case), share=0.35)
        for case in (SMOKE_CASES if SMOKE.value else CONFORMANCE)
    ]
    copy = clock.run("copy", copy_bandwidth)
    report["copy"] = copy
    copied = copy.get("bytes_per_second", 1.0)
    report["timed"] = [
        clock.run(case.name, lambda case=case: time_case(case, copied), share=0.75)
        for case in (SMOKE_CASES[:1] if SMOKE.value else TIMED)
    ]
    if ENGINE.value:
        report["engine"] = clock.run("engine", lambda: bench_gpu_engine.run(is_tiny=SMOKE.value))
    report["seconds"] = round(clock.elapsed, 1)
    line = json.dumps(report)
    if OUTPUT.value:
        with open(OUTPUT.value, "w") as file:
            file.write(line + "\n")
    print(line)
    wrong = [r["name"] for r in report["conformance"] if not r.get("is_right", False)]
    if wrong:
        raise SystemExit(f"wrong or not checked: {', '.join(wrong)}")


class Clock:
    """Runs measurements until the time is up; an error in one spoils no other."""

    def __init__(self, seconds: float):
        self._start, self._seconds = time.perf_counter(), seconds

    @property
    def elapsed(self) -> float:
        return time.perf_counter() - self._start

    def run(
        self, name: str, measure: Callable[[], dict[str, Any]], share: float = 1.0
    ) -> dict[str, Any]:
        """The measurement's result, or why there is none; it begins within a share of the time."""
        if self.elapsed > share * self._seconds:
            result: dict[str, Any] = dict(left_out="no time was left")
        else:
            try:
                result = measure()
            except Exception as error:  # Such as memory that does not suffice.
                result = dict(error=f"{type(error).__name__}: {str(error)[:300]}")
        print(f"{self.elapsed:6.1f} s  {name:40s} {_words(result)}", flush=True)
        return dict(name=name, **result)


def _words(result: dict[str, Any]) -> str:
    def word(value: Any) -> str:
        return f"{value:.4g}" if isinstance(value, float) else str(value)

    return "  ".join(f"{key} {word(value)}" for key, value in result.items())


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
    expected = jax.jit(attend, static_argnums=3)(wide, exact_pool, batch, "xla")
    out, expected = np.asarray(out, np.float64), np.asarray(expected, np.float64)
    sizes = np.linalg.norm(expected, axis=-1)
    errors = np.linalg.norm(out - expected, axis=-1) / np.maximum(sizes, 1e-6)
    error = float(errors.max())
    return dict(relative_error=error, is_right=bool(error < MAX_RELATIVE_ERROR))


def copy_bandwidth() -> dict[str, Any]:
    """Bytes read and written a second by a copy that is much larger than any cache."""
    array = jnp.ones(2**20 if SMOKE.value else 2**30, jnp.bfloat16)
    seconds = least_seconds(jax.jit(jnp.negative), array)
    return dict(bytes_per_second=2 * array.nbytes / seconds)


def time_case(case: Case, copy_bytes_per_second: float) -> dict[str, Any]:
    """Seconds of one layer's attention by each implementation, and what they come to."""
    arrays, options = make_arrays(case, num_pools=2)
    result: dict[str, Any] = dict(kv_bytes=case.kv_bytes, flops=case.flops)
    for implementation in ("gpu", "xla", "jax"):
        try:
            seconds = _time_implementation(implementation, case, arrays, options)
        except Exception as error:
            result[f"{implementation}_error"] = f"{type(error).__name__}: {str(error)[:200]}"
            continue
        if seconds is not None:
            result[f"{implementation}_seconds"] = seconds
    if "gpu_seconds" in result:
        bandwidth = case.kv_bytes / result["gpu_seconds"]
        result["gpu_kv_bytes_per_second"] = bandwidth
        result["gpu_share_of_copy"] = bandwidth / copy_bytes_per_second
        result["gpu_flops_per_second"] = case.flops / result["gpu_seconds"]
    return result


def _time_implementation(
    implementation: str, case: Case, arrays: Any, options: dict[str, Any]
) -> float | None:
    q, pools, batch = arrays
    if implementation == "jax":
        return _time_jax(case, arrays, options)
    if implementation == "xla" and not case.with_xla:
        return None
    # XLA's path may take many times as long.
    calls = 2 if implementation == "xla" else CALLS_A_PROGRAM

    def attend(q, pool, batch):
        return ragged_paged_attention(
            q, pool, *batch, **options, implementation=implementation, decode_only=case.is_decode
        )

    return least_seconds(jax.jit(_repeated(attend, calls)), q, pools, batch) / calls


def _time_jax(case: Case, arrays: Any, options: dict[str, Any]) -> float | None:
    """Of jax's own kernel, which takes decodes; it has keys and values in pools of their own."""
    q, pools, batch = arrays
    if not case.is_decode or case.is_scaled:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention

    heads = pools[0].shape[1] // 2
    halves = [
        tuple(half.swapaxes(0, 1) for half in (pool[:, :heads], pool[:, heads:])) for pool in pools
    ]

    def attend(q, pool, batch):
        return paged_attention(q * options["scale"], *pool, batch[1], batch[0])

    program = jax.jit(_repeated(attend, CALLS_A_PROGRAM))
    return least_seconds(program, q, halves, batch) / CALLS_A_PROGRAM


def _repeated(attend: Callable[..., jax.Array], calls: int) -> Callable[..., jax.Array]:
    """As many layers in one program, one after the other, each over another pool than the last."""

    def layers(q: jax.Array, pools: Any, batch: Any) -> jax.Array:
        for layer in range(calls):
            out = attend(q, pools[layer % len(pools)], batch)
            q = (0.5 * q + 0.5 * out).astype(q.dtype)
        return q

    return layers


def least_seconds(function: Callable[..., Any], *args: Any) -> float:
    """Of a compiled call, the least of some, after one that warms up."""
    jax.block_until_ready(function(*args))
    times = []
    for _ in range(REPEATS.value):
        start = time.perf_counter()
        jax.block_until_ready(function(*args))
        times.append(time.perf_counter() - start)
    return min(times)


if __name__ == "__main__":
    app.run(main)
