"""The public KV write: puts the keys and values of one step's tokens into a layer's pool."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import kv_write_reference, kv_write_xla, tpu_runtime
from pallas_kernels.pool_storage import SCALED_POOL_DTYPES, check_pool, to_storage

_FLOAT8 = (jnp.float8_e4m3fn, jnp.float8_e5m2)
_IMPLEMENTATIONS = {  # but "tpu", which is imported where it is used
    "reference": kv_write_reference.write_kv,
    "cpu": kv_write_xla.write_kv,  # next to attention's C++ kernel; one scatter is fast enough
    "gpu": kv_write_xla.write_kv,  # the same
    "xla": kv_write_xla.write_kv,
}


def write_kv(
    pool_layer: jax.Array,
    k: jax.Array,
    v: jax.Array,
    slot_mapping: jax.Array,
    *,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Writes row t of `k` and `v` to slot `slot_mapping[t]` and returns the new pool.

    In place where the caller donates the pool (or made it inside the same jit) and reads only the
    result afterwards: reading the old pool after the write makes XLA copy all of it.

    Args:
      pool_layer: [num_blocks, 2 * Hkv, rows, width]; K of head h at index h, V at Hkv + h. A row
        is a token of D numbers, or holds several or is filled up as `pool_storage.pool_layout`
        tells; lanes that fill up are written as zeros. float32, bfloat16, float16, uint16
        (bfloat16 bits), int8, float8_e4m3fn or float8_e5m2.
      k: [T, Hkv, D]. A float type for a float pool (rounded to it). For an int8 or float8 pool
        either floats with `k_scale`, or elements of the pool's dtype, quantised already, without.
      v: [T, Hkv, D], as `k`, with `v_scale`.
      slot_mapping: int32[T], slot = block_id * block_size + offset. Rows of padding point to
        slot 0, in the null block; any number of rows may share it, and what it then holds is not
        defined. Two real rows must not share a slot. Slots outside the pool (-1 for example) are
        dropped.
      k_scale, v_scale: float[Hkv], for floats on their way into an int8 or float8 pool: what is
        stored is the float divided by its head's scale, to the nearest even for int8, clipped to
        +-127 or to the finite range of the float8 type.
      implementation: "xla", "reference", "tpu" (interpreted where there is none), "cpu" (which is
        "xla", as is "gpu"), or None for the best on this backend.

    Returns:
      The pool, same shape and dtype.

    Raises:
      ValueError: a shape does not fit, a scale is missing or has no use, or the implementation is
        unknown or does not take this shape.
      TypeError: a dtype does not fit.
    """
    pool_layer, k, v, slot_mapping = map(jnp.asarray, (pool_layer, k, v, slot_mapping))
    check_pool(pool_layer)
    _check_shapes(pool_layer, k, v, slot_mapping)
    if k.shape[0] == 0:
        return pool_layer
    stored_k = stored_values("k", k, k_scale, pool_layer)
    stored_v = stored_values("v", v, v_scale, pool_layer)
    sizes = (pool_layer, k.shape[2], k.shape[0])
    kernel = tpu_runtime.chosen_module("kv_write_tpu", implementation, _IMPLEMENTATIONS, *sizes)
    if kernel is not None:
        return kernel.write_kv(pool_layer, stored_k, stored_v, slot_mapping)
    write = _IMPLEMENTATIONS[implementation or "xla"]
    if pool_layer.dtype not in _FLOAT8:
        return write(pool_layer, stored_k, stored_v, slot_mapping)
    # XLA's CPU backend would turn a float8 pool into float16 and back, which alters NaNs and takes
    # 2 to 18 ms for 10 MB; moved as bits, the pool is copied in 1.1 to 1.4 ms.
    arrays = (pool_layer, stored_k, stored_v)
    pool_bits, k_bits, v_bits = (lax.bitcast_convert_type(array, jnp.uint8) for array in arrays)
    written = write(pool_bits, k_bits, v_bits, slot_mapping)
    return lax.bitcast_convert_type(written, pool_layer.dtype)


