"""The public op of a decode step: writes each sequence's new token, then attends to all of them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import attention_checks as checks
from pallas_kernels.attention import choose_implementation, ragged_paged_attention
from pallas_kernels.kv_write import stored_values, write_kv
from pallas_kernels.pool_storage import SCALED_POOL_DTYPES, check_pool, pool_layout


def write_and_attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    pool_layer: jax.Array,
    kv_lens: jax.Array,
    block_tables: jax.Array,
    num_seqs: jax.Array | int,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`write_kv` of one token a sequence, then `ragged_paged_attention` of its query.

    The token stands at position kv_lens[s] - 1 of its sequence. On a TPU both are one kernel: the
    page that the token goes to is fetched once, for its attention, and no second launch is paid.
    No sequence may read the slot that another one's token goes to.

    Args:
      q: float32, bfloat16 or float16 [S, Hq, D], positions already encoded; row s is sequence s's.
      k, v: [S, Hkv, D], of the new tokens; dtypes as in `write_kv`.
      pool_layer: as in `ragged_paged_attention`. Donate it, and read only the result afterwards.
      kv_lens: int32[S], tokens in the cache with the new one: at least 1; 0 for padding.
      block_tables: int32[S, B], blocks of each sequence in order, padded with 0.
      num_seqs: int32[], how many of the S sequences are real; they come first.
      scale, sliding_window, soft_cap, sinks, k_scale, v_scale: as in `ragged_paged_attention`;
        the scales are used for the write too, where k and v are floats.
      implementation: "cpu", "xla", "reference", "gpu", "tpu" (interpreted where there is none), or
        None for the best on this backend.

    Returns:
      [S, Hq, D], the dtype of `q`, zeros for padding; and the pool.

    Raises:
      ValueError, TypeError: as `write_kv` and `ragged_paged_attention`.
    """
    q, k, v, pool_layer, kv_lens, block_tables = map(
        jnp.asarray, (q, k, v, pool_layer, kv_lens, block_tables)
    )
    num_seqs = jnp.asarray(num_seqs, jnp.int32)
    if k.shape[:1] != q.shape[:1] or kv_lens.shape != q.shape[:1]:
        raise ValueError(
            f"q has shape {tuple(q.shape)}, k {tuple(k.shape)} and kv_lens {tuple(kv_lens.shape)}; "
            "a decode step has one row of each for every sequence"
        )
    starts = jnp.minimum(jnp.arange(kv_lens.shape[0] + 1, dtype=jnp.int32), num_seqs)
    check_pool(pool_layer)
    checks.check_queries(q, pool_layer)
    checks.check_batch(kv_lens, block_tables, starts, num_seqs)
    checks.check_scores(scale, sliding_window, soft_cap, True)
    checks.check_sinks(sinks, q.shape[1], False)
    checks.check_scales(pool_layer, k_scale, v_scale)
    options: dict[str, Any] = dict(
        scale=scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        sinks=sinks,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    write_scales: dict[str, Any] = {}
    if pool_layer.dtype in SCALED_POOL_DTYPES and k.dtype != pool_layer.dtype:
        write_scales = dict(k_scale=k_scale, v_scale=v_scale)
    name = choose_implementation(implementation, None, q, pool_layer, kv_lens, block_tables)
    if name == "tpu":
        from pallas_kernels import attention_tpu

        return attention_tpu.write_and_attend(
            q,
            stored_values("k", k, write_scales.get("k_scale"), pool_layer),
            stored_values("v", v, write_scales.get("v_scale"), pool_layer),
            pool_layer,
            kv_lens,
            block_tables,
            num_seqs,
            **options,
        )
    layout = pool_layout(pool_layer, q.shape[2])
    seqs = jnp.arange(kv_lens.shape[0])
    last = jnp.maximum(kv_lens - 1, 0)
    slots = block_tables[seqs, last // layout.block_size] * layout.block_size
    slots = jnp.where(seqs < num_seqs, slots + last % layout.block_size, 0)
    pool_layer = write_kv(pool_layer, k, v, slots, **write_scales, implementation=name)
    batch = (kv_lens, block_tables, starts, num_seqs)
    out = ragged_paged_attention(
        q, pool_layer, *batch, **options, implementation=name, decode_only=True
    )
    return out, pool_layer
