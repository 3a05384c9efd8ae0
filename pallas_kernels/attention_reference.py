"""Ragged paged attention as its definition reads: one sequence after another, dense, float32.

Cost is num_seqs x T x longest; it is the oracle, not a path to serve with.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.pool_storage import pool_layout, to_float32, token_rows


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
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Arguments, shapes and result as in `pallas_kernels.ragged_paged_attention`, checked."""
    num_rows, num_q_heads, head_dim = q.shape
    layout = pool_layout(pool_layer, head_dim)
    num_kv_heads, block_size = layout.num_kv_heads, layout.block_size
    heads_per_kv = num_q_heads // num_kv_heads
    max_kv_tokens = block_tables.shape[1] * block_size
    rows, kv_positions = jnp.arange(num_rows), jnp.arange(max_kv_tokens)

    def one_sequence(
        state: tuple[jax.Array, jax.Array], seq: jax.Array
    ) -> tuple[tuple[jax.Array, jax.Array], None]:
        """Puts the rows of sequence `seq` into out: float32[T, Hq, D] and lse: float32[T, Hq]."""
        out, lse = state
        pages = token_rows(pool_layer[block_tables[seq]], layout)  # [B, 2 * Hkv, block_size, D]
        kv = to_float32(pages.swapaxes(0, 1)).reshape(2, num_kv_heads, max_kv_tokens, head_dim)
        in_cache = (kv_positions < kv_lens[seq])[:, None]
        k, v = jnp.where(in_cache, kv[0], 0.0), jnp.where(in_cache, kv[1], 0.0)
        if k_scale is not None:
            k = k * k_scale[:, None, None]
        if v_scale is not None:
            v = v * v_scale[:, None, None]
        k, v = jnp.repeat(k, heads_per_kv, axis=0), jnp.repeat(v, heads_per_kv, axis=0)

        scores = scale * jnp.einsum("thd,hcd->htc", q.astype(jnp.float32), k)
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        first_row, end_row = query_starts[seq], query_starts[seq + 1]
        positions = kv_lens[seq] - (end_row - rows)  # of each query, were it of this sequence
        is_own = (rows >= first_row) & (rows < end_row) & (seq < num_seqs)
        visible = is_own[:, None] & (kv_positions < kv_lens[seq])
        if causal:
            visible &= kv_positions <= positions[:, None]
        if sliding_window is not None:
            visible &= kv_positions > positions[:, None] - sliding_window
        scores = jnp.where(visible, scores, -jnp.inf)
        if sinks is not None:
            sink = sinks.astype(jnp.float32)[:, None, None]
            sink = jnp.broadcast_to(sink, (*scores.shape[:2], 1))
            scores = jnp.concatenate([scores, sink], axis=-1)
        largest = jnp.maximum(scores.max(axis=-1, keepdims=True), jnp.finfo(jnp.float32).min)
        weights = jnp.exp(scores - largest)
        total = weights.sum(axis=-1, keepdims=True)
        own_lse = (largest + jnp.log(total))[..., 0].T
        weights /= jnp.maximum(total, jnp.finfo(jnp.float32).tiny)
        attended = jnp.einsum("htc,hcd->thd", weights[..., :max_kv_tokens], v)
        out = jnp.where(is_own[:, None, None], attended, out)
        return (out, jnp.where(is_own[:, None], own_lse, lse)), None

    start = (
        jnp.zeros((num_rows, num_q_heads, head_dim), jnp.float32),
        jnp.full((num_rows, num_q_heads), -jnp.inf, jnp.float32),
    )
    with jax.default_matmul_precision("highest"):
        (out, lse), _ = lax.scan(one_sequence, start, jnp.arange(kv_lens.shape[0]))
    return (out.astype(q.dtype), lse) if return_lse else out.astype(q.dtype)
