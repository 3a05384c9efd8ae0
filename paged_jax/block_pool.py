"""The pool of KV blocks as the host sees it: reference counts and a queue of free blocks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from paged_jax.prefix_cache import PrefixCache

NULL_BLOCK = 0


class BlockPool:
    """Reference counts of `num_blocks` blocks, and the order in which the free ones are taken.

    A block is held (count of 1 or more), or free, or free but still hashed, so that it can be hit
    until it is taken. Block 0 is the null block: padding reads and writes go there, it is never
    given out. Every operation costs O(1) a block.

    The free queue is an ordered dictionary, which is a doubly linked list with a lookup by key:
    blocks are taken from its front, and a hit lifts one out of its middle.
    """

    def __init__(self, num_blocks: int, prefix_cache: PrefixCache | None = None):
        if num_blocks < 2:
            raise ValueError(f"num_blocks={num_blocks}: a pool needs the null block and one more")
        self.num_blocks = num_blocks
        self.prefix_cache = PrefixCache() if prefix_cache is None else prefix_cache
        self.ref_counts = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    @property
    def num_used_blocks(self) -> int:
        """Blocks that some table holds; the null block is not counted."""
        return self.num_blocks - 1 - len(self._free)

    @property
    def usage(self) -> float:
        """Share of the usable blocks that are held, 0 to 1."""
        return self.num_used_blocks / (self.num_blocks - 1)

    def free_queue(self) -> list[int]:
        """The free blocks in the order in which they would be taken."""
        return list(self._free)

    def take(self, num_blocks: int) -> list[int]:
        """Takes blocks from the front of the free queue, each with a count of 1 and no hash.

        Raises:
          ValueError: fewer are free; nothing is taken then.
        """
        if num_blocks > len(self._free):
            raise ValueError(f"{num_blocks} blocks asked for, {len(self._free)} are free")
        taken = [self._free.popitem(last=False)[0] for _ in range(num_blocks)]
        for block_id in taken:
            self.prefix_cache.drop(block_id)
            self.ref_counts[block_id] = 1
        return taken

    def touch(self, block_ids: Sequence[int]) -> None:
        """Adds one holder to each block; one that nobody held leaves the free queue."""
        for block_id in block_ids:
            if self.ref_counts[block_id] == 0:
                del self._free[block_id]
            self.ref_counts[block_id] += 1

    def num_free_among(self, block_ids: Sequence[int]) -> int:
        """How many of these blocks stand in the free queue."""
        return sum(1 for block_id in block_ids if self.ref_counts[block_id] == 0)

    def release(self, block_ids: Sequence[int]) -> None:
        """Takes one holder from each block of a table, walking it from its tail.

        A block that nobody holds any more goes to the back of the free queue if it carries a hash
        (it may be hit again), to the front if not. The walk from the tail makes a prefix's tail
        leave the cache before its head.
        """
        for block_id in reversed(block_ids):
            count = self.ref_counts[block_id] - 1
            if count < 0 or block_id == NULL_BLOCK:
                raise ValueError(f"block {block_id} was released more often than it was taken")
            self.ref_counts[block_id] = count
            if count == 0:
                self._free[block_id] = None
                if self.prefix_cache.hash_of(block_id) is None:
                    self._free.move_to_end(block_id, last=False)

    def reset_prefix_cache(self) -> bool:
        """Forgets every hash. While a block is held it changes nothing and returns False."""
        if self.num_used_blocks:
            return False
        self.prefix_cache.clear()
        return True
