"""From sampled tokens to outputs: text, stop strings and log-probabilities of each sequence."""

from __future__ import annotations

import dataclasses

from paged_jax.detokenizer import IncrementalDetokenizer
from paged_jax.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from paged_jax.request import Request
from paged_jax.sampling import SamplerOutput
from paged_jax.sampling_params import SamplingParams
from paged_jax.scheduled_step import ScheduledChunk
from paged_jax.tokenizer import Tokenizer

NOT_FINITE = "the model's logits are no numbers (NaN or inf), or min_tokens masks every token"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SequenceOp:
    """What a request does with sequences that are held. The default: nothing.

    Attributes:
      fork_of: a held sequence that its tokens begin with, and whose blocks it shares.
      takes_over: the held sequence gives its blocks up, because the request goes on from it.
      hold: the request is held itself when it has ended.
      prefill_only: all tokens but the last are computed, and nothing is sampled.
      score_start: the first token that `prompt_logprobs` is about.
    """

    fork_of: Request | None = None
    takes_over: bool = False
    hold: bool = False
    prefill_only: bool = False
    score_start: int = 1


class SequenceState:
    """One output in the making: a request, and what its tokens say."""

    def __init__(self, index: int, request: Request, tokenizer: Tokenizer | None):
        self.index = index
        self.request = request
        self.tokenizer = tokenizer
        self.error: str | None = None
        # How many of the request's output tokens have been taken in here.
        self.num_tokens = 0
        params = request.params
        self.cumulative_logprob = 0.0
        self.logprobs: list[dict[int, Logprob]] | None = None if params.logprobs is None else []
        self.prompt_logprobs: dict[int, dict[int, Logprob]] = {}  # by position
        self.detokenizer: IncrementalDetokenizer | None = None
        if params.detokenize and tokenizer is not None:
            self.detokenizer = IncrementalDetokenizer(
                tokenizer,
                skip_special_tokens=params.skip_special_tokens,
                stop=params.stop,
                include_stop_str_in_output=params.include_stop_str_in_output,
                min_tokens=params.min_tokens,
            )

    @property
    def ends_by_itself(self) -> bool:
        """Whether EOS or a stop id ended the request at the token taken in last."""
        request = self.request
        return request.finish_reason == "stop" and self.num_tokens == request.num_output_tokens

    def drop_rest(self) -> None:
        """Takes the request's tokens back that were not taken in here."""
        request = self.request
        del request.token_ids[request.num_prompt_tokens + self.num_tokens :]
        request.num_computed_tokens = min(request.num_computed_tokens, request.num_tokens - 1)

    def append(self, token_id: int, sampled: SamplerOutput, row: int) -> str | None:
        """Takes a new token; returns the stop string that it completes, if it does.

        Args:
          token_id: the newest of the request's tokens.
          sampled: the step's outputs on the host.
          row: the sequence's row there.
        """
        if self.logprobs is not None:
            self._append_logprobs(token_id, sampled, row)
        self.num_tokens += 1
        if self.detokenizer is None:
            return None
        # EOS and stop ids end the sequence; their own text is wanted only on request.
        request = self.request
        silent = self.ends_by_itself and not request.params.include_stop_str_in_output
        return self.detokenizer.append(token_id, is_stop_token=silent)

    def is_done(self) -> bool:
        """Whether the request has ended and all of its tokens were taken in."""
        request = self.request
        return request.finish_reason is not None and self.num_tokens >= request.num_output_tokens

    def rewind(self) -> None:
        """Takes back the tokens that were not taken in here; they will be sampled again, alike."""
        self.drop_rest()
        self.request.finish_reason = self.request.stop_reason = None

    def output(self) -> CompletionOutput:
        request = self.request
        text = ""
        if self.detokenizer is not None:
            if request.finish_reason is not None and self.error is None:
                try:
                    self.detokenizer.finish()
                except Exception as error:  # The tail cannot be decoded; what came before can.
                    self.error = f"{type(error).__name__}: {error}"
            text = self.detokenizer.visible_text()
        return CompletionOutput(
            index=self.index,
            text=text,
            token_ids=request.output_token_ids,
            cumulative_logprob=None if self.logprobs is None else self.cumulative_logprob,
            logprobs=None if self.logprobs is None else list(self.logprobs),
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
        )

    def take_scores(
        self, chunk: ScheduledChunk, last_row: int, sampled: SamplerOutput
    ) -> str | None:
        """Takes the log-probabilities of known tokens that a chunk computed, of this request.

        Args:
          chunk: some of the request's tokens; each gives the log-probability of the next one.
          last_row: the row of the chunk's last token in `sampled`.
          sampled: the step's outputs on the host.

        Returns:
          What is wrong with them, None if nothing is.
        """
        request = self.request
        assert request.score_start is not None
        first = max(chunk.end + 1 - chunk.num_rows, request.score_start)
        end = min(chunk.end + 1, request.num_tokens)
        first_row = last_row - chunk.end + first
        try:
            for row, position in enumerate(range(first, end), first_row):
                self.prompt_logprobs[position] = self._entry(
                    request.token_ids[position], sampled, row, request.params.prompt_logprobs or 0
                )
        except Exception as error:  # The tokenizer's, which is asked for the tokens' text.
            return f"{type(error).__name__}: {error}"
        return None if sampled.is_finite[first_row : first_row + end - first].all() else NOT_FINITE

    def _append_logprobs(self, token_id: int, sampled: SamplerOutput, row: int) -> None:
        assert self.logprobs is not None and self.request.params.logprobs is not None
        self.cumulative_logprob += float(sampled.logprob[row])
        self.logprobs.append(self._entry(token_id, sampled, row, self.request.params.logprobs))

    def _entry(
        self, token_id: int, sampled: SamplerOutput, row: int, num_top: int
    ) -> dict[int, Logprob]:
        """The token's log-probability, and those of the `num_top` likeliest."""
        logprob = float(sampled.logprob[row])
        entry = {token_id: self._logprob(token_id, logprob, int(sampled.rank[row]))}
        for rank in range(min(num_top, sampled.top_ids.shape[1])):
            top_id = int(sampled.top_ids[row, rank])
            if top_id not in entry:
                top_logprob = float(sampled.top_logprobs[row, rank])
                entry[top_id] = self._logprob(top_id, top_logprob, rank + 1)
        return entry

    def _logprob(self, token_id: int, logprob: float, rank: int) -> Logprob:
        text = None
        if self.tokenizer is not None and self.request.params.detokenize:
            text = self.tokenizer.decode([token_id], skip_special_tokens=False)
        return Logprob(logprob=logprob, rank=rank, decoded_token=text)


