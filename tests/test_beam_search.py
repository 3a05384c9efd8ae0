"""Beam search against transformers' on two tiny models, rule by rule, and over a fake engine."""

import functools
import json
import math
import signal
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from dense_llama import model_logits

from paged_jax.beam_driver import BeamSearchOutput, run_beam_search
from paged_jax.beam_search import BeamSearch, BeamSearchParams
from paged_jax.models.loader import load_model
from paged_jax.prompts import ParsedPrompt

FOLDER = Path(__file__).parent / "goldens"
CASES = json.loads((FOLDER / "beam_search.json").read_text())["cases"]
MODELS = sorted({case["model"] for case in CASES})
MAX_TOKENS = 40
MAX_BEAMS = 8


class DenseModel:
    """Log-probabilities by the whole forward pass of each sequence; the same one is read once."""

    def __init__(self, name: str):
        self.model = load_model(FOLDER / name, dtype="float32")
        self.vocab_size = self.model.config.vocab_size
        self._forward = jax.vmap(
            functools.partial(model_logits, self.model.params, config=self.model.config),
            in_axes=(0, None),
        )
        self._known: dict[tuple[int, ...], np.ndarray] = {}

    def logprobs(self, sequences: list[tuple[int, ...]]) -> np.ndarray:
        """float32[len(sequences), vocab_size] of the token after each."""
        unknown = [s for s in dict.fromkeys(sequences) if s not in self._known]
        for first in range(0, len(unknown), MAX_BEAMS):
            batch = unknown[first : first + MAX_BEAMS]
            padded = np.zeros((MAX_BEAMS, MAX_TOKENS), np.int32)  # Causal: what follows is unseen.
            for row, tokens in enumerate(batch):
                padded[row, : len(tokens)] = tokens
            logits = self._forward(padded, np.arange(MAX_TOKENS, dtype=np.int32))
            last = np.asarray(jax.nn.log_softmax(logits))
            for row, tokens in enumerate(batch):
                self._known[tokens] = last[row, len(tokens) - 1]
        return np.stack([self._known[tokens] for tokens in sequences])


class FakeEngine:
    """A `BeamEngine` over a function of token sequences, strict about what it is asked."""

    def __init__(self, source: Any, *, eos_token_ids=(), max_model_len=MAX_TOKENS, max_num_seqs=16):
        self.source = source
        self.vocab_size = source.vocab_size
        self.eos_token_ids = eos_token_ids
        self.max_model_len = max_model_len
        self.max_num_seqs = max_num_seqs
        self.live: dict[int, list[int]] = {}
        self.num_made = 0
        self.batch_sizes: list[int] = []
        self.fail_at: tuple[str, int] | None = None
        self.error: BaseException = RuntimeError("injected")
        self.interrupt_at: int | None = None
        self.num_calls = {"start": 0, "fork": 0, "extend": 0, "next_logprobs": 0, "drop": 0}

    def _count(self, name: str) -> None:
        self.num_calls[name] += 1
        if self.fail_at == (name, self.num_calls[name]):
            raise self.error

    def _add(self, token_ids: list[int]) -> int:
        self.num_made += 1
        self.live[self.num_made] = token_ids
        if self.num_made == self.interrupt_at:
            signal.raise_signal(signal.SIGINT)
        return self.num_made

    def start(self, prompt: ParsedPrompt) -> int:
        self._count("start")
        if len(prompt.token_ids) >= self.max_model_len:
            raise ValueError("too long")
        return self._add(list(prompt.token_ids))

    def fork(self, handle: int) -> int:
        self._count("fork")
        return self._add(list(self.live[handle]))

    def extend(self, handle: int, token_id: int) -> None:
        self._count("extend")
        self.live[handle].append(token_id)

    def next_logprobs(self, handles, k):
        self._count("next_logprobs")
        # Nothing is kept that is not computed: weak beams are gone.
        assert sorted(handles) == sorted(self.live)
        self.batch_sizes.append(len(handles))
        logprobs = self.source.logprobs([tuple(self.live[handle]) for handle in handles])
        ids = np.argsort(-logprobs, axis=1, kind="stable")[:, :k]
        return ids, np.take_along_axis(logprobs, ids, axis=1)

    def drop(self, handle: int) -> None:
        del self.live[handle]
        self._count("drop")


