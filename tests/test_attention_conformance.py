"""One suite for every attention implementation: add a name to IMPLEMENTATIONS to join.

The TPU's kernel runs interpreted here, which takes seconds a batch: it has shapes of its own, in
the rows of a TPU's pool, of which a few run always and all with `-m full`.
"""

from __future__ import annotations

import dataclasses
import functools
import shutil
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import Case, Shape, make_case, oracle, oracle_with_lse, relative_errors
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from pallas_kernels import plan_attention, ragged_paged_attention, tpu_runtime

IMPLEMENTATIONS = ("reference", "xla", "cpu", "tpu")

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
    "lse": Shape(return_lse=True, sliding_window=50, soft_cap=5.0),
    "not_causal": Shape(return_lse=True, causal=False),
    "two_tokens_a_row": Shape(head_dim=64, pool_width=128, return_lse=True),
    "padded_96": Shape(head_dim=96, pool_width=128, pool_dtype="int8", block_size=8, max_blocks=20),
    "padded_192": Shape(
        head_dim=192, pool_width=256, pool_dtype="uint16", num_q_heads=2, num_kv_heads=1
    ),
    "head_dim_256": Shape(head_dim=256, num_q_heads=2, num_kv_heads=1, has_sinks=True),
}


TPU_SHAPES = {
    "grouped": Shape(head_dim=128),
    "two_tokens_a_row": Shape(
        num_q_heads=9, num_kv_heads=3, head_dim=64, pool_width=128, return_lse=True
    ),
    "window_cap_sinks": Shape(
        num_q_heads=16,
        head_dim=64,
        pool_width=128,
        sliding_window=37,
        soft_cap=5.0,
        has_sinks=True,
    ),
    "not_causal": Shape(head_dim=128, return_lse=True, causal=False),
    "bfloat16": Shape(head_dim=128, q_dtype="bfloat16", pool_dtype="bfloat16"),
    "int8": Shape(head_dim=96, pool_width=128, pool_dtype="int8", soft_cap=30.0, block_size=32),
}
MORE_TPU_SHAPES = {
    "one_kv_head_large_block": Shape(
        num_kv_heads=1, block_size=64, max_blocks=8, head_dim=256, sliding_window=100
    ),
    "as_many_kv_heads_small_block": Shape(
        num_q_heads=3, num_kv_heads=3, block_size=8, max_blocks=50, head_dim=128
    ),
    "many_kv_heads": Shape(num_q_heads=16, num_kv_heads=16, head_dim=128),
    "one_group": Shape(num_q_heads=16, num_kv_heads=1, head_dim=128, return_lse=True),
    "two_lane_tiles": Shape(head_dim=192, pool_width=256, num_kv_heads=1),
    "float8_e4m3fn": Shape(head_dim=128, pool_dtype="float8_e4m3fn", has_sinks=True),
    "float8_e5m2": Shape(head_dim=64, pool_width=128, pool_dtype="float8_e5m2"),
    "page_of_256": Shape(head_dim=128, block_size=256, max_blocks=6),
    "long_tables": Shape(
        head_dim=128, num_q_heads=1, num_kv_heads=1, block_size=8, max_blocks=300, max_seqs=3
    ),
    "bfloat16_window": Shape(
        head_dim=64,
        pool_width=128,
        q_dtype="bfloat16",
        pool_dtype="bfloat16",
        sliding_window=20,
        block_size=16,
    ),
}


def shape_of(implementation: str, name: str) -> Shape:
    return (TPU_SHAPES | MORE_TPU_SHAPES if implementation == "tpu" else SHAPES)[name]


DRAWN = [
    (name, implementation, 6) for implementation in ("reference", "xla", "cpu") for name in SHAPES
]
DRAWN += [(name, "tpu", 2) for name in TPU_SHAPES]
DRAWN += [
    pytest.param(name, "tpu", 10, marks=pytest.mark.full) for name in TPU_SHAPES | MORE_TPU_SHAPES
]


@functools.cache
def compiled(implementation: str, names: tuple[str, ...], static: tuple):
    """The jitted op; array options come as arguments so that one program serves all draws."""

    def op(arrays, options):
        # A name of its own, so that a program traced with other settings is not taken.
        name = implementation.removesuffix("_watched")
        return ragged_paged_attention(*arrays, **options, **dict(static), implementation=name)

    return jax.jit(op)


def attend(case: Case, implementation: str) -> Any:
    """The op's result in numpy: out, or (out, lse) where the shape asks for it."""
    if implementation == "cpu" and not any(map(shutil.which, ("c++", "g++", "clang++"))):
        pytest.skip("no C++ compiler is found")
    arrays = {k: v for k, v in case.options.items() if isinstance(v, jax.Array)}
    static = tuple((k, v) for k, v in case.options.items() if k not in arrays)
    result = compiled(implementation, tuple(arrays), static)(case.arrays, arrays)
    return jax.tree.map(np.asarray, result)


