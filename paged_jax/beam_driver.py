"""Beam search on an engine: the beams are forks of its sequences. Host code: no jax.

What it needs of the engine stands in `BeamEngine`; which beams go on is up to `beam_search`.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Collection, Sequence
from typing import Any, Generic, Literal, Protocol, TypeVar

import numpy as np

from paged_jax.beam_search import BeamSearch, BeamSearchParams, Hypothesis
from paged_jax.detokenizer import Decoder, IncrementalDetokenizer
from paged_jax.interrupts import uninterrupted
from paged_jax.prompts import ParsedPrompt

HandleT = TypeVar("HandleT")


class BeamEngine(Protocol[HandleT]):
    """What `run_beam_search` needs of an engine. A handle stands for a sequence that is kept.

    Attributes:
      vocab_size: how many tokens the model has.
      eos_token_ids: tokens that end a text.
      max_model_len: most tokens of a sequence, prompt included.
      max_num_seqs: sequences it computes in one step.
    """

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_token_ids(self) -> Collection[int]: ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def max_num_seqs(self) -> int: ...

    def start(self, prompt: ParsedPrompt, /) -> HandleT:
        """A new sequence; nothing needs to be computed yet. ValueError if it cannot be served."""
        ...

    def fork(self, handle: HandleT, /) -> HandleT:
        """A second sequence of the same tokens, which shares all that is computed of the first."""
        ...

    def extend(self, handle: HandleT, token_id: int, /) -> None:
        """Appends a token, to be computed by the next `next_logprobs`."""
        ...

    def next_logprobs(self, handles: Sequence[HandleT], k: int, /) -> tuple[np.ndarray, np.ndarray]:
        """Computes what these sequences lack, and gives the k likeliest next tokens of each.

        Returns:
          Ids int[len(handles), k], and their log-probabilities float32[len(handles), k] from the
          raw logits over the whole vocabulary; the likeliest first.
        """
        ...

    def drop(self, handle: HandleT, /) -> None:
        """Forgets a sequence, and frees at once what it alone holds."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class BeamSearchSequence:
    """One hypothesis of a prompt.

    Attributes:
      token_ids: the output tokens, a closing EOS included.
      text: their text, without the EOS's; "" without a tokenizer.
      cumulative_logprob: the sum of their log-probabilities.
      score: cumulative_logprob / len(token_ids) ** length_penalty.
      finish_reason: "stop" if an EOS ended it, else "length".
      stop_reason: the EOS that ended it, as vLLM's beam search has it; None for "length".
    """

    token_ids: list[int]
    text: str
    cumulative_logprob: float
    score: float
    finish_reason: Literal["stop", "length"]
    stop_reason: int | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class BeamSearchOutput:
    """A prompt and its hypotheses, the best first; `prompt` is None if it was given as tokens."""

    prompt: str | None
    prompt_token_ids: list[int]
    sequences: list[BeamSearchSequence]


