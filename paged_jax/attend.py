"""Where the model meets the KV pool: the attention function that a forward pass is given."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from paged_jax.batch import StepBatch
from paged_jax.kv_pool import ChannelScales, ScaledLayer, uses_tpu_kernels
from paged_jax.models.heads import ProjectedHeads
from pallas_kernels import (
    attention_cpu,
    plan_attention,
    ragged_paged_attention,
    rope_write_cpu,
    write_and_attend,
    write_kv,
)
from pallas_kernels.attention import uses_plan


def paged_attend(
    batch: StepBatch,
    *,
    block_size: int,
    scale: float,
    decode_only: bool = False,
    implementation: str | None = None,
):
    """The `attend` of a model's forward pass: write the step's keys and values, then attend.

    The write comes before the read, in every layer and for the whole step: so a sequence may read
    blocks that another sequence of the same step fills, and the pool is updated in place. On a
    TPU decodes write and read in one kernel, one after the other: `batch_builder.decodes`
    takes no step in which one reads what another writes. On a CPU with a compiler the write is one
    with the rotary embedding, and an int8 pool's scales are the attention's to apply.

    Args:
      batch: where each token's key and value go, and which blocks each sequence reads.
      block_size: tokens a block of the pool.
      scale: factor on the query-key products, usually head_dim ** -0.5.
      decode_only: promises that every sequence has one token in the batch.
      implementation: see `pallas_kernels.ragged_paged_attention`.

    Returns:
      attend(heads, cache) -> (out[T, Hq, D], cache), where cache is an entry of `KVPool.caches`.
    """
    where = (batch.kv_lens, batch.block_tables, batch.query_starts, batch.num_seqs)
    is_tpu = uses_tpu_kernels(implementation)
    plan = None
    if uses_plan(implementation):  # All layers share the work list.
        num_rows = batch.token_ids.shape[0]
        plan = plan_attention(
            *where, num_rows=num_rows, block_size=block_size, decode_only=decode_only
        )
    options: dict[str, Any] = dict(scale=scale, implementation=implementation)

    def attend(heads: ProjectedHeads, cache: jax.Array | ScaledLayer):
        is_scaled = isinstance(cache, ScaledLayer)
        blocks = cache.blocks if is_scaled else cache
        if plan is None and _runs_in_cpp(implementation, heads, blocks):
            out, blocks = attend_in_cpp(heads, blocks, cache.scales if is_scaled else None)
        elif is_scaled:
            out, blocks = attend_scaled(*heads.rotated(), blocks, cache.scales)
        else:
            out, blocks = attend_stored(*heads.rotated(), blocks)
        return out, dataclasses.replace(cache, blocks=blocks) if is_scaled else blocks

    def attend_in_cpp(heads: ProjectedHeads, blocks: jax.Array, scales: ChannelScales | None):
        rows = (heads.rows, heads.cos, heads.sin)
        if scales is None:
            q, blocks = rope_write_cpu.rope_write(*rows, blocks, batch.slot_mapping)
            return ragged_paged_attention(q, blocks, *where, **options), blocks
        channels = dict(channel_scale=scales.scale, channel_offset=scales.offset)
        q, blocks = rope_write_cpu.rope_write(*rows, blocks, batch.slot_mapping, **channels)
        out = attention_cpu.attention_over_channels(q, blocks, *where, scale=scale, **channels)
        return out, blocks

    def attend_scaled(q, k, v, blocks, scales: ChannelScales):
        keys, values = scales.halves()
        ones = jnp.ones(k.shape[1], jnp.float32)  # The kernels' own scales, one a head.
        out, blocks = attend_stored(
            _to_query_heads(q, keys.scale, 0),
            keys.to_int8(k),
            values.to_int8(v),
            blocks,
            k_scale=ones,
            v_scale=ones,
        )
        return _to_query_heads(out, values.scale, values.offset), blocks

    def attend_stored(q, k, v, layer, **scales):
        if is_tpu and decode_only:
            tables = (batch.kv_lens, batch.block_tables, batch.num_seqs)
            return write_and_attend(q, k, v, layer, *tables, **options, **scales)
        layer = write_kv(layer, k, v, batch.slot_mapping, implementation=implementation)
        out = ragged_paged_attention(
            q, layer, *where, **options, **scales, plan=plan, decode_only=decode_only
        )
        return out, layer

    return attend


def _runs_in_cpp(implementation: str | None, heads: ProjectedHeads, blocks: jax.Array) -> bool:
    """Whether rotary embedding, KV write and attention of these all have their C++ here."""
    if implementation not in (None, "cpu"):
        return False
    reason = rope_write_cpu.unsupported_reason(heads.rows, blocks)
    return reason is None and attention_cpu.missing_reason() is None


def _to_query_heads(rows: jax.Array, scale: jax.Array, offset: jax.Array | int) -> jax.Array:
    """rows[T, Hq, D] * scale + offset, those [Hkv, D] of each query head's KV head; rows' dtype."""
    by_kv_head = rows.astype(jnp.float32).reshape(
        rows.shape[0], *scale.shape[:1], -1, rows.shape[2]
    )
    offset = offset if isinstance(offset, int) else offset[:, None]
    return (by_kv_head * scale[:, None] + offset).astype(rows.dtype).reshape(rows.shape)
