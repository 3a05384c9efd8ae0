"""matplotlib as the pictures use it. Importing this module needs the extra `plots`."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

try:
    from matplotlib import rc_context
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
except ImportError as error:
    raise ImportError(
        "pictures need matplotlib, which the extra `plots` brings: pip install 'paged-jax[plots]'"
    ) from error

INK, PALE_INK, LINE = "#222222", "#6B6B6B", "#D5D8DC"


class Picture(Figure):
    """A matplotlib figure, apart from pyplot, that a notebook shows as it is."""

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", dpi=120)
        return buffer.getvalue()

    def svg(self) -> str:
        """The picture as an <svg> document, the same text each time."""
        buffer = io.StringIO()
        if self.get_layout_engine() is not None:  # Laid out again, it would move by a hair.
            self.draw_without_rendering()
            self.set_layout_engine("none")
        with rc_context({"svg.hashsalt": "paged-jax"}):
            self.savefig(buffer, format="svg", metadata={"Date": None})
        return buffer.getvalue()


def new_picture(
    title: str, *, rows: int = 1, columns: int = 1, height: float = 3.2, **options: Any
) -> tuple[Picture, Sequence[Axes]]:
    """A picture of `rows` times `columns` plain panels, each `height` inches high.

    Args:
      options: of `Figure.subplots`, such as `sharex`.
    """
    picture = Picture(figsize=(9.6, 0.7 + rows * height), dpi=100, layout="constrained")
    picture.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold", color=INK)
    panels = picture.subplots(rows, columns, squeeze=False, **options)
    for axes in panels.flat:
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(PALE_INK)
        axes.tick_params(colors=PALE_INK, labelsize=9)
        axes.set_axisbelow(True)
        axes.grid(axis="y", color=LINE, linewidth=0.6)
    return picture, list(panels.flat)


def name_axes(axes: Axes, *, title: str = "", x: str = "", y: str = "") -> None:
    """Titles and labels in the pictures' hand."""
    axes.set_title(title, loc="left", fontsize=10, color=INK)
    axes.set_xlabel(x, fontsize=9, color=INK)
    axes.set_ylabel(y, fontsize=9, color=INK)
