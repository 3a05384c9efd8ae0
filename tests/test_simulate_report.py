"""Pictures show the data that they are given, and the report every figure that it has."""

import base64
import importlib
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from paged_jax.config import SchedulerConfig
from paged_jax.simulate import ChatTraffic, ConstantStepTime, Results, TraceRequest, simulate
from paged_jax.simulate.allocators import MemorySample
from paged_jax.simulate.explanations import EXPLANATIONS, explain
from paged_jax.simulate.fleet import merged
from paged_jax.simulate.html_report import Figure, html_report
from paged_jax.simulate.pictures import (
    draw_batch,
    draw_block_sizes,
    draw_hit_ratios,
    draw_memory,
    draw_pool_history,
)
from paged_jax.simulate.pool_history import CACHED, FREE, SHARED, sample_pool
from paged_jax.simulate.report import run_rows
from paged_jax.simulate.report_pictures import report_pictures
from paged_jax.simulate.series import device_series, even_series
from paged_jax.simulate.studies import (
    all_at_once,
    small_pool_history,
    sweep_block_sizes,
    sweep_cache_sizes,
)

SCRIPT = Path(__file__).parent.parent / "scripts" / "simulate.py"
STEP_TIME = ConstantStepTime(0.5)


def config(num_blocks=200, **fields):
    fields = {"max_model_len": 512, "max_num_seqs": 64, "max_num_batched_tokens": 512, **fields}
    return SchedulerConfig(num_blocks=num_blocks, **fields)


def chats(num_requests=60, **fields):
    fields = {"prompt_median_tokens": 60, "output_median_tokens": 30, **fields}
    return ChatTraffic(num_requests=num_requests, max_total_tokens=512, **fields)


def stepped(samples):
    """Results of steps of 1 s: (when, running, stored, free) each, of 100 slots."""
    results = Results(100)
    for start, running, stored, free in samples:
        memory = MemorySample(stored, 0, 100 - stored - free, free, is_fragmented=free == 30)
        results.add_steps(start, 1.0, running, 1, memory)
    return results


def x_of(line):
    return np.asarray(line.get_xdata())


def y_of(line):
    return np.asarray(line.get_ydata())


def test_a_series_is_even_and_knows_when_a_device_is_idle():
    results = stepped([(0.0, 3, 40, 60), (1.0, 4, 50, 30), (8.0, 1, 10, 90)])
    even = even_series(results)
    # Intervals of 16 ms hold 8 s; what holds at a time is what the last sample before it says.
    times = [0.5, 1.5, 3.0, 7.5, 8.5]
    expected = {
        "running": [3.0, 4.0, 0.0, 0.0, 1.0],
        "free": [0.6, 0.3, 1.0, 1.0, 0.9],
        "external": [0.0, 0.3, 0.0, 0.0, 0.0],
    }
    at = np.searchsorted(even["seconds"], times, "right") - 1
    assert np.allclose(np.diff(even["seconds"]), results.timelines[0].interval_seconds)
    assert even["seconds"][-1] == pytest.approx(9.0, abs=0.02)
    for name, values in expected.items():
        assert even[name][at] == pytest.approx(values), name
    with pytest.raises(ValueError, match="no timeline"):
        even_series(Results(100))


def test_time_between_steps_is_idle():
    # A step of 1 s in every 3: intervals of some seconds show the mean over all of the time.
    results = stepped([(3.0 * i, 6, 60, 40) for i in range(2000)])
    even = even_series(results)
    assert results.timelines[0].interval_seconds > 6
    assert even["running"].mean() == pytest.approx(2, rel=0.02)
    assert even["free"].mean() == pytest.approx(0.8, rel=0.02)


