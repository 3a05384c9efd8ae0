"""One suite for every implementation of latent attention, and its pool write."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mla_cases import Case, Shape, make_case, oracle, relative_errors

from pallas_kernels import mla_tpu, tpu_runtime
from pallas_kernels.mla import latent_pool_width, mla_attention, write_latent
from pallas_kernels.mla_tpu_pipeline import Tiling

# Few shapes, since each compiles once; lengths and contents are drawn freely within them.
ANY_SHAPES = {
    "packed_width": Shape(),
    "odd_sizes": Shape(num_heads=3, latent_dim=20, rope_dim=6, width=29, block_size=8),
    "large_block": Shape(block_size=64, max_blocks=6, num_heads=16),
    "bfloat16": Shape(q_dtype="bfloat16", pool_dtype="bfloat16"),
    "bfloat16_bits": Shape(pool_dtype="uint16"),
    "one_row": Shape(num_rows=1, max_seqs=1),
}
# What the TPU kernel takes: whole lanes.
_WIDE: dict[str, Any] = dict(latent_dim=128, rope_dim=64, width=256, num_heads=16, num_rows=48)
_WIDE_5_HEADS: dict[str, Any] = _WIDE | dict(num_heads=5)
_WIDE_128_HEADS: dict[str, Any] = _WIDE | dict(num_heads=128, num_rows=12)
TPU_SHAPES = {
    "lanes": Shape(**_WIDE),
    "lanes_bfloat16": Shape(**_WIDE, q_dtype="bfloat16", pool_dtype="bfloat16"),
    "lanes_float32_q": Shape(**_WIDE, pool_dtype="bfloat16", block_size=32, max_blocks=12),
    "lanes_odd_heads": Shape(**_WIDE_5_HEADS, block_size=64, max_blocks=6),
    "lanes_128_heads": Shape(**_WIDE_128_HEADS, max_seqs=3),
}
SHAPES = ANY_SHAPES | TPU_SHAPES
# Small blocks and items, so that short sequences cross their borders.
SMALL_TILING = Tiling(
    block_tokens=256,
    part_scores=2048,
    num_buffers=2,
    tile_tokens=4,
    item_tokens=8,
    steps_at_once=4,
    joins_parts=True,
)


@functools.cache
def compiled(shape: Shape, implementation: str, tiling: Tiling | None, races: bool) -> Any:
    """The jitted op; the shape is a key so that each has its own compiled program."""

    def op(*arrays: jax.Array) -> Any:
        if tiling is not None:
            return mla_tpu.mla_attention(*arrays, scale=shape.scale, return_lse=True, tiling=tiling)
        return mla_attention(
            *arrays, scale=shape.scale, return_lse=True, implementation=implementation
        )

    with tpu_runtime.detect_races() if races else contextlib.nullcontext():
        lowered = jax.jit(op).lower(*make_case(shape, [], seed=0).arrays)
    return lowered.compile()


def check(
    case: Case, implementation: str, tiling: Tiling | None = None, races: bool = False
) -> None:
    out, lse = compiled(case.shape, implementation, tiling, races)(*case.arrays)
    assert out.dtype == case.shape.q_dtype
    assert lse.dtype == jnp.float32
    out, lse = np.asarray(out), np.asarray(lse)
    assert np.all(out[case.num_real_rows :] == 0), "rows of padding must be zero"
    assert np.all(lse[case.num_real_rows :] == -np.inf)
    limit = 1e-2 if case.shape.q_dtype == "bfloat16" else 2e-6
    expected, expected_lse = oracle(case)
    errors = relative_errors(case, out, expected)
    assert all(error < limit for error in errors), (errors, case.query_lens, case.kv_lens)
    real = slice(0, case.num_real_rows)
    np.testing.assert_allclose(lse[real], expected_lse[real], rtol=0, atol=3 * limit)


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


def check_drawn(
    name: str, implementation: str, *, examples: int, tiling: Tiling | None = None
) -> None:
    shape = SHAPES[name]

    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(lengths=batches(shape), seed=st.integers(0, 2**16))
    def run(lengths: list[tuple[int, int]], seed: int) -> None:
        check(make_case(shape, lengths, seed), implementation, tiling)

    run()


@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.parametrize("name", [*ANY_SHAPES, "lanes", "lanes_bfloat16"])
def test_drawn_batches_match_float64(name: str, implementation: str) -> None:
    check_drawn(name, implementation, examples=3)


@pytest.mark.full
@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.parametrize("name", SHAPES)
def test_many_drawn_batches_match_float64(name: str, implementation: str) -> None:
    check_drawn(name, implementation, examples=12)


@pytest.mark.full
@pytest.mark.parametrize("tiling", [None, SMALL_TILING], ids=["default", "small_tiling"])
@pytest.mark.parametrize("name", TPU_SHAPES)
def test_drawn_batches_match_float64_in_the_kernel(name: str, tiling: Tiling | None) -> None:
    if tiling is not None and TPU_SHAPES[name].num_heads == 128:
        pytest.skip("the small tiling's items would have 1,024 rows")
    check_drawn(name, "tpu", examples=12, tiling=tiling)


MIXED = [(1, 200), (21, 100), (1, 7), (17, 0), (1, 383)]
CORNERS = {
    "empty": [],
    "one_token": [(1, 0)],
    "decodes": [(1, 383), (1, 0), (1, 127), (1, 128), (1, 129)],
    "one_long_chunk": [(48, 300)],
    "whole_prompts": [(5, 0), (2, 0), (32, 0)],
    "mixed": MIXED,
}


@pytest.mark.parametrize("name", CORNERS)
@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_corner_batches_match_float64(name: str, implementation: str) -> None:
    check(make_case(SHAPES["lanes"], CORNERS[name], seed=1), implementation)


@pytest.mark.parametrize("name", ["empty", "decodes", "mixed"])
def test_the_kernel_crosses_blocks_and_items(name: str) -> None:
    case = make_case(SHAPES["lanes_bfloat16"], CORNERS[name], seed=1)
    check(case, "tpu", SMALL_TILING)


@pytest.mark.parametrize("name", ["lanes", "lanes_bfloat16"])
def test_the_kernel_takes_a_tile_in_groups_of_rows(name: str) -> None:
    tiling = dataclasses.replace(
        SMALL_TILING, step_rows=32, product_rows=32, steps_at_once=1, joins_parts=False
    )
    check(make_case(SHAPES[name], MIXED, seed=3), "tpu", tiling)


def test_the_kernel_has_no_races(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    case = make_case(SHAPES["lanes"], [(1, 300), (9, 290), (1, 0)], seed=2)
    check(case, "tpu", SMALL_TILING, races=True)
    # The interpreter prints what it finds, or logs it, by version.
    printed = capfd.readouterr()
    assert "RACE" not in printed.out + printed.err + caplog.text


@pytest.mark.parametrize("implementation", ["reference", "xla", "tpu"])
def test_absorbed_form_is_attention_over_expanded_keys_and_values(implementation: str) -> None:
    """Against the definition: keys and values of every head up-projected, ordinary attention."""
    shape = SHAPES["lanes"]
    nope_dim, value_dim, heads = 24, 20, shape.num_heads
    case = make_case(shape, [(1, 150), (9, 40)], seed=11)
    rng = np.random.default_rng(12)
    up_k = rng.standard_normal((heads, nope_dim, shape.latent_dim)) / shape.latent_dim**0.5
    up_v = rng.standard_normal((heads, value_dim, shape.latent_dim)) / shape.latent_dim**0.5
    q_nope = rng.standard_normal((shape.num_rows, heads, nope_dim))
    q_latent = jnp.asarray(np.einsum("thn,hnc->thc", q_nope, up_k), jnp.float32)
    arrays = (q_latent, *case.arrays[1:])
    attended = mla_attention(*arrays, scale=shape.scale, implementation=implementation)
    out = np.einsum("thc,hvc->thv", np.asarray(attended, np.float64), up_v)

    q_rope, pool, tables = (np.asarray(case.arrays[at], np.float64) for at in (1, 2, 4))
    row = 0
    for seq, (query_len, kv_len) in enumerate(zip(case.query_lens, case.kv_lens, strict=True)):
        blocks = tables[seq, : -(-kv_len // shape.block_size)].astype(int)
        tokens = pool[blocks].reshape(-1, shape.width)[:kv_len]
        latents, rotated = tokens[:, : shape.latent_dim], tokens[:, shape.latent_dim :]
        for position in range(kv_len - query_len, kv_len):
            for head in range(heads):
                keys = latents[: position + 1] @ up_k[head].T
                values = latents[: position + 1] @ up_v[head].T
                scores = keys @ q_nope[row, head]
                scores += rotated[: position + 1, : shape.rope_dim] @ q_rope[row, head]
                weights = np.exp(shape.scale * (scores - scores.max()))
                expected = weights @ values / weights.sum()
                np.testing.assert_allclose(out[row, head], expected, rtol=0, atol=1e-5)
            row += 1


def test_lse_merges_attention_over_two_halves_of_a_context() -> None:
    case = make_case(SHAPES["packed_width"], [(1, 191)], seed=4)
    q_latent, q_rope, pool, _, tables, starts, num_seqs = case.arrays
    parts = [
        mla_attention(
            q_latent,
            q_rope,
            pool,
            jnp.zeros(5, jnp.int32).at[0].set(kv_len),
            jnp.roll(tables, -first_block, axis=1),
            starts,
            num_seqs,
            scale=case.shape.scale,
            return_lse=True,
        )
        for first_block, kv_len in ((0, 80), (5, 112))
    ]
    outs, lses = (np.stack([np.asarray(part[at])[0] for part in parts]) for at in (0, 1))
    shares = np.exp(lses - np.logaddexp(*lses))
    merged = (outs * shares[..., None]).sum(axis=0)
    np.testing.assert_allclose(merged, oracle(case)[0][0], rtol=0, atol=2e-6)


@pytest.mark.parametrize("implementation", ["reference", "xla", "tpu"])
def test_a_sequence_without_cache_gives_zeros(implementation: str) -> None:
    arrays = list(make_case(SHAPES["lanes"], [(3, 20), (2, 10)], seed=5).arrays)
    arrays[3] = arrays[3].at[0].set(0)
    out, lse = mla_attention(*arrays, scale=0.1, return_lse=True, implementation=implementation)
    assert np.all(np.asarray(out)[:3] == 0)
    assert np.all(np.asarray(lse)[:3] == -np.inf)
    assert np.all(np.isfinite(np.asarray(out)))


@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.parametrize("pool_dtype", ["float32", "bfloat16", "uint16"])
def test_written_latents_stand_in_their_slots(pool_dtype: str, implementation: str) -> None:
    rng = np.random.default_rng(0)
    pool = np.full((6, 8, 32), 7, np.float32)
    stored = _to_pool(pool, pool_dtype)
    latent = rng.standard_normal((5, 20)).astype(np.float32)
    k_rope = rng.standard_normal((5, 6)).astype(np.float32)
    slots = np.array([17, 40, -1, 48, 9], np.int32)  # the third and fourth are outside
    rows = map(jnp.asarray, (latent, k_rope, slots))
    written = write_latent(stored, *rows, implementation=implementation)
    for row, slot in ((0, 17), (1, 40), (4, 9)):
        pool[slot // 8, slot % 8] = np.concatenate([latent[row], k_rope[row], np.zeros(6)])
    np.testing.assert_array_equal(np.asarray(written), np.asarray(_to_pool(pool, pool_dtype)))


def _to_pool(pool: np.ndarray, dtype: str) -> jax.Array:
    if dtype == "uint16":
        return jax.lax.bitcast_convert_type(jnp.asarray(pool, jnp.bfloat16), jnp.uint16)
    return jnp.asarray(pool, dtype)


def test_write_then_attend_under_one_jit() -> None:
    """Prefill of 20 tokens, then 3 decodes, each written first: the engine's order."""
    shape = SHAPES["packed_width"]
    case = make_case(shape, [(23, 0)], seed=6)
    q_latent, q_rope, pool, _, tables, _, _ = case.arrays
    tokens = pool[tables[0]].reshape(-1, shape.width)[:23]
    slots = tables[0, jnp.arange(23) // 16] * 16 + jnp.arange(23) % 16

    @jax.jit
    def step(pool, begin, tokens, slots, q_latent, q_rope):
        dims = (shape.latent_dim, shape.latent_dim + shape.rope_dim)
        latent, k_rope, _ = jnp.split(tokens, dims, axis=1)
        pool = write_latent(pool, latent, k_rope, slots)
        lens = jnp.zeros(5, jnp.int32).at[0].set(begin + len(tokens))
        starts = jnp.full(6, len(tokens), jnp.int32).at[0].set(0)
        out = mla_attention(q_latent, q_rope, pool, lens, tables, starts, 1, scale=shape.scale)
        return pool, out

    outs, fresh = [], jnp.full_like(pool, jnp.nan)
    for begin, end in ((0, 20), (20, 21), (21, 22), (22, 23)):
        at = slice(begin, end)
        fresh, out = step(fresh, begin, tokens[at], slots[at], q_latent[at], q_rope[at])
        outs.append(np.asarray(out))
    np.testing.assert_allclose(np.concatenate(outs), oracle(case)[0][:23], rtol=0, atol=2e-6)


@pytest.mark.parametrize("block_size", [16, 48, 64, 128, 256])
@pytest.mark.parametrize("heads", [1, 8, 16, 20, 64, 128])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tilings_fit_into_vmem(heads: int, block_size: int, dtype: str) -> None:
    q = jax.ShapeDtypeStruct((64, heads, 512), dtype)
    pool = jax.ShapeDtypeStruct((100, block_size, 640), dtype)
    for max_blocks in (1, 5, 64, 4096):
        tiling = mla_tpu.choose_tiling(q, pool, max_blocks=max_blocks)
        assert tiling is not None
        assert tiling.block_tokens % 128 == 0
        pages = tiling.block_tokens // block_size
        assert pages * block_size == tiling.block_tokens
        assert pages <= 128 and pages & (pages - 1) == 0
        assert tiling.item_tokens % tiling.tile_tokens == 0
    assert mla_tpu.unsupported_reason(q, pool) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(q_latent=np.zeros((8, 4, 48), np.float32)), "q_latent and q_rope have 48 \\+ 16"),
        (dict(q_latent=np.zeros((8, 4), np.float32)), "q_latent has shape"),
        (dict(q_rope=np.zeros((8, 3, 16), np.float32)), "q_rope has shape"),
        (dict(q_rope=jnp.zeros((8, 4, 16), jnp.bfloat16)), "q_rope has dtype bfloat16"),
        (dict(q_latent=np.zeros((8, 4, 32), np.int32)), "q_latent has dtype int32"),
        (dict(pool_layer=np.zeros((5, 4, 1, 48), np.float32)), "pool_layer has shape"),
        (dict(pool_layer=np.zeros((5, 4, 48), np.int8)), "pool_layer has dtype int8"),
        (dict(kv_lens=[3, 6]), "kv_lens is a list"),
        (dict(kv_lens=np.zeros(2, np.int64)), "kv_lens has dtype"),
        (dict(block_tables=np.zeros((3, 4), np.int32)), "block_tables has shape"),
        (dict(query_starts=np.zeros(2, np.int32)), "query_starts has shape"),
        (dict(num_seqs=np.zeros(1, np.int32)), "num_seqs has shape"),
        (dict(scale=float("nan")), "scale is nan"),
        (dict(implementation="cuda"), "implementation is 'cuda'"),
        (dict(implementation="tpu"), "q_latent has latent_dim 32; the kernel needs"),
        (
            dict(
                q_latent=np.zeros((8, 4, 128), np.float32),
                pool_layer=np.zeros((5, 12, 256), np.float32),
                implementation="tpu",
            ),
            "block_size 12; for float32 the kernel needs a multiple of 8",
        ),
    ],
)
def test_bad_arguments_are_refused_by_name(change: dict, message: str) -> None:
    good = dict(
        q_latent=np.zeros((8, 4, 32), np.float32),
        q_rope=np.zeros((8, 4, 16), np.float32),
        pool_layer=np.zeros((5, 4, 48), np.float32),
        kv_lens=np.zeros(2, np.int32),
        block_tables=np.zeros((2, 4), np.int32),
        query_starts=np.zeros(3, np.int32),
        num_seqs=np.int32(0),
        scale=0.25,
    )
    arguments: dict[str, Any] = good | change  # numpy, so that int64 stays int64
    with pytest.raises((ValueError, TypeError), match=message):
        mla_attention(**arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(latent=np.zeros((3, 33), np.float32)), "latent and k_rope have 33 \\+ 16"),
        (dict(k_rope=np.zeros((2, 16), np.float32)), "k_rope has shape"),
        (dict(k_rope=np.zeros((3, 16), np.int32)), "k_rope has dtype int32"),
        (dict(slot_mapping=np.zeros((3, 1), np.int32)), "slot_mapping has shape"),
        (dict(slot_mapping=np.zeros(3, np.float32)), "slot_mapping has dtype"),
        (dict(implementation="tpu"), "implementation is 'tpu'"),
    ],
)
def test_bad_writes_are_refused_by_name(change: dict, message: str) -> None:
    good = dict(
        pool_layer=np.zeros((5, 4, 48), np.float32),
        latent=np.zeros((3, 32), np.float32),
        k_rope=np.zeros((3, 16), np.float32),
        slot_mapping=np.zeros(3, np.int32),
    )
    arguments: dict[str, Any] = good | change
    with pytest.raises((ValueError, TypeError), match=message):
        write_latent(**arguments)


def test_latent_pool_width() -> None:
    assert latent_pool_width(512, 64) == 640
    assert latent_pool_width(512, 64, lane_multiple=1) == 576
    with pytest.raises(ValueError, match="rope_dim is 0"):
        latent_pool_width(512, 0)
