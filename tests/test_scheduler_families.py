"""Forks, held sequences, priorities and swaps, as the scheduler deals with them."""

import pytest

from paged_jax.block_moves import BlockMoves
from paged_jax.config import SchedulerConfig
from paged_jax.request import Request, RequestStatus
from paged_jax.sampling_params import SamplingParams
from paged_jax.scheduler import Scheduler


def make_scheduler(**fields) -> Scheduler:
    options = dict(
        num_blocks=21,
        block_size=4,
        max_model_len=40,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        enable_prefix_caching=False,
    )
    return Scheduler(SchedulerConfig(**{**options, **fields}))


def make_request(name: str, prompt: list[int] | int, *, max_tokens: int = 20, **fields) -> Request:
    tokens = [10] * prompt if isinstance(prompt, int) else prompt
    return Request(name, tokens, SamplingParams(max_tokens=max_tokens), max_model_len=40, **fields)


def add(scheduler: Scheduler, *args, **fields) -> Request:
    request = make_request(*args, **fields)
    scheduler.add(request)
    return request


def add_family(scheduler: Scheduler, names: str, prompt: int) -> list[Request]:
    first, *others = family = [make_request(name, prompt) for name in names]
    for other in others:
        other.fork_of = first
        first.children.append(other)
    scheduler.add(first)
    return family


def run_step(scheduler: Scheduler) -> list[tuple[str, int, int]]:
    step = scheduler.schedule()
    # Each its own tokens, by where it stands.
    scheduler.update(step, [20 + i for i in range(len(step.chunks))])
    scheduler.check_integrity()
    return [(c.request.request_id, c.start, c.num_tokens) for c in step.chunks]


def ids(requests) -> str:
    return "".join(request.request_id for request in requests)


def drain(scheduler: Scheduler) -> None:
    for _ in range(200):
        if not scheduler.has_unfinished():
            break
        run_step(scheduler)
    for request in list(scheduler.held.values()):
        scheduler.release(request)
    assert not scheduler.has_unfinished()
    assert scheduler.blocks.pool.num_used_blocks == 0


def test_children_fork_in_the_step_that_completes_the_prompt():
    scheduler = make_scheduler(max_num_batched_tokens=8)
    add_family(scheduler, "abc", 10)
    later = add(scheduler, "z", 3)
    assert run_step(scheduler) == [("a", 0, 8)]
    # The children stand behind their parent, before the one that is admitted after.
    assert run_step(scheduler) == [("a", 8, 2), ("b", 10, 0), ("c", 10, 0), ("z", 0, 3)]
    assert run_step(scheduler) == [("a", 10, 1), ("b", 10, 1), ("c", 10, 1), ("z", 3, 1)]
    assert later.num_output_tokens == 2
    drain(scheduler)


def test_children_without_a_seat_wait_in_front_and_share_what_is_there():
    scheduler = make_scheduler(max_num_seqs=2, enable_prefix_caching=True)
    a, _, c, d = add_family(scheduler, "abcd", 10)
    assert run_step(scheduler) == [("a", 0, 10), ("b", 10, 0)]
    add(scheduler, "z", 3)
    assert ids(scheduler.waiting) == "cdz"
    run_step(scheduler)
    scheduler.abort("b")
    # It shares nine tokens of ten with its parent, computes the last, and samples.
    assert run_step(scheduler) == [("a", 11, 1), ("c", 9, 1)]
    assert list(c.block_ids)[:2] == list(a.block_ids)[:2] and c.block_ids[2] != a.block_ids[2]
    assert c.fork_of is None
    # Without the parent, what the cache knows of the prompt is shared.
    scheduler.abort("a")
    assert run_step(scheduler) == [("c", 10, 1), ("d", 8, 2)]
    assert list(d.block_ids)[:2] == list(c.block_ids)[:2]
    drain(scheduler)


def test_children_of_a_parent_that_ends_early_queue_up_alone():
    scheduler = make_scheduler()
    a, b, c = add_family(scheduler, "abc", 10)
    scheduler.abort("b")
    assert a.children == [c]
    scheduler.abort("a")
    assert ids(scheduler.waiting) == "c"
    assert run_step(scheduler) == [("c", 0, 10)]
    assert b.finish_reason == "abort"
    drain(scheduler)


def test_a_family_with_an_id_in_use_is_refused_as_a_whole():
    scheduler = make_scheduler()
    add(scheduler, "b", 3)
    with pytest.raises(ValueError, match="request_id='b' is in use"):
        add_family(scheduler, "abc", 10)
    assert list(scheduler.requests) == ["b"] and ids(scheduler.waiting) == "b"


