"""Ragged paged attention in plain XLA: for CPUs, and for GPUs without a kernel.

**What it reads.** K and V of each chunk of a live sequence once a query (decode) or once a tile of
query rows (prefill), whatever the bucket. Padding sequences, and chunks that no query sees (in the
future, before the window, past the end), cost nothing; the last chunk of a sequence and the last
group of items are filled up with reads of the null block. The loops' trip counts come from the
plan on device, so one compiled program serves every batch of its bucket.

**Decodes** run as groups of (sequence, 64-token chunk) items, up to 32 an iteration: an iteration
costs a few dozen dispatches, too dear for one item. Items of a group belong to neighbouring
decodes and are merged by log-sum-exp in a window of the running state, so that neither the
batch's size nor one long sequence among short ones adds cost.

**Prefills** run as tiles of query rows; each walks its KV chunks with the running state in
registers or cache (FlashAttention), and stops where causality does.

**Why these forms** (CPU milliseconds for 30 layers, 32 sequences of 192 tokens, 9 query / 3 KV
heads of 64, float32, jax 0.12 / 0.10.2, on two cores shared with other work):
- core of the loop alone, 8 whole sequences an iteration. Gather of whole heads, K and V sliced out
  of it: 88 / 84. K and V gathered apart, since the slices were copies: 71 / 68; the same with
  multiply and reduce instead of dots: 77 / 72, and with sums unrolled over tokens: 74 / 114.
  Rows as wide as half a block, which XLA copies like memcpy: 47 / 49.
- all of it, 81 / 81 with one dot a block and 65-75 with one dot an item and KV head.
- V must be cleaned of NaN, which costs another 8 to 10: its gather is then no plain copy.
- elapsed, two cores nearly free: 44 to 50 at 32 x 192, 240 to 260 at 32 x 1,024, and 47
  for one sequence of 2,000 and 31 of 100 tokens against 48 for as many tokens evenly spread.
- tiles of 64 rows: 4 prompts of 128 tokens 133 / 123 with chunks of 128, 215 / 196 with 256.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention_plan import (
    PREFILL_CHUNK_TOKENS,
    AttentionPlan,
    blocks_per_chunk,
)
from pallas_kernels.pool_storage import to_float32

# Stands for the maximum over no score: small, and finite, so that differences stay numbers.
_LOWEST = -1e30


class _Softmax(NamedTuple):
    """Running softmax of some rows; leading axes as the loop that carries it needs them."""

    largest: jax.Array  # float32[...]: maximum of the scores seen
    total: jax.Array  # float32[...]: sum of exp(score - largest)
    weighted: jax.Array  # float32[..., D]: sum of exp(score - largest) * V


def ragged_paged_attention(
    q: jax.Array,
    pool_layer: jax.Array,
    plan: AttentionPlan,
    *,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    sinks: jax.Array | None,
    k_scale: jax.Array | None,
    v_scale: jax.Array | None,
) -> jax.Array:
    """Attention of q [T, Hq, D] over the items of `plan`; other arguments checked, as in the op."""
    num_rows, _, head_dim = q.shape
    num_kv_heads = pool_layer.shape[1] // 2
    grouped = q.astype(jnp.float32).reshape(num_rows, num_kv_heads, -1, head_dim) * scale
    if k_scale is not None:
        grouped *= k_scale.astype(jnp.float32)[:, None, None]
    limits: dict[str, Any] = dict(sliding_window=sliding_window, soft_cap=soft_cap)
    if sinks is not None:
        sinks = sinks.astype(jnp.float32).reshape(num_kv_heads, -1)

    decoded = _finish(_decodes(grouped, pool_layer, plan, **limits), sinks)
    others = jnp.zeros_like(grouped)
    if not plan.decode_only:
        others = _prefills(grouped, pool_layer, plan, sinks, **limits)[:num_rows]
    ranks = plan.row_ranks
    out = jnp.where(ranks[:, None, None, None] >= 0, decoded[ranks], others)
    if v_scale is not None:
        out *= v_scale.astype(jnp.float32)[:, None, None]
    return out.reshape(q.shape).astype(q.dtype)


def _finish(state: _Softmax, sinks: jax.Array | None) -> jax.Array:
    """The rows' outputs, [..., D]; a sink [Hkv, G] takes weight and gives no value."""
    total, weighted = state.total, state.weighted
    if sinks is not None:
        largest = jnp.maximum(state.largest, sinks)
        correction = jnp.exp(state.largest - largest)
        total = total * correction + jnp.exp(sinks - largest)
        weighted = weighted * correction[..., None]
    return weighted / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)[..., None]


