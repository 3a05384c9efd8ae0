"""The cells of docs/simulator.md run as they stand, one after another, and print what it says."""

import ast
import contextlib
import io
import re
from pathlib import Path

import pytest

from paged_jax.simulate.canvas import Picture

PAGE = Path(__file__).parent.parent / "docs" / "simulator.md"
_FENCE = re.compile(r"^```(python|text)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def run_cell(source, names):
    """What a notebook would show under a cell: its prints, and the value of a last expression."""
    body = ast.parse(source).body
    last = body.pop() if isinstance(body[-1], ast.Expr) else None
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(ast.Module(body, []), str(PAGE), "exec"), names)
        value = None
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), str(PAGE), "eval"), names)
    return printed.getvalue(), value


@pytest.mark.once
def test_the_cells_of_the_page_run_and_print_what_it_says():
    names, shown, outputs = {}, [], 0
    printed = ""
    for kind, text in _FENCE.findall(PAGE.read_text()):
        if kind == "python":
            printed, value = run_cell(text, names)
            if value is not None:
                shown.append(value)
        else:
            assert printed == text, "a cell prints something else than the page shows"
            outputs += 1
    assert outputs >= 5
    pictures = [value for value in shown if isinstance(value, Picture)]
    assert len(pictures) >= 5 and len(pictures) == len(shown)
    assert all(picture._repr_png_().startswith(b"\x89PNG") for picture in pictures)


def test_the_pictures_of_the_page_are_there():
    images = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", PAGE.read_text())
    assert images and all((PAGE.parent / image).exists() for image in images)
