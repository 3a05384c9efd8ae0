"""The kernels as programs to compile: model shapes, pools and batches, for the scripts beside this.

Small arrays (lengths, tables) are concrete, so that a static profile can know them; pools and
queries are shapes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tpu_aot import Program, tree_bytes

from pallas_kernels.attention import ragged_paged_attention
from pallas_kernels.block_copy import copy_blocks, gather_blocks, scatter_blocks
from pallas_kernels.cascade import cascade_attention, split_shared_prefixes
from pallas_kernels.decode import write_and_attend
from pallas_kernels.kv_write import write_kv
from pallas_kernels.mla import latent_pool_width, mla_attention
from pallas_kernels.pool_storage import SCALED_POOL_DTYPES, tpu_pool_shape


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """The attention of a model, or of one device's share of it."""

    name: str
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    sliding_window: int | None = None
    has_sinks: bool = False

    @property
    def pool_key(self) -> tuple[int, int]:
        """What the pool's shape depends on."""
        return self.num_kv_heads, self.head_dim


# From the models' published configurations; "/8" is the share of one of 8 tensor-parallel devices.
MODELS = (
    AttentionShape(name="llama3-8b", num_q_heads=32, num_kv_heads=8, head_dim=128),
    AttentionShape(name="llama3-8b/8", num_q_heads=4, num_kv_heads=1, head_dim=128),
    AttentionShape(name="llama3-70b", num_q_heads=64, num_kv_heads=8, head_dim=128),
    AttentionShape(name="llama3-70b/8", num_q_heads=8, num_kv_heads=1, head_dim=128),
    AttentionShape(name="qwen3-0.6b", num_q_heads=16, num_kv_heads=8, head_dim=128),
    AttentionShape(
        name="gemma3-270m", num_q_heads=4, num_kv_heads=1, head_dim=256, sliding_window=512
    ),
    AttentionShape(name="smollm2-135m", num_q_heads=9, num_kv_heads=3, head_dim=64),
    AttentionShape(
        name="gpt-oss-20b",
        num_q_heads=64,
        num_kv_heads=8,
        head_dim=64,
        sliding_window=128,
        has_sinks=True,
    ),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentShape:
    """The latent attention of a model, or of one device's share of it."""

    name: str
    num_heads: int
    latent_dim: int = 512
    rope_dim: int = 64
    nope_dim: int = 128  # of the expanded keys, for the scale of the scores


LATENT_MODELS = (
    LatentShape(name="deepseek-v3", num_heads=128),
    LatentShape(name="deepseek-v3/8", num_heads=16),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoolSpec:
    """A layer's pool as it lies on a TPU."""

    num_blocks: int
    block_size: int
    dtype: str

    def layer(self, num_kv_heads: int, head_dim: int) -> jax.ShapeDtypeStruct:
        shape = tpu_pool_shape(self.num_blocks, num_kv_heads, self.block_size, head_dim)
        return jax.ShapeDtypeStruct(shape, self.dtype)

    def latent_layer(self, shape: LatentShape) -> jax.ShapeDtypeStruct:
        width = latent_pool_width(shape.latent_dim, shape.rope_dim)
        return jax.ShapeDtypeStruct((self.num_blocks, self.block_size, width), self.dtype)

    @property
    def is_scaled(self) -> bool:
        return jnp.dtype(self.dtype) in [jnp.dtype(d) for d in SCALED_POOL_DTYPES]

    @property
    def activation_dtype(self) -> str:
        """What a model over such a pool computes in."""
        return "float32" if self.dtype == "float32" else "bfloat16"


def pool_of_bytes(
    num_bytes: int, shape: AttentionShape | LatentShape, *, block_size: int, dtype: str
) -> PoolSpec:
    """A layer's pool of about `num_bytes`."""
    one = PoolSpec(num_blocks=1, block_size=block_size, dtype=dtype)
    latent = isinstance(shape, LatentShape)
    block = one.latent_layer(shape) if latent else one.layer(*shape.pool_key)
    return dataclasses.replace(one, num_blocks=num_bytes // tree_bytes(block))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lengths:
    """A batch: each sequence's new tokens, and its tokens in the cache with those.

    Attributes:
      max_kv_tokens: what the block tables are wide enough for; 0 for the longest sequence.
    """

    query_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    max_kv_tokens: int = 0

    @classmethod
    def decodes(cls, kv_lens: Sequence[int], *, max_kv_tokens: int = 0) -> Lengths:
        kv_lens = tuple(int(n) for n in kv_lens)
        return cls(query_lens=(1,) * len(kv_lens), kv_lens=kv_lens, max_kv_tokens=max_kv_tokens)

    @property
    def num_seqs(self) -> int:
        return len(self.kv_lens)

    @property
    def is_decode_only(self) -> bool:
        return all(n == 1 for n in self.query_lens)

    def table_width(self, block_size: int) -> int:
        return -(-max(*self.kv_lens, self.max_kv_tokens) // block_size)

    def arrays(self, block_size: int, num_blocks: int) -> tuple[Any, ...]:
        """kv_lens, block_tables, query_starts and num_seqs, as the attention takes them."""
        width = self.table_width(block_size)
        blocks = np.arange(self.num_seqs * width, dtype=np.int32) % (num_blocks - 1) + 1
        starts = np.cumsum([0, *self.query_lens])
        return (
            np.asarray(self.kv_lens, np.int32),
            blocks.reshape(self.num_seqs, width),
            starts.astype(np.int32),
            np.int32(self.num_seqs),
        )


def _queries(shape: AttentionShape, pool: PoolSpec, num_rows: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(
        (num_rows, shape.num_q_heads, shape.head_dim), pool.activation_dtype
    )


def _scales(shape: AttentionShape, pool: PoolSpec) -> dict[str, jax.ShapeDtypeStruct]:
    if not pool.is_scaled:
        return {}
    scale = jax.ShapeDtypeStruct((shape.num_kv_heads,), jnp.float32)
    return dict(k_scale=scale, v_scale=scale)


def _head_vectors(shape: AttentionShape, pool: PoolSpec) -> dict[str, jax.ShapeDtypeStruct]:
    vectors = _scales(shape, pool)
    if shape.has_sinks:
        vectors["sinks"] = jax.ShapeDtypeStruct((shape.num_q_heads,), jnp.float32)
    return vectors


def attention(
    shape: AttentionShape, pool: PoolSpec, lengths: Lengths, *, implementation: str | None
) -> Program:
    """One layer's `ragged_paged_attention`."""
    layer = pool.layer(*shape.pool_key)
    head_vectors = _head_vectors(shape, pool)

    def run(q, layer, kv_lens, tables, starts, num_seqs, head_vectors):
        return ragged_paged_attention(
            q,
            layer,
            kv_lens,
            tables,
            starts,
            num_seqs,
            scale=shape.head_dim**-0.5,
            sliding_window=shape.sliding_window,
            decode_only=lengths.is_decode_only,
            implementation=implementation,
            **head_vectors,
        )

    q = _queries(shape, pool, sum(lengths.query_lens))
    return Program(
        function=run,
        args=(q, layer, *lengths.arrays(pool.block_size, pool.num_blocks), head_vectors),
        pool_bytes=tree_bytes(layer),
    )


def kv_write(
    shape: AttentionShape, pool: PoolSpec, num_tokens: int, *, implementation: str | None
) -> Program:
    """One layer's `write_kv` of `num_tokens` tokens, each the next of its own block."""
    layer = pool.layer(*shape.pool_key)
    dtype = pool.dtype if pool.is_scaled else pool.activation_dtype
    k = jax.ShapeDtypeStruct((num_tokens, shape.num_kv_heads, shape.head_dim), dtype)
    blocks = np.arange(num_tokens, dtype=np.int32) % (pool.num_blocks - 1) + 1

    def run(layer, k, v, slots):
        return write_kv(layer, k, v, slots, implementation=implementation)

    return Program(
        function=run,
        args=(layer, k, k, blocks * pool.block_size + 5),
        donated=(0,),
        aliased_bytes=tree_bytes(layer),
        pool_bytes=tree_bytes(layer),
    )


def attention_with_write(
    shape: AttentionShape, pool: PoolSpec, lengths: Lengths, *, implementation: str | None
) -> Program:
    """One layer's `write_and_attend` of decodes, the write fused into the attention."""
    layer = pool.layer(*shape.pool_key)
    head_vectors = _head_vectors(shape, pool)
    q = _queries(shape, pool, lengths.num_seqs)
    k = jax.ShapeDtypeStruct((lengths.num_seqs, shape.num_kv_heads, shape.head_dim), q.dtype)

    def run(q, k, v, layer, kv_lens, tables, num_seqs, head_vectors):
        return write_and_attend(
            q,
            k,
            v,
            layer,
            kv_lens,
            tables,
            num_seqs,
            scale=shape.head_dim**-0.5,
            sliding_window=shape.sliding_window,
            implementation=implementation,
            **head_vectors,
        )

    kv_lens, tables, _, num_seqs = lengths.arrays(pool.block_size, pool.num_blocks)
    return Program(
        function=run,
        args=(q, k, k, layer, kv_lens, tables, num_seqs, head_vectors),
        donated=(3,),
        aliased_bytes=tree_bytes(layer),
        pool_bytes=tree_bytes(layer),
    )


def cascade(
    shape: AttentionShape,
    pool: PoolSpec,
    *,
    num_seqs: int,
    shared_tokens: int,
    own_tokens: int,
    implementation: str | None,
) -> Program:
    """One layer's attention of decodes that share a prefix, split into two passes."""
    layer = pool.layer(*shape.pool_key)
    lengths = Lengths.decodes([shared_tokens + own_tokens] * num_seqs)
    kv_lens, tables, starts, count = lengths.arrays(pool.block_size, pool.num_blocks)
    shared_blocks = shared_tokens // pool.block_size
    tables[:, :shared_blocks] = tables[0, :shared_blocks]
    # Tables that wrap around in a small pool must not look shared where they are not.
    tables[:, shared_blocks:] += np.arange(num_seqs, dtype=np.int32)[:, None]
    batch = split_shared_prefixes(kv_lens, tables, starts, num_seqs, block_size=pool.block_size)

    def run(q, layer, batch, starts, num_seqs, scales):
        return cascade_attention(
            q,
            layer,
            batch,
            starts,
            num_seqs,
            scale=shape.head_dim**-0.5,
            decode_only=True,
            implementation=implementation,
            **scales,
        )

    q = _queries(shape, pool, num_seqs)
    return Program(
        function=run,
        args=(q, layer, batch, starts, count, _scales(shape, pool)),
        pool_bytes=tree_bytes(layer),
    )


def latent_attention(
    shape: LatentShape, pool: PoolSpec, lengths: Lengths, *, implementation: str | None
) -> Program:
    """One layer's `mla_attention`."""
    layer = pool.latent_layer(shape)
    rows, dtype = sum(lengths.query_lens), pool.activation_dtype
    q_latent = jax.ShapeDtypeStruct((rows, shape.num_heads, shape.latent_dim), dtype)
    q_rope = jax.ShapeDtypeStruct((rows, shape.num_heads, shape.rope_dim), dtype)

    def run(q_latent, q_rope, layer, kv_lens, tables, starts, num_seqs):
        return mla_attention(
            q_latent,
            q_rope,
            layer,
            kv_lens,
            tables,
            starts,
            num_seqs,
            scale=(shape.nope_dim + shape.rope_dim) ** -0.5,
            implementation=implementation,
        )

    batch = lengths.arrays(pool.block_size, pool.num_blocks)
    return Program(
        function=run, args=(q_latent, q_rope, layer, *batch), pool_bytes=tree_bytes(layer)
    )


def block_copies(
    shape: AttentionShape,
    pool: PoolSpec,
    num_blocks: int,
    *,
    num_layers: int,
    implementation: str | None,
) -> Program:
    """`copy_blocks` of `num_blocks` blocks in each of `num_layers` layers."""
    layers = (pool.layer(*shape.pool_key),) * num_layers
    sources = np.arange(1, num_blocks + 1, dtype=np.int32)

    def run(layers, sources, destinations, count):
        return copy_blocks(layers, sources, destinations, count, implementation=implementation)

    return Program(
        function=run,
        args=(layers, sources, sources + num_blocks, np.int32(num_blocks)),
        donated=(0,),
        aliased_bytes=tree_bytes(layers),
        pool_bytes=tree_bytes(layers),
    )


def block_gather(
    shape: AttentionShape,
    pool: PoolSpec,
    num_blocks: int,
    *,
    num_layers: int,
    implementation: str | None,
) -> Program:
    """`gather_blocks` of `num_blocks` blocks from each of `num_layers` layers."""
    layers = (pool.layer(*shape.pool_key),) * num_layers

    def run(layers, block_ids):
        return gather_blocks(layers, block_ids, implementation=implementation)

    block_ids = np.arange(1, num_blocks + 1, dtype=np.int32)
    return Program(function=run, args=(layers, block_ids), pool_bytes=tree_bytes(layers))


def block_scatter(
    shape: AttentionShape,
    pool: PoolSpec,
    num_blocks: int,
    *,
    num_layers: int,
    implementation: str | None,
) -> Program:
    """`scatter_blocks` of `num_blocks` blocks into each of `num_layers` layers."""
    layers = (pool.layer(*shape.pool_key),) * num_layers
    swapped = dataclasses.replace(pool, num_blocks=num_blocks).layer(*shape.pool_key)

    def run(layers, block_ids, count, blocks):
        return scatter_blocks(layers, block_ids, count, blocks, implementation=implementation)

    block_ids = np.arange(1, num_blocks + 1, dtype=np.int32)
    return Program(
        function=run,
        args=(layers, block_ids, np.int32(num_blocks), (swapped,) * num_layers),
        donated=(0,),
        aliased_bytes=tree_bytes(layers),
        pool_bytes=tree_bytes(layers),
    )
