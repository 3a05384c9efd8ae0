"""What a GPU attention kernel is compiled for, and the sizes that fit a Hopper multiprocessor."""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.pool_storage import PoolLayout

# Keys of a step: the 64 rows that a warpgroup's matrix product has.
CHUNK_TOKENS = 64
WARPGROUP_ROWS = 64
# Of a swizzled tile in shared memory; what is worked on in registers is cut along them too.
TILE_COLUMNS = 64
LOG2_E = math.log2(math.e)
LN_2 = math.log(2)

# Shared memory of a multiprocessor (228 KiB) without what the driver keeps of each program.
_SHARED_BYTES = 227 * 1024
_RESERVED_BYTES = 1024
# For reductions across warps, and for barriers.
REDUCTION_BYTES = 2048
_BARRIER_BYTES = 512
_MAX_STAGES = 8
_MIN_STAGES = 2
QUERY_BUFFERS = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class GpuSpec:
    """Everything that a kernel's code depends on.

    A *tile* is `tile_tokens` query tokens of one sequence; its rows are tokens x query heads of
    one KV head, `rows` of them with padding. Row r is token r // group, head r % group.

    In the *turned* form (decodes) the scores are [keys, rows]: keys fill the matrix unit's 64
    rows, and the few queries are its columns, of which it takes as few as 8. In the *upright*
    form (prefills) they are [rows, keys], and each warpgroup has 64 rows.
    """

    num_kv_heads: int
    group: int
    width: int
    block_size: int
    pool_dtype: DTypeLike
    compute_dtype: DTypeLike
    out_dtype: DTypeLike
    soft_cap: float | None
    sliding_window: int | None
    causal: bool
    is_turned: bool
    tile_tokens: int
    num_warpgroups: int
    warpgroup_rows: int
    num_stages: int
    num_multiprocessors: int
    programs_each: int

    @property
    def num_programs(self) -> int:
        """Programs of a launch: all that run at once."""
        return self.num_multiprocessors * self.programs_each

    @property
    def rows(self) -> int:
        """Rows of a tile, with padding."""
        return self.num_warpgroups * self.warpgroup_rows

    @property
    def copy_tokens(self) -> int:
        """Tokens of one copy: of a block, or of a chunk where blocks are larger."""
        return min(self.block_size, CHUNK_TOKENS)

    @property
    def copies_a_chunk(self) -> int:
        """Of keys, and again of values."""
        return CHUNK_TOKENS // self.copy_tokens

    @property
    def widens(self) -> bool:
        """Whether the pool's numbers must become 16 bits wide before they are multiplied."""
        return jnp.dtype(self.pool_dtype).itemsize == 1

    @property
    def keys_axis(self) -> int:
        """Of the scores."""
        return 0 if self.is_turned else 1

    def scores_shape(self, num_keys: int) -> tuple[int, int]:
        """Of a warpgroup's scores, or with the width for num_keys of its outputs."""
        rows = self.warpgroup_rows
        return (num_keys, rows) if self.is_turned else (rows, num_keys)

    def key_factor(self, scale: float) -> float:
        """Of q . k: what makes a score in base 2 of it, or the argument of a cap's exponential."""
        return scale * LOG2_E * (1 if self.soft_cap is None else 2 / self.soft_cap)


