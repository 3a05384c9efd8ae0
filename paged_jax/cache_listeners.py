"""Who hears of what the prefix cache gains and loses: a router's events, and the miss journal."""

from __future__ import annotations

from paged_jax.kv_events import BlockRemoved, BlockStored, CacheCleared, KVEvents, Tier
from paged_jax.prefix_journal import PrefixJournal
from paged_jax.request import Request


class CacheListeners:
    """Passes on what happens to hashed blocks.

    Attributes:
      events: for whoever follows; nothing is built while nobody does.
      journal: remembers evictions, to explain misses by; None for no journal.
    """

    def __init__(self, block_size: int):
        self.block_size = block_size
        self.events = KVEvents()
        self.journal: PrefixJournal | None = None

    def stored(self, request: Request, index: int) -> None:
        """Block `index` of a request's table carries its hash now."""
        block_hash = request.block_hashes[index]
        if self.journal is not None:
            self.journal.forget_evicted(block_hash)
        if self.events:
            tokens = request.token_ids[index * self.block_size : (index + 1) * self.block_size]
            parent = request.block_hashes[index - 1] if index else None
            keys = request.extra_keys_of(index)
            self.events.publish(
                BlockStored((block_hash,), parent, tuple(tokens), self.block_size, keys, "device")
            )

    def restored(self, block_hash: bytes) -> None:
        """A block on the device holds a hash's tokens again; which tokens is not known any more."""
        if self.journal is not None:
            self.journal.forget_evicted(block_hash)
        if self.events:
            self.events.publish(
                BlockStored((block_hash,), None, (), self.block_size, None, "device")
            )

    def stored_on_host(self, block_hash: bytes) -> None:
        """The host holds a hash's tokens now."""
        if self.events:
            self.events.publish(BlockStored((block_hash,), None, (), self.block_size, None, "host"))

    def removed(self, block_hash: bytes, tier: Tier, *, is_gone: bool) -> None:
        """A tier holds a hash no more; `is_gone` if no other does."""
        if self.events:
            self.events.publish(BlockRemoved((block_hash,), tier))
        if self.journal is not None and is_gone:
            self.journal.record_evicted(block_hash)

    def cleared(self) -> None:
        """Every hash is forgotten."""
        if self.journal is not None:
            self.journal.record_cleared()
        if self.events:
            self.events.publish(CacheCleared())
