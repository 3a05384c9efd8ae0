"""Forks, copy-on-write, folding and swapping: which blocks, in which order, with which counts."""

import pytest

from paged_jax.block_manager import BlockManager
from paged_jax.block_moves import BlockMoves
from paged_jax.request import Request
from paged_jax.sampling_params import SamplingParams

PROMPT = list(range(10))  # Two full blocks of four, and a half one.


def make_request(name: str, prompt: list[int], **fields) -> Request:
    params = SamplingParams(max_tokens=1000)
    return Request(name, prompt, params, max_model_len=100_000, **fields)


def computed(manager: BlockManager, name: str, prompt: list[int]) -> Request:
    """A sequence whose tokens are all computed, in an earlier step."""
    request = make_request(name, prompt)
    assert manager.allocate(request)
    manager.cache_full_blocks(request, request.num_tokens)
    request.num_computed_tokens = request.num_tokens
    manager.take_moves()
    return request


def forked(manager: BlockManager, parent: Request, name: str) -> Request:
    child = make_request(name, parent.token_ids)
    manager.fork(parent, child)
    return child


def write(manager: BlockManager, request: Request, token_id: int) -> bool:
    request.token_ids.append(token_id)
    return manager.append_slots(request, request.num_tokens)


def table(request: Request) -> list[int]:
    return list(request.block_ids)


def test_each_writer_gets_a_copy_and_the_last_keeps_the_original():
    manager = BlockManager(12, 4)
    a = computed(manager, "a", PROMPT)
    b, c = forked(manager, a, "b"), forked(manager, a, "c")
    assert table(a) == table(b) == table(c) == [1, 2, 3]
    assert manager.pool.ref_counts[1:4] == [3, 3, 3]
    assert b.num_computed_tokens == 10
    for request, expected in ((b, [1, 2, 4]), (a, [1, 2, 5]), (c, [1, 2, 3])):
        assert write(manager, request, 50)
        assert table(request) == expected
    assert manager.pool.ref_counts[1:6] == [3, 3, 1, 1, 1]
    assert manager.take_moves() == BlockMoves(copies=((3, 4), (3, 5)))
    assert not manager.take_moves()
    assert manager.stats.num_cow_copies == 2
    for request in (a, b, c):
        manager.free(request)
    assert manager.pool.num_used_blocks == 0


def test_a_full_block_is_shared_without_a_copy():
    manager = BlockManager(12, 4)
    a = computed(manager, "a", PROMPT[:8])
    b = forked(manager, a, "b")
    for request, expected in ((a, [1, 2, 3]), (b, [1, 2, 4])):
        assert write(manager, request, 50)
        assert table(request) == expected
    assert not manager.take_moves()


def test_a_fork_of_fewer_tokens_takes_fewer_blocks():
    manager = BlockManager(12, 4)
    a = computed(manager, "a", PROMPT)
    b = make_request("b", PROMPT[:6])
    manager.fork(a, b, 5)
    assert (table(b), b.num_computed_tokens, b.num_hashed_blocks) == ([1, 2], 5, 1)
    # The block is full and hashed for a; b writes elsewhere.
    assert manager.append_slots(b, 6)
    assert table(b) == [1, 4]
    assert manager.take_moves().copies == ((2, 4),)
    assert manager.pool.prefix_cache.hash_of(2) == a.block_hashes[1]
    for num_tokens, taker in ((11, make_request("c", PROMPT)), (13, make_request("d", [1] * 20))):
        with pytest.raises(ValueError, match=rf"num_tokens={num_tokens} cannot be shared"):
            manager.fork(a, taker, num_tokens)
    with pytest.raises(ValueError, match="'b' holds blocks already"):
        manager.fork(a, b)


def test_a_write_without_room_for_its_copy_changes_nothing():
    manager = BlockManager(4, 4)
    a = computed(manager, "a", PROMPT)
    b = forked(manager, a, "b")
    assert not write(manager, b, 50)
    assert table(b) == [1, 2, 3] and manager.pool.ref_counts[3] == 2
    assert not manager.take_moves() and manager.stats.num_cow_copies == 0
    manager.free(a)
    assert manager.append_slots(b, 11)  # Alone now, it needs no copy.
    assert table(b) == [1, 2, 3]


def test_the_source_of_a_copy_is_not_given_out_in_the_same_step():
    manager = BlockManager(6, 4)
    a = computed(manager, "a", PROMPT)
    b = forked(manager, a, "b")
    assert write(manager, b, 50)
    manager.free(a)
    # Block 3 is nobody's now, and the copy has still to read it.
    assert manager.pool.free_queue() == [5] and manager.pool.ref_counts[3] == 0
    assert manager.take_moves().copies == ((3, 4),)
    assert manager.pool.free_queue() == [3, 5]
    manager.check_integrity([b])


