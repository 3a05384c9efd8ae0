"""Several decode steps at once, where it is certain that nothing else would happen in them.

A step is quiet if it admits, preempts and moves nobody, and each running request gets a token and
goes on. The steps behind a quiet one are quiet too, as long as no request comes, none reaches its
last token, and the free blocks suffice: whoever could not be admitted before cannot be now, since
blocks and seats only get fewer. Their times are computed one by one; what they do to the requests
and to the block manager is done once. A test holds that to equal stepping, but for the numbers of
the blocks: the same ones are taken from the free queue, in another order among the requests.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from paged_jax.scheduler import Scheduler
from paged_jax.simulate.step_time import StepTime

# More would blur the timeline, which knows no more than the means of steps made at once.
MAX_STEPS = 256


@dataclasses.dataclass(frozen=True)
class QuietSteps:
    """Steps that follow on each other; step 1 is the first of them.

    Attributes:
      seconds: float64[num_steps], of each.
      num_new_blocks: int64[num_steps], taken so far by each step, from the first on.
    """

    seconds: np.ndarray
    num_new_blocks: np.ndarray

    def __len__(self) -> int:
        return len(self.seconds)

    @functools.cached_property
    def total_seconds(self) -> float:
        return float(self.seconds.sum())

    def within(self, seconds: float) -> QuietSteps:
        """Those that begin in the first `seconds`."""
        if seconds >= self.total_seconds:
            return self
        if seconds <= 0:
            return QuietSteps(self.seconds[:0], self.num_new_blocks[:0])
        num_steps = 1 + int(np.searchsorted(np.cumsum(self.seconds), seconds))
        return QuietSteps(self.seconds[:num_steps], self.num_new_blocks[:num_steps])


def plan_quiet_steps(
    scheduler: Scheduler, step_time: StepTime, context_tokens: int, available_seconds: float
) -> QuietSteps | None:
    """The quiet steps that follow on a quiet one; None if there is hardly any. Changes nothing.

    Args:
      scheduler: between two steps.
      step_time: how long a step takes.
      context_tokens: that the running requests have computed.
      available_seconds: until something happens; steps that begin earlier are quiet.
    """
    running = scheduler.running
    num_steps = min(MAX_STEPS, min([r.max_total_tokens - len(r.token_ids) for r in running]) - 1)
    if num_steps < 2 or available_seconds <= 0:
        return None
    num_new_blocks = np.cumsum(_new_blocks(scheduler, num_steps))
    contexts = context_tokens + len(running) * np.arange(1, num_steps + 1)
    seconds = step_time.decode_seconds(len(running), contexts)
    # As many as find their blocks, of which they take ever more, and begin in time.
    free = scheduler.blocks.pool.num_free_blocks
    num_steps = int(np.searchsorted(num_new_blocks, free, "right"))
    steps = QuietSteps(seconds[:num_steps], num_new_blocks[:num_steps])
    return steps.within(available_seconds) if num_steps else None


def make_quiet_steps(scheduler: Scheduler, num_steps: int) -> None:
    """Gives each running request the tokens and blocks of that many planned steps."""
    blocks, zeros = scheduler.blocks, [0] * num_steps
    for request in scheduler.running:
        end = request.num_computed_tokens + num_steps
        if not blocks.append_slots(request, end):
            raise RuntimeError(f"no blocks for {num_steps} steps of {request}")
        request.token_ids.extend(zeros)
        request.num_computed_tokens = end
        blocks.cache_full_blocks(request, end)
    blocks.take_moves()


def _new_blocks(scheduler: Scheduler, num_steps: int) -> list[int]:
    """How many blocks each of the next steps takes, if all decode; none where there are none."""
    counts, block_size = [0] * num_steps, scheduler.config.block_size
    for request in scheduler.running:
        if not request.block_ids:  # It has a contiguous strip.
            break
        room = len(request.block_ids) * block_size - request.num_computed_tokens
        for step in range(room, num_steps, block_size):
            counts[step] += 1
    return counts
