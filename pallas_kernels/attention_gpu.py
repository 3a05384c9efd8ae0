"""Ragged paged attention as Pallas Mosaic kernels for Hopper GPUs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import gpu_runtime
from pallas_kernels.attention_gpu_kernel import attend_shares
from pallas_kernels.attention_gpu_merge import merge_segments
from pallas_kernels.attention_gpu_plan import GpuPlan, make_plan
from pallas_kernels.attention_gpu_spec import (
    CHUNK_TOKENS,
    LN_2,
    LOG2_E,
    GpuSpec,
    decode_spec,
    prefill_spec,
)
from pallas_kernels.pool_storage import PoolLayout, pool_layout

_WIDTHS = (64, 128, 256)
_WIDE_DTYPES = (jnp.bfloat16, jnp.float16)
_NARROW_DTYPES = (jnp.int8, jnp.float8_e4m3fn, jnp.float8_e5m2)
# In base 2; takes no weight beside any score.
_NO_SINK = -1e30


def unsupported_reason(
    q: jax.Array | jax.ShapeDtypeStruct, pool_layer: jax.Array | jax.ShapeDtypeStruct
) -> str | None:
    """Why the kernels cannot run a call, and what would help; None if they can."""
    reason = gpu_runtime.missing_reason() or gpu_runtime.other_gpu_reason()
    if reason is not None:
        return reason
    if q.dtype not in _WIDE_DTYPES:
        return f"q has dtype {q.dtype}; use bfloat16 or float16"
    if pool_layer.dtype not in (q.dtype, *_NARROW_DTYPES):
        return (
            f"pool_layer is {pool_layer.dtype} and q is {q.dtype}; use one dtype for both, or a "
            "pool of int8 or float8"
        )
    pool = _token_layout(pool_layer, q.shape[2])
    if pool.width not in _WIDTHS:
        return f"rows of the pool have {pool.width} numbers; use a head_dim of 64, 128 or 256"
    if pool.block_size % 8 or max(pool.block_size, CHUNK_TOKENS) % min(
        pool.block_size, CHUNK_TOKENS
    ):
        return f"block_size is {pool.block_size}; use 8, 16, 32 or a multiple of {CHUNK_TOKENS}"
    try:
        launch_specs(q, pool_layer)
    except ValueError as error:
        return str(error)
    return None


def ragged_paged_attention(
    q: jax.Array,
    pool_layer: jax.Array,
    kv_lens: jax.Array,
    block_tables: jax.Array,
    query_starts: jax.Array,
    num_seqs: jax.Array,
    *,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    sinks: jax.Array | None,
    k_scale: jax.Array | None,
    v_scale: jax.Array | None,
    causal: bool,
    return_lse: bool,
    decode_only: bool,
) -> Any:
    """Arguments, shapes and result as in `pallas_kernels.ragged_paged_attention`, checked.

    Decodes and prefills are a launch each, of the same kernel in two forms, and one more launch
    each merges what a launch's programs found.
    """
    pool = _token_layout(pool_layer, q.shape[2])
    decodes, prefills = launch_specs(
        q, pool_layer, soft_cap=soft_cap, sliding_window=sliding_window, causal=causal
    )
    batch = _Batch(
        q=_to_compute_dtype(jnp.pad(q, ((0, 0), (0, 0), (0, pool.width - q.shape[2]))), decodes),
        # The same bytes, a token a row.
        pool_layer=pool_layer.reshape(-1, 2 * pool.num_kv_heads, pool.block_size, pool.width),
        kv_lens=kv_lens,
        block_tables=block_tables,
        query_starts=query_starts,
        sinks=sinks,
        key_factors=_head_factors(k_scale, pool, decodes.key_factor(scale)),
        value_factors=_head_factors(v_scale, pool, 1.0),
    )
    query_lens = query_starts[1:] - query_starts[:-1]
    is_real = (jnp.arange(kv_lens.shape[0]) < num_seqs) & (kv_lens > 0) & (query_lens > 0)
    is_decode = is_real & (query_lens == 1)
    out, lse = batch.attend(decodes, is_decode, one_query_each=True)
    if not decode_only:
        is_prefill = is_real & ~is_decode
        more_out, more_lse = batch.attend(prefills, is_prefill, one_query_each=False)
        # A row is of one launch, and zero or -inf in the other.
        out, lse = out + more_out, jnp.maximum(lse, more_lse)
    out = out[..., : q.shape[2]]
    return (out, lse) if return_lse else out


class _Batch:
    """The arrays of a call, as both launches take them."""

    def __init__(self, **arrays: Any):
        self.q: jax.Array = arrays["q"]
        self.pool_layer: jax.Array = arrays["pool_layer"]
        self.kv_lens: jax.Array = arrays["kv_lens"]
        self.block_tables: jax.Array = arrays["block_tables"]
        self.query_starts: jax.Array = arrays["query_starts"]
        self.sinks: jax.Array | None = arrays["sinks"]
        self.key_factors: jax.Array = arrays["key_factors"]
        self.value_factors: jax.Array = arrays["value_factors"]

    def attend(
        self, spec: GpuSpec, is_taken: jax.Array, *, one_query_each: bool
    ) -> tuple[jax.Array, jax.Array]:
        """(out [T, Hq, width], lse [T, Hq]) of the sequences of a launch; 0, -inf elsewhere."""
        num_rows = self.q.shape[0]
        plan = make_plan(
            spec,
            self.kv_lens,
            self.query_starts,
            is_taken,
            num_rows=num_rows,
            one_query_each=one_query_each,
        )
        sums, statistics = attend_shares(
            spec,
            _to_tiles(spec, plan, self.q),
            self.pool_layer,
            self.block_tables,
            plan.tiles,
            plan.shares,
            self.key_factors,
        )
        out, lse = merge_segments(
            spec,
            sums,
            statistics,
            plan.tiles,
            plan.shares,
            _sink_rows(spec, self.sinks),
            self.value_factors,
        )
        is_row = (plan.row_tiles >= 0)[:, None]
        lse = _from_tiles(spec, plan, lse[..., None])[..., 0] * LN_2
        out = _from_tiles(spec, plan, out)
        return jnp.where(is_row[..., None], out, 0), jnp.where(is_row, lse, -jnp.inf)


def _token_layout(pool_layer: jax.Array | jax.ShapeDtypeStruct, head_dim: int) -> PoolLayout:
    """The pool's layout when seen as one token a row."""
    pool = pool_layout(pool_layer, head_dim)
    shape = (
        pool.num_blocks,
        2 * pool.num_kv_heads,
        pool.block_size,
        pool.width // pool.tokens_per_row,
    )
    return pool_layout(jax.ShapeDtypeStruct(shape, pool_layer.dtype), head_dim)


