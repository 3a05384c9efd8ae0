"""The KV write of decodes, fused into their attention.

The page that a decode's own token goes to is in VMEM anyway, with the sequence's last item. The
token's key and value are put into it there, before the computation, and the 8 rows around them
are written back: no other kernel, and no second read of the page.

    ring      ... | last item of seq 0 | ...
    put               +token
    staging           8 rows, all heads   ----DMA---->  the page in HBM
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.attention_tpu_pipeline import Buffers, Item, divide, modulo
from pallas_kernels.attention_tpu_spec import LANES, SUBLANES, AttentionSpec, register_rows


class TokenWriter:
    """Writes the tokens of decodes to their pages, two writes in flight."""

    def __init__(self, spec: AttentionSpec, buffers: Buffers, staging, written, pool_hbm):
        self.spec, self.buffers = spec, buffers
        self.staging, self.written, self.pool_hbm = staging, written, pool_hbm

    @staticmethod
    def scratch(spec: AttentionSpec) -> tuple[Any, Any]:
        """VMEM pool dtype[2, 2 * Hkv, rows of a register, width], and a semaphore for each."""
        shape = (2, 2 * spec.pool.num_kv_heads, register_rows(spec), spec.pool.width)
        return pltpu.VMEM(shape, spec.pool_dtype), pltpu.SemaphoreType.DMA((2,))

    def _copy(self, number, offset, block_id, row):
        slot = modulo(number, 2)
        return pltpu.make_async_copy(
            self.staging.at[slot, :, pl.ds(offset, SUBLANES), :],
            self.pool_hbm.at[block_id, :, pl.ds(row, SUBLANES), :],
            self.written.at[slot],
        )

    def put(self, item: Item, slot, number) -> None:
        """Puts the item's last token into the ring's `slot` and starts to write it to HBM.

        Its rows are the last of its queries' buffer; see `attention_kernel`.

        Args:
          number: of this write, from 0.
        """
        spec = self.spec
        pl.when(number >= 2)(lambda: self._copy(number, 0, 0, 0).wait())
        token = item.visible_end - 1
        row = divide(token, spec.pool.tokens_per_row)
        rows = register_rows(spec)
        first = pl.multiple_of(row - modulo(row, rows), rows)
        here = lax.broadcasted_iota(jnp.int32, (rows, LANES), 0) == row - first
        if spec.pool.tokens_per_row > 1:
            lane = lax.broadcasted_iota(jnp.int32, (rows, LANES), 1)
            place = modulo(token, spec.pool.tokens_per_row)
            here &= divide(lane, spec.pool.head_dim) == place
        q_slot = modulo(item.tile_number, self.buffers.q.shape[0])
        new_row = spec.lane_tiles * spec.heads.num_rows
        for tile in range(spec.lane_tiles):
            lanes = pl.ds(tile * LANES, LANES)
            for index in range(2 * spec.pool.num_kv_heads):
                old = self.buffers.kv[slot, index, pl.ds(first, rows), lanes]
                new = self.buffers.q[q_slot, 0, pl.ds(new_row, 1)]
                both = jnp.where(here, new, old.astype(jnp.float32)).astype(old.dtype)
                self.buffers.kv[slot, index, pl.ds(first, rows), lanes] = both
                self.staging[modulo(number, 2), index, :, lanes] = both
                new_row += 1
        aligned = row - modulo(row, SUBLANES)
        in_page = pl.multiple_of(modulo(aligned, spec.pool.rows), SUBLANES)
        offset = pl.multiple_of(aligned - first, SUBLANES)
        self._copy(number, offset, item.last_block, in_page).start()

    def finish(self, count) -> None:
        """Waits until all `count` tokens are written."""
        for last in (1, 2):
            number = jnp.maximum(count - last, 0)
            pl.when(count >= last)(lambda number=number: self._copy(number, 0, 0, 0).wait())
