"""Which way a sequence gives its blocks up: computed anew later, or swapped to the host."""

from __future__ import annotations


class PreemptionCosts:
    """Estimates of what it costs to get a preempted sequence back.

    A swap moves its bytes twice, out and in; a recompute prefills its tokens once more. Both speeds
    are measured as the engine runs; until both are known, recomputing is taken as the cheaper.

    Args:
      bytes_a_token: of keys and values, in all layers.

    Attributes:
      swap_bytes_per_second: the newest estimate of the transfers' bandwidth, None if unknown.
      prefill_tokens_per_second: the same of prefills.
    """

    # An estimate moves this far towards a new observation: the last ten or so count.
    WEIGHT = 0.2

    def __init__(self, bytes_a_token: int = 0):
        self.bytes_a_token = bytes_a_token
        self.swap_bytes_per_second: float | None = None
        self.prefill_tokens_per_second: float | None = None

    def observe_swap(self, num_bytes: int, seconds: float) -> None:
        """Takes in a transfer, of either direction."""
        if num_bytes > 0 and seconds > 0:
            self.swap_bytes_per_second = self._mixed(
                self.swap_bytes_per_second, num_bytes / seconds
            )

    def observe_prefill(self, num_tokens: int, seconds: float) -> None:
        """Takes in a step that prefilled."""
        if num_tokens > 0 and seconds > 0:
            self.prefill_tokens_per_second = self._mixed(
                self.prefill_tokens_per_second, num_tokens / seconds
            )

    def prefers_swap(self, num_tokens: int) -> bool:
        """Whether moving the keys and values of `num_tokens` out and in beats computing them."""
        if not self.swap_bytes_per_second or not self.prefill_tokens_per_second:
            return False
        swap_seconds = 2 * num_tokens * self.bytes_a_token / self.swap_bytes_per_second
        return swap_seconds < num_tokens / self.prefill_tokens_per_second

    def _mixed(self, old: float | None, new: float) -> float:
        return new if old is None else old + self.WEIGHT * (new - old)
