"""The public latent-attention op and its pool write: check arguments, pick an implementation."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import mla_reference, mla_xla, tpu_runtime
from pallas_kernels.attention_checks import check_are_arrays, check_batch, check_positive_int
from pallas_kernels.pool_storage import FLOAT_POOL_DTYPES

MLA_IMPLEMENTATIONS = ("reference", "xla", "tpu")
_QUERY_DTYPES = (jnp.float32, jnp.bfloat16)
_POOL_DTYPES = tuple(dtype for dtype in FLOAT_POOL_DTYPES if dtype != jnp.float16)
_LANES = 128


def latent_pool_width(latent_dim: int, rope_dim: int, *, lane_multiple: int = _LANES) -> int:
    """Numbers a token takes in a latent pool: both parts, filled up to whole lanes.

    A TPU's memory is tiled in 128 lanes (512 + 64 -> 640); elsewhere lane_multiple=1 saves them.

    Raises:
      ValueError: a size is not a positive int.
    """
    check_positive_int("latent_dim", latent_dim)
    check_positive_int("rope_dim", rope_dim)
    check_positive_int("lane_multiple", lane_multiple)
    return -(-(latent_dim + rope_dim) // lane_multiple) * lane_multiple


def mla_attention(
    q_latent: jax.Array,
    q_rope: jax.Array,
    pool_layer: jax.Array,
    kv_lens: jax.Array,
    block_tables: jax.Array,
    query_starts: jax.Array,
    num_seqs: jax.Array | int,
    *,
    scale: float,
    return_lse: bool = False,
    implementation: str | None = None,
) -> Any:
    """Causal multi-head latent attention of a ragged batch over a paged pool, absorbed form.

    The cache holds for each token one compressed vector c and one rotated key, shared by all
    heads. With the up-projections of keys and values absorbed into the query and the output,
    score = scale * (q_latent . c + q_rope . k_rope) and out = softmax(score) @ c, so that c is
    key and value at once. Per head, q_latent = W_UK^T q_nope before the call, and W_UV out after
    it, give the attention over expanded keys and values.

    The queries of sequence s are rows query_starts[s] to query_starts[s + 1], and are its last
    q_len tokens: query i stands at position kv_lens[s] - q_len + i and sees the tokens up to its
    own. Prefill chunks and decodes mix freely. Rows that no sequence owns come back as zeros;
    what stands past a sequence's end, or in blocks that it does not own, never reaches its output.

    Args:
      q_latent: float32 or bfloat16 [T, Hq, latent_dim] (DeepSeek: 512).
      q_rope: [T, Hq, rope_dim] (64), positions already encoded; the dtype of q_latent.
      pool_layer: [num_blocks, block_size, width], after this step's `write_latent`: c in the
        first latent_dim lanes, the rotated key in the next rope_dim, zeros up to width
        (`latent_pool_width`). float32, bfloat16, or uint16 (bfloat16 bits, not on a TPU).
      kv_lens: int32[S], tokens in the cache including this step's; 0 for padding.
      block_tables: int32[S, B], blocks of each sequence in order, padded with 0.
      query_starts: int32[S + 1], cumulative from 0; entries past num_seqs repeat the total.
      num_seqs: int32[], how many of the S sequences are real.
      scale: factor of the scores, (nope_dim + rope_dim) ** -0.5 times YaRN's if the model has it.
      return_lse: also return the scores' log-sum-exp, to merge attention over parts of a context.
      implementation: "reference", "xla", "tpu", or None for "tpu" on a TPU whose kernel takes
        these shapes and "xla" otherwise. "tpu" elsewhere runs in Pallas's interpreter: slow.

    Returns:
      out [T, Hq, latent_dim] in q's dtype; with return_lse (out, lse), lse float32[T, Hq] being
      log(sum(exp(score))) and -inf where a row sees nothing.

    Raises:
      ValueError: a shape or value does not fit; the message names it and what would.
      TypeError: a dtype does not fit.

    Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1 and appendix C.
    """
    num_seqs = jnp.int32(num_seqs) if isinstance(num_seqs, int) else num_seqs
    batch = dict(
        kv_lens=kv_lens, block_tables=block_tables, query_starts=query_starts, num_seqs=num_seqs
    )
    check_are_arrays(q_latent=q_latent, q_rope=q_rope, pool_layer=pool_layer, **batch)
    _check_pool(pool_layer)
    _check_queries(q_latent, q_rope, pool_layer)
    check_batch(**batch)
    if not isinstance(scale, (int, float)) or not math.isfinite(scale):
        raise ValueError(
            f"scale is {scale!r}; use a finite Python number, such as (128 + 64) ** -0.5"
        )
    # Numpy's arrays would fail where a traced value indexes them.
    q_latent, q_rope, pool_layer = map(jnp.asarray, (q_latent, q_rope, pool_layer))
    arrays = tuple(map(jnp.asarray, batch.values()))
    others: dict[str, Any] = {"reference": mla_reference, "xla": mla_xla}
    module: Any = tpu_runtime.chosen_module("mla_tpu", implementation, others, q_latent, pool_layer)
    module = module or others[implementation or "xla"]
    out, lse = module.mla_attention(
        q_latent, q_rope, pool_layer, *arrays, scale=float(scale), return_lse=return_lse
    )
    return (out, lse) if return_lse else out


def write_latent(
    pool_layer: jax.Array,
    latent: jax.Array,
    k_rope: jax.Array,
    slot_mapping: jax.Array,
    *,
    implementation: str | None = None,
) -> jax.Array:
    """Writes row t of `latent` and `k_rope` to slot `slot_mapping[t]` and returns the new pool.

    In place where the caller donates the pool (or made it inside the same jit) and reads only the
    result afterwards. The lanes past both parts are written as zeros.

    Args:
      pool_layer: [num_blocks, block_size, width], width >= latent_dim + rope_dim. float32,
        bfloat16 or uint16 (bfloat16 bits).
      latent: [T, latent_dim], compressed and normalised; a float dtype, rounded to the pool's.
      k_rope: [T, rope_dim], positions already encoded; a float dtype.
      slot_mapping: int32[T], slot = block_id * block_size + offset. Rows of padding point to
        slot 0, in the null block; any number of rows may share a slot there, and what such a slot
        then holds is not defined. Two real rows must not share a slot. Slots outside the pool
        (-1 for example) are dropped.
      implementation: "reference", "xla", or None for "xla", which serves TPUs too: the scatter
        stays in the pool's buffer there.

    Returns:
      The pool, same shape and dtype.

    Raises:
      ValueError: a shape does not fit, or the implementation is unknown.
      TypeError: a dtype does not fit.
    """
    named = dict(latent=latent, k_rope=k_rope, slot_mapping=slot_mapping)
    check_are_arrays(pool_layer=pool_layer, **named)
    _check_pool(pool_layer)
    for part, rows in (("latent", latent), ("k_rope", k_rope)):
        if rows.ndim != 2 or rows.shape[0] != slot_mapping.size or 0 in rows.shape:
            raise ValueError(
                f"{part} has shape {tuple(rows.shape)}; it must be [T, dim], T = "
                f"{slot_mapping.size} as in slot_mapping"
            )
        if not jnp.issubdtype(rows.dtype, jnp.floating):
            raise TypeError(f"{part} has dtype {rows.dtype}; a float pool needs a float dtype")
    if slot_mapping.ndim != 1:
        raise ValueError(f"slot_mapping has shape {tuple(slot_mapping.shape)}; it must be [T]")
    if not jnp.issubdtype(slot_mapping.dtype, jnp.integer):
        raise TypeError(f"slot_mapping has dtype {slot_mapping.dtype}; use int32")
    _check_width(latent.shape[1], k_rope.shape[1], pool_layer, "latent and k_rope")
    modules = {"reference": mla_reference, "xla": mla_xla}
    name = implementation or "xla"
    if name not in modules:
        raise ValueError(
            f"implementation is {implementation!r}; use None or one of {list(modules)}"
        )
    return modules[name].write_latent(*map(jnp.asarray, (pool_layer, *named.values())))


def _check_pool(pool_layer: jax.Array) -> None:
    if pool_layer.ndim != 3 or 0 in pool_layer.shape:
        raise ValueError(
            f"pool_layer has shape {tuple(pool_layer.shape)}; it must be [num_blocks, block_size, "
            "width], none of them 0"
        )
    if pool_layer.dtype not in _POOL_DTYPES:
        raise TypeError(
            f"pool_layer has dtype {pool_layer.dtype}; a latent pool is "
            f"{', '.join(jnp.dtype(d).name for d in _POOL_DTYPES)} (uint16 = bfloat16 bits)"
        )


def _check_width(latent_dim: int, rope_dim: int, pool_layer: jax.Array, owner: str) -> None:
    if latent_dim + rope_dim > pool_layer.shape[2]:
        raise ValueError(
            f"{owner} have {latent_dim} + {rope_dim} numbers a token, but pool_layer has width "
            f"{pool_layer.shape[2]}; make it latent_pool_width({latent_dim}, {rope_dim}) wide"
        )


def _check_queries(q_latent: jax.Array, q_rope: jax.Array, pool_layer: jax.Array) -> None:
    for name, q in (("q_latent", q_latent), ("q_rope", q_rope)):
        if q.ndim != 3 or 0 in q.shape or q.shape[:2] != q_latent.shape[:2]:
            raise ValueError(
                f"{name} has shape {tuple(q.shape)}; it must be [T, Hq, dim], none of them 0, "
                "T and Hq the same in q_latent and q_rope"
            )
        if q.dtype not in _QUERY_DTYPES or q.dtype != q_latent.dtype:
            raise TypeError(
                f"{name} has dtype {q.dtype}; use float32 or bfloat16, the same in q_latent and "
                "q_rope"
            )
    _check_width(q_latent.shape[2], q_rope.shape[2], pool_layer, "q_latent and q_rope")
