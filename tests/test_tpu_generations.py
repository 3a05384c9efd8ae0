"""The attention kernel as each TPU generation's sizes make it, interpreted, against float64.

Where the generation is unknown, as in the other tests, the kernel is the one that fits all of them.
A known one has other code: prefills in straight lines, blocks of 1,024 tokens in decodes, pages
started between the products or before them.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest
from attention_cases import Case, Shape, make_case, oracle_with_lse, relative_errors

from pallas_kernels import attention_tpu, ragged_paged_attention, tpu_runtime
from pallas_kernels.attention_tpu_spec import AttentionSizes

# Float32 is computed alike everywhere, but for the sizes of blocks.
BFLOAT16 = Shape(
    max_seqs=6,
    num_rows=160,
    max_blocks=40,
    head_dim=128,
    q_dtype="bfloat16",
    pool_dtype="bfloat16",
)
# Chunks of prompts behind, within and at the start of blocks of 256 rows, among decodes.
MIXED = [(1, 500), (70, 510), (1, 7), (30, 0), (1, 0), (40, 216)]
# Four items of 1,024 tokens, which are full and ahead of one another; and some that are not.
LONG_DECODES = [(1, 3071), (1, 1023), (1, 2000), (1, 90)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variant:
    """A shape on a generation, and what its sizes must be for the test to be worth its name."""

    generation: str
    shape: Shape
    lengths: tuple[tuple[int, int], ...] = tuple(MIXED)
    sizes: dict[str, Any]
    decode_only: bool = False


STRAIGHT = dict(prefill_step_rows=0)
INTERLEAVED = dict(decode_block_tokens=1024, decode_interleaves=True)
BEFORE = dict(decode_block_tokens=1024, decode_interleaves=False)
LONG = dataclasses.replace(
    BFLOAT16, max_seqs=5, num_rows=6, block_size=128, max_blocks=24, num_q_heads=2, num_kv_heads=1
)
VARIANTS = {
    "v5e_prefill": Variant(
        generation="v5e", shape=BFLOAT16, sizes=STRAIGHT | dict(prefill_heads_at_once=2)
    ),
    "v5e_prefill_two_tokens_a_row": Variant(
        generation="v5e",
        shape=dataclasses.replace(
            BFLOAT16,
            num_q_heads=9,
            num_kv_heads=3,
            head_dim=64,
            pool_width=128,
            block_size=32,
            max_blocks=20,
            return_lse=True,
        ),
        sizes=STRAIGHT,
    ),
    "v6e_prefill_float8_window_sinks": Variant(
        generation="v6e",
        shape=dataclasses.replace(
            BFLOAT16,
            pool_dtype="float8_e4m3fn",
            sliding_window=37,
            soft_cap=5.0,
            has_sinks=True,
        ),
        sizes=STRAIGHT | dict(prefill_heads_at_once=1),
    ),
    "v5p_prefill_int8_not_causal": Variant(
        generation="v5p",
        shape=dataclasses.replace(
            BFLOAT16, pool_dtype="int8", num_q_heads=16, causal=False, return_lse=True
        ),
        lengths=((1, 500), (70, 300), (30, -12), (1, 0), (40, 216)),
        sizes=STRAIGHT | dict(prefill_heads_at_once=2),
    ),
    "tpu7x_prefill_two_lane_tiles": Variant(
        generation="tpu7x",
        shape=dataclasses.replace(BFLOAT16, head_dim=192, pool_width=256, num_kv_heads=1),
        sizes=STRAIGHT,
    ),
    "v4_prefill": Variant(
        generation="v4", shape=BFLOAT16, sizes=dict(prefill_step_rows=32, decode_block_tokens=256)
    ),
    "v5e_decode": Variant(
        generation="v5e",
        shape=LONG,
        lengths=tuple(LONG_DECODES),
        sizes=INTERLEAVED,
        decode_only=True,
    ),
    "v6e_decode_int8": Variant(
        generation="v6e",
        shape=dataclasses.replace(LONG, pool_dtype="int8", num_kv_heads=2),
        lengths=tuple(LONG_DECODES),
        sizes=BEFORE,
        decode_only=True,
    ),
}


def sizes_of(case: Case) -> AttentionSizes:
    q, pool, _, tables, _, _ = case.arrays
    static = {k: case.options[k] for k in ("scale", "sliding_window", "soft_cap", "causal")}
    return attention_tpu.make_spec(
        q.shape,
        q.dtype,
        pool,
        tables.shape[1],
        has_sinks="sinks" in case.options,
        return_lse=case.shape.return_lse,
        decode_only=False,
        **static,
    ).sizes


def attend(case: Case, *, decode_only: bool = False) -> Any:
    """The interpreted kernel's result in numpy, traced anew: for the generation of the moment."""
    arrays = {k: v for k, v in case.options.items() if isinstance(v, jax.Array)}
    static = {k: v for k, v in case.options.items() if k not in arrays}
    op = functools.partial(
        ragged_paged_attention, **static, decode_only=decode_only, implementation="tpu"
    )
    result = jax.jit(lambda batch, arrays: op(*batch, **arrays))(case.arrays, arrays)
    return jax.tree.map(np.asarray, result)


