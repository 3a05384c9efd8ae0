"""The work list of one step: which (sequence, query rows, KV chunk) items exist.

Shapes under jit are static and lengths are not, so the portable path walks a list of items in
loops whose trip counts are known on device only: its cost follows the tokens that exist. The list
depends on lengths and block tables alone, so a step makes it once for all its layers.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

# Measured in attention_xla.py's docstring.
DECODE_CHUNK_TOKENS = 64
MAX_DECODE_ITEMS_PER_GROUP = 32
MAX_PREFILL_TILE_ROWS = 64
PREFILL_CHUNK_TOKENS = 128


@struct.dataclass
class AttentionPlan:
    """Decode items (one query row against a KV chunk) and prefill tiles (rows of one sequence).

    S sequences, T rows, N decode items and P prefill tiles at most, C blocks a decode chunk,
    W block table entries a sequence, padded to whole prefill chunks. A decode has a rank: its
    place among the decodes of the batch.
    """

    # int32[]: groups of decode_items_per_group items that hold a real one
    num_decode_groups: jax.Array
    # int32[N, C]: pool blocks of the item's chunk, 0 past the sequence's end
    item_blocks: jax.Array
    # int32[N]: rank of the item's decode; items of one decode are neighbours, in chunk order
    item_ranks: jax.Array
    # int32[N]: position of the first token of the item's chunk
    item_starts: jax.Array
    # int32[N]: number of tokens in the cache of the item's sequence, 0 for padding items
    item_kv_lens: jax.Array
    # int32[S]: the row of q that the decode of each rank owns, 0 past the last decode
    rank_rows: jax.Array
    # int32[T]: rank of the decode that owns the row, -1 for rows of prefills and of padding
    row_ranks: jax.Array
    # int32[]: number of prefill tiles
    num_prefill_tiles: jax.Array
    # int32[P]: sequence of the tile
    tile_seqs: jax.Array
    # int32[P]: first row of the tile in q
    tile_rows: jax.Array
    # int32[P]: number of rows in the tile, at most prefill_tile_rows
    tile_num_rows: jax.Array
    # int32[P]: position of the tile's first row in its sequence
    tile_positions: jax.Array
    # int32[P]: the tile's rows see no token of the sequence from this position on
    tile_kv_ends: jax.Array
    # int32[S, W]: block tables padded with the null block to whole prefill chunks
    prefill_tables: jax.Array
    decode_items_per_group: int = struct.field(pytree_node=False)
    prefill_tile_rows: int = struct.field(pytree_node=False)
    # Whether there are decodes only; then no prefill tile is looked at.
    decode_only: bool = struct.field(pytree_node=False)
    # Whether a query sees the tokens up to its own; otherwise it sees all of its sequence's.
    causal: bool = struct.field(pytree_node=False)
    block_size: int = struct.field(pytree_node=False)
    # The widest window the items cover, in tokens; None covers everything.
    sliding_window: int | None = struct.field(pytree_node=False)


def blocks_per_chunk(chunk_tokens: int, block_size: int) -> int:
    """Whole blocks in a chunk of about `chunk_tokens` tokens."""
    return max(1, chunk_tokens // block_size)


def make_plan(
    kv_lens: jax.Array,
    block_tables: jax.Array,
    query_starts: jax.Array,
    num_seqs: jax.Array,
    *,
    num_rows: int,
    block_size: int,
    sliding_window: int | None,
    causal: bool,
    decode_only: bool,
) -> AttentionPlan:
    """Arguments as in `pallas_kernels.plan_attention`, already checked."""
    max_seqs = kv_lens.shape[0]
    tile_rows = min(MAX_PREFILL_TILE_ROWS, num_rows)
    query_lens = query_starts[1:] - query_starts[:-1]
    is_real = (jnp.arange(max_seqs) < num_seqs) & (kv_lens > 0)
    return AttentionPlan(
        **_decode_items(
            kv_lens,
            block_tables,
            query_starts,
            is_real & (query_lens == 1),
            num_rows=num_rows,
            block_size=block_size,
            sliding_window=sliding_window,
        ),
        **_prefill_tiles(
            kv_lens,
            query_starts,
            jnp.where(is_real & (query_lens > 1), query_lens, 0),
            num_rows=num_rows,
            tile_rows=tile_rows,
            causal=causal,
        ),
        prefill_tables=_pad_columns(
            block_tables, blocks_per_chunk(PREFILL_CHUNK_TOKENS, block_size)
        ),
        decode_items_per_group=_items_per_group(max_seqs),
        prefill_tile_rows=tile_rows,
        decode_only=decode_only,
        causal=causal,
        block_size=block_size,
        sliding_window=sliding_window,
    )


def _items_per_group(max_seqs: int) -> int:
    """Decode items an iteration: enough to hide a loop's overhead, few for few sequences."""
    return min(max(8, 2 * max_seqs), MAX_DECODE_ITEMS_PER_GROUP)


