"""Ragged paged attention as one Pallas kernel for TPUs."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike

from pallas_kernels.attention_tpu_kernel import attention_kernel
from pallas_kernels.attention_tpu_math import query_factor
from pallas_kernels.attention_tpu_prefill import matrix_columns
from pallas_kernels.attention_tpu_sizes import choose_sizes, most_tile_tokens
from pallas_kernels.attention_tpu_spec import (
    LANES,
    LOG2_E,
    SUBLANES,
    AttentionSizes,
    AttentionSpec,
    HeadLayout,
)
from pallas_kernels.pool_storage import pool_layout
from pallas_kernels.tpu_runtime import interpret_mode, tpu_generation

# Their lengths and work lists lie in scalar memory, 1 MiB.
_MAX_SEQS = 16384
# The options under which a kernel takes most memory.
_LARGEST_SPEC: dict[str, Any] = dict(
    scale=1.0,
    sliding_window=None,
    soft_cap=None,
    has_sinks=True,
    causal=True,
    return_lse=True,
    decode_only=False,
)


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
    sizes: AttentionSizes | None = None,
) -> Any:
    """Arguments, shapes and result as in `pallas_kernels.ragged_paged_attention`, checked.

    Args:
      sizes: for tuning; None for `choose_sizes`.
    """
    call = _Call(
        q,
        pool_layer,
        block_tables,
        sinks,
        scale=scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        causal=causal,
        return_lse=return_lse,
        decode_only=decode_only,
        sizes=sizes,
    )
    outs = call.launch([call.queries(k_scale)], kv_lens, query_starts, num_seqs)
    return call.results(outs, v_scale)


class _Call:
    """What the ways into the kernel have in common: its spec, and the arrays around it."""

    def __init__(
        self,
        q: jax.Array,
        pool_layer: jax.Array,
        block_tables: jax.Array,
        sinks: jax.Array | None,
        **static: Any,
    ):
        """`static` are the other arguments of `make_spec`."""
        self.q, self.pool_layer = q, pool_layer
        self.block_tables = _whole_chunks(block_tables)
        self.spec = make_spec(
            q.shape,
            q.dtype,
            pool_layer,
            self.block_tables.shape[1],
            has_sinks=sinks is not None,
            **static,
        )
        self.sink_arrays = [] if sinks is None else _sink_arrays(self.spec, sinks)

    def queries(self, k_scale: jax.Array | None) -> jax.Array:
        """The rows of the queries, which bring the keys' scales along."""
        q = self.q
        if k_scale is not None:
            q = q.astype(jnp.float32) * jnp.repeat(k_scale, self.spec.heads.group)[:, None]
        return arrange_queries(self.spec, q)

    def launch(
        self,
        token_arrays: list[jax.Array],
        kv_lens: jax.Array,
        query_starts: jax.Array,
        num_seqs: jax.Array,
    ) -> list[jax.Array]:
        """The kernel's outputs."""
        return launch(
            self.spec,
            token_arrays,
            self.pool_layer,
            kv_lens,
            self.block_tables,
            query_starts,
            num_seqs,
            self.sink_arrays,
        )

    def results(self, outs: list[jax.Array], v_scale: jax.Array | None) -> Any:
        """out [T, Hq, D], or (out, lse [T, Hq]), from the kernel's outputs."""
        heads = self.spec.heads
        if not self.spec.decode_only:
            outs = [out.swapaxes(0, 1) for out in outs]
        out = heads.gather_outputs(outs[0], self.q.shape[2])
        if v_scale is not None:
            out *= jnp.repeat(v_scale, heads.group)[:, None]
        out = out.astype(self.q.dtype)
        return (out, heads.gather_outputs(outs[1], 1)[..., 0]) if self.spec.return_lse else out


def unsupported_reason(
    q: jax.Array | jax.ShapeDtypeStruct,
    pool_layer: jax.Array | jax.ShapeDtypeStruct,
    kv_lens: jax.Array | jax.ShapeDtypeStruct,
    block_tables: jax.Array | jax.ShapeDtypeStruct,
) -> str | None:
    """Why the kernel cannot run a call, and what would help; None if it can."""
    if q.dtype == jnp.float16:
        return "q is float16, which TPUs lack; use bfloat16"
    if pool_layer.dtype in (jnp.float16, jnp.uint16):
        return f"pool_layer is {pool_layer.dtype}, which TPUs lack; use bfloat16"
    pool = pool_layout(pool_layer, q.shape[2])
    if pool.width % LANES:
        return (
            f"pool_layer has rows of {pool.width}, and a TPU's are of 128 lanes: make it with "
            "tpu_pool_shape"
        )
    if pool.block_size & (pool.block_size - 1):
        return f"block_size is {pool.block_size}; use a power of two"
    if pool.tokens_per_row > 2:
        return f"head_dim is {pool.head_dim}; use 64 or more"
    if pool.rows < SUBLANES:
        return (
            f"block_size {pool.block_size} gives {pool.rows} rows of {pool.width} lanes, and a "
            f"TPU copies 8 rows at least; use {SUBLANES * pool.tokens_per_row} or more"
        )
    if kv_lens.shape[0] > _MAX_SEQS:
        return f"kv_lens has {kv_lens.shape[0]} sequences; use {_MAX_SEQS} at most"
    try:
        make_spec(q.shape, q.dtype, pool_layer, block_tables.shape[1], **_LARGEST_SPEC)
    except ValueError as error:
        return str(error)
    return None


