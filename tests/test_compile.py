"""Programs that are compiled when they are first needed, each as small as its steps allow."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_engine import check_idle, prompts_of, run, tiny_llm, tiny_model, tokens_of

from paged_jax import LLM, SamplingParams, make_sampling, sample
from paged_jax.batch import Buckets, StepShape
from paged_jax.step_programs import STEPS_WORTH_A_PROGRAM, StepPrograms

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.8, seed=3, max_tokens=12, ignore_eos=True)
ONE, EIGHT, ALL = (StepShape(n, n, True) for n in (1, 8, 10))
PREFILL = StepShape(32, 10, False)
BUCKETS = Buckets.choose(max_num_seqs=10, max_num_batched_tokens=32, max_model_len=64, block_size=4)


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model()


def ten_seats(model, **options: Any) -> LLM:
    """An engine with decode programs for 1, 8 and 10 rows."""
    return tiny_llm(model, max_num_seqs=10, enable_prefix_caching=False, **options)


def note_shapes(llm: LLM) -> list[StepShape]:
    """A list that grows by each call's shape."""
    shapes, run_call = [], llm.engine.runner.run

    def noting(shape, call, moves):
        shapes.append(shape)
        return run_call(shape, call, moves)

    llm.engine.runner.run = noting  # pyright: ignore[reportAttributeAccessIssue]
    return shapes


def greedy(*lengths: int) -> list[SamplingParams]:
    return [dataclasses.replace(GREEDY, max_tokens=n) for n in lengths]


def ready(llm: LLM) -> set[StepShape]:
    """Shapes that plain steps may run in at once."""
    (sampling,) = samplings(GREEDY)
    shapes = BUCKETS.shapes()
    return {shape for shape in shapes if llm.engine.runner.programs.find(shape, sampling)}


def samplings(*params: SamplingParams):
    return [make_sampling([own], [1], [9]) for own in params]


def test_greedy_requests_compile_no_sampler():
    model, prompts = tiny_model(), prompts_of([5, 20])
    eager, lazy = tiny_llm(model), tiny_llm(model, warmup=False)
    runner = lazy.engine.runner
    assert runner.num_programs == 0
    assert tokens_of(run(lazy, prompts, GREEDY)) == tokens_of(run(eager, prompts, GREEDY))
    num_greedy = runner.num_programs
    assert 0 < num_greedy < len(runner.buckets.shapes())

    # Of the same shapes once more, now with a sampler in them.
    sampled = tokens_of(run(lazy, prompts, SAMPLED))
    assert sampled == tokens_of(run(eager, prompts, SAMPLED))
    assert runner.num_programs == 2 * num_greedy
    # Nothing is compiled for what a program at hand can do.
    mixed = [GREEDY, SAMPLED]
    assert tokens_of(run(lazy, prompts, mixed)) == tokens_of(run(eager, prompts, mixed))
    run(lazy, prompts, GREEDY)
    assert runner.num_programs == 2 * num_greedy
    assert eager.engine.runner.num_programs == len(runner.buckets.shapes())


def test_plain_sampling_draws_what_the_whole_sampler_draws():
    logits = np.random.default_rng(0).normal(size=(4, 300)).astype(np.float32)
    logits[1, 7] = np.nan
    params = [SamplingParams(temperature=0)] * 4
    batch = make_sampling(params, [1] * 4, [9] * 4, forced_tokens=[-1, -1, 5, -1])
    assert batch.is_plain
    whole, plain = (sample(jnp.asarray(logits), batch, is_plain=plain) for plain in (False, True))
    jax.tree.map(np.testing.assert_array_equal, whole, plain)


def test_a_batch_is_plain_only_if_every_row_is():
    greedy = SamplingParams(temperature=0)
    for other in (SamplingParams(temperature=0.1), SamplingParams(temperature=0, logprobs=0)):
        assert not make_sampling([greedy, other], [1, 2], [3, 4]).is_plain
    masked = make_sampling([greedy] * 2, [1, 2], [3, 4], masked_tokens=[[], [5]])
    assert not masked.is_plain
    assert make_sampling([greedy] * 2, [1, 2], [3, 4], num_seqs=8).is_plain


