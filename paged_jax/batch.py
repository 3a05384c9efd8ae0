"""Where host and device meet: the arrays of a jitted step.

Shapes are padded to a few buckets, so that a handful of compiled programs serve every step.
"""

from __future__ import annotations

import bisect
import dataclasses
from array import array
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from paged_jax.lookahead import row_buckets
from paged_jax.sampling import MAX_MASKED_TOKENS, SamplingBatch
from paged_jax.sampling_params import SamplingParams

# Beyond these, what a user may ask for is no int32, or vanishes as a float32.
_MAX_TOP_K = 2**31 - 1
_MIN_TOP_P = 2.0**-120

# What a request asks of the sampler, as bytes: packed once, so that a step's rows are one join.
_SAMPLING_ROW = np.dtype(
    [
        ("temperature", np.float32),
        ("top_k", np.int32),
        ("top_p", np.float32),
        ("min_p", np.float32),
        ("seed", np.uint32, 2),
        ("num_logprobs", np.int32),
    ]
)
_PADDING_ROW = np.array((0, 0, 1, 0, 0, -1), _SAMPLING_ROW).tobytes()

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


class StepCall(NamedTuple):
    """What a call of one step is made of, besides weights and pool."""

    batch: StepBatch
    sampling: SamplingBatch


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
    # Steps of a few tokens with fewer rows than there are seats: of few sequences with drafts.
    small: tuple[StepShape, ...] = ()
    # The most decode steps that one call makes.
    num_decode_steps: int = 1

    @classmethod
    def choose(
        cls,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        block_size: int,
        decodes_append: bool = False,
        drafts: bool = False,
        num_decode_steps: int = 1,
    ) -> Buckets:
        """Sequences in powers of four or so (1, 8, 32, 128, ...), tokens in powers of two from 32.

        Few sequence buckets suffice: a decode step's cost is mostly the reading of weights, and
        padding costs attention little. A prefill step's cost is its tokens, so those buckets
        stand closer.
        """
        tokens, size = [], max(32, max_num_seqs)
        while size < max_num_batched_tokens:
            tokens.append(size)
            size *= 2
        tokens.append(max_num_batched_tokens)
        return cls(
            num_seqs=row_buckets(max_num_seqs),
            num_tokens=tuple(tokens),
            table_width=-(-max_model_len // block_size),
            decodes_append=decodes_append,
            small=(StepShape(8, 8, False),) if drafts and max_num_seqs > 8 else (),
            num_decode_steps=num_decode_steps,
        )

    def shapes(self) -> list[StepShape]:
        """Every shape, the largest first."""
        most = self.num_seqs[-1]
        prefills = [StepShape(n, most, False) for n in reversed(self.num_tokens)]
        return (
            prefills + list(self.small) + [StepShape(n, n, True) for n in reversed(self.num_seqs)]
        )

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
        for shape in self.small:
            if num_tokens <= shape.num_tokens and num_seqs <= shape.num_seqs:
                return shape
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
    return join_sampling(
        [pack_sampling(own, seed) for own, seed in zip(params, seeds, strict=True)],
        positions,
        masked_tokens=dict(enumerate(masked_tokens or ())),
        forced_tokens=forced_tokens,
        num_logprobs=num_logprobs,
        num_seqs=num_seqs,
    )


def pack_sampling(params: SamplingParams, seed: int) -> bytes:
    """What one row asks of the sampler, as bytes for `join_sampling`."""
    row = (
        params.temperature,
        min(params.top_k, _MAX_TOP_K),
        max(params.top_p, _MIN_TOP_P),
        params.min_p,
        (seed & 0xFFFFFFFF, seed >> 32),
        -1 if params.logprobs is None else params.logprobs,
    )
    return np.array(row, _SAMPLING_ROW).tobytes()


def join_sampling(
    rows: list[bytes],
    positions: Sequence[int],
    *,
    masked_tokens: Mapping[int, Sequence[int]],
    forced_tokens: Sequence[int] | None = None,
    num_logprobs: Sequence[int] | None = None,
    num_seqs: int | None = None,
) -> SamplingBatch:
    """`make_sampling` of rows that `pack_sampling` made; `masked_tokens` are by row."""
    num_rows = len(rows)
    size = num_rows if num_seqs is None else num_seqs
    packed = np.frombuffer(b"".join(rows) + _PADDING_ROW * (size - num_rows), _SAMPLING_ROW)
    sampling = SamplingBatch(
        **{name: packed[name].copy() for name in _SAMPLING_ROW.fields or ()},
        positions=np.zeros(size, np.int32),
        masked_tokens=np.full((size, MAX_MASKED_TOKENS), -1, np.int32),
        forced_tokens=np.full(size, -1, np.int32),
    )
    sampling.positions[:num_rows] = positions
    if num_logprobs is not None:
        sampling.num_logprobs[:num_rows] = num_logprobs
    if forced_tokens is not None:
        sampling.forced_tokens[:num_rows] = forced_tokens
    for row, masked in masked_tokens.items():
        sampling.masked_tokens[row, : len(masked)] = masked
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
    num_real = len(token_ids)
    counts = np.fromiter(map(len, token_ids), np.int32, num_real)
    widths = np.fromiter(map(len, block_tables), np.int32, num_real)
    total, widest = int(counts.sum()), int(widths.max(initial=1))
    num_tokens = total if num_tokens is None else num_tokens
    num_seqs = num_real if num_seqs is None else num_seqs
    table_width = widest if table_width is None else table_width
    for field, size, needed in (
        ("num_tokens", num_tokens, total),
        ("num_seqs", num_seqs, max(num_real, len(sample_rows or ()))),
        ("table_width", table_width, widest),
    ):
        if size < needed:
            raise ValueError(f"{field}={size} is too small: this batch needs {needed}")
    first = np.fromiter(starts, np.int32, num_real)
    kv_lens = first + counts
    misfits = np.flatnonzero((counts == 0) | (first < 0) | (kv_lens > widths * block_size))
    if len(misfits):
        s = misfits[0]
        raise ValueError(
            f"sequence {s}: {counts[s]} tokens from position {first[s]} on; there must be at least "
            f"one, from position 0 or later, within the {widths[s] * block_size} slots of its "
            f"{widths[s]} blocks"
        )
    # Always new arrays: where a device's memory is the host's, a step may read them as they lie.
    batch = empty_batch(num_tokens, num_seqs, table_width)
    batch.kv_lens[:num_real] = kv_lens
    batch.query_starts[1 : num_real + 1] = np.cumsum(counts)
    batch.query_starts[num_real + 1 :] = total
    batch.token_ids[:total] = np.fromiter(chain.from_iterable(token_ids), np.int32, total)
    positions = batch.positions[:total]
    positions[:] = np.arange(total) + np.repeat(first - batch.query_starts[:num_real], counts)
    tables = batch.block_tables[:num_real, :widest]
    _fill_tables(tables, widths, block_tables)
    blocks = tables[np.repeat(np.arange(num_real), counts), positions // block_size]
    batch.slot_mapping[:total] = blocks * block_size + positions % block_size
    if sample_rows is None:
        batch.sample_rows[:num_real] = batch.query_starts[1 : num_real + 1] - 1
    else:
        batch.sample_rows[: len(sample_rows)] = sample_rows
    return dataclasses.replace(batch, num_seqs=np.int32(num_real))


def make_tables(
    block_tables: Sequence[Sequence[int]], *, num_seqs: int, table_width: int
) -> np.ndarray:
    """int32[num_seqs, table_width] of plain block tables, 0 where they have no block."""
    num_real = len(block_tables)
    widths = np.fromiter(map(len, block_tables), np.int32, num_real)
    tables = np.zeros((num_seqs, table_width), np.int32)
    _fill_tables(tables[:num_real, : widths.max(initial=1)], widths, block_tables)
    return tables


def _fill_tables(out: np.ndarray, widths: np.ndarray, tables: Sequence[Sequence[int]]) -> None:
    """Writes all tables at once; those of requests are joined as bytes."""
    ints = [t if type(t) is array and t.typecode == "i" else array("i", t) for t in tables]
    out[np.arange(out.shape[1]) < widths[:, None]] = np.frombuffer(b"".join(ints), np.int32)


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
        sample_rows=jnp.where(real, jnp.arange(num_seqs, dtype=jnp.int32), 0),
    )
