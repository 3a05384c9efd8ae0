"""The arithmetic of the latent attention kernel: one KV block into a tile's running softmax.

    scores = q . c^T  |  peak  |  weights = exp2(scores - peak)  |  weights . c

    for the whole block, or for those parts of it that some row sees

Each of the four goes in steps small enough for the registers, through scratch. As far as a
generation's registers allow, steps are straight-line code, in which the compiler overlaps the
matrix unit's work on one with the vector work on another; else they are loops. The block lies in
VMEM once and is key and value at once.

A float32 operand is split into three bfloat16 parts, largest first, whose sum it is. A product is
the sum of the parts' products, those left out that are too small for float32: what the compiler
makes of a float32 product as well, but the parts of a block are made once, for keys and values and
all tiles, and stand in VMEM.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.mla_tpu_pipeline import Tiling, ceil_div

LANES = 128
# Rows of a float32 operand that are split at once.
_SPLIT_ROWS = 32
# Stands for the maximum over no score: small, and finite, so that differences stay numbers.
_LOWEST = -1e30
_LN_2 = math.log(2)


class SoftmaxRefs(NamedTuple):
    """VMEM of the running softmax; see the kernel's parameters for the shapes."""

    largest: Any
    total: Any
    weighted: Any
    scores: Any
    weights: Any
    peaks: Any
    shrink: Any
    products: Any


def num_parts(dtype: Any) -> int:
    """Of an operand of a product, in bfloat16."""
    return 3 if dtype == jnp.float32 else 1


def split(parts: Any, source: Any, num_rows: Any) -> None:
    """Splits the first num_rows of `source` [rows, width] into `parts` [parts, rows, width].

    Up to 31 rows more are split, if there are more.
    """
    group = math.gcd(source.shape[0], _SPLIT_ROWS)

    def split_group(index: Any, _: None) -> None:
        rows = aligned_rows(index * group, group)
        _store_parts(parts, (rows, slice(None)), source[rows])

    lax.fori_loop(0, ceil_div(num_rows, group), split_group, None)


def split_queries(parts: Any, q: Any, num_tokens: Any) -> None:
    """Splits the first num_tokens of `q` [tokens, Hq, width] into `parts` [parts, rows, width]."""
    num_heads = q.shape[1]

    def split_token(token: Any, _: None) -> None:
        rows = aligned_rows(token * num_heads, num_heads)
        split(parts.at[:, rows], q.at[token], num_heads)

    lax.fori_loop(0, num_tokens, split_token, None)


def _store_parts(parts: Any, place: Any, values: jax.Array) -> None:
    for part in range(parts.shape[0]):
        rounded = values.astype(parts.dtype)
        parts[(part, *place)] = rounded
        values = values.astype(jnp.float32) - rounded.astype(jnp.float32)


