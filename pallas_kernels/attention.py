"""The public attention op: checks the arguments and picks an implementation."""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import attention_checks as checks
from pallas_kernels import (
    attention_cpu,
    attention_reference,
    attention_xla,
    tpu_runtime,
)
from pallas_kernels.attention_plan import AttentionPlan, make_plan
from pallas_kernels.pool_storage import check_pool, pool_layout

IMPLEMENTATIONS = ("reference", "xla", "cpu", "gpu", "tpu")

_log = logging.getLogger(__name__)


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
    causal: bool = True,
    return_lse: bool = False,
    decode_only: bool = False,
    implementation: str | None = None,
    plan: AttentionPlan | None = None,
) -> Any:
    """Attention of a ragged batch of queries over a paged KV cache.

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
        float8_e4m3fn or float8_e5m2. Or in a TPU's form, rows of a multiple of 128 numbers that
        hold several tokens or a padded one: see `pool_storage`.
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
      causal: False lets every query of a sequence see all its kv_lens[s] tokens, of which there
        may be fewer than queries. Not with a sliding_window.
      return_lse: whether to return the log of the softmax's denominator too, which makes partial
        results over disjoint tokens mergeable: `merge_attention`. Not with sinks, which every
        part would count again; they come in once, after the merge.
      decode_only: promises that every sequence has one query row, which spares the program the
        code for prefills. The rows of longer sequences are then undefined.
      implementation: "tpu" or "gpu" (Pallas kernels, for TPUs and for Hopper GPUs; interpreted
        elsewhere), "cpu" (C++, built on first use where a compiler is found), "xla", "reference",
        or None for the best that takes these arguments on this backend.
      plan: from `plan_attention` on the same batch, to share it between layers; made here if
        None. Only for "xla", which it selects if `implementation` is None. A plan for decodes
        only is itself the promise of decode_only.

    Returns:
      [T, Hq, D], the dtype of `q`. With return_lse, a pair: that, and float32[T, Hq], the log of
      the sum of exp(score) over the tokens that the row sees, scores scaled and capped; -inf for
      rows that see no token and for rows of padding.

    Raises:
      ValueError: a shape or value does not fit; the message names it and what would.
      TypeError: a dtype does not fit.

    Source: PagedAttention (arXiv 2309.06180); the online softmax and the tiling are
    FlashAttention's (arXiv 2205.14135), the split of long decodes Flash-Decoding's.
    """
    num_seqs = jnp.int32(num_seqs) if isinstance(num_seqs, int) else num_seqs
    checks.check_are_arrays(
        q=q,
        pool_layer=pool_layer,
        kv_lens=kv_lens,
        block_tables=block_tables,
        query_starts=query_starts,
        num_seqs=num_seqs,
    )
    check_pool(pool_layer)
    checks.check_queries(q, pool_layer)
    checks.check_batch(kv_lens, block_tables, query_starts, num_seqs)
    checks.check_scores(scale, sliding_window, soft_cap, causal)
    checks.check_sinks(sinks, q.shape[1], return_lse)
    checks.check_scales(pool_layer, k_scale, v_scale)
    # Numpy's arrays would fail where a traced value indexes them.
    q, pool_layer = jnp.asarray(q), jnp.asarray(pool_layer)
    kv_lens, block_tables, query_starts, num_seqs = batch = tuple(
        map(jnp.asarray, (kv_lens, block_tables, query_starts, num_seqs))
    )
    options: dict[str, Any] = dict(
        scale=scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        sinks=sinks,
        k_scale=k_scale,
        v_scale=v_scale,
        causal=causal,
        return_lse=return_lse,
    )
    name = choose_implementation(implementation, plan, q, pool_layer, kv_lens, block_tables)
    if name == "reference":
        return attention_reference.ragged_paged_attention(q, pool_layer, *batch, **options)
    if name == "cpu":
        return attention_cpu.ragged_paged_attention(q, pool_layer, *batch, **options)
    if name in ("tpu", "gpu"):
        return _kernel_module(name).ragged_paged_attention(
            q, pool_layer, *batch, **options, decode_only=decode_only
        )
    limits: dict[str, Any] = dict(
        sliding_window=sliding_window, causal=causal, decode_only=decode_only
    )
    if plan is None:
        block_size = pool_layout(pool_layer, q.shape[2]).block_size
        plan = make_plan(*batch, num_rows=q.shape[0], block_size=block_size, **limits)
    checks.check_plan(plan, q, pool_layer, kv_lens, **limits)
    return attention_xla.ragged_paged_attention(q, pool_layer, plan, **options)


