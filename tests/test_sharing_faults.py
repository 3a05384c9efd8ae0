"""Faults while sequences are forked, swapped, held and searched: nothing is lost, nothing stays."""

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_engine import check_idle, prompts_of, run, tiny_llm, tiny_model

from paged_jax import LLM, SamplingParams
from paged_jax.sequence import SequenceState

ERRORS = [RuntimeError, KeyboardInterrupt]
FORKS: dict[str, Any] = dict(temperature=1.0, top_k=1, n=3, max_tokens=16, ignore_eos=True)
PARAMS = SamplingParams(**FORKS)
PROMPTS = prompts_of([10, 23, 16, 30])


def make_llm(**options: Any) -> LLM:
    """22 blocks for twelve outputs, and host memory: forks, copies and swaps in most steps."""
    sizes = dict(num_gpu_blocks_override=23, max_model_len=88, warmup=False)
    swap = dict(preemption_mode="swap", swap_space_bytes=40 * 1024, enable_host_prefix_cache=True)
    return tiny_llm(tiny_model(), **{**sizes, **swap, **options})


@pytest.fixture(scope="module")
def llm() -> LLM:
    return make_llm()


@pytest.fixture(scope="module")
def expected(llm):
    return tokens(run(llm, PROMPTS, PARAMS))


@pytest.fixture(autouse=True)
def all_free_and_serving(request):
    """Every block is free on device and host, and the next requests are served rightly."""
    if "llm" not in request.fixturenames:
        yield
        return
    llm, expected = (request.getfixturevalue(name) for name in ("llm", "expected"))
    yield
    check_all_free(llm)
    assert tokens(run(llm, PROMPTS[:2], PARAMS)) == expected[:2]
    check_all_free(llm)


def check_all_free(llm: LLM) -> None:
    check_idle(llm)
    scheduler = llm.engine.scheduler
    assert not scheduler.held and not scheduler.requests
    assert scheduler.blocks.host is not None
    assert scheduler.blocks.host.pool.num_used_blocks == 0


def tokens(outputs):
    return [[completion.token_ids for completion in output.outputs] for output in outputs]


def add_all(llm: LLM) -> None:
    for i, prompt in enumerate(PROMPTS):
        llm.engine.add_request(str(i), prompt, PARAMS)


def step_to_the_end(llm: LLM) -> tuple[list, int]:
    """The tokens of each request, and how many steps failed."""
    outputs, num_faults = {}, 0
    while llm.engine.has_unfinished():
        try:
            outputs |= {output.request_id: output for output in llm.engine.step()}
        except (RuntimeError, KeyboardInterrupt) as error:
            assert str(error) == "injected"
            num_faults += 1
            llm.engine.scheduler.check_integrity()
            assert llm.engine.scheduler.blocks.pool.num_used_blocks == 0
    return tokens([outputs[str(i)] for i in range(len(PROMPTS))]), num_faults


def failing_at(inner, calls_to_fail, error, *, after: bool = False):
    """`inner`, but the given calls of it raise, before or after it has done its work."""
    num_calls = 0

    def call(*args, **kwargs):
        nonlocal num_calls
        num_calls += 1
        fails = num_calls in calls_to_fail
        if fails and not after:
            raise error("injected")
        result = inner(*args, **kwargs)
        if fails:
            raise error("injected")
        return result

    return call


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("name", ["apply", "_stage", "_send_out", "_send_in", "settle"])
def test_a_swap_that_fails_loses_no_request(llm, expected, monkeypatch, name, after, error):
    """Also in the middle: what was swapped out is not stored, or the pool is gone already."""
    mover = llm.engine.runner.mover
    monkeypatch.setattr(
        mover, name, failing_at(getattr(mover, name), (1, 2, 4), error, after=after)
    )
    add_all(llm)
    got, num_faults = step_to_the_end(llm)
    assert got == expected and num_faults >= 1


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("name", ["_store_oldest", "_start_gather", "_scatter_chunk"])
def test_a_transfer_that_fails_loses_no_request(llm, expected, monkeypatch, name, error):
    mover = llm.engine.runner.mover
    assert tokens(run(llm, PROMPTS, PARAMS)) == expected  # So that the host has prefixes.
    monkeypatch.setattr(mover, name, failing_at(getattr(mover, name), (2, 3), error))
    add_all(llm)
    got, num_faults = step_to_the_end(llm)
    assert got == expected and num_faults >= 1


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("name", ["apply", "settle"])
def test_generate_ends_with_the_error_of_a_swap(llm, expected, monkeypatch, name, error):
    mover = llm.engine.runner.mover
    with monkeypatch.context() as patch:
        patch.setattr(mover, name, failing_at(getattr(mover, name), (3,), error))
        with pytest.raises(error, match="injected"):
            run(llm, PROMPTS, PARAMS)
    check_all_free(llm)


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("at_step", [1, 2, 3, 9, 20])
def test_a_failed_step_among_forks_and_swaps(llm, expected, monkeypatch, at_step, error):
    runner = llm.engine.runner
    monkeypatch.setattr(
        runner, "run", failing_at(runner.run, (at_step, at_step + 1), error, after=True)
    )
    add_all(llm)
    got, num_faults = step_to_the_end(llm)
    assert got == expected and num_faults == 2


