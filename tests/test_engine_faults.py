"""Faults: what fails fails alone, and the engine serves the next request."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from tiny_engine import (
    GREEDY,
    ByteTokenizer,
    check_idle,
    prompts_of,
    run,
    tiny_llm,
    tiny_model,
    tokens_of,
)

from paged_jax import LLM, SamplingParams
from paged_jax.dispatch import Flight


@pytest.fixture(scope="module")
def llm() -> LLM:
    return tiny_llm()


@pytest.fixture(autouse=True)
def all_blocks_free(request):
    yield
    if "llm" in request.fixturenames:
        check_idle(request.getfixturevalue("llm"))


def test_a_failed_step_loses_no_request(llm, monkeypatch):
    prompts = prompts_of([9, 20, 40])
    expected = tokens_of(run(llm, prompts))
    engine = llm.engine
    inner = engine.runner.run
    calls = 0

    def failing(*args):
        nonlocal calls
        calls += 1
        output = inner(*args)
        if calls in (2, 7):
            if calls == 7:  # The pool is lost with the step.
                for layer in engine.runner.pool.layers:
                    layer.delete()
            raise KeyboardInterrupt
        return output

    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, GREEDY)
    monkeypatch.setattr(engine.runner, "run", failing)
    outputs, interrupts = {}, 0
    while engine.has_unfinished():
        try:
            outputs.update({o.request_id: o for o in engine.step()})
        except KeyboardInterrupt:
            interrupts += 1
            engine.scheduler.check_integrity()
            assert engine.scheduler.blocks.pool.num_used_blocks == 0
    assert interrupts == 2
    assert tokens_of([outputs[str(i)] for i in range(3)]) == expected


def test_an_interrupted_generate_leaves_an_engine_that_serves(llm, monkeypatch):
    prompts = prompts_of([9, 20])
    expected = tokens_of(run(llm, prompts))
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.runner, "run", lambda *_: (_ for _ in ()).throw(RuntimeError("x")))
        with pytest.raises(RuntimeError, match="x"):
            run(llm, prompts)
    assert tokens_of(run(llm, prompts)) == expected


def test_a_tokenizer_that_fails_on_one_request_harms_no_other(llm, monkeypatch):
    prompts = prompts_of([9, 20])
    expected = tokens_of(run(llm, prompts))
    from paged_jax.sequence import SequenceState

    append = SequenceState.append

    def failing(self, token_id, sampled, row):
        if self.request.num_prompt_tokens == 9 and self.request.num_output_tokens == 5:
            raise RuntimeError("no such token")
        return append(self, token_id, sampled, row)

    monkeypatch.setattr(SequenceState, "append", failing)
    outputs = run(llm, prompts)
    assert outputs[0].outputs[0].finish_reason == "error"
    assert outputs[0].error == "RuntimeError: no such token"
    assert tokens_of(outputs)[1] == expected[1]


def test_nan_logits_fail_their_request_alone():
    model = tiny_model()
    embed = np.array(model.params.embed)
    embed[200] = np.nan
    params = model.params.replace(
        embed=jax.numpy.asarray(embed), lm_head=jax.numpy.asarray(np.nan_to_num(embed))
    )
    config = type(model.config)(**{**vars(model.config), "tie_word_embeddings": False})
    llm = tiny_llm(type(model)(**{**vars(model), "params": params, "config": config}))
    good = [[1, 2, 3], [7] * 30]
    expected = tokens_of(run(llm, good))
    outputs = run(llm, [good[0], [5, 200, 6], good[1]])
    assert outputs[1].outputs[0].finish_reason == "error"
    assert outputs[1].error is not None and "NaN" in outputs[1].error
    assert tokens_of([outputs[0], outputs[2]]) == expected
    # The blocks that hold NaN are used again; nobody reads what they do not own.
    assert tokens_of(run(llm, good * 4)) == expected * 4


class BadTokenizer(ByteTokenizer):
    """Cannot decode one id, wherever it meets it."""

    bad = -1

    def decode(self, ids, skip_special_tokens=True):
        if self.bad in ids:
            raise RuntimeError(f"no token {self.bad}")
        return super().decode(ids, skip_special_tokens)


def test_an_id_that_no_tokenizer_knows_fails_its_request_alone(llm):
    prompts = prompts_of([9, 20])
    first, second = tokens_of(run(llm, prompts))
    tokenizer = BadTokenizer()
    tokenizer.bad = next(token for token in second if token not in first)
    outputs = run(tiny_llm(tokenizer=tokenizer), prompts)
    assert tokens_of(outputs)[0] == first and outputs[0].error is None
    assert outputs[1].outputs[0].finish_reason == "error"
    assert outputs[1].error == f"RuntimeError: no token {tokenizer.bad}"


CTRL_C = """
import os, signal, sys, threading, time

sys.path.insert(0, sys.argv[1])
from tiny_engine import check_idle, prompts_of, run, tiny_llm, tokens_of