class RandomModel:
    """Log-probabilities drawn anew for each sequence, from its tokens."""

    vocab_size = 11

    def logprobs(self, sequences):
        rngs = [np.random.default_rng([len(tokens), *tokens]) for tokens in sequences]
        logits = np.stack([rng.standard_normal(self.vocab_size) * 2 for rng in rngs])
        return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


@pytest.fixture(scope="module")
def dense_models():
    return {name: DenseModel(name) for name in MODELS}


def params_of(case) -> BeamSearchParams:
    names = ("beam_width", "max_tokens", "length_penalty", "early_stopping")
    return BeamSearchParams(**{name: case[name] for name in names})


def check(case, output: BeamSearchOutput) -> None:
    sequences = output.sequences
    assert output.prompt_token_ids == case["prompt_token_ids"]
    assert [s.token_ids for s in sequences] == case["token_ids"]
    np.testing.assert_allclose([s.score for s in sequences], case["scores"], rtol=1e-5, atol=1e-5)
    for s in sequences:
        scale = len(s.token_ids) ** case["length_penalty"]
        assert s.score == pytest.approx(s.cumulative_logprob / scale)
        ended = s.token_ids[-1] in case["eos_token_ids"]
        assert s.finish_reason == ("stop" if ended else "length")
        assert s.stop_reason == (s.token_ids[-1] if ended else None)


@pytest.mark.parametrize("width", sorted({case["beam_width"] for case in CASES}))
@pytest.mark.parametrize("name", MODELS)
def test_equals_transformers(name, width, dense_models):
    cases = [c for c in CASES if c["model"] == name and c["beam_width"] == width]
    assert len(cases) > 30
    for case in cases:
        engine = FakeEngine(dense_models[name], eos_token_ids=case["eos_token_ids"])
        prompt = ParsedPrompt(token_ids=case["prompt_token_ids"])
        check(case, run_beam_search(engine, [prompt], params_of(case))[0])
        assert not engine.live


@pytest.mark.parametrize("max_num_seqs", [1, 9, 64])
def test_many_prompts_at_once_equal_one_by_one(max_num_seqs):
    prompts = [ParsedPrompt(token_ids=[i, i + 1], text=f"prompt {i}") for i in range(7)]
    params = BeamSearchParams(beam_width=4, max_tokens=9)
    alone = [
        run_beam_search(FakeEngine(RandomModel(), eos_token_ids=(3,)), [prompt], params)[0]
        for prompt in prompts
    ]
    engine = FakeEngine(RandomModel(), eos_token_ids=(3,), max_num_seqs=max_num_seqs)
    together = run_beam_search(engine, prompts, params)
    assert together == alone
    assert [output.prompt for output in together] == [prompt.text for prompt in prompts]
    assert len({len(s.token_ids) for output in together for s in output.sequences}) > 2
    assert max(engine.batch_sizes) <= max(4, max_num_seqs)
    if max_num_seqs == 64:
        assert len(engine.batch_sizes) <= 9
    assert not engine.live


def test_wide_beams_find_the_best_of_all():
    """Without EOS, and as wide as there are prefixes, the search is exhaustive."""
    source, num_tokens = RandomModel(), 3
    params = BeamSearchParams(beam_width=11**2, max_tokens=num_tokens, length_penalty=0.0)
    totals: dict[tuple[int, ...], float] = {(): 0.0}
    for _ in range(num_tokens):
        rows = source.logprobs([(5, *tokens) for tokens in totals])
        totals = {
            (*tokens, token_id): total + rows[i, token_id]
            for i, (tokens, total) in enumerate(totals.items())
            for token_id in range(source.vocab_size)
        }
    expected = sorted(totals, key=lambda tokens: -totals[tokens])[: 11**2]
    (output,) = run_beam_search(FakeEngine(source), [ParsedPrompt(token_ids=[5])], params)
    assert [tuple(s.token_ids) for s in output.sequences] == expected
    assert output.sequences[0].score == pytest.approx(totals[expected[0]])


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
def test_one_beam_is_greedy(early_stopping):
    source = RandomModel()
    for first in range(20):
        greedy = [first]
        while len(greedy) <= 12 and greedy[1:][-1:] != [3]:
            greedy.append(int(source.logprobs([tuple(greedy)])[0].argmax()))
        params = BeamSearchParams(
            beam_width=1, max_tokens=12, length_penalty=2.0, early_stopping=early_stopping
        )
        engine = FakeEngine(source, eos_token_ids=(3,))
        (output,) = run_beam_search(engine, [ParsedPrompt(token_ids=[first])], params)
        assert output.sequences[0].token_ids == greedy[1:]
        assert engine.num_calls["fork"] == 0


