import pytest

from paged_jax.block_pool import BlockPool


def test_free_queue_starts_in_id_order_without_the_null_block():
    pool = BlockPool(5)
    assert pool.free_queue() == [1, 2, 3, 4]
    assert pool.usage == 0.0
    assert pool.take(2) == [1, 2]
    assert pool.usage == 2 / 4


def test_asking_for_too_many_names_both_numbers_and_takes_nothing():
    pool = BlockPool(4)
    with pytest.raises(ValueError, match=r"4 blocks asked for, 3 are free"):
        pool.take(4)
    assert pool.free_queue() == [1, 2, 3]


def test_a_block_without_hash_goes_to_the_front_one_with_hash_to_the_back():
    pool = BlockPool(6)
    taken = pool.take(3)
    pool.prefix_cache.insert(b"one", taken[0])
    pool.release(taken)
    # Tail first: 3 then 2 to the front, then 1, which carries a hash, to the back.
    assert pool.free_queue() == [2, 3, 4, 5, 1]


def test_touch_lifts_a_free_block_and_counts_holders():
    pool = BlockPool(4)
    pool.prefix_cache.insert(b"x", 2)
    pool.touch([2])
    pool.touch([2])
    assert pool.free_queue() == [1, 3]
    pool.release([2])
    assert pool.free_queue() == [1, 3]
    pool.release([2])
    assert pool.free_queue() == [1, 3, 2]


def test_taking_a_block_drops_its_hash():
    pool = BlockPool(3)
    pool.prefix_cache.insert(b"x", 1)
    assert pool.take(1) == [1]
    assert pool.prefix_cache.match([b"x"]) == []


def test_releasing_a_free_block_or_the_null_block_is_an_error():
    pool = BlockPool(3)
    for block_id in (0, 1):
        with pytest.raises(ValueError, match="more often than it was taken"):
            pool.release([block_id])


def test_reset_is_refused_while_a_block_is_held():
    pool = BlockPool(3)
    taken = pool.take(1)
    pool.prefix_cache.insert(b"x", taken[0])
    assert not pool.reset_prefix_cache()
    assert pool.prefix_cache.match([b"x"]) == taken
    pool.release(taken)
    assert pool.reset_prefix_cache()
    assert pool.prefix_cache.match([b"x"]) == []


def test_a_block_that_is_held_back_is_neither_taken_nor_lost():
    pool = BlockPool(4)
    [block] = pool.take(1)
    pool.hold_back(block)
    pool.hold_back(block)
    pool.release([block])
    # Nobody holds it, and two copies are still to read it.
    assert pool.free_queue() == [2, 3] and pool.num_used_blocks == 1
    pool.let_go(block)
    assert pool.free_queue() == [2, 3]
    pool.let_go(block)
    assert pool.free_queue() == [1, 2, 3] and pool.num_used_blocks == 0


def test_a_hit_on_a_block_that_is_held_back():
    pool = BlockPool(4)
    [block] = pool.take(1)
    pool.prefix_cache.insert(b"x", block)
    pool.hold_back(block)
    pool.release([block])
    assert pool.num_free_among([block, 2]) == 1  # Not free, though its count is 0.
    pool.touch([block])
    assert pool.ref_counts[block] == 1
    pool.let_go(block)
    assert pool.free_queue() == [2, 3]
    pool.release([block])
    assert pool.free_queue() == [2, 3, 1]


def test_evictions_are_told_once_the_block_is_taken():
    told = []
    pool = BlockPool(4, on_evict=lambda *event: told.append((*event, pool.ref_counts[event[0]])))
    pool.prefix_cache.insert(b"x", 2)
    assert pool.take(3) == [1, 2, 3]
    assert told == [(2, b"x", 1)]


def test_integrity_tells_a_leak_a_wrong_count_and_the_null_block():
    pool = BlockPool(4)
    pool.take(2)
    pool.check_integrity({1: 1, 2: 1})
    for held, message in (
        ({1: 1}, "used \\+ free is not all"),
        ({1: 1, 2: 2}, "block 2: a wrong count"),
        ({0: 1, 1: 1}, "null block"),
    ):
        with pytest.raises(AssertionError, match=message):
            pool.check_integrity(held)