def check(case: Case, result: Any) -> None:
    out, lse = result if case.shape.return_lse else (result, None)
    expected, expected_lse = oracle_with_lse(case)
    assert np.all(out[case.num_real_rows :] == 0), "rows of padding must be zero"
    errors = relative_errors(case, out, expected)
    assert all(error < 1e-2 for error in errors), errors  # not their max, which passes over NaN
    if lse is not None:
        np.testing.assert_allclose(lse, expected_lse, rtol=1e-2, atol=1e-2)


FEW = ("v5e_prefill", "v6e_prefill_float8_window_sinks", "v5e_decode", "v6e_decode_int8")


@pytest.mark.parametrize(
    "name",
    [name if name in FEW else pytest.param(name, marks=pytest.mark.full) for name in VARIANTS],
)
def test_the_kernel_of_a_generation_matches_float64(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    variant = VARIANTS[name]
    monkeypatch.setattr(attention_tpu, "tpu_generation", lambda: variant.generation)
    case = make_case(variant.shape, list(variant.lengths), seed=21)
    sizes = sizes_of(case)
    assert {field: getattr(sizes, field) for field in variant.sizes} == variant.sizes
    check(case, attend(case, decode_only=variant.decode_only))


def test_straight_lines_and_pages_between_products_have_no_races(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention_tpu, "tpu_generation", lambda: "v5e")
    # Tables this short make blocks of 128 tokens, of which several are full.
    shape = dataclasses.replace(
        BFLOAT16, max_seqs=4, num_rows=30, num_kv_heads=1, sliding_window=120
    )
    case = make_case(shape, [(1, 500), (20, 290), (1, 300), (3, 30)], seed=22)
    assert sizes_of(case).decode_block_tokens == 128
    with tpu_runtime.detect_races():
        check(case, attend(case))


def test_a_prefix_meets_as_many_queries_as_registers_hold(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def tile_tokens(generation: str, dtype: str, num_q_heads: int, head_dim: int = 128) -> int:
        monkeypatch.setattr(attention_tpu, "tpu_generation", lambda: generation)
        q = jax.ShapeDtypeStruct((4, num_q_heads, head_dim), dtype)
        pool = jax.ShapeDtypeStruct((9, 2, 16 * head_dim // 128, 128), dtype)
        return attention_tpu.shared_tile_tokens(q, pool)

    assert tile_tokens("v5e", "bfloat16", 4) == 8
    assert tile_tokens("v5e", "bfloat16", 16) == 4
    assert tile_tokens("v5e", "bfloat16", 8, head_dim=64) == 4
    assert tile_tokens("v5e", "bfloat16", 71) == 0
    assert tile_tokens("v6e", "float32", 4) == 2
    assert tile_tokens("v6e", "float32", 32) == 1
    assert tile_tokens("v4", "bfloat16", 4) == 2
    assert tile_tokens("v4", "float32", 4) == 1
