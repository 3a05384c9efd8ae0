"""Runs traffic through a replica, as the traffic is read."""

from __future__ import annotations

from collections.abc import Iterable

from paged_jax.config import SchedulerConfig
from paged_jax.simulate.replica import Replica
from paged_jax.simulate.results import Results
from paged_jax.simulate.step_time import StepTime
from paged_jax.simulate.traffic import TraceRequest


def simulate(
    requests: Iterable[TraceRequest],
    config: SchedulerConfig,
    step_time: StepTime,
    *,
    allocator: str = "paged",
) -> Results:
    """Serves requests to their end on one device.

    Only the requests that run, and as many as a step may admit, are in memory at a time.

    Args:
      requests: in order of arrival.
      config: the scheduler's limits.
      step_time: how long a step takes.
      allocator: one of `allocators.ALLOCATORS`.

    Raises:
      ValueError: a request comes before the one ahead of it.
    """
    replica = Replica(config, step_time, allocator=allocator)
    feed(replica, requests)
    return replica.finish()


def feed(replica: Replica, requests: Iterable[TraceRequest]) -> None:
    """Offers requests to a replica as it gets there in time and has use for them."""
    last = 0.0
    for request in requests:
        arrival = request.arrival_seconds
        if arrival < last:
            raise ValueError(
                f"arrival_seconds={arrival} comes after {last}: sort the requests by arrival"
            )
        last = arrival
        replica.advance(until=arrival)
        while replica.is_full:
            replica.step()
        replica.offer(request)
