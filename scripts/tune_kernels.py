"""Times the attention kernel's block sizes on a TPU and keeps those that win.

    python scripts/tune_kernels.py --models llama3-8b,llama3-8b/8 --block_sizes 16,128

Runs on the TPU that it tunes for. For each shape it times one layer's decodes and prefills with
the sizes that the kernel would choose itself, then with one size changed at a time, from the best
so far, until no change wins. Sizes that win clearly go into `pallas_kernels/tpu_tuned.json`, which
the kernel asks before it chooses itself (`attention_tpu_sizes.choose_sizes`):

    {"v5e q32 kv8 d128 page16 bfloat16": {"decode_block_tokens": 512, ...}, ...}

Entries for other generations and shapes stay as they are; shapes without an entry work.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import kernel_programs as kp
from absl import app, flags
from tpu_aot import Program

from pallas_kernels import attention_tpu, attention_tpu_sizes, tpu_runtime
from pallas_kernels.attention_tpu_spec import AttentionSizes, AttentionSpec

MODELS = flags.DEFINE_list("models", [m.name for m in kp.MODELS], "Models, or shares of one.")
BLOCK_SIZES = flags.DEFINE_list("block_sizes", ["16", "128"], "Tokens a block of the pool.")
DTYPE = flags.DEFINE_string("dtype", "bfloat16", "Of the pool.")
REPEATS = flags.DEFINE_integer("repeats", 7, "Timings, of which the median counts.", lower_bound=1)

# Values to try for each size, by the kind of batch that it matters for.
CANDIDATES = {
    "decode": {
        "decode_block_tokens": (256, 512, 1024),
        "decode_part_tokens": (128, 256),
        "decode_piece_rows": (128, 512, 1024),
        "decode_interleaves": (False, True),
        "decode_buffers": (2, 4, 8),
    },
    "prefill": {
        "prefill_tile_tokens": (16, 32, 64, 128),
        "prefill_block_tokens": (256, 512, 1024),
        "prefill_buffers": (2, 4),
    },
}
BATCHES = {
    "decode": kp.Lengths.decodes([200, 1000, 1024, 4000] * 8),
    "prefill": kp.Lengths(query_lens=(512, 512), kv_lens=(512, 3000)),
}
# Less is within what two runs differ by.
MIN_GAIN = 1.03
CALLS_A_TIMING = 50

# Seconds a call with these sizes; None where they do not compile.
Timer = Callable[[AttentionSizes], float | None]


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    if jax.default_backend() != "tpu":
        sys.exit(
            f"tune_kernels times kernels on a TPU, and jax runs on {jax.default_backend()} here. "
            "Nothing was changed; untuned shapes work, with sizes from a heuristic."
        )
    models = {model.name: model for model in kp.MODELS}
    unknown = set(MODELS.value) - set(models)
    if unknown:
        raise app.UsageError(f"--models has {sorted(unknown)}; use some of {list(models)}")
    for name in MODELS.value:
        for block_size in map(int, BLOCK_SIZES.value):
            pool = kp.PoolSpec(num_blocks=4096, block_size=block_size, dtype=DTYPE.value)
            with forced_sizes({}):
                spec = spec_of(models[name], pool)
            key = key_of(spec)
            timers = {
                kind: make_timer(
                    kp.attention(models[name], pool, lengths, implementation="tpu"), key
                )
                for kind, lengths in BATCHES.items()
            }
            tuned = tune(spec.sizes, timers)
            update_file(attention_tpu_sizes.TUNED_FILE, key, tuned)
            print(f"{key}: {tuned or 'no sizes are better than the heuristic'}", flush=True)


def spec_of(shape: kp.AttentionShape, pool: kp.PoolSpec) -> AttentionSpec:
    """What the kernel would be compiled for."""
    lengths = BATCHES["decode"]
    return attention_tpu.make_spec(
        (lengths.num_seqs, shape.num_q_heads, shape.head_dim),
        pool.activation_dtype,
        pool.layer(*shape.pool_key),
        lengths.table_width(pool.block_size),
        scale=shape.head_dim**-0.5,
        sliding_window=shape.sliding_window,
        soft_cap=None,
        has_sinks=shape.has_sinks,
        causal=True,
        return_lse=False,
        decode_only=False,
    )


def entry_of(sizes: AttentionSizes) -> dict[str, int]:
    """The sizes as an entry of the file; its limit of VMEM the kernel keeps to itself."""
    entry = dataclasses.asdict(sizes)
    del entry["vmem_limit_bytes"]
    return entry


def key_of(spec: AttentionSpec) -> str:
    """The name of a shape in the file, on this TPU."""
    return attention_tpu_sizes.tuned_key(
        heads=spec.heads,
        pool=spec.pool,
        pool_dtype=spec.pool_dtype,
        generation=tpu_runtime.tpu_generation(),
    )


def forced_sizes(tuned: dict[str, dict[str, int]]):
    """Within it, the kernel finds `tuned` in place of the file."""
    return mock.patch.object(attention_tpu_sizes, "tuned_sizes", lambda: tuned)


def tune(start: AttentionSizes, timers: dict[str, Timer]) -> dict[str, int]:
    """The sizes that beat `start` clearly, those of each kind of batch together; {} if none do."""
    tuned: dict[str, int] = {}
    for kind, timer in timers.items():
        before = timer(start)
        if before is None:
            continue
        best, seconds = climb(start, before, CANDIDATES[kind], timer)
        if before / seconds >= MIN_GAIN:
            tuned |= {size: getattr(best, size) for size in CANDIDATES[kind]}
    return tuned


def climb(
    best: AttentionSizes, seconds: float, candidates: dict[str, tuple[int, ...]], timer: Timer
) -> tuple[AttentionSizes, float]:
    """Changes one size at a time as long as that is faster; the best sizes and their time."""
    improved = True
    while improved:
        improved = False
        for size, values in candidates.items():
            for value in values:
                if value == getattr(best, size):
                    continue
                changed = dataclasses.replace(best, **{size: value})
                found = timer(changed)
                if found is not None and found < seconds:
                    best, seconds, improved = changed, found, True
    return best, seconds


def make_timer(program: Program, key: str) -> Timer:
    """Times an attention program on this device."""
    args = jax.tree.map(_on_device, program.args)

    def seconds(sizes: AttentionSizes) -> float | None:
        def calls(q, *rest):
            # Each call takes the last one's output, so that none can be left out.
            attend = lambda _, q: program.function(q, *rest).astype(q.dtype)
            return jax.lax.fori_loop(0, CALLS_A_TIMING, attend, q)

        try:
            with forced_sizes({key: entry_of(sizes)}):
                compiled = jax.jit(calls).lower(*args).compile()
        except (ValueError, jax.errors.JaxRuntimeError) as error:
            print(f"  {sizes} does not compile: {str(error).splitlines()[0][:100]}")
            return None
        timings = []
        for _ in range(REPEATS.value + 1):
            start = time.perf_counter()
            jax.block_until_ready(compiled(*args))
            timings.append((time.perf_counter() - start) / CALLS_A_TIMING)
        return statistics.median(timings[1:])

    return seconds


def _on_device(leaf: Any) -> jax.Array:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jnp.ones(leaf.shape, leaf.dtype)
    return jnp.asarray(leaf)


def update_file(path: Path, key: str, sizes: dict[str, int]) -> None:
    """Sets the entry of a shape, or removes it where `sizes` is empty."""
    tuned = json.loads(path.read_text()) if path.exists() else {}
    tuned.pop(key, None)
    if sizes:
        tuned[key] = sizes
    path.write_text(json.dumps(tuned, indent=2, sort_keys=True) + "\n")


if __name__ == "__main__":
    app.run(main)
