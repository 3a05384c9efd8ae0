"""The pictures of a report, each with the words that a reader needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

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

# Of the requests, the first so many show the block sizes, and the blocks of a small pool.
SWEPT_REQUESTS, SEEN_REQUESTS = 2000, 40


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
      runs: by the allocator's name, with the timeline of a device, the first of several.
    """
    pool_tokens = (config.num_blocks - 1) * config.block_size
    swept = all_at_once(make_requests(), SWEPT_REQUESTS)
    served = [r for r in swept if r.num_prompt_tokens + r.num_output_tokens <= config.max_model_len]
    of_device = ""
    if any(run.num_replicas > 1 for run in runs.values()):
        of_device = " It is that of the first of the devices."
    figures = [
        Figure(
            draw_memory(runs),
            "The KV memory over time. Blue is useful: it holds tokens. Orange is set aside for "
            "later, red never used, pink free but in pieces too small for the next request; the "
            f"pale rest is free.{of_device}",
        ),
        Figure(
            draw_batch(runs),
            "How many requests share a step. More at once means more tokens for the same price, "
            f"until steps get too long.{of_device}",
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


def _longest(requests: Iterable[TraceRequest]) -> int:
    return max(r.num_prompt_tokens + r.num_output_tokens for r in requests)
