"""Who had which block of the pool, from the beginning of a run to its end."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import numpy as np

from paged_jax.config import SchedulerConfig
from paged_jax.pool_snapshot import snapshot
from paged_jax.scheduled_step import ScheduledStep
from paged_jax.simulate.replica import Replica
from paged_jax.simulate.step_time import StepTime
from paged_jax.simulate.traffic import TraceRequest

# What a block is in place of some request's own.
FREE, CACHED, SHARED = -1, -2, -3


@dataclasses.dataclass(frozen=True, eq=False)
class PoolHistory:
    """The blocks of a pool at several moments of a run.

    Attributes:
      seconds: float64[num_moments + 1], when the moments' steps began, and the run's end.
      owner: int32[num_moments, num_blocks], for each block, the null block left out, the number of
        the request that alone holds it, counted in order of arrival; or `FREE`, `CACHED` (nobody's,
        but a hit would find it) or `SHARED` (two requests or more hold it).
      block_size: tokens a block.
    """

    seconds: np.ndarray
    owner: np.ndarray
    block_size: int


def sample_pool(
    requests: Iterable[TraceRequest],
    config: SchedulerConfig,
    step_time: StepTime,
    *,
    num_moments: int = 200,
) -> PoolHistory:
    """Serves requests on one device and looks at its pool in evenly spaced steps.

    Args:
      requests: in order of arrival; a few dozen, for each look costs as much as there are blocks.
      config: the scheduler's limits.
      step_time: how long a step takes.
      num_moments: at least half as many are kept, if there are as many steps, and at most all.

    Raises:
      ValueError: nothing was served, or `num_moments` is below 2.
    """
    if num_moments < 2:
        raise ValueError(f"num_moments={num_moments}: give at least 2")
    moments: list[tuple[float, np.ndarray]] = []
    num_steps, interval = 0, 1

    def look(step: ScheduledStep) -> None:
        nonlocal num_steps, interval
        if num_steps % interval == 0:
            if len(moments) == num_moments:  # Every second one goes, and from now on.
                del moments[1::2]
                interval *= 2
            if num_steps % interval == 0:
                moments.append((replica.clock, _owners(replica)))
        num_steps += 1

    replica = Replica(config, step_time, on_step=look)
    for request in requests:
        replica.offer(request)
    replica.finish()
    if not moments:
        raise ValueError("no request was served, so that there is nothing to look at")
    seconds = np.array([seconds for seconds, _ in moments] + [replica.clock])
    return PoolHistory(seconds, np.stack([owner for _, owner in moments]), config.block_size)


def _owners(replica: Replica) -> np.ndarray:
    """int32[num_blocks], as `PoolHistory.owner` has it."""
    scheduler = replica.scheduler
    pool = snapshot(scheduler.blocks, scheduler.requests.values())
    numbers = np.array([*(int(o.request_id) for o in pool.owners), FREE], np.int32)
    states = pool.device
    owner = numbers[states.owner]  # -1, nobody's, is the last of the numbers.
    owner = np.where(states.is_cached, CACHED, owner)
    return np.where(states.is_shared, SHARED, owner)[1:].astype(np.int32)
