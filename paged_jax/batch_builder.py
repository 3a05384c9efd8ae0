"""A ScheduledStep becomes the arrays of a compiled step."""

from __future__ import annotations

from collections.abc import Sequence
from operator import add, attrgetter
from typing import NamedTuple

from paged_jax.batch import (
    Buckets,
    StepBatch,
    StepShape,
    join_sampling,
    make_batch,
    pack_sampling,
)
from paged_jax.request import Request
from paged_jax.sampling import SamplingBatch
from paged_jax.scheduled_step import ScheduledChunk, ScheduledStep

# For `map`, which is quicker than a loop: a step may have thousands of sequences.
_block_ids, _score_start = attrgetter("block_ids"), attrgetter("score_start")


def build_step(
    step: ScheduledStep, buckets: Buckets, *, block_size: int
) -> tuple[StepShape, StepBatch, SamplingBatch]:
    """The shape of a scheduled step, and its padded numpy arrays.

    Every chunk has a sampling row, one that is scored has several, chunk after chunk. What is
    sampled for a chunk that does not reach its sequence's end means nothing, and the scheduler
    drops it. The arrays are the step's own: nothing writes to them afterwards, so a device whose
    memory is the host's may read them as they lie.
    """
    chunks = [chunk for chunk in step.chunks if chunk.num_tokens]
    requests, starts, counts, _ = zip(*chunks, strict=True)
    is_plain = len(chunks) == len(step.chunks) and not step.num_extra_rows
    if is_plain and not any(map(_score_start, requests)):
        rows = SampleRows(requests, list(map(add, starts, counts)))
    else:
        rows = SampleRows.of(step.chunks)
    num_tokens = step.num_tokens
    shape = buckets.shape_for(
        num_tokens,
        len(rows.requests),
        may_be_decodes=num_tokens == len(chunks)
        and not (buckets.decodes_append and step.reads_what_it_writes),
    )
    batch = make_batch(
        [chunk.token_ids for chunk in chunks],
        starts,
        list(map(_block_ids, requests)),
        block_size=block_size,
        sample_rows=rows.token_rows,
        num_tokens=shape.num_tokens,
        num_seqs=shape.num_seqs,
        table_width=buckets.table_width,
    )
    sampling = join_sampling(
        [request.packed_sampling or _pack(request) for request in rows.requests],
        rows.positions,
        masked_tokens={
            row: request.tokens_to_mask()
            for row, request in enumerate(rows.requests)
            if request.params.min_tokens
        },
        forced_tokens=rows.forced_tokens,
        num_logprobs=rows.num_logprobs,
        num_seqs=shape.num_seqs,
    )
    return shape, batch, sampling


def _pack(request: Request) -> bytes:
    """What a request asks of the sampler; it keeps this for the next step."""
    request.packed_sampling = pack_sampling(request.params, request.seed)
    return request.packed_sampling


class SampleRows(NamedTuple):
    """The rows of a step's sampling batch."""

    requests: Sequence[Request]
    # Of the token to be drawn
    positions: list[int]
    # Which of the step's tokens gives the logits; None: the last one of each sequence
    token_rows: list[int] | None = None
    forced_tokens: list[int] | None = None
    num_logprobs: list[int] | None = None

    @classmethod
    def of(cls, chunks: Sequence[ScheduledChunk]) -> SampleRows:
        """A row a chunk, and one for each scored token and each guess of a draft; a chunk of no
        tokens has the logits of the chunk before.
        """
        requests, positions, token_rows, forced, num_logprobs = [], [], [], [], []
        end_row = 0
        for chunk in chunks:
            request = chunk.request
            end_row += chunk.num_tokens
            for back in range(chunk.num_rows - 1, -1, -1):
                position = chunk.end - back
                is_scored = request.score_start is not None and position < request.num_tokens
                wanted = request.params.prompt_logprobs if is_scored else request.params.logprobs
                requests.append(request)
                positions.append(position)
                token_rows.append(end_row - 1 - back)
                forced.append(request.token_ids[position] if is_scored else -1)
                num_logprobs.append(-1 if wanted is None else wanted)
        return cls(requests, positions, token_rows, forced, num_logprobs)
