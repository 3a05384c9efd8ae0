"""Calls of several decode steps, and the call that is dispatched before the last one is read.

What a call makes, and which one follows, is the scheduler's word (`lookahead`); here is the rest of
what the engine does about it (`dispatch`), on a simulated clock: a call that was dispatched ahead
begins when the one before it ends, and its tokens are all read when it ends itself.

Since a simulated request ends by its length, it is known which rows still draw in each step.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterator

import numpy as np

from paged_jax.lookahead import row_buckets
from paged_jax.request import RequestStatus
from paged_jax.scheduled_step import ScheduledStep
from paged_jax.scheduler import Scheduler
from paged_jax.simulate.device_model import StepWork
from paged_jax.simulate.step_time import StepTime


@dataclasses.dataclass(frozen=True, slots=True)
class Stretch:
    """Steps of a call that follow on each other, and in which the same rows draw.

    Attributes:
      num_steps: how many.
      num_seqs: rows that draw a token in each.
      seconds: of all of them.
      context_tokens: computed tokens of all requests of the call, those that have ended in it too;
        the mean over the steps, each as it stands at its end.
    """

    num_steps: int
    num_seqs: int
    seconds: float
    context_tokens: float


class CallsAhead:
    """What the engine's dispatcher dispatches, one call ahead where it may.

    Args:
      scheduler: that decides.
    """

    def __init__(self, scheduler: Scheduler):
        self._scheduler = scheduler
        self._buckets = row_buckets(scheduler.config.max_num_seqs)

    def follow(self, step: ScheduledStep) -> ScheduledStep | None:
        """The call behind one that was dispatched and is not read, where it is known."""
        if not step.is_plain_decode:
            return None
        running = RequestStatus.RUNNING
        num_live = sum([chunk[0].status is running for chunk in step.chunks])
        if self._bucket(num_live) != self._bucket(len(step.chunks)):  # A smaller program will do.
            return None
        return self._scheduler.extend(step)

    def _bucket(self, num_rows: int) -> int:
        return bisect.bisect_left(self._buckets, num_rows)


def tokens_to_draw(step: ScheduledStep | None) -> int:
    """Tokens that a call will draw, of all its rows; 0 if there is no call."""
    if step is None:
        return 0
    most = step.num_decode_steps
    return sum([min(left, most) for left in _left_to_draw(step) if left > 0])


def stretches(step: ScheduledStep, step_time: StepTime, *, is_ahead: bool) -> Iterator[Stretch]:
    """What a call of decode steps does, from its first step to its last.

    Args:
      step: the call; requests that ended before it may be among its chunks.
      step_time: how long a step takes.
      is_ahead: whether it was dispatched before the tokens of the last call were read.
    """
    most = step.num_decode_steps
    rows = [(c[1], min(n, most)) for c, n in zip(step.chunks, _left_to_draw(step), strict=True)]
    starts, counts = zip(*[row for row in rows if row[1] > 0], strict=True)
    live = sum(starts)
    ended = first = 0
    for last in sorted(set(counts)):
        num_seqs = sum([count > first for count in counts])
        contexts = live + num_seqs * np.arange(first + 1, last + 1)
        seconds = step_time.decode_seconds(num_seqs, contexts)
        if first == 0 and step.moves:
            context = int(contexts[0])
            moves = len(step.moves.swap_out) + len(step.moves.swap_in), len(step.moves.copies)
            work = StepWork(num_seqs, num_seqs, context, context, *moves)
            seconds[0] = step_time.step_seconds(work)
        num_hidden = last - first - (first == 0 and not is_ahead)
        total = float(seconds.sum()) - num_hidden * step_time.overhead_seconds
        yield Stretch(last - first, num_seqs, total, ended + float(contexts.mean()))
        # Those that end here draw no more, and keep what they have until the call is read.
        if last < most:
            gone = [start for start, count in zip(starts, counts, strict=True) if count == last]
            live -= sum(gone)
            ended += sum(gone) + len(gone) * last
        first = last


def _left_to_draw(step: ScheduledStep) -> list[int]:
    """`num_left` of each chunk, without its calls: there are millions of chunks."""
    return [r.max_total_tokens - start - num for r, start, num, _ in step.chunks]
