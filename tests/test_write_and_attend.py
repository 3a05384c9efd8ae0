"""A decode step in one op: equal to the write and the attention apart, in every implementation."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import Case, Shape, make_case, oracle, relative_errors

from pallas_kernels import pool_layout, tpu_runtime, write_and_attend, write_kv

DECODES = Shape(num_rows=6, max_seqs=6, head_dim=128)
SHAPES = {
    "grouped": DECODES,
    "two_tokens_a_row": dataclasses.replace(
        DECODES, num_q_heads=9, num_kv_heads=3, head_dim=64, pool_width=128
    ),
    "bfloat16": dataclasses.replace(DECODES, q_dtype="bfloat16", pool_dtype="bfloat16"),
    "int8_window": dataclasses.replace(
        DECODES, pool_dtype="int8", block_size=8, max_blocks=48, sliding_window=40
    ),
}
MORE_SHAPES = {
    "two_lane_tiles": dataclasses.replace(DECODES, head_dim=192, pool_width=256),
    "float8": dataclasses.replace(DECODES, pool_dtype="float8_e4m3fn", has_sinks=True),
    "large_page": dataclasses.replace(DECODES, block_size=128, max_blocks=4),
}
# Full pages, first tokens, last tokens of a page, and one sequence that is padding.
LENGTHS = [(1, 382), (1, 0), (1, 63), (1, 64), (1, 65)]


def new_tokens(shape: Shape) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(11)
    size = (shape.max_seqs, shape.num_kv_heads, shape.head_dim)
    k, v = rng.standard_normal((2, *size))
    return jnp.asarray(k, jnp.float32), jnp.asarray(v, jnp.float32)


def options_of(case: Case) -> dict[str, Any]:
    return {k: v for k, v in case.options.items() if k not in ("causal", "return_lse")}


def written(case: Case, k: jax.Array, v: jax.Array) -> jax.Array:
    """The pool after the reference write of each sequence's token."""
    tables = np.asarray(case.arrays[3])
    block_size = pool_layout(case.arrays[1], case.shape.head_dim).block_size
    slots = np.full(case.shape.max_seqs, -1, np.int32)
    for seq, kv_len in enumerate(case.kv_lens):
        block, offset = divmod(kv_len - 1, block_size)
        slots[seq] = tables[seq, block] * block_size + offset
    scales = {n: case.options[n] for n in ("k_scale", "v_scale") if n in case.options}
    return write_kv(case.arrays[1], k, v, jnp.asarray(slots), **scales, implementation="reference")


@pytest.mark.parametrize("implementation", ["reference", "xla", "tpu"])
@pytest.mark.parametrize(
    "name", [*SHAPES, *(pytest.param(name, marks=pytest.mark.full) for name in MORE_SHAPES)]
)
def test_writes_and_attends_as_the_two_apart(name: str, implementation: str) -> None:
    case = make_case((SHAPES | MORE_SHAPES)[name], LENGTHS, seed=12)
    q, pool, kv_lens, tables, _, num_seqs = case.arrays
    k, v = new_tokens(case.shape)
    expected_pool = written(case, k, v)
    out, new_pool = write_and_attend(
        q, k, v, pool, kv_lens, tables, num_seqs, **options_of(case), implementation=implementation
    )
    # The null block may hold anything.
    np.testing.assert_array_equal(
        np.asarray(new_pool[1:]).astype(np.float32),
        np.asarray(expected_pool[1:]).astype(np.float32),
    )
    arrays = (q, expected_pool, *case.arrays[2:])
    limit = 1e-2 if case.shape.q_dtype == "bfloat16" else 2e-6
    expected = oracle(dataclasses.replace(case, arrays=arrays))
    assert np.max(relative_errors(case, np.asarray(out), expected)) < limit
    assert np.all(np.asarray(out)[len(LENGTHS) :] == 0)


def test_the_fused_kernel_has_no_races() -> None:
    shape = dataclasses.replace(DECODES, max_blocks=12, num_q_heads=2, num_kv_heads=1)
    case = make_case(shape, [(1, 150), (1, 0), (1, 63)], seed=13)
    q, pool, kv_lens, tables, _, num_seqs = case.arrays
    k, v = new_tokens(shape)
    with tpu_runtime.detect_races():
        out, _ = write_and_attend(
            q, k, v, pool, kv_lens, tables, num_seqs, **options_of(case), implementation="tpu"
        )
    arrays = (q, written(case, k, v), *case.arrays[2:])
    expected = oracle(dataclasses.replace(case, arrays=arrays))
    assert np.max(relative_errors(case, np.asarray(out), expected)) < 2e-6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(k=np.zeros((5, 2, 128), np.float32)), "one row of each for every sequence"),
        (dict(kv_lens=np.zeros(5, np.int32)), "one row of each for every sequence"),
        (dict(scale=float("inf")), "scale is inf"),
        (dict(pool_layer=np.zeros((4, 4, 16, 120), np.float32)), "q has head_dim 128"),
        (dict(implementation="cuda"), "implementation is 'cuda'"),
    ],
)
def test_bad_arguments_are_refused_by_name(change: dict, message: str) -> None:
    good: dict[str, Any] = dict(
        q=np.zeros((6, 4, 128), np.float32),
        k=np.zeros((6, 2, 128), np.float32),
        v=np.zeros((6, 2, 128), np.float32),
        pool_layer=np.zeros((4, 4, 16, 128), np.float32),
        kv_lens=np.zeros(6, np.int32),
        block_tables=np.zeros((6, 4), np.int32),
        num_seqs=0,
        scale=1.0,
    )
    with pytest.raises(ValueError, match=message):
        write_and_attend(**(good | change))
