"""Paged attention and KV writes as plain JAX functions."""

from pallas_kernels.attention import (
    IMPLEMENTATIONS,
    AttentionPlan,
    plan_attention,
    ragged_paged_attention,
)
from pallas_kernels.kv_write import write_kv

__all__ = [
    "IMPLEMENTATIONS",
    "AttentionPlan",
    "plan_attention",
    "ragged_paged_attention",
    "write_kv",
]
