"""How much of a trace a prefix cache of some size would hit: by order alone, without time.

Two answers: that of a plain least-recently-used cache of the trace's own prefixes, which knows no
blocks, and that of the real block manager, one request after the other.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from paged_jax.block_manager import BlockManager
from paged_jax.simulate.simulated_request import SimulatedRequest
from paged_jax.simulate.traffic import TraceRequest


def lru_hit_ratio(requests: Iterable[TraceRequest], capacity_tokens: int | None = None) -> float:
    """The share of all prompt tokens that a least-recently-used cache of prefixes would have.

    An entry is one of a request's `prefix_ids`, the last and shorter one too, and costs
    `prefix_tokens` of room. A request refreshes its own entries, the head of the prompt last, so
    that a prefix's tail leaves before its head.

    Args:
      requests: with `prefix_ids`.
      capacity_tokens: room of the cache; None for no end.
    """
    cache: OrderedDict[int, None] = OrderedDict()
    num_tokens = num_hit = 0
    for request in requests:
        ids, width = request.prefix_ids, request.prefix_tokens
        num_found = next((i for i, key in enumerate(ids) if key not in cache), len(ids))
        num_tokens += request.num_prompt_tokens
        num_hit += min(num_found * width, request.num_prompt_tokens)
        for key in reversed(ids):
            cache[key] = None
            cache.move_to_end(key)
        while capacity_tokens is not None and len(cache) * width > capacity_tokens:
            cache.popitem(last=False)
    return num_hit / max(num_tokens, 1)


def paged_hit_ratio(
    requests: Iterable[TraceRequest], capacity_tokens: int, block_size: int = 16
) -> float:
    """The share of all prompt tokens that the real block manager finds, one request at a time.

    Only full blocks are found, and never a prompt's last token.

    Args:
      requests: with `prefix_ids` or `token_ids`; one longer than the cache finds nothing.
      capacity_tokens: of the pool.
      block_size: tokens a block.
    """
    blocks = BlockManager(capacity_tokens // block_size + 1, block_size)
    num_tokens = 0
    for serial, trace in enumerate(requests):
        num_tokens += trace.num_prompt_tokens
        request = SimulatedRequest(serial, trace)
        if blocks.allocate(request):
            blocks.cache_full_blocks(request, request.num_prompt_tokens)
            blocks.take_moves()
            request.num_computed_tokens = request.num_prompt_tokens
            blocks.fold_duplicates(request)
            blocks.free(request)
    return blocks.stats.num_hit_tokens / max(num_tokens, 1)
