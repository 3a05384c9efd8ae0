"""A step's rotary embedding and KV write as C++, for CPUs where a compiler is found.

The kernel is `rope_write_cpu.cc`, which says how it works; it is built on first use
(`native_build`) and called through XLA's foreign function interface. It is an operation like any
other: under jit, in loops, under shard_map, in XLA's persistent cache. vmap runs it one batch after
another.
"""

from __future__ import annotations

import functools
import pathlib

import jax
import jax.ffi
import jax.numpy as jnp
import numpy as np

from pallas_kernels import tpu_runtime
from pallas_kernels.attention_cpu import MAX_HEAD_DIM, POOL_KINDS
from pallas_kernels.native_build import NativeKernel, register_handler

_FOLDER = pathlib.Path(__file__).parent
_HEADERS = ("attention_cpu_math.h", "attention_cpu_pool.h", "matmul_cpu_threads.h")
_KERNEL = NativeKernel(
    name="paged_rope_write",
    does="rotary embedding and KV writes on CPU run",
    source=_FOLDER / "rope_write_cpu.cc",
    headers=tuple(_FOLDER / name for name in _HEADERS),
    register=functools.partial(register_handler, symbol="PagedRopeWrite"),
)
_ROW_DTYPES = (jnp.float32, jnp.bfloat16)
_POOL_DTYPES = (jnp.float32, jnp.uint16, jnp.int8)


def unsupported_reason(rows: jax.Array, pool_layer: jax.Array) -> str | None:
    """Why the kernel cannot run here on these arguments; None if it can.

    The first call of a process builds or loads the kernel.
    """
    if jax.default_backend() != "cpu":
        return f"the default backend is {jax.default_backend()!r}, no CPU"
    if tpu_runtime.compiles():
        return "the program is compiled for a TPU"
    if rows.dtype not in _ROW_DTYPES:
        return f"rows has dtype {rows.dtype}; use float32 or bfloat16"
    if pool_layer.dtype not in _POOL_DTYPES:
        return f"pool_layer has dtype {pool_layer.dtype}; use float32, uint16 or int8"
    if rows.shape[3] > MAX_HEAD_DIM:
        return f"head_dim is {rows.shape[3]}; use at most {MAX_HEAD_DIM}"
    return missing_reason()


def rope_write(
    rows: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    pool_layer: jax.Array,
    slot_mapping: jax.Array,
    *,
    channel_scale: jax.Array | None = None,
    channel_offset: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Rotates a step's queries and keys and writes its keys and values into a layer's pool.

    Only where `unsupported_reason` is None. Of each head the pairs (i, i + D/2) are turned, in
    float32, and rounded to the dtype of `rows`. A row's result has the same bits whatever rows
    stand beside it.

    Args:
      rows: float32 or bfloat16 [T, Hkv, G + 2, D]: of each KV head its G queries, its key and its
        value. D is even.
      cos, sin: float32[T, D / 2] of each row's position.
      pool_layer: float32, uint16 (bfloat16 bits) or int8 [num_blocks, 2 * Hkv, rows, width], as in
        `pallas_kernels.write_kv`; written in place, where the caller donates it.
      slot_mapping: int32[T], as there; slots outside the pool are dropped.
      channel_scale, channel_offset: float32[2 * Hkv, D], the keys' first, for an int8 pool alone:
        what is stored is (real - offset) / scale, to the nearest even, clipped to +-127.

    Returns:
      q [T, Hkv * G, D] in the dtype of rows, and the pool.

    Raises:
      ValueError: shapes do not fit each other, or scales the pool; the message names them.
    """
    num_rows, num_kv_heads, group_and_two, head_dim = rows.shape
    _check_shapes(rows, cos, sin, pool_layer, slot_mapping)
    is_scaled = pool_layer.dtype == jnp.int8
    for name, values in (("channel_scale", channel_scale), ("channel_offset", channel_offset)):
        wanted = (2 * num_kv_heads, head_dim) if is_scaled else None
        given = None if values is None else values.shape
        if given != wanted:
            raise ValueError(
                f"{name} has shape {given}; a pool of {pool_layer.dtype} needs {wanted}"
            )

    def floats(values: jax.Array | None) -> jax.Array:
        """An empty array stands for none."""
        return jnp.zeros(0, jnp.float32) if values is None else values.astype(jnp.float32)

    call = jax.ffi.ffi_call(
        _KERNEL.target,
        (
            jax.ShapeDtypeStruct(
                (num_rows, num_kv_heads * (group_and_two - 2), head_dim), rows.dtype
            ),
            jax.ShapeDtypeStruct(pool_layer.shape, pool_layer.dtype),
        ),
        input_output_aliases={3: 1},
        vmap_method="sequential",
    )
    q, pool_layer = call(
        rows,
        cos,
        sin,
        pool_layer,
        slot_mapping.astype(jnp.int32),
        floats(channel_scale),
        floats(channel_offset),
        pool_kind=np.int64(POOL_KINDS[jnp.dtype(pool_layer.dtype)]),
    )
    return q, pool_layer


def _check_shapes(
    rows: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    pool_layer: jax.Array,
    slot_mapping: jax.Array,
) -> None:
    num_rows, num_kv_heads, group_and_two, head_dim = rows.shape
    if head_dim % 2 or group_and_two < 3:
        raise ValueError(f"rows has shape {rows.shape}; give [T, Hkv, G + 2, an even D]")
    if pool_layer.shape[1] != 2 * num_kv_heads or pool_layer.shape[3] < head_dim:
        raise ValueError(
            f"pool_layer has shape {pool_layer.shape}; rows {rows.shape} need "
            f"[num_blocks, {2 * num_kv_heads}, rows, {head_dim} or more]"
        )
    tables = (num_rows, head_dim // 2)
    for name, values, wanted in (
        ("cos", cos, tables),
        ("sin", sin, tables),
        ("slot_mapping", slot_mapping, (num_rows,)),
    ):
        if values.shape != wanted:
            raise ValueError(f"{name} has shape {values.shape}; rows {rows.shape} need {wanted}")


def missing_reason() -> str | None:
    """Builds and registers the kernel, once a process; why it is not there, or None."""
    return _KERNEL.missing_reason
