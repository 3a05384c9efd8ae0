import logging
import math
import random

import pytest

from paged_jax.rates import RateMeter, SwapAlert


class Clock:
    def __init__(self, now: float = 0.0):
        self.now = now

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def warnings(caplog):
    """The texts of the warnings logged so far."""
    return lambda: [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]


def test_an_amount_counts_for_the_window_and_then_leaves_within_a_slot():
    clock = Clock(100.0)
    meter = RateMeter(10.0, clock)
    assert meter.per_second() == 0
    meter.add(500)
    for later, rate in ((0.0, 50.0), (5.0, 50.0), (10.0, 50.0), (10.25, 25.0), (10.5, 0.0)):
        clock.now = 100.0 + later
        assert meter.per_second() == pytest.approx(rate), later


def test_a_steady_stream_has_its_rate_at_any_moment():
    clock = Clock(3.3)
    meter = RateMeter(10.0, clock)
    for i in range(5000):
        clock.now = 3.3 + 0.01 * i
        meter.add(2)
        if i > 1100:
            assert meter.per_second() == pytest.approx(200, rel=0.01)


def test_agrees_with_the_sum_over_the_window_for_random_amounts():
    clock, rng, events = Clock(), random.Random(7), []
    meter = RateMeter(4.0, clock)
    for _ in range(3000):
        clock.now += rng.choice([0.0, 0.001, 0.1, 0.3, 2.0, 9.0])
        amount = rng.randrange(0, 50)
        meter.add(amount)
        events.append((clock.now, amount))
        # The window's start is blurred by one slot, a twentieth, to either side.
        fewest = sum(a for t, a in events if t > clock.now - 3.8 + 1e-9)
        most = sum(a for t, a in events if t > clock.now - 4.2 - 1e-9)
        assert fewest / 4 - 1e-9 <= meter.per_second() <= most / 4 + 1e-9


def test_memory_is_bounded_however_many_amounts_come():
    clock = Clock()
    meter = RateMeter(10.0, clock)
    for i in range(20_000):
        clock.now = i * 0.003
        meter.add(0.1)
    assert len(meter._slots) <= 21
    clock.now += 100
    assert meter.per_second() == 0  # exactly, whatever the sums of floats drifted by


@pytest.mark.parametrize("window_seconds", [0, -1.0, math.nan])
def test_a_window_must_have_a_length(window_seconds):
    with pytest.raises(ValueError, match="window_seconds"):
        RateMeter(window_seconds)


def test_a_trickle_is_silent_and_a_burst_warns_once(warnings):
    clock = Clock()
    alert = SwapAlert(300.0, clock=clock)
    total = 0
    for _ in range(600):  # 100 tokens/s
        clock.now += 0.1
        total += 10
        assert not alert.observe(total, 0)
    assert alert.tokens_per_second == pytest.approx(100, rel=0.02)
    warned = []
    for _ in range(200):  # 1,000 tokens/s in and out together, for 20 s
        clock.now += 0.1
        total += 50
        warned.append(alert.observe(total, total - 6000))
    assert sum(warned) == len(warnings()) == 1
    # From 100 to 1,000 tokens/s in a window of 10 s: 300 is passed after 2.2 s.
    assert 20 <= warned.index(True) <= 24
    [text] = warnings()
    for part in ("tokens/s", "300", "max_num_seqs", "kv_cache_memory_bytes", "pool"):
        assert part in text
    assert "swap_alert_tokens_per_second=None" in text


def test_a_lasting_excess_warns_once_a_minute(warnings):
    clock = Clock()
    alert = SwapAlert(300.0, clock=clock)
    for i in range(1, 1301):  # 500 tokens/s for 130 s
        clock.now = 0.1 * i
        alert.observe(25 * i, 25 * i)
    assert len(warnings()) == 3


def test_warns_again_at_once_after_the_rate_fell_below_half(warnings):
    clock = Clock()
    alert = SwapAlert(300.0, clock=clock)
    assert alert.observe(4000, 0)  # 400 tokens/s
    clock.now = 10.3  # Half of that burst has left: 160, not below 150.
    assert not alert.observe(6000, 0)
    assert alert.observe(6000, 0) is False and len(warnings()) == 1
    clock.now = 25.0  # Nothing is left; the engine made no step meanwhile.
    assert alert.observe(10_000, 0)
    assert len(warnings()) == 2


def test_a_rate_that_stays_above_half_does_not_warn_again(warnings):
    clock = Clock()
    alert = SwapAlert(300.0, clock=clock)
    assert alert.observe(4000, 0)
    clock.now = 8.0
    assert not alert.observe(4000, 2000)
    clock.now = 15.0  # The first burst has left, the second not: 200 tokens/s.
    assert not alert.observe(4000, 2000)
    clock.now = 16.0
    assert not alert.observe(4000, 4000)
    assert alert.tokens_per_second == pytest.approx(400)
    assert len(warnings()) == 1


def test_none_never_warns_and_still_measures(warnings):
    clock = Clock()
    alert = SwapAlert(None, clock=clock)
    assert not alert.observe(10**6, 10**6)
    assert alert.tokens_per_second == pytest.approx(2e5)
    assert not warnings()


def test_counters_that_begin_anew_are_counted_from_zero():
    clock = Clock()
    alert = SwapAlert(None, clock=clock)
    alert.observe(500, 500)
    clock.now = 20.0
    alert.observe(30, 20)
    assert alert.tokens_per_second == pytest.approx(5)


@pytest.mark.parametrize("threshold", [0, -5.0, math.nan])
def test_a_threshold_is_above_zero(threshold):
    with pytest.raises(ValueError, match="None silences"):
        SwapAlert(threshold)
