"""Where host and device meet: a ScheduledStep becomes the arrays of a jitted step.

Shapes are padded to a few buckets, so that a handful of compiled programs serve every step.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from paged_jax.request import Request
from paged_jax.sampling import MAX_MASKED_TOKENS, SamplingBatch
from paged_jax.sampling_params import SamplingParams
from paged_jax.scheduled_step import ScheduledChunk, ScheduledStep

# Beyond these, what a user may ask for is no int32, or vanishes as a float32.
_MAX_TOP_K = 2**31 - 1
_MIN_TOP_P = 2.0**-120

# What a field holds: jax arrays inside a step, numpy arrays on their way to it.
Array = Any


@flax.struct.dataclass
class StepBatch:
    """The tokens of one step, prefill chunks and decodes alike, sequence after sequence.

    T, S and B are bucket sizes: tokens, sequences, and blocks a table. Padding tokens write to the
    null block; padding sequences have no tokens. `make_batch` and `decode_batch` build one.

    Attributes:
      token_ids: int32[T], the tokens whose keys and values this step computes.
      positions: int32[T], the position of each in its sequence.
      slot_mapping: int32[T], where its key and value go: block_id * block_size + offset.
      query_starts: int32[S + 1]; sequence s owns the tokens from query_starts[s] to
        query_starts[s + 1].
      kv_lens: int32[S], tokens of the sequence in the pool once this step has written; 0 for
        padding.
      block_tables: int32[S, B], the blocks of each sequence, in order; 0 beyond its end.
      num_seqs: int32[], how many of the S sequences are real.
      sample_rows: int32[S], the tokens (rows of `token_ids`) whose logits are wanted: usually the
        last one of each sequence, but several rows may be of one sequence, or equal.
    """

    token_ids: Array
    positions: Array
    slot_mapping: Array
    query_starts: Array
    kv_lens: Array
    block_tables: Array
    num_seqs: Array
    sample_rows: Array


class StepShape(NamedTuple):
    """What tells one compiled step from another; sizes are those of a bucket."""

    num_tokens: int
    num_seqs: int
    # One token a sequence: such a step has a program of its own, without code for prefills.
    decode_only: bool


@dataclasses.dataclass(frozen=True)
class Buckets:
    """The shapes that a step may have, and the width of its block tables.

    A decode step has as many tokens as sequences, padded to a sequence bucket; a step with a
    prefill chunk in it has a token bucket and all the seats.
    """

    num_seqs: tuple[int, ...]
    num_tokens: tuple[int, ...]
    table_width: int
    # Whether decodes write and read in one kernel, so that none may read what another writes.
    decodes_append: bool = False

    @classmethod
    def choose(
        cls,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        block_size: int,
        decodes_append: bool = False,
    ) -> Buckets:
        """Sequences in powers of four or so (1, 8, 32, 128, ...), tokens in powers of two from 32.

        Few sequence buckets suffice: a decode step's cost is mostly the reading of weights, and
        padding costs attention little. A prefill step's cost is its tokens, so those buckets
        stand closer.
        """
        seqs = [n for n in (1, 8, 32, 128, 512, 2048) if n < max_num_seqs] + [max_num_seqs]
        tokens, size = [], max(32, max_num_seqs)
        while size < max_num_batched_tokens:
            tokens.append(size)
            size *= 2
        tokens.append(max_num_batched_tokens)
        return cls(
            num_seqs=tuple(seqs),
            num_tokens=tuple(tokens),
            table_width=-(-max_model_len // block_size),
            decodes_append=decodes_append,
        )

    def shapes(self) -> list[StepShape]:
        """Every shape, the largest first."""
        most = self.num_seqs[-1]
        prefills = [StepShape(n, most, False) for n in reversed(self.num_tokens)]
        return prefills + [StepShape(n, n, True) for n in reversed(self.num_seqs)]

    def shape_for(
        self, num_tokens: int, num_seqs: int, *, may_be_decodes: bool = True
    ) -> StepShape:
        """The smallest shape that holds a step.

        Args:
          num_tokens: tokens that it computes.
          num_seqs: rows that it samples, at least as many as its sequences.
          may_be_decodes: whether it may have a program for one token a sequence.
        """
        if num_tokens <= num_seqs and may_be_decodes:
            size = self.num_seqs[bisect.bisect_left(self.num_seqs, num_seqs)]
            return StepShape(size, size, True)
        size = self.num_tokens[bisect.bisect_left(self.num_tokens, num_tokens)]
        return StepShape(size, self.num_seqs[-1], False)


def empty_batch(num_tokens: int, num_seqs: int, table_width: int) -> StepBatch:
    """A batch of padding only, as numpy arrays; to compile with, and to fill in."""
    return StepBatch(
        token_ids=np.zeros(num_tokens, np.int32),
        positions=np.zeros(num_tokens, np.int32),
        slot_mapping=np.zeros(num_tokens, np.int32),
        query_starts=np.zeros(num_seqs + 1, np.int32),
        kv_lens=np.zeros(num_seqs, np.int32),
        block_tables=np.zeros((num_seqs, table_width), np.int32),
        num_seqs=np.int32(0),
        sample_rows=np.zeros(num_seqs, np.int32),
    )


def make_sampling(
    params: Sequence[SamplingParams],
    seeds: Sequence[int],
    positions: Sequence[int],
    *,
    masked_tokens: Sequence[Sequence[int]] | None = None,
    forced_tokens: Sequence[int] | None = None,
    num_logprobs: Sequence[int] | None = None,
    num_seqs: int | None = None,
) -> SamplingBatch:
    """Builds a SamplingBatch (numpy arrays) from plain lists, one entry a sequence.

    Args:
      params: temperature, top_k, top_p, min_p and logprobs of each are used here.
      seeds: 64 bits for each; a token depends on its seed and its position only.
      positions: the position of the token to be drawn: how many tokens the sequence has so far.
      masked_tokens: ids that may not be drawn, at most MAX_MASKED_TOKENS for each.
      forced_tokens: the token that each gets whatever its logits, -1 to draw one.
      num_logprobs: alternatives that each is given with logprobs, -1 for none; None takes those of
        `params`.
      num_seqs: rows to pad to; rows of padding are greedy.

    Raises:
      ValueError: the lists differ in length.
    """
    if not len(params) == len(seeds) == len(positions):
        raise ValueError(
            f"params, seeds and positions have {len(params)}, {len(seeds)} and {len(positions)} "
            "entries; give one of each a sequence"
        )
    rows = len(params) if num_seqs is None else num_seqs
    sampling = SamplingBatch(
        temperature=np.zeros(rows, np.float32),
        top_k=np.zeros(rows, np.int32),
        top_p=np.ones(rows, np.float32),
        min_p=np.zeros(rows, np.float32),
        seed=np.zeros((rows, 2), np.uint32),
        positions=np.zeros(rows, np.int32),
        masked_tokens=np.full((rows, MAX_MASKED_TOKENS), -1, np.int32),
        num_logprobs=np.full(rows, -1, np.int32),
        forced_tokens=np.full(rows, -1, np.int32),
    )
    for s, (own, seed) in enumerate(zip(params, seeds, strict=True)):
        sampling.temperature[s] = own.temperature
        sampling.top_k[s] = min(own.top_k, _MAX_TOP_K)
        sampling.top_p[s] = max(own.top_p, _MIN_TOP_P)
        sampling.min_p[s] = own.min_p
        sampling.seed[s] = seed & 0xFFFFFFFF, seed >> 32
        if own.logprobs is not None:
            sampling.num_logprobs[s] = own.logprobs
    sampling.positions[: len(positions)] = positions
    if num_logprobs is not None:
        sampling.num_logprobs[: len(num_logprobs)] = num_logprobs
    if forced_tokens is not None:
        sampling.forced_tokens[: len(forced_tokens)] = forced_tokens
    for s, masked in enumerate(masked_tokens or ()):
        sampling.masked_tokens[s, : len(masked)] = masked
    return sampling


def make_batch(
    token_ids: Sequence[Sequence[int]],
    starts: Sequence[int],
    block_tables: Sequence[Sequence[int]],
    *,
    block_size: int,
    sample_rows: Sequence[int] | None = None,
    num_tokens: int | None = None,
    num_seqs: int | None = None,
    table_width: int | None = None,
) -> StepBatch:
    """Builds a StepBatch (numpy arrays) from plain lists, one entry a sequence.

    Args:
      token_ids: the tokens to compute now, of each sequence; none may be empty.
      starts: how many tokens of each sequence the pool holds already.
      block_tables: the blocks of each sequence, enough for starts + tokens.
      block_size: tokens a block; it must be that of the pool.
      sample_rows: the tokens whose logits are wanted, counted over all sequences; None for the last
        one of each. At most num_seqs.
      num_tokens, num_seqs, table_width: sizes to pad to; by default what is needed.

    Raises:
      ValueError: the lists differ in length, a table is too short, or a size is too small.
    """
    if not len(token_ids) == len(starts) == len(block_tables):
        raise ValueError(
            f"token_ids, starts and block_tables have {len(token_ids)}, {len(starts)} and "
            f"{len(block_tables)} entries; give one of each a sequence"
        )
    counts = [len(tokens) for tokens in token_ids]
    widest = max((len(table) for table in block_tables), default=1)
    total = sum(counts)
    num_tokens = total if num_tokens is None else num_tokens
    num_seqs = len(counts) if num_seqs is None else num_seqs
    table_width = widest if table_width is None else table_width
    for field, size, needed in (
        ("num_tokens", num_tokens, total),
        ("num_seqs", num_seqs, max(len(counts), len(sample_rows or ()))),
        ("table_width", table_width, widest),
    ):
        if size < needed:
            raise ValueError(f"{field}={size} is too small: this batch needs {needed}")
    batch = empty_batch(num_tokens, num_seqs, table_width)
    row = 0
    for s, (tokens, start, table) in enumerate(zip(token_ids, starts, block_tables, strict=True)):
        count = counts[s]
        if count == 0 or start < 0 or start + count > len(table) * block_size:
            raise ValueError(
                f"sequence {s}: {count} tokens from position {start} on; there must be at least "
                f"one, from position 0 or later, within the {len(table) * block_size} slots of its "
                f"{len(table)} blocks"
            )
        end = row + count
        batch.token_ids[row:end] = tokens
        blocks = batch.block_tables[s, : len(table)]
        blocks[:] = table
        if count == 1:  # A decode, the common case: scalars are several times faster.
            batch.positions[row] = start
            batch.slot_mapping[row] = table[start // block_size] * block_size + start % block_size
        else:
            positions = np.arange(start, start + count, dtype=np.int32)
            batch.positions[row:end] = positions
            batch.slot_mapping[row:end] = (
                blocks[positions // block_size] * block_size + positions % block_size
            )
        row = end
        batch.query_starts[s + 1] = row
        batch.kv_lens[s] = start + count
    batch.query_starts[len(counts) + 1 :] = row
    if sample_rows is None:
        batch.sample_rows[: len(counts)] = batch.query_starts[1 : len(counts) + 1] - 1
    else:
        batch.sample_rows[: len(sample_rows)] = sample_rows
    return dataclasses.replace(batch, num_seqs=np.int32(len(counts)))


def decode_batch(
    token_ids: jax.Array, positions: jax.Array, block_tables: jax.Array, *, block_size: int
) -> StepBatch:
    """A batch of one token a sequence, made on device; for a decode loop of your own.

    Args:
      token_ids: int32[S], the newest token of each sequence, not in the pool yet.
      positions: int32[S], its position; a negative one marks a padding row at the end.
      block_tables: int32[S, B], with room for that position.
      block_size: tokens a block.
    """
    num_seqs = token_ids.shape[0]
    real = positions >= 0
    positions = jnp.maximum(positions, 0)
    blocks = jnp.take_along_axis(block_tables, positions[:, None] // block_size, axis=1)[:, 0]
    slots = blocks * block_size + positions % block_size
    count = jnp.sum(real, dtype=jnp.int32)
    return StepBatch(
        token_ids=token_ids,
        positions=positions,
        slot_mapping=jnp.where(real, slots, 0),
        query_starts=jnp.minimum(jnp.arange(num_seqs + 1, dtype=jnp.int32), count),
        kv_lens=jnp.where(real, positions + 1, 0),
        block_tables=block_tables,
        num_seqs=count,
        sample_rows=jnp.arange(num_seqs, dtype=jnp.int32),
    )


def build_step(
    step: ScheduledStep, buckets: Buckets, *, block_size: int
) -> tuple[StepShape, StepBatch, SamplingBatch]:
    """The shape of a scheduled step, and its padded numpy arrays.

    Every chunk has a sampling row, one that is scored has several, chunk after chunk. What is
    sampled for a chunk that does not reach its sequence's end means nothing, and the scheduler
    drops it.
    """
    chunks = [chunk for chunk in step.chunks if chunk.num_tokens]
    is_plain = len(chunks) == len(step.chunks) and not step.num_scored_rows
    rows = SampleRows.plain(step.chunks) if is_plain else SampleRows.of(step.chunks)
    num_tokens = step.num_tokens
    shape = buckets.shape_for(
        num_tokens,
        len(rows.requests),
        may_be_decodes=num_tokens == len(chunks)
        and not (buckets.decodes_append and step.reads_what_it_writes),
    )
    batch = make_batch(
        [chunk.request.token_ids[chunk.start : chunk.end] for chunk in chunks],
        [chunk.start for chunk in chunks],
        [chunk.request.block_ids for chunk in chunks],
        block_size=block_size,
        sample_rows=rows.token_rows,
        num_tokens=shape.num_tokens,
        num_seqs=shape.num_seqs,
        table_width=buckets.table_width,
    )
    sampling = make_sampling(
        [request.params for request in rows.requests],
        [request.seed for request in rows.requests],
        rows.positions,
        masked_tokens=[request.tokens_to_mask() for request in rows.requests],
        forced_tokens=rows.forced_tokens,
        num_logprobs=rows.num_logprobs,
        num_seqs=shape.num_seqs,
    )
    return shape, batch, sampling


class SampleRows(NamedTuple):
    """The rows of a step's sampling batch."""

    requests: list[Request]
    # Of the token to be drawn
    positions: list[int]
    # Which of the step's tokens gives the logits; None: the last one of each sequence
    token_rows: list[int] | None = None
    forced_tokens: list[int] | None = None
    num_logprobs: list[int] | None = None

    @classmethod
    def plain(cls, chunks: Sequence[ScheduledChunk]) -> SampleRows:
        """One row a chunk, at its end."""
        return cls([chunk.request for chunk in chunks], [chunk.end for chunk in chunks])

    @classmethod
    def of(cls, chunks: Sequence[ScheduledChunk]) -> SampleRows:
        """Also rows of chunks without tokens (those of the chunk before), and of scored tokens."""
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
