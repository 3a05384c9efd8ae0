"""Several engines that step as one: the rows of a mesh, each with a pool and a scheduler."""

from __future__ import annotations

import bisect
import operator
import time
from collections.abc import Callable, Sequence
from typing import Any

from paged_jax.accounts import collect, memory_bytes
from paged_jax.compile import StepRunner
from paged_jax.dispatch import Dispatcher
from paged_jax.engine import Engine
from paged_jax.intake import Intake
from paged_jax.interrupts import uninterrupted
from paged_jax.metrics import Metrics
from paged_jax.outputs import RequestOutput
from paged_jax.placement import choose_scheduler
from paged_jax.request import Request
from paged_jax.sampling_params import SamplingParams
from paged_jax.sequence import SequenceGroup


class DataParallelEngine:
    """What an `Engine` is, over all rows of a mesh.

        add_request -> queue -> placement -> engine of a row -> its scheduler --.
                                                                                +-> one step
                                             engine of a row -> its scheduler --'   of all rows

    Requests wait here and not in the rows' own queues: one is placed when a row can admit it, on
    the row that is best then (`placement`). It stays there, as do its forks.

    Args:
      runner: the compiled steps and the pools of all rows.
      intake: makes sequences of requests, and has the limits of each row's scheduler.
      num_rows: of the mesh.
      **options: those of `Engine`.
    """

    def __init__(self, runner: StepRunner, intake: Intake, *, num_rows: int, **options: Any):
        self.runner = runner
        self.intake = intake
        self.config = intake.config
        self.tokenizer = intake.tokenizer
        self.shards = tuple(Engine(runner, intake, **options) for _ in range(num_rows))
        self.metrics = Metrics()
        for shard in self.shards:
            shard.metrics = self.metrics
        self._schedulers = [shard.scheduler for shard in self.shards]
        self._dispatcher = Dispatcher(self._schedulers, runner)
        # Requests that no row could admit yet, with their rank.
        self._queue: list[tuple[tuple[int, int], SequenceGroup]] = []
        self._queued_names: set[str] = set()  # of requests and sequences
        self._num_arrivals = 0

    def has_unfinished(self) -> bool:
        """Whether `step` has something to do or to give."""
        return bool(self._queue) or self._any_shard(Engine.has_unfinished)

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        **options: Any,
    ) -> None:
        """Queues a request; see `Engine.add_request`."""
        group = self.intake.make_group(
            request_id, prompt_token_ids, params, is_taken=self.knows, **options
        )
        parent = group.sequences[0].request.fork_of
        if parent is not None:  # It shares its parent's blocks.
            self._shard_of(parent).enqueue(group)
            return
        rank = (group.sequences[0].request.priority, self._num_arrivals)
        self._num_arrivals += 1
        with uninterrupted():
            bisect.insort(self._queue, (rank, group), key=operator.itemgetter(0))
            self._queued_names.update(_names(group))

    def knows(self, name: str) -> bool:
        """Whether a request, or a sequence of one, is unfinished under this id."""
        return name in self._queued_names or self._any_shard(lambda shard: shard.knows(name))

    def check_prompt(
        self, prompt_token_ids: Sequence[int], *, prefill_only: bool = False
    ) -> list[int]:
        """The prompt as ints, if the engine can serve it; see `Intake.check_prompt`."""
        return self.intake.check_prompt(prompt_token_ids, prefill_only=prefill_only)

    def abort(self, request_id: str) -> RequestOutput | None:
        """Ends a request and frees its blocks at once; see `Engine.abort`."""
        with uninterrupted():
            for place, (_, group) in enumerate(self._queue):
                if group.request_id == request_id:
                    self._enqueue(place, 0)  # To be ended there.
                    break
            for shard in self.shards:
                if (output := shard.abort(request_id)) is not None:
                    return output
        return None

    def step(self) -> list[RequestOutput]:
        """Runs one step of all rows; see `Engine.step`."""
        with uninterrupted():
            try:
                self._place_queued()
                self._run_step()
            except BaseException:
                self._dispatcher.forget()
                for shard in self.shards:
                    shard.recover()
                raise
        return [output for shard in self.shards for output in shard.take_undelivered()]

    @property
    def num_seats(self) -> int:
        """The most sequences in one step, of all rows."""
        return self.config.max_num_seqs * len(self.shards)

    def held(self, request_id: str) -> Request | None:
        """The held sequence of this id, if there is one."""
        found = (shard.held(request_id) for shard in self.shards)
        return next((request for request in found if request is not None), None)

    def release(self, request: Request) -> None:
        """Frees the blocks of a held sequence; one that is not held is left as it is."""
        if self.held(request.request_id) is request:
            self._shard_of(request).release(request)

    def fork_held(self, parent: Request, request_id: str) -> Request:
        """A held sequence of the same tokens; see `Scheduler.fork_held`."""
        return self._shard_of(parent).fork_held(parent, request_id)

    def reset_prefix_cache(self) -> bool:
        """Forgets every cached prefix; False, with nothing changed, while any block is in use."""
        if any(scheduler.blocks.pool.num_used_blocks for scheduler in self._schedulers):
            return False
        return all([shard.reset_prefix_cache() for shard in self.shards])

    def get_metrics(self) -> dict[str, Any]:
        """The counters of all rows together; see `accounts.collect` for each."""
        metrics = collect(self.metrics, self._schedulers)
        metrics["num_requests_waiting"] += sum(len(group.sequences) for _, group in self._queue)
        rates = [shard.swap_alert.tokens_per_second for shard in self.shards]
        metrics["swap_tokens_per_second"] = sum(rates)
        metrics["memory_bytes"] = memory_bytes(
            [scheduler.blocks for scheduler in self._schedulers],
            bytes_a_block=self.runner.mover.bytes_a_block,
            weights=self.runner.num_weight_bytes,
            temporary=self.runner.temporary_bytes,
        )
        return metrics

    def _place_queued(self) -> None:
        """Gives requests to rows in order, until one comes that no row can admit."""
        while self._queue:
            group = self._queue[0][1]
            row = choose_scheduler(self._schedulers, group.sequences[0].request)
            if row is None:
                break
            self._enqueue(0, row)

    def _enqueue(self, place: int, row: int) -> None:
        """Gives the request at a place of the queue to a row."""
        group = self._queue.pop(place)[1]
        self._queued_names.difference_update(_names(group))
        self.shards[row].enqueue(group)

    def _run_step(self) -> None:
        flight = self._dispatcher.next_flight()
        if flight is None:
            return
        sampled = flight.to_host()
        received = time.perf_counter()
        self.runner.settle()
        for row, shard in enumerate(self.shards):
            if flight.steps[row].chunks:
                shard.take(flight, row, sampled[row], received)

    def _shard_of(self, held: Request) -> Engine:
        """The engine that a held sequence is kept by; the first one where none keeps it any more,
        which then computes it anew.
        """
        for shard in self.shards:
            if shard.held(held.request_id) is held:
                return shard
        return self.shards[0]

    def _any_shard(self, holds: Callable[[Engine], bool]) -> bool:
        return any(map(holds, self.shards))


def _names(group: SequenceGroup) -> list[str]:
    return [group.request_id, *(sequence.request.request_id for sequence in group.sequences)]
