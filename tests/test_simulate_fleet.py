"""Fleets, autoscaling and plans against plain queues, brute force and arithmetic by hand."""

import dataclasses
import json
import math
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paged_jax.config import SchedulerConfig
from paged_jax.simulate import (
    MODELS,
    ChatTraffic,
    ConstantStepTime,
    Replica,
    StepWork,
    TraceRequest,
    simulate,
    sizing_fleet,
)
from paged_jax.simulate.autoscaler import AutoscalePolicy, serve_autoscaled
from paged_jax.simulate.loop import feed
from paged_jax.simulate.planner import plan_capacity, safe_utilization, steady_work
from paged_jax.simulate.search import smallest
from paged_jax.simulate.sizing_fleet import Load, Sample, choose_sample, devices_for, serve_fleet
from paged_jax.simulate.studies import all_at_once

SCRIPT = Path(__file__).parent.parent / "scripts" / "simulate.py"


def config(num_blocks=400, **fields):
    fields = {"max_model_len": 512, "max_num_seqs": 64, "max_num_batched_tokens": 512, **fields}
    return SchedulerConfig(num_blocks=num_blocks, **fields)


def chats(num_requests=300, **fields):
    fields = {"prompt_median_tokens": 60, "output_median_tokens": 30, **fields}
    return ChatTraffic(num_requests=num_requests, max_total_tokens=512, **fields)


@pytest.mark.parametrize("most", [1, 2, 7, 33])
def test_the_smallest_is_found_in_few_trials(most):
    for answer in [*range(1, most + 1), None]:
        for first in (1, 3, 20, 1000):
            trials = []

            def meets(n, answer=answer, trials=trials):
                trials.append(n)
                return answer is not None and n >= answer

            assert smallest(meets, first=first, most=most) == answer
            assert len(trials) == len(set(trials)) and max(trials) <= most
            assert len(trials) <= 2 * math.log2(most) + 2
    with pytest.raises(ValueError, match="most=0"):
        smallest(lambda n: True, most=0)


# One request at a time, five steps of 0.1 s each: a queue that plain arithmetic follows.
ONE_AT_A_TIME = dict(max_num_seqs=1, max_num_batched_tokens=64, max_model_len=64)


def single_file(num_requests, per_second, seed=0):
    rng, now = random.Random(seed), 0.0
    requests = []
    for _ in range(num_requests):
        now += rng.expovariate(per_second)
        requests.append(TraceRequest(now, 10, 5))
    return requests


def queue_p95(requests, num_devices):
    """The 95th percentile of the time to a first token, devices taking turns (Lindley)."""
    free, waits = [0.0] * num_devices, []
    for i, request in enumerate(requests):
        start = max(request.arrival_seconds, free[i % num_devices])
        free[i % num_devices] = start + 0.5
        waits.append(start + 0.1 - request.arrival_seconds)
    return float(np.quantile(waits, 0.95, method="lower"))


def test_as_many_devices_as_brute_force_finds():
    requests, step_time = single_file(300, 6.0), ConstantStepTime(0.1)
    p95 = {n: queue_p95(requests, n) for n in range(1, 10)}
    for num_devices in (1, 2, 3, 4, 5):
        if num_devices > 1:
            target = math.sqrt(p95[num_devices] * p95[num_devices - 1])
        else:
            target = 1.02 * p95[1]
        best = min(n for n in p95 if p95[n] <= target)
        answer = devices_for(
            lambda: requests,
            config(**ONE_AT_A_TIME),
            step_time,
            ttft_p95_seconds=target,
            router="round_robin",
        )
        assert answer.num_devices == best == num_devices
        assert answer.ttft_p95_seconds == pytest.approx(p95[best], rel=0.006)
        assert answer.itl_p95_seconds == pytest.approx(0.1, rel=0.006)
        assert answer.sample.is_all and answer.num_sampled == answer.num_requests == 300
        for n, ttft, _ in answer.trials:
            assert ttft == pytest.approx(p95.get(n, ttft), rel=0.006)


def test_what_no_fleet_can_do():
    requests = single_file(40, 6.0)
    options: dict[str, Any] = dict(ttft_p95_seconds=5.0, itl_p95_seconds=0.09, most=6)
    answer = devices_for(
        lambda: requests, config(**ONE_AT_A_TIME), ConstantStepTime(0.1), **options
    )
    assert answer.num_devices is None and "do not meet" in answer.text()
    assert max(n for n, _, _ in answer.trials) == 6
    for field in ("ttft_p95_seconds", "itl_p95_seconds"):
        with pytest.raises(ValueError, match=f"{field}=0"):
            devices_for(lambda: requests, config(), ConstantStepTime(0.1), **{**options, field: 0})
    with pytest.raises(ValueError, match="no request"):
        devices_for(lambda: [], config(), ConstantStepTime(0.1), **options)
    with pytest.raises(ValueError, match="max_model_len=14"):
        limits = config(**{**ONE_AT_A_TIME, "max_model_len": 14})
        devices_for(lambda: requests, limits, ConstantStepTime(0.1), **options)