signal.signal(signal.SIGINT, signal.default_int_handler)  # A shell may have it ignored.
llm = tiny_llm()
prompts = prompts_of([9, 20, 40, 5])
expected = tokens_of(run(llm, prompts))
num_interrupts = 0
for i in range(80):
    timer = threading.Timer(0.0005 * i, os.kill, (os.getpid(), signal.SIGINT))
    try:
        timer.start()
        run(llm, prompts)
        timer.join()
        time.sleep(0.05)
    except KeyboardInterrupt:
        num_interrupts += 1
    check_idle(llm)
assert num_interrupts == 80, num_interrupts
assert tokens_of(run(llm, prompts)) == expected
"""


def test_ctrl_c_at_any_moment_leaves_an_engine_that_serves():
    """A real SIGINT, a little later each time, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", CTRL_C, str(Path(__file__).parent)],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture
def sigint_raises():
    """Ctrl-C as in a terminal, also where the shell has it ignored."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)


@pytest.mark.usefixtures("sigint_raises")
@pytest.mark.parametrize(("lookahead", "num_steps"), [(1, 24), (8, 1 + 6)])
def test_an_interrupt_waits_for_the_step_and_its_outputs_are_not_lost(
    llm, monkeypatch, lookahead, num_steps
):
    expected = tokens_of(run(llm, prompts_of([9])))[0]
    other = tiny_llm(llm.model, decode_lookahead=lookahead, warmup=False)
    engine, to_host = other.engine, Flight.to_host

    def interrupted(flight):
        os.kill(os.getpid(), signal.SIGINT)
        return to_host(flight)

    engine.add_request("x", prompts_of([9])[0], GREEDY)
    outputs, interrupts = [], 0
    monkeypatch.setattr(Flight, "to_host", interrupted)
    while engine.has_unfinished():
        try:
            outputs += engine.step()
        except KeyboardInterrupt:
            interrupts += 1
    assert interrupts == num_steps
    assert tokens_of(outputs) == [expected]
    assert outputs[0].metrics.num_preemptions == 0
    check_idle(other)


def test_half_processed_steps_are_sampled_again_alike(llm, monkeypatch):
    """A fault between the scheduler's books and the text: the tokens come again, the same ones."""
    from paged_jax.sequence import SequenceState

    params = SamplingParams(temperature=1.0, seed=3, max_tokens=20, ignore_eos=True, logprobs=1)
    prompts = prompts_of([9, 20, 33])
    expected = run(llm, prompts, params)
    append, calls = SequenceState.append, 0

    def failing(self, token_id, sampled, row):
        nonlocal calls
        calls += 1
        if calls % 10 == 0:
            raise KeyboardInterrupt
        return append(self, token_id, sampled, row)

    engine = llm.engine
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, params)
    monkeypatch.setattr(SequenceState, "append", failing)
    outputs = {}
    while engine.has_unfinished():
        try:
            outputs.update({output.request_id: output for output in engine.step()})
        except KeyboardInterrupt:
            engine.scheduler.check_integrity()
    for i, output in enumerate(expected):
        ours, theirs = outputs[str(i)].outputs[0], output.outputs[0]
        assert (ours.token_ids, ours.text) == (theirs.token_ids, theirs.text)
        assert ours.logprobs is not None and len(ours.logprobs) == 20


def test_calls_of_several_threads_get_their_own_outputs(llm):
    groups = [prompts_of([9, 20, 5], seed) for seed in range(4)]
    expected = [tokens_of(run(llm, prompts)) for prompts in groups]
    results: dict[int, Any] = {}

    def call(i):
        try:
            results[i] = tokens_of(run(llm, groups[i]))
        except BaseException as error:
            results[i] = error

    threads = [threading.Thread(target=call, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert [results.get(i) for i in range(4)] == expected


def test_an_abandoned_stream_mixes_with_no_later_call(llm):
    prompts = prompts_of([9, 20])
    expected = tokens_of(run(llm, prompts))
    old = llm.stream([{"prompt_token_ids": prompts[0]}], GREEDY)
    first = next(old)
    llm.abort(first.request_id)
    assert tokens_of(run(llm, [prompts[1]])) == expected[1:]
    assert [o.outputs[0].finish_reason for o in old] == ["abort"]
    old = llm.stream([{"prompt_token_ids": prompts[0]}], GREEDY)
    next(old)
    for _ in range(2):
        assert tokens_of(run(llm, [prompts[1]])) == expected[1:]
    assert list(old)[-1].outputs[0].token_ids == expected[0]
    stolen = llm.stream([{"prompt_token_ids": prompts[0]}], GREEDY)
    llm.engine.abort(next(stolen).request_id)
    with pytest.raises(RuntimeError, match="behind this call's back"):
        list(stolen)


def test_a_closed_engine_says_so():
    llm = tiny_llm(warmup=False)
    stream = llm.stream("abc", GREEDY)
    next(stream)
    llm.close()
    llm.close()
    for use in (lambda: llm.generate("abc"), llm.get_metrics, lambda: next(stream)):
        with pytest.raises(RuntimeError, match="closed; make a new one"):
            use()


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (None, "prompt=None: it must be a string"),
        (5, "prompt=5: it must be a string"),
        (b"abc", "prompt=b'abc': it must be"),
        ([{"prompt_token_ids": b"abc"}], "prompt=b'abc': it must be"),
        (
            [{"prompt_token_ids": np.array([1.5, 2.0])}],
            r"prompt_token_ids\[0\].*must be an integer",
        ),
        (
            [{"prompt_token_ids": np.zeros((2, 3), int)}],
            r"prompt_token_ids\[0\].*must be an integer",
        ),
        ([{"prompt_token_ids": jax.numpy.array([1.5])}], "must be an integer"),
        ([{1: 2, "x": 3}], r"fields \[1, 'x'\]"),
        ([True, 1], "prompt=True"),
    ],
)
def test_prompts_that_are_none(llm, prompts, message):
    with pytest.raises(ValueError, match=message):
        llm.generate(prompts, GREEDY, use_tqdm=False)
    if isinstance(prompts, list):
        outputs = llm.generate(["abc", prompts[0]], GREEDY, use_tqdm=False)
        assert outputs[0].error is None and outputs[1].error is not None


