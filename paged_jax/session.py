"""Sequences that stay: to be forked, extended, scored and continued, in notebooks and searches.

    seq = llm.start("Once upon a time")
    a, b = seq.fork(), seq.fork()
    a.extend(", there was a king")
    a.generate(SamplingParams(max_tokens=20))
    b.logprobs(" there")

Forks share their blocks until one of them writes. A sequence that nothing is done with keeps its
blocks while there is room; when others need them it is swapped out, or computed anew the next time
it is used. Its tokens are never lost.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from paged_jax.calls import Calls
from paged_jax.interrupts import uninterrupted
from paged_jax.outputs import Logprob, RequestOutput
from paged_jax.prompts import ParsedPrompt, checked_token_ids
from paged_jax.request import Request
from paged_jax.sampling_params import MAX_LOGPROBS, SamplingParams
from paged_jax.sequence import SequenceOp
from paged_jax.tokenizer import Tokenizer


@dataclasses.dataclass(eq=False)
class HeldSequence:
    """Tokens, and the engine's sequence that holds their blocks.

    Attributes:
      token_ids: all of them, computed or not.
      keys: what sets its prefixes apart: cache_salt and extra_keys.
      request: computed are its first `num_computed_tokens` tokens, which are the same; None before
        anything is.
    """

    token_ids: list[int]
    keys: dict[str, Any]
    request: Request | None = None


class SequenceStore:
    """Keeps sequences on an engine, and works on many of them at once.

    It is what `beam_driver.run_beam_search` needs of an engine.
    """

    def __init__(self, calls: Calls):
        self.calls = calls
        engine = calls.engine
        self.vocab_size: int = engine.intake.vocab_size
        self.eos_token_ids: Collection[int] = engine.intake.eos_token_ids
        self.max_model_len: int = engine.config.max_model_len
        self.max_num_seqs: int = engine.config.max_num_seqs

    def start(self, prompt: ParsedPrompt) -> HeldSequence:
        """A new sequence, nothing computed yet.

        Raises:
          ValueError: it is empty, too long or has an id out of range.
        """
        self.calls.check_prompt(prompt.token_ids)
        keys = dict(cache_salt=prompt.cache_salt, extra_keys=prompt.extra_keys)
        return HeldSequence(list(prompt.token_ids), keys)

    def compute(self, sequences: Sequence[HeldSequence]) -> None:
        """Computes what these sequences lack, but for their last tokens."""
        params = SamplingParams(max_tokens=1, detokenize=False)
        lacking = [s for s in sequences if len(s.token_ids) > 1 + _num_computed(s)]
        self._run(lacking, [params] * len(lacking), hold=True, prefill_only=True)

    def generate(
        self, sequences: Sequence[HeldSequence], params: Sequence[SamplingParams]
    ) -> list[RequestOutput]:
        """Continues sequences by sampling; each gets its tokens appended, unless it fails."""
        return self._run(sequences, params, hold=True, append=True)

    def next_logprobs(
        self, sequences: Sequence[HeldSequence], k: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """The k likeliest next tokens of each: ids int32[len(sequences), k], and their
        log-probabilities float32[len(sequences), k], the likeliest first.
        """
        entries = [list(entry.items())[:k] for entry in self.next_entries(sequences, k)]
        ids = [[token_id for token_id, _ in entry] for entry in entries]
        logprobs = [[logprob.logprob for _, logprob in entry] for entry in entries]
        return np.array(ids, np.int32), np.array(logprobs, np.float32)

    def next_entries(self, sequences: Sequence[HeldSequence], k: int) -> list[dict[int, Logprob]]:
        """The k likeliest next tokens of each sequence, the likeliest first."""
        params = SamplingParams(
            temperature=0, max_tokens=1, logprobs=k, ignore_eos=True, detokenize=False
        )
        outputs = self._run(sequences, [params] * len(sequences), hold=True)
        return [logprobs[0] for o in outputs if (logprobs := o.outputs[0].logprobs) is not None]

    def score(
        self, sequences: Sequence[HeldSequence], continuations: Sequence[Sequence[int]], k: int
    ) -> list[list[dict[int, Logprob]]]:
        """Log-probabilities of the tokens of continuations, which are not appended.

        Returns:
          An entry a token, itself first, then the k likeliest at its place.
        """
        params = SamplingParams(max_tokens=1, prompt_logprobs=k, detokenize=False)
        longer = [
            HeldSequence([*s.token_ids, *more], s.keys, s.request)
            for s, more in zip(sequences, continuations, strict=True)
        ]
        starts = [len(s.token_ids) for s in sequences]
        outputs = self._run(longer, [params] * len(longer), prefill_only=True, score_starts=starts)
        return [
            [entry for entry in (o.prompt_logprobs or [])[start:] if entry is not None]
            for o, start in zip(outputs, starts, strict=True)
        ]

    def fork(self, sequence: HeldSequence) -> HeldSequence:
        """A second sequence of the same tokens; it shares all that is computed of the first."""
        twin = HeldSequence(list(sequence.token_ids), sequence.keys)
        if sequence.request is not None:
            twin.request = self.calls.fork_held(sequence.request)
        return twin

    def extend(self, sequence: HeldSequence, token_id: int) -> None:
        """Appends a token, to be computed when it is needed."""
        sequence.token_ids.append(token_id)

    def drop(self, sequence: HeldSequence) -> None:
        """Frees what a sequence holds."""
        if sequence.request is not None:
            self.calls.release_held(sequence.request)
            sequence.request = None

    def _run(
        self,
        sequences: Sequence[HeldSequence],
        params: Sequence[SamplingParams],
        *,
        hold: bool = False,
        append: bool = False,
        prefill_only: bool = False,
        score_starts: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Runs a request from each sequence; those that are held take the sequence's place.

        With `append`, what they sampled becomes part of it.

        Raises:
          ValueError: the engine refuses one of them; none of them runs then.
          RuntimeError: one of them failed, for the reason given.
        """
        starts = [1] * len(sequences) if score_starts is None else score_starts
        jobs = [
            (
                sequence.token_ids,
                own,
                sequence.keys,
                SequenceOp(
                    fork_of=sequence.request,
                    takes_over=hold,
                    hold=hold,
                    prefill_only=prefill_only,
                    score_start=start,
                ),
            )
            for sequence, own, start in zip(sequences, params, starts, strict=True)
        ]

        def take(index: int, output: RequestOutput, request: Request) -> None:
            sequence = sequences[index]
            self.drop(sequence)
            sequence.request = request
            if append:
                sequence.token_ids += output.outputs[0].token_ids

        outputs = self.calls.run_ops(jobs, take)
        for output in outputs:
            if output.error is not None:
                raise RuntimeError(output.error)
        return outputs


