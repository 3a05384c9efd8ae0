"""Medians, ratios, a table and a picture of what bench_peers.py measured."""

import datetime
import importlib
import os
import pathlib
import platform
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

CPU_FLAGS = ("avx2", "fma", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "amx_int8")
OWN_COLOUR, PEER_COLOUR = "#2a6f97", "#b0b7bf"

# case -> engine -> figures of each round
Rounds = Mapping[str, Mapping[str, Sequence[Mapping[str, float]]]]


def medians(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The median of each figure over the rounds that have it."""
    names = dict.fromkeys(name for figures in rounds for name in figures)
    return {
        name: statistics.median(figures[name] for figures in rounds if name in figures)
        for name in names
    }


def ratios(
    rounds: Mapping[str, Sequence[Mapping[str, float]]], figure: str
) -> dict[str, dict[str, float]]:
    """How many times as fast each engine is as each other: ratios[a][b] = a / b.

    A ratio is the median over rounds of the two engines' figures of the same round: what slows
    the machine for a while slows both.
    """
    return {
        a: {
            b: statistics.median(
                x[figure] / y[figure] for x, y in zip(rounds[a], rounds[b], strict=True)
            )
            for b in rounds
            if b != a
        }
        for a in rounds
    }


def agreement(reference: Sequence[int], token_ids: Sequence[int]) -> int:
    """How many tokens are equal before the first that differs."""
    pairs = zip(reference, token_ids, strict=False)
    return next(
        (i for i, (a, b) in enumerate(pairs) if a != b), min(len(reference), len(token_ids))
    )


def summarise(case: Any, rounds: Mapping[str, Sequence[Mapping[str, float]]]) -> dict[str, Any]:
    """The report of one case: every round, medians, ratios, and whether prefix hits are right."""
    summary: dict[str, Any] = {
        "title": case.title,
        "figure": case.figure,
        "base": case.base,
        "sizes": {
            "num_prompts": case.num_prompts,
            "prompt_tokens": len(case.prompt) or case.prompt_tokens,
            "shared_tokens": case.shared_tokens,
            "output_tokens": case.output_tokens,
        },
        "engines": {
            engine: {"medians": medians(own), "rounds": list(own)} for engine, own in rounds.items()
        },
        "ratios": ratios(rounds, case.figure),
    }
    if case.shared_tokens:
        summary["expected_hit_tokens"] = case.expected_hit_tokens
        summary["hits_are_right"] = all(
            figures["prefix_hit_tokens"] == case.expected_hit_tokens
            for engine, own in rounds.items()
            if engine.startswith("ours")
            for figures in own
        )
    return summary


def table(summary: Mapping[str, Any]) -> str:
    """A case as lines of text: each engine's figures, and the ratios of ours to the others."""
    figure = summary["figure"]
    engines = summary["engines"]
    width = max(map(len, engines))
    lines = [f"{summary['title']}: {figure.replace('_', ' ')}, medians"]
    for engine, own in engines.items():
        middle = own["medians"]
        values = [figures[figure] for figures in own["rounds"]]
        line = f"  {engine:{width}} {middle[figure]:9.1f}  ({min(values):.1f} to {max(values):.1f})"
        for name in ("prefix_hit_tokens", "acceptance", "output_tokens"):
            if name in middle and (name != "output_tokens" or "acceptance" in middle):
                line += f"  {name.replace('_', ' ')} {middle[name]:g}"
        found = summary["ratios"][engine]
        others = [f"{found[other]:.2f} x {other}" for other in _to_compare(engine, found)]
        lines.append(line + ("  = " + ", ".join(others) if others else ""))
    if "expected_hit_tokens" in summary:
        verdict = "as counted by ours" if summary["hits_are_right"] else "NOT as counted by ours"
        lines.append(f"  expected prefix hit tokens {summary['expected_hit_tokens']}, {verdict}")
    return "\n".join(lines)


def _to_compare(engine: str, others: Iterable[str]) -> list[str]:
    """The ratios worth a line: of this engine to its peers, and to itself without lookup."""
    if not engine.startswith("ours"):
        return []
    plain = engine.removesuffix("-lookup")
    return [name for name in others if name == plain or not name.startswith("ours")]


def machine() -> dict[str, Any]:
    """What the figures depend on besides the engines."""
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    fields = dict(
        (name.strip(), value.strip())
        for name, separator, value in (line.partition(":") for line in lines)
        if separator
    )
    found = fields.get("flags", fields.get("Features", "")).split()
    return {
        "cpu": fields.get("model name", platform.processor() or platform.machine()),
        "cpu_flags": [flag for flag in CPU_FLAGS if flag in found],
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": platform.platform(),
        "load_average": os.getloadavg()[0],
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def require_matplotlib() -> Any:
    """matplotlib's pyplot, drawing to files.

    Raises:
      ImportError: it is missing, with the mend.
    """
    try:
        importlib.import_module("matplotlib").use("agg")
        return importlib.import_module("matplotlib.pyplot")
    except ImportError as error:
        raise ImportError(
            "a picture needs matplotlib: pip install 'paged-jax[plots]', or leave the picture out"
        ) from error


def draw(report: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """A panel of bars for each case: medians, with the range of the rounds and the ratio to its
    base engine.

    Raises:
      ImportError: matplotlib is missing.
    """
    plt = require_matplotlib()
    cases = list(report["cases"].values())
    heights = [len(case["engines"]) for case in cases]
    figure, axes = plt.subplots(
        len(cases),
        1,
        figsize=(8, 0.9 * len(cases) + 0.36 * sum(heights)),
        gridspec_kw={"height_ratios": [1.5 + height for height in heights]},
        squeeze=False,
        layout="constrained",
    )
    for case, axis in zip(cases, axes[:, 0], strict=True):
        _draw_case(case, axis)
    about = report["machine"]
    figure.suptitle(f"{report['model']} on {about['cores']} cores of {about['cpu']}", fontsize=10)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _draw_case(case: Mapping[str, Any], axis: Any) -> None:
    engines = list(case["engines"])
    values = [case["engines"][engine]["medians"][case["figure"]] for engine in engines]
    spans = []
    for engine, value in zip(engines, values, strict=True):
        own = [figures[case["figure"]] for figures in case["engines"][engine]["rounds"]]
        spans.append((value - min(own), max(own) - value))
    colours = [OWN_COLOUR if engine.startswith("ours") else PEER_COLOUR for engine in engines]
    rows = range(len(engines))
    axis.barh(rows, values, color=colours, xerr=list(zip(*spans, strict=True)), ecolor="#555555")
    for row, (engine, value) in enumerate(zip(engines, values, strict=True)):
        label = f" {value:,.0f}"
        ratio = case["ratios"][engine].get(case["base"])
        if ratio is not None:
            label += f"   {ratio:.2f} x {case['base']}"
        axis.text(value + spans[row][1], row, label, va="center", fontsize=8)
    axis.set_yticks(rows, engines, fontsize=8)
    axis.invert_yaxis()
    axis.set_xlim(0, 1.35 * max(values))
    axis.tick_params(axis="x", labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)
    unit = case["figure"].replace("_per_second", "/s").replace("_", " ")
    axis.set_title(f"{case['title']} ({unit})", fontsize=9, loc="left")