def check(case: Case, implementation: str) -> None:
    result = attend(case, implementation)
    out, lse = result if case.shape.return_lse else (result, None)
    expected, expected_lse = oracle_with_lse(case)
    assert out.dtype == case.shape.q_dtype
    assert np.all(out[case.num_real_rows :] == 0), "rows of padding must be zero"
    limit = 1e-2 if case.shape.q_dtype == "bfloat16" else 2e-6
    errors = relative_errors(case, out, expected)
    assert all(error < limit for error in errors), (errors, case.query_lens, case.kv_lens)
    if lse is not None:
        assert lse.dtype == np.float32
        np.testing.assert_allclose(lse, expected_lse, rtol=limit, atol=limit)


@st.composite
def batches(draw, shape: Shape) -> list[tuple[int, int]]:
    """(query tokens, tokens before them) for 0 to max_seqs sequences that fit the shape."""
    lengths, rows_left = [], shape.num_rows
    for _ in range(draw(st.integers(0, shape.max_seqs))):
        if rows_left == 0:
            break
        query_len = draw(st.one_of(st.just(1), st.integers(1, rows_left)))
        least = 0 if shape.causal else -query_len
        history = draw(st.integers(least, shape.max_kv_tokens - query_len))
        lengths.append((query_len, history))
        rows_left -= query_len
    return lengths


@st.composite
def small_shapes(draw) -> Shape:
    """Shapes of every kind that the op takes, each of which compiles anew: so they are small."""
    num_kv_heads = draw(st.integers(1, 3))
    head_dim, pool_width = draw(
        st.sampled_from([(16, None), (64, None), (32, 128), (64, 128), (96, 128), (40, None)])
    )
    block_size = draw(st.sampled_from([8, 16, 32, 64]))
    window = draw(st.one_of(st.none(), st.integers(1, 80)))
    has_sinks = draw(st.booleans())
    return Shape(
        max_seqs=3,
        num_rows=draw(st.integers(8, 20)),
        max_blocks=128 // block_size,
        block_size=block_size,
        num_q_heads=num_kv_heads * draw(st.integers(1, 4)),
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        pool_width=pool_width,
        q_dtype=draw(st.sampled_from(["float32", "bfloat16"])),
        pool_dtype=draw(
            st.sampled_from(
                ["float32", "bfloat16", "float16", "uint16", "int8", "float8_e4m3fn", "float8_e5m2"]
            )
        ),
        sliding_window=window,
        soft_cap=draw(st.sampled_from([None, 10.0])),
        has_sinks=has_sinks,
        causal=window is not None or draw(st.booleans()),
        return_lse=not has_sinks and draw(st.booleans()),
    )


