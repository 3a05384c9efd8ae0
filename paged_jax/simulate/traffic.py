"""Requests to simulate, and a generator of chats; traces are read by `traces`.

Everything here is an iterator, so that millions of requests need no more memory than one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

_DRAWN_AT_ONCE = 4096


class TraceRequest(NamedTuple):
    """A request as a trace knows it: when it comes, how long it is, and what it shares.

    Attributes:
      arrival_seconds: from the trace's beginning.
      num_prompt_tokens, num_output_tokens: lengths, each at least 1.
      prefix_ids: what the prompt shares with others, a number for each `prefix_tokens` tokens: two
        prompts of equal numbers up to a place are equal up to there. Empty: it shares nothing.
      prefix_tokens: tokens that a number stands for; the last may stand for fewer.
      token_ids: the prompt itself, where it is known; it says what is shared then.
    """

    arrival_seconds: float
    num_prompt_tokens: int
    num_output_tokens: int
    prefix_ids: Sequence[int] = ()
    prefix_tokens: int = 512
    token_ids: Sequence[int] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatTraffic:
    """Chats of lognormal lengths, the prompt's and the output's drawn apart.

    Attributes:
      prompt_median_tokens, prompt_sigma: of the prompt's length; sigma is that of its logarithm.
      output_median_tokens, output_sigma: the same of the output.
      max_total_tokens: a longer chat is cut to it: its output first, then its prompt.
      requests_per_second: of a Poisson process; None: all come at once, at the beginning.
    """

    num_requests: int
    prompt_median_tokens: float = 540.0
    prompt_sigma: float = 0.8
    output_median_tokens: float = 285.0
    output_sigma: float = 0.6
    max_total_tokens: int = 8192
    requests_per_second: float | None = None
    seed: int = 0

    def __post_init__(self):
        for field in ("num_requests", "prompt_median_tokens", "output_median_tokens"):
            if not getattr(self, field) > 0:
                raise ValueError(f"{field}={getattr(self, field)!r}: it must be above 0")
        for field in ("prompt_sigma", "output_sigma"):
            if getattr(self, field) < 0:
                raise ValueError(f"{field}={getattr(self, field)!r}: it must be at least 0")
        if self.max_total_tokens < 2:
            raise ValueError(
                f"max_total_tokens={self.max_total_tokens}: it must be at least 2, a token of the "
                "prompt and one of the output"
            )
        if self.requests_per_second is not None and not self.requests_per_second > 0:
            raise ValueError(
                f"requests_per_second={self.requests_per_second}: it must be above 0, or None for "
                "all at once"
            )

    def __iter__(self) -> Iterator[TraceRequest]:
        """The requests in order of arrival; the same ones each time."""
        rng, left, now = np.random.default_rng(self.seed), self.num_requests, 0.0
        while left > 0:
            # As many are drawn at once whatever is left, so that a longer run begins alike.
            prompts = self._lengths(rng, self.prompt_median_tokens, self.prompt_sigma)
            outputs = self._lengths(rng, self.output_median_tokens, self.output_sigma)
            prompts = np.minimum(prompts, self.max_total_tokens - 1)
            outputs = np.minimum(outputs, self.max_total_tokens - prompts)
            times = np.zeros(_DRAWN_AT_ONCE)
            if self.requests_per_second is not None:
                gaps = rng.exponential(1 / self.requests_per_second, _DRAWN_AT_ONCE)
                times = now + np.cumsum(gaps)
                now = float(times[-1])
            drawn = zip(times.tolist(), prompts.tolist(), outputs.tolist(), strict=True)
            for seconds, num_prompt, num_output in drawn:
                if left == 0:
                    return
                left -= 1
                yield TraceRequest(seconds, num_prompt, num_output)

    def _lengths(self, rng: np.random.Generator, median: float, sigma: float) -> np.ndarray:
        lengths = np.exp(rng.normal(np.log(median), sigma, _DRAWN_AT_ONCE))
        return np.maximum(np.rint(lengths), 1).astype(np.int64)
