"""One device of the soak: a real scheduler under made-up traffic, on a clock of its own."""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from soak_ledger import CacheFollower, Ledger
from soak_traffic import Arrival

from paged_jax.config import SchedulerConfig
from paged_jax.rates import RateMeter
from paged_jax.request import Request, RequestStatus
from paged_jax.sampling_params import SamplingParams
from paged_jax.scheduler import Scheduler
from paged_jax.simulate.device_model import DeviceModel

EOS = 128_001
_NOISE_BITS = 20


@functools.cache
def noise(vocab_size: int) -> list[int]:
    """A million random token ids; which of them a request samples, its seed and the place say."""
    return np.random.default_rng(0).integers(0, vocab_size, 1 << _NOISE_BITS).tolist()


class Conversation:
    """A session: one sequence, held between its turns."""

    def __init__(self, name: str, arrival: Arrival):
        self.name = name
        self.arrival = arrival
        self.held: Request | None = None
        self.turns = list(arrival.turns)


class Replica:
    """A scheduler, the clock of its device, and what is still to happen to it.

    `advance` makes one step, or jumps to the next event if there is nothing to compute. Whatever
    comes due while a step runs happens between its schedule and its update if it is an abort, and
    after it otherwise.

    Args:
      number: of the device.
      config: of the scheduler.
      device: what a step costs.
      arrivals: in order of time.
      vocab_size: sampled tokens are below it.
      check_every_steps: how often the books are compared.
      patience_seconds: the longest that a request may take.
      follow_events: whether the prefix cache's events are followed.
      make_scheduler: for tests, which plant faults.

    Attributes:
      clock: simulated seconds.
      peak_usage: the highest share of the pool in use.
    """

    def __init__(
        self,
        number: int,
        config: SchedulerConfig,
        device: DeviceModel,
        arrivals: Iterator[Arrival],
        *,
        vocab_size: int,
        check_every_steps: int = 256,
        patience_seconds: float = 900.0,
        follow_events: bool = False,
        make_scheduler: Callable[[SchedulerConfig], Scheduler] = Scheduler,
    ):
        self.number = number
        self.device = device
        self.clock = 0.0
        self.scheduler = make_scheduler(config)
        self.follower = CacheFollower(self.scheduler) if follow_events else None
        self.ledger = Ledger(self.scheduler, patience_seconds)
        self.swap_rate = RateMeter(10.0, lambda: self.clock)
        self.max_swap_rate = 0.0
        self._noise = noise(vocab_size)
        self._check_every_steps = check_every_steps
        self._arrivals = arrivals
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._aborts: list[tuple[float, str]] = []
        self._numbers = itertools.count()
        self._conversations: dict[str, Conversation] = {}  # by the live or held request's name
        self._forks: dict[str, Request] = {}
        # As an engine knows it from its own transfers, and from its first prefill on.
        costs = self.scheduler.costs
        costs.bytes_a_token = device.model.bytes_a_token
        costs.observe_swap(device.bytes_a_block, device.swap_seconds(1))
        self._await_arrival()

    @property
    def num_running(self) -> int:
        return len(self.scheduler.running)

    @property
    def peak_usage(self) -> float:
        pool = self.scheduler.blocks.pool
        return pool.peak_used_blocks / (pool.num_blocks - 1)

    @property
    def next_time(self) -> float:
        """When `advance` would do something; infinite when all is done."""
        if self.scheduler.has_unfinished():
            return self.clock
        return max(self.clock, self._agenda[0][0]) if self._agenda else math.inf

    def advance(self) -> None:
        """Lets what is due happen, then makes one step if there is work.

        Raises:
          Violation, AssertionError, ValueError: the scheduler did what it must not.
        """
        self.clock = self.next_time
        while self._agenda and self._agenda[0][0] <= self.clock:
            heapq.heappop(self._agenda)[2]()
        self._abort_until(self.clock)
        if self.scheduler.has_unfinished():
            self._step()
        if not self.scheduler.has_unfinished():
            self.check()
            self.ledger.check_idle(len(self._held()))

    def finish(self) -> None:
        """At the end of all traffic: nothing is left at all."""
        self.check()
        self.ledger.check_idle(num_held=0)

    def check(self) -> None:
        """Compares the books."""
        self.ledger.check(self.clock)
        if self.follower is not None:
            self.follower.check()

    def _step(self) -> None:
        scheduler, ledger = self.scheduler, self.ledger
        stats = scheduler.blocks.stats
        num_swapped = stats.swap_in_tokens + stats.swap_out_tokens
        step = scheduler.schedule()
        work = ledger.take_step(step, self.clock)
        seconds = self.device.step_seconds(work)
        if work.num_swapped_blocks:
            self.swap_rate.add(stats.swap_in_tokens + stats.swap_out_tokens - num_swapped)
            self.max_swap_rate = max(self.max_swap_rate, self.swap_rate.per_second())
        if work.num_tokens != work.num_rows:
            scheduler.costs.observe_prefill(work.num_tokens, seconds)
        noise, mask = self._noise, (1 << _NOISE_BITS) - 1
        tokens = [noise[(r.seed + len(r.token_ids)) & mask] for r, *_ in step.chunks]
        self.clock += seconds
        self._abort_until(self.clock)  # The step is on its way: its token comes too late.
        for request in ledger.take_results(scheduler.update(step, tokens), self.clock):
            self._after_end(request)
        if ledger.totals.num_steps % self._check_every_steps == 0:
            self.check()

    def _at(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (seconds, next(self._numbers), action))

    def _await_arrival(self) -> None:
        arrival = next(self._arrivals, None)
        if arrival is not None:
            self._at(arrival.seconds, functools.partial(self._arrive, arrival))

    def _arrive(self, arrival: Arrival) -> None:
        name = str(next(self._numbers))
        if arrival.turns:
            self._conversations[name] = Conversation(name, arrival)
        names = [name, *(f"{name}/{i}" for i in range(1, arrival.num_samples))]
        first, *others = [
            self._make(own, arrival, arrival.prompt, seed=arrival.seed + 1009 * i)
            for i, own in enumerate(names)
        ]
        for child in others:
            child.fork_of = first
        first.children.extend(others)
        self._add(first, arrival)
        self._await_arrival()

    def _make(self, name: str, arrival: Arrival, tokens: list[int], **fields: Any) -> Request:
        return Request(
            name,
            tokens,
            SamplingParams(max_tokens=arrival.output_tokens),
            max_model_len=self.scheduler.config.max_model_len,
            eos_token_ids=(EOS,),
            priority=arrival.priority if self.scheduler.waiting.by_priority else 0,
            hold=bool(arrival.turns),
            **fields,
        )

    def _add(self, request: Request, arrival: Arrival) -> None:
        family = [request, *request.children]
        self.scheduler.add(request)
        for member in family:
            self.ledger.add(member, arrival.seconds if not request.takes_over else self.clock)
            if arrival.abort_seconds is not None:
                when = self.clock + arrival.abort_seconds
                heapq.heappush(self._aborts, (when, member.request_id))

    def _abort_until(self, seconds: float) -> None:
        while self._aborts and self._aborts[0][0] <= seconds:
            request = self.scheduler.abort(heapq.heappop(self._aborts)[1])
            if request is not None:
                self.ledger.end(request)
                self._after_end(request)

    def _after_end(self, request: Request) -> None:
        """What becomes of a conversation whose turn ended."""
        talk = self._conversations.pop(request.request_id, None)
        if talk is None:
            return
        if talk.held is not None:
            self._release(talk.held)
            talk.held = None
        if request.status is not RequestStatus.HELD:  # Its client went away.
            return
        talk.held = request
        self._conversations[request.request_id] = talk
        later = self.clock + talk.arrival.think_seconds
        if not talk.turns:
            self._at(later, functools.partial(self._leave, talk))
            return
        if len(talk.turns) == 1:  # For a while, a second sequence shares its blocks.
            twin = self.scheduler.fork_held(request, f"{request.request_id}+")
            self._forks[twin.request_id] = twin
            self._at(later, functools.partial(self._drop_fork, twin))
        self._at(later, functools.partial(self._go_on, talk))

    def _go_on(self, talk: Conversation) -> None:
        """The next turn: what was said, and what the user adds."""
        parent = talk.held
        assert parent is not None
        del self._conversations[parent.request_id]
        name = str(next(self._numbers))
        tokens = [*parent.token_ids, *talk.turns.pop(0)]
        request = self._make(
            name, talk.arrival, tokens, seed=talk.arrival.seed, fork_of=parent, takes_over=True
        )
        self._conversations[name] = talk
        self._add(request, talk.arrival)

    def _leave(self, talk: Conversation) -> None:
        assert talk.held is not None
        del self._conversations[talk.held.request_id]
        self._release(talk.held)

    def _drop_fork(self, twin: Request) -> None:
        del self._forks[twin.request_id]
        self._release(twin)

    def _release(self, request: Request) -> None:
        self.scheduler.release(request)
        self.ledger.release(request)

    def _held(self) -> list[Request]:
        talks = self._conversations.values()
        return [*self._forks.values(), *(talk.held for talk in talks if talk.held is not None)]
