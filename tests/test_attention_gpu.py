"""The GPU attention kernels, interpreted; their plan; and what is refused or left to XLA.

A few batches run always, all with `-m full`. The kernels need jax 0.11.2 or newer: with an older
one, the tests of the plan and of the refusals are what is left.
"""

import dataclasses
import functools
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import Case, Shape, make_case, oracle_with_lse, relative_errors

from pallas_kernels import (
    attention,
    attention_gpu,
    cascade_attention,
    gpu_runtime,
    ragged_paged_attention,
    split_shared_prefixes,
    write_and_attend,
)
from pallas_kernels.attention_gpu_plan import Share, Tile, make_plan
from pallas_kernels.attention_gpu_spec import CHUNK_TOKENS, decode_spec, prefill_spec
from pallas_kernels.pool_storage import pool_layout

needs_kernels = pytest.mark.skipif(
    gpu_runtime.missing_reason() is not None, reason=str(gpu_runtime.missing_reason())
)

HALF = Shape(head_dim=128, q_dtype="bfloat16", pool_dtype="bfloat16")
SHAPES = {
    "grouped": dataclasses.replace(HALF, return_lse=True),
    "window_cap_sinks": dataclasses.replace(HALF, sliding_window=37, soft_cap=5.0, has_sinks=True),
    "two_tokens_a_row": dataclasses.replace(
        HALF, head_dim=64, pool_width=128, num_q_heads=9, num_kv_heads=3
    ),
    "int8": dataclasses.replace(HALF, pool_dtype="int8", block_size=32, max_blocks=12),
}
MORE_SHAPES = {
    "float16": dataclasses.replace(HALF, q_dtype="float16", pool_dtype="float16", soft_cap=30.0),
    "head_dim_64": dataclasses.replace(HALF, head_dim=64, num_q_heads=16, has_sinks=True),
    "head_dim_256": dataclasses.replace(HALF, head_dim=256, num_kv_heads=1, sliding_window=100),
    "padded_96": dataclasses.replace(HALF, head_dim=96, pool_width=128, num_q_heads=2),
    "page_of_8": dataclasses.replace(HALF, block_size=8, max_blocks=50),
    "page_of_64": dataclasses.replace(HALF, block_size=64, max_blocks=6, return_lse=True),
    "page_of_128": dataclasses.replace(HALF, block_size=128, max_blocks=4, sliding_window=150),
    "one_group": dataclasses.replace(HALF, num_q_heads=16, num_kv_heads=1),
    "many_heads_a_group": dataclasses.replace(HALF, num_q_heads=80, num_kv_heads=1),
    "as_many_kv_heads": dataclasses.replace(HALF, num_q_heads=3, num_kv_heads=3),
    "float8_e4m3fn": dataclasses.replace(HALF, pool_dtype="float8_e4m3fn", return_lse=True),
    "float8_e5m2": dataclasses.replace(HALF, head_dim=64, pool_dtype="float8_e5m2"),
    "int8_256": dataclasses.replace(
        HALF, head_dim=256, num_kv_heads=1, pool_dtype="int8", sliding_window=90, soft_cap=5.0
    ),
}
BATCHES = {
    "empty": [],
    "few": [(1, 130), (20, 50)],
    "decodes": [(1, 383), (1, 0), (1, 63), (1, 64), (1, 65)],
    "one_long_chunk": [(96, 288)],
    "mixed": [(1, 200), (65, 100), (1, 7), (28, 0), (1, 383)],
}
NOT_CAUSAL = {
    "more_queries_than_tokens": [(20, -15), (1, 40), (60, 20)],
    "nothing_to_see_between": [(1, -1), (7, -7), (4, 252), (3, -3), (81, 100)],
}
QUICK = [(shape, "few") for shape in SHAPES]
ALL = [(shape, batch) for shape in SHAPES | MORE_SHAPES for batch in BATCHES]
RUNS = QUICK + [pytest.param(*run, marks=pytest.mark.full) for run in ALL if run not in QUICK]


def attend(case: Case, **static: Any) -> Any:
    arrays = {k: v for k, v in case.options.items() if isinstance(v, jax.Array)}
    static |= {k: v for k, v in case.options.items() if k not in arrays}

    def op(batch, arrays):
        return ragged_paged_attention(*batch, **arrays, **static, implementation="gpu")

    return jax.tree.map(np.asarray, jax.jit(op)(case.arrays, arrays))


