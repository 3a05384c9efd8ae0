"""Watches the traffic for prompt templates that defeat the prefix cache.

A system prompt with a request id, a name or the time of day near its beginning is never hit behind
that place, however long and however equal the rest: nothing fails, prefills only cost more. The
watch compares each prompt that missed with recent ones that missed, and reports a template when
many prompts are alike but for a few tokens early on.

How two prompts are compared, although the part that differs may have another length in each:

    ours    [common | differs |  equal stretch  | differs | equal stretch | question ]
    theirs  [common | diff |  equal stretch  | diff | equal stretch | another question ]
                              ^ an anchor, in both      ^ an anchor

Anchors are hashes of token windows, chosen by their own value (one in 16 or so), so equal stretches
have the same anchors wherever they stand: content-defined chunking, as file synchronisers and
deduplicating stores use it. A table of recent anchors finds the prompt to compare with, and shared
anchors say where to lay the two against each other.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence

import numpy as np

from paged_jax.prefix_journal import num_common_tokens

Decode = Callable[[list[int]], str]

# A prompt that hits this share of its tokens is well served, and not looked at.
_GOOD_HIT_SHARE = 0.75

# Tokens an anchor's hash covers: long enough that byte tokens of English rarely agree by chance.
_WINDOW_TOKENS = 16
# One window in so many is an anchor.
_ANCHOR_SPACING = 16

# Stretches that differ are short, or the prompts are not of one template.
_MAX_DIFFERENT_TOKENS = 128
# Equal stretches are long, or they agree by chance.
_MIN_EQUAL_TOKENS = 32
# Work bounds of one comparison.
_MAX_PAIRS_TRIED = 24
_MAX_PROMPT_TOKENS = 8192

# Templates kept, and per template the recent prompts whose numbers make the typical one.
_MAX_TEMPLATES = 64
_NUM_TYPICAL = 32


@dataclasses.dataclass(frozen=True)
class TemplateWarning:
    """Many prompts are alike but for a few tokens early on, and so miss the prefix cache.

    Attributes:
      num_prompts: prompts of this template seen so far.
      num_lost_tokens: tokens of theirs that were computed although an earlier prompt had the same
        ones behind the difference.
      lost_share: the share of those in all recent prompt tokens, 0 to 1.
      first_different_token: the position where the prompts part (the median over recent ones).
      num_different_tokens: how many tokens differ there (the median too).
      example_token_ids: those of the latest prompt.
    """

    num_prompts: int
    num_lost_tokens: int
    lost_share: float
    first_different_token: int
    num_different_tokens: int
    example_token_ids: tuple[int, ...]

    def __str__(self) -> str:
        return self.describe()

    def describe(self, decode: Decode | None = None) -> str:
        """The warning in sentences; with `decode`, it shows an example as text."""
        example = list(self.example_token_ids)
        shown = repr(decode(example)) if decode is not None else f"token ids {example}"
        return (
            f"{self.num_prompts:,} prompts are alike but for about {self.num_different_tokens} "
            f"tokens at token {self.first_different_token} (for example {shown}). "
            f"Behind a token that differs nothing hits the prefix cache: "
            f"{self.num_lost_tokens:,} equal tokens were computed again so far, "
            f"{self.lost_share:.0%} of all recent prompt tokens. Move what differs (an id, a date, "
            "a name) behind the stable part of the template, best to the end of the prompt."
        )


@dataclasses.dataclass(frozen=True)
class Difference:
    """Where two prompts of one template part, and how they go on.

    Attributes:
      landmark: the first anchor that both have behind the difference.
      start, stop: our tokens that differ: start <= position < stop.
      num_equal_tokens: how many of our tokens behind `stop` the other has too, in the same order,
        with short differing stretches in between at most.
    """

    landmark: int
    start: int
    stop: int
    num_equal_tokens: int


@dataclasses.dataclass
class Fingerprint:
    """What is kept of a prompt.

    Attributes:
      token_ids: [num_tokens] int32, its first tokens.
      anchors: anchor -> position, in order, of the part that missed.
    """

    token_ids: np.ndarray
    anchors: dict[int, int]


class _Template:
    """What is counted of one template. The prompt that came first lost nothing."""

    def __init__(self):
        self.num_prompts = 1
        self.num_lost_tokens = 0
        self.num_recent_lost_tokens = 0
        self.num_lost_tokens_warned = 0
        self.places: deque[int] = deque(maxlen=_NUM_TYPICAL)
        self.sizes: deque[int] = deque(maxlen=_NUM_TYPICAL)


class PrefixWatch:
    """Looks at each prompt once, at its first admission; tells of each template once.

    A second warning for a template comes when its lost tokens have doubled. A prompt that hit most
    of its tokens costs a microsecond; memory is bounded by `num_kept_prompts`.

    Args:
      block_size: tokens a block of the prefix cache; what is lost is counted in whole blocks.
      min_prompts: prompts of a template before it is worth a warning.
      min_lost_share: its lost tokens, as a share of all tokens of the recent prompts.
      num_recent_prompts: how many prompts are recent in that sense.
      num_kept_prompts: how many of those that missed are kept to compare with.
    """

    def __init__(
        self,
        block_size: int,
        *,
        min_prompts: int = 8,
        min_lost_share: float = 0.2,
        num_recent_prompts: int = 256,
        num_kept_prompts: int = 64,
    ):
        if block_size < 1:
            raise ValueError(f"block_size={block_size}: must be at least 1")
        if min_prompts < 2:
            raise ValueError(f"min_prompts={min_prompts}: it takes two prompts to be alike")
        if not 0 <= min_lost_share <= 1:
            raise ValueError(f"min_lost_share={min_lost_share}: a share is 0 to 1")
        if num_recent_prompts < min_prompts or num_kept_prompts < 1:
            raise ValueError(
                f"num_recent_prompts={num_recent_prompts} and num_kept_prompts={num_kept_prompts}: "
                f"at least min_prompts={min_prompts} and 1 are needed"
            )
        self.block_size = block_size
        self._min_prompts = min_prompts
        self._min_lost_share = min_lost_share
        self._num_recent_prompts = num_recent_prompts
        self._num_kept_prompts = num_kept_prompts
        self._min_lost_tokens = max(4 * block_size, 64)
        # Of each recent prompt: its tokens, the template that it lost tokens to, and how many.
        self._recent: deque[tuple[int, _Template | None, int]] = deque()
        self._num_recent_tokens = 0
        self._kept: OrderedDict[int, Fingerprint] = OrderedDict()
        self._next_number = 0
        self._latest_with: dict[int, int] = {}  # anchor -> number of the latest kept prompt
        self._templates: OrderedDict[int, _Template] = OrderedDict()  # by landmark

    def observe(
        self, token_ids: Sequence[int] | np.ndarray, num_hit_tokens: int
    ) -> TemplateWarning | None:
        """Notes a prompt and what it hit of the prefix cache; a warning when there is cause.

        Args:
          token_ids: the prompt, each an int32. Given as an int32 array, nothing is copied, and it
            must not change later.
          num_hit_tokens: how many of its first tokens the cache had.
        """
        num_tokens = len(token_ids)
        num_missed = num_tokens - num_hit_tokens
        if num_missed < self._min_lost_tokens or num_hit_tokens >= _GOOD_HIT_SHARE * num_tokens:
            self._note(num_tokens, None, 0)
            return None
        prompt = fingerprint(token_ids, num_hit_tokens)
        difference = self._compare(prompt, num_hit_tokens)
        if prompt.anchors:
            self._keep(prompt)
        if difference is None:
            self._note(num_tokens, None, 0)
            return None
        template = self._template(difference.landmark)
        num_lost = difference.num_equal_tokens // self.block_size * self.block_size
        template.num_prompts += 1
        template.num_lost_tokens += num_lost
        template.places.append(difference.start)
        template.sizes.append(difference.stop - difference.start)
        self._note(num_tokens, template, num_lost)
        example = prompt.token_ids[difference.start : difference.stop]
        return self._warn(template, example)

    def _compare(self, prompt: Fingerprint, num_hit_tokens: int) -> Difference | None:
        """How a prompt differs from the kept one that it shares most with; None if not slightly."""
        latest = self._latest_with
        shared = Counter(latest[anchor] for anchor in prompt.anchors if anchor in latest)
        if not shared:
            return None
        number, num_shared = shared.most_common(1)[0]
        # Half of what so many equal tokens have on average: anchors are few and fall by chance.
        if num_shared * _ANCHOR_SPACING * 2 < self._min_lost_tokens:
            return None
        difference = find_difference(prompt, self._kept[number])
        if difference is None or difference.num_equal_tokens < self._min_lost_tokens:
            return None
        # What was hit ends before the difference, or something else ended it.
        return difference if difference.start >= num_hit_tokens else None

    def _keep(self, prompt: Fingerprint) -> None:
        """Keeps a prompt to compare with; the oldest one goes."""
        number = self._next_number
        self._next_number += 1
        self._kept[number] = prompt
        self._latest_with.update(dict.fromkeys(prompt.anchors, number))
        if len(self._kept) > self._num_kept_prompts:
            oldest, gone = self._kept.popitem(last=False)
            for anchor in gone.anchors:
                if self._latest_with[anchor] == oldest:
                    del self._latest_with[anchor]

    def _template(self, landmark: int) -> _Template:
        template = self._templates.setdefault(landmark, _Template())
        self._templates.move_to_end(landmark)
        if len(self._templates) > _MAX_TEMPLATES:
            self._templates.popitem(last=False)
        return template

    def _note(self, num_tokens: int, template: _Template | None, num_lost: int) -> None:
        """Counts a prompt among the recent ones; the oldest is one no more."""
        self._recent.append((num_tokens, template, num_lost))
        self._num_recent_tokens += num_tokens
        if template is not None:
            template.num_recent_lost_tokens += num_lost
        if len(self._recent) > self._num_recent_prompts:
            num_tokens, template, num_lost = self._recent.popleft()
            self._num_recent_tokens -= num_tokens
            if template is not None:
                template.num_recent_lost_tokens -= num_lost

    def _warn(self, template: _Template, example: np.ndarray) -> TemplateWarning | None:
        share = template.num_recent_lost_tokens / self._num_recent_tokens
        if template.num_prompts < self._min_prompts or share < self._min_lost_share:
            return None
        if template.num_lost_tokens < 2 * template.num_lost_tokens_warned:
            return None
        template.num_lost_tokens_warned = template.num_lost_tokens
        return TemplateWarning(
            num_prompts=template.num_prompts,
            num_lost_tokens=template.num_lost_tokens,
            lost_share=share,
            first_different_token=statistics.median_low(template.places),
            num_different_tokens=statistics.median_low(template.sizes),
            example_token_ids=tuple(example.tolist()),
        )


def find_difference(ours: Fingerprint, theirs: Fingerprint) -> Difference | None:
    """Where two prompts part, and how much is equal behind it; None if they part for good.

    Both must have something where they differ: a prompt that only leaves something out, as a chat
    does that forgets its oldest turns, is of no template.
    """
    a, b = ours.token_ids, theirs.token_ids
    pairs = [(p, theirs.anchors[x], x) for x, p in ours.anchors.items() if x in theirs.anchors]
    num_on_diagonal = Counter(q - p for p, q, _ in pairs)
    start = num_common_tokens(a, b)
    landmark, stop, num_equal = None, start, 0
    i = j = start  # compared so far
    too_far: set[int] = set()  # diagonals
    num_tried = 0
    for p, q, anchor in pairs:
        diagonal = q - p
        # A lone pair is a chance agreement, or too short a stretch to matter.
        if p < i or q < j or num_on_diagonal[diagonal] < 2 or diagonal in too_far:
            continue
        num_tried += 1
        if num_tried > _MAX_PAIRS_TRIED:
            break
        back = num_common_tokens(a[i:p][::-1], b[j:q][::-1])
        num_different, num_theirs = p - back - i, q - back - j
        if max(num_different, num_theirs) > _MAX_DIFFERENT_TOKENS:
            too_far.add(diagonal)
            continue
        length = back + num_common_tokens(a[p:], b[q:])
        if length < _MIN_EQUAL_TOKENS:
            continue
        if landmark is None:
            if not num_different or not num_theirs:
                return None
            landmark, stop = anchor, p - back
        num_equal += length
        i, j = p - back + length, q - back + length
        too_far.clear()
    return None if landmark is None else Difference(landmark, start, stop, num_equal)


def fingerprint(token_ids: Sequence[int] | np.ndarray, num_hit_tokens: int) -> Fingerprint:
    """What to keep of a prompt, of which the first `num_hit_tokens` were hit."""
    tokens = np.asarray(token_ids[:_MAX_PROMPT_TOKENS], np.int32)
    return Fingerprint(tokens, find_anchors(tokens[num_hit_tokens:], first_position=num_hit_tokens))


def find_anchors(tokens: np.ndarray, *, first_position: int = 0) -> dict[int, int]:
    """Hashes of token windows, about one in 16, that depend on the windows' content alone.

    A polynomial hash of each window is built by doubling: of 2 tokens from 1, of 4 from 2, and so
    on, each for all positions at once. Products wrap around at 64 bits, which keeps what matters:
    equal windows have equal hashes, and others almost never.

    Args:
      tokens: [num_tokens] int32.
      first_position: position of tokens[0] in its prompt.

    Returns:
      Anchor -> position of its first window, in order of position.
    """
    if len(tokens) < _WINDOW_TOKENS:
        return {}
    hashes = tokens.astype(np.uint64)
    power = 0x9E3779B97F4A7C15  # 2**64 / golden ratio, odd
    width = 1
    while width < _WINDOW_TOKENS:
        hashes = hashes[width:] + hashes[:-width] * np.uint64(power)
        power = power * power % 2**64
        width *= 2
    # Low bits of a product depend on low bits only, so the choice is made by high ones.
    mixed = (hashes ^ (hashes >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    chosen = np.flatnonzero(mixed >> np.uint64(32) & np.uint64(_ANCHOR_SPACING - 1) == 0)
    anchors: dict[int, int] = {}
    for anchor, position in zip(mixed[chosen].tolist(), chosen.tolist(), strict=True):
        anchors.setdefault(anchor, position + first_position)
    return anchors
