"""Continuous batching: which tokens of which requests the next step computes.

The policy is that of vLLM's scheduler: requests that run come first, then waiting ones in order of
arrival, all under one budget of tokens a step, so that prompts are computed in chunks beside
the decodes of others. When blocks run out, the most recently admitted request gives its blocks
back and is computed anew later.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Iterable, Sequence

from paged_jax.block_manager import BlockManager
from paged_jax.config import SchedulerConfig
from paged_jax.request import Request, RequestStatus


@dataclasses.dataclass(frozen=True)
class ScheduledChunk:
    """`num_tokens` tokens of one request, from its token `start` on."""

    request: Request
    start: int
    num_tokens: int

    @property
    def end(self) -> int:
        return self.start + self.num_tokens

    @property
    def samples(self) -> bool:
        """Whether the chunk reaches the sequence's last token, so that a new token is sampled."""
        return self.end == self.request.num_tokens


@dataclasses.dataclass(frozen=True)
class ScheduledStep:
    """What the next step computes, and who was preempted to make room for it."""

    chunks: tuple[ScheduledChunk, ...]
    preempted: tuple[Request, ...] = ()
    # How many of the chunks, the last ones, are of requests that this step admitted
    num_admitted: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.chunks)

    @property
    def reads_what_it_writes(self) -> bool:
        """Whether a sequence may read blocks that others fill in this step: only one that joins
        may, since its cached prefix may end in such a block.
        """
        return any(chunk.start > 0 for chunk in self.chunks[len(self.chunks) - self.num_admitted :])


