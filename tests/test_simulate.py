"""The simulator against plain models of its own, and figures that do not hang on the draw."""

import gc
import json
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from plain_paging import plain_paging

from paged_jax.config import SchedulerConfig
from paged_jax.simulate import (
    ChatTraffic,
    ConstantStepTime,
    DeviceModel,
    FittedStepTime,
    Replica,
    StepWork,
    TraceRequest,
    simulate,
)
from paged_jax.simulate.contiguous import FirstFitMemory
from paged_jax.simulate.fleet import ROUTERS, make_router, merged, serve
from paged_jax.simulate.loop import feed
from paged_jax.simulate.simulated_request import SimulatedRequest

SCRIPT = Path(__file__).parent.parent / "scripts" / "simulate.py"


def config(num_blocks=1500, **fields):
    fields = {
        "max_model_len": 4096,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 512,
        **fields,
    }
    return SchedulerConfig(num_blocks=num_blocks, **fields)


def chats(n=250, **fields):
    return ChatTraffic(num_requests=n, max_total_tokens=4096, **fields)


def flat(figures, path=""):
    found = {}
    for name, value in figures.items():
        found |= flat(value, f"{path}{name}.") if isinstance(value, dict) else {path + name: value}
    return found


def sharing_requests():
    """Prompts of a few dozen prefixes, so that blocks are hit, folded and evicted."""
    rng = random.Random(1)
    now = 0.0
    for i in range(150):
        now += rng.expovariate(1.5)
        ids = [rng.randrange(4), *(1000 * i + j for j in range(rng.randrange(1, 5)))]
        if rng.random() < 0.5:
            ids[1:] = [10 * ids[0] + j for j in range(100, 100 + len(ids) - 1)]
        length = (len(ids) - 1) * 128 + rng.randrange(1, 129)
        yield TraceRequest(now, length, rng.randrange(1, 200), ids, 128)


@pytest.mark.parametrize("traffic", ["queued", "spread", "sharing"])
@pytest.mark.parametrize("allocator", ["paged", "uncached", "reserve_max", "oracle"])
def test_quiet_steps_at_once_equal_stepping(allocator, traffic):
    requests = {
        "queued": chats(),
        "spread": chats(requests_per_second=3.0),
        "sharing": sharing_requests(),
    }[traffic]
    requests, found = list(requests), []
    caching = allocator != "uncached"
    limits = config(400 if traffic == "sharing" else 1100, enable_prefix_caching=caching)
    for on_step in (None, lambda step: None):  # Nothing is skipped with someone looking on.
        name = allocator if caching else "paged"
        replica = Replica(limits, DeviceModel(), allocator=name, on_step=on_step)
        feed(replica, requests)
        found.append(flat(replica.finish().figures(1.0)))
        replica.scheduler.check_integrity()
        pool = replica.scheduler.blocks.pool
        found[-1]["cached blocks"] = pool.num_cached_blocks
    assert found[0] == pytest.approx(found[1], rel=1e-9)
    if allocator == "paged" and traffic == "queued":
        assert found[0]["num_preemptions"] > 0
    if allocator == "paged" and traffic == "sharing":
        assert found[0]["prefix_hit_ratio"] > 0.1


@pytest.mark.parametrize("block_size", [16, 128])
def test_paging_agrees_with_a_plain_model(block_size):
    requests = list(chats(200, seed=5))
    lengths = [(r.num_prompt_tokens, r.num_output_tokens) for r in requests]
    num_blocks = 16_384 // block_size
    limits = config(
        num_blocks + 1,
        block_size=block_size,
        max_num_seqs=200,
        max_num_batched_tokens=2**30,
        enable_prefix_caching=False,
    )
    totals = simulate(requests, limits, ConstantStepTime(0.1)).totals
    assert (
        totals.num_steps,
        totals.num_preemptions,
        totals.lost,
        totals.lost_output,
        totals.num_sequence_steps,
    ) == plain_paging(lengths, num_blocks, block_size)
    assert totals.num_preemptions > 10
    assert totals.output == sum(output for _, output in lengths) == totals.num_sequence_steps
    assert totals.computed == totals.prompt + totals.output - 200 + totals.lost


def test_contiguous_memory_agrees_with_a_map_of_its_slots():
    rng, memory, slots = random.Random(0), FirstFitMemory(200), [0] * 200
    strips = {}
    for number in range(1, 2000):
        if strips and rng.random() < 0.5:
            start, size = strips.pop(rng.choice(list(strips)))
            memory.give_back(start, size)
            slots[start : start + size] = [0] * size
        else:
            size = rng.randrange(1, 40)
            fits = [i for i in range(201 - size) if not any(slots[i : i + size])]
            start = memory.take(size)
            assert start == (fits[0] if fits else None), "first fit"
            if start is not None:
                strips[number] = start, size
                slots[start : start + size] = [1] * size
        gaps = [len(gap) for gap in "".join(map(str, slots)).split("1")]
        assert memory.largest_gap == max(gaps) and memory.num_free == slots.count(0)


