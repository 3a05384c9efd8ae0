"""The work of a GPU attention launch, cut into equal shares for its programs, on the device.

A tile has some chunks of keys, in each KV head: a *unit* of work. All units' chunks stand in one
line, tile after tile and within it head after head, and program p takes the p-th of equal pieces
of the line, wherever that begins and ends:

    units     | 0 0 0 0 0 0 0 0 0 0 | 1 1 | 2 2 2 2 2 |
    programs  | a a a a a | b b b b b | c c c c c | d d
    segments  | a:0       | b:0     b:1 c:1 c:2   | d:2

A *segment* is what one program has of one unit. Since units and programs both only grow along the
line, unit + program names a segment: it is the place of its partial result.

Source of the cut: Stream-K (arXiv 2301.03598); planned splits for decodes are FlashInfer's
(arXiv 2501.01005).
"""

from __future__ import annotations

import enum

import jax
import jax.numpy as jnp
from flax import struct

from pallas_kernels.attention_gpu_spec import CHUNK_TOKENS, GpuSpec


class Tile(enum.IntEnum):
    """The columns of `GpuPlan.tiles`."""

    # chunks of the tiles before it, in one head
    START = 0
    # its own chunks in one head
    NUM_CHUNKS = 1
    # its sequence, and the position of its first token there
    SEQ = 2
    POSITION = 3
    # tokens that some row sees: from LOW on, before HIGH
    LOW = 4
    HIGH = 5


class Share(enum.IntEnum):
    """The columns of `GpuPlan.shares`."""

    # chunks of the line
    BEGIN = 0
    END = 1
    # units from the first on
    FIRST_UNIT = 2
    NUM_UNITS = 3
    # chunks of a share
    SIZE = 4


NUM_TILE_COLUMNS = 8
NUM_SHARE_COLUMNS = 8


@struct.dataclass
class GpuPlan:
    """The tiles and shares of a launch, and which rows of q they own."""

    # int32[tiles, 8], see `Tile`; tiles past the last one have no chunks
    tiles: jax.Array
    # int32[programs, 8], see `Share`
    shares: jax.Array
    # int32[tiles]: first row of q of each tile
    tile_rows: jax.Array
    # int32[T]: tile of each row of q, and its token there; -1 for rows of no tile
    row_tiles: jax.Array
    row_tokens: jax.Array


def make_plan(
    spec: GpuSpec,
    kv_lens: jax.Array,
    query_starts: jax.Array,
    is_taken: jax.Array,
    *,
    num_rows: int,
    one_query_each: bool,
) -> GpuPlan:
    """The plan of the sequences that a launch takes.

    Args:
      kv_lens, query_starts: as in `pallas_kernels.ragged_paged_attention`.
      is_taken: bool[S], the sequences of this launch, all with at least one query and one token.
      num_rows: T.
      one_query_each: promises that each of them has one query.
    """
    query_lens = jnp.where(is_taken, query_starts[1:] - query_starts[:-1], 0)
    num_tiles = -(-query_lens // spec.tile_tokens)
    max_tiles = kv_lens.shape[0]
    if not one_query_each:  # Full tiles, and one that is not full a sequence.
        max_tiles = num_rows // spec.tile_tokens + min(max_tiles, num_rows // 2 + 1)
    tile_ends = jnp.cumsum(num_tiles).astype(jnp.int32)
    tiles = jnp.arange(max_tiles, dtype=jnp.int32)
    seqs = jnp.minimum(_owners(tile_ends, tiles), kv_lens.shape[0] - 1)
    offsets = (tiles - (tile_ends - num_tiles)[seqs]) * spec.tile_tokens
    is_tile = tiles < tile_ends[-1]
    positions = (kv_lens - query_lens)[seqs] + offsets
    num_tokens = jnp.minimum(query_lens[seqs] - offsets, spec.tile_tokens)

    high = positions + num_tokens if spec.causal else kv_lens[seqs]
    low = jnp.zeros_like(high)
    if spec.sliding_window is not None:
        low = jnp.maximum(positions - spec.sliding_window + 1, 0)
    num_chunks = jnp.where(is_tile, -(-high // CHUNK_TOKENS) - low // CHUNK_TOKENS, 0)
    ends = jnp.cumsum(num_chunks).astype(jnp.int32)
    columns = [ends - num_chunks, num_chunks, seqs, positions, low, high]
    columns += [jnp.zeros_like(high)] * (NUM_TILE_COLUMNS - len(columns))
    row_tiles, row_tokens = _tiles_of_rows(
        spec, query_starts, is_taken, tile_ends - num_tiles, num_rows
    )
    return GpuPlan(
        tiles=jnp.stack(columns, axis=1).astype(jnp.int32),
        shares=_shares(spec, ends, num_chunks),
        tile_rows=jnp.where(is_tile, query_starts[seqs] + offsets, 0),
        row_tiles=row_tiles,
        row_tokens=row_tokens,
    )


def _shares(spec: GpuSpec, ends: jax.Array, num_chunks: jax.Array) -> jax.Array:
    """int32[programs, 8] from the ends of the tiles in the line of one head."""
    heads, programs = spec.num_kv_heads, spec.num_programs
    total = heads * ends[-1]
    size = jnp.maximum(-(-total // programs), 1)
    begins = jnp.minimum(jnp.arange(programs, dtype=jnp.int32) * size, total)
    share_ends = jnp.minimum(begins + size, total)

    def unit_of(chunks: jax.Array) -> jax.Array:
        tiles = jnp.minimum(_owners(heads * ends, chunks), ends.shape[0] - 1)
        within = chunks - heads * (ends - num_chunks)[tiles]
        return tiles * heads + within // jnp.maximum(num_chunks[tiles], 1)

    first = unit_of(begins)
    num_units = jnp.where(share_ends > begins, unit_of(share_ends - 1) - first + 1, 0)
    columns = [begins, share_ends, first, num_units, jnp.broadcast_to(size, begins.shape)]
    columns += [jnp.zeros_like(begins)] * (NUM_SHARE_COLUMNS - len(columns))
    return jnp.stack(columns, axis=1).astype(jnp.int32)


def _tiles_of_rows(
    spec: GpuSpec,
    query_starts: jax.Array,
    is_taken: jax.Array,
    first_tiles: jax.Array,
    num_rows: int,
) -> tuple[jax.Array, jax.Array]:
    rows = jnp.arange(num_rows, dtype=jnp.int32)
    seqs = _owners(query_starts[1:], rows)
    is_row = seqs < is_taken.shape[0]
    seqs = jnp.minimum(seqs, is_taken.shape[0] - 1)
    is_row &= is_taken[seqs]
    within = rows - query_starts[seqs]
    tiles = first_tiles[seqs] + within // spec.tile_tokens
    return jnp.where(is_row, tiles, -1), within % spec.tile_tokens


def _owners(ends: jax.Array, numbers: jax.Array) -> jax.Array:
    """int32, of each number the interval it lies in, from the intervals' ascending ends.

    By comparing all with all: a binary search is a loop, which XLA runs on GPUs step by step from
    the host.
    """
    return jnp.sum(ends <= numbers[:, None], axis=1, dtype=jnp.int32)