class Session:
    """One sequence in a user's hands; made by `LLM.start`, and by `fork`.

    It holds memory until it is closed: by `close`, at the end of a `with`, or when it is no longer
    referred to. Not safe for several threads at once; several sessions are.
    """

    def __init__(self, store: SequenceStore, sequence: HeldSequence, tokenizer: Tokenizer | None):
        self._store = store
        self._sequence = sequence
        self._tokenizer = tokenizer

    @property
    def token_ids(self) -> list[int]:
        """All tokens so far: prompt, extensions and what was generated."""
        return list(self._sequence.token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self._sequence.token_ids)

    @property
    def num_computed_tokens(self) -> int:
        """How many of them have their keys and values in the pool, or swapped out."""
        return _num_computed(self._sequence)

    @property
    def text(self) -> str:
        """All tokens as text, special ones left out; "" without a tokenizer."""
        if self._tokenizer is None:
            return ""
        return self._tokenizer.decode(self.token_ids)

    def compute(self) -> Session:
        """Computes what was appended, all but the last token, now rather than when it is needed."""
        self._store.compute([self._sequence])
        return self

    def fork(self) -> Session:
        """A second session of the same tokens: no token is computed and no block copied for it."""
        with uninterrupted():  # From when it holds something, somebody refers to it.
            twin = Session(self._store, self._store.fork(self._sequence), self._tokenizer)
        return twin

    def extend(self, more: str | Sequence[int]) -> Session:
        """Appends text or token ids, which are computed when they are needed; gives itself back.

        Raises:
          ValueError: it is neither, an id is out of range, or the sequence grows too long. Nothing
            is appended then.
        """
        token_ids = self._tokens_of(more, "more")
        if token_ids:
            self._store.calls.check_prompt([*self._sequence.token_ids, *token_ids])
        self._sequence.token_ids += token_ids
        return self

    def generate(self, sampling_params: SamplingParams | None = None) -> RequestOutput:
        """Samples a continuation and appends it, the stopping token included.

        Args:
          sampling_params: n must be 1 (fork instead); None takes SamplingParams().

        Returns:
          The output; its prompt is all that came before.

        Raises:
          ValueError: the parameters do not fit, or there is no room for a token.
          RuntimeError: the model gave no numbers.
        """
        return generate_together([self], sampling_params)[0]

    def logprobs(self, continuation: str | Sequence[int], k: int = 0) -> list[dict[int, Logprob]]:
        """Log-probabilities of a continuation, token by token; it is not appended.

        Args:
          continuation: text or token ids, at least one.
          k: how many of the likeliest tokens to give at each place besides, 0 to 20.

        Returns:
          For each token a dict from token id to `Logprob`, the token itself first.

        Raises:
          ValueError: it is empty, out of range or too long.
        """
        _check_k(k, at_least=0)
        token_ids = self._tokens_of(continuation, "continuation")
        if not token_ids:
            raise ValueError(f"continuation={continuation!r} has no tokens; give at least one")
        # What comes before is computed once, not again with each continuation.
        self._store.compute([self._sequence])
        return self._store.score([self._sequence], [token_ids], k)[0]

    def next_logprobs(self, k: int = 10) -> dict[int, Logprob]:
        """The k likeliest next tokens, 1 to 20, as token id -> `Logprob`, the likeliest first."""
        _check_k(k, at_least=1)
        return self._store.next_entries([self._sequence], k)[0]

    def close(self) -> None:
        """Frees what it holds. Its tokens remain, and are computed anew if it is used again."""
        self._store.drop(self._sequence)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        sequence = getattr(self, "_sequence", None)
        # Never at once: the collector may come in the middle of a step.
        if sequence is not None and sequence.request is not None:
            self._store.calls.release_later(sequence.request)

    def __repr__(self) -> str:
        return f"Session({self.num_tokens} tokens, {self.num_computed_tokens} computed)"

    def _tokens_of(self, more: str | Sequence[int], name: str) -> list[int]:
        if isinstance(more, str):
            if self._tokenizer is None:
                raise ValueError(
                    f"{name}={more!r} is text, and the engine has no tokenizer; give token ids"
                )
            return self._tokenizer.encode(more, add_special_tokens=False)
        return checked_token_ids(more, name)