def test_an_oracle_waits_for_a_gap_though_the_total_would_do():
    # 64 slots: 24 | 16 | 24. The outer two end first: 48 free, and no gap for 40.
    requests = [
        TraceRequest(0.0, 20, 4),
        TraceRequest(0.0, 4, 12),
        TraceRequest(0.0, 20, 4),
        TraceRequest(0.0, 38, 2),
    ]
    limits = config(5, max_model_len=64, max_num_seqs=8, enable_prefix_caching=False)
    results = simulate(requests, limits, ConstantStepTime(1.0), allocator="oracle")
    totals = results.totals
    assert (totals.num_steps, totals.fragmented_steps, totals.steps_with_queue) == (14, 8, 12)
    assert results.queued.means()["external"] == pytest.approx(8 * 48 / 64 / 12)
    assert results.queued.means()["free"] == pytest.approx(8 * 48 / 64 / 12)


def test_times_by_hand():
    # A prompt of 5 in chunks of 4: two steps, and three more tokens. Another comes at 2.5.
    requests = [TraceRequest(0.0, 5, 4), TraceRequest(2.5, 2, 2)]
    limits = config(50, max_model_len=64, max_num_seqs=2, max_num_batched_tokens=4)
    results = simulate(requests, limits, ConstantStepTime(1.0))
    assert results.first_token_seconds.count == 2
    assert results.first_token_seconds.total == pytest.approx(2.0 + 1.5)
    assert (results.token_seconds.count, results.token_seconds.total) == (4, 4.0)
    assert results.request_seconds.total == pytest.approx(5.0 + 2.5)
    assert results.end_seconds == 5.0 and results.peak_running == 2
    assert results.cost_a_million_tokens(3600.0) == pytest.approx(5.0 / 6 * 1e6)


def test_a_preempted_request_waits_for_its_next_token():
    # 4 blocks of 4. Each needs a third block for its 9th token, in step 3: the second gives way
    # with 8 tokens computed, and comes back when the first has ended, in step 7.
    requests = [TraceRequest(0.0, 6, 6), TraceRequest(0.0, 6, 6)]
    limits = config(
        5, block_size=4, max_model_len=16, max_num_seqs=2, max_num_batched_tokens=64,
        enable_prefix_caching=False,
    )  # fmt: skip
    results = simulate(requests, limits, ConstantStepTime(1.0))
    totals = results.totals
    assert (totals.num_preemptions, totals.lost, totals.recomputed) == (1, 8, 8)
    assert results.token_seconds.max == pytest.approx(4.0)
    assert totals.num_steps == 9 and results.token_seconds.count == 10


def test_a_long_stream_takes_no_more_memory_than_a_short_one():
    counts = []

    def stream():
        for i in range(6000):
            if i % 1000 == 999:
                counts.append(sum(type(o) is SimulatedRequest for o in gc.get_objects()))
            yield TraceRequest(0.0, 5, 2)  # All at once: the worst for a queue.

    results = simulate(stream(), config(max_num_seqs=32), DeviceModel())
    assert results.totals.num_finished == 6000
    assert (
        max(counts) - counts[0] <= 2 * 32 and len(results.timelines[0].series()["seconds"]) <= 1000
    )


