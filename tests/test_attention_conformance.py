"""One suite for every attention implementation: add a name to IMPLEMENTATIONS to join."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import Case, Shape, make_case, oracle, relative_errors
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pallas_kernels import plan_attention, ragged_paged_attention

IMPLEMENTATIONS = ("reference", "xla")

# Few shapes, since each compiles once; lengths and contents are drawn freely within them.
SHAPES = {
    "grouped": Shape(),
    "one_kv_head_large_block": Shape(
        num_q_heads=4, num_kv_heads=1, block_size=64, max_blocks=8, head_dim=64
    ),
    "as_many_kv_heads_small_block": Shape(
        num_q_heads=3, num_kv_heads=3, block_size=8, max_blocks=50, head_dim=24
    ),
    "smollm": Shape(num_q_heads=9, num_kv_heads=3, head_dim=64),
    "window": Shape(sliding_window=37, block_size=8, max_blocks=50),
    "window_cap_sinks": Shape(sliding_window=100, soft_cap=5.0, has_sinks=True),
    "bfloat16": Shape(q_dtype="bfloat16", pool_dtype="bfloat16", head_dim=32),
    "bfloat16_bits": Shape(pool_dtype="uint16", block_size=32, max_blocks=12),
    "int8": Shape(pool_dtype="int8", soft_cap=30.0),
    "float8_e4m3fn": Shape(pool_dtype="float8_e4m3fn", has_sinks=True),
    "float8_e5m2": Shape(pool_dtype="float8_e5m2"),
}


@functools.cache
def compiled(implementation: str, names: tuple[str, ...], static: tuple):
    """The jitted op; array options come as arguments so that one program serves all draws."""

    def op(arrays, options):
        return ragged_paged_attention(
            *arrays, **options, **dict(static), implementation=implementation
        )

    return jax.jit(op)


def attend(case: Case, implementation: str) -> np.ndarray:
    arrays = {k: v for k, v in case.options.items() if isinstance(v, jax.Array)}
    static = tuple((k, v) for k, v in case.options.items() if k not in arrays)
    out = compiled(implementation, tuple(arrays), static)(case.arrays, arrays)
    assert out.dtype == case.shape.q_dtype
    return np.asarray(out)


def check(case: Case, implementation: str) -> None:
    out = attend(case, implementation)
    assert np.all(out[case.num_real_rows :] == 0), "rows of padding must be zero"
    limit = 1e-2 if case.shape.q_dtype == "bfloat16" else 2e-6
    errors = relative_errors(case, out, oracle(case))
    assert all(error < limit for error in errors), (errors, case.query_lens, case.kv_lens)


@st.composite
def batches(draw, shape: Shape) -> list[tuple[int, int]]:
    """(query tokens, tokens before them) for 0 to max_seqs sequences that fit the shape."""
    lengths, rows_left = [], shape.num_rows
    for _ in range(draw(st.integers(0, shape.max_seqs))):
        if rows_left == 0:
            break
        query_len = draw(st.one_of(st.just(1), st.integers(1, rows_left)))
        history = draw(st.integers(0, shape.max_kv_tokens - query_len))
        lengths.append((query_len, history))
        rows_left -= query_len
    return lengths


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", SHAPES)
def test_drawn_batches_match_float64(name: str, implementation: str) -> None:
    shape = SHAPES[name]

    @settings(
        max_examples=6,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(lengths=batches(shape), seed=st.integers(0, 2**16))
    def run(lengths: list[tuple[int, int]], seed: int) -> None:
        check(make_case(shape, lengths, seed), implementation)

    run()


CORNERS = {
    "empty": [],
    "one_token": [(1, 0)],
    "decodes": [(1, 383), (1, 0), (1, 63), (1, 64), (1, 65)],
    "one_long_chunk": [(96, 288)],
    "whole_prompts": [(30, 0), (2, 0), (64, 0)],
    "mixed": [(1, 200), (65, 100), (1, 7), (28, 0), (1, 383)],
}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", CORNERS)
def test_corner_batches_match_float64(name: str, implementation: str) -> None:
    check(make_case(SHAPES["grouped"], CORNERS[name], seed=1), implementation)


def test_one_plan_serves_all_layers_and_windows() -> None:
    case = make_case(SHAPES["window"], [(1, 300), (40, 100), (1, 12)], seed=3)
    plan = plan_attention(*case.arrays[2:], num_rows=96, block_size=8)
    out = ragged_paged_attention(*case.arrays, **case.options, plan=plan)
    assert max(relative_errors(case, np.asarray(out), oracle(case))) < 2e-6
    with pytest.raises(ValueError, match="plan was made for a sliding_window of 20"):
        narrow = plan_attention(*case.arrays[2:], num_rows=96, block_size=8, sliding_window=20)
        ragged_paged_attention(*case.arrays, **case.options, plan=narrow)
    with pytest.raises(ValueError, match="plan was made for"):
        other = plan_attention(*case.arrays[2:], num_rows=97, block_size=8)
        ragged_paged_attention(*case.arrays, **case.options, plan=other)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_result_does_not_depend_on_the_neighbours(implementation: str) -> None:
    lengths = [(1, 383), (30, 50), (1, 70), (1, 5)]
    case = make_case(SHAPES["grouped"], lengths, seed=5)
    together = attend(case, implementation)
    q, pool, kv_lens, tables, _, _ = case.arrays
    row = 0
    for seq, (query_len, _) in enumerate(lengths):
        alone_q = jnp.zeros_like(q).at[:query_len].set(q[row : row + query_len])
        starts = jnp.full(6, query_len, jnp.int32).at[0].set(0)
        first = jnp.zeros_like(kv_lens).at[0].set(kv_lens[seq])
        table = jnp.zeros_like(tables).at[0].set(tables[seq])
        alone = ragged_paged_attention(
            alone_q,
            pool,
            first,
            table,
            starts,
            1,
            **case.options,
            implementation=implementation,
        )
        np.testing.assert_allclose(
            alone[:query_len], together[row : row + query_len], rtol=0, atol=2e-6
        )
        row += query_len


def test_runs_under_shard_map_over_heads() -> None:
    case = make_case(SHAPES["grouped"], [(1, 300), (40, 100), (1, 12)], seed=7)
    mesh = jax.make_mesh((1,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,))
    heads, whole = jax.P(None, "tensor"), jax.P()
    sharded = jax.jit(
        jax.shard_map(
            functools.partial(ragged_paged_attention, **case.options),
            mesh=mesh,
            in_specs=(heads, heads, whole, whole, whole, whole),
            out_specs=heads,
            check_vma=False,
        )
    )
    out = np.asarray(sharded(*case.arrays))
    assert max(relative_errors(case, out, oracle(case))) < 2e-6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(q=np.zeros((8, 4, 24), np.float32)), "q has head_dim 24"),
        (dict(q=np.zeros((8, 3, 16), np.float32)), "q has 3 heads"),
        (dict(q=np.zeros((8, 4, 16), np.int32)), "q has dtype int32"),
        (dict(pool_layer=np.zeros((5, 3, 4, 16), np.float32)), "pool_layer has shape"),
        (dict(pool_layer=np.zeros((5, 4, 4, 16), np.int8)), "k_scale is None"),
        (dict(kv_lens=np.zeros(2, np.int64)), "kv_lens has dtype"),
        (dict(block_tables=np.zeros((3, 4), np.int32)), "block_tables has shape"),
        (dict(query_starts=np.zeros(2, np.int32)), "query_starts has shape"),
        (dict(num_seqs=np.zeros(1, np.int32)), "num_seqs has shape"),
        (dict(scale=float("nan")), "scale is nan"),
        (dict(sliding_window=0), "sliding_window is 0"),
        (dict(soft_cap=-1.0), "soft_cap is -1.0"),
        (dict(sinks=np.zeros(3, np.float32)), "sinks has shape"),
        (dict(v_scale=np.zeros(4, np.float32)), "v_scale has shape"),
        (dict(implementation="cuda"), "implementation is 'cuda'"),
    ],
)
def test_bad_arguments_are_refused_by_name(change: dict, message: str) -> None:
    good = dict(
        q=np.zeros((8, 4, 16), np.float32),
        pool_layer=np.zeros((5, 4, 4, 16), np.float32),
        kv_lens=np.zeros(2, np.int32),
        block_tables=np.zeros((2, 4), np.int32),
        query_starts=np.zeros(3, np.int32),
        num_seqs=np.int32(0),
        scale=0.25,
    )
    arguments: dict[str, Any] = good | change  # numpy, so that int64 stays int64
    with pytest.raises((ValueError, TypeError), match=message):
        ragged_paged_attention(**arguments)


def test_numpy_arrays_are_welcome_and_lists_are_refused_by_name() -> None:
    rng = np.random.default_rng(0)
    arguments: dict[str, Any] = dict(
        q=rng.normal(size=(4, 4, 16)).astype(np.float32),
        pool_layer=rng.normal(size=(5, 4, 4, 16)).astype(np.float32),
        kv_lens=np.array([3, 6], np.int32),
        block_tables=np.array([[1, 0], [2, 3]], np.int32),
        query_starts=np.array([0, 1, 4], np.int32),
        num_seqs=2,
        scale=0.25,
    )
    on_device: dict[str, Any] = jax.tree.map(
        lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x, arguments
    )
    expected = ragged_paged_attention(**on_device)
    for implementation in ("xla", "reference"):
        eager = ragged_paged_attention(**arguments, implementation=implementation)
        np.testing.assert_allclose(eager, expected, rtol=1e-5, atol=1e-6)
        # Closed over by a jit: the constants must not be numpy's when a traced value indexes them.
        fixed = {k: v for k, v in arguments.items() if k != "q"}
        fixed["implementation"] = implementation
        jitted = jax.jit(lambda q, fixed=fixed: ragged_paged_attention(q, **fixed))
        np.testing.assert_allclose(jitted(arguments["q"]), expected, rtol=1e-5, atol=1e-6)
    with pytest.raises(TypeError, match="kv_lens is a list"):
        ragged_paged_attention(**{**arguments, "kv_lens": [3, 6]})
