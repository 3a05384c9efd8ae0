"""Pictures of simulated runs, as matplotlib figures: `savefig` stores them, a notebook shows them.

    from paged_jax.simulate.pictures import draw_memory

    draw_memory({"paged": simulate(chats, config, step_time)}).savefig("memory.png")

They need the extra `plots`; without it each function raises an ImportError that says so. The
colours are those of Okabe and Ito ("Color Universal Design", 2008), which people with any kind of
colour vision tell apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from paged_jax.simulate.pool_history import CACHED, FREE, SHARED, PoolHistory
from paged_jax.simulate.results import SERIES, Results

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from paged_jax.simulate.canvas import Picture

_ORANGE, _SKY, _GREEN, _YELLOW = "#E69F00", "#56B4E9", "#009E73", "#F0E442"
_BLUE, _VERMILION, _PURPLE, _GREY = "#0072B2", "#D55E00", "#CC79A7", "#707070"
_PALE = "#C8CCD2"
_RUN_COLOURS = (_BLUE, _VERMILION, _GREEN, _PURPLE, _ORANGE, _SKY)
_REQUEST_COLOURS = (_ORANGE, _SKY, _GREEN, _YELLOW, _BLUE, _VERMILION, _PURPLE)
_FREE, _CACHED, _SHARED = "#FFFFFF", _PALE, "#222222"

# What the memory holds, from the bottom up: a name, its colour, and words for it.
_LAYERS = (
    ("stored", _BLUE, "holds tokens"),
    ("reserved", _ORANGE, "reserved for later tokens"),
    ("internal", _VERMILION, "never used (internal)"),
    ("external", _PURPLE, "free, but no gap is wide enough (external)"),
    ("free", "#ECEEF0", "free"),
)


def even_series(results: Results) -> dict[str, np.ndarray]:
    """A run's timeline at even steps of time: float64[num_points] each, by `SERIES` and "seconds".

    A value holds from its time to the next one's; the last repeats the one before it. Where the
    device had nothing to do, memory is free and nobody runs.

    Raises:
      ValueError: the results have no timeline: those of a fleet, merged, or of a run of no steps.
    """
    series, width = results.timeline.series(), results.timeline.interval_seconds
    if not series["seconds"]:
        raise ValueError(
            "these results have no timeline: merged ones of a fleet have none, draw one device's"
        )
    places = np.rint(np.array(series["seconds"]) / width).astype(int)
    # Several steps taken in at once, or a long one, last into the intervals that follow.
    reach = places + np.maximum(np.ceil(np.array(series["sampled_seconds"]) / width), 1).astype(int)
    num_intervals = int(reach[-1])
    holds = np.zeros(num_intervals, int) - 1
    for i, (place, end) in enumerate(zip(places, reach, strict=True)):
        holds[place:end] = i
    even = {"seconds": width * np.arange(num_intervals + 1)}
    for name in SERIES:
        idle = 1.0 if name == "free" else 0.0
        values = np.array([*series[name], idle])[holds]
        even[name] = np.append(values, values[-1])
    return even


def draw_memory(runs: Mapping[str, Results]) -> Picture:
    """What the KV pool holds over time, a panel for each run: tokens, the three wastes, and free.

    Args:
      runs: by name, such as the allocator's; each of one device.

    Raises:
      ValueError: there is no run, or one without a timeline.
    """
    picture, panels = _new("What the KV memory holds over time", rows=_some(runs), sharex=True)
    series = {name: even_series(results) for name, results in runs.items()}
    unit, scale = _time_unit(max(s["seconds"][-1] for s in series.values()))
    for axes, (name, even) in zip(panels, series.items(), strict=True):
        layers = {layer: 100 * even[layer] for layer, _, _ in _LAYERS}
        layers["free"] = layers["free"] - layers["external"]
        axes.stackplot(
            even["seconds"] / scale,
            *layers.values(),
            colors=[colour for _, colour, _ in _LAYERS],
            labels=[words for _, _, words in _LAYERS],
            step="post",
            linewidth=0,
        )
        _name(axes, title=name, y="share of the pool, %")
        axes.set_ylim(0, 100)
        axes.set_xlim(left=0)
    _name_x(panels[-1], f"time, {unit}")
    _add_legend(picture, *panels[0].get_legend_handles_labels())
    return picture


def draw_batch(runs: Mapping[str, Results]) -> Picture:
    """How many requests run at once over time, a line for each run.

    Args:
      runs: by name; each of one device.

    Raises:
      ValueError: there is no run, or one without a timeline.
    """
    _some(runs)
    picture, [axes] = _new("Requests in a step over time")
    series = {name: even_series(results) for name, results in runs.items()}
    unit, scale = _time_unit(max(s["seconds"][-1] for s in series.values()))
    for i, (name, even) in enumerate(series.items()):
        axes.step(
            even["seconds"] / scale,
            even["running"],
            where="post",
            color=_RUN_COLOURS[i % len(_RUN_COLOURS)],
            linewidth=1.4,
            label=name,
        )
    _name(axes, x=f"time, {unit}", y="requests that run at once")
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    _add_legend(picture, *axes.get_legend_handles_labels())
    return picture


def draw_block_sizes(runs: Mapping[int, Results]) -> Picture:
    """What the block size costs: slots unused in a last block, memory used, requests at once.

    Averages are over the steps that left requests waiting, if there were any: memory was short
    then.

    Args:
      runs: by block size, in tokens; of the same traffic and memory.

    Raises:
      ValueError: there is no run.
    """
    _some(runs)
    picture, panels = _new("Block size: small blocks waste less", columns=3)
    sizes = sorted(runs)
    means = [busiest_means(runs[size]) for size in sizes]
    curves: tuple[tuple[str, str, list[float]], ...] = (
        ("Unused slots of a last block", "tokens", [runs[s].unused_last_block for s in sizes]),
        ("Memory that holds tokens", "share of the pool, %", [100 * m["stored"] for m in means]),
        ("Requests at once", "requests", [m["running"] for m in means]),
    )
    for axes, (title, unit, values) in zip(panels, curves, strict=True):
        axes.plot(sizes, values, color=_BLUE, marker="o", markersize=4, linewidth=1.4)
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.set_ylim(bottom=0)
        _name(axes, title=title, x="tokens a block", y=unit)
    half = [(size - 1) / 2 for size in sizes]
    panels[0].plot(sizes, half, color=_PALE, linewidth=6, zorder=1, label="half a block")
    panels[0].legend(frameon=False, fontsize=8)
    return picture


def draw_hit_ratios(
    ratios: Mapping[str, Mapping[int | None, float]], pool_tokens: int | None = None
) -> Picture:
    """How much of all prompts a prefix cache finds, against its size.

    Args:
      ratios: for each curve's name, the share found, 0 to 1, by the cache's size in tokens; None
        for a cache without end, which is drawn as a level.
      pool_tokens: a size to mark: what one device's pool holds.

    Raises:
      ValueError: there is no curve.
    """
    _some(ratios)
    picture, [axes] = _new("Prompt tokens found in a prefix cache, against its size")
    for i, (name, curve) in enumerate(ratios.items()):
        colour = _RUN_COLOURS[i % len(_RUN_COLOURS)]
        sizes = sorted(size for size in curve if size is not None)
        found = [100 * curve[size] for size in sizes]
        axes.plot(sizes, found, color=colour, marker="o", markersize=4, linewidth=1.4, label=name)
        if None in curve:
            level = 100 * curve[None]
            label = f"{name}, cache without end: {level:.1f}%"
            axes.axhline(level, color=colour, linestyle="--", linewidth=1, label=label)
    if pool_tokens is not None:
        axes.axvline(pool_tokens, color=_GREY, linestyle=":", linewidth=1.2, label="one pool")
    axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    _name(axes, x="tokens that the cache holds", y="prompt tokens found, %")
    _add_legend(picture, *axes.get_legend_handles_labels())
    return picture


def draw_pool_history(history: PoolHistory) -> Picture:
    """The pool as a map: a row for each block, time to the right, coloured by who holds it.

    Requests take seven colours in turn; a block that several hold is black, one that nobody holds
    but a hit would find is grey, a free one white.
    """
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    picture, [axes] = _new("Who holds each block of the pool", height=4.2)
    num_colours = len(_REQUEST_COLOURS)
    codes = np.where(history.owner >= 0, history.owner % num_colours, 0)
    marks = ((SHARED, _SHARED), (CACHED, _CACHED), (FREE, _FREE))
    for i, (kind, _) in enumerate(marks):
        codes[history.owner == kind] = num_colours + i
    unit, scale = _time_unit(history.seconds[-1] - history.seconds[0])
    num_blocks = history.owner.shape[1]
    axes.pcolormesh(
        (history.seconds - history.seconds[0]) / scale,
        np.arange(num_blocks + 1) + 0.5,  # Block 0 is the null block.
        codes.T,
        cmap=ListedColormap([*_REQUEST_COLOURS, *(colour for _, colour in marks)]),
        vmin=-0.5,
        vmax=num_colours + len(marks) - 0.5,
        rasterized=True,
    )
    axes.grid(False)
    _name(axes, x=f"time, {unit}", y=f"block, of {history.block_size} tokens")
    names = ("held by several requests", "cached, held by nobody", "free")
    patches = [Patch(facecolor=colour, label="a request") for colour in _REQUEST_COLOURS[:2]]
    patches += [
        Patch(facecolor=colour, edgecolor=_GREY, linewidth=0.5, label=name)
        for name, (_, colour) in zip(names, marks, strict=True)
    ]
    labels = ["a request", "another (colours repeat)", *names]
    _add_legend(picture, patches, labels)
    return picture


def busiest_means(results: Results) -> Mapping[str, float]:
    """Averages over the steps that left requests waiting; over all, if none did."""
    return (results.queued if results.queued.weight else results.always).means()


def _some(things: Mapping[Any, Any]) -> int:
    if not things:
        raise ValueError("there is nothing to draw: give at least one run or curve")
    return len(things)


def _new(title: str, **options: Any) -> tuple[Picture, Any]:
    from paged_jax.simulate.canvas import new_picture

    return new_picture(title, **options)


def _name(axes: Axes, **labels: str) -> None:
    from paged_jax.simulate.canvas import name_axes

    name_axes(axes, **labels)


def _name_x(axes: Axes, label: str) -> None:
    axes.set_xlabel(label, fontsize=9)


def _add_legend(picture: Picture, handles: Any, labels: Any) -> None:
    """A legend under the panels, where it covers nothing."""
    picture.legend(handles, labels, loc="outside lower left", ncols=3, frameon=False, fontsize=9)


def _time_unit(seconds: float) -> tuple[str, float]:
    """A unit in which that long a time is a handy number, and how many seconds it has."""
    if seconds < 300:
        return "seconds", 1.0
    return ("minutes", 60.0) if seconds < 3 * 3600 else ("hours", 3600.0)
