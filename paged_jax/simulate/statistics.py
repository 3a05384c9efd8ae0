"""Statistics over any number of samples in constant memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np


class Histogram:
    """Counts of positive numbers in buckets that grow by a constant factor.

    A quantile is off by at most half a bucket: 0.5% of itself. The method is that of Masson, Rim,
    Lee: "DDSketch", VLDB 2019. Zero and less share a bucket of their own.
    """

    GROWTH = 1.01

    def __init__(self):
        self.count = 0
        self.total = 0.0
        self.max = 0.0
        self._counts: dict[int, int] = {}
        self._num_zeros = 0
        self._scale = 1 / math.log(self.GROWTH)

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0

    def add(self, value: float, count: int = 1) -> None:
        """Takes in a value, `count` times."""
        self.count += count
        self.total += value * count
        if value > self.max:
            self.max = value
        if value <= 0:
            self._num_zeros += count
            return
        bucket = math.floor(math.log(value) * self._scale)
        self._counts[bucket] = self._counts.get(bucket, 0) + count

    def add_all(self, values: np.ndarray, count: int = 1) -> None:
        """Takes in positive values, float64[n], each `count` times."""
        self.count += count * len(values)
        self.total += count * float(values.sum())
        self.max = max(self.max, float(values.max()))
        buckets = np.floor(np.log(values) * self._scale).astype(int)
        first = int(buckets.min())
        for i, num in enumerate(np.bincount(buckets - first).tolist(), first):
            if num:
                self._counts[i] = self._counts.get(i, 0) + count * num

    def merge(self, other: Histogram) -> None:
        """Takes in all that another one holds."""
        self.count += other.count
        self.total += other.total
        self.max = max(self.max, other.max)
        self._num_zeros += other._num_zeros
        for bucket, count in other._counts.items():
            self._counts[bucket] = self._counts.get(bucket, 0) + count

    def quantile(self, q: float) -> float:
        """The value that a share `q` of all lies at or below; 0 if there are none."""
        if not 0 <= q <= 1:
            raise ValueError(f"q={q}: it must lie between 0 and 1")
        rank = q * (self.count - 1) - self._num_zeros
        if rank < 0 or not self._counts:
            return 0.0
        for bucket in sorted(self._counts):
            rank -= self._counts[bucket]
            if rank < 0:
                break
        return min(self.GROWTH ** (bucket + 0.5), self.max)

    def share_below(self, limit: float) -> float:
        """The share of all that lies at or below a limit, to a bucket; 1 if there are none."""
        if not self.count:
            return 1.0
        if limit <= 0:
            return self._num_zeros / self.count
        last = math.floor(math.log(limit) * self._scale)
        below = sum(count for bucket, count in self._counts.items() if bucket <= last)
        return (self._num_zeros + below) / self.count


class Averages:
    """Weighted means of named quantities."""

    def __init__(self, names: Sequence[str]):
        self.names = tuple(names)
        self.weight = 0.0
        self.sums = [0.0] * len(self.names)

    def add(self, values: Sequence[float], weight: float) -> None:
        """Takes in a value of each, in the order of the names."""
        self.weight += weight
        self.sums = [s + weight * value for s, value in zip(self.sums, values, strict=True)]

    def merge(self, other: Averages) -> None:
        """Takes in all that another one of the same names holds."""
        self.weight += other.weight
        self.sums = [a + b for a, b in zip(self.sums, other.sums, strict=True)]

    def means(self) -> Mapping[str, float]:
        weight = self.weight or 1.0
        return {name: s / weight for name, s in zip(self.names, self.sums, strict=True)}


class Timeline:
    """Averages over time in at most `max_points` intervals, which widen as time goes on.

    A sample counts towards each interval with the time that it shares with it.

    Attributes:
      interval_seconds: width of each.
    """

    def __init__(self, names: Sequence[str], max_points: int = 1000):
        self.names = tuple(names)
        self.max_points = max_points
        self.interval_seconds = 1e-3
        self._points: dict[int, Averages] = {}

    def add(self, start: float, seconds: float, values: Sequence[float]) -> None:
        """Takes in what held for some seconds from `start` on."""
        end = start + seconds
        while end >= self.max_points * self.interval_seconds:
            self._widen()
        width = self.interval_seconds
        first, last = int(start / width), int(end / width)
        if first == last:
            self._point(first).add(values, seconds)
            return
        for index in range(first, last + 1):
            shared = min(end, (index + 1) * width) - max(start, index * width)
            if shared > 0:
                self._point(index).add(values, shared)

    @property
    def num_points(self) -> int:
        """Intervals in which something was sampled."""
        return len(self._points)

    def series(self) -> dict[str, list[float]]:
        """Times (the intervals' starts) under "seconds", how much of each was sampled under
        "sampled_seconds", and the means of each quantity.
        """
        indices = sorted(self._points)
        series = {
            "seconds": [i * self.interval_seconds for i in indices],
            "sampled_seconds": [self._points[i].weight for i in indices],
        }
        means = [self._points[i].means() for i in indices]
        for name in self.names:
            series[name] = [mean[name] for mean in means]
        return series

    def _point(self, index: int) -> Averages:
        point = self._points.get(index)
        if point is None:
            point = self._points[index] = Averages(self.names)
        return point

    def _widen(self) -> None:
        self.interval_seconds *= 2
        points: dict[int, Averages] = {}
        for index, point in self._points.items():
            other = points.get(index // 2)
            if other is None:
                points[index // 2] = point
            else:
                other.merge(point)
        self._points = points