def test_ignore_eos_and_the_models_length():
    engine = FakeEngine(RandomModel(), eos_token_ids=(3,), max_model_len=10)
    prompts = [ParsedPrompt(token_ids=[1]), ParsedPrompt(token_ids=[1, 2, 3, 4, 5, 6])]
    params = BeamSearchParams(beam_width=3, max_tokens=7, ignore_eos=True)
    outputs = run_beam_search(engine, prompts, params)
    assert [[len(s.token_ids) for s in o.sequences] for o in outputs] == [[7] * 3, [4] * 3]
    assert {s.finish_reason for o in outputs for s in o.sequences} == {"length"}
    assert any(3 in s.token_ids for o in outputs for s in o.sequences)


class LetterTokenizer:
    """Token i is the i-th letter, and token 3 a mark that is no special token."""

    vocab_size = 11
    special_token_ids = frozenset()

    def decode(self, ids, *, skip_special_tokens=True):
        return "".join("abc|efghijk"[i] for i in ids)


def test_text_leaves_out_the_eos():
    engine = FakeEngine(RandomModel(), eos_token_ids=(3,))
    params = BeamSearchParams(beam_width=4, max_tokens=6)
    prompt = ParsedPrompt(token_ids=[2, 9])
    (output,) = run_beam_search(engine, [prompt], params, tokenizer=LetterTokenizer())
    assert {s.finish_reason for s in output.sequences} == {"stop", "length"}
    for s in output.sequences:
        assert "".join("abc|efghijk"[i] for i in s.token_ids).removesuffix("|") == s.text


