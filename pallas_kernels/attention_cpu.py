"""Ragged paged attention as C++, for CPUs where a compiler is found.

The kernel is `attention_cpu.cc`, which says how it works; it is built on first use
(`native_build`) and called through XLA's foreign function interface.

Where it has to be a part of a program it is an operation like any other: under jit, in loops, under
shard_map, in XLA's persistent cache. vmap runs it one batch after another.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import pathlib

import jax
import jax.ffi
import jax.numpy as jnp
import numpy as np

from pallas_kernels.native_build import NativeBuildError, build_library, source_digest

_FOLDER = pathlib.Path(__file__).parent
_SOURCE = _FOLDER / "attention_cpu.cc"
_HEADERS = tuple(
    _FOLDER / name
    for name in (
        "attention_cpu_math.h",
        "attention_cpu_plan.h",
        "attention_cpu_pool.h",
        "matmul_cpu_threads.h",
    )
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
_MAX_HEAD_DIM = 1024  # kMaxHeadDim there

_log = logging.getLogger(__name__)


def unsupported_reason(q: jax.Array, pool_layer: jax.Array) -> str | None:
    """Why the kernel cannot run here on these (checked) arguments; None if it can.

    The first call of a process builds or loads the kernel.
    """
    if jax.default_backend() != "cpu":
        return f"the default backend is {jax.default_backend()!r}, no CPU"
    if q.dtype not in (jnp.float32, jnp.bfloat16):
        return f"q has dtype {q.dtype}; use float32 or bfloat16"
    if q.shape[2] > _MAX_HEAD_DIM:
        return f"head_dim is {q.shape[2]}; use at most {_MAX_HEAD_DIM}"
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
    num_rows, num_q_heads, _ = q.shape
    kind = POOL_KINDS[jnp.dtype(pool_layer.dtype)]

    def floats(values: jax.Array | None) -> jax.Array:
        """An empty array stands for none."""
        return jnp.zeros(0, jnp.float32) if values is None else values.astype(jnp.float32)

    call = jax.ffi.ffi_call(
        _target_name(),
        (
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            jax.ShapeDtypeStruct((num_rows, num_q_heads) if return_lse else (0,), jnp.float32),
        ),
        vmap_method="sequential",
    )
    out, lse = call(
        q,
        pool_layer,
        kv_lens,
        block_tables,
        query_starts,
        num_seqs,
        floats(sinks),
        floats(k_scale),
        floats(v_scale),
        scale=np.float32(scale),
        soft_cap=np.float32(soft_cap or 0.0),
        sliding_window=np.int64(sliding_window or 0),
        causal=causal,
        pool_kind=np.int64(kind),
    )
    return (out, lse) if return_lse else out


@functools.cache
def _target_name() -> str:
    """With the sources' digest, so that no program from XLA's cache meets a kernel of another."""
    return f"paged_attention_{source_digest((_SOURCE, *_HEADERS))}"


@functools.cache
def missing_reason() -> str | None:
    """Builds and registers the kernel, once a process; why it is not there, or None."""
    try:
        library = ctypes.CDLL(str(build_library(_SOURCE, _HEADERS)))
        handler = library.PagedAttention
    except (NativeBuildError, OSError, AttributeError) as error:
        _log.info("attention on CPU runs in XLA, without its C++ kernel: %s", error)
        return f"there is no C++ kernel: {error}"
    jax.ffi.register_ffi_target(_target_name(), jax.ffi.pycapsule(handler), platform="cpu")
    return None
