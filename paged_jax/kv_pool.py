"""The KV pool as a pytree, and its layout.

This is the only place besides the kernels that knows the layout:

    layers[i]: [num_blocks, 2 * num_kv_heads, block_size, head_dim]

Head-major, so that one block of all heads is one contiguous piece (a single DMA brings keys and
values), and the keys of one head within it lie together. The key of head h stands at index h, its
value at index num_kv_heads + h. Block 0 is the null block, where padding is read and written.

On a TPU the last two axes are rows of whole 128-lane tiles: two tokens of head_dim 64 share a row,
and a token of head_dim 96 is filled up with zeros. `pallas_kernels.pool_layout` tells which.

An int8 pool has a scale and an offset for every channel (layer, head, number of the head), the same
for all tokens: real = stored * scale + offset. Scales of tokens would have to be stored and read
beside them; those of channels cost an attention nothing, because they come out of its sums:

    keys    q . (k * scale + offset) = (q * scale) . k + a number that is the same for all tokens,
            which the softmax does not see
    values  sum of w * (v * scale + offset) = scale * (sum of w * v) + offset, as the w add up to 1

so that the kernels see stored numbers only, and a step multiplies its queries and its outputs. And
they fit: keys differ far more between channels than between tokens, and the largest channels lie
around a number far from 0 (KIVI, arXiv 2402.02750; SageAttention, arXiv 2410.02367, takes their
mean off). `kv_calibration` finds both.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from paged_jax.process_memory import absent_bytes, discard_zeros
from pallas_kernels import pool_layout, tpu_pool_shape


class CacheShape(Protocol):
    """What the cache needs to know of a model; any `ModelConfig` will do."""

    @property
    def num_layers(self) -> int: ...

    @property
    def num_kv_heads(self) -> int: ...

    @property
    def head_dim(self) -> int: ...


@flax.struct.dataclass
class ChannelScales:
    """stored * scale + offset = real, for each channel of a layer, or of all layers together."""

    scale: Any  # float32[2 * num_kv_heads, head_dim] of a layer; keys first, as in the pool
    offset: Any  # the same

    def halves(self) -> tuple[ChannelScales, ChannelScales]:
        """Of a layer: the keys' and the values', [num_kv_heads, head_dim] each."""
        scales, offsets = jnp.split(self.scale, 2), jnp.split(self.offset, 2)
        keys, values = map(ChannelScales, scales, offsets)
        return keys, values

    def to_int8(self, real: jax.Array) -> jax.Array:
        """real[T, Hkv, D] as stored: rounded to the nearest (even) and clipped to +-127."""
        stored = (real.astype(jnp.float32) - self.offset) / self.scale
        return jnp.clip(jnp.round(stored), -127, 127).astype(jnp.int8)


@flax.struct.dataclass
class ScaledLayer:
    """A layer of an int8 pool."""

    blocks: jax.Array  # an entry of `KVPool.layers`
    scales: ChannelScales


@flax.struct.dataclass
class KVPool:
    """Keys and values of every block, of every layer. Donate it to each step that writes to it."""

    # One array a layer: dtype[num_blocks, 2 * num_kv_heads, block_size, head_dim], or the same
    # in the rows of a TPU.
    layers: tuple[jax.Array, ...]
    head_dim: int = flax.struct.field(pytree_node=False)
    # Of an int8 pool, float32[num_layers, 2 * num_kv_heads, head_dim] each; None of others. One
    # array for all layers, because every array among a step's arguments costs its dispatch time.
    scales: ChannelScales | None = None

    @classmethod
    def create(
        cls,
        model: CacheShape,
        *,
        num_blocks: int,
        block_size: int = 16,
        dtype: DTypeLike = jnp.float32,
        scales: ChannelScales | None = None,
        for_tpu: bool | None = None,
        shardings: KVPool | None = None,
    ) -> KVPool:
        """A pool of zeros. Its blocks are handed out by a `BlockPool`, block 0 never.

        Args:
          model: gives the number of layers and KV heads, and the head size.
          num_blocks: blocks of the pool, the null block included.
          block_size: tokens a block.
          dtype: float32 or bfloat16, the model's (`LoadedModel.dtype`) as a rule, or int8.
          scales: of all layers, for an int8 pool, which needs them: `kv_calibration.calibrate`.
          for_tpu: whether in the rows of a TPU; None for the default backend's form.
          shardings: where each array lies, as a pool of shardings; None: on the default device.

        Raises:
          ValueError: num_blocks, block_size or dtype is none of these, or scales do not fit.

        On CPU a bfloat16 pool keeps its numbers as raw bits (uint16), because XLA of jax 0.10
        would copy the whole pool at every write of bfloat16; the kernels read either.
        """
        form = cls.abstract(
            model, num_blocks=num_blocks, block_size=block_size, dtype=dtype, for_tpu=for_tpu
        )
        given, needed = (None if x is None else np.shape(x.scale) for x in (scales, form.scales))
        if given != needed:
            raise ValueError(
                f"scales has shape {given}, and a pool of {jnp.dtype(dtype)} needs {needed}"
                + (": give those of kv_calibration.calibrate" if needed else "; leave scales out")
            )
        if shardings is None:
            layers = tuple(_zeros(layer) for layer in form.layers)
            return cls(layers, model.head_dim, jax.tree.map(jnp.array, scales))
        layers = tuple(map(_zeros, form.layers, shardings.layers))
        return cls(layers, model.head_dim, jax.tree.map(_place, scales, shardings.scales))

    @classmethod
    def abstract(
        cls,
        model: CacheShape,
        *,
        num_blocks: int,
        block_size: int = 16,
        dtype: DTypeLike = jnp.float32,
        for_tpu: bool | None = None,
        raw_bits: bool | None = None,
    ) -> KVPool:
        """What `create` makes, as shapes (`jax.ShapeDtypeStruct`) without memory.

        Args: as for `create`; raw_bits: whether bfloat16 is kept as uint16, None for whether the
          default backend is a CPU.

        Raises:
          ValueError: as `create`.
        """
        if num_blocks < 2 or block_size < 1:
            raise ValueError(
                f"num_blocks={num_blocks}, block_size={block_size}: a pool needs the null block "
                "and one more, of at least one token"
            )
        dtype = jnp.dtype(dtype)
        if dtype not in (jnp.float32, jnp.bfloat16, jnp.uint16, jnp.int8):
            raise ValueError(f"dtype={dtype}: it must be float32, bfloat16 or int8")
        shape = (num_blocks, 2 * model.num_kv_heads, block_size, model.head_dim)
        if for_tpu is None:
            for_tpu = jax.default_backend() == "tpu"
        if for_tpu:
            shape = tpu_pool_shape(num_blocks, model.num_kv_heads, block_size, model.head_dim)
        elif dtype == jnp.bfloat16 and (
            jax.default_backend() == "cpu" if raw_bits is None else raw_bits
        ):
            dtype = jnp.dtype(jnp.uint16)
        layer: Any = jax.ShapeDtypeStruct(shape, dtype)
        scales: Any = None
        if dtype == jnp.int8:
            scales_shape = (model.num_layers, 2 * model.num_kv_heads, model.head_dim)
            one = jax.ShapeDtypeStruct(scales_shape, jnp.float32)
            scales = ChannelScales(one, one)
        return cls(layers=(layer,) * model.num_layers, head_dim=model.head_dim, scales=scales)

    def empty_like(self, scales: ChannelScales | None = None) -> KVPool:
        """A pool of zeros of the same shapes; this one may be deleted.

        scales: of the new pool, if it is an int8 one; None takes this one's, which must be alive.
        """
        layers = tuple(_zeros(layer, layer.sharding) for layer in self.layers)
        scales = self.scales if scales is None else scales
        if self.scales is not None:
            scales = jax.tree.map(lambda new, old: _place(new, old.sharding), scales, self.scales)
        return dataclasses.replace(self, layers=layers, scales=scales)

    @classmethod
    def bytes_a_block(
        cls, model: CacheShape, *, block_size: int, dtype: DTypeLike, for_tpu: bool | None = None
    ) -> int:
        """Bytes of one block in all layers; arguments as in `create`."""
        form = cls.abstract(
            model, num_blocks=2, block_size=block_size, dtype=dtype, for_tpu=for_tpu
        )
        return sum(layer.size * layer.dtype.itemsize for layer in form.layers) // 2

    @property
    def caches(self) -> tuple[jax.Array | ScaledLayer, ...]:
        """One entry a layer, as `attend.paged_attend` takes it."""
        if self.scales is None:
            return self.layers
        of_layer = lambda i: jax.tree.map(lambda array: array[i], self.scales)
        return tuple(ScaledLayer(layer, of_layer(i)) for i, layer in enumerate(self.layers))

    def with_caches(self, caches: Sequence[jax.Array | ScaledLayer]) -> KVPool:
        """The pool after a step that returned `caches`, which it took from this one."""
        layers = (c.blocks if isinstance(c, ScaledLayer) else c for c in caches)
        return dataclasses.replace(self, layers=tuple(layers))

    @property
    def num_blocks(self) -> int:
        return self.layers[0].shape[0]

    @property
    def block_size(self) -> int:
        return pool_layout(self.layers[0], self.head_dim).block_size

    @property
    def num_bytes(self) -> int:
        """Bytes of all blocks; an int8 pool's scales, a few kilobytes a layer, are left out."""
        return sum(layer.nbytes for layer in self.layers)

    def absent_bytes(self) -> int:
        """Of the blocks on this machine's CPU, bytes whose memory the system has yet to give.

        It gives them page by page, as blocks are first written.
        """
        shards = [shard for layer in self.layers for shard in _cpu_shards(layer)]
        return sum(absent_bytes(a.unsafe_buffer_pointer(), a.nbytes) for a in shards)

    def is_deleted(self) -> bool:
        """Whether a step took the buffers (donation) and never gave them back."""
        return any(layer.is_deleted() for layer in self.layers)


