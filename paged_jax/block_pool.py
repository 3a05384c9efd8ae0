"""The pool of KV blocks as the host sees it: reference counts and a queue of free blocks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence

from paged_jax.prefix_cache import PrefixCache

NULL_BLOCK = 0


class BlockPool:
    """Reference counts of `num_blocks` blocks, and the order in which the free ones are taken.

    A block is held (count of 1 or more), or free, or free but still hashed, so that it can be hit
    until it is taken. Block 0 is the null block: padding reads and writes go there, it is never
    given out. Every operation costs O(1) a block.

    The free queue is an ordered dictionary, which is a doubly linked list with a lookup by key:
    blocks are taken from its front, and a hit lifts one out of its middle.

    Args:
      num_blocks: the null block included.
      on_evict: called with (block id, hash) of each hashed block that is taken, before it is given
        out: its content still stands.
    """

    def __init__(self, num_blocks: int, on_evict: Callable[[int, bytes], None] | None = None):
        if num_blocks < 2:
            raise ValueError(f"num_blocks={num_blocks}: a pool needs the null block and one more")
        self.num_blocks = num_blocks
        self.prefix_cache = PrefixCache()
        self.ref_counts = [0] * num_blocks
        self.peak_used_blocks = 0
        self._on_evict = on_evict
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        # Blocks that a copy of this step will read, by the number of those copies.
        self._held_back: dict[int, int] = {}

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    @property
    def num_used_blocks(self) -> int:
        """Blocks that are not free; the null block is not counted."""
        return self.num_blocks - 1 - len(self._free)

    @property
    def num_cached_blocks(self) -> int:
        """Free blocks that are still hashed."""
        # A list first: another thread may ask, for the metrics, while a step takes blocks.
        return sum(
            1 for block_id in list(self._free) if self.prefix_cache.hash_of(block_id) is not None
        )

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
        self._note_peak()
        for block_id in taken:
            # Held from here on, so that whoever hears of the eviction may take blocks as well.
            self.ref_counts[block_id] = 1
            block_hash = self.prefix_cache.drop(block_id)
            if block_hash is not None and self._on_evict is not None:
                self._on_evict(block_id, block_hash)
        return taken

    def touch(self, block_ids: Sequence[int]) -> None:
        """Adds one holder to each block; one that nobody held leaves the free queue."""
        for block_id in block_ids:
            if self.ref_counts[block_id] == 0:
                self._free.pop(block_id, None)  # One that is held back does not stand there.
            self.ref_counts[block_id] += 1
        self._note_peak()

    def num_free_among(self, block_ids: Sequence[int]) -> int:
        """How many of these blocks stand in the free queue."""
        return sum(1 for block_id in block_ids if block_id in self._free)

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
            if count == 0 and block_id not in self._held_back:
                self._put_in_queue(block_id)

    def hold_back(self, block_id: int) -> None:
        """Keeps a block out of the free queue, held or not, until `let_go`: a copy will read it."""
        self._held_back[block_id] = self._held_back.get(block_id, 0) + 1

    def let_go(self, block_id: int) -> None:
        """Takes one `hold_back` back."""
        count = self._held_back.pop(block_id) - 1
        if count:
            self._held_back[block_id] = count
        elif self.ref_counts[block_id] == 0:
            self._put_in_queue(block_id)

    def reset_prefix_cache(self) -> bool:
        """Forgets every hash. While a block is held it changes nothing and returns False."""
        if self.num_used_blocks:
            return False
        self.prefix_cache.clear()
        return True

    def check_integrity(self, held: Mapping[int, int]) -> None:
        """Raises AssertionError unless used + free is all, and each count is that of `held`: the
        number of tables that hold a block.
        """
        assert NULL_BLOCK not in held and NULL_BLOCK not in self._free, "the null block is in use"
        assert len(held) + len(self._free) == self.num_blocks - 1, "used + free is not all"
        assert not any(self.ref_counts[block_id] for block_id in self._free), "a free one is held"
        for block_id, count in held.items():
            assert self.ref_counts[block_id] == count, f"block {block_id}: a wrong count"

    def _note_peak(self) -> None:
        self.peak_used_blocks = max(self.peak_used_blocks, self.num_used_blocks)

    def _put_in_queue(self, block_id: int) -> None:
        self._free[block_id] = None
        if self.prefix_cache.hash_of(block_id) is None:
            self._free.move_to_end(block_id, last=False)
