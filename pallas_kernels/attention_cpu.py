"""Ragged paged attention as C++, for CPUs where a compiler is found.

The kernel is `attention_cpu.cc`, which says how it works; it is built on first use
(`native_build`) and called through XLA's foreign function interface.

Where it has to be a part of a program it is an operation like any other: under jit, in loops, under
shard_map, in XLA's persistent cache. vmap runs it one batch after another.
"""

from __future__ import annotations

import functools
import pathlib

import jax
import jax.ffi
import jax.numpy as jnp
import numpy as np

from pallas_kernels.native_build import NativeKernel, register_handler

_FOLDER = pathlib.Path(__file__).parent
_HEADERS = (
    "attention_cpu_keys.h",
    "attention_cpu_math.h",
    "attention_cpu_plan.h",
    "attention_cpu_pool.h",
    "attention_cpu_rows.h",
    "matmul_cpu_threads.h",
)
_KERNEL = NativeKernel(
    name="paged_attention",
    does="attention on CPU runs",
    source=_FOLDER / "attention_cpu.cc",
    headers=tuple(_FOLDER / name for name in _HEADERS),
    register=functools.partial(register_handler, symbol="PagedAttention"),
)
# The numbers are those of PoolKind in attention_cpu_pool.h.
POOL_KINDS = {
    jnp.dtype(jnp.float32): 0,
    jnp.dtype(jnp.bfloat16): 1,
    jnp.dtype(jnp.uint16): 1,
    jnp.dtype(jnp.float16): 2,
    jnp.dtype(jnp.int8): 3,
    jnp.dtype(jnp.float8_e4m3fn): 4,
    jnp.dtype(jnp.float8_e5m2): 5,
}
MAX_HEAD_DIM = 1024  # kMaxHeadDim there


def unsupported_reason(q: jax.Array, pool_layer: jax.Array) -> str | None:
    """Why the kernel cannot run here on these (checked) arguments; None if it can.

    The first call of a process builds or loads the kernel.
    """
    if jax.default_backend() != "cpu":
        return f"the default backend is {jax.default_backend()!r}, no CPU"
    if q.dtype not in (jnp.float32, jnp.bfloat16):
        return f"q has dtype {q.dtype}; use float32 or bfloat16"
    if q.shape[2] > MAX_HEAD_DIM:
        return f"head_dim is {q.shape[2]}; use at most {MAX_HEAD_DIM}"
    if jnp.dtype(pool_layer.dtype) not in POOL_KINDS:
        return f"pool_layer has dtype {pool_layer.dtype}"
    return missing_reason()


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
    """Arguments, shapes and result as in `pallas_kernels.ragged_paged_attention`, checked.

    Only where `unsupported_reason` is None.
    """
    out, lse = _call(
        q,
        pool_layer,
        (kv_lens, block_tables, query_starts, num_seqs),
        (sinks, k_scale, v_scale, None, None),
        returns_lse=return_lse,
        scale=np.float32(scale),
        soft_cap=np.float32(soft_cap or 0.0),
        sliding_window=np.int64(sliding_window or 0),
        causal=causal,
    )
    return (out, lse) if return_lse else out


def attention_over_channels(
    q: jax.Array,
    pool_layer: jax.Array,
    kv_lens: jax.Array,
    block_tables: jax.Array,
    query_starts: jax.Array,
    num_seqs: jax.Array,
    *,
    scale: float,
    channel_scale: jax.Array,
    channel_offset: jax.Array,
) -> jax.Array:
    """Causal attention over a pool with a scale and an offset for each channel.

    What is stored, times its channel's scale plus its offset, is the real key or value. The
    keys' offset adds the same to every score of a query, and so is left out.

    Args:
      q, pool_layer, kv_lens, block_tables, query_starts, num_seqs, scale: as in
        `pallas_kernels.ragged_paged_attention`, checked. Only where `unsupported_reason` is None.
      channel_scale, channel_offset: float32[2 * Hkv, D], the keys' first, as in the pool.

    Returns:
      [T, Hq, D], the dtype of q; zeros in rows that no sequence owns.

    Raises:
      ValueError: the shape of channel_scale or channel_offset is another.
    """
    wanted = (pool_layer.shape[1], q.shape[2])
    for name, array in (("channel_scale", channel_scale), ("channel_offset", channel_offset)):
        if array.shape != wanted:
            raise ValueError(f"{name} has shape {array.shape}; give {wanted}")
    return _call(
        q,
        pool_layer,
        (kv_lens, block_tables, query_starts, num_seqs),
        (None, None, None, channel_scale, channel_offset),
        returns_lse=False,
        scale=np.float32(scale),
        soft_cap=np.float32(0),
        sliding_window=np.int64(0),
        causal=True,
    )[0]


def _call(
    q: jax.Array,
    pool_layer: jax.Array,
    batch: tuple[jax.Array, ...],
    floats: tuple[jax.Array | None, ...],
    *,
    returns_lse: bool,
    **attributes: np.generic | bool,
) -> tuple[jax.Array, jax.Array]:
    """The kernel's two results; the second is empty without returns_lse."""
    num_rows, num_q_heads, _ = q.shape
    call = jax.ffi.ffi_call(
        _KERNEL.target,
        (
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            jax.ShapeDtypeStruct((num_rows, num_q_heads) if returns_lse else (0,), jnp.float32),
        ),
        vmap_method="sequential",
    )
    none = jnp.zeros(0, jnp.float32)  # An empty array stands for none.
    given = (none if values is None else values.astype(jnp.float32) for values in floats)
    kind = np.int64(POOL_KINDS[jnp.dtype(pool_layer.dtype)])
    out, lse = call(q, pool_layer, *batch, *given, **attributes, pool_kind=kind)
    return out, lse


def missing_reason() -> str | None:
    """Builds and registers the kernel, once a process; why it is not there, or None."""
    return _KERNEL.missing_reason