def test_integers_of_numpy_and_jax_are_token_ids(llm):
    expected = tokens_of(llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False))
    for prompt in (
        np.array([1, 2, 3]),
        jax.numpy.array([1, 2, 3]),
        [np.int32(1), np.int64(2), 3],
        (1, 2, 3),
        {"prompt_token_ids": np.array([1, 2, 3])},
    ):
        assert tokens_of(llm.generate(prompt, GREEDY, use_tqdm=False)) == expected
    assert llm.generate([], GREEDY, use_tqdm=False) == []


@pytest.mark.parametrize("params", [{"temperature": 0}, "x", 5, [None], [{"max_tokens": 3}]])
def test_sampling_params_of_another_type(llm, params):
    for call in (llm.generate, llm.stream, lambda p, s: llm.chat([{"role": "user"}], s)):
        with pytest.raises(ValueError, match=r"sampling_params=.* is of type"):
            call("abc", params)


def test_extreme_values_harm_nobody(llm):
    prompts = prompts_of([9, 20])
    expected = tokens_of(run(llm, prompts))
    wide = SamplingParams(temperature=1.0, top_k=2**40, seed=1, max_tokens=3)
    assert tokens_of(run(llm, prompts, [GREEDY, wide]))[0] == expected[0]
    tiny_p = [
        SamplingParams(temperature=1.0, top_p=1e-46, seed=i, max_tokens=24, ignore_eos=True)
        for i in range(5)
    ]
    assert tokens_of(run(llm, [prompts[0]] * 5, tiny_p)) == [expected[0]] * 5
    many = SamplingParams(temperature=0, min_tokens=1, stop_token_ids=[5] * 80)
    assert run(llm, prompts[:1], many)[0].error is None
    with pytest.raises(ValueError, match=r"min_tokens=200 does not fit.*room for 119"):
        run(llm, prompts[:1], SamplingParams(min_tokens=200, max_tokens=None))


def test_chat_of_other_types(llm):
    one = [{"role": "user", "content": "hi"}]
    expected = tokens_of(llm.chat(one, GREEDY, use_tqdm=False))
    assert tokens_of(llm.chat((m for m in one), GREEDY, use_tqdm=False)) == expected  # pyright: ignore
    assert list(llm.stream_chat(one, GREEDY))[-1].outputs[0].token_ids == expected[0]
    for messages in (None, 5, "hi", one[0]):
        with pytest.raises(ValueError, match="messages"):
            llm.chat(messages, GREEDY, use_tqdm=False)  # pyright: ignore
    for extra in ("x", {1: 2}, {"messages": 1}, {"tools": []}):
        with pytest.raises(ValueError, match="chat_template_kwargs"):
            llm.chat(one, GREEDY, chat_template_kwargs=extra, use_tqdm=False)  # pyright: ignore


def test_options_that_contradict_the_model():
    model = tiny_model()
    with pytest.raises(ValueError, match="dtype='bfloat16', and the model was loaded as float32"):
        tiny_llm(model, dtype="bfloat16")
    with pytest.raises(ValueError, match="attention_implementation='fast'"):
        tiny_llm(model, attention_implementation="fast")
    with pytest.raises(ValueError, match="raise kv_cache_memory_bytes to at least 2048"):
        tiny_llm(model, kv_cache_memory_bytes=1000)
    with pytest.raises(ValueError, match="does not fit the device's memory"):
        tiny_llm(model, num_gpu_blocks_override=10**12)
    assert tiny_llm(model, warmup=False, max_num_seqs=None, max_num_batched_tokens=16) is not None
