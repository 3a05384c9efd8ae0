"""Drafts without a second model: what followed the last few tokens where they stood before.

Summaries, edits of code and answers with quotations repeat stretches of their prompt. If the last
tokens of a sequence stood in it before, what came after them then is a fair guess of what comes
now; a step that computes the guess along with the last token confirms as many of its tokens as the
model would have given itself. The method is prompt lookup decoding (Saxena, 2023), which is also
vLLM's "ngram" speculation.
"""

from __future__ import annotations

from collections.abc import Sequence

# Lengths of the stretches that are looked for, the longest first: longer ones guess better.
_NGRAM_SIZES = (4, 3, 2)


class PromptLookup:
    """The stretches of one sequence, and how well its drafts do.

    A draft is as long as drafts were right lately: twice the last one when all of it was accepted,
    half when none was, so that a text that repeats nothing costs one guess in a while.

    Args:
      max_tokens: the longest draft.
    """

    def __init__(self, max_tokens: int):
        self.max_tokens = max_tokens
        self._limit = max_tokens
        # Where the latest occurrence of a stretch ends, of those that something follows.
        self._ends: dict[tuple[int, ...], int] = {}
        self._num_indexed = 0
        self._num_to_skip = 0

    def propose(self, token_ids: list[int], most: int) -> list[int]:
        """At most `most` tokens that may follow a sequence; none if its end is new.

        Costs O(1) for each token that came since the last call.
        """
        num_tokens, ends = len(token_ids), self._ends
        for end in range(min(self._num_indexed, num_tokens), num_tokens):
            for size in _NGRAM_SIZES:
                if size <= end:
                    ends[tuple(token_ids[end - size : end])] = end
        self._num_indexed = num_tokens
        if self._num_to_skip:
            self._num_to_skip -= 1
            return []
        for size in _NGRAM_SIZES:
            end = ends.get(tuple(token_ids[-size:])) if size < num_tokens else None
            if end is not None:
                # A stretch that ends close before the last token is a circle, followed round.
                period, wanted = num_tokens - end, min(most, self._limit)
                return [token_ids[end + i % period] for i in range(wanted)]
        return []

    def learn(self, draft: Sequence[int], num_accepted: int) -> None:
        """Takes in how many tokens of a draft were accepted."""
        if num_accepted == len(draft):
            self._limit = min(2 * max(self._limit, len(draft)), self.max_tokens)
        elif num_accepted == 0:
            self._limit = max(self._limit // 2, 1)
            if self._limit == 1:
                self._num_to_skip = 8
