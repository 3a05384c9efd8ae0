import pytest

from paged_jax.block_manager import BlockManager
from paged_jax.request import Request
from paged_jax.sampling_params import SamplingParams


def make_request(name: str, prompt: list[int]) -> Request:
    return Request(name, prompt, SamplingParams(max_tokens=100), max_model_len=1000)


def hashes_of(prompt: list[int], block_size: int = 4) -> list[bytes]:
    request = make_request("", prompt)
    request.extend_hashes(len(prompt) // block_size, block_size)
    return request.block_hashes


def compute(manager: BlockManager, prompt: list[int]) -> Request:
    request = make_request("r", prompt)
    assert manager.allocate(request)
    manager.cache_full_blocks(request, len(prompt))
    request.num_computed_tokens = len(prompt)
    return request


PROMPT = list(range(12))


def test_a_pinned_prefix_outlives_its_request_and_all_pressure():
    manager = BlockManager(10, 4)
    manager.free(compute(manager, PROMPT))
    manager.pins.pin(hashes_of(PROMPT[:8]), num_blocks_to_spare=5)
    assert manager.pins.blocks == dict(zip(hashes_of(PROMPT[:8]), [1, 2], strict=True))
    assert manager.pool.num_used_blocks == 2
    manager.pool.release(manager.pool.take(7))  # Whatever can be evicted is.
    assert manager.find_cached(make_request("b", PROMPT)) == [1, 2]
    assert not manager.reset_prefix_cache()
    manager.check_integrity([])
    manager.pins.unpin(hashes_of(PROMPT[:8]))
    assert manager.pool.num_used_blocks == 0
    assert manager.pool.free_queue()[-2:] == [2, 1]  # A prefix's tail goes before its head.
    assert manager.reset_prefix_cache()


def test_overlapping_pins_each_hold_what_they_name():
    manager = BlockManager(10, 4)
    manager.free(compute(manager, PROMPT))
    short, long = hashes_of(PROMPT[:8]), hashes_of(PROMPT)
    manager.pins.pin(short, num_blocks_to_spare=6)
    manager.pins.pin(long, num_blocks_to_spare=6)  # Counts 3 blocks, not 5.
    assert [manager.pool.ref_counts[b] for b in (1, 2, 3)] == [1, 1, 1]
    manager.pins.unpin(long)
    assert set(manager.pins.blocks.values()) == {1, 2}
    assert [manager.pool.ref_counts[b] for b in (1, 2, 3)] == [1, 1, 0]
    manager.pins.unpin(short)
    assert not manager.pins.blocks and not manager.pins.hashes
    assert manager.pool.num_used_blocks == 0


def test_what_is_not_computed_yet_is_pinned_when_it_is():
    manager = BlockManager(10, 4)
    manager.pins.pin(hashes_of(PROMPT), num_blocks_to_spare=6)
    assert not manager.pins.blocks and manager.pool.num_used_blocks == 0
    request = compute(manager, PROMPT)
    assert list(manager.pins.blocks.values()) == [1, 2, 3]
    assert [manager.pool.ref_counts[b] for b in (1, 2, 3)] == [2, 2, 2]
    manager.free(request)
    assert manager.pool.num_used_blocks == 3
    # After a fault the wish goes over to the new manager, the blocks do not.
    anew = BlockManager(10, 4)
    anew.take_over(manager)
    assert anew.pool.num_used_blocks == 0
    anew.free(compute(anew, PROMPT))
    assert anew.pool.num_used_blocks == 3


def test_a_pin_that_leaves_too_little_changes_nothing():
    manager = BlockManager(10, 4)
    manager.pins.pin(hashes_of(PROMPT[:8]), num_blocks_to_spare=6)
    with pytest.raises(
        ValueError, match=r"3 pinned blocks would leave 6 of 9, and .* needs 7; pin a shorter"
    ):
        manager.pins.pin(hashes_of(PROMPT), num_blocks_to_spare=7)
    assert list(manager.pins.hashes.values()) == [1, 1]
