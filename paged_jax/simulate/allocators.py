"""The allocators that are compared, each under the real scheduler, and what their memory holds."""

from __future__ import annotations

import dataclasses
from operator import attrgetter
from typing import NamedTuple, Protocol

from paged_jax.config import SchedulerConfig, check_choice
from paged_jax.request import Request
from paged_jax.scheduler import Scheduler
from paged_jax.simulate.contiguous import ContiguousBlocks

ALLOCATORS = ("paged", "reserve_max", "oracle")
_BLOCK_IDS = attrgetter("block_ids")


class MemorySample(NamedTuple):
    """Where the slots of the pool are in a step, after its writes; they add up to all of them.

    Attributes:
      stored: hold keys and values of tokens; a shared one counts once.
      reserved: kept for tokens that their request will still compute.
      internal: of a request's, and never used by it: of a strip behind the request's last token,
        or of a last block behind the newest.
      free: nobody's.
      is_fragmented: whether the next in line would fit what is free, if it lay together.
    """

    stored: float
    reserved: float
    internal: float
    free: float
    is_fragmented: bool


class Memory(Protocol):
    """The memory of one replica; `capacity_tokens` slots."""

    capacity_tokens: int

    def sample(self, context_tokens: float, awaited_tokens: float) -> MemorySample:
        """Where the slots are, once a step is scheduled.

        Args:
          context_tokens: tokens that are computed at the step's end, of all that run.
          awaited_tokens: tokens of their prompts that are still to be computed then.
        """
        ...

    def grown(self, sample: MemorySample, num_tokens: float, num_blocks: float) -> MemorySample:
        """The sample after so many more tokens, for which so many blocks were taken."""
        ...


def make_scheduler(allocator: str, config: SchedulerConfig) -> tuple[Scheduler, Memory]:
    """The real scheduler over one of `ALLOCATORS`, and a view of its memory.

    Contiguous ones have as many slots as the blocks have, the null block aside.
    """
    check_choice("allocator", allocator, ALLOCATORS)
    if allocator == "paged":
        scheduler = Scheduler(config)
        return scheduler, PagedMemory(scheduler)
    # Without hashes there is nothing to look for in each step.
    scheduler = Scheduler(dataclasses.replace(config, enable_prefix_caching=False))
    capacity = (config.num_blocks - 1) * config.block_size
    reserved = config.max_model_len if allocator == "reserve_max" else None
    scheduler.blocks = blocks = ContiguousBlocks(capacity, reserved)
    return scheduler, ContiguousMemory(scheduler, blocks)


class PagedMemory:
    """The real block manager's pool. With one sequence a request, only full blocks are shared."""

    def __init__(self, scheduler: Scheduler):
        self._scheduler = scheduler
        self._block_size = scheduler.config.block_size
        self.capacity_tokens = (scheduler.config.num_blocks - 1) * self._block_size

    def sample(self, context_tokens: float, awaited_tokens: float) -> MemorySample:
        scheduler = self._scheduler
        num_used = scheduler.blocks.pool.num_used_blocks
        num_in_tables = num_used
        if scheduler.config.enable_prefix_caching:
            num_in_tables = sum(map(len, map(_BLOCK_IDS, scheduler.running)))
        empty = num_in_tables * self._block_size - context_tokens
        held = num_used * self._block_size
        return MemorySample(
            stored=held - empty,
            reserved=awaited_tokens,
            internal=empty - awaited_tokens,
            free=self.capacity_tokens - held,
            is_fragmented=False,
        )

    def grown(self, sample: MemorySample, num_tokens: float, num_blocks: float) -> MemorySample:
        num_slots = num_blocks * self._block_size
        return sample._replace(
            stored=sample.stored + num_tokens,
            internal=sample.internal - num_tokens + num_slots,
            free=sample.free - num_slots,
        )


class ContiguousMemory:
    """Strips under the same scheduler."""

    def __init__(self, scheduler: Scheduler, blocks: ContiguousBlocks):
        self._scheduler = scheduler
        self._blocks = blocks
        self.capacity_tokens = blocks.memory.capacity

    def sample(self, context_tokens: float, awaited_tokens: float) -> MemorySample:
        memory, waiting = self._blocks.memory, self._scheduler.waiting
        held = memory.capacity - memory.num_free
        return MemorySample(
            stored=context_tokens,
            reserved=self._blocks.final_tokens - context_tokens,
            internal=held - self._blocks.final_tokens,
            free=memory.num_free,
            is_fragmented=bool(waiting) and self._is_fragmented(waiting[0]),
        )

    def grown(self, sample: MemorySample, num_tokens: float, num_blocks: float) -> MemorySample:
        return sample._replace(
            stored=sample.stored + num_tokens, reserved=sample.reserved - num_tokens
        )

    def _is_fragmented(self, request: Request) -> bool:
        need = self._blocks.size_for(request)
        return self._blocks.memory.largest_gap < need <= self._blocks.memory.num_free
