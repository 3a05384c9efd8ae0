"""What the device and the host hold, simulated, to check every step of a scheduler against.

Keys and values at a position depend on all tokens up to it and on the keys of their sequence. So a
slot holds a number that stands for just that: a node in a tree of prefixes. A wrong copy, a block
reused too early or a stale hash then shows as a wrong number in some slot.
"""

from collections import Counter
from collections.abc import Iterable

from paged_jax.block_manager import BlockManager
from paged_jax.block_moves import BlockMoves
from paged_jax.kv_events import BlockStored, CacheCleared, KVEvent
from paged_jax.request import Request
from paged_jax.scheduled_step import ScheduledStep
from paged_jax.scheduler import Scheduler

Holders = dict[int, set[str]]


class BlockModel:
    """The memory of one scheduler.

    Attributes:
      device, host: block -> a node a slot, None where nothing was written.
      hashed: hash -> the nodes of its block.
    """

    def __init__(self, block_size: int):
        self.block_size = block_size
        self.device: dict[int, list[int | None]] = {}
        self.host: dict[int, list[int | None]] = {}
        self.hashed: dict[bytes, list[int]] = {}
        self._tree: dict[object, int] = {}

    def lose_all(self) -> None:
        """Both memories hold anything."""
        self.device.clear()
        self.host.clear()

    def nodes(self, request: Request) -> list[int]:
        """What a sequence's keys and values must be, token by token."""
        keys = (request.lora_id, request.extra_keys, request.cache_salt)
        node = self._tree.setdefault(keys, len(self._tree))
        chain = []
        for token_id in request.token_ids:
            node = self._tree.setdefault((node, token_id), len(self._tree))
            chain.append(node)
        return chain

    def run(self, step: ScheduledStep, before: Holders, after: Holders) -> None:
        """Moves, then writes, then what each chunk reads.

        Args:
          step: as scheduled.
          before, after: who held each block before it was scheduled, and who does now.
        """
        self._move(step.moves)
        size = self.block_size
        writers: dict[int, str] = {}
        chains = [self.nodes(chunk.request) for chunk in step.chunks]
        for chunk, chain in zip(step.chunks, chains, strict=True):
            request = chunk.request
            for position in range(chunk.start, chunk.end):
                block = request.block_ids[position // size]
                writer = writers.setdefault(block, request.request_id)
                assert writer == request.request_id, f"two write into block {block}"
                self._slots(self.device, block)[position % size] = chain[position]
        for block, writer in writers.items():
            # Whoever shares a block that is written has joined in this very step.
            old = before.get(block, set()) & after.get(block, set())
            assert old <= {writer}, f"{writer} writes into block {block} of {old}"
        for chunk, chain in zip(step.chunks, chains, strict=True):
            self._note_hashes(chunk.request, chain)
            self._check(self.device, chunk.request.block_ids, chain[: chunk.end], chunk.request)

    def check(self, scheduler: Scheduler, requests: Iterable[Request]) -> None:
        """Whatever counts as computed, or is hashed, is there; between steps."""
        requests = list(requests)
        blocks = scheduler.blocks
        for request in requests:
            chain = self.nodes(request)
            self._note_hashes(request, chain)
            if request.block_ids:
                computed = chain[: request.num_computed_tokens]
                self._check(self.device, request.block_ids, computed, request)
                hashes = request.block_hashes[: request.num_hashed_blocks]
                known = map(blocks.pool.prefix_cache.hash_of, request.block_ids[: len(hashes)])
                assert list(known) == hashes, f"{request}: a full block lost its hash"
        self._check_pool(blocks.pool, self.device, [r.block_ids for r in requests], blocks)
        if blocks.host is None:
            return
        landing = {
            block for block in range(blocks.host.pool.num_blocks) if blocks.host.is_landing([block])
        }
        for request in requests:
            if request.host_block_ids and not landing.intersection(request.host_block_ids):
                computed = self.nodes(request)[: request.num_computed_tokens]
                self._check(self.host, request.host_block_ids, computed, request)
        self._check_pool(blocks.host.pool, self.host, [r.host_block_ids for r in requests])

    def _note_hashes(self, request: Request, chain: list[int]) -> None:
        size = self.block_size
        for i, block_hash in enumerate(request.block_hashes):
            block = chain[i * size : (i + 1) * size]
            assert self.hashed.setdefault(block_hash, block) == block, "one hash for two contents"

    def _check_pool(self, pool, memory, tables, blocks=None) -> None:
        """Counts are those of the tables, used and free are all, and hashes tell the truth."""
        held = Counter(block for table in tables for block in table)
        if blocks is not None:
            held.update(blocks.pins.blocks.values())
        free = pool.free_queue()
        assert sorted([*held, *free]) == list(range(1, pool.num_blocks)), "used + free is not all"
        assert all(pool.ref_counts[block] == held[block] for block in range(1, pool.num_blocks))
        for block in range(1, pool.num_blocks):
            block_hash = pool.prefix_cache.hash_of(block)
            if block_hash is not None:
                assert memory[block] == self.hashed[block_hash], f"block {block}: a false hash"

    def _move(self, moves: BlockMoves) -> None:
        device = {block: list(slots) for block, slots in self.device.items()}
        host = {block: list(slots) for block, slots in self.host.items()}
        sources = {source for source, _ in moves.copies}
        written = [dst for _, dst in moves.copies] + [dst for _, dst in moves.swap_in]
        assert len(set(written)) == len(written), "a block has two contents"
        assert sources.isdisjoint(dst for _, dst in moves.copies), "a copy of a copy"
        outgoing = [block for _, block in moves.swap_out]
        assert len(set(outgoing)) == len(outgoing), "a host block has two contents"
        assert 0 not in {*written, *outgoing, *sources}
        for source, block in moves.swap_out:
            self.host[block] = list(device[source])
        for source, block in moves.copies:
            self.device[block] = list(device[source])
        for source, block in moves.swap_in:
            self.device[block] = list(host[source])

    def _check(self, memory, table, chain, request) -> None:
        for position, node in enumerate(chain):
            block, slot = table[position // self.block_size], position % self.block_size
            found = self._slots(memory, block)[slot]
            assert found == node, f"{request}: token {position} is not in block {block}"

    def _slots(self, memory, block: int) -> list[int | None]:
        assert block != 0
        return memory.setdefault(block, [None] * self.block_size)


def holders_of(requests: Iterable[Request], pinned: Iterable[int] = ()) -> Holders:
    """Block -> ids of the requests whose tables hold it; "pin" for a pinned one."""
    holders: dict[int, set[str]] = {}
    for request in requests:
        for block in request.block_ids:
            holders.setdefault(block, set()).add(request.request_id)
    for block in pinned:
        holders.setdefault(block, set()).add("pin")
    return holders


class Follower:
    """A router's view of the prefix cache: what its events tell."""

    def __init__(self):
        self.hashes: dict[str, set[bytes]] = {"device": set(), "host": set()}

    def __call__(self, number: int, event: KVEvent) -> None:
        if isinstance(event, CacheCleared):
            for hashes in self.hashes.values():
                hashes.clear()
        elif isinstance(event, BlockStored):
            self.hashes[event.tier].update(event.block_hashes)
        else:
            self.hashes[event.tier].difference_update(event.block_hashes)

    def check(self, blocks: BlockManager) -> None:
        pools = {"device": blocks.pool}
        if blocks.host is not None:
            pools["host"] = blocks.host.pool
        for tier, pool in pools.items():
            hashes = map(pool.prefix_cache.hash_of, range(pool.num_blocks))
            assert self.hashes[tier] == set(hashes) - {None}, f"other hashes on the {tier}"
