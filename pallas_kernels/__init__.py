"""Paged attention, KV writes and block copies as plain JAX functions."""

from pallas_kernels.attention import (
    IMPLEMENTATIONS,
    AttentionPlan,
    merge_attention,
    plan_attention,
    ragged_paged_attention,
)
from pallas_kernels.block_copy import copy_blocks, gather_blocks, scatter_blocks
from pallas_kernels.cascade import CascadeBatch, cascade_attention, split_shared_prefixes
from pallas_kernels.decode import write_and_attend
from pallas_kernels.kv_write import write_kv
from pallas_kernels.mla import (
    MLA_IMPLEMENTATIONS,
    latent_pool_width,
    mla_attention,
    write_latent,
)
from pallas_kernels.pool_storage import PoolLayout, pool_layout, tpu_pool_shape

__all__ = [
    "IMPLEMENTATIONS",
    "MLA_IMPLEMENTATIONS",
    "AttentionPlan",
    "CascadeBatch",
    "PoolLayout",
    "cascade_attention",
    "copy_blocks",
    "gather_blocks",
    "latent_pool_width",
    "merge_attention",
    "mla_attention",
    "plan_attention",
    "pool_layout",
    "ragged_paged_attention",
    "scatter_blocks",
    "split_shared_prefixes",
    "tpu_pool_shape",
    "write_and_attend",
    "write_latent",
    "write_kv",
]
