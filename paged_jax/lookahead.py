"""Decoding ahead of what the host has read: how many steps a call makes, and which call follows.

A call makes several steps on the device, and the next call is dispatched before the tokens of the
last one are read. Nothing is guessed: the device follows each sequence's own tokens. What can be in
vain is the work for sequences that end on the way by a stop string, an abort or a fault, which only
the host sees; their tokens are dropped, and were written into their own blocks.

Calls are short where something waits: a request that could join is kept waiting for at most the
calls in flight, and a seat that is known to fall free is not decoded past.
"""

from __future__ import annotations

from collections.abc import Sequence

from paged_jax.block_manager import BlockManager
from paged_jax.request import RequestStatus
from paged_jax.scheduled_step import ScheduledChunk, ScheduledStep


def steps_at_once(
    chunks: Sequence[ScheduledChunk], blocks: BlockManager, most: int, *, seat_is_wanted: bool
) -> int:
    """How many decode steps a call of these chunks makes; the blocks for them are taken.

    Args:
      chunks: of a new step; the blocks for their own tokens are theirs already.
      most: the most steps.
      seat_is_wanted: whether a request waits for one of theirs to end.

    Returns:
      1 unless all of them decode. No more than there are free blocks for: nobody is preempted for
      the sake of a longer call.
    """
    if most == 1 or not chunks or not all(map(_decodes, chunks)):
        return 1
    return _reserve(chunks, blocks, most, seat_is_wanted)


def extend(
    step: ScheduledStep, blocks: BlockManager, most: int, *, seat_is_wanted: bool
) -> ScheduledStep | None:
    """The step that follows a step of decodes whose tokens are not known yet, if one may.

    Its chunks are those of `step`, in their places, further on; of requests that have ended too.

    Args:
      step: a step whose tokens were not given to `Scheduler.update` yet.
      blocks, most, seat_is_wanted: as for `steps_at_once`.

    Returns:
      None if a request is not decoding, none has tokens left to draw, one ends in `step` whose seat
      is wanted, or the blocks are not to be had.
    """
    chunks = [chunk._replace(start=chunk.start + step.num_decode_steps) for chunk in step.chunks]
    going = []
    for before, chunk in zip(step.chunks, chunks, strict=True):
        if chunk.request.status is not RequestStatus.RUNNING:
            continue
        if not _decodes(before):
            return None
        if num_left(chunk) > 0:
            going.append(chunk)
        elif seat_is_wanted:
            return None
    num_steps = _reserve(going, blocks, most, seat_is_wanted) if going else 0
    if not num_steps:
        return None
    return ScheduledStep(tuple(chunks), moves=blocks.take_moves(), num_decode_steps=num_steps)


def row_buckets(max_num_seqs: int) -> tuple[int, ...]:
    """The numbers of rows that decode steps are compiled for: 1, 8, 32, 128, ..., and all seats.

    Where a smaller one would hold those that are left, no call follows on the last one.
    """
    return (*(n for n in (1, 8, 32, 128, 512, 2048) if n < max_num_seqs), max_num_seqs)


def num_left(chunk: ScheduledChunk) -> int:
    """Tokens that a decode may draw, from its chunk's end on."""
    return chunk.request.max_total_tokens - chunk.end


def _decodes(chunk: ScheduledChunk) -> bool:
    request = chunk.request
    return (
        chunk.num_tokens == 1
        and not chunk.draft
        and request.score_start is None
        and not request.prefill_only
        and chunk.samples
    )


def _reserve(
    chunks: Sequence[ScheduledChunk], blocks: BlockManager, most: int, seat_is_wanted: bool
) -> int:
    """Takes the blocks for as many steps as there are blocks for, at most `most`; 0 if for none."""
    left = [num_left(chunk) for chunk in chunks]
    num_steps = min(most, min(left) if seat_is_wanted else max(left))
    while num_steps:
        ends = [c.start + min(num_steps, n) for c, n in zip(chunks, left, strict=True)]
        needed = sum(
            max(0, blocks.num_blocks_for(end) - len(chunk.request.block_ids))
            for chunk, end in zip(chunks, ends, strict=True)
        )
        if needed <= blocks.pool.num_free_blocks and all(
            blocks.append_slots(chunk.request, end) for chunk, end in zip(chunks, ends, strict=True)
        ):
            break
        num_steps //= 2
    return num_steps
