"""Two days of a node under load, in simulated device time, with the real scheduler: nothing leaks.

    python scripts/soak.py
    python scripts/soak.py --pool_fraction=1 --hours=24

The claim that is put to the test: eight 80 GB accelerators, each with a replica of Llama-3-8B in 16
bits, serve 1,120 concurrent requests of 2,000 tokens at a memory utilisation of 0.90, with swap
space of 1% of the pool, for 48 hours without running out of memory.

What is real: `Scheduler` and `BlockManager`, one for each device. Every step of every device goes
through `schedule` and `update`; none is skipped, shortened or replayed. Prompts are random tokens,
hashed and shared as the engine does.

What is simulated: the device. A step takes the seconds of a roofline
(`paged_jax.simulate.device_model`), sampled tokens are random ones, swaps and copies cost time and
move nothing. Clients are simulated as well (`soak_traffic.py`): by day a wave every hour that asks
for all 1,120 seats at once, a trickle of single requests at all hours, and nothing in between: the
clock then jumps to the next arrival. So this is no node that is full for 48 hours, but one that is
filled and emptied 30 times. Among the
requests are samples of four, shared system prompts, conversations that hold their blocks between
turns, requests sent twice, three priorities, and clients that go away, also while a step runs.

The pool that fits such a device holds 24,385 blocks, of which the 1,120 requests take some two
thirds; nothing would ever be preempted. `--pool_fraction` takes part of it away, so that by default
every wave runs out of blocks at its height.

What must hold is checked by a second set of books (`soak_ledger.py`): at every step, every
`--check_every_steps` steps, whenever a device is idle, and at the end. The first violation ends the
program with status 1, and what and when. The last line is one JSON object; times are simulated
seconds unless they say "wall".
"""

from __future__ import annotations

import bisect
import dataclasses
import heapq
import json
import math
import platform
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from absl import app, flags
from soak_ledger import Violation, count_requests, require
from soak_replica import Replica
from soak_traffic import Traffic, TrafficOptions

from paged_jax.config import PREEMPTION_MODES, SCHEDULING_POLICIES, SchedulerConfig
from paged_jax.simulate.device_model import DeviceModel

HOURS = flags.DEFINE_float("hours", 48.0, "Simulated hours of arrivals.", lower_bound=0.0)
DEVICES = flags.DEFINE_integer("devices", 8, "Devices, a replica each.", lower_bound=1)
SEATS = flags.DEFINE_integer("seats", 140, "Most sequences in a step of a device.", lower_bound=1)
UTILIZATION = flags.DEFINE_float(
    "gpu_memory_utilization", 0.9, "Share of a device's memory.", lower_bound=0.0, upper_bound=1.0
)
POOL_FRACTION = flags.DEFINE_float(
    "pool_fraction", 0.62, "Share of the pool that fits; 1 takes all.", lower_bound=0.0
)
SWAP_FRACTION = flags.DEFINE_float(
    "swap_fraction", 0.01, "Swap space as a share of the pool.", lower_bound=0.0
)
WAVE_MINUTES = flags.DEFINE_float(
    "wave_minutes", 60.0, "From one wave to the next, by day.", lower_bound=1.0
)
POLICY = flags.DEFINE_enum("policy", "priority", SCHEDULING_POLICIES, "Of scheduling.")
PREEMPTION = flags.DEFINE_enum("preemption_mode", "auto", PREEMPTION_MODES, "Of preemption.")
CHECK_EVERY = flags.DEFINE_integer(
    "check_every_steps", 256, "Steps of a device between checks of its books.", lower_bound=1
)
PATIENCE = flags.DEFINE_float(
    "patience_seconds",
    900.0,
    "Simulated; a request that has not ended after so long counts as forgotten. Traffic that the "
    "devices cannot keep up with needs more.",
    lower_bound=0.0,
)
SEED = flags.DEFINE_integer("seed", 0, "Of the traffic.", lower_bound=0)


@dataclasses.dataclass
class Peaks:
    """What was seen of the node as a whole.

    Attributes:
      full_seconds: how long every seat of the node was taken.
      wave_usages: the highest share of the pool in use on any device, by the number of the wave.
    """

    running: int = 0
    full_seconds: float = 0.0
    wave_usages: dict[int, float] = dataclasses.field(default_factory=dict)


