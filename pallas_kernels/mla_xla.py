"""Latent attention and its pool write in plain XLA: for CPUs, and for GPUs without a kernel.

All heads share one key, so a tile's rows are tokens x heads and its scores one matrix product.
The batch is cut into tiles of query tokens: one token for decodes, up to 32 for longer chunks.
Each tile walks the chunks of its sequence's blocks that it can see with a running softmax, so
what is read and computed follows the real lengths and not the bucket: the loops' trip counts come
from the lengths, and one compiled program serves every batch of its bucket.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.pool_storage import to_float32, to_storage

_MAX_TILE_TOKENS = 32
_CHUNK_TOKENS = 128
# Stands for the maximum over no score: small, and finite, so that differences stay numbers.
_LOWEST = -1e30


class _Batch(NamedTuple):
    q: jax.Array  # float32[T + tile, Hq, latent_dim + rope_dim], scaled
    pool_layer: jax.Array  # [num_blocks, block_size, width]
    kv_lens: jax.Array  # int32[S]
    tables: jax.Array  # int32[S, B], B a multiple of the blocks of a chunk
    query_starts: jax.Array  # int32[S + 1]
    latent_dim: int


class _Softmax(NamedTuple):
    """Running softmax of a tile's rows."""

    largest: jax.Array  # float32[rows]: maximum of the scores seen
    total: jax.Array  # float32[rows]: sum of exp(score - largest)
    weighted: jax.Array  # float32[rows, latent_dim]: sum of exp(score - largest) * c


def mla_attention(
    q_latent: jax.Array,
    q_rope: jax.Array,
    pool_layer: jax.Array,
    kv_lens: jax.Array,
    block_tables: jax.Array,
    query_starts: jax.Array,
    num_seqs: jax.Array,
    *,
    scale: float,
    return_lse: bool,
) -> tuple[jax.Array, jax.Array | None]:
    """Arguments, shapes and results as in `pallas_kernels.mla_attention`, checked.

    Without return_lse the second result is None.
    """
    num_rows, num_heads, latent_dim = q_latent.shape
    tile = min(_MAX_TILE_TOKENS, num_rows)
    chunk_blocks = _chunk_blocks(pool_layer.shape[1])
    q = scale * jnp.concatenate([q_latent, q_rope], axis=2).astype(jnp.float32)
    batch = _Batch(
        q=jnp.pad(q, ((0, tile), (0, 0), (0, 0))),
        pool_layer=pool_layer,
        kv_lens=kv_lens,
        tables=jnp.pad(block_tables, ((0, 0), (0, -block_tables.shape[1] % chunk_blocks))),
        query_starts=query_starts,
        latent_dim=latent_dim,
    )
    query_lens = query_starts[1:] - query_starts[:-1]
    is_real = jnp.arange(kv_lens.shape[0]) < num_seqs
    # A tile's store may run past its rows into those of later sequences, which are then written
    # again, or are cleared at the end; decodes come last and store single rows.
    results = (
        jnp.zeros((num_rows + tile, num_heads, latent_dim), jnp.float32),
        jnp.zeros((num_rows + tile, num_heads), jnp.float32),
    )
    if tile > 1:
        long_lens = jnp.where(is_real & (query_lens > 1), query_lens, 0)
        results = _attend(batch, long_lens, tile, results)
    results = _attend(batch, jnp.where(is_real & (query_lens == 1), 1, 0), 1, results)
    is_owned = (jnp.arange(num_rows) < query_starts[num_seqs])[:, None]
    out = jnp.where(is_owned[..., None], results[0][:num_rows], 0.0).astype(q_latent.dtype)
    if not return_lse:
        return out, None
    return out, jnp.where(is_owned, results[1][:num_rows], -jnp.inf)


