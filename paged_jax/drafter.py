"""Speculative decoding without a second model: which guesses a decode carries, and how they did."""

from __future__ import annotations

from collections.abc import Sequence

from paged_jax.prompt_lookup import PromptLookup
from paged_jax.request import Request


class Drafter:
    """Makes the drafts of all sequences, by prompt lookup, and counts their tokens.

    Args:
      max_tokens: the longest draft; 0 makes none.
    """

    def __init__(self, max_tokens: int):
        self.max_tokens = max_tokens
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0

    def __bool__(self) -> bool:
        return self.max_tokens > 0

    def propose(self, request: Request, most: int) -> tuple[int, ...]:
        """At most `most` guesses of a decode's next tokens, and no more than it may still get."""
        most = min(most, self.max_tokens, request.max_total_tokens - request.num_tokens - 1)
        if most < 1 or request.prefill_only or request.tokens_to_mask():
            return ()
        if request.lookup is None:
            request.lookup = PromptLookup(self.max_tokens)
        return tuple(request.lookup.propose(request.token_ids, most))

    def learn(self, request: Request, draft: Sequence[int], num_accepted: int) -> None:
        """Takes in how many tokens of a draft were right."""
        self.num_draft_tokens += len(draft)
        self.num_accepted_tokens += num_accepted
        if request.lookup is not None:
            request.lookup.learn(draft, num_accepted)