def run_beam_search(
    engine: BeamEngine[Any],
    prompts: Sequence[ParsedPrompt],
    params: BeamSearchParams,
    *,
    tokenizer: Decoder | None = None,
) -> list[BeamSearchOutput]:
    """Searches from many prompts at once: each step computes all beams of all of them together.

    A prompt joins as soon as its beam_width beams fit into engine.max_num_seqs with those of the
    others; a single one always may. Beams that fall out are dropped before the next step.

    Args:
      engine: keeps the beams as sequences; none of them is left, whatever ends the call.
      prompts: the prompts.
      params: for all of them; max_tokens is lowered to what max_model_len leaves a prompt.
      tokenizer: makes the texts; None leaves them empty.

    Returns:
      One output a prompt, in their order.

    Raises:
      ValueError: the engine cannot serve one of the prompts, or its log-probabilities are NaN.
      Whatever else the engine or the tokenizer raises, and KeyboardInterrupt.
    """
    outputs: dict[int, BeamSearchOutput] = {}
    waiting = collections.deque(enumerate(prompts))
    active: list[_PromptSearch[Any]] = []
    try:
        while waiting or active:
            while waiting and (
                not active or (len(active) + 1) * params.beam_width <= engine.max_num_seqs
            ):
                index, prompt = waiting.popleft()
                with uninterrupted():
                    active.append(_PromptSearch(engine, index, prompt, params))
            beams = [beam for search in active for beam in search.beams]
            token_ids, logprobs = engine.next_logprobs(beams, active[0].rule.num_candidates)
            with uninterrupted():
                first = 0
                for search in active:
                    rows = slice(first, first + len(search.beams))
                    first = rows.stop
                    search.advance(token_ids[rows], logprobs[rows])
            for search in active:
                if search.rule.is_done:
                    outputs[search.index] = search.output(tokenizer)
            active = [search for search in active if not search.rule.is_done]
    finally:
        # On the way out of an exception each drop is tried, even if an earlier one fails.
        with uninterrupted(), contextlib.ExitStack() as drops:
            for search in active:
                for handle in search.held:
                    drops.callback(engine.drop, handle)
    return [outputs[index] for index in range(len(prompts))]


class _PromptSearch(Generic[HandleT]):
    """One prompt's search, and the engine's sequences that are its beams.

    Attributes:
      rule: decides which beams go on.
      beams: the running beams' handles, in the order of `rule`.
      held: every handle that is not dropped yet; more than `beams` only within `advance`.
    """

    def __init__(
        self,
        engine: BeamEngine[HandleT],
        index: int,
        prompt: ParsedPrompt,
        params: BeamSearchParams,
    ):
        self.engine = engine
        self.index = index
        self.prompt = prompt
        room = max(1, engine.max_model_len - len(prompt.token_ids))  # `start` refuses less than 1.
        self.rule = BeamSearch(
            dataclasses.replace(params, max_tokens=min(params.max_tokens, room)),
            eos_token_ids=engine.eos_token_ids,
            vocab_size=engine.vocab_size,
        )
        self.beams = [engine.start(prompt)]
        self.held = list(self.beams)

    def advance(self, token_ids: np.ndarray, logprobs: np.ndarray) -> None:
        """Takes the beams' candidates; drops, forks and extends the sequences accordingly."""
        step = self.rule.advance(token_ids, logprobs)
        parents, children = self.beams, []
        for index, handle in enumerate(parents):
            if index not in step.parents:
                self.held.remove(handle)
                self.engine.drop(handle)
        for i, parent in enumerate(step.parents):
            handle = parents[parent]
            if parent in step.parents[i + 1 :]:  # The last child goes on in the parent's place.
                handle = self.engine.fork(handle)
                self.held.append(handle)
            children.append(handle)
        for handle, token_id in zip(children, step.token_ids, strict=True):
            self.engine.extend(handle, token_id)
        self.beams = children

    def output(self, tokenizer: Decoder | None) -> BeamSearchOutput:
        sequences = [
            BeamSearchSequence(
                token_ids=list(hypothesis.token_ids),
                text="" if tokenizer is None else _text_of(hypothesis, tokenizer),
                cumulative_logprob=hypothesis.cumulative_logprob,
                score=hypothesis.score,
                finish_reason=hypothesis.finish_reason,
                stop_reason=(
                    hypothesis.token_ids[-1] if hypothesis.finish_reason == "stop" else None
                ),
            )
            for hypothesis in self.rule.results()
        ]
        return BeamSearchOutput(
            prompt=self.prompt.text, prompt_token_ids=self.prompt.token_ids, sequences=sequences
        )


def _text_of(hypothesis: Hypothesis, tokenizer: Decoder) -> str:
    detokenizer = IncrementalDetokenizer(tokenizer)
    *token_ids, last = hypothesis.token_ids
    for token_id in token_ids:
        detokenizer.append(token_id)
    detokenizer.append(last, is_stop_token=hypothesis.finish_reason == "stop")
    detokenizer.finish()
    return detokenizer.visible_text()
