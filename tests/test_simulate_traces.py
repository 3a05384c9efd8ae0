"""Traces, prefix hits, and statistics in constant memory."""

import json
import lzma
import random
from pathlib import Path

import numpy as np
import pytest

from paged_jax.prefix_cache import hash_block
from paged_jax.simulate import ChatTraffic, TraceRequest, read_azure, read_mooncake, read_prompts
from paged_jax.simulate.prefix_hits import lru_hit_ratio, paged_hit_ratio
from paged_jax.simulate.simulated_request import SimulatedRequest
from paged_jax.simulate.statistics import Averages, Histogram, Timeline
from paged_jax.simulate.traces import scaled


def test_mooncake_lines(tmp_path):
    path = tmp_path / "trace.jsonl"
    row = {"timestamp": 1500, "input_length": 700, "output_length": 9, "hash_ids": [4, 7]}
    path.write_text(json.dumps(row) + "\n\n" + json.dumps({"timestamp": 1}) + "\n")
    reader = read_mooncake(path)
    assert next(reader) == TraceRequest(1.5, 700, 9, [4, 7], 512)
    with pytest.raises(ValueError, match="line 3: KeyError: 'input_length'"):
        next(reader)


def test_azure_rows(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\nlater,1,1\n"
    )
    reader = read_azure(path)
    assert next(reader) == TraceRequest(0.0, 374, 44)
    second = next(reader)
    assert second[1:3] == (396, 109)
    assert second.arrival_seconds == pytest.approx(4.314579, abs=2e-6)
    with pytest.raises(ValueError, match="line 4: ValueError"):
        next(reader)
    [_, twice] = scaled([TraceRequest(0.0, 1, 1), TraceRequest(3.0, 1, 1)], 2.0)
    assert twice.arrival_seconds == 1.5


