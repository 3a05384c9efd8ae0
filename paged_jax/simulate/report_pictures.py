"""The pictures of a report, each with the words that a reader needs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence

from paged_jax.config import SchedulerConfig
from paged_jax.simulate.html_report import Figure
from paged_jax.simulate.pictures import (
    draw_batch,
    draw_block_sizes,
    draw_hit_ratios,
    draw_memory,
    draw_pool_history,
)
from paged_jax.simulate.results import Results
from paged_jax.simulate.step_time import StepTime
from paged_jax.simulate.studies import (
    BLOCK_SIZES,
    all_at_once,
    small_pool_history,
    sweep_block_sizes,
    sweep_cache_sizes,
)
from paged_jax.simulate.traffic import TraceRequest

# Of the requests, the first so many show the block sizes, and the blocks of a small pool. The
# former are fewer where they are long: of so many tokens, or as many as fill four pools.
SWEPT_REQUESTS, SEEN_REQUESTS, SWEPT_TOKENS = 2000, 40, 3_000_000


def report_pictures(
    make_requests: Callable[[], Iterable[TraceRequest]],
    config: SchedulerConfig,
    step_time: StepTime,
    runs: Mapping[str, Results],
) -> list[Figure]:
    """Draws what runs came to, and what a few more runs of the same traffic tell.

    Args:
      make_requests: the requests from their beginning, each time.
      config, step_time: of a device.
      runs: by the allocator's name, of a device or of a fleet.
    """
    pool_tokens = (config.num_blocks - 1) * config.block_size
    swept = _first(all_at_once(make_requests(), SWEPT_REQUESTS), max(SWEPT_TOKENS, 4 * pool_tokens))
    served = [r for r in swept if r.num_prompt_tokens + r.num_output_tokens <= config.max_model_len]
    of_fleet = of_devices = ""
    if any(run.num_replicas > 1 for run in runs.values()):
        of_fleet = " It is that of all devices together; the line is the fullest of them."
        of_devices = " The band reaches from the device with the fewest to that with the most."
    figures = [
        Figure(
            draw_memory(runs),
            "The KV memory over time, idle time too. Blue is useful: it holds tokens. Orange is "
            "set aside for later, red never used, pink free but in pieces too small for the next "
            f"request; the pale rest is free.{of_fleet}",
        ),
        Figure(
            draw_batch(runs),
            "How many requests are served at once; where nothing is to do, none. More that share a "
            f"step mean more tokens for the same price, until steps get too long.{of_devices}",
        ),
    ]
    if "paged" not in runs or not served:
        return figures
    sizes = [size for size in BLOCK_SIZES if 16 * size <= pool_tokens and size <= _longest(served)]
    if sizes:
        figures.append(
            Figure(
                draw_block_sizes(sweep_block_sizes(swept, config, step_time, sizes)),
                f"The first {len(swept):,} requests, all sent at once, with the same memory cut "
                "into blocks of several sizes. A request's last block is half empty on average, so "
                "that larger blocks waste more and fewer requests fit.",
            )
        )
    capacities = [int(pool_tokens * factor) for factor in (0.125, 0.25, 0.5, 1, 2, 4, 8, 16)]
    ratios = sweep_cache_sizes(make_requests, [*capacities, None], config.block_size)
    if ratios:
        figures.append(
            Figure(
                draw_hit_ratios(ratios, pool_tokens),
                "How much of all prompts need not be computed, if a cache of that many tokens "
                "keeps what was used last. The dotted line is the pool of one device, if nothing "
                "else were in it.",
            )
        )
    seen = served[:SEEN_REQUESTS]
    history = small_pool_history(seen, config, step_time)
    figures.append(
        Figure(
            draw_pool_history(history),
            f"The first {len(seen)} requests in a pool made small enough to see: "
            f"{history.owner.shape[1]:,} blocks of {history.block_size} tokens. Each row is a "
            "block, time runs to the right, a colour is a request. Blocks need not lie together, "
            "and the next request takes them as soon as one ends.",
        )
    )
    return figures


def _first(requests: Sequence[TraceRequest], num_tokens: int) -> list[TraceRequest]:
    """The first ones of so many tokens, and at least as many as are shown block by block."""
    totals = itertools.accumulate(r.num_prompt_tokens + r.num_output_tokens for r in requests)
    num = sum(total <= num_tokens for total in totals)
    return list(requests[: max(num, SEEN_REQUESTS)])


def _longest(requests: Iterable[TraceRequest]) -> int:
    return max(r.num_prompt_tokens + r.num_output_tokens for r in requests)
