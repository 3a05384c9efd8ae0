import json
import logging

import pytest

from paged_jax.kv_events import BlockRemoved, BlockStored, CacheCleared, KVEvents
from paged_jax.prefix_cache import hash_block


def stored(block_hashes=(b"\x01",), parent_hash=None, token_ids=(1, 2), **options):
    options = {"extra_keys": None, "tier": "device", **options}
    return BlockStored(block_hashes, parent_hash, token_ids, block_size=2, **options)


def removed(number: int) -> BlockRemoved:
    return BlockRemoved((bytes([number]),), "device")


class Router:
    """A follower as one would write it: it mirrors each engine's cache from the events alone."""

    def __init__(self):
        self.tiers: dict[bytes, set[str]] = {}
        self.next_number = 0

    def follow(self, numbered):
        for number, event in numbered:
            assert number == self.next_number, "an event was lost"
            self.next_number += 1
            match event:
                case BlockStored():
                    self.check_hashes(event)
                    for block_hash in event.block_hashes:
                        self.tiers.setdefault(block_hash, set()).add(event.tier)
                case BlockRemoved():
                    for block_hash in event.block_hashes:
                        self.tiers[block_hash].remove(event.tier)
                case CacheCleared():
                    self.tiers.clear()

    def check_hashes(self, event: BlockStored):
        """The event has all that it takes to compute the hashes."""
        parent, size = event.parent_hash, event.block_size
        for i, block_hash in enumerate(event.block_hashes):
            tokens = event.token_ids[i * size : (i + 1) * size]
            parent = hash_block(parent, tokens, event.extra_keys)
            assert parent == block_hash

    def held(self):
        return {block_hash: tiers for block_hash, tiers in self.tiers.items() if tiers}


def test_nobody_listens_and_the_block_manager_need_not_build_events():
    events = KVEvents()
    assert not events
    unsubscribe = events.subscribe(lambda number, event: None)
    assert events
    unsubscribe()
    unsubscribe()
    assert not events
    queue = events.open_queue()
    assert events
    queue.close()
    assert not events


def test_a_router_mirrors_the_cache():
    events = KVEvents()
    queue, router = events.open_queue(), Router()
    first = hash_block(None, (1, 2), ("lora",))
    second = hash_block(first, (3, 4), ("lora",))
    third = hash_block(second, (5, 6), ("lora",))
    keys = ("lora",)
    events.publish(stored((first, second), None, (1, 2, 3, 4), extra_keys=keys))
    events.publish(stored((third,), second, (5, 6), extra_keys=keys))
    events.publish(stored((second,), first, (3, 4), extra_keys=keys, tier="host"))
    router.follow(queue.poll())
    assert router.held() == {first: {"device"}, second: {"device", "host"}, third: {"device"}}
    events.publish(BlockRemoved((third, second), "device"))
    router.follow(queue.poll())
    assert router.held() == {first: {"device"}, second: {"host"}}
    events.publish(CacheCleared())
    router.follow(queue.poll())
    assert router.held() == {}
    assert queue.poll() == []


def test_numbers_count_from_0_and_are_the_same_for_all():
    events = KVEvents()
    seen: list[tuple[str, int]] = []
    events.subscribe(lambda number, event: seen.append(("a", number)))
    events.publish(removed(0))
    events.subscribe(lambda number, event: seen.append(("b", number)))
    queue = events.open_queue()
    events.publish(removed(1))
    events.publish(removed(2))
    assert seen == [("a", 0), ("a", 1), ("b", 1), ("a", 2), ("b", 2)]
    assert queue.poll() == [(1, removed(1)), (2, removed(2))]


def test_a_full_queue_drops_the_oldest_and_says_so():
    events = KVEvents()
    queue = events.open_queue(max_events=3)
    for number in range(5):
        events.publish(removed(number))
    assert len(queue) == 3
    assert queue.num_dropped == 2
    assert queue.poll() == [(number, removed(number)) for number in (2, 3, 4)]
    events.publish(removed(5))
    assert queue.num_dropped == 2
    queue.close()
    events.publish(removed(6))
    assert queue.poll() == [(5, removed(5))]
    with pytest.raises(ValueError, match="max_events=0"):
        events.open_queue(max_events=0)


def test_a_callback_that_raises_is_logged_and_harms_nobody(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("paged_jax"), "propagate", True)

    def faulty_router(number, event):
        raise RuntimeError("no route")

    events = KVEvents()
    seen = []
    events.subscribe(lambda number, event: seen.append(number))
    events.subscribe(faulty_router)
    queue = events.open_queue()
    with caplog.at_level(logging.ERROR, logger="paged_jax"):
        events.publish(removed(0))
        events.publish(removed(1))
    assert seen == [0, 1]
    assert [number for number, _ in queue.poll()] == [0, 1]
    (record,) = caplog.records
    assert "faulty_router" in record.getMessage() and "no route" in caplog.text


def test_a_callback_may_unsubscribe_itself_and_others():
    events = KVEvents()
    seen = []

    def first(number, event):
        seen.append(number)
        unsubscribe_first()
        unsubscribe_second()

    unsubscribe_first = events.subscribe(first)
    unsubscribe_second = events.subscribe(lambda number, event: seen.append("second"))
    events.publish(removed(0))
    events.publish(removed(1))
    assert seen == [0]
    with pytest.raises(TypeError, match="callback=3"):
        events.subscribe(3)  # pyright: ignore[reportArgumentType]


def test_an_event_that_a_callback_causes_comes_after_the_one_at_hand_for_everybody():
    events = KVEvents()
    seen = []
    events.subscribe(lambda number, event: events.publish(CacheCleared()) if number == 0 else None)
    events.subscribe(lambda number, event: seen.append((number, type(event))))
    events.publish(removed(0))
    assert seen == [(0, BlockRemoved), (1, CacheCleared)]


def test_an_interrupt_in_a_callback_reaches_the_caller_and_leaves_a_gap():
    events = KVEvents()
    seen = []

    def interrupted(number, event):
        if number == 0:
            raise KeyboardInterrupt

    events.subscribe(interrupted)
    events.subscribe(lambda number, event: seen.append(number))
    with pytest.raises(KeyboardInterrupt):
        events.publish(removed(0))
    events.publish(removed(1))
    assert seen == [1]


def test_json_has_hashes_in_hexadecimal():
    event = stored((b"\x0f\xa0", b"\x01"), b"\xff", (1, 2, 3, 4), extra_keys=("lora", None))
    assert json.loads(event.to_json()) == event.to_dict()
    assert event.to_dict() == {
        "event": "block_stored",
        "block_hashes": ["0fa0", "01"],
        "parent_hash": "ff",
        "token_ids": [1, 2, 3, 4],
        "block_size": 2,
        "extra_keys": ["lora", None],
        "tier": "device",
    }
    assert stored().to_dict()["parent_hash"] is None
    gone = {"event": "block_removed", "block_hashes": ["07"], "tier": "device"}
    assert removed(7).to_dict() == gone
    assert CacheCleared().to_json() == '{"event":"cache_cleared"}'