class Scheduler:
    """Holds every live request; `schedule` picks a step's work, `update` takes its results."""

    def __init__(self, config: SchedulerConfig):
        self.config = config
        self.blocks = self._make_blocks()
        self.running: list[Request] = []
        self.waiting: deque[Request] = deque()
        self.requests: dict[str, Request] = {}
        self.num_preemptions = 0
        self._num_arrivals = 0

    def __repr__(self) -> str:
        pool = self.blocks.pool
        return (
            f"Scheduler(running={self.running}, waiting={list(self.waiting)}, "
            f"free blocks={pool.num_free_blocks} of {pool.num_blocks - 1})"
        )

    def has_unfinished(self) -> bool:
        return bool(self.requests)

    def add(self, request: Request) -> None:
        """Puts a request at the back of the queue.

        Raises:
          ValueError: its id is taken, or its prompt is empty or leaves no room for an output token.
        """
        if request.request_id in self.requests:
            raise ValueError(
                f"request_id={request.request_id!r} is in use; give each live request its own"
            )
        self.check_length(request.num_prompt_tokens)
        request.arrival_index = self._num_arrivals
        self._num_arrivals += 1
        self.requests[request.request_id] = request
        self.waiting.append(request)

    def check_length(self, num_prompt_tokens: int) -> None:
        """Raises ValueError unless a prompt of this length leaves room for one output token."""
        limit = self.config.max_model_len
        if num_prompt_tokens == 0:
            raise ValueError("the prompt is empty (0 tokens); give at least one token")
        if num_prompt_tokens > limit:
            raise ValueError(
                f"the prompt has {num_prompt_tokens} tokens, more than max_model_len={limit}; "
                "shorten it, or raise max_model_len if the model allows"
            )
        if num_prompt_tokens == limit:
            raise ValueError(
                f"the prompt has {num_prompt_tokens} tokens and max_model_len={limit}: there is no "
                f"room for one output token; shorten it to at most {limit - 1} tokens"
            )

    def schedule(self) -> ScheduledStep:
        """Picks the next step's chunks, and gives their requests the blocks that they need."""
        budget = self.config.max_num_batched_tokens
        chunks: list[ScheduledChunk] = []
        preempted: list[Request] = []
        index = 0
        while index < len(self.running) and budget > 0:
            request = self.running[index]
            num_tokens = min(request.num_tokens - request.num_computed_tokens, budget)
            if not self._make_room(request, num_tokens, preempted):
                break  # It preempted itself, and it was the last one running.
            chunks.append(self._chunk(request, num_tokens))
            budget -= num_tokens
            index += 1
        num_running = len(chunks)
        if not preempted:
            self._admit(budget, chunks)
        return ScheduledStep(tuple(chunks), tuple(preempted), len(chunks) - num_running)

    def update(self, step: ScheduledStep, token_ids: Sequence[int]) -> list[tuple[Request, int]]:
        """Takes a step's sampled tokens, one a chunk, and ends the requests that they finish.

        Tokens of chunks that did not reach their sequence's end are dropped, as are those of
        requests that ended meanwhile.

        Returns:
          The requests that got a token, with it. Those that it finished carry a finish reason, and
          their blocks are free already.
        """
        now = time.monotonic()
        results = []
        for chunk, token_id in zip(step.chunks, token_ids, strict=True):
            request = chunk.request
            if request.status is not RequestStatus.RUNNING:
                continue
            # Before the new token is appended: it is what tells a last chunk from the others.
            samples = chunk.samples
            request.num_computed_tokens = chunk.end
            if not samples:
                continue
            request.token_ids.append(token_id)
            if request.first_token_time is None:
                request.first_token_time = now
            if request.check_stop():
                self.finish(request)
            results.append((request, token_id))
        return results

    def finish(self, request: Request, reason: str | None = None) -> None:
        """Ends a request and frees its blocks at once; one that has ended is left as it is."""
        if request.status is RequestStatus.FINISHED:
            return
        if reason is not None:
            request.finish_reason = reason
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
            self.blocks.free(request)
        else:
            self.waiting.remove(request)
        request.status = RequestStatus.FINISHED
        request.finish_time = time.monotonic()
        del self.requests[request.request_id]

    def abort(self, request_id: str) -> Request | None:
        """Ends a live request with finish reason "abort"; None if there is no such request."""
        request = self.requests.get(request_id)
        if request is not None:
            self.finish(request, "abort")
        return request

    def restart(self, requests: Iterable[Request]) -> None:
        """Forgets every block and queue, and lets these requests wait in order of arrival.

        For after a fault: whatever state it left behind, what these requests hold as tokens is all
        that is taken over, and is computed anew. Counters go on.
        """
        old = self.blocks
        self.blocks = self._make_blocks()
        self.blocks.stats, self.blocks.peak_used_blocks = old.stats, old.peak_used_blocks
        self.running.clear()
        self.waiting.clear()
        self.requests.clear()
        for request in sorted(requests, key=lambda request: request.arrival_index):
            if request.status is not RequestStatus.WAITING:
                request.num_preemptions += 1
                self.num_preemptions += 1
            request.forget_blocks(self.config.block_size)
            self.requests[request.request_id] = request
            self.waiting.append(request)

    def reset_prefix_cache(self) -> bool:
        """Forgets every cached prefix; False, with nothing changed, while any block is in use."""
        return self.blocks.reset_prefix_cache()

    def check_integrity(self) -> None:
        """Raises AssertionError unless blocks, tables and queues agree."""
        self.blocks.check_integrity(self.running)
        assert not any(request.block_ids for request in self.waiting), "a waiting one holds blocks"
        assert len(self.requests) == len(self.running) + len(self.waiting), "a request is astray"

    def _make_blocks(self) -> BlockManager:
        return BlockManager(
            self.config.num_blocks,
            self.config.block_size,
            enable_prefix_caching=self.config.enable_prefix_caching,
        )

    def _chunk(self, request: Request, num_tokens: int) -> ScheduledChunk:
        chunk = ScheduledChunk(request, request.num_computed_tokens, num_tokens)
        self.blocks.cache_full_blocks(request, chunk.end)
        return chunk

    def _make_room(self, request: Request, num_tokens: int, preempted: list[Request]) -> bool:
        """Gets a running request its blocks, preempting from the back; False if it fell itself."""
        while not self.blocks.append_slots(request, request.num_computed_tokens + num_tokens):
            victim = self.running[-1]
            self._preempt(victim)
            preempted.append(victim)
            if victim is request:
                return False
        return True

    def _preempt(self, victim: Request) -> None:
        """Takes a running request's blocks; it keeps its outputs and waits first in the queue."""
        self.running.remove(victim)
        self.blocks.free(victim)
        victim.status = RequestStatus.WAITING
        victim.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(victim)

    def _admit(self, budget: int, chunks: list[ScheduledChunk]) -> None:
        """Admits waiting requests in order while budget, seats and blocks last."""
        while self.waiting and budget > 0 and len(self.running) < self.config.max_num_seqs:
            request = self.waiting[0]
            if not self.blocks.allocate(request):
                break
            self.waiting.popleft()
            request.status = RequestStatus.RUNNING
            self.running.append(request)
            num_tokens = min(request.num_tokens - request.num_computed_tokens, budget)
            chunks.append(self._chunk(request, num_tokens))
            budget -= num_tokens
