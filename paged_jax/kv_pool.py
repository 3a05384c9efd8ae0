"""The KV pool as a pytree, and its layout.

This is the only place besides the kernels that knows the layout:

    layers[i]: [num_blocks, 2 * num_kv_heads, block_size, head_dim]

Head-major, so that one block of all heads is one contiguous piece (a single DMA brings keys and
values), and the keys of one head within it lie together. The key of head h stands at index h, its
value at index num_kv_heads + h. Block 0 is the null block, where padding is read and written.

On a TPU the last two axes are rows of whole 128-lane tiles: two tokens of head_dim 64 share a row,
and a token of head_dim 96 is filled up with zeros. `pallas_kernels.pool_layout` tells which.
"""

from __future__ import annotations

from typing import Protocol

import flax.struct
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from paged_jax.batch import StepBatch
from pallas_kernels import (
    plan_attention,
    pool_layout,
    ragged_paged_attention,
    tpu_pool_shape,
    write_and_attend,
    write_kv,
)
from pallas_kernels.attention import uses_plan


class CacheShape(Protocol):
    """What the cache needs to know of a model; any `ModelConfig` will do."""

    @property
    def num_layers(self) -> int: ...

    @property
    def num_kv_heads(self) -> int: ...

    @property
    def head_dim(self) -> int: ...


@flax.struct.dataclass
class KVPool:
    """Keys and values of every block, of every layer. Donate it to each step that writes to it."""

    # One array a layer: dtype[num_blocks, 2 * num_kv_heads, block_size, head_dim], or the same
    # in the rows of a TPU.
    layers: tuple[jax.Array, ...]
    head_dim: int = flax.struct.field(pytree_node=False)

    @classmethod
    def create(
        cls,
        model: CacheShape,
        *,
        num_blocks: int,
        block_size: int = 16,
        dtype: DTypeLike = jnp.float32,
        for_tpu: bool | None = None,
    ) -> KVPool:
        """A pool of zeros. Its blocks are handed out by a `BlockPool`, block 0 never.

        Args:
          model: gives the number of layers and KV heads, and the head size.
          num_blocks: blocks of the pool, the null block included.
          block_size: tokens a block.
          dtype: float32 or bfloat16, the model's: `LoadedModel.dtype`.
          for_tpu: whether in the rows of a TPU; None for the default backend's form.

        Raises:
          ValueError: num_blocks, block_size or dtype is none of these.

        On CPU a bfloat16 pool keeps its numbers as raw bits (uint16), because XLA of jax 0.10
        would copy the whole pool at every write of bfloat16; the kernels read either.
        """
        if num_blocks < 2 or block_size < 1:
            raise ValueError(
                f"num_blocks={num_blocks}, block_size={block_size}: a pool needs the null block "
                "and one more, of at least one token"
            )
        if jnp.dtype(dtype) not in (jnp.float32, jnp.bfloat16, jnp.uint16):
            raise ValueError(f"dtype={jnp.dtype(dtype)}: it must be float32 or bfloat16")
        shape = (num_blocks, 2 * model.num_kv_heads, block_size, model.head_dim)
        if for_tpu is None:
            for_tpu = jax.default_backend() == "tpu"
        if for_tpu:
            shape = tpu_pool_shape(num_blocks, model.num_kv_heads, block_size, model.head_dim)
        elif jnp.dtype(dtype) == jnp.bfloat16 and jax.default_backend() == "cpu":
            dtype = jnp.uint16
        return cls(
            layers=tuple(jnp.zeros(shape, dtype) for _ in range(model.num_layers)),
            head_dim=model.head_dim,
        )

    def empty_like(self) -> KVPool:
        """A pool of zeros of the same shapes; this one may be deleted."""
        return jax.tree.map(lambda layer: jnp.zeros(layer.shape, layer.dtype), self)

    @classmethod
    def bytes_a_block(
        cls, model: CacheShape, *, block_size: int, dtype: DTypeLike, for_tpu: bool | None = None
    ) -> int:
        """Bytes of one block in all layers; arguments as in `create`."""
        shapes = jax.eval_shape(
            lambda: cls.create(
                model, num_blocks=2, block_size=block_size, dtype=dtype, for_tpu=for_tpu
            )
        )
        return sum(layer.size * layer.dtype.itemsize for layer in shapes.layers) // 2

    @property
    def num_blocks(self) -> int:
        return self.layers[0].shape[0]

    @property
    def block_size(self) -> int:
        return pool_layout(self.layers[0], self.head_dim).block_size

    @property
    def num_bytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers)

    def is_deleted(self) -> bool:
        """Whether a step took the buffers (donation) and never gave them back."""
        return any(layer.is_deleted() for layer in self.layers)


def uses_tpu_kernels(implementation: str | None) -> bool:
    """Whether an attention implementation means the TPU's kernels, and so a pool in their rows."""
    return implementation == "tpu" or (implementation is None and jax.default_backend() == "tpu")


def paged_attend(
    batch: StepBatch,
    *,
    block_size: int,
    scale: float,
    decode_only: bool = False,
    implementation: str | None = None,
):
    """The `attend` of a model's forward pass: write the step's keys and values, then attend.

    The write comes before the read, in every layer and for the whole step: so a sequence may read
    blocks that another sequence of the same step fills, and the pool is updated in place. On a
    TPU decodes write and read in one kernel, one after the other: `build_step` takes no
    step for decodes in which one reads what another writes.

    Args:
      batch: where each token's key and value go, and which blocks each sequence reads.
      block_size: tokens a block of the pool.
      scale: factor on the query-key products, usually head_dim ** -0.5.
      decode_only: promises that every sequence has one token in the batch.
      implementation: see `pallas_kernels.ragged_paged_attention`.

    Returns:
      attend(q[T, Hq, D], k[T, Hkv, D], v[T, Hkv, D], layer) -> (out[T, Hq, D], layer), where layer
      is an entry of `KVPool.layers`.
    """
    where = (batch.kv_lens, batch.block_tables, batch.query_starts, batch.num_seqs)
    is_tpu = uses_tpu_kernels(implementation)
    plan = None
    if uses_plan(implementation):  # All layers share the work list.
        num_rows = batch.token_ids.shape[0]
        plan = plan_attention(
            *where, num_rows=num_rows, block_size=block_size, decode_only=decode_only
        )

    def attend(q, k, v, layer):
        layer = write_kv(layer, k, v, batch.slot_mapping, implementation=implementation)
        out = ragged_paged_attention(
            q, layer, *where, scale=scale, implementation=implementation, plan=plan
        )
        return out, layer

    def attend_to_decodes(q, k, v, layer):
        return write_and_attend(
            q,
            k,
            v,
            layer,
            batch.kv_lens,
            batch.block_tables,
            batch.num_seqs,
            scale=scale,
            implementation=implementation,
        )

    return attend_to_decodes if is_tpu and decode_only else attend
