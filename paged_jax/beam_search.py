"""Beam search: which beams go on, and which hypotheses they end as. Host code: no jax.

The search gives the hypotheses and scores that transformers' beam search gives (without sampling
and logits processors), from nothing but the likeliest next tokens of its beams. `beam_driver` runs
it on an engine.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection
from typing import Literal

import numpy as np

from paged_jax.config import check_int


@dataclasses.dataclass(frozen=True, kw_only=True)
class BeamSearchParams:
    """How beams are kept, scored and ended.

    Names are those of vLLM's BeamSearchParams, and `early_stopping` transformers'. A hypothesis of
    n tokens, its EOS counted, has the score cumulative_logprob / n ** length_penalty.

    Attributes:
      beam_width: beams kept at each step, and hypotheses returned; 1 is greedy decoding, whatever
        `early_stopping`.
      max_tokens: most output tokens of a hypothesis.
      length_penalty: above 0 favours long hypotheses, below 0 short ones; 0 compares plain sums.
      early_stopping: when a search with beam_width finished hypotheses ends. True: at once. False:
        when the best running beam, scored at its present length, is no better than the worst of
        them. "never": when not even the best score is better that it could come to, by certain
        tokens up to max_tokens with a length_penalty above 0, else as it stands.
      ignore_eos: no token ends a hypothesis; all have max_tokens tokens.
      temperature: must be 0. Beams are compared by the model's own probabilities.

    Raises:
      ValueError: a value has the wrong type or is out of range; the message names the field, the
        value and what would be right.
    """

    beam_width: int
    max_tokens: int
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    ignore_eos: bool = False
    temperature: float = 0.0

    def __post_init__(self) -> None:
        check_int("beam_width", self.beam_width, at_least=1)
        check_int("max_tokens", self.max_tokens, at_least=1)
        _check_length_penalty(self.length_penalty, self.max_tokens)
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise ValueError(
                f"early_stopping={self.early_stopping!r}: it must be True, False or 'never'"
            )
        if not isinstance(self.ignore_eos, bool):
            raise ValueError(f"ignore_eos={self.ignore_eos!r}: it must be True or False")
        if self.temperature != 0:
            raise ValueError(
                f"temperature={self.temperature!r}: beam search draws no samples, and compares "
                "beams by the model's own probabilities; leave it at 0, or use generate()"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hypothesis:
    """A finished beam.

    Attributes:
      token_ids: its output tokens, a closing EOS included.
      cumulative_logprob: the sum of their log-probabilities.
      score: cumulative_logprob / len(token_ids) ** length_penalty.
      finish_reason: "stop" if an EOS ended it, else "length".
    """

    token_ids: tuple[int, ...]
    cumulative_logprob: float
    score: float
    finish_reason: Literal["stop", "length"]


@dataclasses.dataclass(frozen=True)
class BeamStep:
    """The beams that go on: beam i is the earlier beam parents[i], longer by token_ids[i].

    Parents without a beam are to be dropped; after the last step that is all of them.
    """

    parents: tuple[int, ...]
    token_ids: tuple[int, ...]


class BeamSearch:
    """The search from one prompt: fed with likely next tokens, it says which beams to keep.

        search = BeamSearch(params, eos_token_ids=(2,), vocab_size=32000)
        while not search.is_done:
            step = search.advance(*top_tokens_of(beams, search.num_candidates))
            beams = [beams[p] + [t] for p, t in zip(step.parents, step.token_ids)]
        best = search.results()[0]

    The rules are transformers' (`_beam_search`, read in version 5.24), with sums in float64. At
    each step the continuations of all beams are ranked by their sums of log-probabilities. The
    best beam_width that do not end here go on. One that ends here is a finished hypothesis if it
    ranks among the first beam_width of all, otherwise it is lost; of the finished ones the
    beam_width of the highest scores are kept. Equal sums rank by the order of their parents, then
    as the caller ordered the tokens; equal scores by age.

    Args:
      params: how to search.
      eos_token_ids: tokens that end a hypothesis, unless params.ignore_eos.
      vocab_size: how many tokens the model has.
    """

    def __init__(
        self, params: BeamSearchParams, *, eos_token_ids: Collection[int] = (), vocab_size: int
    ):
        self.params = params
        self._eos_token_ids = frozenset(() if params.ignore_eos else eos_token_ids)
        # No beam has more than beam_width continuations among the best that do not end, and none
        # has more that end than there are EOS tokens. So this many a beam always suffice, fewer
        # than the beam_width * (1 + number of EOS tokens) that transformers looks at.
        self.num_candidates = min(params.beam_width + len(self._eos_token_ids), vocab_size)
        self._running: list[tuple[tuple[int, ...], float]] = [((), 0.0)]  # the likeliest first
        self._finished: list[Hypothesis] = []  # the best first
        self._num_tokens = 0  # of each running beam

    @property
    def num_running(self) -> int:
        """How many beams `advance` wants candidates of; 1 before the first step."""
        return len(self._running)

    @property
    def is_done(self) -> bool:
        """Whether the search has ended: `results` will not change any more."""
        return not self._running

    def advance(self, token_ids: np.ndarray, logprobs: np.ndarray) -> BeamStep:
        """Takes the likeliest next tokens of every running beam.

        Args:
          token_ids: int[num_running, num_candidates], or more columns: each beam's likeliest next
            tokens, no token twice.
          logprobs: float[num_running, num_candidates], of these tokens; -inf for one that cannot
            follow. Rows stand in the order of the last step's beams.

        Raises:
          ValueError: the shapes are others, a log-probability is NaN, or the search is done.
        """
        totals, order = self._rank(np.asarray(token_ids), np.asarray(logprobs))
        width = self.params.beam_width
        self._num_tokens += 1
        survivors: list[tuple[int, int, float]] = []  # parent, token, sum of log-probabilities
        for rank, flat_index in enumerate(order):
            if rank >= width and len(survivors) == width:
                break
            parent, column = divmod(int(flat_index), totals.shape[1])
            candidate = parent, int(token_ids[parent, column]), float(totals[parent, column])
            is_eos = candidate[1] in self._eos_token_ids
            if is_eos or self._num_tokens == self.params.max_tokens:
                if rank < width:
                    self._finish(*candidate, "stop" if is_eos else "length")
            elif len(survivors) < width:
                survivors.append(candidate)
        self._finished.sort(key=lambda hypothesis: -hypothesis.score)
        del self._finished[width:]
        if not survivors or self._has_enough(best_running=survivors[0][2]):
            survivors = []
        self._running = [
            ((*self._running[parent][0], token_id), total) for parent, token_id, total in survivors
        ]
        return BeamStep(tuple(s[0] for s in survivors), tuple(s[1] for s in survivors))

    def results(self) -> list[Hypothesis]:
        """The finished hypotheses so far, at most beam_width, the highest score first.

        There are fewer than beam_width at the end only if so few can be made of the vocabulary.
        """
        return list(self._finished)

    def _rank(self, token_ids: np.ndarray, logprobs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Sums float64[num_running, K], and their flat indices in falling order, without -inf."""
        if self.is_done:
            raise ValueError("advance() of a search that is done; see is_done")
        num_columns = logprobs.shape[1] if logprobs.ndim == 2 else 0
        if (
            token_ids.shape != logprobs.shape
            or logprobs.shape[0] != self.num_running
            or num_columns < self.num_candidates
        ):
            raise ValueError(
                f"token_ids has shape {token_ids.shape} and logprobs {logprobs.shape}; both must "
                f"be [{self.num_running}, {self.num_candidates}] (or more columns), one row for "
                "each running beam"
            )
        if np.isnan(logprobs).any():
            raise ValueError("logprobs holds NaN: the model's logits are no numbers")
        totals = logprobs + np.array([[total] for _, total in self._running])
        order = np.argsort(-totals, axis=None, kind="stable")
        return totals, order[: np.count_nonzero(totals > -np.inf)]

    def _finish(
        self, parent: int, token_id: int, total: float, reason: Literal["stop", "length"]
    ) -> None:
        self._finished.append(
            Hypothesis(
                token_ids=(*self._running[parent][0], token_id),
                cumulative_logprob=total,
                score=self._score(total, self._num_tokens),
                finish_reason=reason,
            )
        )

    def _has_enough(self, best_running: float) -> bool:
        """Whether to end, by `early_stopping`."""
        params = self.params
        if len(self._finished) < params.beam_width:
            return False
        if params.early_stopping is True or params.beam_width == 1:
            return True
        is_hopeful = params.early_stopping == "never" and params.length_penalty > 0
        num_tokens = params.max_tokens if is_hopeful else self._num_tokens
        return self._score(best_running, num_tokens) <= self._finished[-1].score

    def _score(self, total: float, num_tokens: int) -> float:
        return total / num_tokens**self.params.length_penalty


def _check_length_penalty(length_penalty: object, max_tokens: int) -> None:
    if isinstance(length_penalty, bool) or not isinstance(length_penalty, (int, float)):
        raise ValueError(f"length_penalty={length_penalty!r}: it must be a number")
    try:
        is_usable = math.isfinite(float(max_tokens) ** abs(float(length_penalty)))
    except OverflowError:
        is_usable = False
    if not is_usable:
        raise ValueError(
            f"length_penalty={length_penalty!r}: max_tokens={max_tokens} to this power is no "
            "finite number; take one closer to 0 (usual are -2 to 2)"
        )