def _whole_chunks(block_tables: jax.Array) -> jax.Array:
    """Block tables that the kernel can fetch in pieces of 128 entries."""
    width = block_tables.shape[1]
    return block_tables if width <= LANES else jnp.pad(block_tables, ((0, 0), (0, -width % LANES)))


def make_spec(
    q_shape: tuple[int, ...],
    q_dtype: DTypeLike,
    pool_layer: jax.Array | jax.ShapeDtypeStruct,
    table_width: int,
    *,
    sizes: AttentionSizes | None = None,
    **static: Any,
) -> AttentionSpec:
    """What the kernel of a call is compiled for; `static` are AttentionSpec's other fields."""
    pool = pool_layout(pool_layer, q_shape[2])
    heads = HeadLayout.of(q_shape[1], pool)
    compute_dtype = _compute_dtype(q_dtype, pool_layer.dtype)
    if sizes is None:
        sizes = choose_sizes(
            heads=heads,
            pool=pool,
            pool_dtype=pool_layer.dtype,
            compute_dtype=compute_dtype,
            table_width=table_width,
            sliding_window=static["sliding_window"],
            return_lse=static["return_lse"],
            tile_tokens=static.get("tile_tokens", 1),
            generation=tpu_generation(),
        )
    return AttentionSpec(
        heads=heads,
        pool=pool,
        pool_dtype=pool_layer.dtype,
        compute_dtype=compute_dtype,
        sizes=sizes,
        table_width=table_width,
        **static,
    )


def _compute_dtype(q_dtype: DTypeLike, pool_dtype: DTypeLike) -> DTypeLike:
    is_wide = jnp.float32 in (q_dtype, pool_dtype)
    return jnp.dtype(jnp.float32 if is_wide else jnp.bfloat16)


def arrange_queries(spec: AttentionSpec, q: jax.Array) -> jax.Array:
    """q [T, Hq, D] as the kernel wants it; see `attention_kernel`."""
    q = q.astype(jnp.float32) * query_factor(spec)
    rows = spec.heads.spread_queries(q, spec.pool.width)
    return rows if spec.decode_only else rows.swapaxes(0, 1)


def launch(
    spec: AttentionSpec,
    token_arrays: list[jax.Array],
    pool_layer: jax.Array,
    kv_lens: jax.Array,
    block_tables: jax.Array,
    query_starts: jax.Array,
    num_seqs: jax.Array,
    sink_arrays: list[jax.Array],
) -> list[jax.Array]:
    """The kernel's outputs, laid out, as are `token_arrays`, as `attention_kernel` tells.

    Args:
      token_arrays: all that a token brings: its queries, and the outputs to continue from.
    """
    num_out_rows = spec.heads.num_out_rows
    num_tokens = token_arrays[0].shape[0 if spec.decode_only else 1]

    def output(rows_a_token: int) -> jax.ShapeDtypeStruct:
        leading = (num_tokens, rows_a_token) if spec.decode_only else (rows_a_token, num_tokens)
        return jax.ShapeDtypeStruct((*leading, LANES), jnp.float32)

    any_memory = pl.BlockSpec(memory_space=pl.ANY)
    out_shapes = [output(spec.lane_tiles * num_out_rows)]
    if spec.return_lse:
        out_shapes.append(output(num_out_rows))
    if spec.appends:
        out_shapes.append(jax.ShapeDtypeStruct(pool_layer.shape, pool_layer.dtype))
    return pl.pallas_call(
        functools.partial(attention_kernel, spec, num_tokens),
        name="ragged_paged_attention",
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(1,),
            in_specs=[any_memory] * (len(token_arrays) + 2)
            + [pl.BlockSpec(memory_space=pltpu.VMEM)] * len(sink_arrays),
            out_specs=[any_memory] * len(out_shapes),
        ),
        out_shape=out_shapes,
        compiler_params=pltpu.CompilerParams(
            vmem_limit_bytes=spec.sizes.vmem_limit_bytes, disable_bounds_checks=True
        ),
        input_output_aliases={4: len(out_shapes) - 1} if spec.appends else {},
        interpret=interpret_mode(),
    )(
        kv_lens,
        query_starts,
        num_seqs.reshape(1),
        *token_arrays,
        pool_layer,
        block_tables,
        *sink_arrays,
    )