def test_own_prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    rows = [
        {"prompt_token_ids": [5, 6, 7], "output_tokens": 3, "arrival_seconds": 0.5},
        {"prompt": "abcdefghi"},
        {"turns": ["abcd", "not asked yet"]},
        {"messages": [{"role": "user", "content": "hi"}]},
        {"name": "nothing"},
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    reader = read_prompts(path, output_tokens=20, requests_per_second=2.0)
    requests = [next(reader) for _ in range(4)]
    assert [r.num_prompt_tokens for r in requests] == [3, 3, 1, 2]
    assert [r.num_output_tokens for r in requests] == [3, 20, 20, 20]
    assert [r.arrival_seconds for r in requests] == [0.5, 0.5, 1.0, 1.5]
    assert requests[1].token_ids[0] == requests[2].token_ids[0], "the same four bytes"
    with pytest.raises(ValueError, match="line 5: ValueError: it has none of"):
        next(reader)


def test_chats_are_as_long_as_they_should_be():
    chats = list(ChatTraffic(num_requests=20_000, requests_per_second=4.0, seed=2))
    prompts, outputs = np.array([chat[1:3] for chat in chats]).T
    assert np.median(prompts) == pytest.approx(540, rel=0.03)
    assert np.log(outputs).std() == pytest.approx(0.6, rel=0.03)
    assert (prompts + outputs).max() == 8192
    assert chats[-1].arrival_seconds == pytest.approx(5000, rel=0.03)
    assert list(ChatTraffic(num_requests=50, requests_per_second=4.0, seed=2)) == chats[:50]
    with pytest.raises(ValueError, match="output_sigma=-1"):
        ChatTraffic(num_requests=1, output_sigma=-1)


def test_blocks_are_told_apart_by_what_is_known_of_them():
    known = SimulatedRequest(1, TraceRequest(0.0, 9, 9, token_ids=range(9)))
    known.extend_hashes(2, 4)
    first = hash_block(None, range(4))
    assert known.block_hashes == [first, hash_block(first, range(4, 8))]
    known.token_ids.extend([0] * 9)
    known.extend_hashes(4, 4)
    other = SimulatedRequest(2, TraceRequest(0.0, 9, 9, token_ids=range(9)))
    other.token_ids.extend([0] * 9)
    other.extend_hashes(4, 4)
    shared = [a == b for a, b in zip(known.block_hashes, other.block_hashes, strict=True)]
    assert shared == [True, True, False, False], "a block with sampled tokens is its own"
    # Numbers stand for 8 tokens each: blocks of 4 and of 16 alike.
    for size, expected in ((4, [1, 1, 0, 0]), (16, [0])):
        pair = [SimulatedRequest(i, TraceRequest(0.0, 16, 1, (3, 4 + i), 8)) for i in (0, 1)]
        for request in pair:
            request.extend_hashes(16 // size, size)
        a, b = (request.block_hashes for request in pair)
        assert [x == y for x, y in zip(a, b, strict=True)] == expected


def sharing_trace(num_requests=300, is_ragged=True):
    rng = random.Random(0)
    for _ in range(num_requests):
        path = [rng.randrange(101, 104)]
        for _ in range(rng.randrange(0, 5)):
            path.append(path[-1] * 7 + rng.randrange(1, 3))
        missing = rng.randrange(64) if is_ragged else 0
        yield TraceRequest(0.0, 64 * len(path) - missing, 1, path, 64)


@pytest.mark.parametrize("capacity", [None, 640, 2048])
def test_hits_of_a_cache_agree_with_a_list_that_is_searched(capacity):
    recent, hits, total = [], 0, 0
    for request in sharing_trace():
        ids, found = list(request.prefix_ids), 0
        while found < len(ids) and ids[found] in recent:
            found += 1
        hits += min(found * 64, request.num_prompt_tokens)
        total += request.num_prompt_tokens
        recent = [key for key in recent if key not in ids] + ids[::-1]
        if capacity is not None:
            recent = recent[-(capacity // 64) :]
    ratio = lru_hit_ratio(sharing_trace(), capacity)
    assert ratio == pytest.approx(hits / total, abs=1e-12)
    assert 0.1 < ratio < 1


def test_the_block_manager_finds_nearly_as_much():
    trace = list(sharing_trace(2000, is_ragged=False))
    mean_tokens = sum(request.num_prompt_tokens for request in trace) / len(trace)
    for capacity in (640, 2048, 100_000):
        lru, paged = lru_hit_ratio(trace, capacity), paged_hit_ratio(trace, capacity, 8)
        # Its last token, and so its last block, is computed even if all of a prompt is there.
        assert lru - 8 / mean_tokens - 0.03 < paged < lru + 0.03


@pytest.fixture
def mooncake(tmp_path):
    """Where a copy of the trace lies; see tests/goldens/README.md."""
    path = tmp_path / "mooncake_conversation.jsonl"
    packed = Path(__file__).parent / "goldens" / "mooncake_conversation.jsonl.xz"
    path.write_bytes(lzma.decompress(packed.read_bytes()))
    return path


def test_hits_of_the_mooncake_trace(mooncake):
    # Computed apart from this project.
    assert lru_hit_ratio(read_mooncake(mooncake)) == pytest.approx(0.3736, abs=5e-5)
    for millions, expected in ((3, 0.139), (10, 0.291), (50, 0.371)):
        ratio = lru_hit_ratio(read_mooncake(mooncake), millions * 1_000_000)
        assert ratio == pytest.approx(expected, abs=5e-4)
    ratio = paged_hit_ratio(read_mooncake(mooncake), 10_000_000, 512)
    assert ratio == pytest.approx(0.291, abs=0.01)


def test_a_histogram_knows_quantiles_to_half_a_percent():
    values = np.random.default_rng(0).lognormal(-3, 2, 20_000)
    one, two = Histogram(), Histogram()
    for value in values[:9000]:
        one.add(float(value))
    for part in np.array_split(values[9000:], 100):
        two.add_all(part)
    one.merge(two)
    for q in (0.0, 0.1, 0.5, 0.9, 0.99, 1.0):
        expected = np.quantile(values, q, method="lower")
        assert one.quantile(q) == pytest.approx(expected, rel=0.0051)
    assert one.mean == pytest.approx(values.mean()) and one.max == values.max()
    assert one.share_below(0.1) == pytest.approx((values <= 0.1).mean(), abs=0.005)
    many = Histogram()
    many.add(2.0, 10)
    many.add_all(np.full(5, 2.0), 3)
    many.add(0.0, 25)
    assert (many.count, many.quantile(0.2), many.mean) == (50, 0.0, 1.0)
    assert Histogram().quantile(0.5) == 0


def test_a_timeline_keeps_its_means_as_it_widens():
    rng = random.Random(0)
    timeline, plain, now = Timeline(["a", "b"], max_points=16), Averages(["a", "b"]), 0.0
    for _ in range(1000):
        seconds, values = rng.random(), (rng.random(), rng.random())
        timeline.add(now, seconds, values)
        plain.add(values, seconds)
        now += seconds
    series = timeline.series()
    assert 8 <= len(series["seconds"]) <= 16 and series["seconds"][-1] < now
    assert np.mean(series["a"]) == pytest.approx(plain.means()["a"], abs=0.02)


def test_a_sample_counts_towards_all_the_time_that_it_lasts():
    timeline = Timeline(["a"], max_points=16)
    timeline.add(0.0005, 0.003, [2.0])  # Half a millisecond, two whole ones, and half a one.
    timeline.add(0.0035, 0.00025, [5.0])
    series = timeline.series()
    assert series["sampled_seconds"] == pytest.approx([0.0005, 0.001, 0.001, 0.00075])
    assert series["a"] == pytest.approx([2, 2, 2, (2 * 0.5 + 5 * 0.25) / 0.75])
