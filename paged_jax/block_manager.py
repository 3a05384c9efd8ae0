"""Block tables: who holds which blocks, who shares them, and what must be moved for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from paged_jax.block_moves import NO_MOVES, BlockMoves
from paged_jax.block_pool import BlockPool
from paged_jax.block_stats import BlockStats
from paged_jax.cache_listeners import CacheListeners
from paged_jax.host_tier import HostTier
from paged_jax.prefix_pins import PrefixPins
from paged_jax.request import Request


class BlockManager:
    """Gives blocks to sequences and takes them back; the only one that changes a block table.

    All of what a sequence asks for is given, or nothing. A block may stand in several tables; the
    first of them that writes into it gets a copy, and the last keeps the original. Full blocks are
    hashed when the step that fills them is scheduled: a later request of the same step may share
    them, since each layer writes the whole step's keys and values before it reads any.

    What the device must do for it is collected, and handed over once a step by `take_moves`.

    Args:
      num_blocks: blocks of the pool, the null block included.
      block_size: tokens a block.
      enable_prefix_caching: whether full blocks are hashed and shared.
      num_host_blocks: blocks of host memory, for swapped sequences; 0 for no swapping.
      enable_host_prefix_cache: whether evicted prefixes are kept there too.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool = True,
        num_host_blocks: int = 0,
        enable_host_prefix_cache: bool = False,
    ):
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.enable_host_prefix_cache = enable_host_prefix_cache and num_host_blocks > 0
        self.listeners = CacheListeners(block_size)
        self.pool = BlockPool(num_blocks, self._on_evict)
        self.host: HostTier | None = None
        if num_host_blocks:
            on_store = self.listeners.stored_on_host
            self.host = HostTier(num_host_blocks, self._on_host_evict, on_store)
        self.pins = PrefixPins(self.pool)
        self.stats = BlockStats()
        self._copies: dict[int, int] = {}  # destination -> source
        self._swap_in: dict[int, int] = {}  # device block -> host block
        self._filling: dict[int, Request] = {}  # hashed, full only after this step -> by whom

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens fill, the last one perhaps in part."""
        return -(-num_tokens // self.block_size)

    def find_cached(self, request: Request) -> list[int]:
        """The blocks of a request's longest cached prefix, the last token left out.

        The last token is always computed, because its logits are wanted: a hit covers at most
        `num_tokens - 1` tokens, rounded down to blocks (see `Request.max_shared_tokens`).

        Returns:
          Device blocks; a block that only the host holds is given as its number there, negative.
        """
        if not self.enable_prefix_caching:
            return []
        num_blocks = request.max_shared_tokens // self.block_size
        request.extend_hashes(num_blocks, self.block_size)
        found = []
        for block_hash in request.block_hashes[:num_blocks]:
            block_id = self.pool.prefix_cache.find(block_hash)
            if block_id is None and self.host is not None:
                host_id = self.host.find(block_hash)
                block_id = None if host_id is None else -host_id
            if block_id is None:
                break
            found.append(block_id)
        return found

    def can_allocate(self, request: Request) -> bool:
        """Whether `allocate` would find the blocks now."""
        return self._plan(request) is not None

    def allocate(self, request: Request) -> bool:
        """Admits a request: shares what is computed of it, and takes blocks for all its tokens.

        Computed may be a sequence that it forks from, a cached prefix on the device or on the
        host, or, if it was swapped out, all that it had computed itself. Sets `block_ids` and
        `num_computed_tokens`. Returns False, with nothing changed, if the blocks of the whole
        current sequence are not to be had.
        """
        if request.block_ids:
            raise ValueError(f"request {request.request_id!r} holds blocks already")
        plan = self._plan(request)
        if plan is None:
            return False
        shared, num_computed, is_fork = plan
        self.pool.touch([block_id for block_id in shared if block_id > 0])
        from_host = self._bring_in(request, shared)
        request.num_computed_tokens = num_computed
        num_full = num_computed // self.block_size if self.enable_prefix_caching else 0
        request.num_hashed_blocks = request.num_folded_blocks = num_full
        num_host_tokens = sum(min(self.block_size, num_computed - start) for start in from_host)
        if request.is_swapped or is_fork:
            self.stats.swap_in_tokens += num_host_tokens
        if request.is_swapped:
            assert self.host is not None
            self.host.release(request.host_block_ids)
            del request.host_block_ids[:]
        elif request.num_preemptions == 0 and not is_fork:
            request.num_cached_tokens = num_computed
            if self.enable_prefix_caching and request.score_start is None:
                self.stats.num_query_tokens += request.num_tokens
                self.stats.num_hit_tokens += num_computed
                self.stats.num_host_hit_tokens += num_host_tokens
        if is_fork and request.takes_over and request.fork_of is not None:
            self.free(request.fork_of)
        self._own_next_block(request)
        return True

    def append_slots(self, request: Request, num_tokens: int) -> bool:
        """Makes a table hold `num_tokens` tokens, to be written from `num_computed_tokens` on.

        The block that the first of them goes to is copied if others hold it too. Returns False,
        with nothing changed, if the blocks are not to be had.
        """
        table = request.block_ids
        num_new = -(-num_tokens // self.block_size) - len(table)
        first = request.num_computed_tokens // self.block_size
        if first < len(table) and self.pool.ref_counts[table[first]] > 1:
            if num_new + 1 > self.pool.num_free_blocks:
                return False
            self._own_next_block(request)
        elif num_new <= 0:
            return True
        elif num_new > self.pool.num_free_blocks:
            return False
        if num_new > 0:
            table.extend(self.pool.take(num_new))
        return True

    def fork(self, parent: Request, child: Request, num_tokens: int | None = None) -> None:
        """Lets `child` share the blocks of `parent`'s first tokens, the partly filled one too.

        Args:
          parent: holds blocks.
          child: holds none, and begins with the same tokens.
          num_tokens: how many are shared; by default all that `parent` has computed.
        """
        if child.block_ids:
            raise ValueError(f"request {child.request_id!r} holds blocks already")
        num_tokens = parent.num_computed_tokens if num_tokens is None else num_tokens
        num_blocks = self.num_blocks_for(num_tokens)
        if num_blocks > len(parent.block_ids) or num_tokens > child.num_tokens:
            raise ValueError(
                f"num_tokens={num_tokens} cannot be shared: {parent.request_id!r} holds "
                f"{len(parent.block_ids)} blocks of {self.block_size} tokens, and "
                f"{child.request_id!r} has {child.num_tokens} tokens"
            )
        self.pool.touch(parent.block_ids[:num_blocks])
        child.block_ids.extend(parent.block_ids[:num_blocks])
        child.num_computed_tokens = num_tokens
        num_full = num_tokens // self.block_size
        child.block_hashes = parent.block_hashes[:num_full]
        child.num_hashed_blocks = min(parent.num_hashed_blocks, num_full)
        child.num_folded_blocks = min(parent.num_folded_blocks, num_full)

    def cache_full_blocks(self, request: Request, num_tokens: int) -> None:
        """Hashes the blocks that are full once the request's first `num_tokens` are computed."""
        num_full = num_tokens // self.block_size
        if not self.enable_prefix_caching or num_full <= request.num_hashed_blocks:
            return
        request.extend_hashes(num_full, self.block_size)
        for i in range(request.num_hashed_blocks, num_full):
            if self.pool.prefix_cache.hash_of(request.block_ids[i]) is None:
                self._store(request, i)
                self._filling[request.block_ids[i]] = request
        request.num_hashed_blocks = num_full

    def fold_duplicates(self, request: Request) -> None:
        """Gives back full blocks of which an equal one, cached earlier, exists; shares that one.

        To be called once their tokens are computed: as long as a step writes into a block, it must
        be the sequence's own.
        """
        num_full = min(request.num_computed_tokens // self.block_size, request.num_hashed_blocks)
        cache = self.pool.prefix_cache
        for i in range(request.num_folded_blocks, num_full):
            own = request.block_ids[i]
            first = cache.find(request.block_hashes[i])
            if first is None or first == own or self.pool.ref_counts[own] > 1:
                continue
            self.pool.touch([first])
            cache.drop(own)
            self.pool.release([own])
            request.block_ids[i] = first
            self.stats.num_folded_blocks += 1
        request.num_folded_blocks = num_full

    def free(self, request: Request) -> None:
        """Takes all blocks of a request back; what is computed is forgotten with them."""
        self._undo_copy(request)
        self.pool.release(request.block_ids)
        del request.block_ids[:]
        if self.host is not None and request.host_block_ids:
            self.host.release(request.host_block_ids)
            del request.host_block_ids[:]
        request.forget_computed()

    def swap_out(self, request: Request) -> bool:
        """Moves all that a request has computed to the host, or nothing; its blocks are free then.

        Returns False, with nothing changed, if the host has no room (or there is none).
        """
        if self.host is None or not request.block_ids:
            return False
        num_tokens = request.num_computed_tokens
        sources = []
        for i in range(self.num_blocks_for(num_tokens)):
            block_id = request.block_ids[i]
            is_full = (i + 1) * self.block_size <= num_tokens
            block_hash = self.pool.prefix_cache.hash_of(block_id) if is_full else None
            # A copy that is still to be made is not there to be read: its source is.
            sources.append((self._copies.get(block_id, block_id), block_hash))
        host_table = self.host.put(sources)
        if host_table is None:
            return False
        self.free(request)
        request.host_block_ids.extend(host_table)
        request.num_computed_tokens = num_tokens
        self.stats.swap_out_tokens += num_tokens
        return True

    def take_moves(self) -> BlockMoves:
        """What the device must do before this step writes; the next step's collection begins."""
        self._filling.clear()
        is_host_busy = self.host is not None and self.host.is_busy
        if not (self._copies or self._swap_in or is_host_busy):
            return NO_MOVES
        moves = BlockMoves(
            swap_out=() if self.host is None else self.host.take_outgoing(),
            copies=tuple((source, copy) for copy, source in self._copies.items()),
            swap_in=tuple((host_id, block_id) for block_id, host_id in self._swap_in.items()),
        )
        for source in self._copies.values():
            self.pool.let_go(source)
        if self.host is not None:
            self.host.release(list(self._swap_in.values()))
        self._copies.clear()
        self._swap_in.clear()
        return moves

    def block_tables(self, requests: Sequence[Request], width: int | None = None) -> np.ndarray:
        """The tables of some sequences as int32[len(requests), width], 0 beyond their ends."""
        widest = max((len(request.block_ids) for request in requests), default=1)
        width = widest if width is None else width
        if width < widest:
            raise ValueError(f"width={width} is too small: the longest table has {widest} blocks")
        tables = np.zeros((len(requests), width), np.int32)
        for row, request in zip(tables, requests, strict=True):
            row[: len(request.block_ids)] = request.block_ids
        return tables

    def take_over(self, old: BlockManager) -> None:
        """Goes on with the counters, pins and listeners of a manager whose blocks are forgotten."""
        self.stats, self.pool.peak_used_blocks = old.stats, old.pool.peak_used_blocks
        self.pins.hashes = old.pins.hashes
        self.listeners.events, self.listeners.journal = old.listeners.events, old.listeners.journal
        self.listeners.cleared()

    def reset_prefix_cache(self) -> bool:
        """Forgets every hash, on the host too; False, with nothing changed, while a block is in
        use (by a sequence, swapped out or not, or by a pin).
        """
        if self.host is not None and self.host.pool.num_used_blocks:
            return False
        if not self.pool.reset_prefix_cache():
            return False
        if self.host is not None:
            self.host.pool.reset_prefix_cache()
        self.listeners.cleared()
        return True

    def check_integrity(self, requests: Iterable[Request]) -> None:
        """Between steps, AssertionError unless pools and tables of all live requests agree."""
        pool, requests = self.pool, list(requests)
        held = Counter(block_id for request in requests for block_id in request.block_ids)
        held.update(self.pins.blocks.values())
        pool.check_integrity(held)
        for request in requests:
            assert not (request.block_ids and request.host_block_ids), "in two places at once"
            first_empty = self.num_blocks_for(request.num_computed_tokens)
            for block_id in request.block_ids[first_empty:]:
                assert pool.ref_counts[block_id] == 1, f"block {block_id} is shared, and empty"
        if self.host is not None:
            self.host.pool.check_integrity(
                Counter(block_id for request in requests for block_id in request.host_block_ids)
            )

    def _plan(self, request: Request) -> tuple[list[int], int, bool] | None:
        """(shared blocks, tokens computed in them, whether they are a fork's), None without room.

        Blocks that the host holds are negative, as in `find_cached`.
        """
        parent, own = request.fork_of, request.host_block_ids
        if own:
            plan, is_fork = self._plan_swap_in(own, request.num_computed_tokens), False
        elif parent is not None and parent.is_swapped and request.takes_over:
            num_shared = min(parent.num_computed_tokens, request.max_shared_tokens)
            table = parent.host_block_ids[: self.num_blocks_for(num_shared)]
            request.extend_hashes(num_shared // self.block_size, self.block_size)
            plan, is_fork = self._plan_swap_in(table, num_shared), True
        else:
            plan, is_fork = self._plan_shared(request)
        if plan is None:
            return None
        shared, num_computed = plan
        on_device = [block_id for block_id in shared if block_id > 0]
        num_new = self._num_new_blocks(request, shared)
        if is_fork and num_computed % self.block_size:  # Copied at once, unless it is taken over.
            is_shared = shared[-1] > 0 and self.pool.ref_counts[shared[-1]] > 1
            num_new += is_shared or not request.takes_over
        if num_new > self.pool.num_free_blocks - self.pool.num_free_among(on_device):
            return None
        return shared, num_computed, is_fork

    def _plan_swap_in(
        self, host_table: Sequence[int], num_computed: int
    ) -> tuple[list[int], int] | None:
        """The blocks of a table on the host; None if this very step writes one of them.

        What the device still has, of full blocks, is not brought back.
        """
        assert self.host is not None
        if self.host.is_landing(host_table):
            return None
        find, hash_of = self.pool.prefix_cache.find, self.host.pool.prefix_cache.hash_of
        hashes = [hash_of(block_id) for block_id in host_table]
        known = [None if h is None else find(h) for h in hashes]
        shared = [-h if d is None else d for h, d in zip(host_table, known, strict=True)]
        return shared, num_computed

    def _plan_shared(self, request: Request) -> tuple[tuple[list[int], int], bool]:
        """The longest of a cached prefix and what a parent has computed, and which it is."""
        shared = self.find_cached(request)
        num_computed = len(shared) * self.block_size
        parent = request.fork_of
        if parent is None or not parent.block_ids:
            return (shared, num_computed), False
        num_shared = min(parent.num_computed_tokens, request.max_shared_tokens)
        num_full = num_shared // self.block_size
        part = parent.block_ids[num_full : num_full + 1]
        if part and self._filling.get(part[0], parent) is not parent:  # Not yet to be copied.
            num_shared = num_full * self.block_size
        if num_shared <= num_computed:
            return (shared, num_computed), False
        return (list(parent.block_ids[: self.num_blocks_for(num_shared)]), num_shared), True

    def _num_new_blocks(self, request: Request, shared: Sequence[int]) -> int:
        on_host = sum(1 for block_id in shared if block_id < 0)
        return self.num_blocks_for(request.num_tokens) - len(shared) + on_host

    def _bring_in(self, request: Request, shared: Sequence[int]) -> list[int]:
        """Fills the table: shared blocks, those of the host in new ones, and new ones for the rest.

        Returns:
          The first token of each block that comes from the host.
        """
        arriving = [i for i, block_id in enumerate(shared) if block_id < 0]
        if self.host is not None:  # Held until this step's moves, before `take` can push them out.
            self.host.pool.touch([-shared[i] for i in arriving])
        new = iter(self.pool.take(self._num_new_blocks(request, shared)))
        for block_id in shared:
            if block_id < 0:
                host_id, block_id = -block_id, next(new)
                self._swap_in[block_id] = host_id
            request.block_ids.append(block_id)
        request.block_ids.extend(new)
        for i in arriving:  # A copy carries the hash that the host's does.
            assert self.host is not None
            if self.host.pool.prefix_cache.hash_of(-shared[i]) is not None:
                self._store(request, i)
        return [i * self.block_size for i in arriving]

    def _own_next_block(self, request: Request) -> None:
        """Copies the block that is written next if others hold it: copy-on-write."""
        table, index = request.block_ids, request.num_computed_tokens // self.block_size
        if index >= len(table) or self.pool.ref_counts[table[index]] == 1:
            return
        source = table[index]
        [copy] = self.pool.take(1)
        self.pool.release([source])
        table[index] = copy
        self.stats.num_cow_copies += 1
        if source in self._swap_in:  # It comes from the host in this very step, after the copies.
            assert self.host is not None
            self._swap_in[copy] = self._swap_in[source]
            self.host.pool.touch([self._swap_in[copy]])
            return
        source = self._copies.get(source, source)  # Nor is a copy of this step there yet.
        self.pool.hold_back(source)  # Its holder may be preempted in this step.
        self._copies[copy] = source

    def _undo_copy(self, request: Request) -> None:
        """Forgets a copy that was to be made for a request that gives its blocks up."""
        if not self._copies:
            return
        for block_id in request.block_ids:
            source = self._copies.get(block_id)
            if source is not None and self.pool.ref_counts[block_id] == 1:
                del self._copies[block_id]
                self.pool.let_go(source)
                self.stats.num_cow_copies -= 1

    def _store(self, request: Request, index: int) -> None:
        """Enters a full block into the prefix cache."""
        block_hash, block_id = request.block_hashes[index], request.block_ids[index]
        self.pool.prefix_cache.insert(block_hash, block_id)
        self.pins.note_stored(block_hash, block_id)
        self.listeners.stored(request, index)

    def _on_evict(self, block_id: int, block_hash: bytes) -> None:
        """A hashed block is taken for something else: the host may keep what it holds."""
        self.stats.num_evictions += 1
        if self.pool.prefix_cache.find(block_hash) is not None:  # An equal one still stands.
            return
        if self.host is not None and self.enable_host_prefix_cache:
            if self.host.offload(block_id, block_hash):
                self.stats.host_offload_tokens += self.block_size
        is_gone = self.host is None or not self.host.holds(block_hash)
        self.listeners.removed(block_hash, "device", is_gone=is_gone)

    def _on_host_evict(self, block_id: int, block_hash: bytes) -> None:
        self.stats.num_host_evictions += 1
        is_gone = self.pool.prefix_cache.find(block_hash) is None
        self.listeners.removed(block_hash, "host", is_gone=is_gone)
