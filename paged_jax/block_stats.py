"""What happens to blocks, counted."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass
class BlockStats:
    """What the block manager counts, from its beginning.

    Attributes:
      num_query_tokens, num_hit_tokens: tokens asked of the prefix cache and found there; preempted
        requests and forks do not ask.
      num_host_hit_tokens: how many of the hits came from the host.
      num_evictions, num_host_evictions: hashed blocks that were taken for something else.
      num_cow_copies: blocks copied because a sharer was about to write into them.
      num_folded_blocks: full blocks given back because an equal one stood in the cache.
      swap_in_tokens, swap_out_tokens: tokens of sequences, as moved.
      host_offload_tokens: tokens of evicted prefixes, as moved to the host.
    """

    num_query_tokens: int = 0
    num_hit_tokens: int = 0
    num_host_hit_tokens: int = 0
    num_evictions: int = 0
    num_host_evictions: int = 0
    num_cow_copies: int = 0
    num_folded_blocks: int = 0
    swap_in_tokens: int = 0
    swap_out_tokens: int = 0
    host_offload_tokens: int = 0
