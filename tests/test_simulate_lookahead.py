"""Calls of several decode steps, and calls dispatched ahead, in simulated time."""

import numpy as np
import pytest

from paged_jax.config import SchedulerConfig
from paged_jax.simulate import ChatTraffic, ConstantStepTime, DeviceModel, Replica, TraceRequest
from paged_jax.simulate.loop import feed, simulate


def config(num_blocks=600, **fields):
    fields = {
        "max_model_len": 1024,
        "max_num_seqs": 20,
        "max_num_batched_tokens": 256,
        "decode_lookahead": 8,
        **fields,
    }
    return SchedulerConfig(num_blocks=num_blocks, **fields)


def chats(n=80, **fields):
    fields = {"prompt_median_tokens": 100, "output_median_tokens": 50, **fields}
    return ChatTraffic(num_requests=n, max_total_tokens=1024, **fields)


def test_the_times_of_calls_by_hand():
    # A step takes 1 s, a quarter of it the host's. The prompt ends at 1. Two calls of 4 steps: the
    # first one waits for the host once, the second was dispatched at 1 and never does. Whoever
    # comes at 1.5 joins when it ends.
    requests = [TraceRequest(0.0, 5, 9), TraceRequest(1.5, 3, 1)]
    results = simulate(requests, config(), ConstantStepTime(1.0, 0.25))
    assert results.totals.num_steps == 1 + 4 + 4 + 1
    assert results.busy_seconds == results.end_seconds == pytest.approx(1 + 3.25 + 3 + 1)
    first, between = results.first_token_seconds, results.token_seconds
    assert first.total == pytest.approx(1 + (8.25 - 1.5))
    assert (between.count, between.total) == (8, pytest.approx(6.25))
    assert between.quantile(0.1) == pytest.approx(0.75, rel=0.01), "a call's tokens share its time"
    assert between.max == pytest.approx(3.25 / 4)
    alone = simulate(requests, config(decode_lookahead=1), ConstantStepTime(1.0, 0.25))
    assert alone.first_token_seconds.total == pytest.approx(1 + (3 - 1.5))


def test_rows_that_end_within_a_call_take_no_more_steps():
    # All decode from 1 on, nobody waits: calls of 4, in which one draws 2 tokens and one all.
    requests = [TraceRequest(0.0, 5, 3), TraceRequest(0.0, 7, 9)]
    results = simulate(requests, config(max_num_seqs=2), ConstantStepTime(1.0))
    totals = results.totals
    assert (totals.num_steps, totals.num_sequence_steps) == (1 + 8, 2 + 2 * 2 + 6)
    assert totals.computed == 12 + 10 and totals.output == 12
    assert results.request_seconds.total == pytest.approx(5 + 9), "they are read at the call's end"


@pytest.mark.parametrize("lookahead", [2, 5, 16])
@pytest.mark.parametrize("allocator", ["paged", "uncached", "oracle", "reserve_max"])
def test_the_same_tokens_whatever_the_calls(allocator, lookahead):
    num_blocks = 129 if allocator in ("paged", "uncached") else 300
    limits = config(
        num_blocks,
        decode_lookahead=lookahead,
        enable_prefix_caching=allocator == "paged",
        preemption_mode="recompute",
    )
    name = "paged" if allocator == "uncached" else allocator
    device = DeviceModel()
    requests = list(chats(requests_per_second=40.0))
    replica = Replica(limits, device, allocator=name)
    sampled = []
    sample = replica.memory.sample

    def noted(context_tokens, awaited_tokens):
        sampled.append(sample(context_tokens, awaited_tokens))
        return sampled[-1]

    replica.memory.sample = noted
    feed(replica, requests)
    results = replica.finish()
    totals = results.totals
    replica.scheduler.check_integrity()
    assert totals.num_finished == 80
    assert totals.output == sum(r.num_output_tokens for r in requests)
    if allocator != "paged":  # Without hits, each token is computed once, and what was lost again.
        assert totals.computed == totals.prompt + totals.output - 80 + totals.lost
    if name == "paged":
        assert totals.num_preemptions > 0
    assert results.first_token_seconds.count == 80
    assert results.token_seconds.count == totals.output - 80
    for memory in sampled:
        parts = memory[:4]
        assert sum(parts) == pytest.approx(results.capacity_tokens) and min(parts) >= 0, memory
    # Every sequence of a paged run leaves less than a block unused.
    if name == "paged":
        assert 0 < results.unused_last_block < 16


def test_what_calls_ahead_save_and_cost():
    traffic = chats(200, requests_per_second=20.0)
    runs = {n: simulate(traffic, config(decode_lookahead=n), DeviceModel()) for n in (1, 8)}
    assert runs[8].busy_seconds < runs[1].busy_seconds, "the host's time is spared"
    assert runs[8].token_seconds.mean < runs[1].token_seconds.mean
    idle = chats(30, requests_per_second=0.2)
    first = [
        simulate(idle, config(decode_lookahead=n), DeviceModel()).first_token_seconds.mean
        for n in (1, 8)
    ]
    assert np.diff(first) >= 0, "whoever comes waits for the calls that are under way"