def _capped(scores: jax.Array, soft_cap: float | None) -> jax.Array:
    return scores if soft_cap is None else soft_cap * jnp.tanh(scores / soft_cap)


# --- decodes: one query row a sequence --------------------------------------------------------


def _decodes(
    grouped: jax.Array,
    pool_layer: jax.Array,
    plan: AttentionPlan,
    *,
    sliding_window: int | None,
    soft_cap: float | None,
) -> _Softmax:
    """Softmax state of each decode by rank, leading axes [S + items a group, Hkv, G]."""
    max_seqs, group = plan.rank_rows.shape[0], plan.decode_items_per_group
    ranked_q = grouped[plan.rank_rows]  # [S, Hkv, G, D]

    def add_group(index: jax.Array, state: _Softmax) -> _Softmax:
        items = lambda field: lax.dynamic_slice_in_dim(field, index * group, group)
        ranks, starts, kv_lens = map(items, (plan.item_ranks, plan.item_starts, plan.item_kv_lens))
        # Axes: item, block, KV head, query head of the KV head, token of the block, head_dim.
        k, v = _gather_blocks(pool_layer, items(plan.item_blocks))
        offsets = jnp.arange(k.shape[1] * k.shape[3]).reshape(k.shape[1], k.shape[3])
        positions = starts[:, None, None] + offsets
        valid = positions < kv_lens[:, None, None]
        if sliding_window is not None:
            valid &= positions >= (kv_lens - sliding_window)[:, None, None]
        # A weight of 0 does not silence a NaN.
        v = jnp.where(valid[:, :, None, :, None], v, 0.0)
        valid = valid[:, :, None, None]
        scores = jnp.einsum("ihgd,ibhtd->ibhgt", ranked_q[ranks], k)
        scores = jnp.where(valid, _capped(scores, soft_cap), _LOWEST)

        # The items of a group belong to neighbouring ranks: merge them in a window of the state.
        first = ranks[0]
        local = ranks - first
        old = jax.tree.map(lambda a: lax.dynamic_slice_in_dim(a, first, group), state)
        owns = local[None, :] == jnp.arange(group)[:, None]  # [rank, item]
        peaks = jnp.where(owns[..., None, None], scores.max(axis=(1, 4)), _LOWEST)
        largest = jnp.maximum(old.largest, peaks.max(axis=1))
        weights = jnp.exp(scores - largest[local][:, None, :, :, None])
        weights = jnp.where(valid, weights, 0.0)
        values = jnp.einsum("ibhgt,ibhtd->ihgd", weights, v)
        owned = owns.astype(jnp.float32)
        correction = jnp.exp(old.largest - largest)
        new = _Softmax(
            largest,
            old.total * correction + jnp.einsum("ri,ihg->rhg", owned, weights.sum(axis=(1, 4))),
            old.weighted * correction[..., None] + jnp.einsum("ri,ihgd->rhgd", owned, values),
        )
        return jax.tree.map(
            lambda a, b: lax.dynamic_update_slice_in_dim(a, b, first, 0), state, new
        )

    shape = (max_seqs + group, *grouped.shape[1:3])
    empty = _Softmax(
        jnp.full(shape, _LOWEST, jnp.float32),
        jnp.zeros(shape, jnp.float32),
        jnp.zeros((*shape, grouped.shape[3]), jnp.float32),
    )
    return lax.fori_loop(0, plan.num_decode_groups, add_group, empty)


