"""The public attention op: checks the arguments and picks an implementation."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import attention_reference, attention_xla
from pallas_kernels.attention_plan import AttentionPlan, make_plan
from pallas_kernels.pool_storage import SCALED_POOL_DTYPES, check_pool

IMPLEMENTATIONS = ("reference", "xla")
_QUERY_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


def ragged_paged_attention(
    q: jax.Array,
    pool_layer: jax.Array,
    kv_lens: jax.Array,
    block_tables: jax.Array,
    query_starts: jax.Array,
    num_seqs: jax.Array | int,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    implementation: str | None = None,
    plan: AttentionPlan | None = None,
) -> jax.Array:
    """Causal attention of a ragged batch of queries over a paged KV cache.

    The queries of sequence s are rows query_starts[s] to query_starts[s + 1] of `q`, and are its
    last q_len tokens: query i stands at position kv_lens[s] - q_len + i and sees the tokens up to
    its own. Prefill chunks (q_len > 1) and decodes (q_len = 1) mix freely. Query head h reads KV
    head h // (Hq // Hkv). Rows that no sequence owns come back as zeros; whatever stands in slots
    past a sequence's end, or in blocks that it does not own, never reaches its output. Sums are
    in float32 for all dtypes. Works under jit, and under shard_map over the heads
    (with check_vma=False, as kernels need it too).

    Args:
      q: float32, bfloat16 or float16 [T, Hq, D], positions already encoded.
      pool_layer: [num_blocks, 2 * Hkv, block_size, D], after this step's KV write; K of head h at
        index h, V at Hkv + h. float32, bfloat16, float16, uint16 (bfloat16 bits), int8,
        float8_e4m3fn or float8_e5m2.
      kv_lens: int32[S], tokens in the cache including this step's; 0 for padding.
      block_tables: int32[S, B], blocks of each sequence in order, padded with 0.
      query_starts: int32[S + 1], cumulative; entries past num_seqs repeat the total.
      num_seqs: int32[], how many of the S sequences are real.
      scale: factor of q . k, usually D ** -0.5.
      sliding_window: if given, a query sees its own token and the sliding_window - 1 before it.
      soft_cap: if given, scores become soft_cap * tanh(score / soft_cap).
      sinks: float[Hq]; if given, a logit a head that takes weight in the softmax, with no value.
      k_scale, v_scale: float[Hkv]; stored K (V) times its head's scale is the real K (V). Needed
        for int8 and float8 pools.
      implementation: "xla", "reference", or None for the best on this backend ("xla").
      plan: from `plan_attention` on the same batch, to share it between layers; made here if
        None. Only for "xla".

    Returns:
      [T, Hq, D], the dtype of `q`.

    Raises:
      ValueError: a shape or value does not fit; the message names it and what would.
      TypeError: a dtype does not fit.

    Source: PagedAttention (arXiv 2309.06180); the online softmax and the tiling are
    FlashAttention's (arXiv 2205.14135), the split of long decodes Flash-Decoding's.
    """
    num_seqs = jnp.int32(num_seqs) if isinstance(num_seqs, int) else num_seqs
    _check_are_arrays(
        q=q,
        pool_layer=pool_layer,
        kv_lens=kv_lens,
        block_tables=block_tables,
        query_starts=query_starts,
        num_seqs=num_seqs,
    )
    check_pool(pool_layer)
    _check_queries(q, pool_layer)
    _check_batch(kv_lens, block_tables, query_starts, num_seqs)
    _check_scores(scale, sliding_window, soft_cap)
    _check_head_vector("sinks", sinks, q.shape[1])
    _check_scales(pool_layer, k_scale, v_scale)
    # Numpy's arrays would fail where a traced value indexes them.
    q, pool_layer = jnp.asarray(q), jnp.asarray(pool_layer)
    kv_lens, block_tables, query_starts, num_seqs = map(
        jnp.asarray, (kv_lens, block_tables, query_starts, num_seqs)
    )
    name = implementation or "xla"
    if name not in IMPLEMENTATIONS:
        raise ValueError(
            f"implementation is {implementation!r}; use None or one of {list(IMPLEMENTATIONS)}"
        )
    options: dict[str, Any] = dict(
        scale=scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        sinks=sinks,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    if name == "reference":
        if plan is not None:
            raise ValueError("plan is given, but implementation 'reference' takes none; leave it")
        return attention_reference.ragged_paged_attention(
            q, pool_layer, kv_lens, block_tables, query_starts, num_seqs, **options
        )
    if plan is None:
        plan = make_plan(
            kv_lens,
            block_tables,
            query_starts,
            num_seqs,
            num_rows=q.shape[0],
            block_size=pool_layer.shape[2],
            sliding_window=sliding_window,
            decode_only=False,
        )
    _check_plan(plan, q, pool_layer, kv_lens, sliding_window)
    return attention_xla.ragged_paged_attention(q, pool_layer, plan, **options)


def plan_attention(
    kv_lens: jax.Array,
    block_tables: jax.Array,
    query_starts: jax.Array,
    num_seqs: jax.Array | int,
    *,
    num_rows: int,
    block_size: int,
    sliding_window: int | None = None,
    decode_only: bool = False,
) -> AttentionPlan:
    """The work list of a batch, to be made once a step and given to every layer's attention.

    A plan without a window serves layers with any window (and reads more than they need); a plan
    with one serves only layers with that window or a smaller one.

    Args:
      kv_lens, block_tables, query_starts, num_seqs: as in `ragged_paged_attention`.
      num_rows: T, the rows of q, padding included.
      block_size: tokens a block of the pool.
      sliding_window: the layers' window in tokens, or None.
      decode_only: promises that every sequence has one query row, so that the program has no code
        for prefills (half the compile time). Rows of longer sequences then come back as zeros.

    Raises:
      ValueError, TypeError: an argument does not fit; the message names it and what would.
    """
    num_seqs = jnp.int32(num_seqs) if isinstance(num_seqs, int) else num_seqs
    _check_are_arrays(
        kv_lens=kv_lens, block_tables=block_tables, query_starts=query_starts, num_seqs=num_seqs
    )
    _check_batch(kv_lens, block_tables, query_starts, num_seqs)
    _check_positive_int("num_rows", num_rows)
    _check_positive_int("block_size", block_size)
    if sliding_window is not None:
        _check_positive_int("sliding_window", sliding_window)
    return make_plan(
        jnp.asarray(kv_lens),
        jnp.asarray(block_tables),
        jnp.asarray(query_starts),
        jnp.asarray(num_seqs),
        num_rows=num_rows,
        block_size=block_size,
        sliding_window=sliding_window,
        decode_only=decode_only,
    )


def _check_are_arrays(**arrays: Any) -> None:
    for name, array in arrays.items():
        if not hasattr(array, "shape") or not hasattr(array, "dtype"):
            raise TypeError(f"{name} is a {type(array).__name__}; give a jax or numpy array")


def _check_queries(q: jax.Array, pool_layer: jax.Array) -> None:
    num_kv_heads, head_dim = pool_layer.shape[1] // 2, pool_layer.shape[3]
    if q.ndim != 3 or 0 in q.shape:
        raise ValueError(f"q has shape {tuple(q.shape)}; it must be [T, Hq, D], none of them 0")
    if q.shape[2] != head_dim:
        raise ValueError(f"q has head_dim {q.shape[2]}, but pool_layer has {head_dim}; match them")
    if q.shape[1] % num_kv_heads:
        raise ValueError(
            f"q has {q.shape[1]} heads; use a multiple of pool_layer's {num_kv_heads} KV heads"
        )
    if q.dtype not in _QUERY_DTYPES:
        raise TypeError(f"q has dtype {q.dtype}; use float32, bfloat16 or float16")


def _check_batch(
    kv_lens: jax.Array, block_tables: jax.Array, query_starts: jax.Array, num_seqs: jax.Array
) -> None:
    if kv_lens.ndim != 1 or kv_lens.shape[0] == 0:
        raise ValueError(f"kv_lens has shape {tuple(kv_lens.shape)}; it must be [S], S >= 1")
    max_seqs = kv_lens.shape[0]
    if block_tables.ndim != 2 or block_tables.shape[0] != max_seqs or block_tables.shape[1] == 0:
        raise ValueError(
            f"block_tables has shape {tuple(block_tables.shape)}; it must be [S, B] with "
            f"S = {max_seqs} as in kv_lens and B >= 1"
        )
    if query_starts.shape != (max_seqs + 1,):
        raise ValueError(
            f"query_starts has shape {tuple(query_starts.shape)}; it must be [S + 1] = "
            f"[{max_seqs + 1}]"
        )
    if num_seqs.shape != ():
        raise ValueError(f"num_seqs has shape {tuple(num_seqs.shape)}; it must be a scalar")
    named = dict(
        kv_lens=kv_lens, block_tables=block_tables, query_starts=query_starts, num_seqs=num_seqs
    )
    for name, array in named.items():
        if array.dtype != jnp.int32:
            raise TypeError(f"{name} has dtype {array.dtype}; use int32")


def _check_scores(scale: float, sliding_window: int | None, soft_cap: float | None) -> None:
    if not isinstance(scale, (int, float)) or not math.isfinite(scale):
        raise ValueError(
            f"scale is {scale!r}; it must be a finite Python number, usually head_dim ** -0.5"
        )
    if sliding_window is not None:
        _check_positive_int("sliding_window", sliding_window)
    if soft_cap is not None and not (math.isfinite(soft_cap) and soft_cap > 0):
        raise ValueError(f"soft_cap is {soft_cap}; use a number above 0, or None for no cap")


def _check_positive_int(name: str, value: int) -> None:
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} is {value!r}; use an int of at least 1")


def _check_head_vector(name: str, vector: jax.Array | None, num_heads: int) -> None:
    if vector is None:
        return
    if vector.shape != (num_heads,):
        raise ValueError(f"{name} has shape {tuple(vector.shape)}; it must be [{num_heads}]")
    if not jnp.issubdtype(vector.dtype, jnp.floating):
        raise TypeError(f"{name} has dtype {vector.dtype}; use float32")


def _check_scales(
    pool_layer: jax.Array, k_scale: jax.Array | None, v_scale: jax.Array | None
) -> None:
    for name, vector in (("k_scale", k_scale), ("v_scale", v_scale)):
        _check_head_vector(name, vector, pool_layer.shape[1] // 2)
        if vector is None and pool_layer.dtype in SCALED_POOL_DTYPES:
            raise ValueError(
                f"{name} is None; a pool of {pool_layer.dtype} needs one scale a KV head, "
                f"float32[{pool_layer.shape[1] // 2}]"
            )


def _check_plan(
    plan: AttentionPlan,
    q: jax.Array,
    pool_layer: jax.Array,
    kv_lens: jax.Array,
    sliding_window: int | None,
) -> None:
    planned = (plan.row_ranks.shape[0], plan.rank_rows.shape[0], plan.block_size)
    given = (q.shape[0], kv_lens.shape[0], pool_layer.shape[2])
    if planned != given:
        raise ValueError(
            f"plan was made for (rows, sequences, block_size) = {planned}, but this batch has "
            f"{given}; call plan_attention on this batch"
        )
    widest = plan.sliding_window
    if widest is not None and (sliding_window is None or sliding_window > widest):
        raise ValueError(
            f"plan was made for a sliding_window of {widest}, but this call has "
            f"{sliding_window}; make a plan for the wider window"
        )
