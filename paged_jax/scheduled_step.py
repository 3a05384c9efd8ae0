"""What one step computes: the scheduler's word to the device half."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

from paged_jax.block_moves import NO_MOVES, BlockMoves
from paged_jax.request import Request


class ScheduledChunk(NamedTuple):
    """`num_tokens` tokens of one request, from its token `start` on.

    A chunk of no tokens follows that of the sequence it forks from in this step: it samples from
    the same logits. The last of the tokens may be a draft: guesses that the sequence does not hold
    yet, and that the step is to confirm.
    """

    request: Request
    start: int
    num_tokens: int
    draft: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        return self.start + self.num_tokens

    @property
    def samples(self) -> bool:
        """Whether the chunk reaches the sequence's last token, so that a new token is sampled."""
        return self.start + self.num_tokens >= len(self.request.token_ids)

    @property
    def token_ids(self) -> list[int]:
        """The tokens to compute."""
        tokens = self.request.token_ids[self.start : self.start + self.num_tokens]
        return tokens + list(self.draft) if self.draft else tokens

    @property
    def num_rows(self) -> int:
        """Rows of logits that the chunk asks for, those of its last tokens."""
        if self.draft:
            return len(self.draft) + 1
        return self.request.num_rows(self.start, self.start + self.num_tokens)


@dataclasses.dataclass(frozen=True)
class ScheduledStep:
    """What the next step computes, what is moved before it, and who was preempted for it."""

    chunks: tuple[ScheduledChunk, ...]
    preempted: tuple[Request, ...] = ()
    # How many of the chunks, the last ones, are of requests that this step admitted
    num_admitted: int = 0
    moves: BlockMoves = NO_MOVES
    # Rows of logits beyond one a chunk: of tokens that are scored, and of drafts
    num_extra_rows: int = 0
    # Decode steps that are made in one call, each from the tokens of the one before
    num_decode_steps: int = 1

    @functools.cached_property
    def num_tokens(self) -> int:
        return sum([chunk[2] for chunk in self.chunks])

    @property
    def admitted(self) -> tuple[ScheduledChunk, ...]:
        return self.chunks[len(self.chunks) - self.num_admitted :]

    @property
    def is_decode(self) -> bool:
        """Whether each chunk is of one token, or none, besides what it guesses."""
        return self.num_tokens == len(self.chunks) or all(
            chunk.num_tokens - len(chunk.draft) <= 1 for chunk in self.chunks
        )

    @property
    def is_plain_decode(self) -> bool:
        """Whether each chunk is of one token, without a guess, and gets one row of logits."""
        return (
            self.num_tokens == len(self.chunks)
            and not self.num_extra_rows
            and all([chunk[2] for chunk in self.chunks])
        )

    def end_rows(self) -> Sequence[int]:
        """Where each chunk's rows of outputs end. They stand chunk after chunk; a decode has one
        for each step of the call.
        """
        if not self.num_extra_rows:
            steps = self.num_decode_steps
            return range(steps, steps * len(self.chunks) + 1, steps)
        return list(itertools.accumulate(chunk.num_rows for chunk in self.chunks))

    @property
    def reads_what_it_writes(self) -> bool:
        """Whether a sequence may read blocks that others fill in this step: only one that joins
        may, since its cached prefix may end in such a block.
        """
        return any(chunk.start > 0 for chunk in self.admitted)
