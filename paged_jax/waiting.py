"""The queue of waiting requests, in the order in which they are to be admitted."""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Iterator

from paged_jax.request import Request


def rank(request: Request) -> tuple[int, int]:
    """The priority policy's order: smaller is served first and preempted last."""
    return request.priority, request.arrival_index


class WaitingQueue:
    """First come, first served, or by (priority, arrival).

    Under the first policy a preempted request goes back to the front; under the second its rank
    says where it stands.
    """

    def __init__(self, policy: str = "fcfs"):
        self.by_priority = policy == "priority"
        self._requests: deque[Request] = deque()

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def __getitem__(self, index: int) -> Request:
        return self._requests[index]

    def append(self, request: Request) -> None:
        """Puts a request at the back, or at its rank."""
        if self.by_priority:
            bisect.insort(self._requests, request, key=rank)
        else:
            self._requests.append(request)

    def append_first(self, request: Request) -> None:
        """Puts a request at the front, or at its rank."""
        if self.by_priority:
            bisect.insort(self._requests, request, key=rank)
        else:
            self._requests.appendleft(request)

    def pop_first(self) -> Request:
        return self._requests.popleft()

    def remove(self, request: Request) -> None:
        self._requests.remove(request)

    def clear(self) -> None:
        self._requests.clear()
