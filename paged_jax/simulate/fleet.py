"""Several replicas behind a router."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from paged_jax.config import check_choice
from paged_jax.simulate.replica import Replica
from paged_jax.simulate.results import Results
from paged_jax.simulate.traffic import TraceRequest

ROUTERS = ("round_robin", "least_loaded", "prefix_affinity")

# Says which of some replicas takes a request.
Router = Callable[[TraceRequest, Sequence[Replica]], int]


def make_router(name: str) -> Router:
    """One of `ROUTERS`.

    `round_robin` sends requests around; `least_loaded` to where the fewest are unfinished;
    `prefix_affinity` to where a prompt went that shares at least half of this one, unless a quarter
    more (and 8) requests are unfinished there than on average.
    """
    check_choice("router", name, ROUTERS)
    if name == "round_robin":
        turns = itertools.count()
        return lambda request, replicas: next(turns) % len(replicas)
    return least_loaded if name == "least_loaded" else PrefixAffinity()


def serve(
    requests: Iterable[TraceRequest], replicas: Sequence[Replica], router: Router
) -> list[Results]:
    """Serves requests to their end on replicas side by side, each on its own clock.

    A router sees each replica as it is when the request comes. Requests wait at their replica, in
    memory: it grows with the backlog if the fleet cannot keep up.

    Returns:
      The results of each replica.

    Raises:
      ValueError: a request comes before the one ahead of it.
    """
    last = 0.0
    for request in requests:
        now = request.arrival_seconds
        if now < last:
            raise ValueError(
                f"arrival_seconds={now} comes after {last}: sort the requests by arrival"
            )
        last = now
        for replica in replicas:
            replica.advance(until=now)
        replicas[router(request, replicas)].offer(request)
    return [replica.finish() for replica in replicas]


def merged(results: Sequence[Results]) -> Results:
    """The results of a fleet as one, with the timeline of each replica."""
    total = Results(results[0].capacity_tokens)
    total.num_replicas = 0
    total.timelines = []
    for one in results:
        total.merge(one)
    return total


def least_loaded(request: TraceRequest, replicas: Sequence[Replica]) -> int:
    """The replica with the fewest unfinished requests, the first of several."""
    return min(range(len(replicas)), key=lambda i: replicas[i].load)


class PrefixAffinity:
    """Remembers where prompts went, by their prefixes, the most recent `capacity` of them.

    Sending a request after its prefix, within bounds of load, is how sglang's router goes about it.
    """

    CHUNK_TOKENS = 64

    def __init__(self, capacity: int = 1_000_000):
        self.capacity = capacity
        self._went: OrderedDict[int, int] = OrderedDict()

    def __call__(self, request: TraceRequest, replicas: Sequence[Replica]) -> int:
        keys, width = self._keys(request)
        least = least_loaded(request, replicas)
        chosen = least
        for i in range(len(keys) - 1, -1, -1):
            if 2 * (i + 1) * width < request.num_prompt_tokens:
                break
            went = self._went.get(keys[i], len(replicas))
            if went < len(replicas):  # Not a replica that an autoscaler has given back.
                chosen = went
                break
        mean = sum(replica.load for replica in replicas) / len(replicas)
        if replicas[chosen].load > 1.25 * mean + 8:
            chosen = least
        for key in keys:
            self._went[key] = chosen
            self._went.move_to_end(key)
        while len(self._went) > self.capacity:
            self._went.popitem(last=False)
        return chosen

    def _keys(self, request: TraceRequest) -> tuple[Sequence[int], int]:
        """Numbers that stand for ever longer prefixes, and how many tokens each adds."""
        if request.prefix_ids or not request.token_ids:
            return request.prefix_ids, request.prefix_tokens
        keys, key, width = [], 0, self.CHUNK_TOKENS
        for start in range(0, len(request.token_ids), width):
            # A hash of numbers is the same in every process.
            key = hash((key, *request.token_ids[start : start + width]))
            keys.append(key)
        return keys, width