@pytest.mark.parametrize(("name", "implementation", "num_examples"), DRAWN)
def test_drawn_batches_match_float64(name: str, implementation: str, num_examples: int) -> None:
    shape = shape_of(implementation, name)

    @settings(
        max_examples=num_examples,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(lengths=batches(shape), seed=st.integers(0, 2**16))
    def run(lengths: list[tuple[int, int]], seed: int) -> None:
        check(make_case(shape, lengths, seed), implementation)

    run()


# Every example compiles a program of its own.
@pytest.mark.parametrize(
    "num_examples", [3, pytest.param(60, marks=pytest.mark.full)], ids=["few", "many"]
)
@pytest.mark.parametrize("implementation", ["reference", "xla", "cpu"])
def test_drawn_shapes_match_float64(implementation: str, num_examples: int) -> None:
    @settings(
        max_examples=num_examples,
        deadline=None,
        derandomize=True,
        phases=[Phase.explicit, Phase.reuse, Phase.generate],
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(data=st.data(), shape=small_shapes(), seed=st.integers(0, 2**16))
    def run(data: st.DataObject, shape: Shape, seed: int) -> None:
        check(make_case(shape, data.draw(batches(shape)), seed), implementation)

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
    check(make_case(shape_of(implementation, "grouped"), CORNERS[name], seed=1), implementation)


NOT_CAUSAL_CORNERS = {
    "more_queries_than_tokens": [(20, -15), (1, 40), (60, 20)],
    "nothing_to_see_between": [(1, -1), (7, -7), (4, 252), (3, -3), (81, 100)],
    "as_decodes": [(1, 383), (1, 0), (1, 64)],
}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", NOT_CAUSAL_CORNERS)
def test_corners_without_causality_match_float64(name: str, implementation: str) -> None:
    shape = shape_of(implementation, "not_causal")
    check(make_case(shape, NOT_CAUSAL_CORNERS[name], seed=2), implementation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_decode_only_changes_no_result(implementation: str) -> None:
    name = "two_tokens_a_row" if implementation == "tpu" else "lse"
    case = make_case(shape_of(implementation, name), CORNERS["decodes"], seed=4)
    expected = attend(case, implementation)
    promised = dataclasses.replace(case, options=case.options | dict(decode_only=True))
    for got, wanted in zip(attend(promised, implementation), expected, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-6)


def test_one_plan_serves_all_layers_and_windows() -> None:
    case = make_case(SHAPES["window"], [(1, 300), (40, 100), (1, 12)], seed=3)

    def plan_for(**changes: Any):
        options = dict(num_rows=96, block_size=8) | changes
        return jax.eval_shape(functools.partial(plan_attention, **options), *case.arrays[2:])

    def attend_by(plan, **options: Any):
        return ragged_paged_attention(*case.arrays, **case.options, plan=plan, **options)

    plan = jax.jit(functools.partial(plan_attention, num_rows=96, block_size=8))(*case.arrays[2:])
    out = jax.jit(attend_by)(plan)
    assert np.max(relative_errors(case, np.asarray(out), oracle(case))) < 2e-6
    with pytest.raises(ValueError, match="plan was made for a sliding_window of 20"):
        attend_by(plan_for(sliding_window=20))
    with pytest.raises(ValueError, match="plan was made for"):
        attend_by(plan_for(num_rows=97))
    with pytest.raises(ValueError, match="plan was made for causal=False"):
        attend_by(plan_for(causal=False))
    with pytest.raises(ValueError, match="decode_only is True"):
        attend_by(plan, decode_only=True)
    with pytest.raises(ValueError, match="implementation 'reference' takes none"):
        attend_by(plan, implementation="reference")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_result_does_not_depend_on_the_neighbours(implementation: str) -> None:
    lengths = [(1, 383), (30, 50), (1, 70), (1, 5)]
    case = make_case(shape_of(implementation, "grouped"), lengths, seed=5)
    together = attend(case, implementation)
    q, pool, kv_lens, tables, _, _ = case.arrays
    row = 0
    for seq, (query_len, _) in enumerate(lengths):
        alone_q = jnp.zeros_like(q).at[:query_len].set(q[row : row + query_len])
        starts = jnp.full(6, query_len, jnp.int32).at[0].set(0)
        first = jnp.zeros_like(kv_lens).at[0].set(kv_lens[seq])
        table = jnp.zeros_like(tables).at[0].set(tables[seq])
        arrays = (alone_q, pool, first, table, starts, jnp.int32(1))
        alone = attend(dataclasses.replace(case, arrays=arrays), implementation)
        # The C++ kernel cuts a sequence in the same places whoever stands beside it.
        limit = 0 if implementation == "cpu" else 2e-6
        np.testing.assert_allclose(
            alone[:query_len], together[row : row + query_len], rtol=0, atol=limit
        )
        row += query_len


def test_the_kernel_has_no_races() -> None:
    shape = dataclasses.replace(TPU_SHAPES["two_tokens_a_row"], max_blocks=12)
    lengths = [(1, 150), (40, 100), (1, 12), (3, 30)]
    with tpu_runtime.detect_races():
        case = make_case(shape, lengths, seed=8)
        check(case, "tpu_watched")


@pytest.mark.parametrize("implementation", ["reference", "xla", "cpu"])
@pytest.mark.parametrize("is_value", [False, True])
def test_a_nan_that_a_row_sees_reaches_it(is_value: bool, implementation: str) -> None:
    shape = dataclasses.replace(SHAPES["grouped"], sliding_window=90)
    case = make_case(shape, [(30, 100), (1, 30)], seed=6)
    q, pool, kv_lens, tables, starts, num_seqs = case.arrays
    position = 120  # seen by the last ten rows of the first sequence
    block, offset = int(tables[0, position // 16]), position % 16
    pool = pool.at[block, 2 * is_value, offset, 3].set(jnp.nan)
    broken = dataclasses.replace(case, arrays=(q, pool, kv_lens, tables, starts, num_seqs))
    out = attend(broken, implementation)
    assert np.isnan(out[20:30, :2]).any(axis=-1).all()  # the query heads of KV head 0
    assert not np.isnan(out[30:]).any()
    if not is_value:  # a weight of 0 does not silence a value
        assert not np.isnan(out[:20]).any()


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
    assert np.max(relative_errors(case, out, oracle(case))) < 2e-6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(q=np.zeros((8, 4, 24), np.float32)), "q has head_dim 24"),
        (dict(q=np.zeros((8, 4, 8), np.float32)), "q has head_dim 8, but pool_layer has rows"),
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
        (dict(sinks=np.zeros(4, np.float32), return_lse=True), "sinks are given with return_lse"),
        (dict(sliding_window=5, causal=False), "sliding_window is 5 with causal=False"),
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
    expected = ragged_paged_attention(**on_device, implementation="reference")
    for implementation in ("xla", "cpu", "reference"):
        eager = ragged_paged_attention(**arguments, implementation=implementation)
        np.testing.assert_allclose(eager, expected, rtol=1e-5, atol=1e-6)
        # Closed over by a jit: the constants must not be numpy's when a traced value indexes them.
        fixed = {k: v for k, v in arguments.items() if k != "q"}
        fixed["implementation"] = implementation
        jitted = jax.jit(lambda q, fixed=fixed: ragged_paged_attention(q, **fixed))
        np.testing.assert_allclose(jitted(arguments["q"]), expected, rtol=1e-5, atol=1e-6)
    with pytest.raises(TypeError, match="kv_lens is a list"):
        ragged_paged_attention(**{**arguments, "kv_lens": [3, 6]})