def test_a_copy_is_forgotten_with_its_request():
    manager = BlockManager(6, 4)
    a = computed(manager, "a", PROMPT)
    b = forked(manager, a, "b")
    assert write(manager, b, 50)
    manager.free(b)
    assert manager.stats.num_cow_copies == 0
    assert manager.pool.free_queue() == [4, 5]
    manager.free(a)
    assert manager.pool.num_used_blocks == 0, "the source is still held back"
    assert not manager.take_moves()


def test_a_copy_of_a_copy_reads_where_its_content_is():
    manager = BlockManager(12, 4)
    a = computed(manager, "a", PROMPT)
    b = forked(manager, a, "b")
    assert write(manager, b, 50)
    # In the same step a late one forks from b, whose own copy is not made yet.
    c = make_request("c", [*PROMPT, 60], fork_of=b)
    assert manager.allocate(c)
    assert (table(b), table(c), c.num_computed_tokens) == ([1, 2, 4], [1, 2, 5], 10)
    assert manager.take_moves().copies == ((3, 4), (3, 5))


def test_a_copy_of_what_comes_from_the_host_comes_from_the_host():
    manager = BlockManager(12, 4, enable_prefix_caching=False, num_host_blocks=8)
    a = computed(manager, "a", PROMPT)
    assert manager.swap_out(a)
    manager.take_moves()
    assert manager.allocate(a)
    late = make_request("late", [*PROMPT, 60], fork_of=a)
    assert manager.allocate(late)
    assert (table(a), table(late)) == ([1, 2, 3], [1, 2, 4])
    # Copies come before swaps in, so the fourth block is swapped in, too.
    assert manager.take_moves() == BlockMoves(swap_in=((1, 1), (2, 2), (3, 3), (3, 4)))
    assert manager.host is not None and manager.host.pool.num_used_blocks == 0
    manager.check_integrity([a, late])


def test_going_on_from_a_held_sequence_takes_its_blocks_over():
    manager = BlockManager(12, 4)
    held = computed(manager, "held", PROMPT)
    more = make_request("more", [*PROMPT, 60, 61], fork_of=held, takes_over=True)
    assert manager.allocate(more)
    assert (table(held), held.num_computed_tokens) == ([], 0)
    assert (table(more), more.num_computed_tokens) == ([1, 2, 3], 10)
    assert not manager.take_moves() and manager.pool.num_used_blocks == 3
    # Forks ask nothing of the prefix cache.
    assert manager.stats.num_query_tokens == 10


def test_going_on_beside_others_copies_what_they_hold():
    manager = BlockManager(5, 4)
    held = computed(manager, "held", PROMPT)
    twin = forked(manager, held, "twin")
    more = make_request("more", [*PROMPT, 60, 61], fork_of=held, takes_over=True)
    assert manager.allocate(more)
    assert table(more) == [1, 2, 4]
    assert manager.take_moves().copies == ((3, 4),)
    # A second one needs one block more, unless it may take over the last holder's.
    beside = make_request("beside", [*PROMPT, 70], fork_of=twin)
    assert not manager.can_allocate(beside) and not manager.allocate(beside)
    beside.takes_over = True
    assert manager.can_allocate(beside) and manager.allocate(beside)
    assert table(beside) == [1, 2, 3] and not table(twin)


def test_late_children_share_what_their_running_parent_has():
    manager = BlockManager(12, 4)
    parent = computed(manager, "parent", PROMPT)
    for token in (50, 51, 52):
        assert write(manager, parent, token)
        parent.num_computed_tokens += 1
    child = make_request("child", PROMPT, fork_of=parent)
    assert manager.allocate(child)
    # All but the last token of the prompt, whose logits it wants.
    assert (table(child), child.num_computed_tokens) == ([1, 2, 5], 9)
    assert table(parent) == [1, 2, 3, 4]
    assert manager.take_moves().copies == ((3, 5),)


def test_equal_full_blocks_are_folded_into_the_first():
    manager = BlockManager(12, 4)
    a, b = (computed(manager, name, [7, index]) for index, name in enumerate("ab"))
    for request in (a, b):
        request.token_ids[:] = [1, 2]  # As if both had come to the same tokens apart.
        request.num_computed_tokens = 2
        for token in (3, 4, 5):
            assert write(manager, request, token)
        manager.cache_full_blocks(request, 4)
        request.num_computed_tokens = 5
    assert (table(a), table(b)) == ([1, 3], [2, 4])
    for request in (a, b):
        manager.fold_duplicates(request)
    assert (table(a), table(b)) == ([1, 3], [1, 4])
    assert manager.pool.ref_counts[1] == 2
    assert manager.pool.free_queue()[0] == 2 and manager.pool.prefix_cache.hash_of(2) is None
    assert manager.stats.num_folded_blocks == 1
    manager.check_integrity([a, b])