@dataclasses.dataclass
class SequenceGroup:
    """A user's request: one prompt and its `n` sequences."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    sequences: list[SequenceState]
    stream: bool = False

    @property
    def finished(self) -> bool:
        return all(s.request.finish_reason is not None for s in self.sequences)

    def output(self) -> RequestOutput:
        requests = [sequence.request for sequence in self.sequences]
        finished = self.finished
        arrival = min(request.arrival_time for request in requests)
        firsts = [r.first_token_time for r in requests if r.first_token_time is not None]
        ends = [r.finish_time for r in requests if r.finish_time is not None]
        outputs = [sequence.output() for sequence in self.sequences]
        errors = [s.error for s in self.sequences if s.error is not None]
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            prompt_logprobs=self._prompt_logprobs(),
            outputs=outputs,
            finished=finished,
            metrics=RequestMetrics(
                time_to_first_token_seconds=min(firsts) - arrival if firsts else None,
                e2e_request_latency_seconds=max(ends) - arrival if finished and ends else None,
                num_preemptions=sum(request.num_preemptions for request in requests),
            ),
            num_cached_tokens=requests[0].num_cached_tokens,
            error=errors[0] if errors else None,
        )

    def _prompt_logprobs(self) -> list[dict[int, Logprob] | None] | None:
        """An entry for each token of the prompt; None for the first, and for what is not asked."""
        if self.params.prompt_logprobs is None:
            return None
        scores = self.sequences[0].prompt_logprobs
        return [scores.get(position) for position in range(len(self.prompt_token_ids))]
