"""What a run came to: sums, averages and distributions, and the figures made of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from paged_jax.simulate.allocators import MemorySample
from paged_jax.simulate.statistics import Averages, Histogram, Timeline

# `waiting` counts what was handed to the device: at most two steps' worth of a single one's.
SERIES = ("running", "waiting", "stored", "reserved", "internal", "external", "free")


@dataclasses.dataclass
class Totals:
    """Sums over a run; tokens unless the name says otherwise.

    Attributes:
      num_rejected: requests that are longer than allowed, or empty.
      num_sequence_steps: summed over the steps, the sequences that ran.
      prompt, output: of requests that were added; sampled.
      computed: by all steps.
      lost: computed, and forgotten when a request was preempted.
      lost_output: of them, tokens that the request had sampled itself.
      recomputed: how many of the lost ones were computed again; the cache had the others.
      fragmented_steps: steps in which the next in line would have fitted what was free, had it
        lain together.
      steps_with_queue: steps that left requests waiting.
    """

    num_requests: int = 0
    num_finished: int = 0
    num_rejected: int = 0
    num_steps: int = 0
    num_sequence_steps: int = 0
    num_preemptions: int = 0
    prompt: int = 0
    output: int = 0
    computed: int = 0
    lost: int = 0
    lost_output: int = 0
    recomputed: int = 0
    queried: int = 0
    hit: int = 0
    swapped_out: int = 0
    swapped_in: int = 0
    fragmented_steps: int = 0
    steps_with_queue: int = 0


class Results:
    """The figures of one replica, or of several merged.

    Args:
      capacity_tokens: slots of a replica's memory.

    Attributes:
      busy_seconds: simulated seconds in steps, of all replicas together.
      end_seconds: when the last step ended.
      first_token_seconds, token_seconds, request_seconds: from a request's arrival to its first
        token; from a token to the next; from arrival to the last token.
      unused_last_block: tokens of room in a sequence's last block, averaged over sequences.
      always, queued: averages over all steps, and over those that left requests waiting, weighted
        by their seconds; memory as a share of all slots.
      timelines: the same over time, one for each replica.
    """

    def __init__(self, capacity_tokens: int):
        self.capacity_tokens = capacity_tokens
        self.num_replicas = 1
        self.totals = Totals()
        self.busy_seconds = 0.0
        self.end_seconds = 0.0
        self.peak_running = 0
        self.first_token_seconds = Histogram()
        self.token_seconds = Histogram()
        self.request_seconds = Histogram()
        self.always = Averages(SERIES)
        self.queued = Averages(SERIES)
        self.timelines = [Timeline(SERIES)]
        self.internal_tokens = 0.0

    def add_steps(
        self,
        start: float,
        seconds: float,
        running: int,
        waiting: int,
        memory: MemorySample,
        *,
        num_steps: int = 1,
        internal_tokens: float | None = None,
    ) -> None:
        """Takes in a step, or several alike: when they began, how long they took, what memory held.

        Args:
          memory: of several steps, the mean, weighted by their seconds.
          internal_tokens: of several steps, the sum of `memory.internal`.
        """
        scale = 1 / self.capacity_tokens
        external = memory.free if memory.is_fragmented else 0
        values = (
            running,
            waiting,
            memory.stored * scale,
            memory.reserved * scale,
            memory.internal * scale,
            external * scale,
            memory.free * scale,
        )
        totals = self.totals
        totals.num_steps += num_steps
        totals.num_sequence_steps += num_steps * running
        self.busy_seconds += seconds
        self.end_seconds = start + seconds
        self.peak_running = max(self.peak_running, running)
        self.internal_tokens += memory.internal if internal_tokens is None else internal_tokens
        self.always.add(values, seconds)
        self.timelines[0].add(start, seconds, values)
        if waiting:
            totals.steps_with_queue += num_steps
            totals.fragmented_steps += num_steps * memory.is_fragmented
            self.queued.add(values, seconds)

    def merge(self, other: Results) -> None:
        """Takes in those of another replica, whose timeline stands beside this one's."""
        self.timelines += other.timelines
        self.num_replicas += other.num_replicas
        for field in dataclasses.fields(Totals):
            mine = getattr(self.totals, field.name)
            setattr(self.totals, field.name, mine + getattr(other.totals, field.name))
        self.busy_seconds += other.busy_seconds
        self.end_seconds = max(self.end_seconds, other.end_seconds)
        self.peak_running = max(self.peak_running, other.peak_running)
        self.internal_tokens += other.internal_tokens
        self.first_token_seconds.merge(other.first_token_seconds)
        self.token_seconds.merge(other.token_seconds)
        self.request_seconds.merge(other.request_seconds)
        self.always.merge(other.always)
        self.queued.merge(other.queued)

    @property
    def unused_last_block(self) -> float:
        return self.internal_tokens / max(self.totals.num_sequence_steps, 1)

    def cost_a_million_tokens(self, price_an_hour: float) -> float:
        """What a million output tokens cost at a price of a replica and hour, idle time paid."""
        hours = self.num_replicas * self.end_seconds / 3600
        return price_an_hour * hours / max(self.totals.output, 1) * 1e6

    def figures(self, price_an_hour: float | None = None) -> dict[str, Any]:
        """All of it as JSON values; seconds are simulated ones."""
        totals, seconds = self.totals, max(self.end_seconds, 1e-12)
        figures: dict[str, Any] = {
            "replicas": self.num_replicas,
            "capacity_tokens": self.capacity_tokens,
            **dataclasses.asdict(totals),
            "prefix_hit_ratio": totals.hit / max(totals.queried, 1),
            "seconds": self.end_seconds,
            "busy_share": self.busy_seconds / (self.num_replicas * seconds),
            "requests_per_second": totals.num_finished / seconds,
            "output_tokens_per_second": totals.output / seconds,
            "peak_running": self.peak_running,
            "unused_last_block_tokens": self.unused_last_block,
            "mean": dict(self.always.means()),
            "mean_while_queued": dict(self.queued.means()),
            "first_token_seconds": _distribution(self.first_token_seconds),
            "inter_token_seconds": _distribution(self.token_seconds),
            "request_seconds": _distribution(self.request_seconds),
        }
        if price_an_hour is not None:
            figures["price_an_hour"] = price_an_hour
            figures["cost_a_million_output_tokens"] = self.cost_a_million_tokens(price_an_hour)
        return figures


def _distribution(histogram: Histogram) -> Mapping[str, float]:
    return {
        "mean": histogram.mean,
        "p50": histogram.quantile(0.5),
        "p90": histogram.quantile(0.9),
        "p99": histogram.quantile(0.99),
        "max": histogram.max,
    }