def check(case: Case, result: Any) -> None:
    out, lse = result if case.shape.return_lse else (result, None)
    expected, expected_lse = oracle_with_lse(case)
    assert out.dtype == case.shape.q_dtype
    assert np.all(out[case.num_real_rows :] == 0), "rows of padding must be zero"
    errors = relative_errors(case, out, expected)
    assert all(error < 4e-3 for error in errors), (errors, case.query_lens, case.kv_lens)
    if lse is not None:
        np.testing.assert_allclose(lse, expected_lse, rtol=1e-5, atol=1e-5)


@needs_kernels
@pytest.mark.parametrize(("shape", "batch"), RUNS)
def test_batches_match_float64(shape: str, batch: str) -> None:
    form = (SHAPES | MORE_SHAPES)[shape]
    if batch == "few":
        form = dataclasses.replace(form, max_seqs=3, num_rows=24)
    case = make_case(form, BATCHES[batch], seed=1)
    check(case, attend(case))


@needs_kernels
@pytest.mark.parametrize(
    "batch",
    ["more_queries_than_tokens", pytest.param("nothing_to_see_between", marks=pytest.mark.full)],
)
def test_batches_without_causality_match_float64(batch: str) -> None:
    shape = dataclasses.replace(HALF, return_lse=True, causal=False)
    case = make_case(shape, NOT_CAUSAL[batch], seed=2)
    check(case, attend(case))


@needs_kernels
@pytest.mark.parametrize(
    "name", ["grouped", *(pytest.param(n, marks=pytest.mark.full) for n in MORE_SHAPES)]
)
def test_decode_only_matches_float64(name: str) -> None:
    case = make_case((SHAPES | MORE_SHAPES)[name], BATCHES["decodes"], seed=3)
    check(case, attend(case, decode_only=True))


@needs_kernels
def test_any_cut_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(SHAPES["grouped"], BATCHES["decodes"], seed=4)
    for number in (1, 5):
        monkeypatch.setattr(gpu_runtime, "num_multiprocessors", lambda number=number: number)
        check(case, attend(case, decode_only=True))


@needs_kernels
def test_the_kernels_have_no_races() -> None:
    with gpu_runtime.detect_races():
        form = dataclasses.replace(SHAPES["int8"], max_seqs=3, num_rows=24)
        case = make_case(form, [(1, 300), (20, 100), (1, 12)], seed=5)
        check(case, attend(case))


# A line of the kernel, and what stands there in a copy with a fault.
FAULTS = {
    "arrived": ("attention_gpu_kernel", "plgpu.barrier_wait(arrived.at[stage])", "pass"),
    "queries": ("attention_gpu_kernel", "plgpu.barrier_wait(queries_arrived.at[buffer])", "pass"),
    "consumed": ("attention_gpu_steps", "plgpu.barrier_wait(consumed.at[stage])", "pass"),
    "cleaned": ("attention_gpu_kernel", "plgpu.barrier_wait(barrier)", "pass"),
}
RUN_COPY = """
import pathlib, sys, types
sys.path.insert(0, sys.argv[1])
import pallas_kernels
folder = pathlib.Path(pallas_kernels.__file__).parent
for part in ("_steps", "_kernel", "_merge", ""):
    name = "attention_gpu" + part
    source = (folder / (name + ".py")).read_text()
    if name == sys.argv[2]:
        assert source.count(sys.argv[3]) == 1
        source = source.replace(sys.argv[3], sys.argv[4])
    module = types.ModuleType("pallas_kernels." + name)
    sys.modules[module.__name__] = module
    exec(compile(source, name, "exec"), module.__dict__)
pallas_kernels.attention.attention_gpu = sys.modules["pallas_kernels.attention_gpu"]
import test_attention_gpu as tests
case = tests.make_case(tests.SHAPES["grouped"], [(40, 330), (2, 90), (1, 383), (1, 9)], seed=6)
tests.gpu_runtime.num_multiprocessors = lambda: 1  # Few programs, with many segments each.
with tests.gpu_runtime.detect_races():
    tests.check(case, tests.attend(case))
print("the copy passes")
"""


@needs_kernels
@pytest.mark.parametrize(
    "fault", ["arrived", *(pytest.param(f, marks=pytest.mark.full) for f in ["", *FAULTS])]
)
def test_a_missing_wait_is_caught(fault: str) -> None:
    """In processes of their own: an error leaves the interpreter unusable."""
    change = FAULTS.get(fault, ("", "", ""))
    command = [sys.executable, "-c", RUN_COPY, str(Path(__file__).parent), *change]
    run = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert ("the copy passes" in run.stdout) == (fault == ""), run.stderr[-2000:]
    assert fault == "" or "Error" in run.stderr