def write_and_attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    pool_layer: jax.Array,
    kv_lens: jax.Array,
    block_tables: jax.Array,
    num_seqs: jax.Array,
    *,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    sinks: jax.Array | None,
    k_scale: jax.Array | None,
    v_scale: jax.Array | None,
    sizes: AttentionSizes | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Arguments, shapes and result as in `pallas_kernels.write_and_attend`, checked; k and v are
    numbers of the pool's dtype, as float32.
    """
    call = _Call(
        q,
        pool_layer,
        block_tables,
        sinks,
        scale=scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        causal=True,
        return_lse=False,
        decode_only=True,
        appends=True,
        sizes=sizes,
    )
    # Joined, they are made by one operation of XLA, not by two.
    rows = jnp.concatenate([call.queries(k_scale), _arrange_tokens(call.spec, k, v)], axis=1)
    starts = jnp.arange(kv_lens.shape[0] + 1, dtype=jnp.int32)
    *outs, pool_layer = call.launch([rows], kv_lens, starts, num_seqs)
    return call.results(outs, v_scale), pool_layer


def shared_tile_tokens(
    q: jax.Array | jax.ShapeDtypeStruct, pool_layer: jax.Array | jax.ShapeDtypeStruct
) -> int:
    """Sequences whose queries meet a shared prefix at once in `attend_in_cascade`; where it is not
    at least 2, that gains nothing.
    """
    heads = HeadLayout.of(q.shape[1], pool_layout(pool_layer, q.shape[2]))
    return most_tile_tokens(heads, _compute_dtype(q.dtype, pool_layer.dtype), tpu_generation())


def attend_in_cascade(
    q: jax.Array,
    pool_layer: jax.Array,
    prefixes: tuple[jax.Array, ...],
    suffixes: tuple[jax.Array, ...],
    *,
    scale: float,
    soft_cap: float | None,
    sinks: jax.Array | None,
    k_scale: jax.Array | None,
    v_scale: jax.Array | None,
    return_lse: bool,
) -> Any:
    """Decodes that share prefixes: each prefix is read once for `shared_tile_tokens` of them, two
    at least, and each decode's own tokens continue from its result.

    Args:
      prefixes, suffixes: (kv_lens, block_tables, query_starts, num_seqs) of the shared prefixes,
        each with the query rows of those that share it, and of what follows for each decode.
      return_lse, and the others: as in `pallas_kernels.cascade_attention`.
    """
    static: dict[str, Any] = dict(
        scale=scale, sliding_window=None, soft_cap=soft_cap, causal=False, decode_only=True
    )
    kv_lens, block_tables, *batch = prefixes
    tile_tokens = shared_tile_tokens(q, pool_layer)
    shared = _Call(
        q, pool_layer, block_tables, None, return_lse=True, tile_tokens=tile_tokens, **static
    )
    queries = shared.queries(k_scale)
    partial = shared.launch([queries], kv_lens, batch[0], batch[1])

    kv_lens, block_tables, *batch = suffixes
    own = _Call(q, pool_layer, block_tables, sinks, return_lse=return_lse, continues=True, **static)
    outs = own.launch([queries, *partial], kv_lens, batch[0], batch[1])
    return own.results(outs, v_scale)


def _arrange_tokens(spec: AttentionSpec, k: jax.Array, v: jax.Array) -> jax.Array:
    """k and v [T, Hkv, D] as float32[T, lane tiles * 2 * Hkv, 128]."""
    pool, tokens = spec.pool, jnp.concatenate([k, v], axis=1).astype(jnp.float32)
    if pool.tokens_per_row > 1:
        tokens = jnp.tile(tokens, (1, 1, pool.tokens_per_row))
    tokens = jnp.pad(tokens, ((0, 0), (0, 0), (0, pool.width - tokens.shape[2])))
    tokens = tokens.reshape(*tokens.shape[:2], spec.lane_tiles, LANES).swapaxes(1, 2)
    return tokens.reshape(tokens.shape[0], -1, LANES)


def _sink_arrays(spec: AttentionSpec, sinks: jax.Array) -> list[jax.Array]:
    """The sinks in base 2 as each phase wants them; see `attention_kernel`."""
    heads, columns = spec.heads, matrix_columns(spec)
    rows = heads.spread_heads(sinks * LOG2_E)
    arrays = [jnp.broadcast_to(rows[:, None], (rows.shape[0], LANES))]
    if not spec.decode_only:
        of_head = rows.reshape(-1, heads.padded_group)[: heads.num_kv_heads]
        of_head = jnp.repeat(of_head, spec.sizes.prefill_chunk_tokens, axis=1)
        of_head = jnp.tile(of_head, (1, heads.tokens_per_row))
        arrays.append(jnp.broadcast_to(of_head[:, None], (heads.num_kv_heads, SUBLANES, columns)))
    return arrays
