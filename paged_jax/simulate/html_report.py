"""One HTML file that tells what was simulated and what came of it; it needs nothing beside it."""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paged_jax.simulate.explanations import explain, verdict
from paged_jax.simulate.report import run_rows

if TYPE_CHECKING:
    from paged_jax.simulate.canvas import Picture

_STYLE = """
body { max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #222; background: #fff;
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; line-height: 1.25; } h2 { margin-top: 2.5rem; font-size: 1.2rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.9rem; width: 100%; }
th, td { padding: 0.3rem 0.7rem; border-bottom: 1px solid #ddd; text-align: left;
  vertical-align: top; }
tbody th { font-weight: normal; white-space: nowrap; } .part { padding-left: 2rem; }
.number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
.note { color: #5f6368; }
figure { margin: 1.5rem 0; } figure img { width: 100%; height: auto; }
figcaption { color: #444; font-size: 0.9rem; }
"""


# What every simulation here leaves out.
NOTES = (
    "The decisions are those of the server's own scheduler and block manager, step by step. The "
    "times are those of a model of the device, not measured on one: compare runs with each other, "
    "and measure before you promise a latency.",
    "The lengths of the answers are known to the simulator, as a trace has them; nobody hangs up, "
    "and no request fails.",
    "Time outside the device is not counted: tokenizing, the network, starting a server.",
    "Where a trace does not tell what prompts share, they share nothing: a prefix cache would find "
    "more.",
)


@dataclasses.dataclass(frozen=True)
class Figure:
    """A picture of the report.

    Attributes:
      picture: as `pictures` draws them.
      caption: what it shows and how to read it.
    """

    picture: Picture
    caption: str


def html_report(
    *,
    title: str,
    settings: Mapping[str, str],
    figures: Mapping[str, Mapping[str, Any]],
    pictures: Sequence[Figure] = (),
    notes: Sequence[str] = (),
) -> str:
    """A whole HTML page: a summary, what was simulated, the table of figures, the pictures.

    Args:
      title: what was simulated, in a line.
      settings: what to know of the traffic, the model, the devices and the limits, by name.
      figures: of each run, `Results.figures`, by its name.
      pictures: what to show; they are part of the file.
      notes: sentences on what the simulation leaves out.

    Raises:
      ValueError: there is no run.
    """
    if not figures:
        raise ValueError("figures={}: a report needs at least one run")
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{escape(title)}</h1>",
        *(f"<p>{escape(sentence)}</p>" for sentence in summary(figures)),
        "<h2>What was simulated</h2>",
        *_settings_table(settings),
        "<h2>The figures</h2>",
        *_figures_table(run_rows(figures)),
    ]
    if pictures:
        parts.append("<h2>The pictures</h2>")
        parts += [_figure(figure) for figure in pictures]
    if notes:
        parts.append("<h2>What to bear in mind</h2><ul>")
        parts += [f"<li>{escape(note)}</li>" for note in notes]
        parts.append("</ul>")
    parts.append("</body></html>\n")
    return "\n".join(parts)


def write_report(path: str | Path, **content: Any) -> None:
    """Writes `html_report` of the same arguments to a file."""
    Path(path).write_text(html_report(**content), encoding="utf-8")


def summary(figures: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """A sentence or two on each run."""
    for name, run in figures.items():
        first, between = run["first_token_seconds"], run["inter_token_seconds"]
        devices = "1 device" if run["replicas"] == 1 else f"{run['replicas']} devices"
        text = (
            f"{name}: {devices} served {run['num_finished']:,} requests in "
            f"{run['seconds'] / 3600:.2f} hours and computed {100 * run['busy_share']:.0f}% of the "
            f"time, up to {run['peak_running']:,} requests at once on a device. Half of the "
            f"requests had their first token within {first['p50']:.2f} s and 99 of 100 within "
            f"{first['p99']:.2f} s; half of the further tokens came within "
            f"{1000 * between['p50']:.1f} ms of the one before."
        )
        if "cost_a_million_output_tokens" in run:
            text += f" A million output tokens cost {run['cost_a_million_output_tokens']:.2f}."
        yield f"{text} {verdict(run)}"


def _settings_table(settings: Mapping[str, str]) -> Iterator[str]:
    yield '<div class="wide"><table><tbody>'
    for name, value in settings.items():
        yield f'<tr><th scope="row">{escape(name)}</th><td>{escape(value)}</td></tr>'
    yield "</tbody></table></div>"


def _figures_table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Row 0 has the names of the runs; each other one a label, and a figure of each run."""
    yield '<div class="wide"><table><thead><tr><th></th>'
    yield from (f'<th scope="col" class="number">{escape(name)}</th>' for name in rows[0][1:])
    yield "<th>what it says</th></tr></thead><tbody>"
    for label, *values in rows[1:]:
        kind = ' class="part"' if label.startswith(" ") else ""
        cells = "".join(f'<td class="number">{escape(value)}</td>' for value in values)
        yield (
            f'<tr><th scope="row"{kind}>{escape(label.strip())}</th>{cells}'
            f'<td class="note">{escape(explain(label))}</td></tr>'
        )
    yield "</tbody></table></div>"


def _figure(figure: Figure) -> str:
    data = base64.b64encode(figure.picture.svg().encode()).decode()
    caption = escape(figure.caption)
    return (
        f'<figure><img alt="{caption}" src="data:image/svg+xml;base64,{data}">'
        f"<figcaption>{caption}</figcaption></figure>"
    )