def test_a_sample_is_a_fair_share_of_a_stretch():
    requests = single_file(20_000, 10.0)
    kept = list(Sample(4, 500.0, 1500.0).of(requests))
    inside = {r.arrival_seconds for r in requests if 500 <= r.arrival_seconds < 1500}
    assert len(kept) == pytest.approx(len(inside) / 4, rel=0.05)
    assert all(0 <= r.arrival_seconds < 1000 for r in kept)
    gaps = np.diff([r.arrival_seconds for r in kept])
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.08), "it is still a Poisson process"
    assert kept == list(Sample(4, 500.0, 1500.0).of(requests))
    assert list(Sample().of(requests)) == requests


def test_the_busiest_stretch(monkeypatch):
    rng = random.Random(3)
    times = sorted(rng.uniform(0, 400) for _ in range(500))
    requests = [TraceRequest(t, 1, rng.randrange(1, 100)) for t in times]
    load = Load.of(requests)
    assert load.num_requests == 500
    for width in (1, 10, 60):
        sums = [
            sum(r.num_output_tokens for r in requests if s <= int(r.arrival_seconds) < s + width)
            for s in range(401)
        ]
        start, most = load.busiest(width)
        assert most == max(sums) == sums[start]
    assert load.peak_rate(800) == 500 / 800
    total = load.num_output_tokens
    assert choose_sample(load, 100, 60) == Sample()
    monkeypatch.setattr(sizing_fleet, "TRIAL_TOKENS", total / 4.5)
    assert choose_sample(load, 100, 60) == Sample(5)
    assert choose_sample(load, 30, 60).one_in == 3, "the sample must take several devices"
    stretch = choose_sample(load, 8, 60)
    assert stretch.one_in == 1 and 60 <= stretch.end_seconds - stretch.start_seconds < 130


@pytest.mark.once
def test_a_sample_answers_for_the_whole(monkeypatch):
    requests, step_time = single_file(1500, 40.0), ConstantStepTime(0.1)
    found = []
    for trial_tokens in (1_000_000, 2000):
        monkeypatch.setattr(sizing_fleet, "TRIAL_TOKENS", trial_tokens)
        monkeypatch.setattr(sizing_fleet, "SAMPLED_DEVICES", 4)
        found.append(
            devices_for(lambda: requests, config(**ONE_AT_A_TIME), step_time, ttft_p95_seconds=0.2)
        )
    whole, part = found
    rate = sizing_fleet.throughput(lambda: requests, config(**ONE_AT_A_TIME), step_time)
    assert rate == pytest.approx(2.0)
    assert whole.sample.is_all and part.sample.one_in > 1 < part.num_devices
    assert part.num_devices % part.sample.one_in == 0 and part.num_sampled < 1500 / 2
    assert 0.9 * whole.num_devices <= part.num_devices <= 1.4 * whole.num_devices
    assert 20 < whole.num_devices < 40, "40 a second take 0.5 s each"
    k = part.sample.one_in
    assert f"one of {k} requests on one of {k} devices" in part.text()


def test_a_short_stretch_must_leave_throughput_to_spare():
    # In the one second that is served, far fewer would keep the target.
    requests, options = single_file(4000, 40.0), config(**ONE_AT_A_TIME)
    answer = devices_for(
        lambda: requests,
        options,
        ConstantStepTime(0.1),
        ttft_p95_seconds=1.0,
        sample=Sample(1, 0.0, 1.0),
    )
    busiest = Load.of(requests).peak_rate(60)
    assert answer.num_devices == math.ceil(busiest * 0.5 / 0.9) > 20
    assert [n for n, _, _ in answer.trials] == [answer.num_devices]
    assert "busiest stretch, from 0 to 1 s" in answer.text()


def test_devices_come_and_go_by_hand():
    # Three requests of 40 s, one after the other on the device that is there when they come. The
    # look at 5 s wants two more, which serve from 15 s on; fewer are wanted from 40 s and 80 s on,
    # and let go 20 s later.
    requests = [TraceRequest(0.0, 10, 40)] * 3
    policy = AutoscalePolicy(
        target_load=1, most=10, startup_seconds=10, interval_seconds=5, patience_seconds=20
    )
    fleet = serve_autoscaled(requests, config(**ONE_AT_A_TIME), ConstantStepTime(1.0), policy)
    assert fleet.counts == ((0.0, 1), (15.0, 2), (15.0, 3), (60.0, 2), (100.0, 1))
    assert fleet.results.end_seconds == 120 and fleet.peak_devices == 3
    assert fleet.device_hours == pytest.approx((120 + 95 + 55) / 3600)
    cost = 36 * 270 / 3600 / 120 * 1e6
    assert fleet.cost_a_million_tokens(36.0) == pytest.approx(cost)


