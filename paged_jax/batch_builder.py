"""A ScheduledStep becomes the arrays of a compiled step."""

from __future__ import annotations

from collections.abc import Sequence
from operator import add, attrgetter
from typing import NamedTuple

import numpy as np

from paged_jax.batch import (
    Buckets,
    StepCall,
    StepShape,
    join_sampling,
    make_batch,
    make_tables,
    pack_sampling,
)
from paged_jax.decode_rows import MAX_STOP_TOKENS, DecodeCall, DecodeRows, StopRules, no_stops
from paged_jax.request import Request
from paged_jax.sampling import SamplingBatch
from paged_jax.scheduled_step import ScheduledChunk, ScheduledStep
from paged_jax.step_programs import StepPrograms

# For `map`, which is quicker than a loop: a step may have thousands of sequences.
_block_ids, _score_start = attrgetter("block_ids"), attrgetter("score_start")
_request = attrgetter("request")


def build_calls(
    steps: Sequence[ScheduledStep], programs: StepPrograms, *, block_size: int, goes_on: bool
) -> tuple[StepShape, list[StepCall] | list[DecodeCall]]:
    """The shape that steps have which run as one, a row of a mesh each, and the arrays of each.

    They decode if all of them `decodes`. Else every chunk has a sampling row, one that is scored
    has several, chunk after chunk. What is sampled for a chunk that does not reach its sequence's
    end means nothing, and the scheduler drops it. A step without chunks is all padding.

    The arrays are the call's own: nothing writes to them afterwards, so a device whose memory is
    the host's may read them as they lie.

    Args:
      goes_on: whether rows of decodes may draw more than one token, in this call or in one that
        follows; without, nothing about ends is gathered.
    """
    if all(decodes(step, programs.buckets) for step in steps):
        return build_decodes(steps, programs, goes_on=goes_on)
    return build_steps(steps, programs.buckets, block_size=block_size)


def build_decodes(
    steps: Sequence[ScheduledStep], programs: StepPrograms, *, goes_on: bool
) -> tuple[StepShape, list[DecodeCall]]:
    """`build_calls` of steps that decode."""
    num_rows, buckets = max(len(step.chunks) for step in steps), programs.buckets
    smallest = buckets.shape_for(num_rows, num_rows)
    calls = [_decode_call(step, smallest, buckets, goes_on) for step in steps]
    shape = programs.choose_decode(num_rows, *[call.sampling for call in calls])
    if shape != smallest:
        calls = [_decode_call(step, shape, buckets, goes_on) for step in steps]
    return shape, calls


def build_steps(
    steps: Sequence[ScheduledStep], buckets: Buckets, *, block_size: int
) -> tuple[StepShape, list[StepCall]]:
    """`build_calls` of any steps."""
    rows = [_sample_rows(step) for step in steps]
    shape = buckets.shape_for(
        max(step.num_tokens for step in steps),
        max(len(own.requests) for own in rows),
        may_be_decodes=False,
    )
    calls = [
        _step_call(step, own, shape, buckets, block_size)
        for step, own in zip(steps, rows, strict=True)
    ]
    return shape, calls


def _sample_rows(step: ScheduledStep) -> SampleRows:
    if step.num_extra_rows or not step.chunks:
        return SampleRows.of(step.chunks)
    requests, starts, counts, _ = zip(*step.chunks, strict=True)
    if not all(counts) or any(map(_score_start, requests)):
        return SampleRows.of(step.chunks)
    return SampleRows(requests, list(map(add, starts, counts)))


def _step_call(
    step: ScheduledStep, rows: SampleRows, shape: StepShape, buckets: Buckets, block_size: int
) -> StepCall:
    chunks = [chunk for chunk in step.chunks if chunk.num_tokens]
    requests, starts, _, _ = zip(*chunks, strict=True) if chunks else ((),) * 4
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
    return StepCall(batch, _sampling(rows, shape.num_seqs))


def decodes(step: ScheduledStep, buckets: Buckets) -> bool:
    """Whether a step is one token a sequence, for a program of its own.

    It is not if a chunk has several tokens, or none, or is scored; or if one reads what another
    writes and the device writes and reads in one kernel.
    """
    if not step.is_plain_decode or any(map(_score_start, map(_request, step.chunks))):
        return False
    return not (buckets.decodes_append and step.reads_what_it_writes)


def _decode_call(
    step: ScheduledStep, shape: StepShape, buckets: Buckets, goes_on: bool
) -> DecodeCall:
    requests, starts, _, _ = zip(*step.chunks, strict=True) if step.chunks else ((),) * 4
    num_rows = len(requests)
    rows = DecodeRows(
        token_ids=np.zeros(shape.num_seqs, np.int32),
        positions=np.full(shape.num_seqs, -1, np.int32),
        num_left=np.zeros(shape.num_seqs, np.int32),
    )
    rows.token_ids[:num_rows] = [
        request.token_ids[start] for request, start in zip(requests, starts, strict=True)
    ]
    rows.positions[:num_rows] = starts
    rows.num_left[:num_rows] = list(map(_num_left, requests, starts)) if goes_on else 1
    stops = _stop_rules(requests, shape.num_seqs) if goes_on else no_stops(shape.num_seqs)
    return DecodeCall(
        rows=rows,
        block_tables=_tables(step, shape, buckets),
        sampling=_sampling(SampleRows(requests, [0] * num_rows), shape.num_seqs),
        stops=stops,
        num_steps=np.int32(step.num_decode_steps),
    )


def continue_decode(
    steps: Sequence[ScheduledStep],
    shape: StepShape,
    call: DecodeCall,
    rows: DecodeRows,
    buckets: Buckets,
) -> DecodeCall:
    """The call that goes on from where another leaves its rows, which may be on device still.

    Both are of all steps that run as one, [steps, ...], or of the only one.
    """
    tables = [_tables(step, shape, buckets) for step in steps]
    counts = [np.int32(step.num_decode_steps) for step in steps]
    if np.ndim(call.num_steps) == 0:
        (tables,), (counts,) = tables, counts
    return call._replace(rows=rows, block_tables=np.asarray(tables), num_steps=np.asarray(counts))


def _tables(step: ScheduledStep, shape: StepShape, buckets: Buckets) -> np.ndarray:
    tables = [chunk[0].block_ids for chunk in step.chunks]
    return make_tables(tables, num_seqs=shape.num_seqs, table_width=buckets.table_width)


def _sampling(rows: SampleRows, num_seqs: int) -> SamplingBatch:
    return join_sampling(
        [request.packed_sampling or _pack(request) for request in rows.requests],
        rows.positions,
        masked_tokens={
            row: request.tokens_to_mask()
            for row, request in enumerate(rows.requests)
            if request.params.min_tokens
        },
        forced_tokens=rows.forced_tokens,
        num_logprobs=rows.num_logprobs,
        num_seqs=num_seqs,
    )


def _num_left(request: Request, start: int) -> int:
    """Tokens that may be drawn, the one after token `start` first; 1 where none is wanted."""
    return max(request.max_total_tokens - start - 1, 1)


def _stop_rules(requests: Sequence[Request], num_seqs: int) -> StopRules:
    stops = no_stops(num_seqs)
    for row, request in enumerate(requests):
        params = request.params
        ids = [*request.stop_ids, *(() if params.ignore_eos else request.eos_token_ids)]
        ids = ids[:MAX_STOP_TOKENS]
        if ids:
            stops.token_ids[row, : len(ids)] = ids
        stops.first_positions[row] = request.num_prompt_tokens + params.min_tokens
    return stops


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
