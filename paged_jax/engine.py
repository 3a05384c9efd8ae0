"""The engine's loop: schedule, run, postprocess, one step at a time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from paged_jax.accounts import collect, memory_bytes
from paged_jax.compile import StepRunner
from paged_jax.dispatch import Dispatcher, Flight
from paged_jax.intake import Intake
from paged_jax.interrupts import uninterrupted
from paged_jax.log import logger
from paged_jax.metrics import Metrics, StepTimes
from paged_jax.outputs import RequestOutput
from paged_jax.prefix_journal import PrefixJournal
from paged_jax.prefix_watch import PrefixWatch
from paged_jax.rates import SwapAlert
from paged_jax.request import Request
from paged_jax.sampling import SamplerOutput
from paged_jax.sampling_params import SamplingParams
from paged_jax.scheduled_step import ScheduledStep
from paged_jax.scheduler import Scheduler
from paged_jax.sequence import NOT_FINITE, SequenceGroup, SequenceState


class Engine:
    """Serves requests of token ids: `add_request`, then `step` until nothing is unfinished.

    Args:
      runner: the compiled steps and the KV pool.
      intake: makes sequences of requests, and has the scheduler's limits.
      log_stats, swap_alert_tokens_per_second, watch_prefixes: see `EngineConfig`.
    """

    def __init__(
        self,
        runner: StepRunner,
        intake: Intake,
        *,
        log_stats: bool = False,
        swap_alert_tokens_per_second: float | None = None,
        watch_prefixes: bool = False,
    ):
        self.runner = runner
        self.intake = intake
        self.config = config = intake.config
        self.scheduler = Scheduler(config)
        self.scheduler.costs.bytes_a_token = runner.mover.bytes_a_block // config.block_size
        self.metrics = Metrics()
        self.tokenizer = intake.tokenizer
        self.log_stats = log_stats
        self.swap_alert = SwapAlert(swap_alert_tokens_per_second)
        self.journal = PrefixJournal(config.block_size)
        self.watch = PrefixWatch(config.block_size) if watch_prefixes else None
        self.scheduler.blocks.listeners.journal = self.journal
        self._groups: dict[str, SequenceGroup] = {}
        # Outputs of a step that was interrupted when it was through; the next step gives them.
        self._undelivered: list[RequestOutput] = []
        self._sequences: dict[str, tuple[SequenceGroup, SequenceState]] = {}
        self._last_log = (time.monotonic(), 0)
        # Bytes and seconds of all transfers, as last looked at.
        self._swapped = (0, 0.0)
        self._dispatcher = Dispatcher([self.scheduler], runner)
        self._received = 0.0  # When the last step's outputs were on the host.

    def has_unfinished(self) -> bool:
        """Whether `step` has something to do or to give."""
        return bool(self._groups or self._undelivered)

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        **options: Any,
    ) -> None:
        """Queues a request; the options, and what may be wrong, are those of `Intake.make_group`.

        Raises:
          ValueError: it cannot be served. Nothing is queued then.
        """
        self.enqueue(
            self.intake.make_group(
                request_id, prompt_token_ids, params, is_taken=self.knows, **options
            )
        )

    def enqueue(self, group: SequenceGroup) -> None:
        """Queues the sequences of a request that `intake` made."""
        first = group.sequences[0].request
        with uninterrupted():
            self.scheduler.add(first)
            for sequence in group.sequences:
                self._sequences[sequence.request.request_id] = (group, sequence)
            self._groups[group.request_id] = group
            if first.fork_of is None:
                self.metrics.prompt_tokens += len(group.prompt_token_ids)

    def knows(self, name: str) -> bool:
        """Whether a request, or a sequence of one, is unfinished under this id."""
        return name in self._groups or name in self._sequences

    def check_prompt(
        self, prompt_token_ids: Sequence[int], *, prefill_only: bool = False
    ) -> list[int]:
        """The prompt as ints, if the engine can serve it; see `Intake.check_prompt`."""
        return self.intake.check_prompt(prompt_token_ids, prefill_only=prefill_only)

    def abort(self, request_id: str) -> RequestOutput | None:
        """Ends a request and frees its blocks at once.

        Returns:
          Its output so far, with finish reason "abort"; None if no such request is unfinished.
        """
        late = [output for output in self._undelivered if output.request_id == request_id]
        self._undelivered = [o for o in self._undelivered if o.request_id != request_id]
        group = self._groups.get(request_id)
        if group is None:
            return late[-1] if late else None
        with uninterrupted():
            for sequence in group.sequences:
                self.scheduler.abort(sequence.request.request_id)
            return self._close(group)

    def step(self) -> list[RequestOutput]:
        """Runs one step.

        Returns:
          The outputs of requests that ended, and of those streamed ones that got a token.

        If the step fails, every live request goes back to the queue, to be computed anew, and the
        error is raised; tokens already given are kept, and the same ones are sampled again where
        some were not given yet. A first Ctrl-C waits for the step's end (see `interrupts`); what
        the step has made is then given by the next one.
        """
        with uninterrupted():
            try:
                self._run_step()
            except BaseException:
                self.recover()
                raise
        return self.take_undelivered()

    def take_undelivered(self) -> list[RequestOutput]:
        """Outputs that are to be given yet."""
        outputs, self._undelivered = self._undelivered, []
        return outputs

    @property
    def shards(self) -> tuple[Engine, ...]:
        """The engines of the rows of a mesh; this one."""
        return (self,)

    @property
    def num_seats(self) -> int:
        """The most sequences in one step, of all rows."""
        return self.config.max_num_seqs * len(self.shards)

    def held(self, request_id: str) -> Request | None:
        """The held sequence of this id, if there is one."""
        return self.scheduler.held.get(request_id)

    def release(self, request: Request) -> None:
        """Frees the blocks of a held sequence; see `Scheduler.release`."""
        self.scheduler.release(request)

    def fork_held(self, parent: Request, request_id: str) -> Request:
        """A held sequence of the same tokens; see `Scheduler.fork_held`."""
        return self.scheduler.fork_held(parent, request_id)

    def reset_prefix_cache(self) -> bool:
        """Forgets every cached prefix; False, with nothing changed, while any block is in use."""
        return self.scheduler.blocks.reset_prefix_cache()

    def get_metrics(self) -> dict[str, Any]:
        """The engine's counters since it was made; see `accounts.collect` for each."""
        metrics = collect(self.metrics, [self.scheduler])
        metrics["swap_tokens_per_second"] = self.swap_alert.tokens_per_second
        metrics["memory_bytes"] = memory_bytes(
            [self.scheduler.blocks],
            bytes_a_block=self.runner.mover.bytes_a_block,
            weights=self.runner.num_weight_bytes,
            temporary=self.runner.temporary_bytes,
        )
        return metrics

    def _run_step(self) -> None:
        flight = self._dispatcher.next_flight()
        if flight is None:
            return
        [sampled] = flight.to_host()
        received = time.perf_counter()
        self.runner.settle()
        self.take(flight, 0, sampled, received)

    def take(self, flight: Flight, row: int, sampled: SamplerOutput, received: float) -> None:
        """Takes what a step has sampled; `take_undelivered` gives the outputs, one by one as they
        were made: what is there stays if another raises.

        Args:
          flight: the step, or the steps that ran as one.
          row: which of them is this engine's.
          sampled: its outputs, on the host.
          received: when they were there, in seconds of `time.perf_counter`.
        """
        step = flight.steps[row]
        for chunk in step.admitted:
            self._observe_prompt(chunk.request)
        num_tokens_before = self.metrics.generation_tokens
        self._process(step, sampled)
        num_generated = self.metrics.generation_tokens - num_tokens_before
        self._count(flight, step, received, num_generated)

    def _process(self, step: ScheduledStep, sampled: SamplerOutput) -> None:
        """Takes a step's tokens; ends and hands out what they complete."""
        row_of: dict[str, int] = {}  # the first of its new tokens
        failed: list[tuple[Request, str]] = []
        all_finite = sampled.is_finite.all()
        all_tokens = sampled.token_ids.tolist()
        token_ids: list[Any] = []
        for chunk, end in zip(step.chunks, step.end_rows(), strict=True):
            request = chunk.request
            error = None
            if request.score_start is not None and request.request_id in self._sequences:
                state = self._sequences[request.request_id][1]
                error = state.take_scores(chunk, end - 1, sampled)
            num_new = len(chunk.draft) + step.num_decode_steps
            first = row_of[request.request_id] = end - num_new
            token_ids.append(all_tokens[first] if num_new == 1 else all_tokens[first:end])
            if not all_finite and chunk.samples and not sampled.is_finite[first:end].all():
                error = NOT_FINITE
            if error is not None and request.request_id in self._sequences:  # Else it is aborted.
                failed.append((request, error))
        touched: dict[str, SequenceGroup] = {}
        for request, error in failed:
            self._fail(request, error)
            self._touch(request, touched)  # It is in no result of the scheduler's.
        for request, token_id, number in self.scheduler.update(step, token_ids):
            if token_id < 0:  # It computed what it wanted, and samples nothing.
                self._touch(request, touched)
                continue
            entry = self._sequences.get(request.request_id)
            if entry is None or entry[1].is_done():
                continue  # A stop string or a fault ended it at an earlier token.
            group, sequence = entry
            self.metrics.generation_tokens += 1
            try:
                stop = sequence.append(token_id, sampled, row_of[request.request_id] + number)
            except Exception as error:  # A tokenizer's fault is its request's alone.
                self._fail(request, f"{type(error).__name__}: {error}")
            else:
                if stop is not None and not sequence.ends_by_itself:
                    sequence.drop_rest()
                    request.finish_reason, request.stop_reason = "stop", stop
                    self.scheduler.finish(request)
            if group.stream or request.finish_reason is not None:
                self._touch(request, touched)
        for group in touched.values():
            if group.finished:
                self._undelivered.append(self._close(group))
            elif group.stream:
                self._undelivered.append(group.output())

    def _observe_prompt(self, request: Request) -> None:
        """Notes an admitted prompt: what it hit, and whether many like it miss for a detail."""
        entry = self._sequences.get(request.request_id)
        if entry is None or entry[1].index or request.hold or request.num_preemptions:
            return
        if not self.config.enable_prefix_caching or request.score_start is not None:
            return
        tokens = np.array(entry[0].prompt_token_ids, np.int32)
        num_hit = min(request.num_cached_tokens, len(tokens))
        missed = num_hit // self.config.block_size
        hashes = request.block_hashes
        self.journal.record_prompt(
            request.request_id,
            tokens,
            request.extra_keys_of(0),
            num_hit,
            missed_hash=hashes[missed] if missed < len(hashes) else None,
        )
        warning = None if self.watch is None else self.watch.observe(tokens, num_hit)
        if warning is not None:
            logger.warning("%s", warning.describe(self._decode))

    def _touch(self, request: Request, touched: dict[str, SequenceGroup]) -> None:
        group = self._sequences[request.request_id][0]
        touched[group.request_id] = group

    def _fail(self, request: Request, error: str) -> None:
        logger.error("Request %s failed: %s", request.request_id, error)
        sequence = self._sequences[request.request_id][1]
        sequence.error, request.finish_reason = error, "error"
        sequence.drop_rest()
        self.scheduler.finish(request)

    def _close(self, group: SequenceGroup) -> RequestOutput:
        """Forgets an ended request, and counts it."""
        del self._groups[group.request_id]
        for sequence in group.sequences:
            request = sequence.request
            del self._sequences[request.request_id]
            if not request.prefill_only:
                self.metrics.count_finished(request)
        return group.output()

    def recover(self) -> None:
        """After a fault: no block and no queue is trusted, and no request is lost."""
        self._dispatcher.forget()
        self._sequences.clear()
        unfinished = []
        for group in list(self._groups.values()):
            for sequence in group.sequences:
                self._sequences[sequence.request.request_id] = (group, sequence)
                if not sequence.is_done():
                    sequence.rewind()
                    unfinished.append(sequence.request)
            if group.finished:  # It ended in the very step that failed.
                self._undelivered.append(self._close(group))
        self.scheduler.restart(unfinished)
        if self.runner.renew_pool():
            logger.warning("A step failed with the KV pool in its hands; made a new one")

    def _count(
        self, flight: Flight, step: ScheduledStep, received: float, num_generated: int
    ) -> None:
        times: StepTimes = self.metrics.steps["decode" if step.is_decode else "prefill"]
        device_seconds = received - max(flight.dispatched, self._received)
        self._received = received
        times.num_steps += step.num_decode_steps
        times.num_tokens += num_generated if step.num_decode_steps > 1 else step.num_tokens
        times.schedule_seconds += flight.schedule_seconds
        times.device_seconds += device_seconds
        times.process_seconds += time.perf_counter() - received
        if not step.is_decode:
            self.scheduler.costs.observe_prefill(step.num_tokens, device_seconds)
        mover = self.runner.mover
        if mover.transfer_bytes > self._swapped[0]:
            num_bytes, seconds = self._swapped
            self._swapped = mover.transfer_bytes, mover.transfer_seconds
            self.scheduler.costs.observe_swap(
                mover.transfer_bytes - num_bytes, mover.transfer_seconds - seconds
            )
        stats = self.scheduler.blocks.stats
        self.swap_alert.observe(stats.swap_in_tokens, stats.swap_out_tokens)
        if self.log_stats:
            self._log_stats()

    def _log_stats(self) -> None:
        then, tokens_then = self._last_log
        seconds = time.monotonic() - then
        if seconds < 10:
            return
        tokens = self.metrics.generation_tokens
        blocks = self.scheduler.blocks
        hit_rate = blocks.stats.num_hit_tokens / max(blocks.stats.num_query_tokens, 1)
        logger.info(
            "%.1f output tokens/s, running %d, waiting %d, KV cache %.1f%%, prefix hits %.1f%%",
            (tokens - tokens_then) / seconds,
            len(self.scheduler.running),
            len(self.scheduler.waiting),
            100 * blocks.pool.usage,
            100 * hit_rate,
        )
        self._last_log = (time.monotonic(), tokens)

    def _decode(self, token_ids: Sequence[int]) -> str:
        """Text for a warning; ids where there is no tokenizer."""
        if self.tokenizer is None:
            return str(list(token_ids))
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=False)
