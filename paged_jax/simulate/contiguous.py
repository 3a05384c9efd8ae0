"""What serving was like before paging: a contiguous strip of memory for each request.

`ContiguousBlocks` takes the block manager's place under the real scheduler, so that allocators are
compared under one policy. A strip is as long as the longest request allowed (`reserve_max`), or as
long as the request will get, which only an oracle knows. Strips are given out first fit; requests
wait in line, and one that finds no gap holds up those behind it.
"""

from __future__ import annotations

import bisect

from paged_jax.block_manager import BlockManager
from paged_jax.request import Request


class FirstFitMemory:
    """A line of `capacity` slots, of which strips are taken at the first gap that is wide enough.

    Each operation costs as much as there are gaps.
    """

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.num_free = capacity
        # The gaps by their place; no two touch.
        self._starts = [0]
        self._sizes = [capacity]

    @property
    def largest_gap(self) -> int:
        return max(self._sizes, default=0)

    def take(self, size: int) -> int | None:
        """The start of a new strip, or None if no gap is wide enough."""
        for i, gap in enumerate(self._sizes):
            if gap < size:
                continue
            start = self._starts[i]
            if gap == size:
                del self._starts[i], self._sizes[i]
            else:
                self._starts[i] += size
                self._sizes[i] -= size
            self.num_free -= size
            return start
        return None

    def give_back(self, start: int, size: int) -> None:
        """Frees a strip; the gap joins those that it touches."""
        i = bisect.bisect(self._starts, start)
        self.num_free += size
        if i < len(self._starts) and start + size == self._starts[i]:
            size += self._sizes[i]
            del self._starts[i], self._sizes[i]
        if i and self._starts[i - 1] + self._sizes[i - 1] == start:
            self._sizes[i - 1] += size
        else:
            self._starts.insert(i, start)
            self._sizes.insert(i, size)


class ContiguousBlocks(BlockManager):
    """A block manager without blocks: each request has a strip, or waits.

    Args:
      capacity_tokens: slots of the memory.
      reserved_tokens: length of every strip; None for the request's own final length.

    Attributes:
      memory: where the strips lie.
      final_tokens: of the requests that hold a strip, the lengths that they will have.
    """

    def __init__(self, capacity_tokens: int, reserved_tokens: int | None = None):
        super().__init__(2, 1, enable_prefix_caching=False)
        self.memory = FirstFitMemory(capacity_tokens)
        self.reserved_tokens = reserved_tokens
        self.final_tokens = 0
        self._strips: dict[str, tuple[int, int]] = {}

    def size_for(self, request: Request) -> int:
        """Slots of the strip that a request needs."""
        return self.reserved_tokens or request.max_total_tokens

    def can_allocate(self, request: Request) -> bool:
        return self.memory.largest_gap >= self.size_for(request)

    def allocate(self, request: Request) -> bool:
        size = self.size_for(request)
        start = self.memory.take(size)
        if start is None:
            return False
        self._strips[request.request_id] = start, size
        self.final_tokens += request.max_total_tokens
        return True

    def num_blocks_for(self, num_tokens: int) -> int:
        return 0  # The strip has them.

    def append_slots(self, request: Request, num_tokens: int) -> bool:
        return True

    def cache_full_blocks(self, request: Request, num_tokens: int) -> None:
        pass

    def fold_duplicates(self, request: Request) -> None:
        pass

    def free(self, request: Request) -> None:
        strip = self._strips.pop(request.request_id, None)
        if strip is not None:
            self.memory.give_back(*strip)
            self.final_tokens -= request.max_total_tokens
        request.forget_computed()
