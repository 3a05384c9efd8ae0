"""Results as text that a reader understands without the code."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from paged_jax.simulate.guide import Comparison


def text_table(rows: Sequence[Sequence[str]]) -> str:
    """Columns side by side, the first to the left, the others to the right; a line under row 0."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])


def compare_runs(figures: Mapping[str, Mapping[str, Any]]) -> str:
    """A table of runs side by side, of `Results.figures` by the run's name."""
    return text_table(run_rows(figures))


def run_rows(figures: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """The rows of that table, of the runs' names first; a label that belongs to the one above it
    begins with spaces.
    """
    columns = list(figures.values())
    rows = [["", *figures]]

    def add(label: str, value: Any) -> None:
        rows.append([label, *(value(f) for f in columns)])

    add("requests served", lambda f: f"{f['num_finished']:,}")
    if any(f["num_rejected"] for f in columns):
        add("  too long, or empty", lambda f: f"{f['num_rejected']:,}")
    add("  tokens of a prompt, on average", lambda f: f"{_mean(f, 'prompt', 'num_requests'):.0f}")
    add("  tokens of an output", lambda f: f"{_mean(f, 'output', 'num_finished'):.0f}")
    add("simulated hours", lambda f: f"{f['seconds'] / 3600:.3f}")
    add("time in steps, of all time", lambda f: _percent(f["busy_share"]))
    add("steps", lambda f: f"{f['num_steps']:,}")
    add("requests a second", lambda f: f"{f['requests_per_second']:.2f}")
    add("output tokens a second", lambda f: f"{f['output_tokens_per_second']:,.0f}")
    if any("cost_a_million_output_tokens" in f for f in columns):
        add("cost a million output tokens", lambda f: f"{f['cost_a_million_output_tokens']:.3f}")
    add("requests at once on a device, most", lambda f: f"{f['peak_running']:,}")
    add("  on average", lambda f: f"{f['mean']['running']:.1f}")
    if any(f["steps_with_queue"] for f in columns):
        add("  while others wait", lambda f: f"{f['mean_while_queued']['running']:.1f}")
        add("requests waiting, on average", lambda f: f"{f['mean']['waiting']:.1f}")
    _add_memory(add, columns)
    for name, label, unit, digits in (
        ("first_token_seconds", "seconds to the first token", 1, 3),
        ("inter_token_seconds", "milliseconds from token to token", 1e3, 1),
        ("request_seconds", "seconds a request", 1, 3),
    ):
        for key in ("p50", "p90", "p99"):
            add(
                f"{label}, {key}" if key == "p50" else f"  {key}",
                lambda f, name=name, key=key, unit=unit, digits=digits: (
                    f"{unit * f[name][key]:.{digits}f}"
                ),
            )
    return rows


def compare_published(comparisons: Sequence[Comparison]) -> str:
    """A table of published figures beside ours, and a note on each that is off by over 10%."""
    rows, notes = [["", "published", "ours", "lowest", "highest", "off by"]], []
    for comparison in comparisons:
        theirs, ours = comparison.theirs, comparison.ours
        mark = ""
        if abs(comparison.difference) > 0.1:
            if comparison.note not in notes:
                notes.append(comparison.note)
            mark = f" [{notes.index(comparison.note) + 1}]"
        numbers = (theirs, comparison.median, min(ours), max(ours))
        off_by = f"{100 * comparison.difference:+.1f}%"
        rows.append([comparison.name + mark, *map(_number, numbers), off_by])
    marked = (
        textwrap.fill(f"[{i}] {note}", 100, subsequent_indent="    ")
        for i, note in enumerate(notes, 1)
    )
    return "\n".join([text_table(rows), *marked])


def _add_memory(add: Any, columns: Sequence[Mapping[str, Any]]) -> None:
    """Rows on memory, blocks and the prefix cache; what no run has is left out."""
    labels = {
        "stored": "memory that holds tokens",
        "reserved": "  reserved for later tokens",
        "internal": "  never used (internal)",
        "free": "  free",
        "external": "    while a gap was missing (external)",
    }
    for name, label in labels.items():
        add(label, lambda f, name=name: _percent(f["mean"][name]))
    add("slots unused, a request", lambda f: f"{f['unused_last_block_tokens']:.1f}")
    add("preemptions", lambda f: f"{f['num_preemptions']:,}")
    add("  tokens computed again", lambda f: f"{f['recomputed']:,}")
    if any(f["swapped_out"] for f in columns):
        add("  tokens swapped out", lambda f: f"{f['swapped_out']:,}")
    if any(f["queried"] for f in columns):
        add("prompt tokens found in the cache", lambda f: _percent(f["prefix_hit_ratio"]))


def _mean(figures: Mapping[str, Any], total: str, count: str) -> float:
    return figures[total] / max(figures[count], 1)


def _percent(share: float) -> str:
    return f"{100 * share:.1f}%"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:,.2f}"
