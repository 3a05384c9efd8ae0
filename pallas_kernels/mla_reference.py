"""Latent attention and its pool write as their definitions read: dense, float32, row by row.

The attention costs num_seqs x T x longest; it is the oracle, not a path to serve with.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.pool_storage import to_float32, to_storage


def mla_attention(
    q_latent: jax.Array,
    q_rope: jax.Array,
    pool_layer: jax.Array,
    kv_lens: jax.Array,
    block_tables: jax.Array,
    query_starts: jax.Array,
    num_seqs: jax.Array,
    *,
    scale: float,
    return_lse: bool,
) -> tuple[jax.Array, jax.Array | None]:
    """Arguments, shapes and results as in `pallas_kernels.mla_attention`, checked.

    Without return_lse the second result is None.
    """
    num_rows, num_heads, latent_dim = q_latent.shape
    q = jnp.concatenate([q_latent, q_rope], axis=2).astype(jnp.float32)
    key_dim = q.shape[2]
    max_kv_tokens = block_tables.shape[1] * pool_layer.shape[1]
    rows, kv_positions = jnp.arange(num_rows), jnp.arange(max_kv_tokens)

    def one_sequence(
        results: tuple[jax.Array, jax.Array], seq: jax.Array
    ) -> tuple[tuple[jax.Array, jax.Array], None]:
        """Puts the rows of sequence `seq` into out float32[T, Hq, latent_dim] and lse [T, Hq]."""
        pages = pool_layer[block_tables[seq]]  # [B, block_size, width]
        keys = to_float32(pages[:, :, :key_dim]).reshape(max_kv_tokens, key_dim)
        keys = jnp.where((kv_positions < kv_lens[seq])[:, None], keys, 0.0)
        scores = scale * jnp.einsum("thd,cd->htc", q, keys)
        first_row, end_row = query_starts[seq], query_starts[seq + 1]
        positions = kv_lens[seq] - (end_row - rows)  # of each query, were it of this sequence
        is_own = (rows >= first_row) & (rows < end_row) & (seq < num_seqs)
        visible = is_own[:, None] & (kv_positions <= positions[:, None])
        scores = jnp.where(visible, scores, -jnp.inf)
        largest = jnp.maximum(scores.max(axis=-1, keepdims=True), jnp.finfo(jnp.float32).min)
        weights = jnp.exp(scores - largest)
        totals = weights.sum(axis=-1, keepdims=True)
        shares = weights / jnp.maximum(totals, jnp.finfo(jnp.float32).tiny)
        attended = jnp.einsum("htc,cd->thd", shares, keys[:, :latent_dim])
        logs = (largest + jnp.log(totals))[..., 0].T
        out, lse = results
        return (
            jnp.where(is_own[:, None, None], attended, out),
            jnp.where(is_own[:, None], logs, lse),
        ), None

    start = (
        jnp.zeros((num_rows, num_heads, latent_dim), jnp.float32),
        jnp.full((num_rows, num_heads), -jnp.inf, jnp.float32),
    )
    with jax.default_matmul_precision("highest"):
        (out, lse), _ = lax.scan(one_sequence, start, jnp.arange(kv_lens.shape[0]))
    return out.astype(q_latent.dtype), lse if return_lse else None


def write_latent(
    pool_layer: jax.Array, latent: jax.Array, k_rope: jax.Array, slot_mapping: jax.Array
) -> jax.Array:
    """Writes row after row. Arguments as in `pallas_kernels.write_latent`, already checked."""
    num_blocks, block_size, width = pool_layer.shape
    zeros = jnp.zeros(width - latent.shape[1] - k_rope.shape[1], pool_layer.dtype)

    def write_row(row: jax.Array, pool: jax.Array) -> jax.Array:
        slot = slot_mapping[row]
        block, offset = slot // block_size, slot % block_size
        parts = [to_storage(part[row], pool.dtype) for part in (latent, k_rope)]
        written = pool.at[block, offset].set(jnp.concatenate([*parts, zeros]))
        return lax.select((slot >= 0) & (block < num_blocks), written, pool)

    return lax.fori_loop(0, slot_mapping.shape[0], write_row, pool_layer)
