from paged_jax.block_manager import BlockManager
from paged_jax.block_moves import BlockMoves
from paged_jax.host_tier import HostTier
from paged_jax.request import Request
from paged_jax.sampling_params import SamplingParams


def make_request(name: str, prompt: list[int]) -> Request:
    return Request(name, prompt, SamplingParams(max_tokens=100), max_model_len=1000)


def serve(manager: BlockManager, prompt: list[int]) -> tuple[Request, BlockMoves]:
    """Admits, computes and ends a request; it, and the moves of its step."""
    request = make_request("r", prompt)
    assert manager.allocate(request)
    manager.cache_full_blocks(request, len(prompt))
    moves = manager.take_moves()
    request.num_computed_tokens = len(prompt)
    manager.free(request)
    return request, moves


def test_put_takes_all_or_nothing():
    host = HostTier(3)
    assert host.put([(11, None), (12, b"x")]) == [1, 2]
    assert host.put([(13, None), (14, None)]) is None
    assert host.pool.num_free_blocks == 1
    # Of what the host holds already nothing is moved; it is held once more.
    assert host.put([(15, b"x"), (16, None)]) == [2, 3]
    assert host.pool.ref_counts == [0, 1, 2, 1]
    assert host.take_outgoing() == ((11, 1), (12, 2), (16, 3))
    assert host.take_outgoing() == ()


def test_a_cached_block_that_is_put_again_does_not_count_as_room():
    host = HostTier(2)
    assert host.offload(11, b"x")
    host.take_outgoing()
    assert host.pool.num_free_blocks == 2  # Free, and hashed.
    assert host.put([(12, b"x"), (13, None), (14, None)]) is None
    assert host.find(b"x") == 1
    assert host.put([(12, b"x"), (13, None)]) == [1, 2]
    assert host.take_outgoing() == ((13, 2),)


def test_what_lands_in_a_step_can_be_hit_in_the_next():
    host = HostTier(3)
    [block] = host.put([(11, b"x")]) or []
    assert host.is_landing([block]) and host.holds(b"x") and host.find(b"x") is None
    host.take_outgoing()
    assert not host.is_landing([block]) and host.holds(b"x") and host.find(b"x") == block


def test_what_is_released_before_it_lands_is_not_moved():
    host = HostTier(3)
    table = host.put([(11, b"x"), (12, b"y")]) or []
    assert host.put([(13, b"x")]) == [1]
    host.release(table)
    assert host.holds(b"x") and not host.holds(b"y")
    assert host.pool.free_queue() == [2, 3]
    assert host.take_outgoing() == ((11, 1),)
    host.release([1])
    assert host.pool.num_used_blocks == 0 and host.find(b"x") == 1


def test_offload_keeps_the_most_recently_used():
    gone = []
    host = HostTier(2, on_evict=lambda block, block_hash: gone.append((block, block_hash)))
    for i, block_hash in enumerate((b"x", b"y")):
        assert host.offload(11 + i, block_hash)
    # Both land in this step, so neither can be pushed out in it.
    assert not host.offload(13, b"z")
    assert host.take_outgoing() == ((11, 1), (12, 2))
    assert not host.offload(14, b"x")  # Known: not moved, and now used later than y.
    assert host.offload(13, b"z")
    assert gone == [(2, b"y")]
    assert host.take_outgoing() == ((13, 2),)
    assert (host.find(b"x"), host.find(b"y"), host.find(b"z")) == (1, None, 2)


def test_an_evicted_prefix_goes_to_the_host_and_a_hit_brings_it_back():
    manager = BlockManager(4, 4, num_host_blocks=4, enable_host_prefix_cache=True)
    prompt = list(range(8))
    request, moves = serve(manager, prompt)
    assert not moves
    assert manager.pool.free_queue() == [3, 2, 1]
    # Evicts both, the prefix's tail first.
    _, moves = serve(manager, list(range(50, 59)))
    assert moves == BlockMoves(swap_out=((2, 1), (1, 2)))
    assert manager.stats.num_evictions == 2 and manager.stats.host_offload_tokens == 8
    longer = make_request("b", [*prompt, 99])
    assert manager.find_cached(longer) == [-2, -1]
    assert manager.allocate(longer)
    assert longer.num_computed_tokens == longer.num_cached_tokens == 8
    moves = manager.take_moves()
    assert moves.swap_in == ((2, longer.block_ids[0]), (1, longer.block_ids[1]))
    assert manager.stats.num_hit_tokens == manager.stats.num_host_hit_tokens == 8
    # The device's copies can be hit as well from now on, and the host's still.
    find = manager.pool.prefix_cache.find
    assert [find(h) for h in request.block_hashes] == list(longer.block_ids[:2])
    assert manager.host is not None and manager.host.find(request.block_hashes[0]) == 2
    manager.check_integrity([longer])


def test_a_hit_on_the_host_is_not_pushed_out_by_what_its_admission_evicts():
    manager = BlockManager(4, 4, num_host_blocks=1, enable_host_prefix_cache=True)
    head = list(range(5))
    _, _ = serve(manager, head)
    _, moves = serve(manager, list(range(50, 59)))
    assert moves == BlockMoves(swap_out=((1, 1),))
    request = make_request("b", [*head, *[7] * 6])
    assert manager.allocate(request)
    assert request.num_computed_tokens == 4
    assert manager.take_moves() == BlockMoves(swap_in=((1, request.block_ids[0]),))
    assert manager.pool.prefix_cache.hash_of(request.block_ids[0]) == request.block_hashes[0]
    assert manager.stats.num_host_evictions == 0


def test_without_the_host_prefix_cache_evicted_prefixes_are_gone():
    manager = BlockManager(4, 4, num_host_blocks=4)
    serve(manager, list(range(8)))
    _, moves = serve(manager, list(range(50, 59)))
    assert not moves and manager.find_cached(make_request("b", list(range(9)))) == []
