"""What explains a prefix cache miss: recent prompts, and the hashes of evicted blocks.

The cache itself knows only hashes, which say whether two prefixes are equal but not where they
part. The journal keeps the last prompts' tokens and finds the nearest one when somebody asks.
Recording costs one copy of the tokens; all searching is left to `explain`.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from paged_jax.prefix_cache import ExtraKeys

Decode = Callable[[list[int]], str]
MissReason = Literal[
    "hit", "never_cached", "evicted", "cleared", "other_extra_keys", "too_short", "caching_disabled"
]

# Tokens compared before all others are.
_NUM_FIRST_LOOK = 64

# Tokens shown on either side of the place where two prompts part.
_NUM_CONTEXT_TOKENS = 8

_MEND_TEMPLATE = (
    "If what differs there changes from prompt to prompt (an id, a date, a name), move it behind "
    "the part that stays the same, best to the end."
)


@dataclasses.dataclass(frozen=True)
class PrefixMiss:
    """Why a prompt hit no more of the prefix cache than it did. Printing it says so in words.

    Attributes:
      request_id: the request explained.
      reason: "hit" (all that can be hit was), "never_cached", "evicted", "cleared" (by a reset),
        "other_extra_keys", "too_short" (no full block before the last token), "caching_disabled".
      block_size: tokens a block.
      num_prompt_tokens, num_hit_tokens: of this prompt.
      first_missed_block: index of the first block that could have been hit and was not; None if
        all were.
      extra_keys: those of this request; None if it has none.
      nearest_request_id: the earlier prompt, whatever its keys, with the longest common beginning;
        None if the journal holds no earlier prompt.
      nearest_extra_keys: that prompt's keys.
      num_common_tokens: how many tokens the two begin with in common.
      first_different_token: the position where they part; None if the nearest goes on as far as
        this one does, or there is none.
      token_id: this prompt's token there.
      nearest_token_id: the nearest's token there; None if it ends there.
      common_token_ids: the last few tokens before that place.
      our_token_ids, nearest_token_ids: the few from there on, of this prompt and of the nearest.
    """

    request_id: str
    reason: MissReason
    block_size: int
    num_prompt_tokens: int
    num_hit_tokens: int
    first_missed_block: int | None = None
    extra_keys: ExtraKeys | None = None
    nearest_request_id: str | None = None
    nearest_extra_keys: ExtraKeys | None = None
    num_common_tokens: int = 0
    first_different_token: int | None = None
    token_id: int | None = None
    nearest_token_id: int | None = None
    common_token_ids: tuple[int, ...] = ()
    our_token_ids: tuple[int, ...] = ()
    nearest_token_ids: tuple[int, ...] = ()

    def __str__(self) -> str:
        return self.describe()

    def describe(self, decode: Decode | None = None) -> str:
        """The explanation in sentences; with `decode`, the text around the parting point too."""
        lines = [
            f"Request {self.request_id!r} hit {self.num_hit_tokens:,} of its "
            f"{self.num_prompt_tokens:,} prompt tokens in the prefix cache.",
            _REASONS[self.reason](self),
        ]
        if self.reason not in ("hit", "too_short", "caching_disabled"):
            lines += self._describe_nearest(decode)
        if self._parts_in_missed_block():
            lines.append(_MEND_TEMPLATE)
        return "\n".join(lines)

    def _describe_nearest(self, decode: Decode | None) -> list[str]:
        if self.nearest_request_id is None:
            return ["No earlier prompt is on record."]
        nearest = f"The nearest earlier prompt, of request {self.nearest_request_id!r},"
        if not self.num_common_tokens:
            return [f"{nearest} has another first token: no earlier prompt begins as this one."]
        text = f"{nearest} begins with the same {self.num_common_tokens:,} tokens"
        place = self.first_different_token
        if place is None:
            return [f"{text}, which is the whole of this one."]
        if self.nearest_token_id is None:
            return [f"{text} and ends there."]
        lines = [
            f"{text}; they part at token {place} (block {place // self.block_size}): "
            f"{self.token_id} here, {self.nearest_token_id} there."
        ]
        if decode is not None:
            shown = (self.common_token_ids, self.our_token_ids, self.nearest_token_ids)
            common, ours, theirs = (decode(list(ids)) for ids in shown)
            lines.append(f"After {common!r} comes {ours!r} here, {theirs!r} there.")
        return lines

    def _parts_in_missed_block(self) -> bool:
        """Whether another token, and nothing else, is what the first missed block missed by."""
        if self.reason != "never_cached" or self.nearest_token_id is None:
            return False
        assert self.first_missed_block is not None
        end = (self.first_missed_block + 1) * self.block_size
        return 0 < self.num_common_tokens < end


def _missed(miss: PrefixMiss) -> str:
    assert miss.first_missed_block is not None
    start = miss.first_missed_block * miss.block_size
    return f"block {miss.first_missed_block} (tokens {start} to {start + miss.block_size - 1})"


def _never_cached(miss: PrefixMiss) -> str:
    assert miss.first_missed_block is not None
    if miss.num_common_tokens < (miss.first_missed_block + 1) * miss.block_size:
        return f"No recorded prompt had the same tokens up to the end of {_missed(miss)}."
    return (
        f"An earlier prompt holds the same tokens, but {_missed(miss)} was not in the cache: the "
        "prompt was asked at the same moment, or aborted before that block was computed, or the "
        "block was evicted so long ago that the journal has forgotten it."
    )


_REASONS: dict[MissReason, Callable[[PrefixMiss], str]] = {
    "hit": lambda miss: (
        "That is all that can be hit: whole blocks, and the last token is always computed."
    ),
    "too_short": lambda miss: (
        f"Only full blocks of {miss.block_size} tokens before the last token can be hit, and it "
        "has none."
    ),
    "caching_disabled": lambda miss: (
        "The cache was not asked: prefix caching is off, for the engine or for this request."
    ),
    "never_cached": _never_cached,
    "evicted": lambda miss: (
        f"{_missed(miss).capitalize()} was cached, and evicted to make room before this request "
        "came. A larger KV pool, a host tier for the cache or pinning the prefix would keep it."
    ),
    "cleared": lambda miss: (
        f"{_missed(miss).capitalize()} was last asked for before the prefix cache was reset."
    ),
    "other_extra_keys": lambda miss: (
        f"{_missed(miss).capitalize()} was asked for with other extra keys only (LoRA, own keys, "
        f"cache salt): {miss.extra_keys} here, {miss.nearest_extra_keys} there. Requests share "
        "blocks only if their keys are equal."
    ),
}


@dataclasses.dataclass(frozen=True)
class _Prompt:
    request_id: str
    token_ids: np.ndarray  # int32
    extra_keys: ExtraKeys | None
    num_hit_tokens: int
    num_clears: int  # resets before it
    missed_evicted: bool | None  # whether its first missed block had been evicted, if told


class PrefixJournal:
    """Remembers recent prompts and evictions, within bounds.

    Args:
      block_size: tokens a block.
      max_prompts, max_tokens: how many prompts, and tokens of all of them, are kept; the oldest
        go first. A prompt longer than max_tokens is cut there.
      max_evicted: how many hashes of evicted blocks are kept.
    """

    def __init__(
        self,
        block_size: int,
        *,
        max_prompts: int = 256,
        max_tokens: int = 1_000_000,
        max_evicted: int = 100_000,
    ):
        bounds = dict(
            block_size=block_size,
            max_prompts=max_prompts,
            max_tokens=max_tokens,
            max_evicted=max_evicted,
        )
        for name, value in bounds.items():
            if value < 1:
                raise ValueError(f"{name}={value}: must be at least 1")
        self.block_size = block_size
        self._max_prompts = max_prompts
        self._max_tokens = max_tokens
        self._max_evicted = max_evicted
        self._prompts: deque[_Prompt] = deque()
        self._num_tokens = 0
        self._evicted: dict[bytes, bool] = {}  # hash -> whether it is still out of the cache
        self._num_clears = 0

    def __len__(self) -> int:
        return len(self._prompts)

    @property
    def num_tokens(self) -> int:
        """Tokens of all prompts kept."""
        return self._num_tokens

    def record_prompt(
        self,
        request_id: str,
        token_ids: Sequence[int] | np.ndarray,
        extra_keys: ExtraKeys | None,
        num_hit_tokens: int,
        *,
        missed_hash: bytes | None = None,
    ) -> None:
        """Notes a prompt at its first admission.

        Args:
          request_id: its request.
          token_ids: the prompt, each an int32; copied.
          extra_keys: the request's; None or () if it has none.
          num_hit_tokens: what the prefix cache gave it.
          missed_hash: hash of the first block that it missed, None if it missed none. With it, an
            eviction is known to be the cause although this request may have stored the block anew.
        """
        # One that stands in the cache again must have been stored after this request missed it.
        evicted = None if missed_hash is None else missed_hash in self._evicted
        tokens = np.array(token_ids[: self._max_tokens], np.int32)
        prompt = _Prompt(
            request_id, tokens, extra_keys or None, num_hit_tokens, self._num_clears, evicted
        )
        self._prompts.append(prompt)
        self._num_tokens += len(tokens)
        while len(self._prompts) > self._max_prompts or self._num_tokens > self._max_tokens:
            self._num_tokens -= len(self._prompts.popleft().token_ids)

    def record_evicted(self, block_hash: bytes) -> None:
        """Notes that a hashed block left the cache (its last tier, where there are two)."""
        self._evicted.pop(block_hash, None)
        self._evicted[block_hash] = True
        if len(self._evicted) > self._max_evicted:
            del self._evicted[next(iter(self._evicted))]

    def forget_evicted(self, block_hash: bytes) -> None:
        """Notes that a block stands in the cache again; of one never evicted, it does nothing."""
        if block_hash in self._evicted:
            self._evicted[block_hash] = False

    def record_cleared(self) -> None:
        """Notes that the prefix cache was reset."""
        self._evicted.clear()
        self._num_clears += 1

    def explain(
        self,
        request_id: str,
        token_ids: Sequence[int] | np.ndarray,
        extra_keys: ExtraKeys | None,
        block_hashes: Sequence[bytes],
        num_hit_blocks: int | None = None,
        *,
        caching_enabled: bool = True,
    ) -> PrefixMiss:
        """Says why a prompt hit what it hit and no more: before its admission or after it.

        The first missed block decides. A request that is on record (the newest of its id) is
        compared with the prompts recorded before it, any other with all.

        Args:
          request_id, token_ids, extra_keys: as for `record_prompt`.
          block_hashes: the chained hashes of the prompt's full blocks, at least up to the first
            missed one.
          num_hit_blocks: how many it hit; None takes what was recorded.
          caching_enabled: whether the cache was asked at all.

        Raises:
          ValueError: num_hit_blocks is None and the request is not on record, or block_hashes
            ends before the first missed block.
        """
        own, earlier = self._split_at(request_id)
        if not caching_enabled:
            num_hit_blocks = 0
        elif num_hit_blocks is None:
            if own is None:
                raise ValueError(
                    f"num_hit_blocks=None, but request {request_id!r} is not on record: pass it"
                )
            num_hit_blocks = own.num_hit_tokens // self.block_size
        miss = PrefixMiss(
            request_id=request_id,
            reason="hit",
            block_size=self.block_size,
            num_prompt_tokens=len(token_ids),
            num_hit_tokens=num_hit_blocks * self.block_size,
            extra_keys=extra_keys or None,
        )
        num_hittable_blocks = max(len(token_ids) - 1, 0) // self.block_size
        if not caching_enabled:
            return dataclasses.replace(miss, reason="caching_disabled")
        if num_hittable_blocks == 0:
            return dataclasses.replace(miss, reason="too_short")
        tokens = np.asarray(token_ids, np.int32)
        commons = [num_common_tokens(tokens, prompt.token_ids) for prompt in earlier]
        if num_hit_blocks < num_hittable_blocks:
            if len(block_hashes) <= num_hit_blocks:
                raise ValueError(
                    f"block_hashes has {len(block_hashes)} hashes: that of the first missed block, "
                    f"{num_hit_blocks}, is needed"
                )
            end = (num_hit_blocks + 1) * self.block_size
            holders = [p for p, common in zip(earlier, commons, strict=True) if common >= end]
            reason = self._reason(own, holders, miss.extra_keys, block_hashes[num_hit_blocks])
            miss = dataclasses.replace(miss, reason=reason, first_missed_block=num_hit_blocks)
        return self._with_nearest(miss, tokens, earlier, commons)

    def has(self, request_id: str) -> bool:
        """Whether a request is on record."""
        return self._split_at(request_id)[0] is not None

    def keys_of(self, request_id: str) -> ExtraKeys | None:
        """The extra keys of a request on record; None if it has none, or is not."""
        own, _ = self._split_at(request_id)
        return None if own is None else own.extra_keys

    def _split_at(self, request_id: str) -> tuple[_Prompt | None, list[_Prompt]]:
        """The newest record of a request, and the prompts recorded before it."""
        prompts = list(self._prompts)
        for i in reversed(range(len(prompts))):
            if prompts[i].request_id == request_id:
                return prompts[i], prompts[:i]
        return None, prompts

    def _reason(
        self,
        own: _Prompt | None,
        holders: list[_Prompt],
        extra_keys: ExtraKeys | None,
        block_hash: bytes,
    ) -> MissReason:
        """Why a block missed that `holders`, oldest first, have the tokens of."""
        # The hash covers tokens and keys: an evicted one needs no prompt to prove it, which also
        # covers blocks of output, as a chat's next turn asks for.
        evicted = None if own is None else own.missed_evicted
        if evicted is None:
            evicted = self._evicted.get(block_hash, False)
        if evicted:
            return "evicted"
        same_keys = [prompt for prompt in holders if prompt.extra_keys == extra_keys]
        if same_keys:
            num_clears = self._num_clears if own is None else own.num_clears
            return "cleared" if same_keys[-1].num_clears < num_clears else "never_cached"
        return "other_extra_keys" if holders else "never_cached"

    def _with_nearest(
        self, miss: PrefixMiss, tokens: np.ndarray, earlier: list[_Prompt], commons: list[int]
    ) -> PrefixMiss:
        """Adds the nearest prompt: of equally near ones one of the same keys, then the newest."""
        if not earlier:
            return miss
        i = max(
            range(len(earlier)),
            key=lambda i: (commons[i], earlier[i].extra_keys == miss.extra_keys, i),
        )
        nearest, place = earlier[i], commons[i]
        theirs = nearest.token_ids
        parts = place < len(tokens)
        shown = slice(place, place + _NUM_CONTEXT_TOKENS)
        return dataclasses.replace(
            miss,
            nearest_request_id=nearest.request_id,
            nearest_extra_keys=nearest.extra_keys,
            num_common_tokens=place,
            first_different_token=place if parts else None,
            token_id=int(tokens[place]) if parts else None,
            nearest_token_id=int(theirs[place]) if parts and place < len(theirs) else None,
            common_token_ids=tuple(tokens[max(place - _NUM_CONTEXT_TOKENS, 0) : place].tolist()),
            our_token_ids=tuple(tokens[shown].tolist()),
            nearest_token_ids=tuple(theirs[shown].tolist()) if parts else (),
        )


def num_common_tokens(ours: np.ndarray, theirs: np.ndarray) -> int:
    """How many tokens two prompts begin with in common."""
    num = min(len(ours), len(theirs))
    # Most pairs part early: a short look first spares the long one.
    for start, stop in ((0, min(_NUM_FIRST_LOOK, num)), (_NUM_FIRST_LOOK, num)):
        if start < stop:
            differs = ours[start:stop] != theirs[start:stop]
            first = int(differs.argmax())
            if differs[first]:
                return start + first
    return num