def test_a_fleet_is_the_sum_of_its_devices():
    # One device makes its steps in 16 s, the other in 4: their intervals differ in width.
    one = stepped([(float(i), 4, 40, 60) for i in range(16)])
    two = stepped([(float(i), 10, 90, 10) for i in range(4)])
    fleet = merged([one, two])
    widths = {timeline.interval_seconds for timeline in fleet.timelines}
    assert len(widths) == 2
    series = device_series(fleet, ["running"])
    at = np.searchsorted(series["seconds"], [1.5, 10.5], "right") - 1
    assert np.allclose(series["running"][:, at], [[4, 4], [10, 0]])
    together, each = draw_batch({"paged": fleet}).axes
    line, mean = together.lines[0], each.lines[0]
    assert len(x_of(line)) <= 251, "so that the band can be seen"
    at_all, at = at, np.searchsorted(x_of(line), [1.5, 10.5], "right") - 1
    assert y_of(line)[at] == pytest.approx([14, 4]) and y_of(mean)[at] == pytest.approx([7, 2])
    corners = np.asarray(each.collections[0].get_paths()[0].vertices)
    assert corners[:, 1].max() == pytest.approx(10) and line.get_label() == "paged, 2 devices"
    [axes] = draw_memory({"paged": fleet}).axes
    assert y_of(axes.lines[0])[at_all] == pytest.approx([90, 40]), "the fullest device"
    assert even_series(fleet)["stored"][at_all] == pytest.approx([0.65, 0.2])


def test_the_layers_of_memory_stand_on_each_other():
    picture = draw_memory({"one": stepped([(0.0, 3, 40, 60), (1.0, 4, 50, 30)])})
    [axes] = picture.axes
    tops = []
    for layer in axes.collections:
        corners = np.asarray(layer.get_paths()[0].vertices)
        tops.append(corners[corners[:, 0] > 1.98, 1].max())
    # 50 stored, none reserved, 20 never used, 30 free that no gap is wide enough in.
    assert tops == pytest.approx([50, 50, 70, 100, 100])
    assert axes.get_title(loc="left") == "one" and axes.get_ylabel() == "share of the pool, %"
    assert axes.get_xlabel() == "time, seconds"


def test_a_batch_is_a_line_for_each_run():
    runs = {"a": stepped([(0.0, 3, 40, 60)]), "b": stepped([(0.0, 5, 40, 60), (1.0, 9, 50, 50)])}
    [axes] = draw_batch(runs).axes
    lines = {line.get_label(): y_of(line).round(9) for line in axes.lines}
    assert set(lines["a"]) == {3} and set(lines["b"]) == {5, 9}
    assert len({line.get_color() for line in axes.lines}) == 2
    for draw in (draw_batch, draw_memory, draw_block_sizes, draw_hit_ratios):
        with pytest.raises(ValueError, match="nothing to draw"):
            draw({})


def test_block_sizes_show_their_waste():
    requests = all_at_once(chats(150), 150)
    runs = sweep_block_sizes(requests, config(), STEP_TIME, [32, 8])
    panels = draw_block_sizes(runs).axes
    unused, memory, batch = (axes.lines[0] for axes in panels)
    assert list(x_of(unused)) == [8, 32]
    assert y_of(unused) == pytest.approx([3.5, 15.5], abs=1.5)
    assert list(y_of(unused)) == [runs[8].unused_last_block, runs[32].unused_last_block]
    assert y_of(memory) == pytest.approx([100 * runs[s].queued.means()["stored"] for s in (8, 32)])
    assert y_of(batch)[0] > y_of(batch)[1], "large blocks leave room for fewer"
    assert (runs[8].capacity_tokens, runs[32].capacity_tokens) == (3184, 3168)
    assert list(y_of(panels[0].lines[1])) == [3.5, 15.5]


