"""The C++ kernel in larger programs, and when it is chosen. The conformance suite has more."""

from __future__ import annotations

import dataclasses
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import Shape, heads_of, make_case, oracle, relative_errors

import paged_jax.attend
from paged_jax.batch import StepBatch
from pallas_kernels import plan_attention, ragged_paged_attention, tpu_runtime, write_kv

pytestmark = pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="no C++ compiler is found"
)
SHAPE = Shape(num_q_heads=9, num_kv_heads=3, head_dim=64, max_blocks=160, num_rows=40)
LENGTHS = [(1, 2000), (20, 1100), (1, 255), (3, 600), (1, 256)]


def uses_kernel(function, *arguments) -> bool:
    return "paged_attention_" in jax.jit(function).lower(*arguments).as_text()


def test_long_sequences_are_cut_and_merged() -> None:
    for shape in (SHAPE, dataclasses.replace(SHAPE, sliding_window=700, soft_cap=20.0)):
        case = make_case(shape, LENGTHS, seed=1)
        out = ragged_paged_attention(*case.arrays, **case.options, implementation="cpu")
        assert max(relative_errors(case, np.asarray(out), oracle(case))) < 2e-6


def test_groups_of_many_heads() -> None:
    """More rows a token than a tile holds, and heads wider than the usual tile."""
    shape = Shape(num_q_heads=130, num_kv_heads=1, head_dim=72, max_blocks=8, num_rows=9)
    case = make_case(shape, [(1, 100), (8, 5)], seed=2)
    out = ragged_paged_attention(*case.arrays, **case.options, implementation="cpu")
    assert max(relative_errors(case, np.asarray(out), oracle(case))) < 2e-6


INT8_SHAPE = dataclasses.replace(SHAPE, pool_dtype="int8")
INT8_LENGTHS = [(1, 400), (20, 150), (1, 30), (3, 600)]


def test_int8_keys_meet_queries_of_every_size() -> None:
    """Rows of a pool of int8 may be multiplied as integers: sizes must not matter, nor zeros."""
    case = make_case(INT8_SHAPE, INT8_LENGTHS, seed=7)
    q, *others = case.arrays
    rng = np.random.default_rng(7)
    sizes = 2.0 ** rng.integers(-148, 1, q.shape[:2])
    q = q * jnp.asarray(sizes, jnp.float32)[:, :, None]
    q = q.at[3:6].set(0.0).at[:, :, 5].multiply(4.0)  # one channel above the others
    case = dataclasses.replace(case, arrays=(q, *others))
    out = ragged_paged_attention(*case.arrays, **case.options, implementation="cpu")
    assert max(relative_errors(case, np.asarray(out), oracle(case))) < 2e-6


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_int8_keys_meet_a_query_that_is_no_number(wrong: float) -> None:
    case = make_case(INT8_SHAPE, INT8_LENGTHS, seed=8)
    q, *others = case.arrays
    broken = np.zeros(q.shape[:2], bool)
    broken[[0, 9, 23], [4, 0, 8]] = True  # a decode, a row of a prefill, one of three
    q = jnp.where(broken[:, :, None] & (jnp.arange(64) == 40), wrong, q)
    out = np.asarray(ragged_paged_attention(q, *others, **case.options, implementation="cpu")[:25])
    np.testing.assert_array_equal(np.isnan(out).all(axis=2), broken[:25])
    np.testing.assert_array_equal(np.isnan(out).any(axis=2), broken[:25])


