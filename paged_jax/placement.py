"""Which of several pools a request is served from, where each has a scheduler of its own."""

from __future__ import annotations

from collections.abc import Sequence

from paged_jax.request import Request
from paged_jax.scheduler import Scheduler

# Of its pool, how many fewer free blocks than the emptiest one a scheduler may have and still get a
# request for the prefix that it has cached. More, and a prefix that all prompts share would fill
# one pool while the others stand empty.
_AFFINITY_SHARE = 0.05


def choose_scheduler(schedulers: Sequence[Scheduler], request: Request) -> int | None:
    """The scheduler to give a waiting request to: which one can admit it now, and best.

    The one with the longest cached prefix of the request comes first, unless its pool is far fuller
    than another's; then the one with the most free blocks, and of equal ones that with the fewest
    requests.

    Returns:
      Its index, or None if none has a seat and the blocks; the request waits then, and is bound to
      no pool.
    """
    rooms = [_room(scheduler, request) for scheduler in schedulers]
    fitting = [(i, *room) for i, room in enumerate(rooms) if room is not None]
    if not fitting:
        return None
    most_free = max(num_free for _, num_free, _ in fitting)
    slack = _AFFINITY_SHARE * schedulers[0].config.num_blocks

    def merit(place: tuple[int, int, int]) -> tuple[int, int, int]:
        i, num_free, num_hits = place
        counted_hits = num_hits if num_free + num_hits + slack >= most_free else 0
        return counted_hits, num_free, -len(schedulers[i].requests)

    return max(fitting, key=merit)[0]


def _room(scheduler: Scheduler, request: Request) -> tuple[int, int] | None:
    """Free blocks, less those that waiting requests will take, and cached blocks of the request.

    None if the scheduler would not admit it in its next step. One that has nothing to do always
    would, whatever the request needs: nobody else is in the way.
    """
    blocks, waiting = scheduler.blocks, scheduler.waiting
    num_hits = len(blocks.find_cached(request))
    num_promised = sum(blocks.num_blocks_for(other.num_tokens + 1) for other in waiting)
    num_held = sum(len(other.block_ids) for other in scheduler.held.values())  # They would yield.
    num_free = blocks.pool.num_free_blocks + num_held - num_promised
    if scheduler.requests:
        num_needed = blocks.num_blocks_for(request.num_tokens + 1) - num_hits
        has_seat = len(scheduler.running) + len(waiting) < scheduler.config.max_num_seqs
        if not has_seat or num_needed > num_free:
            return None
    return num_free, num_hits
