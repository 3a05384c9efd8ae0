"""One sequence on its way through the engine: its tokens, its blocks, and when it stops."""

from __future__ import annotations

import enum
import time
from array import array
from collections.abc import Sequence

from paged_jax.prefix_cache import ExtraKeys, hash_block
from paged_jax.prompt_lookup import PromptLookup
from paged_jax.sampling_params import SamplingParams


class RequestStatus(enum.Enum):
    """Where a sequence stands. A held one is done for now and keeps its blocks while there is room:
    the anchor of forks and further extensions.
    """

    WAITING = "waiting"
    RUNNING = "running"
    HELD = "held"
    FINISHED = "finished"


class Request:
    """A sequence to extend: `n` samples of one prompt are `n` requests.

    Args:
      extra_keys: what else sets its prefixes apart from those of others, each a str or an int.
      priority: under the priority policy a smaller one is served first.
      prefill_only: computes all tokens but the last and samples nothing.
      score_start: index of the first token whose log-probability is wanted, at least 1; None where
        none is.
      hold: the sequence is held, not finished, when it ends.
      fork_of: a sequence that begins with the same tokens; its blocks are shared at admission.
      takes_over: `fork_of` gives its blocks up at admission.

    Attributes:
      request_id: unique among the live requests.
      params: how to sample; its `n` is 1.
      token_ids: prompt and output together.
      num_prompt_tokens: how many of them are the prompt.
      num_computed_tokens: how many of them have their keys and values in the pool.
      num_cached_tokens: how many the prefix cache gave at first admission.
      block_ids: the block table: block i holds tokens i * block_size and following.
      host_block_ids: the same on the host, of the computed tokens, while it is swapped out.
      block_hashes: the chained hash of each full block of `token_ids`, as far as it was needed.
      num_hashed_blocks: how many blocks of the table stand in the prefix cache.
      num_folded_blocks: how many of them were looked at for an equal block to share.
      lookup: what its drafts come from, if it is speculated on.
      children: sequences that fork off when this one's prompt is computed.
      packed_sampling: what `params` and `seed` ask of the sampler as bytes; b"" until a step packs
        them.
      seed: 64 bits, from which and the position alone each token's randomness comes.
      finish_reason, stop_reason: why it ended; None while it runs.
    """

    __slots__ = (
        "arrival_index",
        "arrival_time",
        "block_hashes",
        "block_ids",
        "cache_salt",
        "children",
        "eos_token_ids",
        "extra_keys",
        "finish_reason",
        "finish_time",
        "first_token_time",
        "fork_of",
        "hold",
        "host_block_ids",
        "lookup",
        "lora_id",
        "max_total_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_folded_blocks",
        "num_hashed_blocks",
        "num_preemptions",
        "num_prompt_tokens",
        "packed_sampling",
        "params",
        "prefill_only",
        "priority",
        "request_id",
        "score_start",
        "seed",
        "status",
        "stop_ids",
        "stop_reason",
        "takes_over",
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
        lora_id: str | None = None,
        extra_keys: tuple[str | int, ...] = (),
        priority: int = 0,
        prefill_only: bool = False,
        score_start: int | None = None,
        hold: bool = False,
        fork_of: Request | None = None,
        takes_over: bool = False,
    ):
        self.request_id = request_id
        self.params = params
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.eos_token_ids = eos_token_ids
        self.stop_ids = frozenset(params.stop_token_ids)
        self.seed = seed
        self.packed_sampling = b""
        self.cache_salt = cache_salt
        self.lora_id = lora_id
        self.extra_keys = extra_keys
        self.priority = priority
        self.prefill_only = prefill_only
        self.score_start = score_start
        self.hold = hold
        self.fork_of = fork_of
        self.takes_over = takes_over
        self.children: list[Request] = []
        self.lookup: PromptLookup | None = None
        room = 0 if prefill_only else max_model_len - self.num_prompt_tokens
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        self.max_total_tokens = self.num_prompt_tokens + max_tokens
        self.status = RequestStatus.WAITING
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.block_ids = array("i")
        self.host_block_ids = array("i")
        self.block_hashes: list[bytes] = []
        self.num_hashed_blocks = 0
        self.num_folded_blocks = 0
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

    @property
    def num_wanted_tokens(self) -> int:
        """Tokens to compute before it has what it wants: all, or all but the last."""
        return len(self.token_ids) - self.prefill_only

    @property
    def max_shared_tokens(self) -> int:
        """The most tokens that it may find computed: at least one must be computed for the logits
        after it, and each one before a token that is scored.
        """
        most = self.num_wanted_tokens - 1
        return most if self.score_start is None else min(most, self.score_start - 1)

    @property
    def is_swapped(self) -> bool:
        return bool(self.host_block_ids)

    def twin(self, request_id: str) -> Request:
        """A request of the same tokens, parameters and keys, with nothing computed."""
        twin = Request(
            request_id,
            self.token_ids,
            self.params,
            max_model_len=self.max_total_tokens,
            eos_token_ids=self.eos_token_ids,
            seed=self.seed,
            cache_salt=self.cache_salt,
            lora_id=self.lora_id,
            extra_keys=self.extra_keys,
            priority=self.priority,
            hold=self.hold,
        )
        twin.num_prompt_tokens = self.num_prompt_tokens
        return twin

    def num_rows(self, start: int, end: int) -> int:
        """Rows of logits that are wanted of its tokens from `start` to `end`: one, but for tokens
        that are scored.
        """
        if self.score_start is None:
            return 1
        return max(1, end - max(start, self.score_start - 1))

    def extra_keys_of(self, block_index: int) -> ExtraKeys | None:
        """What sets a block apart besides its tokens: adapter, own keys, salt (first block only),
        and a place for a digest of prompt embeddings; None where there is nothing.
        """
        salt = self.cache_salt if block_index == 0 else None
        if self.lora_id is None and salt is None and not self.extra_keys:
            return None
        return (self.lora_id, self.extra_keys or None, salt, None)

    def extend_hashes(self, num_blocks: int, block_size: int) -> None:
        """Makes `block_hashes` cover the first `num_blocks` blocks, which must be full."""
        hashes = self.block_hashes
        parent, first = (hashes[-1] if hashes else None), len(hashes)
        tokens = array("i", self.token_ids[first * block_size : num_blocks * block_size])
        for i in range(first, num_blocks):
            start = (i - first) * block_size
            parent = hash_block(parent, tokens[start : start + block_size], self.extra_keys_of(i))
            hashes.append(parent)

    def forget_blocks(self, block_size: int) -> None:
        """Leaves the request with its tokens and nothing computed; no block is given back."""
        del self.block_ids[:]
        del self.host_block_ids[:]
        del self.block_hashes[self.num_tokens // block_size :]
        self.forget_computed()

    def forget_computed(self) -> None:
        """Nothing is computed, hashed or folded any more."""
        self.num_hashed_blocks = 0
        self.num_folded_blocks = 0
        self.num_computed_tokens = 0

    def tokens_to_mask(self) -> tuple[int, ...]:
        """Ids that may not be sampled next: EOS and the stop ids, until `min_tokens` are out."""
        if self.num_output_tokens >= self.params.min_tokens:
            return ()
        return tuple(self.stop_ids.union(self.eos_token_ids))

    def take_tokens(self, token_ids: Sequence[int], draft: Sequence[int] = ()) -> int:
        """Appends tokens up to one that ends the request, or that its guess in `draft` is not.

        Each is the token that the sequence would have got in a step of its own, since it depends on
        the tokens before it, the seed and the position alone: so a guess is accepted if it is that
        token, greedy or not.

        Returns:
          How many were appended, at least one.
        """
        num_taken = 0
        for token_id in token_ids:
            self.token_ids.append(token_id)
            num_taken += 1
            if self.check_stop():
                break
            if draft and (num_taken > len(draft) or token_id != draft[num_taken - 1]):
                break
        return num_taken

    def check_stop(self) -> bool:
        """Sets why the request ends at its newest token, if it does: EOS, stop id or length."""
        token_id, num_tokens = self.token_ids[-1], len(self.token_ids)
        if num_tokens - self.num_prompt_tokens >= self.params.min_tokens:
            if token_id in self.eos_token_ids and not self.params.ignore_eos:
                self.finish_reason = "stop"
            elif token_id in self.stop_ids:
                self.finish_reason, self.stop_reason = "stop", token_id
        if self.finish_reason is None and num_tokens >= self.max_total_tokens:
            self.finish_reason = "length"
        return self.finish_reason is not None


def check_prompt_length(num_prompt_tokens: int, max_model_len: int, prefill_only: bool) -> None:
    """Raises ValueError unless a prompt of this length fits, and an output token after it."""
    if num_prompt_tokens == 0:
        raise ValueError("the prompt is empty (0 tokens); give at least one token")
    if num_prompt_tokens > max_model_len:
        raise ValueError(
            f"the prompt has {num_prompt_tokens} tokens, more than max_model_len={max_model_len}; "
            "shorten it, or raise max_model_len if the model allows"
        )
    if num_prompt_tokens == max_model_len and not prefill_only:
        raise ValueError(
            f"the prompt has {num_prompt_tokens} tokens and max_model_len={max_model_len}: there "
            f"is no room for one output token; shorten it to at most {max_model_len - 1} tokens"
        )
