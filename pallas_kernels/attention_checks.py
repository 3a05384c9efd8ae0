"""Checks of the attention ops' arguments: each names the argument, its value and the mend."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.attention_plan import AttentionPlan
from pallas_kernels.pool_storage import SCALED_POOL_DTYPES, pool_layout

Array = jax.Array | np.ndarray
QUERY_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


def check_are_arrays(**arrays: Any) -> None:
    for name, array in arrays.items():
        if not hasattr(array, "shape") or not hasattr(array, "dtype"):
            raise TypeError(f"{name} is a {type(array).__name__}; give a jax or numpy array")


def check_queries(q: jax.Array, pool_layer: jax.Array) -> None:
    num_kv_heads, width = pool_layer.shape[1] // 2, pool_layer.shape[3]
    if q.ndim != 3 or 0 in q.shape:
        raise ValueError(f"q has shape {tuple(q.shape)}; it must be [T, Hq, D], none of them 0")
    pool_layout(pool_layer, q.shape[2])  # refuses a head_dim that is wider than the rows
    if width % 128 and q.shape[2] != width:
        raise ValueError(
            f"q has head_dim {q.shape[2]}, but pool_layer has rows of {width}; match them, or use "
            "rows of a multiple of 128"
        )
    if q.shape[1] % num_kv_heads:
        raise ValueError(
            f"q has {q.shape[1]} heads; use a multiple of pool_layer's {num_kv_heads} KV heads"
        )
    if q.dtype not in QUERY_DTYPES:
        raise TypeError(f"q has dtype {q.dtype}; use float32, bfloat16 or float16")


def check_batch(kv_lens: Array, block_tables: Array, query_starts: Array, num_seqs: Array) -> None:
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


def check_scores(
    scale: float, sliding_window: int | None, soft_cap: float | None, causal: bool
) -> None:
    if not isinstance(scale, (int, float)) or not math.isfinite(scale):
        raise ValueError(
            f"scale is {scale!r}; it must be a finite Python number, usually head_dim ** -0.5"
        )
    check_window(sliding_window, causal)
    if soft_cap is not None and not (math.isfinite(soft_cap) and soft_cap > 0):
        raise ValueError(f"soft_cap is {soft_cap}; use a number above 0, or None for no cap")


def check_window(sliding_window: int | None, causal: bool) -> None:
    if sliding_window is None:
        return
    check_positive_int("sliding_window", sliding_window)
    if not causal:
        raise ValueError(
            f"sliding_window is {sliding_window} with causal=False; a window ends at the query's "
            "position, which only a causal query has: use None"
        )


def check_positive_int(name: str, value: int) -> None:
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} is {value!r}; use an int of at least 1")


def check_head_vector(name: str, vector: jax.Array | None, num_heads: int) -> None:
    if vector is None:
        return
    if vector.shape != (num_heads,):
        raise ValueError(f"{name} has shape {tuple(vector.shape)}; it must be [{num_heads}]")
    if not jnp.issubdtype(vector.dtype, jnp.floating):
        raise TypeError(f"{name} has dtype {vector.dtype}; use float32")


def check_sinks(sinks: jax.Array | None, num_heads: int, return_lse: bool) -> None:
    check_head_vector("sinks", sinks, num_heads)
    if sinks is not None and return_lse:
        raise ValueError(
            "sinks are given with return_lse=True; every part of a merge would count them: leave "
            "them out here, and multiply the merged output by sigmoid(lse - sinks)"
        )


def check_parts(outs: Sequence[jax.Array], lses: Sequence[jax.Array]) -> None:
    if not outs or len(outs) != len(lses):
        raise ValueError(
            f"outs has {len(outs)} parts and lses has {len(lses)}; give as many, at least one"
        )
    for index, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        if out.shape != outs[0].shape or out.dtype != outs[0].dtype:
            raise ValueError(
                f"outs[{index}] is {out.dtype}{list(out.shape)}, but outs[0] is "
                f"{outs[0].dtype}{list(outs[0].shape)}; give parts of one shape and dtype"
            )
        if lse.shape != out.shape[:-1]:
            raise ValueError(
                f"lses[{index}] has shape {tuple(lse.shape)}; it must be {out.shape[:-1]}, "
                "outs without its last axis"
            )


def check_scales(
    pool_layer: jax.Array, k_scale: jax.Array | None, v_scale: jax.Array | None
) -> None:
    for name, vector in (("k_scale", k_scale), ("v_scale", v_scale)):
        check_head_vector(name, vector, pool_layer.shape[1] // 2)
        if vector is None and pool_layer.dtype in SCALED_POOL_DTYPES:
            raise ValueError(
                f"{name} is None; a pool of {pool_layer.dtype} needs one scale a KV head, "
                f"float32[{pool_layer.shape[1] // 2}]"
            )


def check_plan(
    plan: AttentionPlan,
    q: jax.Array,
    pool_layer: jax.Array,
    kv_lens: jax.Array,
    *,
    sliding_window: int | None,
    causal: bool,
    decode_only: bool,
) -> None:
    planned = (plan.row_ranks.shape[0], plan.rank_rows.shape[0], plan.block_size)
    block_size = pool_layout(pool_layer, q.shape[2]).block_size
    given = (q.shape[0], kv_lens.shape[0], block_size)
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
    if plan.causal != causal:
        raise ValueError(
            f"plan was made for causal={plan.causal}, but this call has causal={causal}; make a "
            "plan for each"
        )
    if decode_only and not plan.decode_only:
        raise ValueError(
            "decode_only is True, but plan was made for prefills too; give plan_attention the "
            "same decode_only"
        )