@pytest.mark.parametrize(
    ("lookahead", "options"), [(1, {}), (8, {}), (8, dict(data_parallel_size=2))]
)
def test_the_last_rows_of_a_batch_compile_nothing(model, lookahead, options):
    """Rows end one after the other: few steps have less than nine, and one step a single one."""
    eager = ten_seats(model)
    lazy = ten_seats(model, decode_lookahead=lookahead, warmup=False, **options)
    shapes = note_shapes(lazy)
    rows = len(lazy.engine.shards)
    prompts = prompts_of([3] * 9 * rows)
    params = [params for n in range(9) for params in greedy(20 + n // 2) * rows]
    assert tokens_of(run(lazy, prompts, params)) == tokens_of(run(eager, prompts, params))
    assert ready(lazy) == {PREFILL, ALL}
    assert lazy.engine.runner.num_programs == 2
    assert shapes.count(ALL) == len(shapes) - shapes.count(PREFILL)


@pytest.mark.parametrize("lookahead", [1, 2, 8])
def test_a_smaller_program_is_compiled_once_it_was_wanted_for_long(model, lookahead):
    llm = ten_seats(model, decode_lookahead=lookahead, warmup=False)
    run(llm, prompts_of([3] * 9), greedy(*[2] * 9))
    assert ready(llm) == {PREFILL, ALL}
    shapes, steps_a_call = note_shapes(llm), max(lookahead // 2, 1)
    (prompt,) = prompts_of([5], seed=1)
    expected = tokens_of(run(ten_seats(model), [prompt], greedy(33)))
    assert tokens_of(run(llm, [prompt], greedy(33))) == expected
    # No call between them is left out, and none of the others is padded.
    num_padded = STEPS_WORTH_A_PROGRAM // steps_a_call
    num_small = (32 - STEPS_WORTH_A_PROGRAM) // steps_a_call
    assert shapes == [PREFILL, *[ALL] * num_padded, *[ONE] * num_small]
    assert ready(llm) == {PREFILL, ALL, ONE}
    # What is ready is used at once from now on; of two that would do the smaller.
    shapes.clear()
    run(llm, prompts_of([5], seed=2), greedy(33))
    assert set(shapes) == {PREFILL, ONE}
    shapes.clear()
    run(llm, prompts_of([3, 4], seed=3), greedy(5, 5))
    assert set(shapes) == {PREFILL, ALL}
    check_idle(llm)


def test_calls_are_dispatched_ahead_while_they_are_padded(model):
    llm = ten_seats(model, decode_lookahead=8, warmup=False)
    run(llm, prompts_of([3] * 9), greedy(*[2] * 9))
    dispatcher: Any = llm.engine._dispatcher
    follow, went_on = dispatcher._follow, []

    def noting(flight):
        following = follow(flight)
        if flight.shape.decode_only:
            went_on.append(following is not None)
        return following

    dispatcher._follow = noting
    run(llm, prompts_of([5]), greedy(33))
    # Four calls of four steps in the large program, four in the small one: a pause between them.
    assert went_on == [True, True, True, False] * 2


def test_sampled_rows_run_padded_only_in_a_program_with_a_sampler(model):
    eager, lazy = ten_seats(model), ten_seats(model, decode_lookahead=1, warmup=False)
    shapes = note_shapes(lazy)

    def same(lengths, params):
        prompts = prompts_of(lengths, seed=len(shapes))
        shapes.clear()
        assert tokens_of(run(lazy, prompts, params)) == tokens_of(run(eager, prompts, params))
        return {shape for shape in shapes if shape.decode_only}

    assert same([3] * 9, GREEDY) == {ALL}
    assert lazy.engine.runner.num_programs == 2
    # Those at hand have no sampler: two are compiled that have one, and serve what is plain.
    assert same([5], SAMPLED) == {ONE}
    assert lazy.engine.runner.num_programs == 4
    assert same([5], GREEDY) == {ONE}
    assert same([3] * 5, greedy(*[6] * 5)) == {ALL}
    assert lazy.engine.runner.num_programs == 4
    assert same([3] * 5, dataclasses.replace(SAMPLED, max_tokens=4)) == {EIGHT}
    assert lazy.engine.runner.num_programs == 5


def test_which_shape_decodes_run_in():
    programs = StepPrograms(BUCKETS)
    plain, sampled = samplings(GREEDY, SAMPLED)
    program: Any = object()
    programs.add(PREFILL, program, is_plain=False)
    assert programs.choose_decode(1, plain) == ONE, "a prefill's program never stands in"
    programs.add(ALL, program, is_plain=True)
    assert programs.choose_decode(1, plain) == ALL
    assert programs.choose_decode(1, sampled) == programs.choose_decode(1, plain, sampled) == ONE
    assert programs.choose_decode(10, sampled) == ALL
    programs.add(EIGHT, program, is_plain=False)
    assert programs.choose_decode(1, sampled) == programs.choose_decode(1, plain) == EIGHT
    assert programs.choose_decode(9, plain) == ALL
    for num_steps in (4, STEPS_WORTH_A_PROGRAM - 5):
        programs.count_decode(1, EIGHT, sampled, num_steps=num_steps)
    assert programs.choose_decode(1, sampled) == EIGHT
    programs.count_decode(1, EIGHT, sampled, num_steps=1)
    assert programs.choose_decode(1, sampled) == ONE
    assert programs.choose_decode(1, plain) == EIGHT, "plain ones were not wanted yet"
    programs.count_decode(8, EIGHT, plain, num_steps=100)  # Not padded beyond its bucket.
    assert programs.choose_decode(1, plain) == EIGHT
    assert len(programs) == 3


def test_with_all_programs_ready_none_is_padded():
    programs = StepPrograms(BUCKETS)
    for shape in BUCKETS.shapes():
        programs.add(shape, object(), is_plain=False)  # pyright: ignore[reportArgumentType]
    for num_rows in range(1, 11):
        for sampling in samplings(GREEDY, SAMPLED):
            expected = BUCKETS.shape_for(num_rows, num_rows)
            assert programs.choose_decode(num_rows, sampling) == expected
