"""One sequence on its way through the engine: its tokens, its blocks, and when it stops."""

from __future__ import annotations

import enum
import time
from array import array

from paged_jax.sampling_params import SamplingParams


class RequestStatus(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Request:
    """A sequence to extend: `n` samples of one prompt are `n` requests.

    Attributes:
      request_id: unique among the live requests.
      params: how to sample; its `n` is 1.
      token_ids: prompt and output together.
      num_prompt_tokens: how many of them are the prompt.
      num_computed_tokens: how many of them have their keys and values in the pool.
      num_cached_tokens: how many the prefix cache gave at first admission.
      block_ids: the block table: block i holds tokens i * block_size and following.
      block_hashes: the chained hash of each full block of `token_ids`, as far as it was needed.
      num_hashed_blocks: how many blocks of the table stand in the prefix cache.
      seed: 64 bits, from which and the position alone each token's randomness comes.
      finish_reason, stop_reason: why it ended; None while it runs.
    """

    __slots__ = (
        "arrival_index",
        "arrival_time",
        "block_hashes",
        "block_ids",
        "cache_salt",
        "eos_token_ids",
        "finish_reason",
        "finish_time",
        "first_token_time",
        "max_total_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_hashed_blocks",
        "num_preemptions",
        "num_prompt_tokens",
        "params",
        "request_id",
        "seed",
        "status",
        "stop_ids",
        "stop_reason",
        "token_ids",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        max_model_len: int,
        eos_token_ids: tuple[int, ...] = (),
        seed: int = 0,
        cache_salt: str | None = None,
    ):
        self.request_id = request_id
        self.params = params
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.eos_token_ids = eos_token_ids
        self.stop_ids = frozenset(params.stop_token_ids)
        self.seed = seed
        self.cache_salt = cache_salt
        room = max_model_len - self.num_prompt_tokens
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        self.max_total_tokens = self.num_prompt_tokens + max_tokens
        self.status = RequestStatus.WAITING
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.block_ids = array("i")
        self.block_hashes: list[bytes] = []
        self.num_hashed_blocks = 0
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.arrival_index = 0
        self.arrival_time = time.monotonic()
        self.first_token_time: float | None = None
        self.finish_time: float | None = None

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.status.value}, prompt={self.num_prompt_tokens}, "
            f"output={self.num_output_tokens}, computed={self.num_computed_tokens})"
        )

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    def forget_blocks(self, block_size: int) -> None:
        """Lets the request wait, with its tokens and nothing computed; no block is given back."""
        del self.block_ids[:]
        del self.block_hashes[self.num_tokens // block_size :]
        self.num_hashed_blocks = 0
        self.num_computed_tokens = 0
        self.status = RequestStatus.WAITING

    def tokens_to_mask(self) -> tuple[int, ...]:
        """Ids that may not be sampled next: EOS and the stop ids, until `min_tokens` are out."""
        if self.num_output_tokens >= self.params.min_tokens:
            return ()
        return tuple(self.stop_ids.union(self.eos_token_ids))

    def check_stop(self) -> bool:
        """Sets why the request ends at its newest token, if it does: EOS, stop id or length."""
        token_id = self.token_ids[-1]
        if self.num_output_tokens >= self.params.min_tokens:
            if token_id in self.eos_token_ids and not self.params.ignore_eos:
                self.finish_reason = "stop"
            elif token_id in self.stop_ids:
                self.finish_reason, self.stop_reason = "stop", token_id
        if self.finish_reason is None and self.num_tokens >= self.max_total_tokens:
            self.finish_reason = "length"
        return self.finish_reason is not None
