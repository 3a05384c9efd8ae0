"""Cascade attention against the float64 oracle of the whole batch, and the host's split of it."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import Case, Shape, make_case, oracle_with_lse, relative_errors
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import attention_tpu
from pallas_kernels.attention import merge_attention
from pallas_kernels.cascade import CascadeBatch, cascade_attention, split_shared_prefixes

IMPLEMENTATIONS = ("reference", "xla")

SMALL = Shape(max_seqs=9, num_rows=40, max_blocks=12, block_size=8)
SHAPES = {
    "grouped": SMALL,
    "int8_cap_sinks": dataclasses.replace(
        SMALL, pool_dtype="int8", soft_cap=5.0, has_sinks=True, num_q_heads=6
    ),
    "two_tokens_a_row_lse": dataclasses.replace(
        SMALL, head_dim=64, pool_width=128, return_lse=True
    ),
    "bfloat16": dataclasses.replace(SMALL, q_dtype="bfloat16", pool_dtype="bfloat16"),
}

# Query tokens and tokens before them; begin, end and shared blocks of each group.
BATCHES = {
    "decodes": ([(1, 40), (1, 33), (1, 90), (1, 37), (1, 35)], [(0, 5, 4)]),
    "mixed": ([(1, 20), (3, 40), (1, 41), (9, 42), (5, 0)], [(1, 4, 5)]),
    "two_groups": (
        [(1, 16), (2, 16), (4, 60), (1, 7), (1, 70), (1, 50), (1, 48), (8, 0)],
        [(0, 2, 2), (4, 7, 6)],
    ),
    "neighbours": ([(1, 30), (1, 31), (7, 60), (7, 70)], [(0, 2, 3), (2, 4, 7)]),
    "nothing_shared": ([(1, 40), (3, 33), (1, 90)], []),
    "empty": ([], []),
}


def shared_case(shape: Shape, name: str, seed: int, batch: Any = None) -> tuple[Case, CascadeBatch]:
    """The batch (of that name), sharing its groups' blocks and no others, and its split."""
    lengths, groups = batch or BATCHES[name]
    case = make_case(shape, lengths, seed)
    q, pool, kv_lens, tables, starts, num_seqs = case.arrays
    shared = np.array(tables)
    for begin, end, num_blocks in groups:
        shared[begin:end, :num_blocks] = shared[begin, :num_blocks]
    arrays = (q, pool, kv_lens, jnp.asarray(shared), starts, num_seqs)
    split = split_shared_prefixes(
        np.asarray(kv_lens),
        shared,
        np.asarray(starts),
        len(lengths),
        block_size=shape.block_size,
        min_seqs=2,
        min_tokens=16,
    )
    return dataclasses.replace(case, arrays=arrays), split


@functools.cache
def compiled(implementation: str, static: tuple):
    """The jitted op; array options come as arguments so that one program serves all batches."""

    def op(q, pool, split, starts, num_seqs, options):
        return cascade_attention(
            q,
            pool,
            split,
            starts,
            num_seqs,
            **options,
            **dict(static),
            implementation=implementation,
        )

    return jax.jit(op)


def attend(case: Case, split: CascadeBatch, implementation: str, **static: Any) -> Any:
    q, pool, _, _, starts, num_seqs = case.arrays
    options = {k: v for k, v in case.options.items() if k not in ("sliding_window", "causal")}
    arrays = {k: v for k, v in options.items() if isinstance(v, jax.Array)}
    static |= {k: v for k, v in options.items() if k not in arrays}
    op = compiled(implementation, tuple(static.items()))
    return jax.tree.map(np.asarray, op(q, pool, split, starts, num_seqs, arrays))


