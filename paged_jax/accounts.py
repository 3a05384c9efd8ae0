"""What there is to count of an engine: its metrics by name, and its memory by owner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paged_jax.block_manager import BlockManager
from paged_jax.metrics import Metrics
from paged_jax.scheduler import Scheduler


def collect(metrics: Metrics, schedulers: Sequence[Scheduler]) -> dict[str, Any]:
    """The counters since the engine was made, under their Prometheus names.

    Now: num_requests_running and _waiting (each of `n` outputs is one), of the latter
    num_requests_swapped; num_requests_held, sequences of sessions and beams that do nothing;
    kv_cache_usage_perc, 0 to 1, and kv_cache_peak_usage_perc.

    Requests: num_preemptions, also by mode (recompute, swap); request_success by finish reason
    (each of `n` outputs). Tokens: prompt_tokens (a prompt once, whatever its `n`),
    generation_tokens; prefix_cache_queries and prefix_cache_hits, the latter also by tier (forks
    and preempted requests do not ask); swap_in_tokens, swap_out_tokens; host_offload_tokens, of
    evicted prefixes moved to the host. Blocks: cow_copies, evictions and host_evictions of hashed
    blocks, folded_blocks (equal ones made one). Of speculation, in tokens:
    spec_decode_num_draft_tokens, and spec_decode_num_accepted_tokens of them.

    Latencies in seconds, as `Histogram.as_dict` has them: time_to_first_token_seconds,
    inter_token_latency_seconds, e2e_request_latency_seconds.

    Of several schedulers, each with a pool of its own, all are added up; kv_cache_usage_perc is
    their mean, and kv_cache_peak_usage_perc the mean of their peaks.
    """
    counts = _add_up([_count(scheduler) for scheduler in schedulers])
    for name in ("kv_cache_usage_perc", "kv_cache_peak_usage_perc"):
        counts[name] /= len(schedulers)
    return counts | {
        "prompt_tokens": metrics.prompt_tokens,
        "generation_tokens": metrics.generation_tokens,
        "request_success": dict(metrics.request_success),
        "time_to_first_token_seconds": metrics.time_to_first_token.as_dict(),
        "inter_token_latency_seconds": metrics.inter_token_latency.as_dict(),
        "e2e_request_latency_seconds": metrics.e2e_request_latency.as_dict(),
    }


def _add_up(counts: list[dict[str, Any]]) -> dict[str, Any]:
    """Dicts of the same names and of numbers, or of dicts of numbers."""
    first = counts[0]
    return {
        name: _add_up([count[name] for count in counts])
        if isinstance(first[name], dict)
        else sum(count[name] for count in counts)
        for name in first
    }


def _count(scheduler: Scheduler) -> dict[str, Any]:
    blocks, stats = scheduler.blocks, scheduler.blocks.stats
    num_running = len(scheduler.running)
    return {
        "num_requests_running": num_running,
        "num_requests_waiting": len(scheduler.requests) - num_running,
        "num_requests_swapped": sum(1 for request in list(scheduler.waiting) if request.is_swapped),
        "num_requests_held": len(scheduler.held),
        "kv_cache_usage_perc": blocks.pool.usage,
        "kv_cache_peak_usage_perc": blocks.pool.peak_used_blocks / (blocks.pool.num_blocks - 1),
        "prefix_cache_queries": stats.num_query_tokens,
        "prefix_cache_hits": stats.num_hit_tokens,
        "prefix_cache_hits_by_tier": {
            "device": stats.num_hit_tokens - stats.num_host_hit_tokens,
            "host": stats.num_host_hit_tokens,
        },
        "num_preemptions": scheduler.num_preemptions,
        "num_preemptions_by_mode": dict(scheduler.num_preemptions_by_mode),
        "swap_in_tokens": stats.swap_in_tokens,
        "swap_out_tokens": stats.swap_out_tokens,
        "host_offload_tokens": stats.host_offload_tokens,
        "cow_copies": stats.num_cow_copies,
        "evictions": stats.num_evictions,
        "host_evictions": stats.num_host_evictions,
        "folded_blocks": stats.num_folded_blocks,
        "spec_decode_num_draft_tokens": scheduler.drafter.num_draft_tokens,
        "spec_decode_num_accepted_tokens": scheduler.drafter.num_accepted_tokens,
    }


def memory_bytes(
    managers: Sequence[BlockManager], *, bytes_a_block: int, weights: int, temporary: int
) -> dict[str, int]:
    """Bytes by owner, of all pools together; each pool's row of devices has the weights.

    Keys and values are in use (held by a sequence or pinned), cached (hashed, and taken when room
    is needed) or free; swap is on the host, held or cached; temporary is the most that a compiled
    step takes.
    """
    pools = [blocks.pool for blocks in managers]
    hosts = [blocks.host.pool for blocks in managers if blocks.host is not None]
    num_used = sum(pool.num_used_blocks for pool in pools)
    num_free = sum(pool.num_free_blocks for pool in pools)
    num_cached = sum(pool.num_cached_blocks for pool in pools)
    num_swap = sum(pool.num_used_blocks + pool.num_cached_blocks for pool in hosts)
    return {
        "weights": weights * len(pools),
        "kv_in_use": num_used * bytes_a_block,
        "kv_cached": num_cached * bytes_a_block,
        "kv_free": (num_free - num_cached) * bytes_a_block,
        "swap": num_swap * bytes_a_block,
        "temporary": temporary,
    }
