"""The soak on a small scale; and that it finds what is wrong, when something is."""

import json
import subprocess
import sys
from typing import Any

import pytest
from script_modules import SCRIPTS, import_script

from paged_jax.block_manager import BlockManager
from paged_jax.config import SchedulerConfig
from paged_jax.request import Request
from paged_jax.scheduler import Scheduler
from paged_jax.simulate import device_model

soak = import_script("soak")
soak_ledger = import_script("soak_ledger")
soak_traffic = import_script("soak_traffic")

# Sequences of 40 blocks at most: 12 at once want more than there are.
CONFIG: dict[str, Any] = dict(
    num_blocks=341,
    max_model_len=640,
    max_num_seqs=12,
    max_num_batched_tokens=256,
    policy="priority",
    preemption_mode="auto",
    num_host_blocks=90,
    enable_host_prefix_cache=False,
)
TRAFFIC = soak_traffic.TrafficOptions(
    hours=2,
    first_hour=0,
    last_hour=24,
    wave_minutes=30,
    wave_sequences=18,
    wave_seconds=0.5,
    trickle_per_hour=4,
    request_tokens=640,
    output_tokens=101,
    system_tokens=64,
    fork_share=0.05,
    session_share=0.1,
    retry_share=0.05,
    abort_share=0.15,
    abort_within_seconds=2,
)


def make_node(num_devices: int = 2, **fields: Any):
    config = {name: fields.pop(name) for name in list(fields) if name in CONFIG}
    return soak.make_node(
        SchedulerConfig(**{**CONFIG, **config}),
        fields.pop("traffic", TRAFFIC),
        num_devices=num_devices,
        seed=fields.pop("seed", 0),
        check_every_steps=32,
        **fields,
    )


def test_hours_of_pressure_leave_nothing_behind():
    results = []
    for _ in range(2):
        node = make_node()
        node.run()
        results.append(soak.figures(node, wall_seconds=1.0))
    first = results[0]
    assert first == results[1], "the seed determines everything"
    assert first["failures"] == 0 and first["peak_running"] == 24
    assert first["peak_usage"] == 1.0
    for name in ("aborted", "swap_in_tokens", "cow_copies", "folded_blocks", "evictions"):
        assert first[name] > 0, f"the traffic shows no {name}"
    assert min(first["preemptions"].values()) > 0, "both modes"
    assert 0 < first["prefix_hit_rate"] < 1
    for replica in node.replicas:
        assert replica.scheduler.blocks.pool.num_used_blocks == 0
        assert replica.follower is None or replica.follower.num_events > 100


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_other_policies_on_a_pool_that_is_far_too_small(policy: str, mode: str):
    keeps_prefixes = mode == "swap"  # On the host, beside what is swapped out.
    node = make_node(
        1,
        policy=policy,
        preemption_mode=mode,
        num_blocks=221,
        enable_host_prefix_cache=keeps_prefixes,
    )
    node.run()
    result = soak.figures(node, wall_seconds=1.0)
    assert result["preemptions"][mode] > 5
    offloaded = node.replicas[0].scheduler.blocks.stats.host_offload_tokens
    assert (offloaded > 0) == keeps_prefixes


def test_the_pool_that_fits_serves_all_without_preemption():
    node = make_node(1, num_blocks=601)
    node.run()
    assert node.replicas[0].scheduler.num_preemptions == 0
    assert node.peaks.running == 12 and 0.6 < node.replicas[0].peak_usage < 0.95


class LeakyBlocks(BlockManager):
    """Forgets to release the last block of one table in fifty."""

    num_freed = 0

    def free(self, request: Request) -> None:
        self.num_freed += 1
        if self.num_freed % 50 == 0 and len(request.block_ids) > 1:
            request.block_ids.pop()
        super().free(request)


class OneWayBlocks(BlockManager):
    """What was swapped out never comes back."""

    def _plan(self, request: Request):
        return None if request.is_swapped else super()._plan(request)


