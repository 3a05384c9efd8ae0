"""A second set of books: what a scheduler did, from its steps alone, against what it says it did.

The ledger sees each step's chunks, moves and results. It knows of every sequence how far it was
computed, and so finds a token that is computed twice or never, a request that waits for ever, a
counter that is off, and whatever is left over where nothing should be.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Iterable, Sequence
from typing import Any

from paged_jax.kv_events import BlockRemoved, BlockStored, CacheCleared, KVEvent
from paged_jax.request import Request
from paged_jax.scheduled_step import ScheduledChunk, ScheduledStep
from paged_jax.scheduler import Scheduler
from paged_jax.simulate.device_model import StepWork


class Violation(Exception):
    """Something that must hold does not; the message says what."""


def require(condition: object, message: str) -> None:
    """Raises Violation with the message unless the condition holds."""
    if not condition:
        raise Violation(message)


@dataclasses.dataclass(slots=True)
class Record:
    """What the ledger knows of a live request.

    Attributes:
      computed_tokens: while it runs; -1 while it does not.
      swapped_tokens: what of it is on the host, to come back; 0 if nothing is.
      is_alone: whether it was added as no fork of another.
      goes_on_from: the id of the held sequence that it takes over; "" for none.
    """

    request: Request
    arrival: float
    computed_tokens: int = -1
    swapped_tokens: int = 0
    was_admitted: bool = False
    is_alone: bool = True
    goes_on_from: str = ""


@dataclasses.dataclass
class Totals:
    """Sums over a device's life; tokens unless the name says otherwise.

    Attributes:
      tokens_in, tokens_out: prompts of requests that were added; sampled tokens.
      computed: by the chunks of all steps; `found` was not, but shared, cached or swapped in;
        `lost` was computed and forgotten; `kept` had been computed when its request ended.
    """

    num_steps: int = 0
    num_chunks: int = 0
    num_requests: int = 0
    num_ended: int = 0
    num_aborted: int = 0
    tokens_in: int = 0
    tokens_out: int = 0
    ended_output: int = 0
    computed: int = 0
    found: int = 0
    lost: int = 0
    kept: int = 0
    queries: int = 0
    hits: int = 0
    swapped_out: int = 0
    swapped_back: int = 0
    num_swaps: int = 0
    blocks_out: int = 0
    blocks_in: int = 0
    num_copies: int = 0
    num_recomputes: int = 0
    num_swap_preemptions: int = 0


class Ledger:
    """The books of one scheduler.

    Args:
      scheduler: as it was made: nothing added yet.
      patience_seconds: a request that is not done after so long was forgotten.
    """

    def __init__(self, scheduler: Scheduler, patience_seconds: float):
        self.scheduler = scheduler
        self.patience_seconds = patience_seconds
        self.totals = Totals()
        self.live: dict[str, Record] = {}
        self.first_token_waits: list[float] = []
        self.max_wait_seconds = 0.0
        self._sampling: dict[str, Record] = {}  # Admitted, and without a token yet.
        self._swapped_held: set[str] = set()
        self._fresh_sizes = container_sizes(scheduler)

    def add(self, request: Request, now: float) -> None:
        """Notes a request that was added, or a child of one."""
        parent = request.fork_of
        self.live[request.request_id] = Record(
            request,
            now,
            is_alone=parent is None,
            goes_on_from=parent.request_id if parent is not None and request.takes_over else "",
        )
        self.totals.num_requests += 1
        self.totals.tokens_in += request.num_prompt_tokens

    def take_step(self, step: ScheduledStep, now: float) -> StepWork:
        """Checks a scheduled step against what is known; what it costs the device."""
        totals, live = self.totals, self.live
        totals.num_steps += 1
        require(step.chunks, "a step without a chunk, and requests are left")
        for request in step.preempted:
            self._note_preempted(request)
        self._note_swapped_held()
        num_tokens = num_context = num_pairs = 0
        for chunk in step.chunks:
            request, start, num_new, _ = chunk
            record = live[request.request_id]
            if record.computed_tokens != start:
                self._note_admitted(record, chunk, now)
            record.computed_tokens = end = start + num_new
            num_tokens += num_new
            num_context += end
            num_pairs += num_new * (start + end + 1) // 2
        totals.num_chunks += len(step.chunks)
        totals.computed += num_tokens
        moves = step.moves
        if moves:
            self._check_moves(step)
        return StepWork(
            num_tokens=num_tokens,
            num_rows=len(step.chunks),
            num_context_tokens=num_context,
            num_pairs=num_pairs,
            num_swapped_blocks=len(moves.swap_out) + len(moves.swap_in),
            num_copied_blocks=len(moves.copies),
        )

    def take_results(
        self, results: Sequence[tuple[Request, int, int]], now: float
    ) -> list[Request]:
        """Notes a step's sampled tokens, which are there at `now`; the requests that ended."""
        self.totals.tokens_out += len(results)
        for name, record in list(self._sampling.items()):
            if record.request.num_output_tokens:
                self.first_token_waits.append(now - record.arrival)
                del self._sampling[name]
        ended = [request for request, _, _ in results if request.finish_reason is not None]
        for request in ended:
            self.end(request)
        return ended

    def end(self, request: Request) -> None:
        """Notes that a request ended: unless aborted, all but its last token are computed."""
        record, totals = self.live.pop(request.request_id), self.totals
        self._sampling.pop(request.request_id, None)
        name, computed = request.request_id, record.computed_tokens
        if request.finish_reason == "abort":
            totals.num_aborted += 1
        else:
            want = request.num_tokens - 1
            require(computed == want, f"{name} ended with {computed} of {want} tokens computed")
            require(request.num_output_tokens > 0, f"{name} ended without a token")
        totals.num_ended += 1
        totals.kept += max(computed, 0)
        totals.lost += record.swapped_tokens
        totals.ended_output += request.num_output_tokens

    def release(self, request: Request) -> None:
        """Notes that a held sequence was released."""
        self._swapped_held.discard(request.request_id)

    def check(self, now: float) -> None:
        """Between steps: integrity, counters, and the patience of whoever waits."""
        scheduler, totals = self.scheduler, self.totals
        scheduler.check_integrity()
        pool, stats = scheduler.blocks.pool, scheduler.blocks.stats
        if self.live:
            oldest = next(iter(self.live.values()))
            age = now - oldest.arrival
            require(
                age <= self.patience_seconds,
                f"{oldest.request} has been waiting for its end for {age:.0f} s",
            )
        usable = pool.num_blocks - 1
        held = pool.num_used_blocks + pool.num_free_blocks
        require(held == usable, f"used + free = {held} of {usable} blocks")
        require(scheduler.requests.keys() == self.live.keys(), "live requests differ")
        running = sum(max(r.computed_tokens, 0) for r in self.live.values())
        away = sum(r.swapped_tokens for r in self.live.values())
        entered, left = totals.computed + totals.found, totals.lost + totals.kept
        require(
            entered == left + running + away,
            f"computed + found = {entered} tokens, lost + kept + live = {left + running + away}",
        )
        output = totals.ended_output + sum(r.request.num_output_tokens for r in self.live.values())
        require(totals.tokens_out == output, f"{totals.tokens_out} sampled, {output} delivered")
        modes = {"recompute": totals.num_recomputes, "swap": totals.num_swap_preemptions}
        by_mode = scheduler.num_preemptions_by_mode
        require(by_mode == modes, f"num_preemptions_by_mode={by_mode}, seen {modes}")
        require(stats.num_hit_tokens <= stats.num_query_tokens, "more hits than queries")
        told, seen = stats.num_query_tokens, totals.queries
        require(told == seen, f"num_query_tokens={told}, seen {seen}")
        told, seen = stats.num_hit_tokens, totals.hits
        require(told == seen, f"num_hit_tokens={told}, seen {seen}")
        self._check_swaps()

    def check_idle(self, num_held: int) -> None:
        """Where nothing is unfinished: no block, entry or request is left but those of sessions."""
        scheduler = self.scheduler
        require(len(scheduler.held) == num_held, f"{len(scheduler.held)} held of {num_held}")
        require(not self.live and not self._sampling, f"still live: {list(self.live)[:5]}")
        blocks = scheduler.blocks
        if not num_held:
            used = blocks.pool.num_used_blocks
            require(not used, f"{used} device blocks are held by nobody")
            if blocks.host is not None:
                used = blocks.host.pool.num_used_blocks
                require(not used, f"{used} host blocks are held by nobody")
        for name, size in container_sizes(scheduler).items():
            most = self._fresh_sizes.get(name, 0)
            if name == "scheduler.held":
                most = num_held
            elif ".prefix_cache" in name or name.endswith("._free"):
                pool = blocks.host.pool if blocks.host and ".host." in name else blocks.pool
                most = pool.num_blocks
            require(size <= most, f"{name} has grown to {size} entries; {most} are right")

    def _note_admitted(self, record: Record, chunk: ScheduledChunk, now: float) -> None:
        """A chunk that does not go on where the last one ended: right for one that joins only."""
        request, start, num_new, _ = chunk
        name, totals = request.request_id, self.totals
        require(
            record.computed_tokens < 0,
            f"{name} was computed to {record.computed_tokens}, and goes on at {start}",
        )
        if record.swapped_tokens:
            require(
                start == record.swapped_tokens,
                f"{name} came back with {start} of {record.swapped_tokens} tokens swapped",
            )
            totals.swapped_back += start
            record.swapped_tokens = 0
            return
        totals.found += start
        if record.goes_on_from in self._swapped_held and not record.was_admitted:
            totals.swapped_back += start
        if record.was_admitted:
            return
        record.was_admitted = True
        self._sampling[name] = record
        self.max_wait_seconds = max(self.max_wait_seconds, now - record.arrival)
        # A fork asks the cache only if that gives it more than its parent's blocks do.
        if num_new and (record.is_alone or not start or request.num_cached_tokens):
            totals.queries += request.num_tokens
            totals.hits += start

    def _note_preempted(self, request: Request) -> None:
        record, totals = self.live[request.request_id], self.totals
        computed, record.computed_tokens = record.computed_tokens, -1
        require(computed >= 0, f"{request.request_id} was preempted and did not run")
        if not request.is_swapped:
            totals.num_recomputes += 1
            totals.lost += computed
            return
        require(
            request.num_computed_tokens == computed,
            f"{request.request_id} swapped {request.num_computed_tokens} of {computed} tokens",
        )
        record.swapped_tokens = computed
        totals.num_swap_preemptions += 1
        totals.num_swaps += 1
        totals.swapped_out += computed

    def _note_swapped_held(self) -> None:
        for name, request in self.scheduler.held.items():
            if request.is_swapped and name not in self._swapped_held:
                self._swapped_held.add(name)
                self.totals.num_swaps += 1
                self.totals.swapped_out += request.num_computed_tokens

    def _check_moves(self, step: ScheduledStep) -> None:
        """No two moves write the same block, and each block exists."""
        moves, blocks, totals = step.moves, self.scheduler.blocks, self.totals
        num_host = 0 if blocks.host is None else blocks.host.pool.num_blocks
        on_host = [host_id for _, host_id in moves.swap_out]
        on_device = [pair[1] for pair in (*moves.copies, *moves.swap_in)]
        require(len(set(on_host)) == len(on_host), f"two swaps to one host block: {moves}")
        require(len(set(on_device)) == len(on_device), f"two moves to one block: {moves}")
        on_host += [host_id for host_id, _ in moves.swap_in]
        on_device += [pair[0] for pair in (*moves.copies, *moves.swap_out)]
        require(all(0 < i < num_host for i in on_host), f"no such host block: {moves}")
        require(all(0 < i < blocks.pool.num_blocks for i in on_device), f"no such block: {moves}")
        totals.blocks_out += len(moves.swap_out)
        totals.blocks_in += len(moves.swap_in)
        totals.num_copies += len(moves.copies)

    def _check_swaps(self) -> None:
        """Tokens against blocks: the last block of a sequence is partly filled, and a block that
        the other side still has is not moved.
        """
        totals, stats = self.totals, self.scheduler.blocks.stats
        block_size = self.scheduler.config.block_size
        told = stats.swap_out_tokens
        require(told == totals.swapped_out, f"swap_out_tokens={told}, seen {totals.swapped_out}")
        moved = totals.blocks_out * block_size
        most = told + totals.num_swaps * (block_size - 1) + stats.host_offload_tokens
        require(moved <= most, f"{moved} tokens moved out, at most {most} to be moved")
        told, back = stats.swap_in_tokens, totals.swapped_back
        require(told <= back, f"swap_in_tokens={told}, and {back} came back")
        moved = totals.blocks_in * block_size
        require(told <= moved, f"swap_in_tokens={told}, and {moved} were moved in")


