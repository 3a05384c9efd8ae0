"""Times paged attention with its KV write as a model's step runs them, one unrolled layer after
another over donated pools.

    python scripts/bench_attention.py --implementations cpu,xla,naive --repeats 15

`naive` gathers every table padded to the longest and attends densely; it serves decodes only.
Prints a table and, as the last line, one JSON object.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from pallas_kernels import plan_attention, ragged_paged_attention, write_kv

IMPLEMENTATIONS = flags.DEFINE_list(
    "implementations", ["cpu", "xla", "naive"], "cpu, xla, reference, naive"
)
CASES = flags.DEFINE_list("cases", [], "Cases to run, by name; all of them if empty.")
HEADS = flags.DEFINE_list("heads", ["9", "3", "64"], "Query heads, KV heads, head_dim.")
NUM_LAYERS = flags.DEFINE_integer("num_layers", 30, "Layers a step.", lower_bound=1)
BLOCK_SIZE = flags.DEFINE_integer("block_size", 16, "Tokens a block.", lower_bound=1)
NUM_BLOCKS = flags.DEFINE_integer("num_blocks", 0, "Blocks of the pool; 0 for what a case needs.")
DTYPE = flags.DEFINE_enum(
    "dtype", "float32", ["float32", "bfloat16", "uint16"], "Of the pool; uint16 = bfloat16 bits."
)
REPEATS = flags.DEFINE_integer("repeats", 15, "Interleaved repetitions.", lower_bound=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Sequences as (query tokens, tokens in the cache), in a bucket of slots and table columns."""

    lengths: list[tuple[int, int]]
    max_seqs: int = 0  # 0: as many as there are
    max_kv_tokens: int = 0  # 0: the longest


ALL_CASES = {
    "decode_32x192": Case(lengths=[(1, 192)] * 32),
    "decode_32x1024": Case(lengths=[(1, 1024)] * 32),
    "decode_1x2000_31x100": Case(lengths=[(1, 2000)] + [(1, 100)] * 31),
    "decode_32x160": Case(lengths=[(1, 160)] * 32),  # as many tokens as the case above
    "decode_1x192": Case(lengths=[(1, 192)]),
    "decode_1x2000": Case(lengths=[(1, 2000)]),
    "decode_3x192_in_32x8192": Case(lengths=[(1, 192)] * 3, max_seqs=32, max_kv_tokens=8192),
    "prefill_1x512": Case(lengths=[(512, 512)]),
    "prefill_4x128": Case(lengths=[(128, 128)] * 4),
    "prefill_512_after_1500": Case(lengths=[(512, 2012)]),
    "mixed_31_decodes_256_chunk": Case(lengths=[(1, 192)] * 31 + [(256, 256)]),
}


@dataclasses.dataclass(kw_only=True)
class Run:
    """A compiled step, its state and its times."""

    step: Callable[..., Any]
    batch: tuple[jax.Array, ...]
    state: Any
    compile_seconds: float = 0.0
    seconds: list[float] = dataclasses.field(default_factory=list)
    cpu_seconds: list[float] = dataclasses.field(default_factory=list)

    def once(self) -> None:
        start, cpu_start = time.perf_counter(), time.process_time()
        self.state = self.step(*self.state, *self.batch)
        jax.block_until_ready(self.state)
        self.seconds.append(time.perf_counter() - start)
        self.cpu_seconds.append(time.process_time() - cpu_start)


