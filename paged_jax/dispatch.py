"""What runs on the device: the step whose outputs are read next, and the one that follows it.

While a step's tokens are on their way to the host, the device should have work. Where it is sure
what the next step is, because all requests decode and nobody is to join them, that step is
dispatched first, from the rows that the last one leaves on the device:

    host    schedule A | dispatch A | dispatch B | read A, process | dispatch C | read B, process
    device               AAAAAAAAAAAAAAAAAAAAAAAAA BBBBBBBBBBBBBBBBBBBBBBBBBBBBB CCCCCCCCCCCCCCC

Steps run in the order of their dispatch. So a block that is freed while a step in flight still
writes to it may be given away at once: whoever gets it writes later.

Over a mesh, each of its rows has a scheduler, and their steps run as one: where all decode, they
decode together, and otherwise all run the program for anything, some with fewer tokens. A row with
nothing to do computes padding.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

import jax
import numpy as np

from paged_jax.batch import StepCall, StepShape
from paged_jax.batch_builder import build_calls, continue_decode
from paged_jax.block_moves import NO_MOVES
from paged_jax.compile import StepRunner, flatten_steps
from paged_jax.decode_rows import DecodeCall, DecodeRows
from paged_jax.request import RequestStatus
from paged_jax.sampling import SamplerOutput
from paged_jax.scheduled_step import ScheduledStep
from paged_jax.scheduler import Scheduler
from paged_jax.sharding import stack_rows, unstack_rows


@dataclasses.dataclass(frozen=True)
class Flight:
    """A step that was dispatched.

    Attributes:
      steps: what it computes, of each of the mesh's rows; of the only one where there is no mesh.
      output: what it samples, on the device.
      shape: which program it is.
      call: what it was given.
      rows: where they stand then, on the device, if it decodes; None otherwise.
      dispatched: when it was, in seconds of `time.perf_counter`.
      schedule_seconds: what the host took to make it.
      has_rows: whether its arrays have the mesh's rows as a first dimension.
    """

    steps: tuple[ScheduledStep, ...]
    output: SamplerOutput
    shape: StepShape
    call: StepCall | DecodeCall
    rows: DecodeRows | None
    dispatched: float
    schedule_seconds: float
    has_rows: bool

    def to_host(self) -> list[SamplerOutput]:
        """Waits for what it samples: of each step, as numpy arrays."""
        output = jax.tree.map(np.asarray, self.output)
        rows = unstack_rows(output) if self.has_rows else [output]
        return [
            flatten_steps(own, step.num_decode_steps)
            for own, step in zip(rows, self.steps, strict=True)
        ]


class Dispatcher:
    """Schedules steps and dispatches them, one ahead where it may."""

    def __init__(self, schedulers: Sequence[Scheduler], runner: StepRunner):
        self._schedulers = tuple(schedulers)
        self._runner = runner
        self._has_rows = runner.mesh is not None
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

    @property
    def _lookahead(self) -> int:
        return self._schedulers[0].config.decode_lookahead

    def _schedule(self) -> Flight | None:
        started = time.perf_counter()
        runner, schedulers = self._runner, self._schedulers
        steps = tuple(scheduler.schedule() for scheduler in schedulers)
        if not any(step.chunks for step in steps):
            if any(step.moves for step in steps):  # All that runs was swapped out, and comes back.
                runner.move([step.moves for step in steps])
                runner.settle()
            elif any(scheduler.has_unfinished() for scheduler in schedulers):
                raise RuntimeError(f"the scheduler is stuck: {schedulers}")
            return None
        shape, calls = build_calls(
            steps,
            runner.programs,
            block_size=schedulers[0].config.block_size,
            goes_on=self._lookahead > 1,
        )
        if not shape.decode_only:  # One row makes others wait.
            steps = tuple(
                step
                if step.num_decode_steps == 1
                else dataclasses.replace(step, num_decode_steps=1)
                for step in steps
            )
        call = stack_rows(calls) if self._has_rows else calls[0]
        num_rows = max(len(step.chunks) for step in steps)
        return self._dispatch(steps, shape, call, num_rows, started)

    def _follow(self, flight: Flight) -> Flight | None:
        """Dispatches the step after a flight that was not read yet, where it is known."""
        started = time.perf_counter()
        if flight.rows is None or self._lookahead == 1:
            return None
        assert isinstance(flight.call, DecodeCall)
        programs, num_rows = self._runner.programs, max(map(_num_live, flight.steps))
        shape = programs.choose_decode(num_rows, flight.call.sampling)
        if shape != flight.shape:  # A smaller one will do.
            return None
        steps = tuple(map(_extend, self._schedulers, flight.steps))
        if None in steps:
            # Blocks that were moved for the others are moved all the same.
            moves = [NO_MOVES if step is None else step.moves for step in steps]
            if any(moves):
                self._runner.move(moves)
            return None
        call = continue_decode(steps, shape, flight.call, flight.rows, programs.buckets)  # pyright: ignore[reportArgumentType]
        return self._dispatch(steps, shape, call, num_rows, started)  # pyright: ignore[reportArgumentType]

    def _dispatch(
        self,
        steps: tuple[ScheduledStep, ...],
        shape: StepShape,
        call: StepCall | DecodeCall,
        num_rows: int,
        started: float,
    ) -> Flight:
        dispatched = time.perf_counter()
        moves = [step.moves for step in steps]
        if shape.decode_only:
            num_steps = max(step.num_decode_steps for step in steps)
            self._runner.programs.count_decode(num_rows, shape, call.sampling, num_steps=num_steps)
        rows, output = self._runner.run(shape, call, moves if any(moves) else NO_MOVES)
        seconds = dispatched - started
        return Flight(steps, output, shape, call, rows, dispatched, seconds, self._has_rows)


def _num_live(step: ScheduledStep) -> int:
    return sum(chunk.request.status is RequestStatus.RUNNING for chunk in step.chunks)


def _extend(scheduler: Scheduler, step: ScheduledStep) -> ScheduledStep | None:
    """The step after one that was not read; one without chunks stays so while nobody waits."""
    if step.chunks:
        return scheduler.extend(step)
    return None if scheduler.has_unfinished() else step
