"""The Pallas TPU kernel of latent attention: one walk over (sequence, query rows) x KV blocks.

    plan      items; block-table rows   HBM -> SMEM ring    15 table rows ahead of the fetch
    fetch     pages, query rows         HBM -> VMEM rings   num_buffers - 1 blocks ahead
    compute   q . c^T -> softmax -> p . c                   one block a step
    write     finished tiles            VMEM -> HBM         two in flight

    step n        |  compute block n         |  compute block n + 1     |
    DMA engines   |  pages of n + 1 .. n + num_buffers - 1, across the borders of sequences

A work item is up to `item_tokens` query tokens of one sequence with all their heads: one token for
a decode, so that prefill chunks and decodes are one list. All scalar work is done here, between
the steps; nothing runs before the kernel.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.mla_tpu_pipeline import (
    COMPUTE_BLOCK,
    COMPUTE_ITEM,
    FETCH_STEP,
    STATE_WORDS,
    TABLE_RING_ROWS,
    Fetch,
    Plan,
    Tiling,
    Write,
    ceil_div,
    ring_place,
)
from pallas_kernels.mla_tpu_softmax import (
    SoftmaxRefs,
    add_block,
    aligned_rows,
    clear_tokens,
    cleared_end,
    finished_rows,
    part_size,
    split,
    split_queries,
)


def mla_kernel(
    kv_lens: Any,  # SMEM int32[S]
    query_starts: Any,  # SMEM int32[S + 1]
    num_seqs: Any,  # SMEM int32[1]
    q_hbm: Any,  # HBM [T, Hq, width]: latent, rotated part, zeros
    pool_hbm: Any,  # HBM [num_blocks, block_size, width]
    tables_hbm: Any,  # HBM int32[S, B], B a multiple of 128
    out_hbm: Any,  # HBM [T, Hq, latent_dim]
    lse_hbm: Any,  # HBM float32[T, Hq, 128], equal in all lanes; or None
    state: Any,  # SMEM int32[STATE_WORDS]
    items: Any,  # SMEM int32[ITEM_RING * ITEM_WORDS]
    out_tokens: Any,  # SMEM int32[OUT_RING_TILES + 1]: tokens of the tile in each slot; count
    table: Any,  # SMEM int32[TABLE_RING_ROWS * 128]
    q: Any,  # VMEM [num_buffers, item_tokens, Hq, width]
    kv: Any,  # VMEM [num_buffers, block_tokens, width]
    largest: Any,  # VMEM float32[item_tokens * Hq, 128]: maximal score, equal in all lanes
    total: Any,  # VMEM float32[item_tokens * Hq, 128]: softmax sum, equal in all lanes
    weighted: Any,  # VMEM float32[item_tokens * Hq, latent_dim]: sum of weights times latents
    scores: Any,  # VMEM float32[tile_tokens * Hq, block_tokens]
    weights: Any,  # VMEM bfloat16[parts, tile_tokens * Hq, block_tokens]
    peaks: Any,  # VMEM float32[tile_tokens * Hq, 128]: maximal score by lane
    shrink: Any,  # VMEM float32[tile_tokens * Hq, 128]: factor of the state before a step's block
    products: Any,  # VMEM float32[tile_tokens * Hq, latent_dim], sums of products; or None
    q_parts: Any,  # VMEM bfloat16[parts, item_tokens * Hq, width]
    kv_parts: Any,  # VMEM bfloat16[3, block_tokens, width] of a float32 pool, else None
    out: Any,  # VMEM [OUT_RING_TILES, tile_tokens, Hq, latent_dim]
    lse: Any,  # VMEM float32[OUT_RING_TILES, tile_tokens, Hq, 128], or None
    table_sems: Any,  # DMA semaphores [TABLE_RING_ROWS]
    q_sems: Any,  # DMA semaphores [num_buffers]
    kv_sems: Any,  # DMA semaphores [num_buffers]
    out_sems: Any,  # DMA semaphores [OUT_RING_TILES]
    *,
    tiling: Tiling,
    scale: float,
) -> None:
    """Softmax of scale * q . c over each row's visible tokens, times c's first latent_dim lanes.

    Takes Hq a multiple of 16 (of 8 with float32 q), block_size a multiple of 16 (of 8 in a float32
    pool), width and latent_dim multiples of 128. Reads from HBM each query row once, and each page
    of a sequence once an item; touches no page beyond the item's last visible token. Writes each
    output row once; rows past query_starts[num_seqs] as zeros (lse -inf).
    """
    for word in range(STATE_WORDS):
        state[word] = 0
    plan = Plan(kv_lens, query_starts, num_seqs[0], state, items, tiling)
    fetch = Fetch(plan, q_hbm, pool_hbm, tables_hbm, table, q, kv, table_sems, q_sems, kv_sems)
    write = Write(out_hbm, lse_hbm, out, lse, out_tokens, out_sems)
    num_heads = q.shape[2]
    refs = SoftmaxRefs(largest, total, weighted, scores, weights, peaks, shrink, products)
    plan.begin()
    write.begin()
    lax.fori_loop(0, TABLE_RING_ROWS - 1, lambda _, __: fetch.start_table_row(), None)
    lax.fori_loop(0, tiling.num_buffers - 1, lambda _, __: fetch.start_block(), None)

    def step(index: Any) -> Any:
        fetch.start_block()  # into the buffer that the step before has read
        block, item_index = state[COMPUTE_BLOCK], state[COMPUTE_ITEM]
        item = plan.item(item_index)
        base, slot = block * tiling.block_tokens, ring_place(index, tiling.num_buffers)
        q_slot, block_kv = ring_place(item_index, tiling.num_buffers), kv.at[slot]
        is_last = base + tiling.block_tokens >= item.kv_end

        @pl.when(block == 0)
        def _():
            fetch.query_copy(item_index, item).wait()
            split_queries(q_parts, q.at[q_slot], item.num_tokens)

        fetch.wait_pages(slot, item.kv_end - base)

        part_tokens = part_size(num_heads, tiling.block_tokens, tiling.part_scores)

        @pl.when(item.kv_end - base < tiling.block_tokens)
        def _():
            clear_tokens(block_kv, item.kv_end - base, part_tokens)

        if kv_parts is not None:
            end = cleared_end(item.kv_end - base, part_tokens)
            split(kv_parts, block_kv, jnp.minimum(end, tiling.block_tokens))

        _for_each_tile(
            item.num_tokens,
            tiling,
            lambda token, num_tokens: add_block(
                refs,
                q_parts.at[:, aligned_rows(token * num_heads, num_tokens * num_heads)],
                kv.at[pl.ds(slot, 1)] if kv_parts is None else kv_parts,
                num_tokens=num_tokens,
                first_row=token * num_heads,
                base=base,
                position=item.kv_end - item.num_tokens + token,
                kv_end=item.kv_end,
                tiling=tiling,
                scale=scale,
            ),
        )

        @pl.when(is_last)
        def _():
            _for_each_tile(
                item.num_tokens,
                tiling,
                lambda token, num_tokens: write.start(
                    item.row + token,
                    jnp.minimum(item.num_tokens - token, num_tokens),
                    num_tokens,
                    lambda first, count: finished_rows(
                        refs, aligned_rows(token * num_heads + first, count)
                    ),
                ),
            )

        state[COMPUTE_BLOCK] = jnp.where(is_last, 0, block + 1)
        state[COMPUTE_ITEM] = item_index + is_last.astype(jnp.int32)
        return index + 1

    lax.while_loop(lambda index: index < state[FETCH_STEP], step, jnp.int32(0))
    write.finish(query_starts[num_seqs[0]])


def _for_each_tile(num_tokens: Any, tiling: Tiling, body: Any) -> None:
    """Calls body(first token, tokens of the tile: static) on an item's tiles."""
    tile = tiling.tile_tokens
    if tile == 1:
        lax.fori_loop(0, num_tokens, lambda token, _: body(token, 1), None)
        return

    # A decode's rows alone are fewer than a tile's.
    @pl.when(num_tokens == 1)
    def _():
        body(0, 1)

    @pl.when(num_tokens > 1)
    def _():
        lax.fori_loop(
            0, ceil_div(num_tokens, tile), lambda index, _: body(index * tile, tile), None
        )
