"""The computation on one item of a decode: a block of KV tokens against the rows of its queries."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.attention_tpu_math import (
    LOWEST,
    Softmax,
    cleaned,
    over_lanes,
    scores_of,
    weigh,
)
from pallas_kernels.attention_tpu_pipeline import Buffers, Item, divide, modulo
from pallas_kernels.attention_tpu_spec import SUBLANES, AttentionSpec, register_rows


def decode_parts(spec: AttentionSpec) -> list[int]:
    """What a block may be computed as: the smallest of these that holds its tokens."""
    block_tokens = spec.sizes.decode_block_tokens
    parts = (block_tokens // 4, block_tokens // 2, block_tokens)
    return [tokens for tokens in parts if tokens >= spec.sizes.decode_part_tokens]


def clean_block(spec: AttentionSpec, buffers: Buffers, item: Item, slot, end) -> None:
    """Zeros what no weight of 0 silences in a block with tokens up to `end`: values that did not
    come from HBM or stand past the sequence's end, and a key in a row with such a one.

    That goes as far as the smallest part of the block that is computed and holds the tokens.
    """
    if not spec.needs_clean_values:
        return
    rows = register_rows(spec)
    tile_tokens = rows * spec.pool.tokens_per_row
    first = item.first_page * spec.pool.block_size
    heads = range(0 if spec.needs_clean_keys else spec.pool.num_kv_heads, buffers.kv.shape[1])

    def tile(number, carry):
        start = number * tile_tokens
        where = pl.ds(pl.multiple_of(number * rows, rows), rows)
        for head in heads:
            stored = buffers.kv[slot, head, where]
            clean = cleaned(spec, stored, first - start, item.visible_end - start)
            buffers.kv[slot, head, where] = clean.astype(stored.dtype)
        return carry

    if spec.sliding_window is not None:
        lax.fori_loop(0, divide(first + tile_tokens - 1, tile_tokens), tile, 0)
    computed = functools.reduce(
        lambda larger, tokens: jnp.where(end <= tokens, tokens, larger),
        reversed(decode_parts(spec)[:-1]),
        spec.sizes.decode_block_tokens,
    )
    lax.fori_loop(divide(end, tile_tokens), divide(computed, tile_tokens), tile, 0)


def compute_item(
    spec: AttentionSpec,
    state: Softmax,
    buffers: Buffers,
    item: Item,
    slot: Any,
    *,
    tokens: int,
    is_all_visible: bool = False,
    num_pages: int = 0,
    start_page: Callable[[Any], None] = lambda page: None,
) -> None:
    """Adds the first `tokens` tokens of the item's block to the running softmax.

    Args:
      slot: of the ring, where the block is.
      is_all_visible: promises that the query sees each of these tokens.
      num_pages, start_page: pages to be started between the products, by number.
    """
    group = _UnitGroup(spec, state, buffers, item, slot, tokens, is_all_visible)
    at_once = spec.units_at_once
    num_groups = spec.heads.num_units // at_once
    if num_groups == 1:
        starters = [functools.partial(start_page, page) for page in range(num_pages)]
        group.add(0, starters)
        return
    pages_a_group, rest = divmod(num_pages, num_groups)
    for page in range(num_pages - rest, num_pages):
        start_page(page)

    def add_group(number, carry):
        first = number * pages_a_group
        starters = [functools.partial(start_page, first + i) for i in range(pages_a_group)]
        group.add(number * at_once, starters)
        return carry

    lax.fori_loop(0, num_groups, add_group, 0)


class _UnitGroup:
    """The program for some units in a row; see `HeadLayout`.

    A unit's scores are computed ahead of the softmax of the one before, so that the matrix units
    work while a maximum is on its way through the lanes.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        state,
        buffers: Buffers,
        item: Item,
        slot,
        tokens: int,
        is_all_visible: bool,
    ):
        self.spec, self.state, self.buffers, self.slot = spec, state, buffers, slot
        heads, tokens_per_row = spec.heads, spec.pool.tokens_per_row
        self.q_slot = modulo(item.tile_number, buffers.q.shape[0])
        num_rows = tokens // tokens_per_row
        # What must be converted, or split for float32 products, is so in pieces.
        step = min(spec.sizes.decode_piece_rows, num_rows)
        self.pieces = [slice(start, start + step) for start in range(0, num_rows, step)]
        row = lax.broadcasted_iota(jnp.int32, (spec.rows_per_unit, 1), 0)
        self.head_in_unit = divide(modulo(row, heads.out_rows_per_unit), heads.padded_group)
        self.visible = None
        if is_all_visible:
            return
        token = lax.broadcasted_iota(jnp.int32, (spec.rows_per_unit, num_rows), 1)
        if tokens_per_row > 1:
            parity = modulo(divide(row, heads.out_rows_per_unit), tokens_per_row)
            token = token * tokens_per_row + parity
        self.visible = token < item.visible_end
        if spec.sliding_window is not None:
            self.visible &= token >= item.visible_first

    def add(self, first_unit: Any, starters: list[Callable[[], Any]]) -> None:
        """Adds `units_at_once` units from `first_unit` on."""
        count = self.spec.units_at_once
        self.starters = starters
        num_products = 2 * min(count * self.spec.heads.heads_per_unit, self.spec.pool.num_kv_heads)
        self.starters_a_product = -(-len(starters) // num_products)
        if not self.spec.sizes.decode_interleaves:
            self.starters_a_product = 0
            while starters:
                starters.pop(0)()
        ahead = self._scores(first_unit)
        for place in range(count):
            now = ahead
            if place + 1 < count:
                ahead = self._scores(first_unit + place + 1)
            self._add(first_unit + place, now)
        for starter in self.starters:
            starter()

    def _rows(self, unit: Any):
        start = unit * self.spec.rows_per_unit
        return pl.ds(pl.multiple_of(start, SUBLANES), self.spec.rows_per_unit)

    def _each_with_its_head(self, unit: Any, product: Callable[[Any], jax.Array]) -> jax.Array:
        """Each row's product with its own KV head."""
        heads = self.spec.heads
        first = unit * heads.heads_per_unit
        count = heads.heads_per_unit
        if isinstance(unit, int):
            count = len(heads.heads_of(unit))
        chosen = None
        for place in range(count):
            result = product(first + place)
            for _ in range(min(self.starters_a_product, len(self.starters))):
                self.starters.pop(0)()
            is_own = self.head_in_unit >= place
            chosen = result if chosen is None else jnp.where(is_own, result, chosen)
        assert chosen is not None
        return chosen

    def _scores(self, unit: Any) -> jax.Array:
        """float32[rows of a unit, KV rows]."""
        q = self._queries(unit)

        def product(head: Any) -> jax.Array:
            pieces = [scores_of(self.spec, q, self._stored(head, rows)) for rows in self.pieces]
            return jnp.concatenate(pieces, axis=1)

        scores = self._each_with_its_head(unit, product)
        return scores if self.visible is None else jnp.where(self.visible, scores, LOWEST)

    def _queries(self, unit: Any) -> jax.Array:
        """float32[rows of a unit, width]: token after token of the tile."""
        heads = self.spec.heads
        tokens = []
        for token in range(self.spec.tile_tokens):
            tiles = []
            for tile in range(self.spec.lane_tiles):
                start = tile * heads.num_rows + unit * heads.rows_per_unit
                rows = pl.ds(pl.multiple_of(start, SUBLANES), heads.rows_per_unit)
                tiles.append(self.buffers.q[self.q_slot, token, rows])
            tokens.append(jnp.concatenate(tiles, axis=1))
        return jnp.concatenate(tokens)

    def _stored(self, index: Any, rows: slice) -> jax.Array:
        return self.buffers.kv[self.slot, index, rows]

    def _add(self, unit: Any, scores: jax.Array) -> None:
        rows, state = self._rows(unit), self.state
        old_largest = state.largest[rows]
        largest = jnp.maximum(old_largest, scores.max(axis=1, keepdims=True))
        weights = jnp.exp2(scores - over_lanes(largest, scores.shape[1]))
        factor = jnp.exp2(old_largest - largest)
        state.largest[rows] = largest
        state.total[rows] = factor * state.total[rows] + weights.sum(axis=1, keepdims=True)
        num_kv_heads = self.spec.pool.num_kv_heads

        def product(head: Any) -> jax.Array:
            pieces = [
                weigh(self.spec, weights[:, rows], self._stored(num_kv_heads + head, rows))
                for rows in self.pieces
            ]
            return functools.reduce(jnp.add, pieces)

        values = self._each_with_its_head(unit, product)
        factor = over_lanes(factor, self.spec.pool.width)
        state.weighted[rows] = state.weighted[rows] * factor + values