class LossyBlocks(BlockManager):
    """Loses the last token of what it swaps."""

    def swap_out(self, request: Request) -> bool:
        is_done = super().swap_out(request)
        request.num_computed_tokens -= is_done
        return is_done


class BoastfulBlocks(BlockManager):
    """Counts hits twice."""

    def allocate(self, request: Request) -> bool:
        num_hits = self.stats.num_hit_tokens
        is_done = super().allocate(request)
        self.stats.num_hit_tokens += self.stats.num_hit_tokens - num_hits
        return is_done


class SilentBlocks(BlockManager):
    """Tells nobody of evictions."""

    def _on_evict(self, block_id: int, block_hash: bytes) -> None:
        self.stats.num_evictions += 1


def with_blocks(blocks_class: type[BlockManager]) -> type[Scheduler]:
    class FaultyScheduler(Scheduler):
        def _make_blocks(self, old: BlockManager | None = None) -> BlockManager:
            config = self.config
            return blocks_class(
                config.num_blocks, config.block_size, num_host_blocks=config.num_host_blocks
            )

    return FaultyScheduler


class HoardingScheduler(Scheduler):
    """Remembers the name of every request that ever ended."""

    def __init__(self, config: SchedulerConfig):
        super().__init__(config)
        self.reasons: dict[str, str | None] = {}

    def finish(self, request: Request, reason: str | None = None) -> None:
        super().finish(request, reason)
        self.reasons[request.request_id] = request.finish_reason


class ClingingScheduler(Scheduler):
    """Makes a cycle of a request that ends: only a collection would free it."""

    def finish(self, request: Request, reason: str | None = None) -> None:
        super().finish(request, reason)
        request.fork_of = request


class ForgetfulScheduler(Scheduler):
    """Steps over a request that was aborted before it was admitted: it stays in the queue."""

    def _leave_queues(self, request: Request) -> None:
        if request not in self.waiting:
            super()._leave_queues(request)


class SkippingScheduler(Scheduler):
    """Takes a prompt's last token for computed, once in a while."""

    def update(self, step, token_ids):
        results = super().update(step, token_ids)
        for request, start, num_tokens, _ in step.chunks:
            if num_tokens > 200 and start > 200 and request.num_computed_tokens:
                request.num_computed_tokens += 1
        return results


@pytest.mark.parametrize(
    "scheduler, message",
    [
        (with_blocks(LeakyBlocks), "used \\+ free is not all"),
        (with_blocks(OneWayBlocks), "without a chunk|waiting for its end"),
        (with_blocks(LossyBlocks), "swapped \\d+ of|swap_out_tokens"),
        (with_blocks(BoastfulBlocks), "num_hit_tokens"),
        (with_blocks(SilentBlocks), "without an event"),
        (HoardingScheduler, "scheduler.reasons has grown"),
        (ClingingScheduler, "requests in memory"),
        (ForgetfulScheduler, "astray|KeyError"),
        (SkippingScheduler, "goes on at"),
    ],
)
def test_a_planted_fault_is_found(scheduler: type[Scheduler], message: str):
    node = make_node(1, make_scheduler=scheduler, patience_seconds=200)
    with pytest.raises(soak_ledger.Violation, match=message) as caught:
        node.run()
    assert " h" in str(caught.value), "it says when"


def test_a_request_that_never_ends_is_found():
    """Decoding that gets nowhere: the work goes on, and nothing ends."""

    class Sisyphus(Scheduler):
        def update(self, step, token_ids):
            for chunk in step.chunks:
                chunk.request.max_total_tokens += 1
            return super().update(step, token_ids)

    node = make_node(1, make_scheduler=Sisyphus, max_model_len=5000, patience_seconds=20)
    with pytest.raises(soak_ledger.Violation, match="waiting for its end"):
        node.run()


