"""Sessions when something fails: their tokens stay, what they held is freed, errors say why."""

import signal
from typing import Any

import pytest
from session_helpers import check_nothing_held, continued, greedy, start
from tiny_engine import GREEDY, VOCAB_SIZE, prompts_of, tiny_llm

from paged_jax import LLM, SamplingParams, generate_together
from paged_jax.sequence import SequenceState


@pytest.fixture(scope="module")
def llm() -> LLM:
    return tiny_llm(warmup=False)


@pytest.fixture(scope="module")
def by_steps() -> LLM:
    """A token a call."""
    return tiny_llm(decode_lookahead=1, warmup=False)


@pytest.fixture(autouse=True)
def all_free(llm):
    yield
    check_nothing_held(llm)


@pytest.fixture
def sigint_raises():
    """Ctrl-C as in a terminal, also where the shell has it ignored."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)


@pytest.mark.usefixtures("sigint_raises")
@pytest.mark.parametrize(
    ("engine", "at_call"),
    [("by_steps", 1), ("by_steps", 3), ("by_steps", 8), ("llm", 1), ("llm", 2)],
)
def test_an_interrupt_that_waits_for_the_step_leaves_the_old_tokens(
    request, monkeypatch, engine, at_call
):
    """Ctrl-C in the eighth step, the last one: the tokens are all there, and nobody gets them. Or
    in one of two calls of four.
    """
    llm = request.getfixturevalue(engine)
    [prompt] = prompts_of([20])
    seq, runner, calls = start(llm, prompt), llm.engine.runner, []
    inner = runner.run

    def interrupted(*args):
        calls.append(args)
        if len(calls) == at_call:
            signal.raise_signal(signal.SIGINT)
        return inner(*args)

    with monkeypatch.context() as patch:
        patch.setattr(runner, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            seq.generate(greedy(8))
    assert seq.token_ids == prompt
    assert list(llm.engine.scheduler.held.values()) == [seq._sequence.request]
    llm.engine.scheduler.check_integrity()
    tokens = seq.extend([9]).token_ids
    assert seq.generate(greedy(8)).outputs[0].token_ids == continued(llm, tokens, greedy(8))
    seq.close()
    check_nothing_held(llm)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("at_step", [1, 2, 5])
@pytest.mark.parametrize("loses_pool", [False, True])
def test_a_failed_step_costs_a_session_nothing(llm, monkeypatch, error, at_step, loses_pool):
    prompt, other = prompts_of([20, 9])
    expected = continued(llm, prompt)
    seq, bystander = start(llm, prompt), start(llm, other)
    fork = bystander.fork()
    runner, calls = llm.engine.runner, []
    inner = runner.run

    def failing(*args):
        calls.append(args)
        output = inner(*args)
        if len(calls) == at_step:
            if loses_pool:
                for layer in runner.pool.layers:
                    layer.delete()
            raise error("injected")
        return output

    with monkeypatch.context() as patch:
        patch.setattr(runner, "run", failing)
        with pytest.raises(error, match="injected"):
            seq.generate(GREEDY)
    assert seq.token_ids == prompt
    llm.engine.scheduler.check_integrity()
    assert llm.engine.scheduler.blocks.pool.num_used_blocks == 0
    assert seq.generate(GREEDY).outputs[0].token_ids == expected
    assert fork.generate(GREEDY).outputs[0].token_ids == continued(llm, other)
    assert bystander.next_logprobs(1).keys() == {continued(llm, other)[0]}
    for s in (seq, bystander, fork):
        s.close()


@pytest.mark.parametrize("at_token", [1, 4, 8])
def test_an_interrupt_as_a_token_is_taken_in(llm, monkeypatch, at_token):
    """At the eighth, the last one, the scheduler holds the sequence already."""
    [prompt] = prompts_of([20])
    seq = start(llm, prompt)
    append, calls = SequenceState.append, []

    def failing(self, *args):
        calls.append(args)
        if len(calls) == at_token:
            raise KeyboardInterrupt
        return append(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(SequenceState, "append", failing)
        with pytest.raises(KeyboardInterrupt):
            seq.generate(greedy(8))
    llm.engine.scheduler.check_integrity()
    assert seq.token_ids == prompt
    assert len(llm.engine.scheduler.held) == 1
    assert seq.generate(greedy(8)).outputs[0].token_ids == continued(llm, prompt, greedy(8))
    seq.close()


def test_a_tokenizer_that_fails_leaves_the_session_as_it_was(llm, monkeypatch):
    [prompt] = prompts_of([20])
    seq, more = start(llm, prompt), [1, 2, 3]
    with monkeypatch.context() as patch:
        patch.setattr(type(llm.get_tokenizer()), "decode", lambda *_, **__: 1 / 0)
        with pytest.raises(RuntimeError, match="ZeroDivisionError"):
            seq.generate(greedy(8))
        assert seq.token_ids == prompt
        seq.logprobs(more)
    assert seq.generate(greedy(8)).outputs[0].token_ids == continued(llm, prompt, greedy(8))
    seq.close()


def test_one_that_fails_among_several_sets_no_other_back(llm, monkeypatch):
    """The others have gone on: what they hold and what they say are the same tokens."""
    prompts = prompts_of([20, 9])
    a, b = (start(llm, prompt) for prompt in prompts)
    append = SequenceState.append

    def failing(self, *args):
        if self.request.num_prompt_tokens == 20:
            raise ValueError("no such token")
        return append(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(SequenceState, "append", failing)
        with pytest.raises(RuntimeError, match="ValueError: no such token"):
            generate_together([a, b], greedy(8))
    assert a.token_ids == prompts[0]
    assert b.token_ids == prompts[1] + continued(llm, prompts[1], greedy(8))
    for seq in (a, b):
        tokens = seq.extend([5, 6]).token_ids
        assert seq.generate(greedy(8)).outputs[0].token_ids == continued(llm, tokens, greedy(8))
        seq.close()


def test_errors_say_what_to_mend(llm):
    seq: Any = start(llm, [1, 2, 3])
    fork = seq.fork()
    start_any: Any = llm.start
    together: Any = generate_together
    other = tiny_llm(warmup=False)
    stranger = other.start([1, 2])
    for call, message in (
        (lambda: llm.start([]), r"the prompt is empty \(0 tokens\)"),
        (lambda: llm.start([1] * 128), "128 tokens and max_model_len=128"),
        (lambda: llm.start([VOCAB_SIZE]), r"prompt_token_ids\[0\]=260 is out of range"),
        (lambda: start_any(3), "prompt=3: it must be a string"),
        (lambda: seq.extend(5), "more=5: it must be a string, a list of token ids"),
        (lambda: seq.extend([1, "x"]), r"more\[1\]='x': it must be an integer"),
        (lambda: seq.extend([1.5]), r"more\[0\]=1.5: it must be an integer"),
        (lambda: seq.extend([VOCAB_SIZE]), "260 is out of range"),
        (lambda: seq.extend([1] * 125), "128 tokens and max_model_len=128"),
        (lambda: seq.logprobs([]), r"continuation=\[\] has no tokens; give at least one"),
        (lambda: seq.logprobs(None), "continuation=None: it must be a string"),
        (lambda: seq.logprobs([-1]), "-1 is out of range"),
        (lambda: seq.logprobs([1] * 126), "129 tokens, more than max_model_len=128"),
        (lambda: seq.logprobs([1], k=21), r"k=21.*0 to 20"),
        (lambda: seq.logprobs([1], k=-1), r"k=-1.*0 to 20"),
        (lambda: seq.logprobs([1], k="2"), r"k='2'.*0 to 20"),
        (lambda: seq.next_logprobs(0), r"k=0.*1 to 20"),
        (lambda: seq.next_logprobs(21), r"k=21.*1 to 20"),
        (lambda: seq.next_logprobs(True), r"k=True.*1 to 20"),
        (lambda: seq.generate(SamplingParams(n=2)), "n=2: a session has one continuation; fork"),
        (lambda: seq.generate(SamplingParams(max_tokens=3, min_tokens=3, stop_token_ids=[999])),
         "stop_token_ids holds 999"),
        (lambda: seq.generate({"max_tokens": 3}), r"sampling_params=.* is of type dict"),
        (lambda: seq.generate("x"), r"sampling_params='x' is of type str"),
        (lambda: together([seq, seq]), "holds one of them twice; fork it"),
        (lambda: together([seq, fork], [GREEDY]), "1 entries for 2 sessions"),
        (lambda: together([seq, stranger]), "sessions are of different engines"),
        (lambda: together([seq, "x"]), r"sessions\[1\]='x' is of type str"),
        (lambda: together(seq), "sessions=.*list of sessions"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            call()
    assert seq.token_ids == fork.token_ids == [1, 2, 3]
    other.close()
    for use in (
        lambda: other.start([1]),
        lambda: stranger.generate(GREEDY),
        lambda: stranger.extend([1]),
        lambda: stranger.fork(),
        lambda: stranger.logprobs([1]),
        lambda: stranger.next_logprobs(),
    ):
        with pytest.raises(RuntimeError, match="this LLM is closed; make a new one"):
            use()
    assert stranger.token_ids == [1, 2]
    stranger.close()
    seq.close()
    fork.close()
