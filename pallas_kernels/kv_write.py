"""The public KV write: puts the keys and values of one step's tokens into a layer's pool."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import kv_write_reference, kv_write_xla
from pallas_kernels.pool_storage import SCALED_POOL_DTYPES, check_pool

_IMPLEMENTATIONS = {
    "reference": kv_write_reference.write_kv,
    "xla": kv_write_xla.write_kv,
}


def write_kv(
    pool_layer: jax.Array,
    k: jax.Array,
    v: jax.Array,
    slot_mapping: jax.Array,
    *,
    implementation: str | None = None,
) -> jax.Array:
    """Writes row t of `k` and `v` to slot `slot_mapping[t]` and returns the new pool.

    In place where the caller donates the pool (or made it inside the same jit) and reads only the
    result afterwards: reading the old pool after the write makes XLA copy all of it.

    Args:
      pool_layer: [num_blocks, 2 * Hkv, block_size, D]; K of head h at index h, V at Hkv + h.
        float32, bfloat16, float16, uint16 (bfloat16 bits), int8, float8_e4m3fn or float8_e5m2.
      k: [T, Hkv, D]. A float type for a float pool (rounded to it); for an int8 or float8 pool,
        already quantised to the pool's dtype.
      v: [T, Hkv, D], the dtype of `k`.
      slot_mapping: int32[T], slot = block_id * block_size + offset. Rows of padding point to
        slot 0, in the null block; any number of rows may share a slot there, and what such a slot
        then holds is not defined. Two real rows must not share a slot. Slots outside the pool
        (-1 for example) are dropped.
      implementation: "xla", "reference", or None for the best on this backend ("xla").

    Returns:
      The pool, same shape and dtype.

    Raises:
      ValueError: a shape does not fit, or the implementation is unknown.
      TypeError: a dtype does not fit.
    """
    pool_layer, k, v, slot_mapping = map(jnp.asarray, (pool_layer, k, v, slot_mapping))
    check_pool(pool_layer)
    _, two_kv_heads, _, head_dim = pool_layer.shape
    if k.ndim != 3 or k.shape[1:] != (two_kv_heads // 2, head_dim):
        raise ValueError(
            f"k has shape {tuple(k.shape)}; a pool of shape {tuple(pool_layer.shape)} needs "
            f"[T, {two_kv_heads // 2}, {head_dim}]"
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
    _check_value_dtypes(pool_layer, k, v)
    name = implementation or "xla"
    if name not in _IMPLEMENTATIONS:
        raise ValueError(
            f"implementation is {implementation!r}; use None or one of {sorted(_IMPLEMENTATIONS)}"
        )
    return _IMPLEMENTATIONS[name](pool_layer, k, v, slot_mapping)


def _check_value_dtypes(pool_layer: jax.Array, k: jax.Array, v: jax.Array) -> None:
    for name, values in (("k", k), ("v", v)):
        if pool_layer.dtype in SCALED_POOL_DTYPES:
            if values.dtype != pool_layer.dtype:
                raise TypeError(
                    f"{name} has dtype {values.dtype} and the pool stores {pool_layer.dtype}: "
                    f"divide {name} by its scale and convert it to {pool_layer.dtype} first"
                )
        elif not jnp.issubdtype(values.dtype, jnp.floating):
            raise TypeError(f"{name} has dtype {values.dtype}; a float pool needs a float dtype")
