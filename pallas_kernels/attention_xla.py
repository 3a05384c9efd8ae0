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

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention_plan import (
    PREFILL_CHUNK_TOKENS,
    AttentionPlan,
    blocks_per_chunk,
)
from pallas_kernels.pool_storage import PoolLayout, pool_layout, to_float32, token_rows

# Stands for the maximum over no score: small, and finite, so that differences stay numbers.
_LOWEST = -1e30


class _Softmax(NamedTuple):
    """Running softmax of some rows; leading axes as the loop that carries it needs them."""

    largest: jax.Array  # float32[...]: maximum of the scores seen
    total: jax.Array  # float32[...]: sum of exp(score - largest)
    weighted: jax.Array  # float32[..., D]: sum of exp(score - largest) * V


class _Rows(NamedTuple):
    """Finished rows; leading axes as in `_Softmax`."""

    out: jax.Array  # float32[..., D]: 0 for rows that see no token
    lse: jax.Array | None  # float32[...]: -inf for rows that see no token; None if not asked for


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
    causal: bool,
    return_lse: bool,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attention of q [T, Hq, D] over the items of `plan`; other arguments checked, as in the op."""
    num_rows, num_q_heads, head_dim = q.shape
    layout = pool_layout(pool_layer, head_dim)
    num_kv_heads = layout.num_kv_heads
    grouped = q.astype(jnp.float32).reshape(num_rows, num_kv_heads, -1, head_dim) * scale
    if k_scale is not None:
        grouped *= k_scale.astype(jnp.float32)[:, None, None]
    limits: dict[str, Any] = dict(sliding_window=sliding_window, soft_cap=soft_cap)
    if sinks is not None:
        sinks = sinks.astype(jnp.float32).reshape(num_kv_heads, -1)

    state = _decodes(grouped, pool_layer, layout, plan, **limits)
    decoded = _finish(state, sinks, return_lse)
    others = _blank_rows(grouped.shape, return_lse)
    if not plan.decode_only:
        others = _prefills(
            grouped, pool_layer, layout, plan, sinks, **limits, causal=causal, return_lse=return_lse
        )
    is_decode = plan.row_ranks >= 0

    def pick(decodes: jax.Array, prefills: jax.Array) -> jax.Array:
        mask = is_decode.reshape(-1, *(1,) * (prefills.ndim - 1))
        return jnp.where(mask, decodes[plan.row_ranks], prefills[:num_rows])

    out, lse = jax.tree.map(pick, decoded, others)
    if v_scale is not None:
        out *= v_scale.astype(jnp.float32)[:, None, None]
    out = out.reshape(q.shape).astype(q.dtype)
    return (out, lse.reshape(num_rows, num_q_heads)) if return_lse else out


def _empty_softmax(shape: tuple[int, ...]) -> _Softmax:
    """The state of rows [..., D] that have seen no token."""
    return _Softmax(
        jnp.full(shape[:-1], _LOWEST, jnp.float32),
        jnp.zeros(shape[:-1], jnp.float32),
        jnp.zeros(shape, jnp.float32),
    )


def _finish(state: _Softmax, sinks: jax.Array | None, return_lse: bool) -> _Rows:
    """The rows of a finished state; a sink [Hkv, G] takes weight and gives no value."""
    total, weighted = state.total, state.weighted
    if sinks is not None:
        largest = jnp.maximum(state.largest, sinks)
        correction = jnp.exp(state.largest - largest)
        total = total * correction + jnp.exp(sinks - largest)
        weighted = weighted * correction[..., None]
    out = weighted / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)[..., None]
    return _Rows(out, state.largest + jnp.log(state.total) if return_lse else None)


def _blank_rows(shape: tuple[int, ...], return_lse: bool) -> _Rows:
    """Rows [..., D] that see no token."""
    lse = jnp.full(shape[:-1], -jnp.inf, jnp.float32) if return_lse else None
    return _Rows(jnp.zeros(shape, jnp.float32), lse)


def _capped(scores: jax.Array, soft_cap: float | None) -> jax.Array:
    return scores if soft_cap is None else soft_cap * jnp.tanh(scores / soft_cap)


# --- decodes: one query row a sequence --------------------------------------------------------


def _decodes(
    grouped: jax.Array,
    pool_layer: jax.Array,
    layout: PoolLayout,
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
        k, v = _gather_blocks(pool_layer, layout, items(plan.item_blocks))
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

    empty = _empty_softmax((max_seqs + group, *grouped.shape[1:]))
    return lax.fori_loop(0, plan.num_decode_groups, add_group, empty)


def _gather_blocks(
    pool_layer: jax.Array, layout: PoolLayout, block_ids: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """K and V of int32[..., B] blocks, each float32[..., B, Hkv, block_size, D]."""
    one_half = (layout.num_kv_heads, layout.rows, layout.width)
    halves = pool_layer.reshape(-1, math.prod(one_half))

    def tokens_of(ids: jax.Array) -> jax.Array:
        return token_rows(_gather_rows(halves, ids).reshape(*ids.shape, *one_half), layout)

    return tokens_of(2 * block_ids), tokens_of(2 * block_ids + 1)


def _gather_heads(
    pool_layer: jax.Array, layout: PoolLayout, block_ids: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """K and V of int32[B] blocks, each float32[Hkv, B * block_size, D]."""
    num_kv_heads = layout.num_kv_heads
    pages = pool_layer.reshape(-1, layout.rows * layout.width)
    page_ids = block_ids * 2 * num_kv_heads + jnp.arange(num_kv_heads)[:, None]

    def tokens_of(ids: jax.Array) -> jax.Array:
        rows = _gather_rows(pages, ids).reshape(*ids.shape, layout.rows, layout.width)
        return token_rows(rows, layout).reshape(num_kv_heads, -1, layout.head_dim)

    return tokens_of(page_ids), tokens_of(page_ids + num_kv_heads)


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
    layout: PoolLayout,
    plan: AttentionPlan,
    sinks: jax.Array | None,
    *,
    sliding_window: int | None,
    soft_cap: float | None,
    causal: bool,
    return_lse: bool,
) -> _Rows:
    """The prefill rows, blank rows elsewhere: leading axes [T + tile rows, Hkv, G]."""
    num_rows, tile = grouped.shape[0], plan.prefill_tile_rows
    chunk_blocks = blocks_per_chunk(PREFILL_CHUNK_TOKENS, plan.block_size)
    chunk_tokens = chunk_blocks * plan.block_size
    padded_q = jnp.pad(grouped, ((0, tile), (0, 0), (0, 0), (0, 0)))

    def one_tile(index: jax.Array, rows: _Rows) -> _Rows:
        first_row, position = plan.tile_rows[index], plan.tile_positions[index]
        num_tile_rows, kv_end = plan.tile_num_rows[index], plan.tile_kv_ends[index]
        table = plan.prefill_tables[plan.tile_seqs[index]]
        q_tile = lax.dynamic_slice_in_dim(padded_q, first_row, tile).transpose(1, 2, 0, 3)
        positions = position + jnp.arange(tile)[:, None]

        def add_chunk(chunk: jax.Array, state: _Softmax) -> _Softmax:
            blocks = lax.dynamic_slice_in_dim(table, chunk * chunk_blocks, chunk_blocks)
            k, v = _gather_heads(pool_layer, layout, blocks)
            kv_positions = chunk * chunk_tokens + jnp.arange(chunk_tokens)
            in_reach = kv_positions < kv_end
            v = jnp.where(in_reach[:, None], v, 0.0)
            visible = kv_positions <= positions if causal else in_reach
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

        state = _empty_softmax(q_tile.shape)
        first_chunk = 0
        if sliding_window is not None:
            first_chunk = jnp.maximum(position - sliding_window + 1, 0) // chunk_tokens
        state = lax.fori_loop(first_chunk, -(-kv_end // chunk_tokens), add_chunk, state)

        def put(into: jax.Array, of_tile: jax.Array) -> jax.Array:
            of_tile = jnp.moveaxis(of_tile, 2, 0)
            # Rows past the tile's end belong to others.
            is_own = (jnp.arange(tile) < num_tile_rows).reshape(-1, *(1,) * (into.ndim - 1))
            others = lax.dynamic_slice_in_dim(into, first_row, tile)
            own = jnp.where(is_own, of_tile, others)
            return lax.dynamic_update_slice_in_dim(into, own, first_row, axis=0)

        sinks_of_rows = None if sinks is None else sinks[..., None]
        return jax.tree.map(put, rows, _finish(state, sinks_of_rows, return_lse))

    rows = _blank_rows((num_rows + tile, *grouped.shape[1:]), return_lse)
    if num_rows < 2:
        return rows
    return lax.fori_loop(0, plan.num_prefill_tiles, one_tile, rows)
