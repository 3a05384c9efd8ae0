"""How many devices some traffic needs for a latency target.

The answer is found by serving the traffic with fleets of fixed size, by doubling and bisection:
more devices are taken to be no slower. Of a long trace only a sample is served, so that the answer
comes in minutes:

- 1 / k of the arrivals, each drawn by a coin, on 1 / k of the devices. A Poisson process thinned so
  stays one, and each device sees as many requests a second. Few devices balance bursts worse than
  many, and the prefixes that requests share become rarer, so that the answer errs to the safe side;
  it comes in multiples of k.
- where that is still too much, the busiest stretch of time only. It begins with an idle fleet, and
  may end before a backlog shows; so the fleet must also have a tenth of its throughput to spare.

k is chosen so that the sample still takes several devices.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator

from paged_jax.config import SchedulerConfig
from paged_jax.simulate.fleet import make_router, merged, serve
from paged_jax.simulate.loop import simulate
from paged_jax.simulate.replica import Replica
from paged_jax.simulate.results import Results
from paged_jax.simulate.search import smallest
from paged_jax.simulate.step_time import StepTime
from paged_jax.simulate.studies import all_at_once
from paged_jax.simulate.traffic import TraceRequest

MakeRequests = Callable[[], Iterable[TraceRequest]]

# Tokens sampled in a trial; at some 200,000 a second, and ten trials, minutes in all.
TRIAL_TOKENS = 3_000_000
# A sample should take as many devices, or more.
SAMPLED_DEVICES = 8
_PROBED_REQUESTS = 512, 2048
_SHORTEST_STRETCH_SECONDS = 60.0
_STRETCHES_OF_TARGET = 60
# The load that a stretch may be answered with, as a share of what devices serve when never idle.
MOST_LOADED = 0.9


@dataclasses.dataclass(frozen=True)
class Sample:
    """What is served of a trace.

    Attributes:
      one_in: k: each request is kept with a chance of 1 / k.
      start_seconds, end_seconds: of the stretch that is served.
    """

    one_in: int = 1
    start_seconds: float = 0.0
    end_seconds: float = math.inf

    @property
    def is_all(self) -> bool:
        return self.one_in == 1 and self.end_seconds == math.inf

    def of(self, requests: Iterable[TraceRequest], seed: int = 0) -> Iterator[TraceRequest]:
        """The requests that are kept, the same ones each time; times count from the stretch's
        beginning.
        """
        # A seed that no generator of traffic has: the coin must not know of the arrivals.
        chance, draw = 1 / self.one_in, random.Random(f"sample {seed}").random
        for request in requests:
            if request.arrival_seconds >= self.end_seconds:
                break
            if draw() >= chance:
                continue
            if request.arrival_seconds >= self.start_seconds:
                seconds = request.arrival_seconds - self.start_seconds
                yield request._replace(arrival_seconds=seconds)


@dataclasses.dataclass(frozen=True)
class FleetAnswer:
    """How many devices the traffic needs.

    Attributes:
      num_devices: the smallest number that meets the target; None if `most` do not.
      ttft_p95_seconds, itl_p95_seconds: what they, or else `most`, reach.
      sample: what was served to find out; `num_devices` counts for all of the traffic.
      num_requests, num_sampled: of the traffic, and of the sample.
      trials: the numbers of devices that were tried, with the two figures of each.
    """

    num_devices: int | None
    ttft_p95_seconds: float
    itl_p95_seconds: float
    sample: Sample
    num_requests: int
    num_sampled: int
    trials: tuple[tuple[int, float, float], ...]

    def text(self) -> str:
        """The answer, and what it rests on, for a reader."""
        if self.num_devices is None:
            first = "as many devices as were allowed do not meet the target"
        else:
            first = f"{self.num_devices:,} device{'s' * (self.num_devices > 1)}"
        lines = [
            f"{first}: 95 of 100 first tokens within {self.ttft_p95_seconds:.3f} s, and further "
            f"ones within {1000 * self.itl_p95_seconds:.1f} ms of the one before"
        ]
        sample = self.sample
        if sample.one_in > 1:
            lines.append(
                f"sampled: one of {sample.one_in} requests on one of {sample.one_in} devices, so "
                f"that the answer is a multiple of {sample.one_in}, and rather too large"
            )
        if sample.end_seconds != math.inf:
            lines.append(
                f"sampled: the busiest stretch, from {sample.start_seconds:,.0f} to "
                f"{sample.end_seconds:,.0f} s, by a fleet with a tenth of its throughput to spare"
            )
        lines.append(f"{self.num_sampled:,} of {self.num_requests:,} requests were simulated")
        return "\n".join(lines)


def devices_for(
    make_requests: MakeRequests,
    config: SchedulerConfig,
    step_time: StepTime,
    *,
    ttft_p95_seconds: float,
    itl_p95_seconds: float | None = None,
    router: str = "least_loaded",
    most: int = 4096,
    sample: Sample | None = None,
) -> FleetAnswer:
    """The smallest fleet that meets a latency target; see this module for how it is found.

    Args:
      make_requests: the requests from their beginning, in order of arrival, each time.
      config, step_time: of a device.
      ttft_p95_seconds: 95 of 100 requests have their first token within it.
      itl_p95_seconds: 95 of 100 further tokens come within it after the one before; None for no
        such target.
      router: one of `fleet.ROUTERS`.
      most: the most devices to try.
      sample: what to serve of the requests; None to choose, all of them if they are few enough.

    Raises:
      ValueError: a target is not above 0, or there are no requests.
    """
    for name, target in (
        ("ttft_p95_seconds", ttft_p95_seconds),
        ("itl_p95_seconds", itl_p95_seconds),
    ):
        if target is not None and not target > 0:
            raise ValueError(f"{name}={target}: it must be above 0")
    load = Load.of(make_requests())
    width = max(_SHORTEST_STRETCH_SECONDS, _STRETCHES_OF_TARGET * ttft_p95_seconds)
    # What it takes at the least, where a device is never short of requests.
    fewest = load.peak_rate(width) / throughput(make_requests, config, step_time)
    if sample is None:
        sample = choose_sample(load, fewest, width)
    one_in, trials, num_sampled = sample.one_in, {}, 0
    most_sampled = max(most // one_in, 1)
    least = 1 if sample.end_seconds == math.inf else math.ceil(fewest / MOST_LOADED / one_in)
    least = min(least, most_sampled)

    def meets(num_devices: int) -> bool:
        nonlocal num_sampled
        if num_devices < least:
            return False
        requests = sample.of(make_requests())
        results = serve_fleet(requests, config, step_time, num_devices, router)
        num_sampled = results.totals.num_requests + results.totals.num_rejected
        trials[num_devices] = found = p95_seconds(results)
        is_slow = itl_p95_seconds is not None and found[1] > itl_p95_seconds
        return found[0] <= ttft_p95_seconds and not is_slow

    first = max(math.ceil(fewest / one_in), least)
    num = smallest(meets, first=first, most=most_sampled)
    ttft, itl = trials[most_sampled if num is None else num]
    return FleetAnswer(
        num_devices=None if num is None else num * one_in,
        ttft_p95_seconds=ttft,
        itl_p95_seconds=itl,
        sample=sample,
        num_requests=load.num_requests,
        num_sampled=num_sampled,
        trials=tuple((n * one_in, *found) for n, found in sorted(trials.items())),
    )


def throughput(make_requests: MakeRequests, config: SchedulerConfig, step_time: StepTime) -> float:
    """Requests a second of a device that always has some waiting.

    What a longer run serves beyond a shorter one, in the time that it takes beyond it: the filling
    of the batch and its thinning out at the end cancel.

    Raises:
      ValueError: none of the first requests can be served.
    """
    runs = [
        simulate(all_at_once(make_requests(), most), config, step_time) for most in _PROBED_REQUESTS
    ]
    (num, seconds), (more, longer) = ((r.totals.num_finished, r.end_seconds) for r in runs)
    if not num:
        raise ValueError(
            f"max_model_len={config.max_model_len}: the first {_PROBED_REQUESTS[0]} requests are "
            "all longer, or empty; raise it"
        )
    is_longer = more > num and longer > seconds
    return (more - num) / (longer - seconds) if is_longer else num / seconds


def serve_fleet(
    requests: Iterable[TraceRequest],
    config: SchedulerConfig,
    step_time: StepTime,
    num_devices: int,
    router: str = "least_loaded",
) -> Results:
    """Serves requests with so many devices; what they came to, together."""
    replicas = [Replica(config, step_time) for _ in range(num_devices)]
    return merged(serve(requests, replicas, make_router(router)))


def p95_seconds(results: Results) -> tuple[float, float]:
    """The 95th percentiles of the time to a first token, and from token to token."""
    return results.first_token_seconds.quantile(0.95), results.token_seconds.quantile(0.95)


@dataclasses.dataclass
class Load:
    """How many requests and output tokens come, in all and second by second.

    Attributes:
      seconds: of each second in which a request came, its number, its requests, their tokens.
    """

    num_requests: int
    num_output_tokens: int
    seconds: list[tuple[int, int, int]]

    @staticmethod
    def of(requests: Iterable[TraceRequest]) -> Load:
        """Counts them.

        Raises:
          ValueError: there is none.
        """
        seconds: list[tuple[int, int, int]] = []
        num_requests = num_tokens = 0
        for request in requests:
            second, output = int(request.arrival_seconds), request.num_output_tokens
            num_requests += 1
            num_tokens += output
            if seconds and seconds[-1][0] == second:
                _, count, tokens = seconds[-1]
                seconds[-1] = second, count + 1, tokens + output
            else:
                seconds.append((second, 1, output))
        if not num_requests:
            raise ValueError("there is no request to size a fleet for")
        return Load(num_requests, num_tokens, seconds)

    @property
    def duration_seconds(self) -> float:
        return self.seconds[-1][0] + 1.0

    def peak_rate(self, stretch_seconds: float) -> float:
        """Requests a second, averaged over the busiest stretch of that length."""
        start, _ = self.busiest(stretch_seconds)
        end = start + stretch_seconds
        return sum(n for second, n, _ in self.seconds if start <= second < end) / stretch_seconds

    def busiest(self, stretch_seconds: float) -> tuple[int, int]:
        """When the stretch begins in which the most output tokens are asked for, and how many."""
        inside: deque[tuple[int, int]] = deque()
        tokens = best = best_start = 0
        for second, _, num_tokens in self.seconds:
            inside.append((second, num_tokens))
            tokens += num_tokens
            while inside[0][0] <= second - stretch_seconds:
                tokens -= inside.popleft()[1]
            if tokens > best:
                best, best_start = tokens, inside[0][0]
        return best_start, best


def choose_sample(load: Load, fewest_devices: float, shortest_seconds: float) -> Sample:
    """As much of the requests as a trial can serve, and no less than an answer needs.

    Args:
      load: of all requests.
      fewest_devices: that they take.
      shortest_seconds: of a stretch; it must be long enough for a backlog to show.
    """
    excess = load.num_output_tokens / TRIAL_TOKENS
    if excess <= 1:
        return Sample()
    one_in = max(1, min(math.ceil(excess), int(fewest_devices / SAMPLED_DEVICES)))
    allowed_tokens = one_in * TRIAL_TOKENS
    if load.num_output_tokens <= allowed_tokens:
        return Sample(one_in)
    # As long as a trial can serve at the mean rate, and then at that of the busiest such stretch.
    width = load.duration_seconds * allowed_tokens / load.num_output_tokens
    width *= min(allowed_tokens / load.busiest(width)[1], 1)
    width = max(width, shortest_seconds)
    if width >= load.duration_seconds:
        return Sample(one_in)
    start, _ = load.busiest(width)
    return Sample(one_in, float(start), start + width)