@pytest.mark.parametrize("most", [20_000, pytest.param(1_000_000, marks=pytest.mark.full)])
def test_the_memory_of_the_process_stays_flat(most):
    peaks = []
    for num_requests in (most // 10, most):
        arguments = [f"--num_requests={num_requests}", "--prompt_median=20", "--output_median=6"]
        arguments += ["--requests_per_second=200", "--device=h200", "--kv_gib=1"]
        output = subprocess.run(
            [sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, check=True
        ).stdout
        peaks.append(json.loads(output.splitlines()[-1])["peak_memory_bytes"])
    assert peaks[1] < peaks[0] + 4 * 2**20


def test_what_cannot_be_served_is_counted_and_left_out():
    requests = [TraceRequest(0.0, 5000, 5), TraceRequest(0.0, 5, 0), TraceRequest(1.0, 5, 5)]
    totals = simulate(requests, config(), DeviceModel()).totals
    assert (totals.num_rejected, totals.num_finished, totals.prompt) == (2, 1, 5)
    with pytest.raises(ValueError, match=r"arrival_seconds=0\.5 comes after 1\.0"):
        simulate([*requests, TraceRequest(0.5, 5, 5)], config(), DeviceModel())
    with pytest.raises(ValueError, match="num_speculative_tokens=3"):
        Replica(config(num_speculative_tokens=3), DeviceModel())
    with pytest.raises(ValueError, match="allocator='buddy'"):
        Replica(config(), DeviceModel(), allocator="buddy")


def test_a_fit_finds_the_costs_that_made_the_steps():
    def run(num_seqs, prompt, output, chunk):
        decode = 0.002 + 1e-4 * num_seqs + 2e-8 * num_seqs * (prompt + output / 2)
        prefill = 0.002 + (1e-4 + 2e-8) * chunk
        return {
            "decode_ms_per_step": 1e3 * decode,
            "decode_tokens_per_second": num_seqs / decode,
            "prefill_ms_per_step": 1e3 * prefill,
            "prefill_tokens_per_second": chunk / prefill,
            "prompt_len": prompt,
            "output_len": output,
        }

    runs = [run(1, 1000, 100, 512), run(32, 128, 64, 512), run(256, 2000, 200, 2048)]
    fitted = FittedStepTime.of_bench(runs)
    assert fitted.step_seconds_base == pytest.approx(0.002, rel=0.01)
    assert fitted.seconds_a_token == pytest.approx(1e-4, rel=0.01)
    assert fitted.seconds_a_context_token == pytest.approx(2e-8, rel=0.02)
    one = FittedStepTime.of_bench(runs[:1])
    assert one.seconds_a_context_token == 0
    assert one.step_seconds(StepWork(1, 1, 1050, 1050)) == pytest.approx(0.002121, rel=0.01)
    with pytest.raises(ValueError, match="'prompt_len' is missing"):
        FittedStepTime.of_bench([{k: v for k, v in runs[0].items() if k != "prompt_len"}])


@pytest.mark.parametrize(
    "step_time", [DeviceModel(), ConstantStepTime(0.3), FittedStepTime(1, 2, 3)]
)
def test_decodes_take_as_long_in_one_call(step_time):
    contexts = np.array([10, 5000, 900_000])
    singles = [step_time.step_seconds(StepWork(8, 8, int(c), int(c))) for c in contexts]
    assert step_time.decode_seconds(8, contexts).tolist() == singles


@pytest.mark.parametrize("router", ROUTERS)
def test_a_fleet_serves_what_one_would(router):
    requests = list(sharing_requests())
    replicas = [Replica(config(), DeviceModel()) for _ in range(3)]
    parts = serve(requests, replicas, make_router(router))
    fleet, alone = merged(parts), simulate(requests, config(), DeviceModel())
    for name in ("num_finished", "prompt", "output"):
        assert getattr(fleet.totals, name) == getattr(alone.totals, name)
    assert all(part.totals.num_finished > 10 for part in parts), "each has its share"
    assert fleet.request_seconds.mean < alone.request_seconds.mean
    assert fleet.request_seconds.count == 150 and fleet.num_replicas == 3


def test_affinity_finds_more_of_what_is_cached():
    ratios = {}
    for router in ROUTERS:
        replicas = [Replica(config(), DeviceModel()) for _ in range(4)]
        results = serve(sharing_requests(), replicas, make_router(router))
        ratios[router] = merged(results).figures()["prefix_hit_ratio"]
    assert ratios["prefix_affinity"] > 1.1 * ratios["round_robin"]


def test_nothing_here_needs_jax():
    code = (
        "import sys, paged_jax.simulate, paged_jax.simulate.report; assert 'jax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_program_reports_in_words_and_numbers(tmp_path):
    trace = tmp_path / "prompts.jsonl"
    lines = [{"prompt": "Why is the sky blue? " * 20, "output_tokens": 5 + i} for i in range(20)]
    trace.write_text("\n".join(map(json.dumps, lines)))
    arguments = ["--workload=prompts", f"--trace={trace}", "--allocators=paged,oracle"]
    arguments += ["--device=v5e", "--model=smollm2-135m", "--price_per_hour=1.2", "--replicas=2"]
    output = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, check=True
    ).stdout
    assert "2 x TPU v5e 16 GB, SmolLM2-135M" in output and "memory that holds tokens" in output
    runs = json.loads(output.splitlines()[-1])["runs"]
    assert runs["paged"]["num_finished"] == 20 and runs["oracle"]["prefix_hit_ratio"] == 0
    assert runs["paged"]["prefix_hit_ratio"] > 0.5