def _gather_blocks(pool_layer: jax.Array, block_ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """K and V of int32[..., B] blocks, each float32[..., B, Hkv, block_size, D]."""
    _, two_kv_heads, block_size, head_dim = pool_layer.shape
    halves = pool_layer.reshape(-1, two_kv_heads // 2 * block_size * head_dim)
    shape = (*block_ids.shape, two_kv_heads // 2, block_size, head_dim)
    return (
        _gather_rows(halves, 2 * block_ids).reshape(shape),
        _gather_rows(halves, 2 * block_ids + 1).reshape(shape),
    )


def _gather_heads(pool_layer: jax.Array, block_ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """K and V of int32[B] blocks, each float32[Hkv, B * block_size, D]."""
    _, two_kv_heads, block_size, head_dim = pool_layer.shape
    pages = pool_layer.reshape(-1, block_size * head_dim)
    page_ids = block_ids * two_kv_heads + jnp.arange(two_kv_heads // 2)[:, None]
    shape = (two_kv_heads // 2, -1, head_dim)
    return (
        _gather_rows(pages, page_ids).reshape(shape),
        _gather_rows(pages, page_ids + two_kv_heads // 2).reshape(shape),
    )


def _gather_rows(table: jax.Array, row_ids: jax.Array) -> jax.Array:
    """Rows of table [R, W] as float32[..., W]. Wide rows make XLA's gather a plain copy."""
    dimensions = lax.GatherDimensionNumbers(
        offset_dims=(1,), collapsed_slice_dims=(0,), start_index_map=(0,)
    )
    rows = lax.gather(
        table,
        row_ids.reshape(-1, 1),
        dimensions,
        slice_sizes=(1, table.shape[1]),
        mode=lax.GatherScatterMode.CLIP,
    )
    return to_float32(rows).reshape(*row_ids.shape, table.shape[1])


# --- prefills: tiles of query rows ------------------------------------------------------------


def _prefills(
    grouped: jax.Array,
    pool_layer: jax.Array,
    plan: AttentionPlan,
    sinks: jax.Array | None,
    *,
    sliding_window: int | None,
    soft_cap: float | None,
) -> jax.Array:
    """float32[T + tile rows, Hkv, G, D]: the prefill rows' outputs, zeros elsewhere."""
    num_rows, num_kv_heads, heads_per_kv, head_dim = grouped.shape
    tile = plan.prefill_tile_rows
    chunk_blocks = blocks_per_chunk(PREFILL_CHUNK_TOKENS, plan.block_size)
    chunk_tokens = chunk_blocks * plan.block_size
    padded_q = jnp.pad(grouped, ((0, tile), (0, 0), (0, 0), (0, 0)))

    def one_tile(index: jax.Array, out: jax.Array) -> jax.Array:
        first_row, position = plan.tile_rows[index], plan.tile_positions[index]
        num_tile_rows = plan.tile_num_rows[index]
        table = plan.prefill_tables[plan.tile_seqs[index]]
        q_tile = lax.dynamic_slice_in_dim(padded_q, first_row, tile).transpose(1, 2, 0, 3)
        positions = position + jnp.arange(tile)[:, None]
        last = position + num_tile_rows - 1

        def add_chunk(chunk: jax.Array, state: _Softmax) -> _Softmax:
            blocks = lax.dynamic_slice_in_dim(table, chunk * chunk_blocks, chunk_blocks)
            k, v = _gather_heads(pool_layer, blocks)
            kv_positions = chunk * chunk_tokens + jnp.arange(chunk_tokens)
            v = jnp.where((kv_positions <= last)[:, None], v, 0.0)
            visible = kv_positions <= positions
            if sliding_window is not None:
                visible &= kv_positions > positions - sliding_window
            scores = _capped(jnp.einsum("hgrd,hcd->hgrc", q_tile, k), soft_cap)
            scores = jnp.where(visible, scores, _LOWEST)
            largest = jnp.maximum(state.largest, scores.max(axis=-1))
            weights = jnp.where(visible, jnp.exp(scores - largest[..., None]), 0.0)
            correction = jnp.exp(state.largest - largest)
            return _Softmax(
                largest,
                state.total * correction + weights.sum(axis=-1),
                state.weighted * correction[..., None] + jnp.einsum("hgrc,hcd->hgrd", weights, v),
            )

        shape = (num_kv_heads, heads_per_kv, tile)
        state = _Softmax(
            jnp.full(shape, _LOWEST, jnp.float32),
            jnp.zeros(shape, jnp.float32),
            jnp.zeros((*shape, head_dim), jnp.float32),
        )
        first_chunk = 0
        if sliding_window is not None:
            first_chunk = jnp.maximum(position - sliding_window + 1, 0) // chunk_tokens
        state = lax.fori_loop(first_chunk, last // chunk_tokens + 1, add_chunk, state)
        rows = _finish(state, None if sinks is None else sinks[..., None]).transpose(2, 0, 1, 3)
        # Rows past the tile's end belong to others.
        is_own = (jnp.arange(tile) < num_tile_rows)[:, None, None, None]
        others = lax.dynamic_slice_in_dim(out, first_row, tile)
        return lax.dynamic_update_slice_in_dim(
            out, jnp.where(is_own, rows, others), first_row, axis=0
        )

    out = jnp.zeros((num_rows + tile, num_kv_heads, heads_per_kv, head_dim), jnp.float32)
    if num_rows < 2:
        return out
    return lax.fori_loop(0, plan.num_prefill_tiles, one_tile, out)