def batch_of(case: Case, block_size: int) -> tuple[tuple[jax.Array, ...], int]:
    """(kv_lens, tables, query_starts, num_seqs, slots) and the number of blocks they use."""
    max_seqs = case.max_seqs or len(case.lengths)
    longest = max(max(kv_len for _, kv_len in case.lengths), case.max_kv_tokens)
    tables = np.zeros((max_seqs, -(-longest // block_size)), np.int32)
    used = [-(-kv_len // block_size) for _, kv_len in case.lengths]
    block_ids = np.random.default_rng(0).permutation(sum(used)) + 1
    slots, taken = [], 0
    for seq, (query_len, kv_len) in enumerate(case.lengths):
        tables[seq, : used[seq]] = block_ids[taken : taken + used[seq]]
        taken += used[seq]
        new = np.arange(kv_len - query_len, kv_len)
        slots.append(tables[seq, new // block_size] * block_size + new % block_size)
    slots.append(np.zeros(max_seqs - len(case.lengths), np.int32))
    kv_lens = np.zeros(max_seqs, np.int32)
    kv_lens[: len(case.lengths)] = [kv_len for _, kv_len in case.lengths]
    ends = np.cumsum([0] + [query_len for query_len, _ in case.lengths])
    starts = np.full(max_seqs + 1, ends[-1], np.int32)
    starts[: len(ends)] = ends
    arrays = (kv_lens, tables, starts, np.int32(len(case.lengths)), np.concatenate(slots))
    return tuple(jnp.asarray(a, jnp.int32) for a in arrays), 1 + sum(used)


def naive_attention(q, pool, kv_lens, tables, *, scale):
    """Decodes alone: the padded gather that a first implementation would write."""
    num_kv_heads, head_dim = pool.shape[1] // 2, q.shape[2]
    kv = pool[tables].astype(jnp.float32)  # [S, B, 2 * Hkv, block_size, D]
    grouped = q.reshape(q.shape[0], num_kv_heads, -1, head_dim)
    scores = jnp.einsum("shgd,sbhtd->shgbt", grouped, kv[:, :, :num_kv_heads]) * scale
    positions = jnp.arange(tables.shape[1] * pool.shape[2]).reshape(tables.shape[1], -1)
    scores = jnp.where(positions < kv_lens[:, None, None, None, None], scores, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=(-2, -1))
    return jnp.einsum("shgbt,sbhtd->shgd", weights, kv[:, :, num_kv_heads:]).reshape(q.shape)


def make_run(case: Case, implementation: str, heads: tuple[int, int, int]) -> Run | None:
    """Compiles the case; None where the implementation does not serve it."""
    num_q_heads, num_kv_heads, head_dim = heads
    block_size = BLOCK_SIZE.value
    batch, num_blocks = batch_of(case, block_size)
    num_blocks = max(num_blocks, NUM_BLOCKS.value)
    if implementation == "naive" and (
        DTYPE.value == "uint16" or any(query_len > 1 for query_len, _ in case.lengths)
    ):
        return None
    num_rows = batch[4].shape[0]
    scale = head_dim**-0.5

    def step(q, pools, kv_lens, tables, starts, num_seqs, slots):
        plan = None
        if implementation == "xla":
            plan = plan_attention(
                kv_lens, tables, starts, num_seqs, num_rows=num_rows, block_size=block_size
            )
        new_pools = []
        for pool in pools:
            k = q[:, :num_kv_heads] * 0.5
            pool = write_kv(pool, k, k + 1.0, slots)
            if implementation == "naive":
                out = naive_attention(q, pool, kv_lens, tables, scale=scale)
            else:
                out = ragged_paged_attention(
                    q,
                    pool,
                    kv_lens,
                    tables,
                    starts,
                    num_seqs,
                    scale=scale,
                    implementation=implementation,
                    plan=plan,
                )
            q = 0.9 * q + 0.1 * out
            new_pools.append(pool)
        return q, new_pools

    key = jax.random.key(0)
    shape = (num_blocks, 2 * num_kv_heads, block_size, head_dim)
    pools = [jnp.ones(shape, DTYPE.value) for _ in range(NUM_LAYERS.value)]
    q = jax.random.normal(key, (num_rows, num_q_heads, head_dim))
    start = time.perf_counter()
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(q, pools, *batch).compile()
    run = Run(step=compiled, batch=batch, state=(q, pools))
    run.compile_seconds = time.perf_counter() - start
    addresses = [pool.unsafe_buffer_pointer() for pool in pools]
    run.once()
    run.seconds.clear()
    run.cpu_seconds.clear()
    if addresses != [pool.unsafe_buffer_pointer() for pool in run.state[1]]:
        print(f"  the pool moved: {implementation}")
    return run


def attention_flops(case: Case, num_q_heads: int, head_dim: int) -> int:
    """Multiplications and additions that the visible (query, key) pairs need, a layer."""
    pairs = sum(n * (kv_len - n) + n * (n + 1) // 2 for n, kv_len in case.lengths)
    return 4 * pairs * num_q_heads * head_dim


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    heads = tuple(int(number) for number in HEADS.value)
    if len(heads) != 3:
        raise app.UsageError(f"--heads={HEADS.value}: give query heads, KV heads, head_dim")
    results = []
    print(
        f"{'case':30s}{'implementation':>15s}{'median ms':>11s}{'least ms':>10s}{'CPU ms':>8s}",
        end="",
    )
    print(f"{'GB/s':>7s}{'GFLOP/s':>9s}{'of naive':>9s}{'compile s':>10s}")
    for name in CASES.value or ALL_CASES:
        case = ALL_CASES[name]
        made = {i: make_run(case, i, heads) for i in IMPLEMENTATIONS.value}
        runs = {i: run for i, run in made.items() if run is not None}
        for _ in range(REPEATS.value):
            for run in runs.values():
                run.once()
        naive = statistics.median(runs["naive"].seconds) if "naive" in runs else None
        for implementation, run in runs.items():
            median = statistics.median(run.seconds)
            layers = NUM_LAYERS.value
            kv_bytes = 2 * heads[1] * heads[2] * jnp.dtype(DTYPE.value).itemsize
            kv_bytes *= layers * sum(kv_len for _, kv_len in case.lengths)
            flops = attention_flops(case, heads[0], heads[2]) * layers
            flops_per_second = flops / median
            row: dict[str, Any] = dict(
                case=name,
                implementation=implementation,
                median_seconds=median,
                least_seconds=min(run.seconds),
                cpu_seconds=statistics.median(run.cpu_seconds),
                live_kv_bytes_per_second=kv_bytes / median,
                visible_flops_per_second=flops_per_second,
                ratio_to_naive=naive and median / naive,
                compile_seconds=run.compile_seconds,
            )
            results.append(row)
            print(
                f"{name:30s}{implementation:>15s}{median * 1e3:11.2f}{min(run.seconds) * 1e3:10.2f}"
                f"{row['cpu_seconds'] * 1e3:8.1f}"
                f"{kv_bytes / median / 1e9:7.1f}{flops_per_second / 1e9:9.1f}"
                f"{'-' if naive is None else format(median / naive, '.2f'):>9s}"
                f"{run.compile_seconds:10.1f}",
                flush=True,
            )
    settings = dict(
        heads=heads, num_layers=NUM_LAYERS.value, block_size=BLOCK_SIZE.value, dtype=DTYPE.value
    )
    print(json.dumps(dict(jax=jax.__version__, **settings, results=results)))


if __name__ == "__main__":
    app.run(main)
