"""Continuous batching: which tokens of which requests the next step computes.

The policy is that of vLLM's scheduler: requests that run come first, then waiting ones, all under
one budget of tokens a step, so that prompts are computed in chunks beside the decodes of others.
When blocks run out, sequences that are only held give theirs back, and then a running request: the
most recently admitted, or under the priority policy the one of the last rank. It is computed anew
later, or swapped to the host and back.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from paged_jax.block_manager import BlockManager
from paged_jax.config import SchedulerConfig
from paged_jax.drafter import Drafter
from paged_jax.lookahead import extend, steps_at_once
from paged_jax.preemption import PreemptionCosts
from paged_jax.request import Request, RequestStatus, check_prompt_length
from paged_jax.scheduled_step import ScheduledChunk, ScheduledStep
from paged_jax.waiting import WaitingQueue, rank


class Scheduler:
    """Holds every live request; `schedule` picks a step's work, `update` takes its results.

    Attributes:
      blocks: the block manager.
      running, waiting: the queues.
      held: sequences that are done for now and keep their blocks while there is room, the least
        recently used first.
      requests: the unfinished ones, by id; held ones are not among them.
      costs: what the automatic choice between swapping and recomputing rests on.
    """

    def __init__(self, config: SchedulerConfig):
        self.config = config
        self.blocks = self._make_blocks()
        self.running: list[Request] = []
        self.waiting = WaitingQueue(config.policy)
        self.held: dict[str, Request] = {}
        self.requests: dict[str, Request] = {}
        self.costs = PreemptionCosts()
        self.num_preemptions_by_mode = {"recompute": 0, "swap": 0}
        self.drafter = Drafter(config.num_speculative_tokens)
        self._num_arrivals = 0
        # Rows of logits that this step's chunks ask for beyond one each.
        self._num_extra_rows = 0

    def __repr__(self) -> str:
        pool = self.blocks.pool
        return (
            f"Scheduler(running={self.running}, waiting={list(self.waiting)}, "
            f"held={list(self.held)}, "
            f"free blocks={pool.num_free_blocks} of {pool.num_blocks - 1})"
        )

    @property
    def num_preemptions(self) -> int:
        return sum(self.num_preemptions_by_mode.values())

    def has_unfinished(self) -> bool:
        return bool(self.requests)

    def add(self, request: Request) -> None:
        """Puts a request at the back of the queue; its children wait until its prompt is computed.

        Raises:
          ValueError: its id is taken, or its prompt is empty or leaves no room for an output token.
        """
        family = [request, *request.children]
        for member in family:
            if member.request_id in self.requests:
                raise ValueError(
                    f"request_id={member.request_id!r} is in use; give each live request its own"
                )
        check_prompt_length(
            request.num_prompt_tokens, self.config.max_model_len, request.prefill_only
        )
        for member in family:
            member.arrival_index = self._num_arrivals
            self._num_arrivals += 1
            self.requests[member.request_id] = member
        self.waiting.append(request)

    def schedule(self) -> ScheduledStep:
        """Picks the next step's chunks, and gives their requests the blocks that they need."""
        chunks: list[ScheduledChunk] = []
        preempted: list[Request] = []
        self._num_extra_rows = 0
        budget = self._schedule_running(chunks, preempted)
        block_size = self.config.block_size
        for request, start, num_tokens, draft in chunks:
            num_known = start + num_tokens - len(draft)
            if num_known // block_size > request.num_hashed_blocks:
                self.blocks.cache_full_blocks(request, num_known)
        chunks = self._fork_children(chunks)
        num_running = len(chunks)
        if not preempted and self.waiting:
            chunks += self._fork_children(self._admit(budget))
        most = self.config.num_decode_steps
        if preempted or self.drafter or self._could_admit():
            most = 1
        num_steps = steps_at_once(chunks, self.blocks, most, seat_is_wanted=bool(self.waiting))
        return ScheduledStep(
            tuple(chunks),
            tuple(preempted),
            num_admitted=len(chunks) - num_running,
            moves=self.blocks.take_moves(),
            num_extra_rows=self._num_extra_rows,
            num_decode_steps=num_steps,
        )

    def extend(self, step: ScheduledStep) -> ScheduledStep | None:
        """The step after one whose tokens are not known yet, where it is sure what that is: all
        requests decode, and nobody is to join them. None otherwise: `update` and `schedule` then.
        """
        if self.config.decode_lookahead == 1 or self.drafter or self._could_admit():
            return None
        most, waits = self.config.num_decode_steps, bool(self.waiting)
        return extend(step, self.blocks, most, seat_is_wanted=waits)

    def update(
        self, step: ScheduledStep, token_ids: Sequence[Sequence[int] | int]
    ) -> list[tuple[Request, int, int]]:
        """Takes a step's sampled tokens, and ends the requests that they finish.

        Tokens of chunks that did not reach their sequence's end are dropped, as are those of
        requests that ended meanwhile, and those behind a guess that was wrong.

        Args:
          step: what was computed.
          token_ids: one for each chunk; a list of one for each row where it has a draft, or the
            step makes several decode steps.

        Returns:
          The requests that got a token, with it and its number in this step, from 0; and those that
          end without one, with -1. Those that ended carry a finish reason, and their blocks are
          free already, or held.
        """
        now = time.monotonic()
        block_size, running = self.config.block_size, RequestStatus.RUNNING
        results: list[tuple[Request, int, int]] = []
        for chunk, sampled in zip(step.chunks, token_ids, strict=True):
            request, start, num_tokens, draft = chunk
            if request.status is not running:
                continue
            # Before the new token is appended: it is what tells a last chunk from the others.
            end, num_known = start + num_tokens, len(request.token_ids)
            if draft or step.num_decode_steps > 1:
                self._take_several(chunk, sampled, results)  # pyright: ignore[reportArgumentType]
                if request.first_token_time is None:
                    request.first_token_time = now
                continue
            request.num_computed_tokens = end
            if end // block_size > request.num_folded_blocks:
                self.blocks.cache_full_blocks(request, end)  # It was not, in a step that followed.
                self.blocks.fold_duplicates(request)
            if request.score_start is not None and end >= request.num_prompt_tokens - 1:
                request.score_start = None
            if request.prefill_only:
                if end == num_known - 1:
                    self.finish(request, "length")
                    results.append((request, -1, 0))
                continue
            if end != num_known:
                continue
            request.token_ids.append(sampled)  # pyright: ignore[reportArgumentType]
            if request.first_token_time is None:
                request.first_token_time = now
            if request.check_stop():
                self.finish(request)
            results.append((request, sampled, 0))  # pyright: ignore[reportArgumentType]
        return results

    def _take_several(
        self,
        chunk: ScheduledChunk,
        sampled: Sequence[int],
        results: list[tuple[Request, int, int]],
    ) -> None:
        request, start, _, draft = chunk
        num_taken = request.take_tokens(sampled, draft)
        request.num_computed_tokens = start + num_taken
        results += [(request, token_id, i) for i, token_id in enumerate(sampled[:num_taken])]
        if draft:
            self.drafter.learn(request, draft, num_taken - 1)
        self.blocks.cache_full_blocks(request, request.num_computed_tokens)
        if request.finish_reason is not None:
            self.finish(request)
        else:
            self.blocks.fold_duplicates(request)

    def finish(self, request: Request, reason: str | None = None) -> None:
        """Ends a request and frees its blocks at once; one that has ended is left as it is.

        One that is to be held keeps its blocks, unless it was aborted or failed.
        """
        if request.status in (RequestStatus.FINISHED, RequestStatus.HELD):
            return
        if reason is not None:
            request.finish_reason = reason
        self._leave_queues(request)
        if request.hold and request.finish_reason in ("stop", "length"):
            request.status = RequestStatus.HELD
            self.held[request.request_id] = request
        else:
            self.blocks.free(request)
            request.status = RequestStatus.FINISHED
        request.finish_time = time.monotonic()
        del self.requests[request.request_id]

    def release(self, request: Request) -> None:
        """Ends a held sequence and frees its blocks; any other is left as it is."""
        if request.status is RequestStatus.HELD:
            del self.held[request.request_id]
            self.blocks.free(request)
            request.status = RequestStatus.FINISHED

    def fork_held(self, parent: Request, request_id: str) -> Request:
        """A second held sequence of the same tokens: it shares the blocks that `parent` has."""
        child = parent.twin(request_id)
        if parent.block_ids:
            self.blocks.fork(parent, child)
        child.status = RequestStatus.HELD
        self.held[request_id] = child
        return child

    def abort(self, request_id: str) -> Request | None:
        """Ends a live request with finish reason "abort"; None if there is no such request."""
        request = self.requests.get(request_id)
        if request is not None:
            self.finish(request, "abort")
        return request

    def preempt(self, request: Request, mode: str | None = None) -> str:
        """Takes a running request's blocks; it keeps its outputs and waits first in the queue.

        Args:
          mode: "swap" (recompute where the host has no room), "recompute", or None for the
            configured one.

        Returns:
          What was done: "swap" or "recompute".
        """
        done = self._give_up_blocks(request, mode)
        self.running.remove(request)
        request.status = RequestStatus.WAITING
        request.num_preemptions += 1
        self.num_preemptions_by_mode[done] += 1
        self.waiting.append_first(request)
        return done

    def restart(self, requests: Iterable[Request]) -> None:
        """Forgets every block and queue, and lets these requests wait in order of arrival.

        For after a fault: whatever state it left behind, what these requests hold as tokens is all
        that is taken over, and is computed anew. Counters, pins and listeners go on; held
        sequences keep their tokens.
        """
        self.blocks = self._make_blocks(self.blocks)
        self.running.clear()
        self.waiting.clear()
        self.requests.clear()
        for request in self.held.values():
            request.forget_blocks(self.config.block_size)
        for request in sorted(requests, key=lambda request: request.arrival_index):
            if request.status is not RequestStatus.WAITING:
                request.num_preemptions += 1
                self.num_preemptions_by_mode["recompute"] += 1
            request.forget_blocks(self.config.block_size)
            request.status = RequestStatus.WAITING
            request.children.clear()
            self.held.pop(request.request_id, None)  # Held already, in the step that failed.
            self.requests[request.request_id] = request
            self.waiting.append(request)

    def check_integrity(self) -> None:
        """Raises AssertionError unless blocks, tables and queues agree. Between steps only."""
        live = [*self.requests.values(), *self.held.values()]
        self.blocks.check_integrity(live)
        assert not any(request.block_ids for request in self.waiting), "a waiting one holds blocks"
        num_children = sum(len(request.children) for request in self.requests.values())
        num_queued = len(self.running) + len(self.waiting) + num_children
        assert len(self.requests) == num_queued, "a request is astray"

    def _make_blocks(self, old: BlockManager | None = None) -> BlockManager:
        blocks = BlockManager(
            self.config.num_blocks,
            self.config.block_size,
            enable_prefix_caching=self.config.enable_prefix_caching,
            num_host_blocks=self.config.num_host_blocks,
            enable_host_prefix_cache=self.config.enable_host_prefix_cache,
        )
        if old is not None:
            blocks.take_over(old)
        return blocks

    def _schedule_running(self, chunks: list[ScheduledChunk], preempted: list[Request]) -> int:
        """Adds a chunk for each running request in order, preempting where blocks run out.

        Returns:
          What is left of the budget.
        """
        budget, running = self.config.max_num_batched_tokens, self.running
        append_slots = self.blocks.append_slots
        while len(chunks) < len(running) and budget > 0:
            request = running[len(chunks)]  # Chunk i is of the i-th running request.
            start = request.num_computed_tokens
            num_tokens = len(request.token_ids) - request.prefill_only - start
            draft: tuple[int, ...] = ()
            if num_tokens > 1:
                num_tokens = self._fit(request, start, num_tokens, budget)
            elif self.drafter:
                draft = self._draft_for(request, budget)
                num_tokens += len(draft)
            while not append_slots(request, start + num_tokens):
                if self._evict_held():
                    continue
                victim = max(running, key=rank) if self.waiting.by_priority else running[-1]
                place = running.index(victim)
                if place < len(chunks):
                    undone = chunks.pop(place)
                    budget += undone.num_tokens
                    self._num_extra_rows -= undone.num_rows - 1
                self.preempt(victim)
                preempted.append(victim)
                if victim is request:
                    break
            else:
                chunks.append(ScheduledChunk(request, start, num_tokens, draft))
                budget -= num_tokens
        return budget

    def _draft_for(self, request: Request, budget: int) -> tuple[int, ...]:
        """Guesses of a decode's next tokens, where there are rows and free blocks for them, and
        nobody waits: no one is preempted for a guess.
        """
        room = self.config.max_num_seqs - len(self.running) - self._num_extra_rows
        draft = () if self.waiting else self.drafter.propose(request, min(room, budget - 1))
        if draft and not self.blocks.append_slots(request, request.num_tokens + len(draft)):
            return ()
        self._num_extra_rows += len(draft)
        return draft

    def _admit(self, budget: int) -> list[ScheduledChunk]:
        """Admits waiting requests in order while budget, seats and blocks last; their chunks."""
        admitted: list[ScheduledChunk] = []
        while self.waiting and budget > 0 and self._has_seat():
            request = self.waiting[0]
            parent = request.fork_of
            while not (found := self.blocks.allocate(request)) and self._evict_held(spare=parent):
                pass
            if not found:
                break
            self.waiting.pop_first()
            request.status = RequestStatus.RUNNING
            request.fork_of = None
            self.running.append(request)
            if parent is not None and parent.request_id in self.held:  # Used just now.
                self.held[parent.request_id] = self.held.pop(parent.request_id)
            start = request.num_computed_tokens
            num_tokens = request.num_wanted_tokens - start
            num_tokens = self._fit(request, start, num_tokens, budget)
            admitted.append(ScheduledChunk(request, start, num_tokens))
            self.blocks.cache_full_blocks(request, start + num_tokens)
            budget -= num_tokens
        return admitted

    def _fork_children(self, chunks: list[ScheduledChunk]) -> list[ScheduledChunk]:
        """Lets children share the blocks of a prompt that this step completes, while seats last.

        They sample their first tokens from the same logits, in chunks of no tokens that are put
        behind their parent's. Those without a seat wait, and share what they can when admitted.
        """
        if not [chunk for chunk in chunks if chunk[0].children]:
            return chunks
        family: list[ScheduledChunk] = []
        for chunk in chunks:
            family.append(chunk)
            parent = chunk.request
            if not parent.children or not chunk.samples:
                continue
            while parent.children and self._has_seat():
                child = parent.children.pop(0)
                self.blocks.fork(parent, child, chunk.end)
                child.status = RequestStatus.RUNNING
                child.fork_of = None
                self.running.append(child)
                family.append(ScheduledChunk(child, chunk.end, 0))
            self._queue_children(parent)
        return family

    def _fit(self, request: Request, start: int, num_tokens: int, budget: int) -> int:
        """The most of `num_tokens` that the budget allows, and the rows of logits if it scores."""
        num_tokens = min(num_tokens, budget)
        if request.score_start is None:
            return num_tokens
        num_rows = 1 + self.config.max_num_seqs - len(self.running) - self._num_extra_rows
        end = min(start + num_tokens, max(start, request.score_start - 1) + num_rows)
        self._num_extra_rows += request.num_rows(start, end) - 1
        return end - start

    def _could_admit(self) -> bool:
        """Whether a request waits though there is a seat: for blocks, or only for the next step."""
        return bool(self.waiting) and self._has_seat()

    def _has_seat(self) -> bool:
        """Whether one more sequence may run; each takes a row of logits, as scored tokens do."""
        return len(self.running) + self._num_extra_rows < self.config.max_num_seqs

    def _evict_held(self, spare: Request | None = None) -> bool:
        """Takes the blocks of a held one, the least recently used first; False if none has any.

        `spare`, which a request is about to fork from, comes last, and only if nothing runs.
        """
        for request in self.held.values():
            if request.block_ids and request is not spare:
                self._give_up_blocks(request)
                return True
        if spare is not None and spare.block_ids and not self.running:
            self._give_up_blocks(spare)
            return True
        return False

    def _give_up_blocks(self, request: Request, mode: str | None = None) -> str:
        """Swaps a sequence out, or frees its blocks, to be computed anew; tells which."""
        mode = mode or self.config.preemption_mode
        is_cheap = mode == "auto" and self.costs.prefers_swap(request.num_computed_tokens)
        if (mode == "swap" or is_cheap) and self.blocks.swap_out(request):
            return "swap"
        self.blocks.free(request)
        return "recompute"

    def _leave_queues(self, request: Request) -> None:
        """Takes an ending request out of wherever it stands; its children queue up alone."""
        parent = request.fork_of
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
        elif parent is not None and request in parent.children:
            parent.children.remove(request)
        else:
            self.waiting.remove(request)
        self._queue_children(request)

    def _queue_children(self, parent: Request) -> None:
        for child in reversed(parent.children):
            self.waiting.append_first(child)
        parent.children.clear()