@pytest.mark.parametrize("error", [RuntimeError("injected"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("name", ["start", "fork", "extend", "next_logprobs", "drop"])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_nothing_is_left_after_a_fault(name, count, error):
    engine = FakeEngine(RandomModel(), eos_token_ids=(3,), max_num_seqs=8)
    engine.fail_at, engine.error = (name, count), error
    prompts = [ParsedPrompt(token_ids=[i]) for i in range(6)]
    params = BeamSearchParams(beam_width=4, max_tokens=8)
    with pytest.raises(type(error)):
        run_beam_search(engine, prompts, params)
    assert not engine.live
    engine.fail_at = None
    assert len(run_beam_search(engine, prompts, params)) == 6


@pytest.mark.parametrize("interrupt_at", [1, 2, 7])
def test_nothing_is_left_after_ctrl_c(interrupt_at):
    """Ctrl-C just when a sequence is made, and its handle not yet given back."""
    engine = FakeEngine(RandomModel(), max_num_seqs=8)
    engine.interrupt_at = interrupt_at
    prompts = [ParsedPrompt(token_ids=[i]) for i in range(3)]
    with pytest.raises(KeyboardInterrupt):
        run_beam_search(engine, prompts, BeamSearchParams(beam_width=4, max_tokens=8))
    assert engine.num_made >= interrupt_at
    assert not engine.live


def test_a_refused_prompt_frees_the_others():
    engine = FakeEngine(RandomModel(), max_model_len=5)
    prompts = [ParsedPrompt(token_ids=[1]), ParsedPrompt(token_ids=[1] * 5)]
    with pytest.raises(ValueError, match="too long"):
        run_beam_search(engine, prompts, BeamSearchParams(beam_width=2, max_tokens=2))
    assert not engine.live


def test_no_prompts():
    params = BeamSearchParams(beam_width=2, max_tokens=2)
    assert run_beam_search(FakeEngine(RandomModel()), [], params) == []


# One step by hand: two beams, EOS 0.


def two_beams(**options) -> BeamSearch:
    """A search with the running beams (1,) of -1 and (2,) of -2."""
    params = BeamSearchParams(**{"beam_width": 2, "max_tokens": 5, "length_penalty": 0.0} | options)
    search = BeamSearch(params, eos_token_ids=(0,), vocab_size=9)
    step = search.advance(np.array([[1, 2, 3]]), np.array([[-1.0, -2.0, -3.0]]))
    assert (step.parents, step.token_ids) == ((0, 0), (1, 2))
    assert search.num_candidates == 3 and search.num_running == 2 and not search.is_done
    return search


def test_an_eos_behind_the_first_beams_is_lost():
    search = two_beams()
    step = search.advance(
        np.array([[4, 5, 0], [4, 0, 5]]), np.array([[-0.1, -0.2, -0.3], [-0.1, -0.2, -9.0]])
    )
    assert (step.parents, step.token_ids) == ((0, 0), (4, 5))
    assert search.results() == []


def test_an_eos_among_the_first_is_kept_and_the_next_goes_on_in_its_place():
    search = two_beams()
    step = search.advance(
        np.array([[0, 5, 4], [4, 0, 5]]), np.array([[-0.1, -0.2, -7.0], [-0.1, -0.2, -9.0]])
    )
    assert (step.parents, step.token_ids) == ((0, 1), (5, 4))
    (hypothesis,) = search.results()
    assert hypothesis.token_ids == (1, 0)
    assert hypothesis.cumulative_logprob == hypothesis.score == pytest.approx(-1.1)
    assert hypothesis.finish_reason == "stop"


@pytest.mark.parametrize(
    ("early_stopping", "length_penalty", "is_done"),
    [
        (True, 1.0, True),
        (False, 1.0, True),  # -3 / 2 against -2.5 / 2, the worse of the two finished
        ("never", 1.0, False),  # -3 / 5, at the full length
        ("never", 0.0, True),
        ("never", -1.0, True),
    ],
)
def test_when_enough_are_finished(early_stopping, length_penalty, is_done):
    search = two_beams(early_stopping=early_stopping, length_penalty=length_penalty)
    step = search.advance(
        np.array([[0, 5, 4], [0, 4, 5]]), np.array([[-0.1, -2.0, -7.0], [-0.5, -2.0, -9.0]])
    )
    assert [h.token_ids for h in search.results()] == [(1, 0), (2, 0)]
    assert search.is_done == is_done
    assert step.parents == (() if is_done else (0, 1))
    if is_done:
        with pytest.raises(ValueError, match="is done"):
            search.advance(np.zeros((0, 3), int), np.zeros((0, 3)))


def test_never_scores_a_running_beam_at_its_present_length_if_short_ones_are_favoured():
    search = two_beams(early_stopping="never", length_penalty=-1.0)
    search.advance(
        np.array([[5, 4, 6], [0, 4, 6]]), np.array([[-0.5, -9.0, -9.0], [-1.0, -7.0, -9.0]])
    )
    search.advance(
        np.array([[0, 5, 4], [0, 4, 6]]), np.array([[-0.1, -0.2, -9.0], [-9.0, -9.0, -9.0]])
    )
    # The best running beam has -1.7, so -5.1 at three tokens and -8.5 at five.
    assert [h.score for h in search.results()] == pytest.approx([-1.6 * 3, -3.0 * 2])
    assert not search.is_done


def test_impossible_tokens_make_fewer_beams():
    search = two_beams()
    step = search.advance(
        np.array([[4, 5, 6], [4, 5, 6]]), np.array([[-0.1, -np.inf, -np.inf], [-np.inf] * 3])
    )
    assert (step.parents, step.token_ids, search.num_running) == ((0,), (4,), 1)


@pytest.mark.parametrize(
    ("token_ids", "logprobs", "message"),
    [
        (np.zeros((1, 3), int), np.zeros((1, 3)), r"must be \[2, 3\]"),
        (np.zeros((2, 2), int), np.zeros((2, 2)), r"must be \[2, 3\]"),
        (np.zeros((2, 4), int), np.zeros((2, 3)), r"must be \[2, 3\]"),
        (np.zeros(3, int), np.zeros(3), r"must be \[2, 3\]"),
        (np.zeros((2, 3), int), np.full((2, 3), np.nan), "NaN"),
    ],
)
def test_bad_candidates_are_refused(token_ids, logprobs, message):
    with pytest.raises(ValueError, match=message):
        two_beams().advance(token_ids, logprobs)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("beam_width", 0),
        ("beam_width", 2.0),
        ("max_tokens", 0),
        ("max_tokens", None),
        ("length_penalty", "1"),
        ("length_penalty", True),
        ("length_penalty", math.nan),
        ("length_penalty", -math.inf),
        ("length_penalty", 400.0),
        ("early_stopping", "always"),
        ("early_stopping", 1),
        ("early_stopping", None),
        ("ignore_eos", 1),
        ("temperature", 0.7),
    ],
)
def test_bad_parameters_are_refused(field, value):
    with pytest.raises(ValueError, match=f"^{field}="):
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 8, field: value})