@pytest.mark.parametrize("every", [3, 7])
def test_half_processed_steps_of_forks_are_sampled_again_alike(llm, monkeypatch, every):
    params = SamplingParams(**{**FORKS, "top_k": 0, "seed": 3, "logprobs": 1})
    usual = run(llm, PROMPTS, params)
    append, calls = SequenceState.append, []

    def failing(self, *args):
        calls.append(args)
        if len(calls) % every == 0 and len(calls) < 100:
            raise KeyboardInterrupt("injected")
        return append(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(SequenceState, "append", failing)
        for i, prompt in enumerate(PROMPTS):
            llm.engine.add_request(str(i), prompt, params)
        got, num_faults = step_to_the_end(llm)
    assert got == tokens(usual) and num_faults > 5


def test_a_tokenizer_that_fails_on_one_fork_harms_no_sibling(llm, expected, monkeypatch):
    append = SequenceState.append

    def failing(self, *args):
        if self.index == 1 and self.num_tokens == 5:
            raise ValueError("no such token")
        return append(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(SequenceState, "append", failing)
        outputs = run(llm, PROMPTS, PARAMS)
    for output, own in zip(outputs, expected, strict=True):
        assert [o.finish_reason for o in output.outputs] == ["length", "error", "length"]
        assert output.error == "ValueError: no such token"
        assert [output.outputs[i].token_ids for i in (0, 2)] == own[::2]


def test_a_user_who_presses_ctrl_c_in_a_callback(llm, expected):
    def interrupt(number, event):
        if number - first == 7:
            raise KeyboardInterrupt("injected")

    numbers = []
    end = llm.kv_events().subscribe(lambda number, event: numbers.append(number))
    run(llm, [[1] * 20], SamplingParams(max_tokens=1))
    end()
    first = numbers[-1] + 1
    end = llm.kv_events().subscribe(interrupt)
    with pytest.raises(KeyboardInterrupt, match="injected"):
        run(llm, prompts_of([40, 33], seed=5), PARAMS)
    end()
    check_all_free(llm)


@pytest.mark.parametrize(("victim", "first_step"), [(0, 1), (1, 2), (3, 3)])
def test_an_abort_between_dispatch_and_result(llm, expected, monkeypatch, victim, first_step):
    """At every fourth step: of a group that prefills, decodes, waits or is swapped out."""
    engine = llm.engine
    inner = engine.runner.run
    at_step, was_met = first_step - 4, True
    while was_met:
        at_step, num_steps, was_met = at_step + 4, 0, False
        ended = {}

        def aborting(*args, at_step=at_step, ended=ended):
            nonlocal num_steps, was_met
            num_steps += 1
            output = inner(*args)
            if num_steps == at_step and (aborted := engine.abort(str(victim))) is not None:
                was_met, ended[str(victim)] = True, aborted
            return output

        with monkeypatch.context() as patch:
            patch.setattr(engine.runner, "run", aborting)
            add_all(llm)
            while engine.has_unfinished():
                ended |= {output.request_id: output for output in engine.step()}
                engine.scheduler.check_integrity()
        for i, own in enumerate(expected):
            if was_met and i == victim:
                for output, whole in zip(ended[str(i)].outputs, own, strict=True):
                    assert output.finish_reason in ("abort", "length")
                    assert output.token_ids == whole[: len(output.token_ids)]
            else:
                assert [o.token_ids for o in ended[str(i)].outputs] == own
    assert at_step > 10


def test_an_abort_of_a_request_whose_logits_are_no_numbers(llm, expected, monkeypatch):
    engine = llm.engine
    inner = engine.runner.run

    def aborting(*args):
        rows, output = inner(*args)
        engine.abort("0")
        nowhere = np.zeros(output.is_finite.shape, bool)
        return rows, dataclasses.replace(output, is_finite=nowhere)

    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "run", aborting)
        add_all(llm)
        outputs = []
        while engine.has_unfinished():
            outputs += engine.step()
    assert {o.request_id for o in outputs} == {"1", "2", "3"}
    assert all(output.error for output in outputs)


CTRL_C = """
import gc, os, signal, sys, threading, time

sys.path.insert(0, sys.argv[1])
from test_sharing_faults import PARAMS, PROMPTS, check_all_free, make_llm, run, tokens
from paged_jax import BeamSearchParams, SamplingParams

signal.signal(signal.SIGINT, signal.default_int_handler)  # A shell may have it ignored.
llm = make_llm()
beams = BeamSearchParams(beam_width=4, max_tokens=6)
greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
expected = tokens(run(llm, PROMPTS, PARAMS))
held = llm.start(prompts[1])

def search():
    return [[s.token_ids for s in o.sequences] for o in llm.beam_search(prompts[:3], beams)]

def session():
    fork = held.fork()
    fork.generate(greedy)
    twin = fork.fork().extend([7])
    twin.logprobs([1, 2, 3])
    fork.next_logprobs(3)
    tokens = held.fork().generate(greedy).outputs[0].token_ids
    return tokens + held.fork().extend([5]).generate(greedy).outputs[0].token_ids

found, said = search(), session()
num_interrupts = 0
for i in range(45):
    use = (lambda: run(llm, PROMPTS, PARAMS), search, session)[i % 3]
    timer = threading.Timer(0.002 * i, os.kill, (os.getpid(), signal.SIGINT))
    try:
        timer.start()
        use()
        timer.join()
        time.sleep(0.05)
    except KeyboardInterrupt:
        num_interrupts += 1
    gc.collect()
    llm.engine.scheduler.check_integrity()
    run(llm, [[1, 2, 3]], greedy)
    assert len(llm.engine.scheduler.held) == 1, (i, llm.engine.scheduler)
    assert held.token_ids == PROMPTS[1]
assert num_interrupts == 45, num_interrupts
assert search() == found and session() == said
held.close()
gc.collect()
assert tokens(run(llm, PROMPTS, PARAMS)) == expected
check_all_free(llm)
"""


def test_ctrl_c_at_any_moment_of_forks_searches_and_sessions():
    """A real SIGINT, a little later each time, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", CTRL_C, str(Path(__file__).parent)],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-3000:]
