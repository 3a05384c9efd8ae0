"""What runs on the device: the step whose outputs are read next, and the one that follows it.

While a step's tokens are on their way to the host, the device should have work. Where it is sure
what the next step is, because all requests decode and nobody is to join them, that step is
dispatched first, from the rows that the last one leaves on the device:

    host    schedule A | dispatch A | dispatch B | read A, process | dispatch C | read B, process
    device               AAAAAAAAAAAAAAAAAAAAAAAAA BBBBBBBBBBBBBBBBBBBBBBBBBBBBB CCCCCCCCCCCCCCC

Steps run in the order of their dispatch. So a block that is freed while a step in flight still
writes to it may be given away at once: whoever gets it writes later.
"""

from __future__ import annotations

import dataclasses
import time

from paged_jax.batch import StepCall, StepShape
from paged_jax.batch_builder import build_decode, build_step, continue_decode
from paged_jax.compile import StepRunner
from paged_jax.decode_rows import DecodeCall, DecodeRows
from paged_jax.request import RequestStatus
from paged_jax.sampling import SamplerOutput
from paged_jax.scheduled_step import ScheduledStep
from paged_jax.scheduler import Scheduler


@dataclasses.dataclass(frozen=True)
class Flight:
    """A step that was dispatched.

    Attributes:
      step: what it computes.
      output: what it samples, on the device.
      shape: which program it is.
      call: what it was given.
      rows: where they stand then, on the device, if it decodes; None otherwise.
      dispatched: when it was, in seconds of `time.perf_counter`.
      schedule_seconds: what the host took to make it.
    """

    step: ScheduledStep
    output: SamplerOutput
    shape: StepShape
    call: StepCall | DecodeCall
    rows: DecodeRows | None
    dispatched: float
    schedule_seconds: float


class Dispatcher:
    """Schedules steps and dispatches them, one ahead where it may."""

    def __init__(self, scheduler: Scheduler, runner: StepRunner):
        self._scheduler = scheduler
        self._runner = runner
        self._in_flight: Flight | None = None

    def next_flight(self) -> Flight | None:
        """The step to read now; the one behind it may be on its way when this returns.

        Returns:
          None if there was nothing to compute.

        Raises:
          RuntimeError: there are requests, and none of them can be scheduled.
        """
        flight = self._in_flight or self._schedule()
        self._in_flight = None if flight is None else self._follow(flight)
        return flight

    def forget(self) -> None:
        """Drops what is in flight; after a fault."""
        self._in_flight = None

    def _schedule(self) -> Flight | None:
        started = time.perf_counter()
        runner, scheduler = self._runner, self._scheduler
        step = scheduler.schedule()
        if not step.chunks:
            if step.moves:  # All that runs was swapped out, and comes back in the next step.
                runner.move(step.moves)
                runner.settle()
            elif scheduler.has_unfinished():
                raise RuntimeError(f"the scheduler is stuck: {scheduler}")
            return None
        goes_on = scheduler.config.decode_lookahead > 1
        built = build_decode(step, runner.buckets, goes_on=goes_on)
        if built is None:
            built = build_step(step, runner.buckets, block_size=scheduler.config.block_size)
        return self._dispatch(step, *built, started)

    def _follow(self, flight: Flight) -> Flight | None:
        """Dispatches the step after a flight that was not read yet, where it is known."""
        started = time.perf_counter()
        if flight.rows is None or self._scheduler.config.decode_lookahead == 1:
            return None
        assert isinstance(flight.call, DecodeCall)
        chunks, buckets = flight.step.chunks, self._runner.buckets
        num_live = sum(chunk.request.status is RequestStatus.RUNNING for chunk in chunks)
        if buckets.shape_for(num_live, num_live) != flight.shape:  # A smaller one will do.
            return None
        step = self._scheduler.extend(flight.step)
        if step is None:
            return None
        call = continue_decode(step, flight.shape, flight.call, flight.rows, buckets)
        return self._dispatch(step, flight.shape, call, started)

    def _dispatch(
        self, step: ScheduledStep, shape: StepShape, call: StepCall | DecodeCall, started: float
    ) -> Flight:
        dispatched = time.perf_counter()
        rows, output = self._runner.run(shape, call, step.moves)
        return Flight(step, output, shape, call, rows, dispatched, dispatched - started)
