"""Rates over a sliding window, and the alert on swap traffic that is made of one."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from paged_jax.log import logger

_NUM_SLOTS = 20  # A window is cut into so many slots; older amounts leave slot by slot.


class RateMeter:
    """How much a second, over the last `window_seconds`.

    Amounts are summed in slots of a twentieth of the window, so memory is bounded whatever the
    number of `add`s, and each call costs O(1) amortised. A slot that the window's start cuts counts
    in part, as if its amounts had come evenly. The divisor is always the whole window: a burst at
    the start of a program is no higher a rate than the same burst later.

    Safe to use from several threads.

    Args:
      window_seconds: length of the window.
      clock: seconds that never go back.

    Raises:
      ValueError: window_seconds is not above 0.
    """

    def __init__(self, window_seconds: float = 10.0, clock: Callable[[], float] = time.monotonic):
        if not window_seconds > 0:
            raise ValueError(f"window_seconds={window_seconds!r}: it must be above 0")
        self.window_seconds = window_seconds
        self._clock = clock
        self._slots: deque[list[float]] = deque()  # [slot number, amount], the oldest first
        self._total: float = 0  # of all slots
        self._lock = threading.Lock()

    def add(self, amount: float) -> None:
        """Counts `amount` as of now."""
        if not amount:
            return
        with self._lock:
            slot = int(self._position())
            if self._slots and self._slots[-1][0] >= slot:
                self._slots[-1][1] += amount
            else:
                self._slots.append([slot, amount])
            self._total += amount
            self._expire(slot)

    def per_second(self) -> float:
        """The amounts of the last `window_seconds`, divided by `window_seconds`."""
        with self._lock:
            position = self._position()
            slot = int(position)
            self._expire(slot)
            total = self._total
            if self._slots and self._slots[0][0] == slot - _NUM_SLOTS:
                total -= self._slots[0][1] * (position - slot)  # the part that has left
            return total / self.window_seconds

    def _position(self) -> float:
        """Now, in slots."""
        return self._clock() * _NUM_SLOTS / self.window_seconds

    def _expire(self, slot: int) -> None:
        while self._slots and self._slots[0][0] < slot - _NUM_SLOTS:
            self._total -= self._slots.popleft()[1]
        if not self._slots:
            self._total = 0  # Sums of floats drift; an empty window is 0.


class SwapAlert:
    """Warns in the log when the engine swaps more tokens a second than a healthy one does.

    A trickle of swapping is normal; a burst says that the pool is too small for the load, and that
    waiting times are about to grow. There is one warning when the rate passes the threshold, and
    another only after the rate has fallen below half the threshold in between, or after
    `repeat_seconds` of it.

    Args:
      threshold_tokens_per_second: warn above it; None never warns, the rate is still kept.
      window_seconds: the window that the rate is taken over.
      repeat_seconds: how long a lasting excess goes without another warning.
      clock: seconds that never go back.

    Raises:
      ValueError: the threshold or window_seconds is not above 0, or repeat_seconds is below 0.
    """

    def __init__(
        self,
        threshold_tokens_per_second: float | None,
        *,
        window_seconds: float = 10.0,
        repeat_seconds: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        threshold = threshold_tokens_per_second
        if threshold is not None and not threshold > 0:
            raise ValueError(
                f"threshold_tokens_per_second={threshold!r}: it must be above 0; None silences "
                "the alert"
            )
        if not repeat_seconds >= 0:
            raise ValueError(f"repeat_seconds={repeat_seconds!r}: it must be at least 0")
        self.threshold_tokens_per_second = threshold
        self._repeat_seconds = repeat_seconds
        self._clock = clock
        self._meter = RateMeter(window_seconds, clock)
        self._last_total = 0
        self._last_warning: float | None = None  # None: the next excess is a new one.

    @property
    def tokens_per_second(self) -> float:
        """Tokens swapped a second, in and out together, over the window that ends now."""
        return self._meter.per_second()

    def observe(self, swap_in_tokens: int, swap_out_tokens: int) -> bool:
        """Takes the counters as they stand after a step; warns if there is cause.

        Args:
          swap_in_tokens: tokens brought back from the host since the engine was made.
          swap_out_tokens: tokens moved to the host since the engine was made.

        Returns:
          Whether it warned.
        """
        threshold = self.threshold_tokens_per_second
        total = swap_in_tokens + swap_out_tokens
        if total == self._last_total and self._last_warning is None:
            return False  # Most steps swap nothing: no rate has risen.
        # The quiet before this step counts too: an idle engine makes no steps that would show it.
        if self._last_warning is not None and self._is_below_half():
            self._last_warning = None
        # Counters that went back belong to a new engine.
        self._meter.add(total - self._last_total if total >= self._last_total else total)
        self._last_total = total
        if threshold is None:
            return False
        rate = self._meter.per_second()
        if rate <= threshold:
            return False
        now = self._clock()
        if self._last_warning is not None and now - self._last_warning < self._repeat_seconds:
            return False
        self._last_warning = now
        logger.warning(
            "Swapping %.0f tokens/s over the last %g s, above swap_alert_tokens_per_second=%g: "
            "the KV pool has too few blocks for the running requests, and time to first token "
            "will suffer. Give the pool more memory (kv_cache_memory_bytes, "
            "gpu_memory_utilization) or run fewer requests at once (max_num_seqs); "
            "swap_alert_tokens_per_second=None silences this.",
            rate,
            self._meter.window_seconds,
            threshold,
        )
        return True

    def _is_below_half(self) -> bool:
        threshold = self.threshold_tokens_per_second
        return threshold is not None and self._meter.per_second() < threshold / 2