def test_in_a_loop_over_a_donated_pool_the_pool_stays_where_it_is() -> None:
    case = make_case(SHAPE, [(1, 500), (1, 30)], seed=3)
    q, pool, kv_lens, tables, starts, num_seqs = case.arrays
    q = q.at[2:].set(0.0)
    slots = (
        jnp.zeros(40, jnp.int32)
        .at[:2]
        .set(jnp.stack([tables[i, n // 16] * 16 + n % 16 for i, n in enumerate((500, 30))]))
    )

    def steps(implementation):
        def body(carry, _):
            q, pool = carry
            k = q[:, :3] * 0.5
            pool = write_kv(pool, k, k + 1.0, slots)
            out = ragged_paged_attention(
                q,
                pool,
                kv_lens,
                tables,
                starts,
                num_seqs,
                scale=0.125,
                implementation=implementation,
            )
            return (q + out, pool), None

        return lambda q, pool: jax.lax.scan(body, (q, pool), length=4)[0]

    expected, _ = jax.jit(steps("xla"))(q, pool)
    pool = jnp.array(pool)
    compiled = jax.jit(steps("cpu"), donate_argnums=1).lower(q, pool).compile()
    address = pool.unsafe_buffer_pointer()
    out, pool = compiled(q, pool)
    assert pool.unsafe_buffer_pointer() == address
    memory = compiled.memory_analysis()
    assert memory is not None and memory.temp_size_in_bytes < pool.nbytes / 8
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)


def test_under_vmap_as_one_by_one() -> None:
    case = make_case(SHAPE, LENGTHS, seed=4)
    q, *others = case.arrays
    attend = lambda q: ragged_paged_attention(q, *others, **case.options, implementation="cpu")
    both = jax.vmap(attend)(jnp.stack([q, 2 * q]))
    np.testing.assert_array_equal(both[1], attend(2 * q))


def test_many_calls_at_once_do_not_mix() -> None:
    """Independent calls of one program may run side by side on XLA's threads."""
    cases = [make_case(SHAPE, LENGTHS[i:], seed=i) for i in range(4)]
    attend = lambda arrays: ragged_paged_attention(*arrays, **cases[0].options)
    together = jax.jit(lambda batches: [attend(arrays) for arrays in batches])
    for _ in range(5):
        for case, out in zip(cases, together([c.arrays for c in cases]), strict=True):
            np.testing.assert_array_equal(out, attend(case.arrays))


def test_chosen_on_cpu_but_for_a_plan_or_a_dtype_or_a_tpu() -> None:
    case = make_case(SHAPE, LENGTHS, seed=5)
    q, *others = case.arrays
    attend = lambda q, **options: ragged_paged_attention(q, *others, **case.options, **options)
    assert uses_kernel(attend, q)
    plan = plan_attention(*others[1:], num_rows=40, block_size=16)
    assert not uses_kernel(lambda q: attend(q, plan=plan), q)
    assert not uses_kernel(attend, q.astype(jnp.float16))
    with tpu_runtime.force_compile():
        assert not uses_kernel(lambda q: attend(q), q)
    with pytest.raises(ValueError, match="'cpu' cannot run this: q has dtype float16"):
        attend(q.astype(jnp.float16), implementation="cpu")
    with pytest.raises(ValueError, match="implementation 'cpu' takes none"):
        attend(q, implementation="cpu", plan=plan)


@pytest.mark.parametrize(("implementation", "plans"), [(None, 0), ("cpu", 0), ("xla", 1)])
def test_the_step_makes_a_plan_only_for_xla(implementation, plans, monkeypatch) -> None:
    calls = []

    def counted(*arguments, **options):
        calls.append(options)
        return plan_attention(*arguments, **options)

    monkeypatch.setattr(paged_jax.attend, "plan_attention", counted)
    case = make_case(SHAPE, [(1, 30)], seed=6)
    q, pool, kv_lens, tables, starts, num_seqs = case.arrays
    fields = {field.name: None for field in dataclasses.fields(StepBatch)}
    fields |= dict(kv_lens=kv_lens, block_tables=tables, query_starts=starts, num_seqs=num_seqs)
    fields |= dict(token_ids=jnp.zeros(40, jnp.int32), slot_mapping=jnp.zeros(40, jnp.int32))
    attend = paged_jax.attend.paged_attend(
        StepBatch(**fields), block_size=16, scale=0.125, implementation=implementation
    )
    out, _ = attend(heads_of(q, q[:, :3], q[:, 3:6]), pool)
    assert out.shape == q.shape
    assert len(calls) == plans