def test_a_block_that_others_hold_is_not_folded():
    manager = BlockManager(12, 4)
    a = computed(manager, "a", [1, 2, 3, 4])
    b = make_request("b", [1, 2, 3, 4, 5])
    b.block_ids.extend(manager.pool.take(2))
    b.num_computed_tokens = 5
    manager.cache_full_blocks(b, 5)
    c = forked(manager, b, "c")
    manager.fold_duplicates(b)
    assert (table(a), table(b), table(c)) == ([1], [2, 3], [2, 3])
    assert manager.pool.prefix_cache.hash_of(2) == a.block_hashes[0]
    assert manager.stats.num_folded_blocks == 0


def test_forks_that_are_swapped_share_on_the_host_and_again_on_the_device():
    manager = BlockManager(8, 4, num_host_blocks=8)
    a = computed(manager, "a", PROMPT)
    b = forked(manager, a, "b")
    assert manager.swap_out(a) and manager.swap_out(b)
    # The full blocks go once; of the half one nobody knows on the host that it is the same.
    assert list(a.host_block_ids) == [1, 2, 3] and list(b.host_block_ids) == [1, 2, 4]
    assert manager.take_moves() == BlockMoves(swap_out=((1, 1), (2, 2), (3, 3), (3, 4)))
    assert manager.pool.num_used_blocks == 0 and a.num_computed_tokens == 10
    assert manager.stats.swap_out_tokens == 20
    manager.pool.release(manager.pool.take(7))  # Nothing is left on the device.
    assert manager.allocate(a) and manager.allocate(b)
    assert table(a)[:2] == table(b)[:2] and table(a)[2] != table(b)[2]
    assert manager.pool.num_used_blocks == 4
    moves = manager.take_moves()
    assert [host for host, _ in moves.swap_in] == [1, 2, 3, 4]
    assert [device for _, device in moves.swap_in] == [*table(a), table(b)[2]]
    assert manager.host is not None and manager.host.pool.num_used_blocks == 0
    assert manager.stats.swap_in_tokens == 12
    manager.check_integrity([a, b])


def test_a_swap_leaves_out_what_the_device_still_has():
    manager = BlockManager(8, 4, num_host_blocks=8)
    a = computed(manager, "a", PROMPT)
    assert manager.swap_out(a)
    manager.take_moves()
    assert manager.allocate(a)
    assert table(a)[:2] == [1, 2]
    assert manager.take_moves() == BlockMoves(swap_in=((3, 3),))
    assert manager.stats.swap_in_tokens == 2


def test_swap_takes_all_or_nothing_and_waits_for_its_landing():
    manager = BlockManager(8, 4, num_host_blocks=2)
    a = computed(manager, "a", PROMPT)
    assert not manager.swap_out(a)
    assert table(a) == [1, 2, 3] and not a.is_swapped and not manager.take_moves()
    roomy = BlockManager(8, 4, num_host_blocks=3)
    a = computed(roomy, "a", PROMPT)
    assert roomy.swap_out(a)
    assert not roomy.allocate(a), "what lands in a step is read in the next one"
    roomy.take_moves()
    assert roomy.allocate(a)
    assert not BlockManager(8, 4).swap_out(a), "there is no host memory"


def test_a_swap_reads_the_source_of_a_copy_that_is_not_made_yet():
    manager = BlockManager(8, 4, num_host_blocks=8)
    a = computed(manager, "a", PROMPT)
    b = forked(manager, a, "b")
    assert write(manager, b, 50) and table(b) == [1, 2, 4]
    assert manager.swap_out(b)
    assert manager.take_moves() == BlockMoves(swap_out=((1, 1), (2, 2), (3, 3)))


def test_an_abort_frees_the_host_and_what_was_on_its_way():
    manager = BlockManager(8, 4, num_host_blocks=8)
    a = computed(manager, "a", PROMPT)
    assert manager.swap_out(a)
    manager.free(a)
    assert not a.is_swapped and not manager.take_moves()
    assert manager.host is not None and manager.host.pool.num_used_blocks == 0


def test_no_part_of_a_block_is_copied_in_the_step_that_fills_it():
    """Copies come before a step's writes, so what another sequence writes now is not there yet."""
    manager = BlockManager(12, 4)
    writer = make_request("writer", PROMPT[:9])
    parent = make_request("parent", PROMPT[:9])
    for request in (writer, parent):
        assert manager.allocate(request)
        manager.cache_full_blocks(request, 9)
    assert (table(writer), table(parent)) == ([1, 2, 3], [1, 2, 4])
    assert parent.num_computed_tokens == 8  # Once this step is through.
    # A fork wants seven tokens: it shares four, and computes the rest.
    child = make_request("child", PROMPT[:8], fork_of=parent)
    assert manager.allocate(child)
    assert (table(child), child.num_computed_tokens) == ([1, 5], 4)
    assert not manager.take_moves()
    late = make_request("late", PROMPT[:8], fork_of=parent)
    assert manager.allocate(late)
    assert (table(late), late.num_computed_tokens) == ([1, 6], 7)
    assert manager.take_moves().copies == ((2, 6),)