def check(case: Case, result: Any) -> None:
    out, lse = result if case.shape.return_lse else (result, None)
    expected, expected_lse = oracle_with_lse(case)
    assert out.dtype == case.shape.q_dtype
    assert np.all(out[case.num_real_rows :] == 0), "rows of padding must be zero"
    limit = 1e-2 if case.shape.q_dtype == "bfloat16" else 2e-6
    # Not their max: that of Python passes over NaN.
    assert all(error < limit for error in relative_errors(case, out, expected))
    if lse is not None:
        np.testing.assert_allclose(lse, expected_lse, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", BATCHES)
def test_batches_match_float64(name: str, implementation: str) -> None:
    case, split = shared_case(SHAPES["grouped"], name, seed=1)
    saved = [(end - begin - 1) * num_blocks for begin, end, num_blocks in BATCHES[name][1]]
    assert split.num_shared_tokens >= 8 * sum(saved)  # make_case shares some blocks of its own
    check(case, attend(case, split, implementation))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", sorted(SHAPES.keys() - {"grouped"}))
def test_shapes_match_float64(name: str, implementation: str) -> None:
    case, split = shared_case(SHAPES[name], "two_groups", seed=2)
    assert split.num_shared_tokens > 0
    check(case, attend(case, split, implementation))


# Of a prefix, the TPU kernel takes 2 sequences at a time in float32, and 8 or 4 in bfloat16.
TPU_CASES: dict[str, tuple[dict[str, Any], int]] = {
    "cap_sinks": (dict(head_dim=128, has_sinks=True, soft_cap=5.0), 5),
    "two_tokens_a_row_lse": (
        dict(head_dim=64, pool_width=128, num_kv_heads=1, block_size=16, return_lse=True),
        5,
    ),
    "bfloat16": (dict(head_dim=128, q_dtype="bfloat16", pool_dtype="bfloat16"), 9),
    "four_at_a_time": (
        dict(
            num_q_heads=9,
            num_kv_heads=3,
            head_dim=64,
            pool_width=128,
            block_size=16,
            q_dtype="bfloat16",
            pool_dtype="bfloat16",
        ),
        5,
    ),
}


@pytest.mark.parametrize("name", TPU_CASES)
def test_the_tpu_kernels_continue_from_the_prefix(name: str) -> None:
    changes, num_sharing = TPU_CASES[name]
    shape = dataclasses.replace(SMALL, num_rows=12, max_seqs=10, **changes)
    lengths = [(1, 60), (1, 53), (1, 90), (1, 57), (1, 55), (1, 49), (1, 80), (1, 51), (1, 62)]
    lengths = [*lengths[:num_sharing], (1, 20)]
    case, split = shared_case(shape, "decodes", seed=4, batch=(lengths, [(0, num_sharing, 3)]))
    assert split.num_shared_tokens > 0
    check(case, attend(case, split, "tpu", decode_only=True))


@pytest.mark.parametrize(
    ("generation", "num_q_heads"),
    [
        pytest.param("v4", 2, id="float32_on_v4"),
        pytest.param("v5e", 24, id="many_heads", marks=pytest.mark.full),
    ],
)
def test_decodes_that_fill_the_registers_take_two_ordinary_calls(
    generation: str, num_q_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_tpu, "tpu_generation", lambda: generation)
    monkeypatch.setattr(attention_tpu, "attend_in_cascade", None)  # not to be called
    changes = dict(num_q_heads=num_q_heads, num_kv_heads=1, has_sinks=True)
    shape = dataclasses.replace(SMALL, num_rows=6, max_seqs=5, head_dim=128, **changes)
    lengths = [(1, 60), (1, 53), (1, 57), (1, 20)]
    case, split = shared_case(shape, "decodes", seed=6, batch=(lengths, [(0, 3, 3)]))
    compiled.cache_clear()  # no trace for another generation
    check(case, attend(case, split, "tpu", decode_only=True))
    compiled.cache_clear()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_decode_only_concerns_the_suffixes_alone(implementation: str) -> None:
    case, split = shared_case(SHAPES["int8_cap_sinks"], "decodes", seed=3)
    check(case, attend(case, split, implementation, decode_only=True))


def test_one_program_serves_batches_with_and_without_prefixes() -> None:
    num_traces = 0

    @jax.jit
    def op(q, pool, split, starts, num_seqs):
        nonlocal num_traces
        num_traces += 1
        return cascade_attention(
            q, pool, split, starts, num_seqs, scale=0.25, implementation="reference"
        )

    for name in ("decodes", "nothing_shared", "two_groups"):
        case, split = shared_case(SHAPES["grouped"], name, seed=4)
        q, pool, _, _, starts, num_seqs = case.arrays
        check(case, np.asarray(op(q, pool, split, starts, num_seqs)))
    assert num_traces == 1


def test_bad_arguments_are_refused_by_name() -> None:
    case, split = shared_case(SHAPES["grouped"], "decodes", seed=5)
    q, pool, _, _, starts, num_seqs = case.arrays
    with pytest.raises(ValueError, match="cascade was made for a block_size of 4"):
        other = dataclasses.replace(split, block_size=4)
        cascade_attention(q, pool, other, starts, num_seqs, scale=1.0)
    with pytest.raises(ValueError, match="sinks are given with return_lse"):
        cascade_attention(
            q, pool, split, starts, num_seqs, scale=1.0, sinks=jnp.zeros(4), return_lse=True
        )
    table, lens = np.zeros((3, 4), np.int32), np.zeros(3, np.int32)
    starts = np.zeros(4, np.int32)
    with pytest.raises(ValueError, match="min_seqs is 1"):
        split_shared_prefixes(lens, table, starts, 3, block_size=8, min_seqs=1)
    with pytest.raises(ValueError, match="num_seqs is 4"):
        split_shared_prefixes(lens, table, starts, 4, block_size=8)
    with pytest.raises(TypeError, match="block_tables has dtype int64"):
        split_shared_prefixes(lens, table.astype(np.int64), starts, 3, block_size=8)


# --- the split ---------------------------------------------------------------------------------


def split_tables(tables: list[list[int]], kv_lens: list[int], **options: Any) -> CascadeBatch:
    """The split of decodes with these tables, blocks of 8 tokens."""
    num_seqs = len(tables)
    padded = np.zeros((num_seqs, max(map(len, tables))), np.int32)
    for row, table in zip(padded, tables, strict=True):
        row[: len(table)] = table
    starts = np.arange(num_seqs + 1, dtype=np.int32)
    limits: dict[str, Any] = dict(min_seqs=2, min_tokens=8) | options
    lens = np.array(kv_lens, np.int32)
    return split_shared_prefixes(lens, padded, starts, num_seqs, block_size=8, **limits)


def prefixes(split: CascadeBatch) -> list[tuple[int, int, int]]:
    """(first row, row after the last, tokens) of each prefix of some tokens."""
    starts, lens = split.prefix_query_starts, split.prefix_kv_lens
    return [
        (int(starts[i]), int(starts[i + 1]), int(lens[i]))
        for i in range(int(split.num_prefixes))
        if lens[i]
    ]


def test_the_block_of_the_first_query_is_not_shared() -> None:
    tables = [[1, 2, 3], [1, 2, 3]]
    assert prefixes(split_tables(tables, [17, 24])) == [(0, 2, 16)]
    assert prefixes(split_tables(tables, [16, 24])) == [(0, 2, 8)]  # its query stands in block 1
    assert prefixes(split_tables(tables, [8, 24])) == []


def test_of_nested_prefixes_those_are_taken_that_save_most() -> None:
    system = [1]
    documents = [[10, 11, 12], [20, 21, 22]]
    nested = [[*system, *documents[i // 3], 30 + i] for i in range(6)]
    split = split_tables(nested, [40] * 6)
    assert prefixes(split) == [(0, 3, 32), (3, 6, 32)]  # saves 2 * 2 * 4 blocks, not 5 * 1
    assert split.num_shared_tokens == 128
    long_system = [*range(1, 5)]
    flat = [[*long_system, 10 + i // 2, 20 + i] for i in range(6)]
    split = split_tables(flat, [48] * 6)
    assert prefixes(split) == [(0, 6, 32)]  # saves 5 * 4 blocks, not 3 * 5
    assert split.num_shared_tokens == 160


def test_groups_below_the_limits_are_left_whole() -> None:
    tables = [[1, 2, 3]] * 3
    assert prefixes(split_tables(tables, [24] * 3, min_seqs=3)) == [(0, 3, 16)]
    assert prefixes(split_tables(tables, [24] * 3, min_seqs=4)) == []
    assert prefixes(split_tables(tables, [24] * 3, min_tokens=16)) == [(0, 3, 16)]
    assert prefixes(split_tables(tables, [24] * 3, min_tokens=17)) == []
    assert prefixes(split_tables(tables, [24] * 3, min_tokens=1000)) == []
    one_column_alike = [[1, 2, 3], [9, 2, 3], [1, 2, 3]]
    assert prefixes(split_tables(one_column_alike, [24] * 3, min_tokens=16)) == []


def best_saving(links: list[int], min_seqs: int) -> int:
    """Blocks saved by the best grouping, trying every place where the first group may end."""
    if not links:
        return 0
    best = best_saving(links[1:], min_seqs)
    for num_seqs in range(min_seqs, len(links) + 2):
        together = (num_seqs - 1) * min(links[: num_seqs - 1])
        best = max(best, together + best_saving(links[num_seqs:], min_seqs))
    return best


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data(), min_seqs=st.integers(2, 4), min_blocks=st.integers(1, 2))
def test_the_split_is_the_batch_and_saves_the_most(data, min_seqs: int, min_blocks: int) -> None:
    num_seqs = data.draw(st.integers(1, 7))
    max_blocks = 6
    tables = np.zeros((num_seqs + 1, max_blocks), np.int32)
    kv_lens = np.zeros(num_seqs + 1, np.int32)
    query_lens = np.zeros(num_seqs + 1, np.int32)
    for seq in range(num_seqs):
        tables[seq] = 100 * seq + np.arange(1, max_blocks + 1)
        if seq:
            shared = data.draw(st.integers(0, max_blocks))
            tables[seq, :shared] = tables[seq - 1, :shared]
        kv_lens[seq] = data.draw(st.integers(1, 8 * max_blocks))
        query_lens[seq] = data.draw(st.one_of(st.just(1), st.integers(1, int(kv_lens[seq]))))
        tables[seq, -(-kv_lens[seq] // 8) :] = 0
    starts = np.cumsum([0, *query_lens]).astype(np.int32)
    split = split_shared_prefixes(
        kv_lens,
        tables,
        starts,
        num_seqs,
        block_size=8,
        min_seqs=min_seqs,
        min_tokens=8 * min_blocks,
    )
    num_saved, links = 0, []
    whole = (kv_lens - query_lens) // 8
    for seq in range(num_seqs - 1):
        alike = np.cumprod(tables[seq] == tables[seq + 1]).sum()
        shared = min(alike, whole[seq], whole[seq + 1])
        links.append(int(shared) if shared >= min_blocks else 0)
    owner = np.searchsorted(split.prefix_query_starts[: split.num_prefixes + 1], starts, "right")
    for seq in range(num_seqs):
        is_in = starts[seq] < split.prefix_query_starts[split.num_prefixes]
        prefix_len = int(split.prefix_kv_lens[owner[seq] - 1]) if is_in else 0
        before = split.prefix_tables[owner[seq] - 1, : prefix_len // 8] if is_in else []
        assert prefix_len + split.suffix_kv_lens[seq] == kv_lens[seq]
        assert split.suffix_kv_lens[seq] >= query_lens[seq]
        joined = np.concatenate([before, split.suffix_tables[seq]])[:max_blocks]
        np.testing.assert_array_equal(joined, tables[seq])
        follows = seq > 0 and is_in and owner[seq] == owner[seq - 1]
        num_saved += prefix_len // 8 if follows else 0
    assert num_saved * 8 == split.num_shared_tokens
    assert num_saved == best_saving(links, min_seqs)


# --- the merge ---------------------------------------------------------------------------------


def test_merging_parts_of_a_softmax_gives_the_whole() -> None:
    rng = np.random.default_rng(0)
    scores, values = 30 * rng.standard_normal((5, 3, 12)), rng.standard_normal((12, 8))
    scores[1] -= 300.0  # exp underflows
    scores[2, :, 4:] = -np.inf  # two parts see nothing
    scores[3] = -np.inf
    with np.errstate(divide="ignore", invalid="ignore"):
        top = np.maximum(scores.max(axis=-1, keepdims=True), -1e9)
        weights = np.exp(scores - top)
        lse = np.log(weights.sum(axis=-1)) + top[..., 0]
        out = np.nan_to_num(weights / weights.sum(axis=-1, keepdims=True)) @ values
        outs, lses = [], []
        for part in (slice(0, 4), slice(4, 5), slice(5, 12)):
            weights = np.exp(scores[..., part] - top)
            total = weights.sum(axis=-1, keepdims=True)
            outs.append(jnp.asarray(np.nan_to_num(weights / total) @ values[part], jnp.float32))
            lses.append(jnp.asarray(np.log(total[..., 0]) + top[..., 0], jnp.float32))
    merged, merged_lse = merge_attention(outs, lses)
    np.testing.assert_allclose(merged, out, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(merged_lse, lse, rtol=1e-6)
    assert np.all(np.asarray(merged[3]) == 0) and np.all(np.isneginf(merged_lse[3]))
    alone, alone_lse = merge_attention(outs[:1], lses[:1])
    np.testing.assert_array_equal(alone_lse, lses[0])
    np.testing.assert_allclose(alone, outs[0], rtol=1e-6)


def test_parts_that_do_not_fit_are_refused() -> None:
    out, lse = jnp.zeros((4, 2, 8)), jnp.zeros((4, 2))
    with pytest.raises(ValueError, match="outs has 2 parts and lses has 1"):
        merge_attention([out, out], [lse])
    with pytest.raises(ValueError, match=r"outs\[1\] is bfloat16"):
        merge_attention([out, out.astype(jnp.bfloat16)], [lse, lse])
    with pytest.raises(ValueError, match=r"lses\[1\] has shape"):
        merge_attention([out, out], [lse, lse[:3]])
