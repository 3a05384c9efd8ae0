"""The same traffic again and again, with one thing changed: what the pictures and planners ask."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence

from paged_jax.config import SchedulerConfig
from paged_jax.simulate.device_model import DeviceModel
from paged_jax.simulate.loop import simulate
from paged_jax.simulate.pool_history import PoolHistory, sample_pool
from paged_jax.simulate.prefix_hits import lru_hit_ratio, paged_hit_ratio
from paged_jax.simulate.results import Results
from paged_jax.simulate.step_time import StepTime
from paged_jax.simulate.traffic import TraceRequest

BLOCK_SIZES = (4, 8, 16, 32, 64, 128, 256, 512)
_MOST_BLOCKS_TO_SEE = 512


def all_at_once(requests: Iterable[TraceRequest], most: int) -> list[TraceRequest]:
    """The first `most` requests, as if all had come at the beginning: memory is short then."""
    first = itertools.islice(requests, most)
    return [request._replace(arrival_seconds=0.0) for request in first]


def with_block_size(
    config: SchedulerConfig, step_time: StepTime, block_size: int
) -> tuple[SchedulerConfig, StepTime]:
    """The same limits and the same memory in other blocks, and the device with them."""
    num_blocks = (config.num_blocks - 1) * config.block_size // block_size
    config = dataclasses.replace(
        config,
        num_blocks=num_blocks + 1,
        block_size=block_size,
        max_model_len=min(config.max_model_len, num_blocks * block_size),
    )
    if isinstance(step_time, DeviceModel):
        step_time = dataclasses.replace(step_time, block_size=block_size)
    return config, step_time


def limited_by_memory(config: SchedulerConfig, max_num_seqs: int = 4096) -> SchedulerConfig:
    """The limits with so many requests a step allowed that memory runs out first."""
    most_tokens = max(config.max_num_batched_tokens, max_num_seqs)
    return dataclasses.replace(
        config, max_num_seqs=max_num_seqs, max_num_batched_tokens=most_tokens
    )


def sweep_block_sizes(
    requests: Sequence[TraceRequest],
    config: SchedulerConfig,
    step_time: StepTime,
    block_sizes: Iterable[int] = BLOCK_SIZES,
) -> dict[int, Results]:
    """Serves requests with the same memory in blocks of each size; nothing but memory limits how
    many run at once.
    """
    config = limited_by_memory(config)
    return {
        size: simulate(requests, *with_block_size(config, step_time, size)) for size in block_sizes
    }


def sweep_cache_sizes(
    make_requests: Callable[[], Iterable[TraceRequest]],
    capacities: Iterable[int | None],
    block_size: int = 16,
) -> dict[str, dict[int | None, float]]:
    """The share of prompt tokens that caches of several sizes find, by order alone.

    Args:
      make_requests: the requests from their beginning, each time.
      capacities: sizes in tokens; None for no end.
      block_size: of the block manager.

    Returns:
      A curve for `draw_hit_ratios`: for requests with `prefix_ids` of a least-recently-used cache
      of these prefixes; for those with `token_ids` of the block manager, which has no endless one;
      none for requests that share nothing.
    """
    first = next(iter(make_requests()), None)
    if first is not None and first.prefix_ids:
        found = {size: lru_hit_ratio(make_requests(), size) for size in capacities}
        return {"least recently used": found}
    if first is not None and first.token_ids:
        sizes = [size for size in capacities if size is not None]
        found = {size: paged_hit_ratio(make_requests(), size, block_size) for size in sizes}
        return {"block manager": {**found}}
    return {}


def small_pool_history(
    requests: Sequence[TraceRequest],
    config: SchedulerConfig,
    step_time: StepTime,
    *,
    requests_at_once: int = 8,
) -> PoolHistory:
    """The blocks of a pool made so small that they can be seen, as it serves a few requests.

    The pool holds about `requests_at_once` of them, and the longest; its blocks are as large as it
    takes to have some hundreds of them.

    Args:
      requests: a few dozen, with an arrival time of 0.
    """
    totals = [r.num_prompt_tokens + r.num_output_tokens for r in requests]
    if not totals:
        raise ValueError("there is no request to show the pool with")
    tokens = max(max(totals), requests_at_once * sum(totals) // len(totals))
    block_size = config.block_size
    while tokens // block_size > _MOST_BLOCKS_TO_SEE:
        block_size *= 2
    num_blocks = -(-tokens // block_size)
    if isinstance(step_time, DeviceModel):
        step_time = dataclasses.replace(step_time, block_size=block_size)
    small = dataclasses.replace(
        config,
        num_blocks=num_blocks + 1,
        block_size=block_size,
        max_model_len=max(max(totals), 2),
        num_host_blocks=0,
        enable_host_prefix_cache=False,
        preemption_mode="recompute",
    )
    return sample_pool(requests, small, step_time)