@needs_kernels
@pytest.mark.full
def test_cascade_and_write_and_attend_take_the_kernels() -> None:
    rng = np.random.default_rng(7)
    shape = dataclasses.replace(HALF, max_seqs=4, num_rows=4)
    case = make_case(shape, [(1, 150)] * 4, seed=7)
    q, pool, kv_lens, tables, starts, num_seqs = case.arrays
    tables = tables.at[1:, :6].set(tables[0, :6])
    batch = (kv_lens, tables, starts, num_seqs)
    lens, table, first = (np.asarray(array) for array in batch[:3])
    split = split_shared_prefixes(lens, table, first, 4, block_size=16, min_tokens=64)
    options: dict[str, Any] = dict(scale=0.1, implementation="gpu", decode_only=True)
    flat = ragged_paged_attention(q, pool, *batch, **options)
    cascade = cascade_attention(q, pool, split, starts, num_seqs, **options)
    np.testing.assert_allclose(as_float32(cascade), as_float32(flat), atol=0.02)

    k, v = (jnp.asarray(rng.standard_normal((4, 2, 128)), jnp.bfloat16) for _ in range(2))
    write = functools.partial(
        write_and_attend, q, k, v, pool, kv_lens, case.arrays[3], num_seqs, scale=0.1
    )
    for got, expected in zip(
        write(implementation="gpu"), write(implementation="reference"), strict=True
    ):
        # Whatever else stands in the pools is the same garbage.
        got, expected = map(np.nan_to_num, (as_float32(got), as_float32(expected)))
        np.testing.assert_allclose(got, expected, atol=0.02)


def as_float32(array: Any) -> np.ndarray:
    return np.asarray(array, np.float32)


def spec_of(head_dim: int = 128, group: int = 4, pool_dtype: str = "bfloat16", **options: Any):
    pool = jax.ShapeDtypeStruct((8, 2 * 2, 16, head_dim), pool_dtype)
    defaults: dict[str, Any] = dict(soft_cap=None, sliding_window=None, causal=True)
    return decode_spec(
        pool_layout(pool, head_dim),
        2 * group,
        pool_dtype=pool_dtype,
        q_dtype="bfloat16",
        num_multiprocessors=5,
        **(defaults | options),
    )