def test_priority_admits_the_smallest_first_and_preempts_the_largest():
    scheduler = make_scheduler(policy="priority", max_num_seqs=3, num_blocks=11)
    for name, priority in (("c", 2), ("a", 0), ("d", 2), ("b", 1)):
        add(scheduler, name, 11, priority=priority)
    assert [name for name, *_ in run_step(scheduler)] == ["a", "b", "c"]
    assert ids(scheduler.waiting) == "d"
    assert len(scheduler.blocks.pool.free_queue()) == 1
    run_step(scheduler)
    # Three want a fourth block, and there is one: the third in rank goes.
    step = scheduler.schedule()
    assert [c.request.request_id for c in step.chunks] == ["a", "b"]
    assert ids(step.preempted) == "c" and ids(scheduler.waiting) == "cd"
    scheduler.update(step, [20, 21])
    drain(scheduler)


def test_a_victim_that_has_its_chunk_already_gives_it_back():
    scheduler = make_scheduler(policy="priority", num_blocks=11)
    low = add(scheduler, "low", 16, priority=9)
    run_step(scheduler)
    high = add(scheduler, "high", 19, priority=0)
    run_step(scheduler)
    assert scheduler.blocks.pool.num_free_blocks == 0
    assert run_step(scheduler) == [("low", 17, 1), ("high", 19, 1)]
    # `high` needs a sixth block; `low` stands before it in the step, and goes.
    assert run_step(scheduler) == [("high", 20, 1)]
    assert low.status is RequestStatus.WAITING and low.num_preemptions == 1
    assert high.num_preemptions == 0
    drain(scheduler)


def test_a_preempted_copy_leaves_no_trace():
    scheduler = make_scheduler(policy="priority", num_blocks=12)
    high = add(scheduler, "high", 31, priority=0)
    run_step(scheduler)
    first = make_request("a", 5, priority=9)
    child = make_request("b", 5, priority=9, fork_of=first)
    first.children.append(child)
    # The family first in line, so that its copies are scheduled before `high` lacks a block.
    scheduler.add(first)
    run_step(scheduler)
    scheduler.running.sort(key=lambda request: -request.priority)
    assert ids(scheduler.running[:2]) == "ab" and len(scheduler.running) == 3
    assert scheduler.blocks.pool.num_free_blocks == 1
    # "a" copies into the last free block. "high" lacks one; what "b" gives up is the copy's source,
    # so "a" must go as well, and its copy with it.
    step = scheduler.schedule()
    assert ids(step.preempted) == "ba" and ids(scheduler.waiting) == "ab"
    assert [c.request.request_id for c in step.chunks] == ["high"]
    assert not step.moves and scheduler.blocks.stats.num_cow_copies == 0
    scheduler.update(step, [20])
    assert high.num_preemptions == 0
    drain(scheduler)


def test_preemption_by_swap_and_back():
    scheduler = make_scheduler(num_blocks=11, num_host_blocks=4, preemption_mode="swap")
    old = add(scheduler, "old", 23, max_tokens=3)
    new = add(scheduler, "new", 15)
    assert run_step(scheduler) == [("old", 0, 23), ("new", 0, 15)]
    assert run_step(scheduler) == [("old", 23, 1), ("new", 15, 1)]
    # Both are full to the brim, and want a block each of none.
    assert scheduler.blocks.pool.num_free_blocks == 0
    step = scheduler.schedule()
    assert [c.request for c in step.chunks] == [old] and step.preempted == (new,)
    assert step.moves == BlockMoves(swap_out=tuple(zip(range(7, 11), range(1, 5), strict=True)))
    assert (new.num_computed_tokens, new.num_output_tokens, len(new.block_ids)) == (16, 2, 0)
    scheduler.update(step, [20])
    assert old.finish_reason == "length"
    step = scheduler.schedule()
    assert [(c.request, c.start, c.num_tokens) for c in step.chunks] == [(new, 16, 1)]
    assert [host for host, _ in step.moves.swap_in] == [1, 2, 3, 4]
    assert [device for _, device in step.moves.swap_in] == list(new.block_ids[:4])
    scheduler.update(step, [20])
    assert scheduler.num_preemptions_by_mode == {"recompute": 0, "swap": 1}
    drain(scheduler)


def test_a_swap_without_room_on_the_host_is_a_recompute():
    scheduler = make_scheduler(num_host_blocks=1, preemption_mode="swap")
    request = add(scheduler, "a", 10)
    run_step(scheduler)
    assert scheduler.preempt(request) == "recompute"
    assert request.num_computed_tokens == 0 and not request.is_swapped
    assert run_step(scheduler) == [("a", 0, 11)]
    drain(scheduler)