def test_the_device_model_by_hand():
    device = device_model.DeviceModel()
    assert device.model.bytes_a_token == 128 * 1024
    # 80 GB x (0.90 - 0.06), less 16.06 GB of weights, over 2 MiB.
    assert device.num_blocks(0.9) == 24_385
    # One decode after 2,000 tokens: 15.01 GB of weights and 2,001 x 128 KiB, at 1.631 TB/s.
    work = device_model.StepWork(num_tokens=1, num_rows=1, num_context_tokens=2000, num_pairs=2000)
    assert device.step_seconds(work) == pytest.approx(1e-3 + 15.272e9 / 1.6312e12, rel=1e-3)
    # A prefill of 2,048 tokens: 2 x 6.98e9 operations a token, and its attention, at 156e12.
    pairs = 2048 * 2049 // 2
    work = device_model.StepWork(
        num_tokens=2048, num_rows=1, num_context_tokens=2048, num_pairs=pairs
    )
    operations = 2 * 6.9796e9 * 2048 + 2 * 0.5253e9 + 4 * 32 * 4096 * pairs
    assert device.step_seconds(work) == pytest.approx(1e-3 + operations / 156e12, rel=1e-3)
    # A sequence of 125 blocks to the host: 262 MB at 25 GB/s.
    assert device.swap_seconds(125) == pytest.approx(0.010486, rel=1e-3)


def test_a_lone_request_waits_as_long_as_the_device_model_says():
    device = device_model.DeviceModel()
    arrival = soak_traffic.Arrival(seconds=5.0, prompt=list(range(300)), output_tokens=2)
    replica = soak.Replica(
        0, SchedulerConfig(**CONFIG), device, iter([arrival]), vocab_size=TRAFFIC.vocab_size
    )
    soak.Node([replica]).run()
    # 256 tokens of the prompt, then 44, then one token after 300.
    steps = [(256, 256, 256 * 257 // 2), (44, 300, 44 * 557 // 2), (1, 301, 301)]
    seconds = [
        device.step_seconds(
            device_model.StepWork(
                num_tokens=tokens, num_rows=1, num_context_tokens=context, num_pairs=pairs
            )
        )
        for tokens, context, pairs in steps
    ]
    assert replica.ledger.first_token_waits == [pytest.approx(sum(seconds[:2]))]
    assert replica.clock == pytest.approx(5 + sum(seconds))


def test_waves_come_by_day_and_single_requests_at_all_hours():
    options = soak_traffic.TrafficOptions(trickle_per_hour=60, wave_sequences=10)
    traffic = soak_traffic.Traffic(options, seed=1, device=0)
    starts = traffic.wave_starts()
    assert len(starts) == 30 and starts[0] == 7 * 3600
    arrivals = list(traffic.arrivals())
    times = [arrival.seconds for arrival in arrivals]
    assert times == sorted(times) and times[-1] < 48 * 3600
    at_noon, at_midnight = (
        sum(1 for t in times if abs(t % 86_400 / 3600 - hour) < 1) for hour in (12.5, 0)
    )
    # 60 an hour at noon and a wave or two; hardly any at midnight.
    assert 200 < at_noon < 340 and at_midnight < 15
    lengths = {len(a.prompt) + a.output_tokens for a in arrivals if not a.turns}
    assert lengths == {2000}
    for talk in (a for a in arrivals if a.turns):
        added = sum(map(len, talk.turns)) + talk.output_tokens * (1 + len(talk.turns))
        assert len(talk.prompt) + added == 2000


def test_the_program_needs_no_jax_and_ends_with_one_json_object():
    code = f"""
import sys
sys.path.insert(0, {str(SCRIPTS)!r})
import soak
from absl import flags
flags.FLAGS(["soak", "--hours=2", "--devices=1"])
soak.main(["soak"])
assert "jax" not in sys.modules
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True
    )
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["failures"] == 0 and result["num_blocks"] == 15_118