@pytest.mark.parametrize(("is_prefill", "group"), [(False, 4), (True, 4), (True, 80)])
@pytest.mark.parametrize("window", [None, 100])
def test_shares_are_equal_and_cover_all_chunks_once(
    window: int | None, is_prefill: bool, group: int
) -> None:
    spec = spec_of(sliding_window=window, group=group)
    query_lens = np.array([1, 1, 70, 1, 33, 1, 0, 0])
    kv_lens = np.array([3000, 1, 200, 129, 33, 640, 0, 0])
    is_taken = (query_lens > 1) if is_prefill else query_lens == 1
    spec = prefill_spec(spec) if is_prefill else spec
    starts = jnp.asarray(np.cumsum([0, *query_lens]), jnp.int32)
    plan = make_plan(
        spec,
        jnp.asarray(kv_lens, jnp.int32),
        starts,
        jnp.asarray(is_taken),
        num_rows=120,
        one_query_each=not is_prefill,
    )
    tiles, shares = np.asarray(plan.tiles), np.asarray(plan.shares)

    expected = set()
    tile = 0
    for seq in np.flatnonzero(is_taken):
        for first in range(0, query_lens[seq], spec.tile_tokens):
            position = kv_lens[seq] - query_lens[seq] + first
            last = min(position + spec.tile_tokens, kv_lens[seq]) - 1
            low = max(0, position - window + 1) if window else 0
            for head in range(spec.num_kv_heads):
                chunks = range(low // CHUNK_TOKENS, last // CHUNK_TOKENS + 1)
                expected |= {(tile, head, chunk) for chunk in chunks}
            tile += 1

    covered, places = [], []
    for program, share in enumerate(shares):
        for unit in range(
            share[Share.FIRST_UNIT], share[Share.FIRST_UNIT] + share[Share.NUM_UNITS]
        ):
            index, head = divmod(unit, spec.num_kv_heads)
            row = tiles[index]
            start = spec.num_kv_heads * row[Tile.START] + head * row[Tile.NUM_CHUNKS]
            begin = max(start, share[Share.BEGIN])
            end = min(start + row[Tile.NUM_CHUNKS], share[Share.END])
            assert begin < end, "an empty segment"
            first = row[Tile.LOW] // CHUNK_TOKENS - start
            covered += [(index, head, first + chunk) for chunk in range(begin, end)]
            places.append(unit + program)
    assert len(covered) == len(expected) and set(covered) == expected
    assert len(set(places)) == len(places), "two segments in one place"
    sizes = shares[:, Share.END] - shares[:, Share.BEGIN]
    assert sizes.max() <= -(-len(expected) // spec.num_programs)


def test_rows_find_their_tiles() -> None:
    spec = prefill_spec(spec_of())
    assert spec.tile_tokens == 32
    starts = jnp.asarray([0, 1, 71, 71, 71], jnp.int32)
    is_taken = jnp.asarray([False, True, False, False])
    lens = jnp.asarray([5, 70, 0, 0], jnp.int32)
    plan = make_plan(spec, lens, starts, is_taken, num_rows=75, one_query_each=False)
    rows = np.asarray(plan.row_tiles)
    assert rows[0] == -1 and np.all(rows[71:] == -1)
    np.testing.assert_array_equal(rows[1:71], np.arange(70) // 32)
    np.testing.assert_array_equal(np.asarray(plan.row_tokens)[1:71], np.arange(70) % 32)
    np.testing.assert_array_equal(np.asarray(plan.tile_rows)[:3], [1, 33, 65])


@pytest.mark.parametrize(
    ("spec", "rows", "programs_each", "stages"),
    [
        (spec_of(group=1), 8, 2, 3),
        (spec_of(group=4), 8, 2, 3),
        (spec_of(group=8), 8, 2, 3),
        (spec_of(group=16), 16, 2, 3),
        (spec_of(head_dim=64), 8, 2, 6),
        (spec_of(head_dim=256), 8, 1, 3),
        (spec_of(pool_dtype="int8"), 8, 2, 4),
        (prefill_spec(spec_of()), 128, 1, 4),
    ],
)
def test_sizes_fit_a_multiprocessor(spec, rows, programs_each, stages) -> None:
    assert (spec.rows, spec.programs_each, spec.num_stages) == (rows, programs_each, stages)


@pytest.mark.parametrize(
    ("q", "pool", "message"),
    [
        (((4, 8, 128), "float32"), ((8, 4, 16, 128), "float32"), "q has dtype float32"),
        (((4, 8, 128), "bfloat16"), ((8, 4, 16, 128), "float16"), "pool_layer is float16"),
        (((4, 8, 128), "bfloat16"), ((8, 4, 24, 128), "bfloat16"), "block_size is 24"),
        (((4, 8, 32), "bfloat16"), ((8, 4, 16, 32), "bfloat16"), "head_dim of 64, 128 or 256"),
        (((4, 258, 128), "bfloat16"), ((8, 4, 16, 128), "bfloat16"), "129 heads a KV head"),
    ],
)
def test_unsupported_calls_are_refused_with_the_reason(q, pool, message) -> None:
    message = message if gpu_runtime.missing_reason() is None else "use jax 0.11.2"
    q, pool = jnp.zeros(*q), jnp.zeros(*pool)
    assert message in str(attention_gpu.unsupported_reason(q, pool))
    batch = (jnp.zeros(2, jnp.int32), jnp.zeros((2, 3), jnp.int32), jnp.zeros(3, jnp.int32), 0)
    with pytest.raises(ValueError, match="implementation 'gpu' cannot run this"):
        ragged_paged_attention(q, pool, *batch, scale=1.0, implementation="gpu")


class FakeGpu:
    device_kind, core_count = "NVIDIA A100", 108

    def __init__(self, compute_capability: str):
        self.compute_capability = compute_capability


@pytest.mark.parametrize(
    ("capability", "dtype", "name", "reason"),
    [
        ("8.0", "bfloat16", "xla", "NVIDIA A100 has compute capability 8.0"),
        ("10.0", "bfloat16", "xla", "compute capability 10.0"),
        ("9.0", "float32", "xla", "q has dtype float32"),
        ("9.0", "bfloat16", "gpu", None),
    ],
)
def test_other_gpus_take_xla_and_say_why_once(
    capability, dtype, name, reason, monkeypatch: pytest.MonkeyPatch, caplog
) -> None:
    q, pool = jnp.zeros((4, 8, 128), dtype), jnp.zeros((8, 4, 16, 128), dtype)
    lens, tables = jnp.zeros(2, jnp.int32), jnp.zeros((2, 3), jnp.int32)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "local_devices", lambda: [FakeGpu(capability)])
    if gpu_runtime.missing_reason() is not None:
        name, reason = "xla", "use jax 0.11.2"
    attention._log_once.cache_clear()
    with caplog.at_level("INFO"):
        for _ in range(2):
            assert attention.choose_implementation(None, None, q, pool, lens, tables) == name
    said = [r.getMessage() for r in caplog.records if "attention on this GPU" in r.getMessage()]
    assert len(said) == (reason is not None)
    assert reason is None or reason in said[0]