def _chunk_blocks(block_size: int) -> int:
    """Blocks that a tile reads at once."""
    return max(1, _CHUNK_TOKENS // block_size)


def _attend(
    batch: _Batch, query_lens: jax.Array, tile: int, results: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Stores out and lse of the sequences' first query_lens[s] rows, `tile` rows at a time."""
    tile_ends = jnp.cumsum(-(-query_lens // tile))

    def one_tile(index: jax.Array, results: tuple[jax.Array, jax.Array]):
        seq = jnp.searchsorted(tile_ends, index, side="right").astype(jnp.int32)
        query_len = query_lens[seq]
        first = (index - tile_ends[seq] + -(-query_len // tile)) * tile
        row = batch.query_starts[seq] + first
        state = _attend_tile(
            batch,
            seq,
            row,
            position=batch.kv_lens[seq] - query_len + first,
            num_tokens=jnp.minimum(query_len - first, tile),
            tile=tile,
        )
        total = jnp.maximum(state.total, jnp.finfo(jnp.float32).tiny)
        out = (state.weighted / total[:, None]).reshape(tile, -1, batch.latent_dim)
        lse = (state.largest + jnp.log(state.total)).reshape(tile, -1)
        return (
            lax.dynamic_update_slice_in_dim(results[0], out, row, 0),
            lax.dynamic_update_slice_in_dim(results[1], lse, row, 0),
        )

    return lax.fori_loop(0, tile_ends[-1], one_tile, results)


def _attend_tile(
    batch: _Batch,
    seq: jax.Array,
    row: jax.Array,
    *,
    position: jax.Array,
    num_tokens: jax.Array,
    tile: int,
) -> _Softmax:
    """Softmax state of rows [row, row + tile), the first at `position` of sequence `seq`."""
    num_heads, key_dim = batch.q.shape[1:]
    block_size = batch.pool_layer.shape[1]
    chunk_blocks = _chunk_blocks(block_size)
    chunk_tokens = chunk_blocks * block_size
    q = lax.dynamic_slice_in_dim(batch.q, row, tile).reshape(tile * num_heads, key_dim)
    positions = position + jnp.arange(tile * num_heads)[:, None] // num_heads
    end = position + num_tokens  # of what the tile's own rows see

    def add_chunk(chunk: jax.Array, state: _Softmax) -> _Softmax:
        blocks = lax.dynamic_slice(batch.tables, (seq, chunk * chunk_blocks), (1, chunk_blocks))
        pages = batch.pool_layer.at[blocks[0]].get(mode="clip")
        keys = to_float32(pages.reshape(chunk_tokens, -1)[:, :key_dim])
        kv_positions = chunk * chunk_tokens + jnp.arange(chunk_tokens)
        # A weight of 0 does not silence a NaN.
        keys = jnp.where((kv_positions < end)[:, None], keys, 0.0)
        visible = kv_positions <= positions
        scores = jnp.where(visible, _dot(q, keys.T), _LOWEST)
        largest = jnp.maximum(state.largest, scores.max(axis=1))
        weights = jnp.where(visible, jnp.exp(scores - largest[:, None]), 0.0)
        shrink = jnp.exp(state.largest - largest)
        return _Softmax(
            largest,
            state.total * shrink + weights.sum(axis=1),
            state.weighted * shrink[:, None] + _dot(weights, keys[:, : batch.latent_dim]),
        )

    rows = tile * num_heads
    empty = _Softmax(
        jnp.full(rows, _LOWEST, jnp.float32),
        jnp.zeros(rows, jnp.float32),
        jnp.zeros((rows, batch.latent_dim), jnp.float32),
    )
    return lax.fori_loop(0, -(-end // chunk_tokens), add_chunk, empty)


def _dot(a: jax.Array, b: jax.Array) -> jax.Array:
    # Accelerators would round float32 operands otherwise.
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)


def write_latent(
    pool_layer: jax.Array, latent: jax.Array, k_rope: jax.Array, slot_mapping: jax.Array
) -> jax.Array:
    """One scatter of whole rows. Arguments as in `pallas_kernels.write_latent`, checked."""
    num_blocks, block_size, width = pool_layer.shape
    fill = width - latent.shape[1] - k_rope.shape[1]
    dtype = jnp.promote_types(latent.dtype, k_rope.dtype)
    rows = jnp.concatenate([latent.astype(dtype), k_rope.astype(dtype)], axis=1)
    rows = to_storage(jnp.pad(rows, ((0, 0), (0, fill))), pool_layer.dtype)
    # A negative index would wrap to the pool's end; past the end is dropped.
    block_ids = jnp.where(slot_mapping < 0, num_blocks, slot_mapping // block_size)
    return pool_layer.at[block_ids, slot_mapping % block_size].set(rows, mode="drop")
