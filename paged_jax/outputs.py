"""What a user gets back: names and meanings are those of vLLM's outputs."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Logprob:
    """Log-probability of one token at one position, from the raw logits, and its rank from 1."""

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompletionOutput:
    """One of a request's `n` outputs, so far.

    Attributes:
      index: which of the `n` it is.
      text: the text so far, cut at a stop string; "" if `detokenize` is off.
      token_ids: the sampled tokens so far, the stopping one included.
      cumulative_logprob: sum of the sampled tokens' log-probabilities; None without `logprobs`.
      logprobs: for each token a dict from token id to `Logprob`, the sampled token first.
      finish_reason: "stop", "length", "abort" or "error"; None while it runs.
      stop_reason: the stop string or token id that ended it; None for EOS and for the rest.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclasses.dataclass(frozen=True, kw_only=True)
class RequestMetrics:
    """When things happened to a request, in seconds of a monotonic clock from its arrival.

    Attributes:
      time_to_first_token_seconds: until the first output token; None before it.
      e2e_request_latency_seconds: until the end; None before it.
      num_preemptions: how often it lost its blocks and was computed anew.
    """

    time_to_first_token_seconds: float | None
    e2e_request_latency_seconds: float | None
    num_preemptions: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """A request and its outputs, so far.

    Attributes:
      request_id: the engine's name for it, unique over the engine's life.
      prompt: the prompt's text, None if it was given as token ids.
      prompt_token_ids: the prompt's tokens; empty if it could not be read.
      prompt_logprobs: for each prompt token a dict from token id to `Logprob`, the token itself
        first; None for the first token, which nothing precedes. None without that field of
        `SamplingParams`.
      outputs: `n` outputs, ordered by index.
      finished: whether all of them have ended.
      metrics: times and counts of the request.
      num_cached_tokens: prompt tokens that the prefix cache gave.
      error: why the request could not be served, None if it could.
      prompt_index: the prompt's place in its call of `generate`, `chat` or `stream`.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    metrics: RequestMetrics | None = None
    num_cached_tokens: int = 0
    error: str | None = None
    prompt_index: int = 0

    @classmethod
    def refused(
        cls, request_id: str, prompt_index: int, error: str, *, prompt: str | None = None
    ) -> RequestOutput:
        """The output of a request that was never admitted."""
        output = CompletionOutput(index=0, text="", token_ids=[], finish_reason="error")
        return cls(
            request_id=request_id,
            prompt=prompt,
            prompt_token_ids=[],
            outputs=[output],
            finished=True,
            error=error,
            prompt_index=prompt_index,
        )
