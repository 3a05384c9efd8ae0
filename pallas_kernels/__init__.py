"""Paged attention, KV writes and block copies as plain JAX functions."""

from pallas_kernels.attention import AttentionPlan, plan_attention, ragged_paged_attention
from pallas_kernels.kv_write import write_kv

__all__ = ["AttentionPlan", "plan_attention", "ragged_paged_attention", "write_kv"]
