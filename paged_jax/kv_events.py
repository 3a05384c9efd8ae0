"""What the prefix cache gains and loses, told to whoever follows it, such as a router.

A router that knows which engine holds which prefix sends a request where it hits most. It learns
that from three events: blocks stored, blocks removed, the cache cleared. The idea is that of
vLLM's KV events. Events are numbered without gaps, so a follower that misses one notices.
"""

from __future__ import annotations

import dataclasses
import json
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Literal

from paged_jax.log import logger
from paged_jax.prefix_cache import ExtraKeys

Tier = Literal["device", "host"]


class _Event:
    """Gives an event its dict and JSON forms."""

    kind: str

    def to_dict(self) -> dict[str, Any]:
        """The event as JSON types: `event` names its kind, hashes are hexadecimal."""
        fields = dataclasses.fields(self)  # pyright: ignore[reportArgumentType]
        return {"event": self.kind} | {f.name: _plain(getattr(self, f.name)) for f in fields}

    def to_json(self) -> str:
        """`to_dict` as one line of JSON."""
        return json.dumps(self.to_dict(), separators=(",", ":"))


@dataclasses.dataclass(frozen=True)
class BlockStored(_Event):
    """Blocks that a prompt can now hit: consecutive ones of one chain.

    Attributes:
      block_hashes: the chained hash of each block, in order.
      parent_hash: hash of the block before the first of them; None if that begins a prompt.
      token_ids: the tokens of all of them, block_size for each.
      block_size: tokens a block.
      extra_keys: what the hash of each of them covers besides tokens (LoRA id, the user's own keys,
        cache salt); None if nothing. Blocks of other keys, as a salted prompt's first, come apart.
      tier: the memory that holds them. Of what moves to the host only hash and size are told: the
        parent, tokens and keys came when the device stored it.
    """

    kind = "block_stored"

    block_hashes: tuple[bytes, ...]
    parent_hash: bytes | None
    token_ids: tuple[int, ...]
    block_size: int
    extra_keys: ExtraKeys | None
    tier: Tier


@dataclasses.dataclass(frozen=True)
class BlockRemoved(_Event):
    """Blocks that left a tier. They may still stand in the other one."""

    kind = "block_removed"

    block_hashes: tuple[bytes, ...]
    tier: Tier


@dataclasses.dataclass(frozen=True)
class CacheCleared(_Event):
    """Every block of every tier was forgotten at once."""

    kind = "cache_cleared"


KVEvent = BlockStored | BlockRemoved | CacheCleared
Callback = Callable[[int, KVEvent], object]


class EventQueue:
    """Keeps events until they are polled; when it is full, the oldest go.

    It may be polled from another thread than the engine's. Made by `KVEvents.open_queue`.

    Attributes:
      num_dropped: events that went unread; their numbers are missing among those polled.
    """

    def __init__(self, max_events: int):
        if max_events < 1:
            raise ValueError(f"max_events={max_events}: a queue holds at least one event")
        self.num_dropped = 0
        self._events: deque[tuple[int, KVEvent]] = deque(maxlen=max_events)
        self._lock = threading.Lock()
        self._unsubscribe: Callable[[], None] = lambda: None

    def __len__(self) -> int:
        return len(self._events)

    def poll(self) -> list[tuple[int, KVEvent]]:
        """Takes all events that wait, oldest first, each with its number."""
        with self._lock:
            events = list(self._events)
            self._events.clear()
        return events

    def close(self) -> None:
        """Ends the subscription. What waits can still be polled."""
        self._unsubscribe()

    def _put(self, number: int, event: KVEvent) -> None:
        with self._lock:
            self.num_dropped += len(self._events) == self._events.maxlen
            self._events.append((number, event))


class KVEvents:
    """Numbers events and hands them to subscribers; false while there are none.

    Numbers count from 0 the events published, the same for all subscribers. One that joins late
    starts at a later number and knows nothing of what is stored already: it should either start
    with the engine, or take the missing blocks for absent, which costs hits but no harm.

    A publisher checks `if events:` first, so that no event is even built when nobody listens.
    Subscribing and publishing belong to the engine's thread.
    """

    def __init__(self):
        self._subscribers: dict[int, Callback] = {}
        self._next_key = 0
        self._next_number = 0
        self._pending: deque[tuple[int, KVEvent]] = deque()
        self._delivering = False

    def __bool__(self) -> bool:
        return bool(self._subscribers)

    def subscribe(self, callback: Callback) -> Callable[[], None]:
        """Has `callback(number, event)` called at each event, in the engine's thread.

        A callback that raises is logged and unsubscribed; neither the engine nor the other
        subscribers notice.

        Returns:
          A function that ends the subscription; calling it again does nothing.
        """
        if not callable(callback):
            raise TypeError(f"callback={callback!r}: a function of (number, event) is needed")
        key = self._next_key
        self._next_key += 1
        self._subscribers[key] = callback

        def unsubscribe() -> None:
            self._subscribers.pop(key, None)

        return unsubscribe

    def open_queue(self, max_events: int = 10_000) -> EventQueue:
        """Subscribes a queue that is polled at leisure, of at most `max_events` events."""
        queue = EventQueue(max_events)
        queue._unsubscribe = self.subscribe(queue._put)
        return queue

    def publish(self, event: KVEvent) -> None:
        """Gives the event the next number and hands it to every subscriber.

        An event that a callback causes is delivered after the one at hand has reached everybody,
        so that all see the same order.
        """
        self._pending.append((self._next_number, event))
        self._next_number += 1
        if self._delivering:
            return
        self._delivering = True
        try:
            while self._pending:
                self._deliver(*self._pending.popleft())
        finally:
            self._delivering = False

    def _deliver(self, number: int, event: KVEvent) -> None:
        for key, callback in list(self._subscribers.items()):
            if key not in self._subscribers:  # an earlier callback ended this subscription
                continue
            try:
                callback(number, event)
            except Exception:
                self._subscribers.pop(key, None)
                name = getattr(callback, "__qualname__", type(callback).__qualname__)
                logger.exception(
                    "KV event callback %s raised at event %d and was unsubscribed", name, number
                )


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex()
    return [_plain(item) for item in value] if isinstance(value, tuple) else value