def launch_specs(
    q: jax.Array | jax.ShapeDtypeStruct,
    pool_layer: jax.Array | jax.ShapeDtypeStruct,
    **options: Any,
) -> tuple[GpuSpec, GpuSpec]:
    """What the launch for decodes is compiled for, and that for prefills.

    Args:
      q, pool_layer: of a call that `unsupported_reason` does not refuse.
      options: soft_cap, sliding_window and causal, if not None, None and True.

    Raises:
      ValueError: a size does not fit a multiprocessor.
    """
    defaults: dict[str, Any] = dict(soft_cap=None, sliding_window=None, causal=True)
    decodes = decode_spec(
        _token_layout(pool_layer, q.shape[2]),
        q.shape[1],
        pool_dtype=pool_layer.dtype,
        q_dtype=q.dtype,
        num_multiprocessors=gpu_runtime.num_multiprocessors(),
        **(defaults | options),
    )
    return decodes, prefill_spec(decodes)


def _head_factors(scales: jax.Array | None, pool: PoolLayout, factor: float) -> jax.Array:
    if scales is None:
        return jnp.full(pool.num_kv_heads, factor, jnp.float32)
    return scales.astype(jnp.float32) * factor


def _to_compute_dtype(q: jax.Array, spec: GpuSpec) -> jax.Array:
    """float16 has the digits of bfloat16, and less range than any query should need."""
    limit = float(jnp.finfo(spec.compute_dtype).max)
    return q if q.dtype == spec.compute_dtype else q.clip(-limit, limit).astype(spec.compute_dtype)


def _to_tiles(spec: GpuSpec, plan: GpuPlan, q: jax.Array) -> jax.Array:
    """q [T, Hq, width] as [tiles, Hkv, warpgroups, warpgroup_rows, width]."""
    num_rows, _, width = q.shape
    rows = plan.tile_rows[:, None] + jnp.arange(spec.tile_tokens, dtype=jnp.int32)
    tiles = q[jnp.minimum(rows, num_rows - 1)]
    tiles = tiles.reshape(*rows.shape, spec.num_kv_heads, spec.group, width).swapaxes(1, 2)
    tiles = tiles.reshape(rows.shape[0], spec.num_kv_heads, -1, width)
    tiles = jnp.pad(tiles, ((0, 0), (0, 0), (0, spec.rows - tiles.shape[2]), (0, 0)))
    return tiles.reshape(*tiles.shape[:2], spec.num_warpgroups, spec.warpgroup_rows, width)


def _from_tiles(spec: GpuSpec, plan: GpuPlan, tiles: jax.Array) -> jax.Array:
    """[tiles, Hkv, warpgroups, warpgroup_rows, n] as [T, Hq, n]; rows of no tile are undefined."""
    columns = tiles.shape[-1]
    rows = tiles.reshape(*tiles.shape[:2], spec.rows, columns)[
        :, :, : spec.tile_tokens * spec.group
    ]
    rows = rows.reshape(*rows.shape[:2], spec.tile_tokens, spec.group, columns)
    rows = rows[jnp.maximum(plan.row_tiles, 0), :, plan.row_tokens]
    return rows.reshape(rows.shape[0], -1, columns)


def _sink_rows(spec: GpuSpec, sinks: jax.Array | None) -> jax.Array:
    """float32[Hkv, warpgroups, warpgroup_rows], in base 2."""
    shape = spec.num_kv_heads, spec.num_warpgroups, spec.warpgroup_rows
    if sinks is None:
        return jnp.full(shape, _NO_SINK, jnp.float32)
    of_head = (sinks.astype(jnp.float32) * LOG2_E).reshape(spec.num_kv_heads, spec.group)
    rows = jnp.tile(of_head, (1, spec.tile_tokens))
    return jnp.pad(rows, ((0, 0), (0, spec.rows - rows.shape[1]))).reshape(shape)