def decode_spec(
    pool: PoolLayout,
    num_q_heads: int,
    *,
    pool_dtype: DTypeLike,
    q_dtype: DTypeLike,
    soft_cap: float | None,
    sliding_window: int | None,
    causal: bool,
    num_multiprocessors: int,
) -> GpuSpec:
    """Of the kernel for sequences with one query token.

    Raises:
      ValueError: the heads of a group do not fit.
    """
    group = num_q_heads // pool.num_kv_heads
    if group > most_rows(pool.width):
        raise ValueError(
            f"q has {group} heads a KV head; use at most {most_rows(pool.width)} with rows of "
            f"{pool.width}"
        )
    is_turned = group <= (64 if pool.width <= 128 else 32)
    warpgroup_rows = _round_up(group, 8) if is_turned else WARPGROUP_ROWS
    num_warpgroups = 1 if is_turned else -(-group // WARPGROUP_ROWS)
    return _with_stages(
        GpuSpec(
            num_kv_heads=pool.num_kv_heads,
            group=group,
            width=pool.width,
            block_size=pool.block_size,
            pool_dtype=jnp.dtype(pool_dtype),
            compute_dtype=_compute_dtype(q_dtype, pool_dtype),
            out_dtype=jnp.dtype(q_dtype),
            soft_cap=soft_cap,
            sliding_window=sliding_window,
            causal=causal,
            is_turned=is_turned,
            tile_tokens=1,
            num_warpgroups=num_warpgroups,
            warpgroup_rows=warpgroup_rows,
            num_stages=_MIN_STAGES,
            num_multiprocessors=num_multiprocessors,
            programs_each=1,
        )
    )


def prefill_spec(decodes: GpuSpec) -> GpuSpec:
    """Of the kernel for sequences with more query tokens, beside one for decodes."""
    num_warpgroups = most_rows(decodes.width) // WARPGROUP_ROWS
    return _with_stages(
        dataclasses.replace(
            decodes,
            is_turned=False,
            tile_tokens=num_warpgroups * WARPGROUP_ROWS // decodes.group,
            num_warpgroups=num_warpgroups,
            warpgroup_rows=WARPGROUP_ROWS,
        )
    )


def _compute_dtype(q_dtype: DTypeLike, pool_dtype: DTypeLike) -> DTypeLike:
    """Of the products' factors. Hopper turns float8 into float16, and not into bfloat16."""
    is_float8 = jnp.dtype(pool_dtype) in (jnp.float8_e4m3fn, jnp.float8_e5m2)
    return jnp.dtype(jnp.float16 if is_float8 else q_dtype)


def most_rows(width: int) -> int:
    """Rows of the largest tile: two warpgroups' if their outputs fit into registers."""
    return 2 * WARPGROUP_ROWS if width <= 128 else WARPGROUP_ROWS


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def stage_bytes(spec: GpuSpec) -> int:
    """Keys and values of a chunk."""
    return 2 * CHUNK_TOKENS * spec.width * jnp.dtype(spec.pool_dtype).itemsize


def shared_bytes(spec: GpuSpec) -> int:
    """Shared memory that a program takes."""
    queries = QUERY_BUFFERS * spec.rows * spec.width * 2
    weights = spec.rows * CHUNK_TOKENS * 2
    widened = 2 * CHUNK_TOKENS * spec.width * 2 if spec.widens else 0
    fixed = queries + weights + widened + REDUCTION_BYTES + _BARRIER_BYTES
    return fixed + spec.num_stages * stage_bytes(spec)


def _with_stages(spec: GpuSpec) -> GpuSpec:
    """As many chunks in flight as shared memory holds.

    A multiprocessor gets two programs where three chunks of each fit, and all their registers (128
    a thread): one then computes while the other waits.
    """
    without = shared_bytes(dataclasses.replace(spec, num_stages=0))
    is_light = spec.is_turned and spec.warpgroup_rows <= 16
    for programs_each, least in ((2, 3), (1, _MIN_STAGES)):
        budget = (_SHARED_BYTES + _RESERVED_BYTES) // programs_each - _RESERVED_BYTES
        num_stages = min(_MAX_STAGES, (budget - without) // stage_bytes(spec))
        if num_stages >= least and (is_light or programs_each == 1):
            return dataclasses.replace(spec, num_stages=num_stages, programs_each=programs_each)
    raise ValueError(
        f"rows of {spec.width} {jnp.dtype(spec.pool_dtype).name} need "
        f"{without + _MIN_STAGES * stage_bytes(spec)} bytes of shared memory, more than "
        f"{_SHARED_BYTES}; use a smaller head_dim"
    )
