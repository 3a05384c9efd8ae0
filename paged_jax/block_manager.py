"""Block tables: who holds which blocks, and which of them another request may share."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable

from paged_jax.block_pool import NULL_BLOCK, BlockPool
from paged_jax.prefix_cache import hash_block
from paged_jax.request import Request


@dataclasses.dataclass
class PrefixCacheStats:
    """Tokens asked of the prefix cache and found there; preempted requests are left out."""

    num_query_tokens: int = 0
    num_hit_tokens: int = 0


class BlockManager:
    """Gives blocks to requests and takes them back; the only one that changes a block table.

    A table changes at its end only. All of a request's blocks are given or none. Full blocks are
    hashed when the step that fills them is scheduled: a later request of the same step may share
    them, since each layer writes the whole step's keys and values before it reads any.
    """

    def __init__(self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool = True):
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.pool = BlockPool(num_blocks)
        self.stats = PrefixCacheStats()
        self.peak_used_blocks = 0

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens fill, the last one perhaps in part."""
        return -(-num_tokens // self.block_size)

    def find_cached(self, request: Request) -> list[int]:
        """The cached blocks of a request's longest known prefix, the last token left out.

        The last token is always computed, because its logits are wanted: a hit covers at most
        `num_tokens - 1` tokens, rounded down to blocks.
        """
        if not self.enable_prefix_caching:
            return []
        num_blocks = (request.num_tokens - 1) // self.block_size
        self._extend_hashes(request, num_blocks)
        return self.pool.prefix_cache.match(request.block_hashes[:num_blocks])

    def allocate(self, request: Request) -> bool:
        """Admits a request: shares its cached prefix, and takes blocks for all its other tokens.

        Sets `block_ids` and `num_computed_tokens`. Returns False, with nothing changed, if the
        blocks of the whole current sequence are not to be had.
        """
        if request.block_ids:
            raise ValueError(f"request {request.request_id!r} holds blocks already")
        cached = self.find_cached(request)
        num_new = self.num_blocks_for(request.num_tokens) - len(cached)
        if num_new > self.pool.num_free_blocks - self.pool.num_free_among(cached):
            return False
        self.pool.touch(cached)
        request.block_ids.extend(cached)
        request.block_ids.extend(self.pool.take(num_new))
        request.num_computed_tokens = len(cached) * self.block_size
        request.num_hashed_blocks = len(cached)
        if request.num_preemptions == 0:
            request.num_cached_tokens = request.num_computed_tokens
            if self.enable_prefix_caching:
                self.stats.num_query_tokens += request.num_tokens
                self.stats.num_hit_tokens += request.num_computed_tokens
        self._note_peak()
        return True

    def append_slots(self, request: Request, num_tokens: int) -> bool:
        """Makes a table hold `num_tokens` tokens; False, with nothing changed, if it can't."""
        num_new = self.num_blocks_for(num_tokens) - len(request.block_ids)
        if num_new <= 0:
            return True
        if num_new > self.pool.num_free_blocks:
            return False
        request.block_ids.extend(self.pool.take(num_new))
        self._note_peak()
        return True

    def cache_full_blocks(self, request: Request, num_tokens: int) -> None:
        """Hashes the blocks that are full once the request's first `num_tokens` are computed."""
        num_full = num_tokens // self.block_size
        if not self.enable_prefix_caching or num_full <= request.num_hashed_blocks:
            return
        self._extend_hashes(request, num_full)
        for i in range(request.num_hashed_blocks, num_full):
            self.pool.prefix_cache.insert(request.block_hashes[i], request.block_ids[i])
        request.num_hashed_blocks = num_full

    def free(self, request: Request) -> None:
        """Takes all blocks of a request back; what is computed is forgotten with them."""
        self.pool.release(request.block_ids)
        del request.block_ids[:]
        request.num_hashed_blocks = 0
        request.num_computed_tokens = 0

    def reset_prefix_cache(self) -> bool:
        """Forgets every hash; False, with nothing changed, while any block is in use."""
        return self.pool.reset_prefix_cache()

    def check_integrity(self, requests: Iterable[Request]) -> None:
        """Raises AssertionError unless the pool and the tables of all live requests agree."""
        pool = self.pool
        held = Counter(block_id for request in requests for block_id in request.block_ids)
        free = pool.free_queue()
        assert NULL_BLOCK not in held and NULL_BLOCK not in free, "the null block is in use"
        assert len(held) + len(free) == pool.num_blocks - 1, "used + free is not all"
        assert all(pool.ref_counts[block_id] == 0 for block_id in free), "a free block is held"
        for block_id, count in held.items():
            assert pool.ref_counts[block_id] == count, f"block {block_id}: a wrong count"
            assert count == 1 or pool.prefix_cache.hash_of(block_id), f"{block_id}: shared, no hash"

    def _extend_hashes(self, request: Request, num_blocks: int) -> None:
        hashes, size = request.block_hashes, self.block_size
        for i in range(len(hashes), num_blocks):
            keys = (request.cache_salt,) if i == 0 and request.cache_salt is not None else None
            tokens = request.token_ids[i * size : (i + 1) * size]
            hashes.append(hash_block(hashes[-1] if hashes else None, tokens, keys))

    def _note_peak(self) -> None:
        self.peak_used_blocks = max(self.peak_used_blocks, self.pool.num_used_blocks)