def test_a_fleet_that_may_not_change_is_a_fixed_one():
    traffic, step_time = chats(200, requests_per_second=20.0), ConstantStepTime(0.05)
    limits = config(max_num_seqs=8, max_num_batched_tokens=128)
    policy = AutoscalePolicy(target_load=4, fewest=3, most=3)
    fleet = serve_autoscaled(traffic, limits, step_time, policy)
    fixed = serve_fleet(traffic, limits, step_time, 3)
    assert fleet.results.totals == fixed.totals
    for name in ("first_token_seconds", "token_seconds", "request_seconds"):
        assert getattr(fleet.results, name).mean == pytest.approx(getattr(fixed, name).mean)
    assert fleet.device_hours == pytest.approx(3 * fixed.end_seconds / 3600)
    assert fleet.counts == ((0.0, 3),)


def test_a_fleet_grows_at_most_twofold():
    policy = AutoscalePolicy(target_load=2, most=50, at_first=3)
    wanted = [policy.wanted(load, n) for load, n in ((0, 3), (7, 3), (99, 3), (99, 20), (200, 40))]
    assert wanted == [1, 4, 7, 40, 50]
    traffic = chats(20, requests_per_second=1.0)
    fleet = serve_autoscaled(traffic, config(), ConstantStepTime(0.05), policy)
    assert fleet.counts[0] == (0.0, 3)


@pytest.mark.parametrize("router", ["least_loaded", "prefix_affinity"])
def test_a_fleet_follows_its_load(router):
    rng, now, requests = random.Random(2), 0.0, []
    for per_second, until in ((1.0, 100), (12.0, 220), (1.0, 500)):  # Quiet, busy, quiet.
        while now < until:
            now += rng.expovariate(per_second)
            requests.append(TraceRequest(now, 100, 20, [rng.randrange(30)], 128))
    policy = AutoscalePolicy(
        target_load=4, startup_seconds=10, interval_seconds=5, patience_seconds=30
    )
    limits = config(max_num_seqs=4, max_num_batched_tokens=128)
    fleet = serve_autoscaled(requests, limits, ConstantStepTime(0.05), policy, router=router)
    assert fleet.results.totals.num_finished == len(requests)
    at = {second: [n for t, n in fleet.counts if t <= second][-1] for second in (90, 200, 450)}
    assert at[200] >= at[90] + 2 and at[200] >= at[450] + 2
    assert max(n for _, n in fleet.counts) <= fleet.peak_devices
    assert fleet.device_hours < 0.7 * fleet.peak_devices * fleet.results.end_seconds / 3600


@pytest.mark.parametrize(
    "fields",
    [
        {"target_load": 0},
        {"startup_seconds": -1},
        {"fewest": 3, "most": 2},
        {"fewest": 0},
        {"at_first": 0},
    ],
)
def test_policies_that_cannot_be(fields):
    with pytest.raises(ValueError, match=next(iter(fields))):
        AutoscalePolicy(**{"target_load": 2, **fields})