def test_auto_swaps_once_that_is_known_to_be_cheaper():
    scheduler = make_scheduler(num_host_blocks=20)
    requests = [add(scheduler, name, 10) for name in "ab"]
    run_step(scheduler)
    assert scheduler.preempt(requests[1]) == "recompute"
    scheduler.costs.bytes_a_token = 1
    scheduler.costs.observe_swap(1000, 1.0)
    scheduler.costs.observe_prefill(10, 1.0)
    assert scheduler.preempt(requests[0]) == "swap"
    assert ids(scheduler.waiting) == "ab"


def test_held_sequences_give_way_before_running_ones_the_least_used_first():
    scheduler = make_scheduler(num_blocks=11)
    held = [add(scheduler, name, 8, max_tokens=1, hold=True) for name in "abc"]
    run_step(scheduler)
    assert list(scheduler.held) == ["a", "b", "c"]
    assert all(r.status is RequestStatus.HELD and len(r.block_ids) == 2 for r in held)
    # Forked from just now, so "a" is the most recently used.
    add(scheduler, "x", held[0].token_ids, fork_of=held[0])
    assert run_step(scheduler) == [("x", 8, 1)]
    assert list(scheduler.held) == ["b", "c", "a"]
    add(scheduler, "y", 20)
    assert run_step(scheduler) == [("x", 9, 1), ("y", 0, 20)]
    assert [len(request.block_ids) for request in held] == [2, 0, 2]
    assert scheduler.num_preemptions == 0
    drain(scheduler)


def test_a_fork_of_a_held_one_that_lost_its_blocks_computes_them_anew():
    scheduler = make_scheduler()
    held = add(scheduler, "a", 8, max_tokens=1, hold=True)
    run_step(scheduler)
    twin = scheduler.fork_held(held, "twin")
    assert list(twin.block_ids) == list(held.block_ids) and twin.num_computed_tokens == 8
    scheduler.restart([])
    assert held.token_ids == twin.token_ids and not held.block_ids
    add(scheduler, "x", held.token_ids, fork_of=held, takes_over=True)
    assert run_step(scheduler) == [("x", 0, 9)]
    drain(scheduler)


def test_a_sequence_is_only_computed_to_its_last_token():
    scheduler = make_scheduler()
    request = add(scheduler, "a", 9, prefill_only=True, hold=True)
    step = scheduler.schedule()
    assert [(c.start, c.num_tokens, c.samples) for c in step.chunks] == [(0, 8, False)]
    assert [result[:2] for result in scheduler.update(step, [20])] == [(request, -1)]
    assert (request.num_tokens, request.num_computed_tokens) == (9, 8)
    assert request.status is RequestStatus.HELD
    drain(scheduler)


def test_scored_tokens_take_rows_as_sequences_take_seats():
    scheduler = make_scheduler(max_num_seqs=4)
    add(scheduler, "a", 10, score_start=3)
    add(scheduler, "b", 3)
    # Rows of tokens 3 to 6 come from tokens 2 to 5: the four seats are taken.
    step = scheduler.schedule()
    assert [(c.start, c.num_tokens, c.num_rows) for c in step.chunks] == [(0, 6, 4)]
    scheduler.update(step, [20])
    assert run_step(scheduler) == [("a", 6, 4)]
    assert run_step(scheduler) == [("a", 10, 1), ("b", 0, 3)]
    drain(scheduler)


@pytest.mark.parametrize("caching", [True, False])
def test_a_held_sequence_that_was_swapped_out_comes_back_with_all_that_it_had(caching):
    scheduler = make_scheduler(
        num_host_blocks=10, preemption_mode="swap", enable_prefix_caching=caching
    )
    first = add(scheduler, "a", list(range(20)), max_tokens=3, hold=True)
    for _ in range(3):
        run_step(scheduler)
    assert first.status is RequestStatus.HELD and first.num_computed_tokens == 22
    scheduler._give_up_blocks(first)
    assert first.is_swapped and not first.block_ids
    add(scheduler, "b", [7] * 5, max_tokens=1)
    step = scheduler.schedule()  # Its moves take the blocks to the host.
    assert len(step.moves.swap_out) == 6
    scheduler.update(step, [60])
    pool = scheduler.blocks.pool
    pool.release(pool.take(pool.num_free_blocks))  # The device has cached nothing any more.
    again = add(
        scheduler, "c", first.token_ids, max_tokens=2, hold=True, fork_of=first, takes_over=True
    )
    step = scheduler.schedule()
    assert [(c.start, c.num_tokens) for c in step.chunks] == [(22, 1)]
    assert len(step.moves.swap_in) == 6
    assert scheduler.blocks.stats.swap_in_tokens == 22
    scheduler.update(step, [61])
    scheduler.check_integrity()
    assert not first.is_swapped and len(again.block_ids) == 6
    assert scheduler.blocks.host is not None
    assert scheduler.blocks.host.pool.num_used_blocks == 0
