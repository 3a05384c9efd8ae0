"""A prefill item in small steps: what is done to its values first, and products in loops.

    clean      zeros where an item lacks tokens     turn V     128 rows of one head at a time

    scores     step step step ...     peak, as a carry
    weights    step step step ...     their sum, as a carry
    O += V^T P  part part part ...     some rows of V^T, 128 tokens

`attention_tpu_prefill` has straight-line code for several heads. Where that takes more registers
than there are (all of v4, float32 everywhere), one matrix after the other goes through the loops
of `add_in_steps` instead. Their trip counts are known at run time only, so that the compiler keeps
them loops; everything between the steps lies in scratch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.attention_tpu_math import LOWEST, cleaned, scores_of, weigh
from pallas_kernels.attention_tpu_pipeline import Buffers, Item, divide
from pallas_kernels.attention_tpu_spec import LANES, SUBLANES, AttentionSpec, register_rows

# Rows of K and V in a piece: blocks are computed on in whole pieces.
PIECE_ROWS = 128
# Rows of V^T in a part of a product.
_VALUE_ROWS = 64


def clean_item(spec: AttentionSpec, buffers: Buffers, item: Item, slot: Any) -> None:
    """Zeros what no weight of 0 silences in the pieces that are computed on: values that did not
    come from HBM or stand past the item's end, and a key in a row with such a one.
    """
    if not spec.needs_clean_values:
        return
    rows = register_rows(spec)
    tile_tokens = rows * spec.pool.tokens_per_row
    piece_tokens = PIECE_ROWS * spec.pool.tokens_per_row
    tiles_a_piece = PIECE_ROWS // rows
    first_head = 0 if spec.needs_clean_keys else spec.pool.num_kv_heads
    num_heads = 2 * spec.pool.num_kv_heads - first_head
    first_token = item.first_page * spec.pool.block_size

    def clean(index, carry):
        tile = divide(index, num_heads)
        head = first_head + index - tile * num_heads
        where = pl.ds(pl.multiple_of(tile * rows, rows), rows)
        start = tile * tile_tokens
        stored = buffers.kv[slot, head, where]
        kept = cleaned(spec, stored, first_token - start, item.visible_end - start)
        buffers.kv[slot, head, where] = kept.astype(stored.dtype)
        return carry

    def clean_tiles(first, end):
        lax.fori_loop(first * num_heads, end * num_heads, clean, 0)

    if spec.sliding_window is not None:
        first_tile = divide(first_token, piece_tokens) * tiles_a_piece
        clean_tiles(first_tile, divide(first_token + tile_tokens - 1, tile_tokens))
    end = jnp.minimum(item.visible_end, spec.sizes.prefill_block_tokens)
    end_piece = divide(end + piece_tokens - 1, piece_tokens)
    clean_tiles(divide(end, tile_tokens), end_piece * tiles_a_piece)


def turn_values(spec: AttentionSpec, buffers: Buffers, values: Any, slot: Any) -> None:
    """Turns a block's values into `values` [Hkv, width, block rows], once for all chunks."""
    num_kv_heads, block_rows = values.shape[0], values.shape[2]
    num_rows = PIECE_ROWS if spec.sizes.prefill_step_rows else block_rows
    num_lanes = LANES if spec.sizes.prefill_step_rows else values.shape[1]
    pieces = block_rows // num_rows

    def turn(index, carry):
        head = divide(index, pieces)
        rows = pl.ds(pl.multiple_of((index - head * pieces) * num_rows, num_rows), num_rows)
        for first_lane in range(0, values.shape[1], num_lanes):
            lanes = pl.ds(first_lane, num_lanes)
            stored = buffers.kv[slot, num_kv_heads + head, rows, lanes]
            values[head, lanes, rows] = stored.astype(spec.compute_dtype).T
        return carry

    lax.fori_loop(0, num_kv_heads * pieces, turn, 0)


def add_in_steps(
    spec: AttentionSpec,
    scratch: Any,
    keys: Any,
    values: Any,
    matrix: Any,
    first_token: Any,
    end_token: Any,
    *,
    queries: Callable[[], jax.Array],
    visible: Callable[[Any, int], jax.Array],
) -> None:
    """Adds a block's tokens from first_token to end_token to one matrix's running softmax.

    Args:
      scratch: `PrefillScratch`; keys, values: refs [block rows, width] of the pool's dtype, and
        [width, block rows] turned.
      queries: the matrix, float32[columns, width]; each step loads it anew.
      visible: (first row, number of rows) -> bool[rows, columns].
    """
    step_rows, columns = spec.sizes.prefill_step_rows, scratch.scores.shape[2]
    piece_tokens = PIECE_ROWS * spec.pool.tokens_per_row
    first = divide(first_token, piece_tokens)
    end = divide(end_token + piece_tokens - 1, piece_tokens)
    steps = PIECE_ROWS // step_rows
    rows_of = lambda step: pl.ds(pl.multiple_of(step * step_rows, step_rows), step_rows)

    def put_scores(step, peak):
        rows = rows_of(step)
        scores = scores_of(spec, keys[rows], queries())
        scores = jnp.where(visible(rows.start, step_rows), scores, LOWEST)
        scratch.scores[0, rows] = scores
        return jnp.maximum(peak, scores.max(axis=0, keepdims=True))

    old_largest = scratch.largest[matrix][:1]
    largest = lax.fori_loop(first * steps, end * steps, put_scores, old_largest)
    factor = jnp.exp2(old_largest - largest)

    def put_weights(step, total):
        rows = rows_of(step)
        weights = jnp.exp2(scratch.scores[0, rows] - largest)
        scratch.scores[0, rows] = weights
        return total + weights.sum(axis=0, keepdims=True)

    total = factor * scratch.total[matrix][:1]
    total = lax.fori_loop(first * steps, end * steps, put_weights, total)
    scratch.largest[matrix] = jnp.broadcast_to(largest, (SUBLANES, columns))
    scratch.total[matrix] = jnp.broadcast_to(total, (SUBLANES, columns))
    scratch.weighted[matrix] = scratch.weighted[matrix] * factor
    parts = spec.pool.width // _VALUE_ROWS

    def add_part(index, carry):
        piece = divide(index, parts)
        part = pl.ds(
            pl.multiple_of((index - piece * parts) * _VALUE_ROWS, _VALUE_ROWS), _VALUE_ROWS
        )
        rows = pl.ds(pl.multiple_of(piece * PIECE_ROWS, PIECE_ROWS), PIECE_ROWS)
        scratch.weighted[matrix, part] += weigh(spec, values[part, rows], scratch.scores[0, rows])
        return carry

    lax.fori_loop(first * parts, end * parts, add_part, 0)