class CacheFollower:
    """Follows the events of a prefix cache, as a router would, and compares."""

    def __init__(self, scheduler: Scheduler):
        self.num_events = 0
        self._is_gapless = True
        self._scheduler = scheduler
        self._stored: set[bytes] = set()
        scheduler.blocks.listeners.events.subscribe(self._take)

    def check(self) -> None:
        """Raises Violation unless the events tell of just the blocks that are cached."""
        require(self._is_gapless, "the events are not numbered one by one")
        cache = self._scheduler.blocks.pool.prefix_cache
        missing = [h for h in self._stored if cache.find(h) is None]
        require(not missing, f"{len(missing)} blocks left the cache without an event")
        pool = self._scheduler.blocks.pool
        hashes = {h for i in range(1, pool.num_blocks) if (h := cache.hash_of(i)) is not None}
        require(hashes <= self._stored, "blocks are cached of which no event told")

    def _take(self, number: int, event: KVEvent) -> None:
        # An exception would only end the subscription: what is wrong shows in `check`.
        self._is_gapless = self._is_gapless and number == self.num_events
        self.num_events += 1
        if isinstance(event, BlockStored) and event.tier == "device":
            self._stored.update(event.block_hashes)
        elif isinstance(event, BlockRemoved) and event.tier == "device":
            self._stored.difference_update(event.block_hashes)
        elif isinstance(event, CacheCleared):
            self._stored.clear()


def container_sizes(scheduler: Scheduler) -> dict[str, int]:
    """Entries of every container that the scheduler and the objects of this project in it own."""
    sizes: dict[str, int] = {}
    _measure("scheduler", scheduler, sizes, set())
    return sizes


def _measure(name: str, owner: Any, sizes: dict[str, int], seen: set[int]) -> None:
    seen.add(id(owner))
    for field, value in vars(owner).items():
        is_own = type(value).__module__.startswith("paged_jax.")
        if hasattr(value, "__len__") and not isinstance(value, str | bytes):
            sizes[f"{name}.{field}"] = len(value)
        if is_own and hasattr(value, "__dict__") and id(value) not in seen:
            _measure(f"{name}.{field}", value, sizes, seen)


def count_requests(objects: Iterable[object] | None = None) -> int:
    """`Request` objects that exist; without a collection, so that cycles count as a leak."""
    objects = gc.get_objects() if objects is None else objects
    return sum(1 for thing in objects if type(thing) is Request)