def test_hits_against_the_size_of_the_cache():
    def requests():
        # Two conversations in turn, of two turns each: the second turns hit 64 of 384 tokens each.
        for turn in (1, 2):
            for talk in (10, 20):
                ids = [talk + i for i in range(turn)]
                yield TraceRequest(0.0, 64 * turn, 1, ids, 64)

    # With room for two, the first one's new entry costs the second one its old one.
    curve = {64: 0.0, 128: 64 / 384, 192: 128 / 384, None: 128 / 384}
    ratios = sweep_cache_sizes(requests, list(curve))
    assert ratios == {"least recently used": pytest.approx(curve)}
    [axes] = draw_hit_ratios(ratios, pool_tokens=100).axes
    line, level, pool = axes.lines
    assert list(x_of(line)) == [64, 128, 192]
    assert y_of(line) == pytest.approx([0, 100 / 6, 100 / 3])
    assert list(y_of(level)) == pytest.approx([100 / 3] * 2)
    assert list(x_of(pool)) == [100, 100]
    assert sweep_cache_sizes(lambda: [TraceRequest(0.0, 4, 1)], [64]) == {}
    tokens = [TraceRequest(0.0, 40, 1, token_ids=range(40))] * 2
    found = sweep_cache_sizes(lambda: tokens, [160, None], 16)
    assert found == {"block manager": {160: pytest.approx(32 / 80)}}


def test_a_map_of_the_pool_by_hand():
    # Blocks of 4. The first prompt of 8 is cached when it ends in step 2; the others hit it.
    prompt = list(range(8))
    requests = [
        TraceRequest(0.0, 8, 2, token_ids=prompt),
        TraceRequest(5.0, 9, 2, token_ids=[*prompt, 50]),
        TraceRequest(5.0, 9, 2, token_ids=[*prompt, 60]),
    ]
    limits = config(9, block_size=4, max_model_len=16)
    history = sample_pool(requests, limits, ConstantStepTime(1.0))
    assert history.seconds.tolist() == [0, 1, 5, 6, 7]
    kinds = [sorted(moment.tolist()) for moment in history.owner]
    assert kinds[0] == [FREE] * 6 + [0, 0]
    assert kinds[1] == [FREE] * 5 + [0, 0, 0]
    assert kinds[2] == kinds[3] == sorted([SHARED, SHARED, 1, 2] + [FREE] * 4)
    picture = draw_pool_history(history)
    mesh = picture.axes[0].collections[0]
    codes = np.asarray(mesh.get_array()).reshape(8, 4)
    assert len(set(codes[:, 2].tolist())) == 4, "two requests, what they share, and what is free"
    assert (codes[history.owner.T == FREE] == codes.max()).all()


def test_a_map_keeps_as_many_moments_as_it_may():
    history = sample_pool(chats(40), config(), STEP_TIME, num_moments=16)
    assert 8 <= len(history.owner) <= 16 and history.owner.shape[1] == 199
    gaps = np.diff(history.seconds)[:-1]
    assert np.allclose(gaps, gaps[0]), "even steps of time"
    assert history.owner.max() > 30 and CACHED in history.owner
    uncached = sample_pool(chats(40), config(enable_prefix_caching=False), STEP_TIME)
    assert CACHED not in uncached.owner and SHARED not in uncached.owner
    with pytest.raises(ValueError, match="num_moments=1"):
        sample_pool(chats(1), config(), STEP_TIME, num_moments=1)
    with pytest.raises(ValueError, match="no request was served"):
        sample_pool([], config(), STEP_TIME)
    small = small_pool_history(
        all_at_once(chats(200), 20), config(20_000, max_model_len=512), STEP_TIME
    )
    assert 20 < small.owner.shape[1] <= 512 and small.owner.max() == 19


class _Page(HTMLParser):
    """Collects the cells of a page's tables, its images, and tags that are not closed."""

    VOID = ("meta", "img", "br")

    def __init__(self):
        super().__init__()
        self.open, self.cells, self.images, self.text = [], [], [], []

    def handle_starttag(self, tag, attrs):
        if tag == "img":
            self.images.append(dict(attrs))
        if tag not in self.VOID:
            self.open.append(tag)
        if tag in ("td", "th"):
            self.cells.append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, f"</{tag}> closes something else"

    def handle_data(self, data):
        self.text.append(data)
        if self.open and self.open[-1] in ("td", "th"):
            self.cells[-1] += data


