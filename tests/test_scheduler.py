import pytest

from paged_jax.config import SchedulerConfig
from paged_jax.request import Request, RequestStatus
from paged_jax.sampling_params import SamplingParams
from paged_jax.scheduler import Scheduler

EOS = 2


def make_scheduler(**fields) -> Scheduler:
    options = dict(
        num_blocks=101,
        block_size=16,
        max_model_len=400,
        max_num_seqs=8,
        max_num_batched_tokens=64,
    )
    return Scheduler(SchedulerConfig(**{**options, **fields}))


def make_request(scheduler: Scheduler, name: str, prompt: list[int] | int, **params) -> Request:
    tokens = [10] * prompt if isinstance(prompt, int) else prompt
    request = Request(
        name,
        tokens,
        SamplingParams(**{"max_tokens": 20, **params}),
        max_model_len=scheduler.config.max_model_len,
        eos_token_ids=(EOS,),
    )
    scheduler.add(request)
    return request


def run_step(scheduler: Scheduler, token: int = 7):
    step = scheduler.schedule()
    scheduler.update(step, [token] * len(step.chunks))
    scheduler.check_integrity()
    return [(c.request.request_id, c.start, c.num_tokens) for c in step.chunks]


def test_one_budget_for_decodes_and_prefill_chunks():
    scheduler = make_scheduler(enable_prefix_caching=False)
    make_request(scheduler, "a", 40)
    make_request(scheduler, "b", 100)
    assert run_step(scheduler) == [("a", 0, 40), ("b", 0, 24)]
    assert run_step(scheduler) == [("a", 40, 1), ("b", 24, 63)]
    assert run_step(scheduler) == [("a", 41, 1), ("b", 87, 13)]
    assert run_step(scheduler) == [("a", 42, 1), ("b", 100, 1)]


def test_a_later_request_of_the_same_step_shares_the_blocks_that_the_step_fills():
    scheduler = make_scheduler()
    prompt = list(range(40))
    first = make_request(scheduler, "a", prompt)
    second = make_request(scheduler, "b", prompt)
    assert run_step(scheduler) == [("a", 0, 40), ("b", 32, 8)]
    assert list(first.block_ids[:2]) == list(second.block_ids[:2])


def test_preemption_takes_the_newest_and_keeps_its_outputs():
    scheduler = make_scheduler(num_blocks=6, max_model_len=80, enable_prefix_caching=False)
    old = make_request(scheduler, "old", 31)
    new = make_request(scheduler, "new", 32)
    for _ in range(2):
        run_step(scheduler)
    # old holds 2 blocks (33 tokens want a third), new holds 3: all five are taken.
    assert new.num_output_tokens == 2 and scheduler.blocks.pool.num_free_blocks == 0
    step = scheduler.schedule()
    assert [c.request for c in step.chunks] == [old]
    assert step.preempted == (new,)
    assert new.status is RequestStatus.WAITING
    assert not new.block_ids and new.num_computed_tokens == 0
    assert new.num_output_tokens == 2
    assert scheduler.waiting[0] is new
    assert scheduler.num_preemptions == 1
    scheduler.update(step, [7])
    while old.status is RequestStatus.RUNNING:
        run_step(scheduler)
    # Computed anew: prompt and kept outputs are one prefill.
    assert run_step(scheduler) == [("new", 0, 34)]
    assert new.num_output_tokens == 3


def test_a_step_that_preempted_admits_nobody():
    scheduler = make_scheduler(num_blocks=6, max_model_len=80, enable_prefix_caching=False)
    make_request(scheduler, "old", 31)
    make_request(scheduler, "new", 32)
    run_step(scheduler)
    run_step(scheduler)
    make_request(scheduler, "later", 1)
    assert [name for name, *_ in run_step(scheduler)] == ["old"]
    # "new" is first in the queue and does not fit: nobody overtakes it.
    assert [name for name, *_ in run_step(scheduler)] == ["old"]


def test_stop_checks_come_in_order_eos_stop_ids_length():
    scheduler = make_scheduler()
    cases = [
        (dict(max_tokens=1, stop_token_ids=[EOS]), EOS, ("stop", None)),
        (dict(max_tokens=1, stop_token_ids=[7]), 7, ("stop", 7)),
        (dict(max_tokens=1), 7, ("length", None)),
        (dict(max_tokens=1, ignore_eos=True), EOS, ("length", None)),
        (dict(max_tokens=1, ignore_eos=True, stop_token_ids=[EOS]), EOS, ("stop", EOS)),
        (dict(max_tokens=2, min_tokens=2, stop_token_ids=[7]), 7, (None, None)),
    ]
    for i, (params, token, expected) in enumerate(cases):
        request = make_request(scheduler, str(i), 3, **params)
        run_step(scheduler, token)
        assert (request.finish_reason, request.stop_reason) == expected, params
        scheduler.abort(str(i))
    assert scheduler.blocks.pool.num_used_blocks == 0


def test_output_ends_at_the_models_length():
    scheduler = make_scheduler(max_model_len=30)
    request = make_request(scheduler, "a", 28, max_tokens=None)
    run_step(scheduler)
    run_step(scheduler)
    assert (request.num_tokens, request.finish_reason) == (30, "length")


def test_refusals_name_their_numbers():
    scheduler = make_scheduler(max_model_len=30)
    make_request(scheduler, "a", 3)
    with pytest.raises(ValueError, match=r"request_id='a' is in use"):
        make_request(scheduler, "a", 3)
    with pytest.raises(ValueError, match=r"empty \(0 tokens\)"):
        make_request(scheduler, "b", 0)
    with pytest.raises(ValueError, match=r"31 tokens, more than max_model_len=30"):
        make_request(scheduler, "b", 31)
    with pytest.raises(ValueError, match=r"no room for one output token.*at most 29"):
        make_request(scheduler, "b", 30)
    with pytest.raises(ValueError, match=r"max_model_len=400 .*9 usable blocks.*hold 144 tokens"):
        make_scheduler(num_blocks=10)
    with pytest.raises(ValueError, match="max_num_batched_tokens=4 is smaller than max_num_seqs=8"):
        make_scheduler(max_num_batched_tokens=4)


def test_abort_frees_at_once_in_either_queue():
    scheduler = make_scheduler(max_num_seqs=1)
    running, waiting = (make_request(scheduler, name, 20) for name in "ab")
    run_step(scheduler)
    for request in (waiting, running):
        assert scheduler.abort(request.request_id) is request
        assert request.finish_reason == "abort"
    assert scheduler.abort("a") is None
    assert scheduler.blocks.pool.num_used_blocks == 0
    assert not scheduler.has_unfinished()