class Node:
    """Replicas side by side, each on its own clock; the one that is behind moves first.

    Args:
      replicas: with nothing done yet.
      wave_starts: when waves come, in seconds.
    """

    def __init__(self, replicas: Sequence[Replica], wave_starts: Sequence[float] = ()):
        self.replicas = replicas
        self.peaks = Peaks()
        self.wave_starts = list(wave_starts)
        self._num_foreign_requests = count_requests()

    def run(self, verbose: bool = False) -> None:
        """Serves all traffic to its end.

        Args:
          verbose: whether to print a line for every six simulated hours.

        Raises:
          Violation: something did not hold; the message says what, on which device and when.
        """
        replicas, peaks = self.replicas, self.peaks
        num_seats = sum(replica.scheduler.config.max_num_seqs for replica in replicas)
        queue = [(replica.next_time, i) for i, replica in enumerate(replicas)]
        heapq.heapify(queue)
        running = [0] * len(replicas)
        num_running, last, hour, started = 0, 0.0, 0, time.perf_counter()
        while queue[0][0] < math.inf:
            now, i = queue[0]
            if num_running == num_seats:
                peaks.full_seconds += now - last
            if now >= hour * 3600:
                self.check_objects(now)
                if verbose and hour % 6 == 0:
                    print(f"hour {hour:3}, {time.perf_counter() - started:5.1f} s", flush=True)
                hour = int(now // 3600) + 1
            last, replica = now, replicas[i]
            self._do(replica, replica.advance)
            num_running += replica.num_running - running[i]
            running[i] = replica.num_running
            peaks.running = max(peaks.running, num_running)
            if running[i] > 1:
                self._note_usage(now, replica)
            heapq.heapreplace(queue, (replica.next_time, i))
        for replica in replicas:
            self._do(replica, replica.finish)
        self.check_objects(last)

    def check_objects(self, now: float) -> None:
        """Requests that ended are gone, without the garbage collector's help.

        Raises:
          Violation: there are more than those that live or are held.
        """
        books = [replica.ledger.live for replica in self.replicas]
        held = [replica.scheduler.held for replica in self.replicas]
        most = self._num_foreign_requests + sum(map(len, books)) + sum(map(len, held))
        found = count_requests()
        require(found <= most, f"{now / 3600:.3f} h: {found} requests in memory, {most} are live")

    def _do(self, replica: Replica, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            hours = replica.clock / 3600
            where = (
                f"device {replica.number}, {hours:.4f} h, step {replica.ledger.totals.num_steps}"
            )
            raise Violation(f"{where}: {type(error).__name__}: {error}") from error

    def _note_usage(self, now: float, replica: Replica) -> None:
        wave = bisect.bisect(self.wave_starts, now)
        usages = self.peaks.wave_usages
        usages[wave] = max(usages.get(wave, 0.0), replica.scheduler.blocks.pool.usage)


def make_node(
    config: SchedulerConfig,
    options: TrafficOptions,
    *,
    device: DeviceModel | None = None,
    num_devices: int,
    seed: int,
    **fields: Any,
) -> Node:
    """Replicas of one configuration, each with its own share of the traffic.

    Args:
      config: of each scheduler.
      options: of the traffic of each device.
      device: what a step costs; an A100 with Llama-3-8B by default.
      num_devices: replicas.
      seed: of the traffic.
      fields: further arguments of `Replica`.
    """
    traffic = [Traffic(options, seed, i) for i in range(num_devices)]
    replicas = [
        Replica(
            i,
            config,
            device or DeviceModel(block_size=config.block_size),
            own.arrivals(),
            vocab_size=options.vocab_size,
            follow_events=i == 0,  # It costs time, and the replicas are alike.
            **fields,
        )
        for i, own in enumerate(traffic)
    ]
    return Node(replicas, traffic[0].wave_starts())


def make_config(device: DeviceModel, longest_tokens: int) -> SchedulerConfig:
    """A replica's limits as the flags have them."""
    num_blocks = int(device.num_blocks(UTILIZATION.value) * POOL_FRACTION.value)
    return SchedulerConfig(
        num_blocks=num_blocks,
        block_size=device.block_size,
        max_model_len=longest_tokens,
        max_num_seqs=SEATS.value,
        max_num_batched_tokens=2048,
        policy=POLICY.value,
        preemption_mode=PREEMPTION.value,
        num_host_blocks=int(num_blocks * SWAP_FRACTION.value),
    )


def figures(node: Node, wall_seconds: float) -> dict[str, Any]:
    """What the soak came to, summed over the devices."""
    replicas, peaks = node.replicas, node.peaks
    totals = [replica.ledger.totals for replica in replicas]
    stats = [replica.scheduler.blocks.stats for replica in replicas]

    def total(name: str) -> int:
        return sum(getattr(t, name) for t in totals)

    def counted(name: str) -> int:
        return sum(getattr(s, name) for s in stats)

    waits = [wait for replica in replicas for wait in replica.ledger.first_token_waits]
    p50, p99 = np.percentile(waits, [50, 99]) if waits else (0.0, 0.0)
    modes = [replica.scheduler.num_preemptions_by_mode for replica in replicas]
    usages = sorted(usage for wave, usage in peaks.wave_usages.items() if wave)
    num_steps = total("num_steps")
    return {
        "clock_hours": round(max(replica.clock for replica in replicas) / 3600, 3),
        "requests": total("num_requests"),
        "aborted": total("num_aborted"),
        "steps": num_steps,
        "sequence_steps": total("num_chunks"),
        "tokens_in": total("tokens_in"),
        "tokens_computed": total("computed"),
        "tokens_out": total("tokens_out"),
        "tokens_lost": total("lost"),
        "peak_running": peaks.running,
        "full_seconds": round(peaks.full_seconds, 1),
        "peak_usage": round(max(replica.peak_usage for replica in replicas), 4),
        # The lowest, the median and the highest, each of a wave's fullest device.
        "wave_peak_usage": [round(usages[int(q * (len(usages) - 1))], 4) for q in (0, 0.5, 1)]
        if usages
        else [],
        "preemptions": {mode: sum(by_mode[mode] for by_mode in modes) for mode in modes[0]},
        "swap_out_tokens": counted("swap_out_tokens"),
        "swap_in_tokens": counted("swap_in_tokens"),
        "max_swap_tokens_per_second": max(replica.max_swap_rate for replica in replicas),
        "prefix_hit_rate": round(
            counted("num_hit_tokens") / max(counted("num_query_tokens"), 1), 4
        ),
        "cow_copies": counted("num_cow_copies"),
        "folded_blocks": counted("num_folded_blocks"),
        "evictions": counted("num_evictions"),
        "max_wait_seconds": round(max(r.ledger.max_wait_seconds for r in replicas), 2),
        "ttft_p50_seconds": round(float(p50), 3),
        "ttft_p99_seconds": round(float(p99), 3),
        "wall_seconds": round(wall_seconds, 1),
        "steps_per_second": round(num_steps / max(wall_seconds, 1e-9)),
        "failures": 0,
    }


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    device = DeviceModel()
    options = TrafficOptions(hours=HOURS.value, wave_minutes=WAVE_MINUTES.value)
    # A few seats' more: some clients go away, and conversations end early.
    options = dataclasses.replace(options, wave_sequences=SEATS.value * 106 // 100)
    config = make_config(device, options.request_tokens)
    node = make_node(
        config,
        options,
        device=device,
        num_devices=DEVICES.value,
        seed=SEED.value,
        check_every_steps=CHECK_EVERY.value,
        patience_seconds=PATIENCE.value,
    )
    print(
        f"{DEVICES.value} x {device.accelerator.name}, {device.model.name}; blocks of "
        f"{config.block_size}: {device.num_blocks(UTILIZATION.value):,} fit, {config.num_blocks:,} "
        f"are used, {config.num_host_blocks:,} on the host; {len(node.wave_starts)} waves"
    )
    started = time.perf_counter()
    settings = {
        "hours": HOURS.value,
        "seed": SEED.value,
        "num_blocks": config.num_blocks,
        "devices": DEVICES.value,
    }
    try:
        node.run(verbose=True)
    except Violation as violation:
        print(f"violation: {violation}")
        print(json.dumps({"failures": 1, "violation": str(violation), **settings}))
        sys.exit(1)
    result = figures(node, time.perf_counter() - started)
    for name, value in result.items():
        print(f"{name:28} {value}")
    print(json.dumps({**result, **settings, "python": platform.python_version()}))


if __name__ == "__main__":
    app.run(main)
