"""One simulated device: the real scheduler on a clock that a model of step time drives."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from paged_jax.config import SchedulerConfig
from paged_jax.request import Request
from paged_jax.scheduled_step import ScheduledChunk, ScheduledStep
from paged_jax.simulate.allocators import MemorySample, make_scheduler
from paged_jax.simulate.decode_calls import CallsAhead, stretches, tokens_to_draw
from paged_jax.simulate.device_model import DeviceModel, StepWork
from paged_jax.simulate.quiet_steps import QuietSteps, make_quiet_steps, plan_quiet_steps
from paged_jax.simulate.results import Results
from paged_jax.simulate.simulated_request import SimulatedRequest
from paged_jax.simulate.step_time import StepTime
from paged_jax.simulate.traffic import TraceRequest


class _Awaited:
    """A request whose next token takes more than a decode: it was admitted, or preempted.

    Attributes:
      num_tokens: its tokens when it was admitted.
      computed_tokens: of them, so far; 0 while it waits to come back.
      lost_tokens: computed before it was preempted, and forgotten.
      last_token_at: when it got its newest token; None if it has none.
    """

    __slots__ = ("computed_tokens", "last_token_at", "lost_tokens", "num_tokens", "request")

    def __init__(self, request: Request, last_token_at: float | None = None):
        self.request = request
        self.num_tokens = len(request.token_ids)
        self.computed_tokens = self.lost_tokens = 0
        self.last_token_at = last_token_at


class Replica:
    """A scheduler, the clock of its device, and the requests that are on their way to it.

    Args:
      config: the scheduler's limits.
      step_time: how long a step takes.
      allocator: one of `allocators.ALLOCATORS`.
      on_step: called with each step when it is scheduled, or dispatched ahead; none is skipped
        then.

    Attributes:
      clock: simulated seconds; behind the others' where quiet steps are planned and not made yet.
      results: what came of it so far.

    Raises:
      ValueError: the configuration guesses tokens.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        step_time: StepTime,
        *,
        allocator: str = "paged",
        on_step: Callable[[ScheduledStep], None] | None = None,
    ):
        if config.num_speculative_tokens:
            raise ValueError(
                f"num_speculative_tokens={config.num_speculative_tokens}: nobody knows which "
                "guesses would be right; set it to 0"
            )
        self.config = config
        self.step_time = step_time
        self.scheduler, self.memory = make_scheduler(allocator, config)
        self.results = Results(self.memory.capacity_tokens)
        self.clock = 0.0
        if isinstance(step_time, DeviceModel):  # As an engine knows it from its own transfers.
            costs = self.scheduler.costs
            costs.bytes_a_token = step_time.model.bytes_a_token
            costs.observe_swap(step_time.bytes_a_block, step_time.swap_seconds(1))
        self._on_step = on_step
        self._ahead = CallsAhead(self.scheduler) if config.decode_lookahead > 1 else None
        self._in_flight: ScheduledStep | None = None
        # What memory held and how many tokens were computed in the last step, if it was quiet; and
        # the steps behind it, made as far as it turns out that nothing comes between.
        self._quiet: tuple[MemorySample, int] | None = None
        self._planned: QuietSteps | None = None
        # What the host's cache takes in is moved step by step; calls ahead are long as they are.
        is_stepwise = config.enable_host_prefix_cache or self._ahead is not None
        self._skips = on_step is None and not is_stepwise
        self._inbox: deque[SimulatedRequest] = deque()
        self._awaited: dict[str, _Awaited] = {}
        self._num_offered = 0
        # Requests are handed to the scheduler only as far as one step may admit.
        self._look_ahead = config.max_num_seqs

    @property
    def load(self) -> int:
        """Requests that have not ended."""
        return len(self._inbox) + len(self.scheduler.requests)

    @property
    def is_full(self) -> bool:
        """Whether more requests would not change what the next step does."""
        return len(self._inbox) >= self._look_ahead

    @property
    def next_time(self) -> float:
        """When its next step begins, behind those that are planned; infinite if there is nothing to
        do.
        """
        if self._planned is not None:
            return self.clock + self._planned.total_seconds
        if self.scheduler.has_unfinished():
            return self.clock
        if self._inbox:
            return max(self.clock, self._inbox[0].arrival_seconds)
        return math.inf

    def offer(self, trace: TraceRequest) -> None:
        """Sends it a request; in order of arrival."""
        totals = self.results.totals
        length = trace.num_prompt_tokens + trace.num_output_tokens
        is_empty = trace.num_prompt_tokens < 1 or trace.num_output_tokens < 1
        if is_empty or length > self.config.max_model_len:
            totals.num_rejected += 1
            return
        if self._planned is not None:
            self._make_planned(before=trace.arrival_seconds)
        totals.num_requests += 1
        totals.prompt += trace.num_prompt_tokens
        self._inbox.append(SimulatedRequest(self._num_offered, trace))
        self._num_offered += 1

    def advance(self, until: float = math.inf) -> None:
        """Makes every step that begins before `until`, or plans it."""
        while self.next_time < until:
            self.step()

    def step(self) -> None:
        """Makes one step, at `next_time`, and those that are planned before it; or plans some.

        Raises:
          RuntimeError: the scheduler does nothing though requests are left.
        """
        if self._planned is not None:
            self._make_planned()
        if self._quiet is not None:
            self._planned = self._plan(self._quiet[1])
            if self._planned is not None:
                return
        start = self.clock = self.next_time
        scheduler = self.scheduler
        self._fill_queue()
        step, is_ahead = self._next_step()
        if not (step.chunks or step.moves):
            raise RuntimeError(f"the scheduler is stuck: {scheduler}")
        for request in step.preempted:
            self._note_preempted(request, start)
        num_running, num_steps = len(scheduler.running), step.num_decode_steps
        if is_ahead or num_steps > 1:
            quiet = self._run_call(step, is_ahead)
        else:
            quiet = self._run_step(step)
        tokens = 0 if num_steps == 1 else (0,) * num_steps
        sampled = scheduler.update(step, [tokens] * len(step.chunks))
        self._note_tokens(len(sampled), (self.clock - start) / num_steps)
        self._quiet = None
        if len(scheduler.running) < num_running:
            self._note_ended(dict.fromkeys([r for r, _, _ in sampled if r.finish_reason]))
        elif self._skips and len(sampled) == step.num_tokens == num_running:
            if not (step.num_admitted or step.preempted or step.moves):
                self._quiet = quiet

    def finish(self) -> Results:
        """Makes all steps that are left; the results, complete."""
        self.advance()
        stats, totals = self.scheduler.blocks.stats, self.results.totals
        totals.num_preemptions = self.scheduler.num_preemptions
        totals.queried, totals.hit = stats.num_query_tokens, stats.num_hit_tokens
        totals.swapped_out, totals.swapped_in = stats.swap_out_tokens, stats.swap_in_tokens
        return self.results

    def _next_step(self) -> tuple[ScheduledStep, bool]:
        """The step that the device makes now, and whether it was dispatched ahead; the one behind
        it is dispatched, where it is known.
        """
        step, is_ahead = self._in_flight, self._in_flight is not None
        if step is None:
            step = self.scheduler.schedule()
            if self._on_step is not None:
                self._on_step(step)
        if self._ahead is not None:
            self._in_flight = self._ahead.follow(step)
            if self._in_flight is not None and self._on_step is not None:
                self._on_step(self._in_flight)
        return step, is_ahead

    def _run_step(self, step: ScheduledStep) -> tuple[MemorySample, int]:
        """Lets a step take its time; what memory holds then, and the tokens that are computed."""
        scheduler, results, start = self.scheduler, self.results, self.clock
        work = self._work_of(step)
        seconds = self.step_time.step_seconds(work)
        context = work.num_context_tokens + sum(
            [request.num_computed_tokens for request in scheduler.running[len(step.chunks) :]]
        )
        awaited = self._tokens_to_prefill() + tokens_to_draw(self._in_flight)
        sample = self.memory.sample(context, awaited)
        results.add_steps(start, seconds, len(scheduler.running), self._num_waiting(), sample)
        results.totals.computed += work.num_tokens
        if work.num_tokens != work.num_rows:
            scheduler.costs.observe_prefill(work.num_tokens, seconds)
        self.clock = start + seconds
        return sample, context

    def _run_call(self, step: ScheduledStep, is_ahead: bool) -> None:
        """Lets a call of decode steps take its time, or one that was dispatched ahead."""
        results, start = self.results, self.clock
        self._note_admitted(step)
        num_drawn = tokens_to_draw(step)
        end_tokens = num_drawn + sum([r.num_computed_tokens for r in self.scheduler.running])
        awaited = end_tokens + tokens_to_draw(self._in_flight)
        for stretch in stretches(step, self.step_time, is_ahead=is_ahead):
            context, num_steps = stretch.context_tokens, stretch.num_steps
            sample = self.memory.sample(context, awaited - context)
            results.add_steps(
                start,
                stretch.seconds,
                stretch.num_seqs,
                self._num_waiting(),
                sample,
                num_steps=num_steps,
                internal_tokens=num_steps * sample.internal,
            )
            start += stretch.seconds
        results.totals.computed += num_drawn
        self.clock = start

    def _fill_queue(self) -> None:
        """Hands the scheduler what has arrived, as far as a step may look."""
        inbox, scheduler = self._inbox, self.scheduler
        while inbox and inbox[0].arrival_seconds <= self.clock:
            if len(scheduler.waiting) > self._look_ahead:
                break
            scheduler.add(inbox.popleft())

    def _num_waiting(self) -> int:
        """Requests that have come and do not run."""
        has_come = self._inbox and self._inbox[0].arrival_seconds <= self.clock
        return len(self.scheduler.waiting) + (len(self._inbox) if has_come else 0)

    def _plan(self, context: int) -> QuietSteps | None:
        """Steps in which nothing happens but decoding, if there are; see `quiet_steps`.

        Args:
          context: tokens that are computed, of all that run.
        """
        scheduler, available = self.scheduler, math.inf
        if self._inbox:
            available = self._inbox[0].arrival_seconds - self.clock
            if available <= 0:
                if len(scheduler.waiting) <= self._look_ahead:
                    return None  # The next step has it to look at.
                available = math.inf
        return plan_quiet_steps(scheduler, self.step_time, context, available)

    def _make_planned(self, before: float = math.inf) -> None:
        """Makes the planned steps that begin before a moment, and forgets the others."""
        steps, self._planned = self._planned, None
        assert steps is not None and self._quiet is not None
        steps = steps.within(before - self.clock)
        if not len(steps):
            return
        sample, context = self._quiet
        results, start, grown = self.results, self.clock, self.memory.grown
        num_running, num_steps = len(self.scheduler.running), len(steps)
        make_quiet_steps(self.scheduler, num_steps)
        results.token_seconds.add_all(steps.seconds, num_running)
        total, blocks = steps.total_seconds, steps.num_new_blocks
        # Memory grows by as many tokens each step: its mean is that of the tokens and blocks.
        shares, tokens = steps.seconds / total, num_running * np.arange(1, num_steps + 1)
        internal = grown(sample, float(tokens.mean()), float(blocks.mean())).internal
        results.add_steps(
            start,
            total,
            num_running,
            self._num_waiting(),
            grown(sample, float(shares @ tokens), float(shares @ blocks)),
            num_steps=num_steps,
            internal_tokens=internal * num_steps,
        )
        num_tokens = num_steps * num_running
        results.totals.computed += num_tokens
        results.totals.output += num_tokens
        self.clock = results.end_seconds
        self._quiet = grown(sample, num_tokens, int(blocks[-1])), context + num_tokens

    def _work_of(self, step: ScheduledStep) -> StepWork:
        """What a step computes; notes how far those are that are no plain decodes."""
        chunks, num_tokens = step.chunks, step.num_tokens
        num_context = sum([chunk[1] for chunk in chunks]) + num_tokens
        moves = step.moves
        return StepWork(
            num_tokens=num_tokens,
            num_rows=len(chunks),
            num_context_tokens=num_context,
            # A decode's one token attends to its whole context.
            num_pairs=num_context + self._note_admitted(step),
            num_swapped_blocks=len(moves.swap_out) + len(moves.swap_in),
            num_copied_blocks=len(moves.copies),
        )

    def _note_admitted(self, step: ScheduledStep) -> int:
        """Notes who joins, and how far prompts are computed; what `_note_chunks` returns."""
        if not (step.num_admitted or self._awaited):
            return 0
        for chunk in step.admitted:
            self._awaited.setdefault(chunk.request.request_id, _Awaited(chunk.request))
        return self._note_chunks(step.chunks)

    def _note_chunks(self, chunks: Sequence[ScheduledChunk]) -> int:
        """Notes how far prompts are computed; pairs beyond those of each chunk's last token."""
        num_pairs, awaited = 0, self._awaited
        for request, start, num_new, _ in [c for c in chunks if c[0].request_id in awaited]:
            num_pairs += (num_new - 1) * start + num_new * (num_new - 1) // 2
            entry = awaited[request.request_id]
            if entry.lost_tokens and not entry.computed_tokens:
                self.results.totals.recomputed += max(entry.lost_tokens - start, 0)
            entry.computed_tokens = start + num_new
        return num_pairs

    def _note_preempted(self, request: Request, now: float) -> None:
        awaited = self._awaited.get(request.request_id)
        computed = request.num_tokens - 1 if awaited is None else awaited.computed_tokens
        if awaited is None:
            assert isinstance(request, SimulatedRequest)
            awaited = self._awaited[request.request_id] = _Awaited(request, now)
        awaited.computed_tokens = 0
        awaited.lost_tokens = 0 if request.is_swapped else computed
        totals = self.results.totals
        totals.lost += awaited.lost_tokens
        totals.lost_output += max(awaited.lost_tokens - request.num_prompt_tokens, 0)

    def _tokens_to_prefill(self) -> int:
        """Of prompts in the making, the tokens that a later step computes."""
        return sum(
            [a.num_tokens - a.computed_tokens for a in self._awaited.values() if a.computed_tokens]
        )

    def _note_tokens(self, num_tokens: int, seconds: float) -> None:
        """Notes who waited how long for a step's tokens, which are there now; `seconds` are those
        from one of a sequence to the next: tokens of a call share its time.
        """
        results, now = self.results, self.clock
        results.totals.output += num_tokens
        arrived = [a for a in self._awaited.values() if len(a.request.token_ids) > a.num_tokens]
        for awaited in arrived:
            request = awaited.request
            del self._awaited[request.request_id]
            assert isinstance(request, SimulatedRequest)
            if awaited.last_token_at is None:
                results.first_token_seconds.add(now - request.arrival_seconds)
            else:
                results.token_seconds.add(now - awaited.last_token_at)
        num_decodes = num_tokens - len(arrived)
        if num_decodes:
            results.token_seconds.add(seconds, num_decodes)

    def _note_ended(self, ended: Iterable[Request]) -> None:
        for request in ended:
            assert isinstance(request, SimulatedRequest)
            self.results.totals.num_finished += 1
            self.results.request_seconds.add(self.clock - request.arrival_seconds)
