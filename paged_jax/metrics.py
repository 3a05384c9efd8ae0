"""Counters of an engine, under the names that Prometheus dashboards for vLLM know."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections import Counter
from typing import Any

from paged_jax.request import Request

_LATENCY_BOUNDS_SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0,
)  # fmt: skip


class Histogram:
    """Counts of values by upper bound, their number and sum; constant memory."""

    def __init__(self, bounds: tuple[float, ...] = _LATENCY_BOUNDS_SECONDS):
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.count = 0
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect.bisect_left(self.bounds, value)] += times
        self.count += times
        self.sum += value * times

    @property
    def mean(self) -> float:
        return self.sum / self.count if self.count else 0.0

    def quantile(self, q: float) -> float:
        """An upper bound of the q-quantile: the bound of the bucket it falls in."""
        seen, wanted = 0, q * self.count
        for bound, count in zip(self.bounds, self.counts, strict=False):
            seen += count
            if seen >= wanted:
                return bound
        return float("inf")

    def as_dict(self) -> dict[str, Any]:
        """The histogram in plain numbers: count, sum, mean, p95, and its buckets.

        "buckets" maps each upper bound to the number of values at or below it (cumulative, as
        Prometheus has them); what lies above the last bound is in "count" only.
        """
        # One copy first: another thread may observe meanwhile, and no bucket may exceed the count.
        *counts, above = self.counts.copy()
        cumulative = list(itertools.accumulate(counts))
        return {
            "count": sum(counts) + above,
            "sum": self.sum,
            "mean": self.mean,
            "p95": self.quantile(0.95),
            "buckets": dict(zip(self.bounds, cumulative, strict=True)),
        }


@dataclasses.dataclass
class StepTimes:
    """Where the time of one kind of step went, in seconds, and what it made."""

    num_steps: int = 0
    num_tokens: int = 0
    schedule_seconds: float = 0.0
    device_seconds: float = 0.0
    process_seconds: float = 0.0


class Metrics:
    """What the engine counts as it goes.

    A step is of the kind "decode" if it computes one token of each of its sequences, besides
    guesses, and of the kind "prefill" otherwise; `steps[kind]` has the times of each.
    """

    def __init__(self):
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.request_success: Counter[str] = Counter()
        self.time_to_first_token = Histogram()
        self.inter_token_latency = Histogram()
        self.e2e_request_latency = Histogram()
        self.steps = {"prefill": StepTimes(), "decode": StepTimes()}

    def count_finished(self, request: Request) -> None:
        """Counts a request that has ended, by its finish reason, and its latencies."""
        self.request_success[request.finish_reason or "abort"] += 1
        if request.first_token_time is None or request.finish_time is None:
            return
        self.time_to_first_token.observe(request.first_token_time - request.arrival_time)
        self.e2e_request_latency.observe(request.finish_time - request.arrival_time)
        gaps = request.num_output_tokens - 1
        if gaps > 0:
            mean = (request.finish_time - request.first_token_time) / gaps
            self.inter_token_latency.observe(mean, times=gaps)
