"""What comes in: prompts and parameters are checked, and become sequences of their own."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

from paged_jax.config import SchedulerConfig
from paged_jax.request import Request, check_prompt_length
from paged_jax.sampling import MAX_MASKED_TOKENS
from paged_jax.sampling_params import SamplingParams
from paged_jax.sequence import SequenceGroup, SequenceOp, SequenceState
from paged_jax.tokenizer import Tokenizer


class Intake:
    """Makes sequences of requests, or says why they cannot be served.

    Args:
      config: the scheduler's limits.
      vocab_size: token ids must lie below it.
      eos_token_ids: tokens that end an output.
      tokenizer: makes text of tokens; None leaves text empty.
      seed: seeds of requests that bring none are drawn from it and their number.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        vocab_size: int,
        eos_token_ids: tuple[int, ...] = (),
        tokenizer: Tokenizer | None = None,
        seed: int = 0,
    ):
        self.config = config
        self.vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids
        self.tokenizer = tokenizer
        self.seed = seed
        self._num_seeds_drawn = 0

    def make_group(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        is_taken: Callable[[str], bool],
        prompt: str | None = None,
        cache_salt: str | None = None,
        extra_keys: tuple[str | int, ...] = (),
        priority: int = 0,
        stream: bool = False,
        op: SequenceOp | None = None,
    ) -> SequenceGroup:
        """The sequences of a request, the later ones children of the first: the prompt is computed
        once, and they fork from it.

        Args:
          request_id: unique among the unfinished ones.
          prompt_token_ids: the prompt; 1 to max_model_len - 1 ids below vocab_size.
          params: how to sample.
          is_taken: whether a request, or a sequence of one, is unfinished under an id.
          prompt: the prompt's text, given back with the output.
          cache_salt, extra_keys: requests share cached prefixes only with those of the same.
          priority: under the priority policy a smaller one is served first.
          stream: whether each step gives an output for every new token, or only the last one.
          op: what is done with a sequence that is held; None for a request of its own.

        Raises:
          ValueError: the id is in use, the prompt is empty, too long or has an id out of range, the
            sampling parameters do not fit the model, or there are priorities and the policy knows
            none.
        """
        if is_taken(request_id):
            raise ValueError(
                f"request_id={request_id!r} is in use; give each unfinished request its own"
            )
        if priority and self.config.policy != "priority":
            raise ValueError(
                f"priority={priority}: the policy {self.config.policy!r} knows no priorities; make "
                "the engine with scheduling_policy='priority'"
            )
        op = op or SequenceOp()
        token_ids = self.check_prompt(prompt_token_ids, prefill_only=op.prefill_only)
        self._check_params(params, len(token_ids))
        group = SequenceGroup(request_id, prompt, token_ids, params, [], stream)
        for i in range(params.n):
            child = params.child(i)
            request = Request(
                request_id if params.n == 1 else f"{request_id}/{i}",
                token_ids,
                child,
                max_model_len=self.config.max_model_len,
                eos_token_ids=self.eos_token_ids,
                seed=self._draw_seed() if child.seed is None else child.seed,
                cache_salt=cache_salt,
                extra_keys=extra_keys,
                priority=priority,
                score_start=op.score_start
                if params.prompt_logprobs is not None and i == 0
                else None,
                prefill_only=op.prefill_only,
                hold=op.hold,
                fork_of=group.sequences[0].request if i else op.fork_of,
                takes_over=op.takes_over,
            )
            if params.n > 1 and is_taken(
                request.request_id
            ):  # "a" with n=2 is "a/0" and "a/1" inside.
                raise ValueError(
                    f"request_id={request_id!r}: its output {i} would be {request.request_id!r}, "
                    "which is in use; give the request another id"
                )
            group.sequences.append(SequenceState(i, request, self.tokenizer))
        first, *others = [sequence.request for sequence in group.sequences]
        first.children.extend(others)  # The prompt is computed once, and they fork from it.
        return group

    def check_prompt(
        self, prompt_token_ids: Sequence[int], *, prefill_only: bool = False
    ) -> list[int]:
        """The prompt as ints, if the engine can serve it.

        Raises:
          ValueError: it is empty, too long (with an output token, unless it is only computed), or
            has an id out of range.
        """
        token_ids = [int(token_id) for token_id in prompt_token_ids]
        check_prompt_length(len(token_ids), self.config.max_model_len, prefill_only)
        if min(token_ids) < 0 or max(token_ids) >= self.vocab_size:
            i = next(i for i, t in enumerate(token_ids) if not 0 <= t < self.vocab_size)
            raise ValueError(
                f"prompt_token_ids[{i}]={token_ids[i]} is out of range: the model's vocabulary has "
                f"{self.vocab_size} tokens, so ids go from 0 to {self.vocab_size - 1}"
            )
        return token_ids

    def _check_params(self, params: SamplingParams, num_prompt_tokens: int) -> None:
        for token_id in params.stop_token_ids:
            if token_id >= self.vocab_size:
                raise ValueError(
                    f"stop_token_ids holds {token_id}, and the model's vocabulary has "
                    f"{self.vocab_size} tokens; leave it out"
                )
        room = self.config.max_model_len - num_prompt_tokens
        if params.min_tokens > room:
            raise ValueError(
                f"min_tokens={params.min_tokens} does not fit: the prompt has {num_prompt_tokens} "
                f"tokens and max_model_len={self.config.max_model_len} leaves room for {room}"
            )
        num_masked = len({*params.stop_token_ids, *self.eos_token_ids})
        if params.min_tokens and num_masked > MAX_MASKED_TOKENS:
            raise ValueError(
                f"min_tokens={params.min_tokens} masks {num_masked} EOS and stop tokens, and "
                f"{MAX_MASKED_TOKENS} can be masked; give fewer stop_token_ids, or min_tokens=0"
            )
        if params.stop and self.tokenizer is None:
            raise ValueError(
                f"stop={list(params.stop)!r} needs a tokenizer, and the engine has none "
                "(skip_tokenizer_init); use stop_token_ids"
            )

    def _draw_seed(self) -> int:
        text = f"{self.seed}/{self._num_seeds_drawn}".encode()
        self._num_seeds_drawn += 1
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