def generate_together(
    sessions: Sequence[Session],
    sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
) -> list[RequestOutput]:
    """Continues several sessions of one engine in one batch; see `Session.generate`.

    Args:
      sessions: each but once.
      sampling_params: one for all, or one for each.

    Returns:
      One output a session, in their order.
    """
    if not isinstance(sessions, Sequence):
        raise ValueError(f"sessions={sessions!r}: it must be a list of sessions")
    if not sessions:
        return []
    for i, session in enumerate(sessions):
        if not isinstance(session, Session):
            raise ValueError(
                f"sessions[{i}]={session!r} is of type {type(session).__name__}; it must be a "
                "Session, as LLM.start makes them"
            )
    if len({id(session) for session in sessions}) < len(sessions):
        raise ValueError("sessions holds one of them twice; fork it")
    if sampling_params is None:
        sampling_params = SamplingParams()
    if isinstance(sampling_params, SamplingParams):
        sampling_params = [sampling_params] * len(sessions)
    if not isinstance(sampling_params, (list, tuple)):
        raise ValueError(
            f"sampling_params={sampling_params!r} is of type {type(sampling_params).__name__}; it "
            "must be a SamplingParams, or a list of them"
        )
    if len(sampling_params) != len(sessions):
        raise ValueError(
            f"sampling_params has {len(sampling_params)} entries for {len(sessions)} sessions; "
            "give one for all, or one for each"
        )
    for params in sampling_params:
        if not isinstance(params, SamplingParams):
            raise ValueError(
                f"sampling_params holds {params!r} of type {type(params).__name__}; each entry "
                "must be a SamplingParams"
            )
        if params.n != 1:
            raise ValueError(
                f"n={params.n}: a session has one continuation; fork it {params.n} times"
            )
    store = sessions[0]._store
    if any(session._store.calls is not store.calls for session in sessions):
        raise ValueError("sessions are of different engines; call once for each engine")
    return store.generate([session._sequence for session in sessions], sampling_params)


def _check_k(k: Any, *, at_least: int) -> None:
    if isinstance(k, bool) or not isinstance(k, int) or not at_least <= k <= MAX_LOGPROBS:
        raise ValueError(f"k={k!r}: it must be an integer from {at_least} to {MAX_LOGPROBS}")


def _num_computed(sequence: HeldSequence) -> int:
    return 0 if sequence.request is None else sequence.request.num_computed_tokens