def choose_implementation(
    implementation: str | None,
    plan: AttentionPlan | None,
    q: jax.Array,
    pool_layer: jax.Array,
    kv_lens: jax.Array,
    block_tables: jax.Array,
) -> str:
    """The name to run; ValueError if the named one is unknown or cannot run this."""
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"implementation is {implementation!r}; use None or one of {list(IMPLEMENTATIONS)}"
        )
    if plan is not None and implementation not in (None, "xla"):
        raise ValueError(
            f"plan is given, but implementation {implementation!r} takes none; leave it"
        )
    if implementation is not None and implementation not in ("tpu", "gpu", "cpu"):
        return implementation
    wanted = implementation or _kernel_of_backend()
    if wanted is None or plan is not None:
        return "xla"
    if wanted == "tpu":
        reason = _kernel_module("tpu").unsupported_reason(q, pool_layer, kv_lens, block_tables)
    elif wanted == "gpu":
        reason = _kernel_module("gpu").unsupported_reason(q, pool_layer)
    else:
        reason = attention_cpu.unsupported_reason(q, pool_layer)
    if reason is not None and implementation is not None:
        raise ValueError(f"implementation {wanted!r} cannot run this: {reason}; or use 'xla'")
    if reason is not None and wanted == "gpu":
        _log_once(reason)
    return wanted if reason is None else "xla"


def uses_plan(implementation: str | None) -> bool:
    """Whether a plan made once a step would save each layer from making its own.

    implementation: as in `ragged_paged_attention`. With None, where the backend's own kernel takes
    no plan, False even if some layer's arguments turn out to be none for the kernel: giving a plan
    would choose "xla" for all.
    """
    if implementation is not None:
        return implementation == "xla"
    kernel = _kernel_of_backend()
    return kernel is None or (kernel == "cpu" and attention_cpu.missing_reason() is not None)


def _kernel_of_backend() -> str | None:
    """The name of the kernel that is made for what is being traced for; None if there is none."""
    if tpu_runtime.compiles():  # on a TPU, or compiling for one elsewhere
        return "tpu" if jax.default_backend() == "tpu" else None
    if jax.default_backend() == "gpu":
        from pallas_kernels import gpu_runtime

        reason = gpu_runtime.missing_reason() or gpu_runtime.device_reason()
        if reason is not None:
            _log_once(reason)
        return "gpu" if reason is None else None
    return "cpu" if jax.default_backend() == "cpu" else None


def _kernel_module(name: str) -> Any:
    """Pallas's kernels of a name. It takes 25 MB and 0.3 s to import all, so only what runs is."""
    return importlib.import_module(f"pallas_kernels.attention_{name}")


@functools.cache
def _log_once(reason: str) -> None:
    _log.info("attention on this GPU runs in XLA, without the Pallas kernel: %s", reason)


def plan_attention(
    kv_lens: jax.Array,
    block_tables: jax.Array,
    query_starts: jax.Array,
    num_seqs: jax.Array | int,
    *,
    num_rows: int,
    block_size: int,
    sliding_window: int | None = None,
    causal: bool = True,
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
      causal: as in `ragged_paged_attention`.
      decode_only: promises that every sequence has one query row, so that the program has no code
        for prefills (half the compile time). Rows of longer sequences then come back as zeros.

    Raises:
      ValueError, TypeError: an argument does not fit; the message names it and what would.
    """
    num_seqs = jnp.int32(num_seqs) if isinstance(num_seqs, int) else num_seqs
    checks.check_are_arrays(
        kv_lens=kv_lens, block_tables=block_tables, query_starts=query_starts, num_seqs=num_seqs
    )
    checks.check_batch(kv_lens, block_tables, query_starts, num_seqs)
    checks.check_positive_int("num_rows", num_rows)
    checks.check_positive_int("block_size", block_size)
    checks.check_window(sliding_window, causal)
    return make_plan(
        jnp.asarray(kv_lens),
        jnp.asarray(block_tables),
        jnp.asarray(query_starts),
        jnp.asarray(num_seqs),
        num_rows=num_rows,
        block_size=block_size,
        sliding_window=sliding_window,
        causal=causal,
        decode_only=decode_only,
    )


def merge_attention(
    outs: Sequence[jax.Array], lses: Sequence[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Attention over a union of disjoint sets of tokens, from the attention over each of them.

    Exact: the parts are weighted with their share of the common softmax's denominator, in float32.

    Args:
      outs: one or more parts [..., D] of one shape and dtype, as `ragged_paged_attention` returns.
      lses: float32[...] for each part: the log of its denominator, -inf where it saw nothing.

    Returns:
      (out, lse): [..., D] in the parts' dtype, and float32[...]. Where all parts saw nothing, out
      is 0 and lse is -inf.

    Raises:
      ValueError: numbers or shapes of the parts do not fit each other.

    Source: the rescaling of the online softmax (arXiv 1805.02867), between parts instead of steps.
    """
    checks.check_parts(outs, lses)
    largest = functools.reduce(jnp.maximum, lses)
    # -inf - -inf is no number; any finite stand-in gives weights of 0.
    largest = jnp.where(jnp.isneginf(largest), 0.0, largest)
    weights = [jnp.exp(lse - largest) for lse in lses]
    total = sum(weights[1:], weights[0])
    parts = [
        weight[..., None] * out.astype(jnp.float32)
        for weight, out in zip(weights, outs, strict=True)
    ]
    out = sum(parts[1:], parts[0]) / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)[..., None]
    return out.astype(outs[0].dtype), largest + jnp.log(total)
