"""The static facts of one attention kernel, and how query heads lie in the rows it computes on."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.pool_storage import PoolLayout

LANES = 128
SUBLANES = 8
LOG2_E = math.log2(math.e)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionSizes:
    """Block sizes of the kernel; see `attention_tpu_sizes`."""

    # KV tokens of a decode item, and of a part of one that is not full
    decode_block_tokens: int
    decode_part_tokens: int
    # Units (see `HeadLayout`) whose code is unrolled; all of them, or a divisor of their number
    decode_units_at_once: int
    # Rows of K and V that one product takes
    decode_piece_rows: int
    # Whether pages are started between the products of an item, or before them
    decode_interleaves: bool
    # Buffers of the KV ring of decodes: one is computed on, the others are in flight
    decode_buffers: int
    # Query tokens of a prefill tile and of a chunk of it, KV heads computed on together
    prefill_tile_tokens: int
    prefill_chunk_tokens: int
    prefill_heads_at_once: int
    # Rows of K in a step of a loop over the block, one head at a time; 0 for straight-line code
    prefill_step_rows: int
    # KV tokens of a prefill item, buffers of its ring
    prefill_block_tokens: int
    prefill_buffers: int
    vmem_limit_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadLayout:
    """Query rows of one token in *units*: 8 rows of several KV heads, or all rows of one.

    A KV head's `group` query heads are filled up to 1, 2, 4 or a multiple of 8 rows. Where they
    are fewer than 8, a unit takes the rows of several KV heads, so that the softmax works on full
    registers. A pool with two tokens a row (head_dim 64) has every row twice: once with the query
    in the left half of the lanes for the even tokens, once in the right half for the odd ones.

        unit 0                                        unit 1
        | parity 0: head 0, head 1 | parity 1: ...  | | ...
    """

    num_kv_heads: int
    group: int
    padded_group: int
    tokens_per_row: int

    @classmethod
    def of(cls, num_q_heads: int, pool: PoolLayout) -> HeadLayout:
        group = num_q_heads // pool.num_kv_heads
        padded = 1 << (group - 1).bit_length() if group < SUBLANES else -(-group // 8) * 8
        return cls(
            num_kv_heads=pool.num_kv_heads,
            group=group,
            padded_group=padded,
            tokens_per_row=pool.tokens_per_row,
        )

    @property
    def heads_per_unit(self) -> int:
        return max(1, SUBLANES // self.padded_group)

    @property
    def num_units(self) -> int:
        return -(-self.num_kv_heads // self.heads_per_unit)

    @property
    def out_rows_per_unit(self) -> int:
        return self.heads_per_unit * self.padded_group

    @property
    def rows_per_unit(self) -> int:
        return self.tokens_per_row * self.out_rows_per_unit

    @property
    def num_rows(self) -> int:
        """Rows of a token's queries."""
        return self.num_units * self.rows_per_unit

    @property
    def num_out_rows(self) -> int:
        """Rows of a token's output: one for each query head, and the filling."""
        return self.num_units * self.out_rows_per_unit

    def heads_of(self, unit: int) -> range:
        first = unit * self.heads_per_unit
        return range(first, min(first + self.heads_per_unit, self.num_kv_heads))

    def spread_queries(self, q: jax.Array, width: int) -> jax.Array:
        """q [T, Hq, D] as float32[T, lane tiles * num_rows, 128].

        Rows wider than 128 lanes are cut into tiles, the first tiles of all rows first: DMAs of
        single float32 rows are free only within one tile.
        """
        num_tokens, _, head_dim = q.shape
        q = q.astype(jnp.float32).reshape(num_tokens, self.num_kv_heads, self.group, head_dim)
        q = jnp.pad(q, ((0, 0), *self._padding, (0, 0)))
        q = q.reshape(num_tokens, self.num_units, self.out_rows_per_unit, head_dim)
        lefts = [parity * head_dim for parity in range(self.tokens_per_row)]
        pads = [((0, 0), (0, 0), (0, 0), (left, width - head_dim - left)) for left in lefts]
        rows = jnp.concatenate([jnp.pad(q, pad) for pad in pads], axis=2)
        rows = rows.reshape(num_tokens, self.num_rows, width // LANES, LANES)
        return rows.swapaxes(1, 2).reshape(num_tokens, -1, LANES)

    def gather_outputs(self, out: jax.Array, head_dim: int) -> jax.Array:
        """float32[T, lane tiles * num_out_rows, 128] as [T, Hq, head_dim]."""
        num_tokens = out.shape[0]
        out = out.reshape(num_tokens, -1, self.num_out_rows, LANES).swapaxes(1, 2)
        out = out.reshape(num_tokens, self.num_out_rows // self.padded_group, self.padded_group, -1)
        out = out[:, : self.num_kv_heads, : self.group, :head_dim]
        return out.reshape(num_tokens, -1, head_dim)

    def spread_heads(self, values: jax.Array) -> jax.Array:
        """float[Hq] as float32[num_out_rows]; the filling is 0."""
        grouped = values.astype(jnp.float32).reshape(self.num_kv_heads, self.group)
        return jnp.pad(grouped, self._padding).reshape(-1)

    @property
    def _padding(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Of KV heads to whole units, and of query heads to whole groups."""
        heads = self.num_units * self.heads_per_unit
        return (0, heads - self.num_kv_heads), (0, self.padded_group - self.group)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """Everything about an attention call that the kernel is compiled for."""

    heads: HeadLayout
    pool: PoolLayout
    pool_dtype: DTypeLike
    # Of the operands of the matrix products: bfloat16, or float32 where the inputs are
    compute_dtype: DTypeLike
    sizes: AttentionSizes
    table_width: int
    scale: float
    sliding_window: int | None
    soft_cap: float | None
    has_sinks: bool
    causal: bool
    return_lse: bool
    decode_only: bool
    # Whether each decode brings its own key and value, to be written first
    appends: bool = False
    # Query tokens of a decode tile; more than one see the same KV tokens, without causality
    tile_tokens: int = 1
    # Whether each decode continues from an output and its log-sum-exp over other tokens
    continues: bool = False

    @property
    def lane_tiles(self) -> int:
        """Tiles of 128 lanes in a row of K or V."""
        return self.pool.width // LANES

    @property
    def rows_per_unit(self) -> int:
        """Rows that a decode item's unit has, of all tokens of its tile."""
        return self.tile_tokens * self.heads.rows_per_unit

    @property
    def units_at_once(self) -> int:
        """Units of a decode item in one piece of straight-line code; a divisor of num_units."""
        return min(self.sizes.decode_units_at_once, self.heads.num_units)

    @property
    def rows_a_token(self) -> int:
        """Rows of 128 lanes that a token brings: its queries, and after them, where it has
        those, its own key and value, or the output and log-sum-exp that it continues from."""
        rows = self.lane_tiles * self.heads.num_rows
        if self.appends:
            rows += self.lane_tiles * 2 * self.pool.num_kv_heads
        if self.continues:
            rows += (self.lane_tiles + 1) * self.heads.num_out_rows
        return rows

    @property
    def table_chunk(self) -> int:
        """Block-table entries that come into scalar memory at once."""
        return min(LANES, self.table_width)

    @property
    def needs_clean_values(self) -> bool:
        """Whether garbage in the pool may be NaN, which a weight of 0 does not silence."""
        return jnp.issubdtype(self.pool_dtype, jnp.floating)

    @property
    def needs_clean_keys(self) -> bool:
        """Whether a key may share its row with garbage, which a zero in the query does not
        silence. Elsewhere a bad key spoils its own score only, and that is masked."""
        return self.needs_clean_values and self.pool.tokens_per_row > 1


def register_rows(spec: AttentionSpec) -> int:
    """Rows of the pool's dtype in a register."""
    return SUBLANES * 4 // jnp.dtype(spec.pool_dtype).itemsize