def _zeros(form: Any, sharding: Any = None) -> jax.Array:
    """A layer of zeros. On a CPU it takes memory as it is written, and not before.

    Programs are compiled before a pool is full, and compiling takes memory that is free later.
    """
    zeros = _zeros_program(form.shape, jnp.dtype(form.dtype), sharding)()
    for shard in _cpu_shards(zeros):
        discard_zeros(shard.block_until_ready().unsafe_buffer_pointer(), shard.nbytes)
    return zeros


@functools.lru_cache(maxsize=16)  # All layers of a pool share one.
def _zeros_program(shape: tuple[int, ...], dtype: Any, sharding: Any) -> Callable[[], jax.Array]:
    # On several hosts no process could make the whole array.
    return jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=sharding)


def _cpu_shards(array: jax.Array) -> list[jax.Array]:
    """What lies in this process's own memory."""
    shards = [shard.data for shard in array.addressable_shards]
    return [data for data in shards if data.device.platform == "cpu"]


def _place(array: Any, sharding: Any) -> jax.Array:
    if isinstance(array, jax.Array) and array.sharding == sharding:
        return jnp.copy(array)
    array = np.asarray(array)
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def uses_tpu_kernels(implementation: str | None) -> bool:
    """Whether an attention implementation means the TPU's kernels, and so a pool in their rows."""
    return implementation == "tpu" or (implementation is None and jax.default_backend() == "tpu")