def _decode_items(
    kv_lens: jax.Array,
    block_tables: jax.Array,
    query_starts: jax.Array,
    is_decode: jax.Array,
    *,
    num_rows: int,
    block_size: int,
    sliding_window: int | None,
) -> dict[str, jax.Array]:
    max_seqs = kv_lens.shape[0]
    chunk_blocks = blocks_per_chunk(DECODE_CHUNK_TOKENS, block_size)
    chunk_tokens = chunk_blocks * block_size
    tables = _pad_columns(block_tables, chunk_blocks).reshape(max_seqs, -1, chunk_blocks)
    group = _items_per_group(max_seqs)
    max_items = -(-max_seqs * tables.shape[1] // group) * group

    first_chunks = jnp.zeros_like(kv_lens)
    if sliding_window is not None:
        first_chunks = jnp.maximum(kv_lens - sliding_window, 0) // chunk_tokens
    num_chunks = jnp.where(is_decode, -(-kv_lens // chunk_tokens) - first_chunks, 0)
    seqs, chunks, num_items = _expand(num_chunks, max_items)
    is_item = jnp.arange(max_items) < num_items
    chunks = jnp.where(is_item, chunks + first_chunks[seqs], 0)

    ranks = jnp.cumsum(is_decode) - 1
    rank_rows = jnp.zeros(max_seqs, jnp.int32)
    rank_rows = rank_rows.at[jnp.where(is_decode, ranks, max_seqs)].set(
        query_starts[:-1].astype(jnp.int32), mode="drop"
    )
    row_ranks = jnp.full(num_rows, -1, jnp.int32)
    row_ranks = row_ranks.at[jnp.where(is_decode, query_starts[:-1], num_rows)].set(
        ranks.astype(jnp.int32), mode="drop"
    )
    return dict(
        num_decode_groups=-(-num_items // group),
        item_blocks=jnp.where(is_item[:, None], tables[seqs, chunks], 0),
        # Padding items follow the last real one, and must not stand before it in a group.
        item_ranks=jnp.where(is_item, ranks[seqs], ranks[-1]).astype(jnp.int32),
        item_starts=chunks * chunk_tokens,
        item_kv_lens=jnp.where(is_item, kv_lens[seqs], 0),
        rank_rows=rank_rows,
        row_ranks=row_ranks,
    )


def _prefill_tiles(
    kv_lens: jax.Array,
    query_starts: jax.Array,
    query_lens: jax.Array,
    *,
    num_rows: int,
    tile_rows: int,
    causal: bool,
) -> dict[str, jax.Array]:
    max_tiles = num_rows // tile_rows + min(kv_lens.shape[0], num_rows // 2)
    num_tiles = -(-query_lens // tile_rows)
    seqs, tiles, num_prefill_tiles = _expand(num_tiles, max(max_tiles, 1))
    offsets = tiles * tile_rows
    positions = (kv_lens - query_lens)[seqs] + offsets
    tile_num_rows = jnp.minimum(query_lens[seqs] - offsets, tile_rows)
    return dict(
        num_prefill_tiles=num_prefill_tiles,
        tile_seqs=seqs,
        tile_rows=query_starts[seqs] + offsets,
        tile_num_rows=tile_num_rows,
        tile_positions=positions,
        tile_kv_ends=positions + tile_num_rows if causal else kv_lens[seqs],
    )


def _expand(counts: jax.Array, max_items: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(owner, index within the owner, number of items) for `counts[owner]` items an owner."""
    ends = jnp.cumsum(counts).astype(jnp.int32)
    items = jnp.arange(max_items, dtype=jnp.int32)
    owners = jnp.searchsorted(ends, items, side="right").astype(jnp.int32)
    owners = jnp.minimum(owners, counts.shape[0] - 1)
    return owners, items - (ends - counts)[owners], ends[-1]


def _pad_columns(block_tables: jax.Array, multiple: int) -> jax.Array:
    return jnp.pad(block_tables, ((0, 0), (0, -block_tables.shape[1] % multiple)))
