"""The GPU kernel that merges the partial results of each unit of work."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.attention_gpu_kernel import swizzled
from pallas_kernels.attention_gpu_plan import Share, Tile
from pallas_kernels.attention_gpu_spec import GpuSpec
from pallas_kernels.gpu_runtime import interpret_mode, plgpu, store

_LOWEST = -1e30


def merge_segments(
    spec: GpuSpec,
    sums: jax.Array,
    statistics: jax.Array,
    tiles: jax.Array,
    shares: jax.Array,
    sinks: jax.Array,
    factors: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """The attention of all tiles, from the segments that `attend_shares` leaves.

    Args:
      sums, statistics: from `attend_shares`.
      tiles, shares: see `GpuPlan`.
      sinks: float32[Hkv, warpgroups, warpgroup_rows], logits in base 2 of the rows; -1e30 for none.
      factors: float32[Hkv], of the outputs.

    Returns:
      out: out_dtype[tiles, Hkv, warpgroups, warpgroup_rows, width].
      lse: float32[tiles, Hkv, warpgroups, warpgroup_rows], log2 of the softmax's denominator. Both
        undefined for tiles without chunks.
    """

    def paged_attention_merge(*refs, **scratch):
        _kernel(spec, *refs, **scratch)

    num_tiles, heads, warpgroups = tiles.shape[0], spec.num_kv_heads, spec.num_warpgroups
    rows = spec.warpgroup_rows
    return plgpu.kernel(
        paged_attention_merge,
        out_type=[
            jax.ShapeDtypeStruct((num_tiles, heads, warpgroups, rows, spec.width), spec.out_dtype),
            jax.ShapeDtypeStruct((num_tiles, heads, warpgroups, rows), jnp.float32),
        ],
        scratch_types=dict(staged=swizzled((rows, spec.width), spec.out_dtype)),
        grid=(num_tiles * heads * warpgroups,),
        grid_names=("part",),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret_mode() or None,
    )(sums, statistics, tiles, shares, sinks, factors)


def _kernel(
    spec: GpuSpec,
    sums_hbm,  # float32[units + programs, warpgroups, ...], see `attend_shares`
    statistics_hbm,  # float32[units + programs, warpgroups, 2, warpgroup_rows]
    tiles_hbm,  # int32[tiles, 8]
    shares_hbm,  # int32[programs, 8]
    sinks_hbm,  # float32[Hkv, warpgroups, warpgroup_rows]
    factors_hbm,  # float32[Hkv]
    out_hbm,  # out_dtype[tiles, Hkv, warpgroups, warpgroup_rows, width]
    lse_hbm,  # float32[tiles, Hkv, warpgroups, warpgroup_rows]
    *,
    staged,  # out_dtype[warpgroup_rows, width]
):
    """One warpgroup's rows of one unit: a loop over its segments, mostly one.

        sums, statistics of segments u + p, HBM -> registers | rescale, add | sink, 1 / total
          -> shared memory, turned if need be -> HBM

    Exact: the segments are weighted by their share of the common denominator, in float32.
    """
    part = lax.axis_index("part")
    unit, warpgroup = _split(part, spec.num_warpgroups)
    tile, head = _split(unit, spec.num_kv_heads)
    num_chunks = tiles_hbm[tile, Tile.NUM_CHUNKS]
    start = spec.num_kv_heads * tiles_hbm[tile, Tile.START] + head * num_chunks
    share = shares_hbm[0, Share.SIZE]
    row_layout = plgpu.Layout.WGMMA.reduce(spec.keys_axis)
    shape = spec.scores_shape(spec.width)

    def spread(rows: jax.Array) -> jax.Array:
        return lax.broadcast_in_dim(rows, shape, [1 - spec.keys_axis])

    def load_rows(ref: Any) -> jax.Array:
        return plgpu.load(ref, layout=row_layout, optimized=False)

    def add(program, carry):
        merged, maximum, total = carry
        place = unit + program
        own = load_rows(statistics_hbm.at[place, warpgroup, 0])
        own_total = load_rows(statistics_hbm.at[place, warpgroup, 1])
        higher = jnp.maximum(maximum, own)
        decay, weight = jnp.exp2(maximum - higher), jnp.exp2(own - higher)
        sums = plgpu.load(sums_hbm.at[place, warpgroup], layout=plgpu.Layout.WGMMA, optimized=False)
        merged = merged * spread(decay) + sums * spread(weight)
        return merged, higher, total * decay + own_total * weight

    @pl.when(num_chunks > 0)
    def _merge():
        rows = (spec.warpgroup_rows,)
        merged, maximum, total = lax.fori_loop(
            lax.div(start, share),
            lax.div(start + num_chunks - 1, share) + 1,
            add,
            (
                plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA),
                plgpu.layout_cast(jnp.full(rows, _LOWEST, jnp.float32), row_layout),
                plgpu.layout_cast(jnp.zeros(rows, jnp.float32), row_layout),
            ),
        )
        lse = maximum + jnp.log2(total)
        store(lse_hbm.at[tile, head, warpgroup], lse)
        sink = load_rows(sinks_hbm.at[head, warpgroup])
        higher = jnp.maximum(maximum, sink)
        decay = jnp.exp2(maximum - higher)
        denominator = total * decay + jnp.exp2(sink - higher)
        # Rows that see nothing have a total of 0, and no sums.
        scale = decay * factors_hbm[head] / jnp.maximum(denominator, jnp.finfo(jnp.float32).tiny)
        as_stored = staged.transpose((1, 0)) if spec.is_turned else staged
        as_stored[...] = (merged * spread(scale)).astype(spec.out_dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(staged, out_hbm.at[tile, head, warpgroup])
        plgpu.wait_smem_to_gmem(0)


def _split(number: jax.Array, parts: int) -> tuple[jax.Array, jax.Array]:
    return lax.div(number, jnp.int32(parts)), lax.rem(number, jnp.int32(parts))
