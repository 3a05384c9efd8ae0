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