def parsed(page):
    parser = _Page()
    parser.feed(page)
    parser.close()
    assert not parser.open, f"left open: {parser.open}"
    return parser


def test_a_report_has_every_figure_and_a_line_on_each():
    traffic = chats(requests_per_second=3.0)
    runs = {
        name: simulate(traffic, config(60), STEP_TIME, allocator=name)
        for name in ("paged", "oracle")
    }
    figures = {f"<{name}>": run.figures(3.0) for name, run in runs.items()}
    page = html_report(
        title="Chats & more",
        settings={"Traffic": "60 chats <made up>"},
        figures=figures,
        pictures=[Figure(draw_batch(runs), 'a "caption"')],
        notes=["Mind this."],
    )
    found = parsed(page)
    rows = run_rows(figures)
    table = found.cells[2:]  # Behind the one of settings.
    assert table[: len(rows[0])] == rows[0]
    width, body = len(rows[0]) + 1, table[len(rows[0]) + 1 :]
    shown = [body[i : i + width] for i in range(0, len(body), width)]
    assert shown == [[row[0].strip(), *row[1:], explain(row[0])] for row in rows[1:]]
    assert any(row[0] == "preemptions" and row[1] != "0" for row in shown)
    text = " ".join(found.text)
    for words in ("Chats & more", "60 chats <made up>", 'a "caption"', "Mind this."):
        assert words in text
    [image] = found.images
    kind, _, data = image["src"].partition(",")
    assert kind == "data:image/svg+xml;base64" and image["alt"] == 'a "caption"'
    assert base64.b64decode(data).lstrip().startswith(b"<?xml")
    assert "http" not in page.replace(data, ""), "it needs nothing beside it"
    with pytest.raises(ValueError, match="at least one run"):
        html_report(title="", settings={}, figures={})


def test_every_row_that_can_be_is_explained():
    results = simulate(chats(), config(), STEP_TIME)
    figures = results.figures(1.0) | {"swapped_out": 1, "num_rejected": 1}
    figures |= {"queried": 1, "steps_with_queue": 1}
    labels = {row[0].strip() for row in run_rows({"paged": figures})[1:]}
    assert labels == set(EXPLANATIONS), "neither missing nor left over"


def test_the_pictures_of_a_report():
    runs = {"paged": simulate(chats(), config(), STEP_TIME)}
    figures = report_pictures(lambda: iter(chats()), config(), STEP_TIME, runs)
    titles = [figure.picture.get_suptitle() for figure in figures]
    assert len(set(titles)) == 4 and all(len(figure.caption) > 50 for figure in figures)
    assert figures[0].picture.svg() == figures[0].picture.svg(), "the same text each time"
    assert figures[0].picture._repr_png_().startswith(b"\x89PNG")


def test_without_matplotlib_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "paged_jax.simulate.canvas", raising=False)
    with pytest.raises(ImportError, match=r"paged-jax\[plots\]"):
        draw_hit_ratios({"lru": {64: 0.5}})
    importlib.import_module("paged_jax.simulate.pictures")  # It is needed to draw, not before.


def test_importing_needs_neither_jax_nor_matplotlib():
    names = ("autoscaler", "planner", "report_pictures", "sizing_fleet")
    imports = ", ".join(f"paged_jax.simulate.{name}" for name in names)
    code = f"import sys, {imports}; assert not {{'jax', 'matplotlib'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_program_writes_a_report(tmp_path):
    path = tmp_path / "report.html"
    arguments = ["--num_requests=40", "--device=v5e", "--model=smollm2-135m", "--kv_gib=0.5"]
    arguments += ["--replicas=2", "--allocators=paged,reserve_max", f"--html={path}"]
    subprocess.run([sys.executable, str(SCRIPT), *arguments], check=True, capture_output=True)
    found = parsed(path.read_text())
    assert len(found.images) == 4
    text = " ".join(found.text)
    assert "2 x TPU v5e 16 GB" in text and "40 made-up chats, all at once" in text
