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
from paged_jax.simulate.results import Results
from paged_jax.simulate.series import device_series, even_series

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from paged_jax.simulate.canvas import Picture

_ORANGE, _SKY, _GREEN, _YELLOW = "#E69F00", "#56B4E9", "#009E73", "#F0E442"
_BLUE, _VERMILION, _PURPLE, _GREY = "#0072B2", "#D55E00", "#CC79A7", "#707070"
_PALE, _INK = "#C8CCD2", "#222222"
_RUN_COLOURS = (_BLUE, _VERMILION, _GREEN, _PURPLE, _ORANGE, _SKY)
_REQUEST_COLOURS = (_ORANGE, _SKY, _GREEN, _YELLOW, _BLUE, _VERMILION, _PURPLE)
_FREE, _CACHED, _SHARED = "#FFFFFF", _PALE, _INK

# Where no device ever uses more of its memory, the rest of it is left out.
_ENLARGED_PERCENT = 40
# More points would make a band of spikes.
_FLEET_POINTS = 250

# What the memory holds, from the bottom up: a name, its colour, and words for it.
_LAYERS = (
    ("stored", _BLUE, "holds tokens"),
    ("reserved", _ORANGE, "reserved for later tokens"),
    ("internal", _VERMILION, "never used (internal)"),
    ("external", _PURPLE, "free, but no gap is wide enough (external)"),
    ("free", "#ECEEF0", "free"),
)


def draw_memory(runs: Mapping[str, Results]) -> Picture:
    """What the KV pool holds over time, a panel for each run: tokens, the three wastes, and free.

    Of a fleet, what its devices hold together; a line tells how full the fullest of them is.

    Args:
      runs: by name, such as the allocator's.

    Raises:
      ValueError: there is no run, or one of no steps.
    """
    picture, panels = _new("What the KV memory holds over time", rows=_some(runs), sharex=True)
    series = {name: even_series(run) for name, run in runs.items()}
    used = {
        name: 100 * (1 - device_series(run, ["free"])["free"].min(axis=0))
        for name, run in runs.items()
    }
    seconds = max(even["seconds"][-1] for even in series.values())
    unit, scale = _time_unit(seconds)
    most = max(float(share.max()) for share in used.values())
    legend: dict[str, Any] = {}
    for axes, (name, even) in zip(panels, series.items(), strict=True):
        times = even["seconds"] / scale
        layers = {layer: 100 * even[layer] for layer, _, _ in _LAYERS}
        layers["free"] = layers["free"] - layers["external"]
        axes.stackplot(
            times,
            *layers.values(),
            colors=[colour for _, colour, _ in _LAYERS],
            labels=[words for _, _, words in _LAYERS],
            step="post",
            linewidth=0,
        )
        if runs[name].num_replicas > 1:
            line: dict[str, Any] = {"where": "post", "color": _INK, "linewidth": 0.8}
            axes.step(times, used[name], label="the fullest device", **line)
        title = _titled(name, runs[name])
        if most < _ENLARGED_PERCENT:
            title += f"; enlarged: the other {100 - 1.2 * most:.0f}% are free"
        _name(axes, title=title, y="share of the pool, %")
        axes.set_ylim(0, 1.2 * most if most < _ENLARGED_PERCENT else 100)
        axes.set_xlim(0, seconds / scale)
        handles, labels = axes.get_legend_handles_labels()
        legend |= dict(zip(labels, handles, strict=True))
    _name_x(panels[-1], f"time, {unit}")
    _add_legend(picture, legend.values(), legend.keys())
    return picture


def draw_batch(runs: Mapping[str, Results]) -> Picture:
    """How many requests run at once over time, a line for each run.

    Of fleets, a panel of all devices together, and one of the mean device in a band that reaches
    from the one with the fewest to the one with the most.

    Args:
      runs: by name.

    Raises:
      ValueError: there is no run, or one of no steps.
    """
    _some(runs)
    is_fleet = any(run.num_replicas > 1 for run in runs.values())
    options = {"rows": 2, "sharex": True, "height": 2.6} if is_fleet else {}
    picture, panels = _new("Requests that run at once, over time", **options)
    unit, scale = _time_unit(max(run.end_seconds for run in runs.values()))
    for i, (name, run) in enumerate(runs.items()):
        series = device_series(run, ["running"], max_points=_FLEET_POINTS if is_fleet else None)
        times, running = series["seconds"] / scale, series["running"]
        colour = _RUN_COLOURS[i % len(_RUN_COLOURS)]
        line: dict[str, Any] = {"where": "post", "color": colour, "linewidth": 1.4}
        panels[0].step(times, running.sum(axis=0), label=_titled(name, run), **line)
        if is_fleet:
            panels[1].step(times, running.mean(axis=0), **line)
            band = running.min(axis=0), running.max(axis=0)
            panels[1].fill_between(times, *band, step="post", color=colour, alpha=0.2, linewidth=0)
    titles = ("All devices together", "A device: the mean, and from the fewest to the most")
    for axes, title in zip(panels, titles if is_fleet else ("",), strict=True):
        _name(axes, title=title, y="requests that run at once")
        axes.set_ylim(bottom=0)
        axes.set_xlim(left=0)
    _name_x(panels[-1], f"time, {unit}")
    _add_legend(picture, *panels[0].get_legend_handles_labels())
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
        axes.set_ylim(0, 1.08 * max(*values, 0.1))
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


def _titled(name: str, run: Results) -> str:
    return name if run.num_replicas == 1 else f"{name}, {run.num_replicas} devices"


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
