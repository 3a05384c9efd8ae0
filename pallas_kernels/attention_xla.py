"""WIP docstring."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention_plan import (
    DECODE_CHUNK_TOKENS,
    DECODE_ITEMS_PER_GROUP,
    PREFILL_CHUNK_TOKENS,
    PREFILL_TILE_ROWS,
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
    num_rows, num_q_heads, head_dim = q.shape
    num_kv_heads = pool_layer.shape[1] // 2
    grouped = q.astype(jnp.float32).reshape(num_rows, num_kv_heads, -1, head_dim) * scale
    if k_scale is not None:
        grouped *= k_scale.astype(jnp.float32)[:, None, None]
    limits = dict(sliding_window=sliding_window, soft_cap=soft_cap)
    if sinks is not None:
        sinks = sinks.astype(jnp.float32).reshape(num_kv_heads, -1)

    out = _prefills(grouped, pool_layer, plan, sinks, **limits)
    decoded = _finish(_decodes(grouped, pool_layer, plan, **limits), sinks)
    ranks = plan.row_ranks
    out = jnp.where(ranks[:, None, None, None] >= 0, decoded[ranks], out[:num_rows])
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
    max_seqs, group = plan.rank_rows.shape[0], DECODE_ITEMS_PER_GROUP
    ranked_q = grouped[plan.rank_rows]  # [S, Hkv, G, D]

    def add_group(index: jax.Array, state: _Softmax) -> _Softmax:
        items = lambda field: lax.dynamic_slice_in_dim(field, index * group, group)
        ranks, starts, kv_lens = map(items, (plan.item_ranks, plan.item_starts, plan.item_kv_lens))
        k, v, valid = _decode_chunks(
            pool_layer, items(plan.item_blocks), starts, kv_lens, sliding_window
        )
        scores = jnp.einsum("ihgd,ihcd->ihgc", ranked_q[ranks], k)
        scores = jnp.where(valid[:, None, None], _capped(scores, soft_cap), _LOWEST)

        # The items of a group belong to neighbouring ranks: merge them in a window of the state.
        first = ranks[0]
        local = ranks - first
        old = jax.tree.map(lambda a: lax.dynamic_slice_in_dim(a, first, group), state)
        owns = local[None, :] == jnp.arange(group)[:, None]  # [rank, item]
        peaks = jnp.where(owns[..., None, None], scores.max(axis=-1)[None], _LOWEST)
        largest = jnp.maximum(old.largest, peaks.max(axis=1))
        weights = jnp.exp(scores - largest[local][..., None])
        weights = jnp.where(valid[:, None, None], weights, 0.0)
        correction = jnp.exp(old.largest - largest)
        totals = jnp.einsum("ri,ihg->rhg", owns.astype(jnp.float32), weights.sum(axis=-1))
        values = jnp.einsum("ihgc,ihcd->ihgd", weights, v)
        values = jnp.einsum("ri,ihgd->rhgd", owns.astype(jnp.float32), values)
        new = _Softmax(
            largest,
            old.total * correction + totals,
            old.weighted * correction[..., None] + values,
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


def _decode_chunks(
    pool_layer: jax.Array,
    item_blocks: jax.Array,
    starts: jax.Array,
    kv_lens: jax.Array,
    sliding_window: int | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """K and V of some items, float32[I, Hkv, C, D], and bool[I, C]: which tokens count."""
    num_items, chunk_blocks = item_blocks.shape
    positions = starts[:, None] + jnp.arange(chunk_blocks * pool_layer.shape[2])
    valid = positions < kv_lens[:, None]
    if sliding_window is not None:
        valid &= positions >= kv_lens[:, None] - sliding_window
    k, v = _gather(pool_layer, item_blocks)
    # A weight of 0 does not silence a NaN.
    return k, jnp.where(valid[:, None, :, None], v, 0.0), valid


def _gather(pool_layer: jax.Array, block_ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """K and V of the chunks int32[..., C blocks], each float32[..., Hkv, C * block_size, D]."""
    _, two_kv_heads, block_size, head_dim = pool_layer.shape
    by_head = pool_layer.reshape(-1, block_size, head_dim)
    heads = jnp.arange(two_kv_heads)[:, None]
    pages = to_float32(by_head[block_ids[..., None, :] * two_kv_heads + heads])
    shape = (*block_ids.shape[:-1], 2, two_kv_heads // 2, -1, head_dim)
    kv = pages.reshape(*shape[:-2], block_ids.shape[-1] * block_size, head_dim)
    return kv[..., 0, :, :, :], kv[..., 1, :, :, :]


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
    tile = PREFILL_TILE_ROWS
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
            k, v = _gather(pool_layer, blocks)
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
                state.weighted * correction[..., None]
                + jnp.einsum("hgrc,hcd->hgrd", weights, v),
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