def test_a_plan_by_hand():
    # 60 GiB of 128 KiB tokens: 491,520. Requests of 713 + 353 = 1,066 tokens: 67 blocks of 16.
    plan = plan_capacity(
        MODELS["llama-3-8b"],
        60 * 2**30,
        prompt_tokens=713,
        output_tokens=353,
        step_time=ConstantStepTime(0.025),
        price_an_hour=250,
    )
    sizes = {size.block_size: size for size in plan.sizes}
    assert plan.reserved_requests == 60
    assert (sizes[16].num_blocks, sizes[16].num_requests) == (30_720, 30_720 // 67)
    assert sizes[512].num_requests == 960 // 3
    # Output lengths 1 to 353: 11 times around all places of a block of 32, and one at 1,065.
    assert sizes[32].unused_tokens == pytest.approx((11 * 496 + 23) / 353)
    assert sizes[32].waste == pytest.approx(sizes[32].unused_tokens / (889 + 15.521), rel=1e-4)
    assert plan.block_size == 32, "1.7% is empty, 3.4% of blocks of 64"
    assert plan.requests_at_once == int(491_520 / (889 + 15.521)) == 543
    assert plan.output_tokens_per_second == pytest.approx(543 / 0.025)
    assert plan.cost_a_million_output_tokens == pytest.approx(250 / 3600 / 21_720 * 1e6)
    text = plan.text()
    assert "60 fit" in text and "543 run at once" in text and "32 *" in text and "3.197" in text


def test_a_small_plan_by_hand():
    # The output's steps have 10, 11, 12 and 13 tokens in memory: 2, 1, 0, 3 slots of 4 unused.
    shape = dataclasses.replace(MODELS["llama-3-8b"], num_layers=1, num_kv_heads=1, head_dim=1)
    plan = plan_capacity(
        shape, 4 * 100, prompt_tokens=10, output_tokens=4, max_model_len=20, block_sizes=[8, 4]
    )
    four, eight = plan.sizes
    assert (four.unused_tokens, eight.unused_tokens) == (1.5, 4.5)
    assert (four.waste, eight.waste) == pytest.approx((1.5 / 13, 4.5 / 16))
    assert (four.num_requests, eight.num_requests) == (25 // 4, 12 // 2)
    assert (plan.reserved_requests, plan.block_size, plan.requests_at_once) == (5, 4, 100 // 13)
    assert plan.cost_a_million_output_tokens is None and "cost" not in plan.text()
    limited = plan_capacity(shape, 400, prompt_tokens=10, output_tokens=4, max_num_seqs=3)
    assert limited.requests_at_once == 3


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt_tokens": 0}, "prompt_tokens=0"),
        ({"block_sizes": []}, "block_sizes=0"),
        ({"max_model_len": 100}, "max_model_len=100: a request has 120"),
        ({"pool_bytes": 2**20}, "it holds 8 tokens"),
        ({"price_an_hour": 3}, "price_an_hour=3 needs step_time"),
    ],
)
def test_plans_that_cannot_be(fields, message):
    usual = {"pool_bytes": 2**30, "prompt_tokens": 100, "output_tokens": 20}
    with pytest.raises(ValueError, match=message):
        plan_capacity(MODELS["llama-3-8b"], **{**usual, **fields})


class Noted(ConstantStepTime):
    """Notes what each step computes."""

    works: list[StepWork]

    def step_seconds(self, work):
        self.works.append(work)
        return super().step_seconds(work)


def test_an_average_step_is_one_of_a_steady_run():
    # One request comes a second, a step takes one: four run, one of which computes its prompt.
    step_time = Noted(1.0)
    object.__setattr__(step_time, "works", [])
    replica = Replica(config(), step_time)
    feed(replica, [TraceRequest(float(i), 6, 4) for i in range(20)])
    replica.finish()
    assert step_time.works[10] == steady_work(4, 6, 4) == StepWork(9, 4, 30, 45)


def test_what_is_safe_is_the_most_that_loses_little():
    requests, limits = all_at_once(chats(150), 150), config(80)
    safe = safe_utilization(requests, limits, ConstantStepTime(0.1))

    def run(num_seqs):
        most = max(limits.max_num_batched_tokens, num_seqs)
        fields = dict(max_num_seqs=num_seqs, max_num_batched_tokens=most)
        limited = dataclasses.replace(limits, preemption_mode="recompute", **fields)
        results = simulate(requests, limited, ConstantStepTime(0.1))
        again = results.totals.recomputed / results.totals.computed
        return 1 - results.queued.means()["free"], again

    held, again = run(safe.max_num_seqs)
    assert (safe.utilization, safe.recomputed) == (held, again) and again < 0.01
    assert safe.beyond == run(safe.max_num_seqs + 1) and run(safe.max_num_seqs + 1)[1] >= 0.01
    assert 0.4 < held < 0.98 and f"{100 * held:.1f}% of the pool" in safe.text()
    roomy = safe_utilization(requests[:5], limits, ConstantStepTime(0.1))
    assert roomy.max_num_seqs == 5 and roomy.beyond is None
    with pytest.raises(ValueError, match="most_recomputed=0"):
        safe_utilization(requests, limits, ConstantStepTime(0.1), most_recomputed=0)


def program(*arguments):
    command = [sys.executable, str(SCRIPT), *arguments]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return output, json.loads(output.splitlines()[-1])


def test_the_program_sizes_and_plans():
    common = ["--num_requests=120", "--device=v5e", "--model=smollm2-135m", "--kv_gib=0.5"]
    output, found = program(
        "--scenario=size", *common, "--requests_per_second=40", "--ttft_p95=0.5",
        "--autoscale_load=16",
    )  # fmt: skip
    assert found["num_devices"] >= 1 and found["ttft_p95_seconds"] <= 0.5
    assert "120 of 120 requests were simulated" in output and "device-hours" in output
    assert found["autoscaled"]["device_hours"] > 0
    output, found = program("--scenario=plan", *common, "--price_per_hour=1.2")
    assert found["plan"]["reserved_requests"] == 23_296 // 8192
    assert "safe:" in output and "a million output tokens cost" in output
