"""A fleet that grows and shrinks with its load, and what it costs in device-hours.

The rule is that of Kubernetes' horizontal pod autoscaler: as many devices as it takes to bring the
load of each back to a target, looked at from time to time; at most twice as many, or four more, at
a look; fewer only if fewer would have done for a while. A device takes some time to start, and is
paid for from then on until the last request that it has is answered.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Iterable

from paged_jax.config import SchedulerConfig
from paged_jax.simulate.fleet import make_router, merged
from paged_jax.simulate.replica import Replica
from paged_jax.simulate.results import Results
from paged_jax.simulate.step_time import StepTime
from paged_jax.simulate.traffic import TraceRequest


@dataclasses.dataclass(frozen=True, kw_only=True)
class AutoscalePolicy:
    """When devices are added and given back.

    Attributes:
      target_load: unfinished requests a device, running or waiting.
      fewest, most: devices at any time.
      at_first: devices when the first request comes; None for the fewest.
      startup_seconds: from the decision to a device that serves.
      interval_seconds: between two looks at the load.
      patience_seconds: for so long fewer devices must have been enough before any is given back.
    """

    target_load: float
    fewest: int = 1
    most: int = 4096
    at_first: int | None = None
    startup_seconds: float = 120.0
    interval_seconds: float = 15.0
    patience_seconds: float = 300.0

    def __post_init__(self):
        for field in ("target_load", "interval_seconds"):
            if not getattr(self, field) > 0:
                raise ValueError(f"{field}={getattr(self, field)}: it must be above 0")
        for field in ("startup_seconds", "patience_seconds"):
            if getattr(self, field) < 0:
                raise ValueError(f"{field}={getattr(self, field)}: it must be at least 0")
        if not 1 <= self.fewest <= self.most:
            raise ValueError(
                f"fewest={self.fewest}, most={self.most}: give at least 1, and no fewer as most"
            )
        if self.at_first is not None and not self.fewest <= self.at_first <= self.most:
            raise ValueError(
                f"at_first={self.at_first}: it must lie between fewest={self.fewest} and "
                f"most={self.most}"
            )

    def wanted(self, load: int, num_devices: int) -> int:
        """Devices for so many unfinished requests, where there are some already."""
        wanted = min(math.ceil(load / self.target_load), max(2 * num_devices, num_devices + 4))
        return min(max(wanted, self.fewest), self.most)


@dataclasses.dataclass(frozen=True)
class Autoscaled:
    """What an autoscaled fleet came to.

    Attributes:
      results: of all its devices together. Its times and counts hold; its costs would be those of
        devices that run all the time, so take those of this class.
      device_hours: that are paid for.
      peak_devices: the most that were paid for at once.
      counts: when how many devices served: (seconds, devices) at each change.
    """

    results: Results
    device_hours: float
    peak_devices: int
    counts: tuple[tuple[float, int], ...]

    def cost_a_million_tokens(self, price_an_hour: float) -> float:
        """What a million output tokens cost at a price of a device and hour."""
        return price_an_hour * self.device_hours / max(self.results.totals.output, 1) * 1e6


def serve_autoscaled(
    requests: Iterable[TraceRequest],
    config: SchedulerConfig,
    step_time: StepTime,
    policy: AutoscalePolicy,
    *,
    router: str = "least_loaded",
) -> Autoscaled:
    """Serves requests to their end with as many devices as the policy has at each time.

    The device that came last is given back first: it gets no
    more requests, and ends with those that it has.

    Args:
      requests: in order of arrival.
      config, step_time: of a device.
      policy: when devices come and go.
      router: one of `fleet.ROUTERS`; it sees those that serve.

    Raises:
      ValueError: a request comes before the one ahead of it.
    """
    fleet = _Fleet(config, step_time, policy)
    route, last = make_router(router), 0.0
    for request in requests:
        now = request.arrival_seconds
        if now < last:
            raise ValueError(
                f"arrival_seconds={now} comes after {last}: sort the requests by arrival"
            )
        last = now
        fleet.advance(now)
        replicas = [device.replica for device in fleet.serving]
        fleet.serving[route(request, replicas)].replica.offer(request)
    return fleet.finish()


class _Device:
    """A replica, and since when it is paid for."""

    def __init__(self, replica: Replica, paid_from: float):
        self.replica = replica
        self.paid_from = paid_from
        self.released_at: float | None = None

    def paid_until(self, end: float) -> float:
        """When it is given back: at its last token, if it was let go before."""
        if self.released_at is None:
            return end
        return max(self.released_at, self.replica.results.end_seconds)


class _Fleet:
    """The devices of an autoscaled fleet: those that serve, and those on their way in or out."""

    def __init__(self, config: SchedulerConfig, step_time: StepTime, policy: AutoscalePolicy):
        self._config, self._step_time, self._policy = config, step_time, policy
        num_devices = policy.at_first or policy.fewest
        self.serving = [self._new_device(0.0) for _ in range(num_devices)]
        self._starting: deque[tuple[float, _Device]] = deque()  # With the time when each serves.
        self._leaving: list[_Device] = []
        self._next_look = policy.interval_seconds
        # What each look of the last while wanted: as many as the most of them are kept.
        self._wanted: deque[tuple[float, int]] = deque()
        self._counts = [(0.0, num_devices)]

    def advance(self, now: float) -> None:
        """Makes all steps that begin before `now`, and looks at the load on the way."""
        while self._next_look <= now:
            self._run_until(self._next_look)
            self._look(self._next_look)
            self._next_look += self._policy.interval_seconds
        self._run_until(now)

    def finish(self) -> Autoscaled:
        """Serves what is left, with the devices that there are."""
        while any(device.replica.load for device in self.serving):
            self.advance(self._next_look)
        devices = self.serving + self._leaving + [device for _, device in self._starting]
        results = merged([device.replica.finish() for device in devices])
        spans = [(d.paid_from, d.paid_until(results.end_seconds)) for d in devices]
        # One that was still starting is not paid for beyond the end.
        hours = sum(max(end - start, 0) for start, end in spans) / 3600
        peak = max(sum(start <= moment < end for start, end in spans) for moment, _ in spans)
        return Autoscaled(results, hours, peak, tuple(self._counts))

    def _run_until(self, now: float) -> None:
        while self._starting and self._starting[0][0] <= now:
            ready, device = self._starting.popleft()
            self.serving.append(device)
            self._counts.append((ready, len(self.serving)))
        for device in self.serving + self._leaving:
            device.replica.advance(until=now)

    def _look(self, now: float) -> None:
        """Orders devices, or lets some go."""
        policy, wanted = self._policy, self._wanted
        load = sum(device.replica.load for device in self.serving)
        num_devices = len(self.serving) + len(self._starting)
        wanted.append((now, policy.wanted(load, num_devices)))
        while wanted[0][0] < now - policy.patience_seconds:
            wanted.popleft()
        for _ in range(wanted[-1][1] - num_devices):
            self._starting.append((now + policy.startup_seconds, self._new_device(now)))
        if now < policy.patience_seconds:
            return
        num_kept = max(number for _, number in wanted)
        num_released = min(num_devices - num_kept, len(self.serving) - policy.fewest)
        for _ in range(num_released):
            device = self.serving.pop()
            device.released_at = now
            self._leaving.append(device)
        if num_released > 0:
            self._counts.append((now, len(self.serving)))

    def _new_device(self, now: float) -> _Device:
        return _Device(Replica(self._config, self._step_time), now)