def _check_shapes(
    pool_layer: jax.Array, k: jax.Array, v: jax.Array, slot_mapping: jax.Array
) -> None:
    num_kv_heads, width = pool_layer.shape[1] // 2, pool_layer.shape[3]
    if k.ndim != 3 or k.shape[1] != num_kv_heads or not 0 < k.shape[2] <= width:
        raise ValueError(
            f"k has shape {tuple(k.shape)}; a pool of shape {tuple(pool_layer.shape)} needs "
            f"[T, {num_kv_heads}, head_dim] with a head_dim of at most {width}"
        )
    if v.shape != k.shape:
        raise ValueError(f"v has shape {tuple(v.shape)}; it must be that of k, {tuple(k.shape)}")
    if slot_mapping.shape != k.shape[:1]:
        raise ValueError(
            f"slot_mapping has shape {tuple(slot_mapping.shape)}; it must be one slot a row of k: "
            f"[{k.shape[0]}]"
        )
    if not jnp.issubdtype(slot_mapping.dtype, jnp.integer):
        raise TypeError(f"slot_mapping has dtype {slot_mapping.dtype}; use int32")


def stored_values(
    name: str, values: jax.Array, scale: jax.Array | None, pool_layer: jax.Array
) -> jax.Array:
    """`values` [T, Hkv, D] as elements of the pool, divided by `scale` [Hkv] if it is given."""
    pool_dtype = pool_layer.dtype
    is_float = jnp.issubdtype(values.dtype, jnp.floating)
    if pool_dtype not in SCALED_POOL_DTYPES:
        if scale is not None:
            raise ValueError(
                f"{name}_scale is given, but a pool of {pool_dtype} stores {name} unscaled; leave "
                "it out"
            )
        if not is_float or values.dtype in SCALED_POOL_DTYPES:
            raise TypeError(
                f"{name} has dtype {values.dtype}; a pool of {pool_dtype} needs float32, bfloat16 "
                "or float16"
            )
        return to_storage(values, pool_dtype)
    if values.dtype == pool_dtype:
        if scale is not None:
            raise ValueError(
                f"{name}_scale is given, but {name} is {pool_dtype} already, as the pool; give "
                f"{name} as floats, or leave the scale out"
            )
        return values
    if not is_float or values.dtype in SCALED_POOL_DTYPES:
        raise TypeError(
            f"{name} has dtype {values.dtype}; a pool of {pool_dtype} needs floats with "
            f"{name}_scale, or {pool_dtype}"
        )
    num_kv_heads = values.shape[1]
    if scale is None:
        raise ValueError(
            f"{name}_scale is None and {name} has dtype {values.dtype}; a pool of {pool_dtype} "
            f"needs one scale a KV head, float32[{num_kv_heads}], or {name} as {pool_dtype}"
        )
    return _quantised(values, _checked_scale(name, scale, num_kv_heads), pool_dtype)


def _checked_scale(name: str, scale: jax.Array, num_kv_heads: int) -> jax.Array:
    scale = jnp.asarray(scale)
    if scale.shape != (num_kv_heads,):
        raise ValueError(
            f"{name}_scale has shape {tuple(scale.shape)}; it must be [{num_kv_heads}]"
        )
    if not jnp.issubdtype(scale.dtype, jnp.floating):
        raise TypeError(f"{name}_scale has dtype {scale.dtype}; use float32")
    return scale


def _quantised(values: jax.Array, scale: jax.Array, pool_dtype: jnp.dtype) -> jax.Array:
    """Floats [T, Hkv, D] over their head's scale, rounded and clipped to what the pool stores."""
    scaled = values.astype(jnp.float32) / scale.astype(jnp.float32)[:, None]
    if pool_dtype == jnp.int8:
        return jnp.clip(jnp.round(scaled), -127, 127).astype(jnp.int8)
    limit = float(jnp.finfo(pool_dtype).max)
    return jnp.clip(scaled, -limit, limit).astype(pool_dtype)