def add_block(
    refs: SoftmaxRefs,
    q: Any,  # VMEM [parts, tokens * Hq, width], the tile's queries
    kv: Any,  # VMEM [parts, block_tokens, width]
    *,
    num_tokens: int,
    first_row: Any,
    base: Any,
    position: Any,
    kv_end: Any,
    tiling: Tiling,
    scale: float,
) -> None:
    """Adds a KV block to the state of the rows from first_row on, tokens x heads of them.

    The block's first token stands at `base` of the sequence, the tile's first query at
    `position`, the next at position + 1; nothing from kv_end on is the item's.
    """
    num_rows, block_tokens = q.shape[1], kv.shape[1]
    rows = aligned_rows(first_row, num_rows)
    add = functools.partial(_add_tokens, refs, q, kv, rows, num_tokens, tiling, scale)
    part_tokens = part_size(num_rows, block_tokens, tiling.part_scores)
    # The first part begins the state of rows that see nothing at all, too.
    num_seen = jnp.minimum(jnp.minimum(position + num_tokens, kv_end) - base, block_tokens)
    count = ceil_div(jnp.maximum(num_seen, jnp.where(base == 0, 1, 0)), part_tokens)
    # Float32 products take so much code that one form of it must do.
    has_whole = refs.weights.shape[0] == 1
    is_whole = (count == block_tokens // part_tokens) if has_whole else False
    if has_whole:

        @pl.when(is_whole)
        def _():
            add(0, block_tokens, is_first=base == 0, position=position - base)

    @pl.when(jnp.logical_not(is_whole))
    def _():
        def add_part(part: Any, _: None) -> None:
            start = pl.multiple_of(part * part_tokens, part_tokens)
            add(
                start,
                part_tokens,
                is_first=base + start == 0,
                position=position - base - start,
            )

        lax.fori_loop(0, count, add_part, None)


def part_size(num_rows: int, block_tokens: int, part_scores: int) -> int:
    """Tokens of a block seen in part that are computed at once: whole lanes, equal parts."""
    part = block_tokens
    while part % (2 * LANES) == 0 and (part == block_tokens or part * num_rows > part_scores):
        part //= 2
    return part


def clear_tokens(kv: Any, begin: Any, part_tokens: int) -> None:
    """Zeros in a block's VMEM from token `begin` to the end of its part.

    What stands there was never fetched or is nobody's, and a weight of 0 silences no NaN.
    """
    tile = min(32, kv.shape[0])
    begin = jnp.maximum(begin, 0)
    first = lax.div(begin, jnp.int32(tile))
    rows = pl.ds(pl.multiple_of(first * tile, tile), tile)
    row = lax.broadcasted_iota(jnp.int32, (tile, kv.shape[1]), 0)
    kept = jnp.where(row < begin - first * tile, kv[rows].astype(jnp.float32), 0.0)
    kv[rows] = kept.astype(kv.dtype)

    def clear(index: Any, _: None) -> None:
        kv[pl.ds(pl.multiple_of(index * tile, tile), tile)] = jnp.zeros_like(kept, kv.dtype)

    end = cleared_end(begin, part_tokens)
    lax.fori_loop(first + 1, lax.div(end, jnp.int32(tile)), clear, None)


def cleared_end(begin: Any, part_tokens: int) -> Any:
    """The end of the part that ends with token `begin` or has it inside: no more is read."""
    return ceil_div(jnp.maximum(begin, 1), part_tokens) * part_tokens


def aligned_rows(first: Any, count: int) -> Any:
    """Rows [first, first + count), where `first` is a multiple of 8, and of 16 if count is."""
    return pl.ds(
        first if isinstance(first, int) else pl.multiple_of(first, math.gcd(count, 16)), count
    )


def _add_tokens(
    refs: SoftmaxRefs,
    q: Any,
    kv: Any,
    rows: Any,
    num_tokens: int,
    tiling: Tiling,
    scale: float,
    start: Any,
    size: int,
    *,
    is_first: Any,
    position: Any,
) -> None:
    """Adds tokens [start, start + size) of the block to the state of `rows`.

    position is that of the tile's first query, counted from start.
    """
    tile = pl.ds(0, rows.size)
    refs.peaks[tile] = jnp.where(is_first, _LOWEST, refs.largest[rows])
    # Causal masks take registers where a tile has several tokens.
    at_once = tiling.steps_at_once if num_tokens == 1 else max(1, tiling.steps_at_once // 4)
    _for_each_step(
        size,
        tiling.step_tokens,
        at_once,
        lambda tokens: _put_scores(refs, q, kv, num_tokens, tiling, scale, start, tokens, position),
    )
    _for_each_step(
        rows.size,
        tiling.step_rows or rows.size,
        1,
        lambda some: _put_weights(
            refs, some, aligned_rows(rows.start + some.start, some.size), size, is_first, tiling
        ),
    )
    _for_each_step(
        refs.weighted.shape[1],
        tiling.step_lanes,
        tiling.steps_at_once,
        lambda lanes: _add_values(refs, kv, rows, pl.ds(start, size), lanes, is_first, tiling),
    )


def _for_each_step(size: int, step: int, steps_at_once: int, body: Any) -> None:
    """Calls body(slice) on [0, size) in steps; so many of them at once are straight-line code."""
    step = math.gcd(size, step)
    at_once = math.gcd(size // step, steps_at_once)
    stride = at_once * step

    def add_steps(first: Any) -> None:
        for at in range(0, stride, step):
            body(pl.ds(first + at, step))

    if stride == size:
        add_steps(0)
    else:
        lax.fori_loop(
            0, size // stride, lambda i, _: add_steps(pl.multiple_of(i * stride, step)), None
        )


def _put_scores(
    refs: SoftmaxRefs,
    q: Any,
    kv: Any,
    num_tokens: int,
    tiling: Tiling,
    scale: float,
    start: Any,
    tokens: Any,
    position: Any,
) -> None:
    """Scores of a step into scratch, and the maxima by lane with those of the steps before."""
    num_rows = q.shape[1]
    keys = kv.at[:, pl.ds(start + tokens.start, tokens.size)]
    # Powers of 2 are what the hardware has.
    rows = pl.ds(0, num_rows)
    scores = scale / _LN_2 * _product(q, keys, ((1,), (1,)), tiling, refs.scores.at[rows, tokens])
    column = tokens.start + lax.broadcasted_iota(jnp.int32, scores.shape, 1)
    one_token = (num_rows // num_tokens, tokens.size)
    last_visible = [jnp.full(one_token, position + token, jnp.int32) for token in range(num_tokens)]
    # Below what a running maximum starts at: its weight is 0 in any row.
    scores = jnp.where(column <= jnp.concatenate(last_visible), scores, 2 * _LOWEST)
    refs.scores[rows, tokens] = scores
    refs.peaks[rows] = functools.reduce(jnp.maximum, _lane_tiles(scores), refs.peaks[rows])


def _put_weights(
    refs: SoftmaxRefs, tile: Any, rows: Any, size: int, is_first: Any, tiling: Tiling
) -> None:
    """Weights of some rows into scratch, their maxima and sums into the state.

    tile: the rows in scratch; rows: the same in the state.
    """
    before = jnp.where(is_first, _LOWEST, refs.largest[rows])
    peak = refs.peaks[tile].max(axis=1, keepdims=True)
    peak = jnp.maximum(before, peak)
    refs.largest[rows] = peak
    refs.shrink[tile] = jnp.where(is_first, 0.0, jnp.exp2(before - peak))
    refs.total[rows] = jnp.where(is_first, 0.0, refs.total[rows] * refs.shrink[tile])

    def put(tokens: Any, total: jax.Array) -> jax.Array:
        weights = jnp.exp2(refs.scores[tile, tokens] - refs.largest[rows])
        _store_parts(refs.weights, (tile, tokens), weights)
        return total + weights

    total = jnp.zeros((rows.size, LANES), jnp.float32)
    if tiling.steps_at_once == 1:
        total = lax.fori_loop(
            0,
            size // LANES,
            lambda i, total: put(pl.ds(pl.multiple_of(i * LANES, LANES), LANES), total),
            total,
        )
    else:
        for at in range(0, size, LANES):
            total = put(pl.ds(at, LANES), total)
    refs.total[rows] += total.sum(axis=1, keepdims=True)


def _add_values(
    refs: SoftmaxRefs, kv: Any, rows: Any, tokens: Any, lanes: Any, is_first: Any, tiling: Tiling
) -> None:
    tile = pl.ds(0, rows.size)
    weights = refs.weights.at[:, tile, pl.ds(0, tokens.size)]
    # Before the product, whose registers are then its own.
    old = refs.weighted[rows, lanes] * _across(refs.shrink[tile], lanes.size)
    refs.weighted[rows, lanes] = jnp.where(is_first, 0.0, old)
    products = None if refs.products is None else refs.products.at[tile, lanes]
    values = _product(weights, kv.at[:, tokens, lanes], ((1,), (0,)), tiling, products)
    refs.weighted[rows, lanes] += values


def finished_rows(refs: SoftmaxRefs, rows: Any) -> tuple[jax.Array, jax.Array]:
    """Float32 outputs [rows, latent_dim] and log-sum-exps [rows, 128] of some rows of the state."""
    total = refs.total[rows]
    share = jnp.where(total > 0, 1 / jnp.maximum(total, jnp.finfo(jnp.float32).tiny), 0.0)
    values = refs.weighted[rows] * _across(share, refs.weighted.shape[1])
    logs = jnp.where(total > 0, refs.largest[rows] * _LN_2 + jnp.log(total), -jnp.inf)
    return values, logs


def _product(a: Any, b: Any, contracted: Any, tiling: Tiling, scratch: Any) -> jax.Array:
    """The float32 product of two operands in parts, the smallest products first.

    Joined parts are one long product; else one product follows another, summed in `scratch`.
    """
    orders = range(max(a.shape[0], b.shape[0]) - 1, -1, -1)
    # Part i of a and part order - i of b.
    firsts = [range(max(0, n - b.shape[0] + 1), min(n, a.shape[0] - 1) + 1) for n in orders]
    dot = functools.partial(
        lax.dot_general,
        dimension_numbers=(contracted, ((), ())),
        preferred_element_type=jnp.float32,
    )
    if len(orders) == 1:
        return dot(a[0], b[0])
    if tiling.joins_parts:
        places = [(i, n - i) for n, first in zip(orders, firsts, strict=True) for i in first]
        left = jnp.concatenate([a[i] for i, _ in places], axis=contracted[0][0])
        right = jnp.concatenate([b[j] for _, j in places], axis=contracted[1][0])
        return dot(left, right)
    num_rows = a.shape[1]
    group = math.gcd(num_rows, tiling.product_rows or num_rows)
    num_groups = num_rows // group
    scratch[...] = jnp.zeros(scratch.shape, jnp.float32)
    for order, first in zip(orders, firsts, strict=True):
        # One loop over parts and groups: libtpu's static profile fails on one inside the other.
        def add(index: Any, _: None, order: int = order) -> None:
            i, at = index, 0
            if num_groups > 1:
                i = lax.div(index, jnp.int32(num_groups))
                at = (index - i * num_groups) * group
            rows = aligned_rows(at, group)
            scratch[rows] += dot(a[i, rows], b[order - i])

        lax.fori_loop(first.start * num_groups, first.stop * num_groups, add, None)
    return scratch[...]


def _across(column: jax.Array, width: int) -> jax.Array:
    """[rows, 128] with equal lanes as [rows, width]."""
    return jnp.concatenate([column] * (width // LANES), axis=1)


def _lane_tiles(values: jax.Array) -> list[jax.Array]:
    """[rows, n * 128] as n of [rows, 128]: combining these costs no rotation of lanes."""
    return [values[:, at : at + LANES] for at in range(0, values.shape[1], LANES)]
