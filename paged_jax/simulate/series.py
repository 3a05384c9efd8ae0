"""Timelines of one device or of a fleet, at even steps of time: what the pictures draw."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paged_jax.simulate.results import SERIES, Results
from paged_jax.simulate.statistics import Timeline


def even_series(results: Results) -> dict[str, np.ndarray]:
    """A run's timeline at even steps of time: float64[num_points] each, by `SERIES` and "seconds".

    Of a fleet, the mean of its devices. A value holds from its time to the next one's; the last
    repeats the one before it. Where a device has nothing to do, memory is free and nobody runs.

    Raises:
      ValueError: the results are those of a run of no steps.
    """
    series = device_series(results)
    return {name: s if name == "seconds" else s.mean(axis=0) for name, s in series.items()}


def device_series(
    results: Results, names: Sequence[str] = SERIES, *, max_points: int | None = None
) -> dict[str, np.ndarray]:
    """The same device by device: float64[num_devices, num_points], but for "seconds".

    Args:
      results: of a device, or `fleet.merged`.
      names: some of `SERIES`.
      max_points: the most points, each the mean over a longer time then; None for all.

    Raises:
      ValueError: the results are those of a run of no steps.
    """
    used = [timeline for timeline in results.timelines if timeline.num_points]
    if not used:
        raise ValueError("these results have no timeline: no device made a step")
    width = max(timeline.interval_seconds for timeline in used)
    while max_points is not None and results.end_seconds / width > max_points:
        width *= 2
    devices = [_intervals(timeline, width, names) for timeline in results.timelines]
    num_intervals = max(len(values) for device in devices for values in device.values())
    even = {"seconds": width * np.arange(num_intervals + 1)}
    for name in names:
        rows = np.full((len(devices), num_intervals + 1), _idle(name))
        for row, device in zip(rows, devices, strict=True):
            row[: len(device[name])] = device[name]
        rows[:, -1] = rows[:, -2]
        even[name] = rows
    return even


def _intervals(timeline: Timeline, width: float, names: Sequence[str]) -> dict[str, np.ndarray]:
    """The means over intervals of some width, a power of two times the timeline's own."""
    if not timeline.num_points:
        return {name: np.zeros(0) for name in names}
    series, own = timeline.series(), timeline.interval_seconds
    places = np.rint(np.array(series["seconds"]) / own).astype(int)
    busy = np.array(series["sampled_seconds"]) / own  # The rest of an interval was idle.
    factor = round(width / own)
    found = {}
    for name in names:
        idle = _idle(name)
        values = np.full(factor * (places[-1] // factor + 1), idle)
        values[places] += busy * (np.array(series[name]) - idle)
        found[name] = values.reshape(-1, factor).mean(axis=1)
    return found


def _idle(name: str) -> float:
    """A quantity's value while there is nothing to do."""
    return 1.0 if name == "free" else 0.0
