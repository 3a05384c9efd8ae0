"""The smallest whole number that will do, where every larger one does as well."""

from __future__ import annotations

from collections.abc import Callable


def smallest(meets: Callable[[int], bool], *, first: int = 1, most: int) -> int | None:
    """The smallest number from 1 to `most` that meets something; None if `most` does not.

    Doubles from `first` until one does, or halves until one does not, and then bisects: about
    2 log2(answer / first) trials, and none of a number twice.

    Args:
      meets: false up to some number and true from there on.
      first: where to begin, near the answer if something is known of it.
      most: the largest number to try.

    Raises:
      ValueError: `most` is below 1.
    """
    if most < 1:
        raise ValueError(f"most={most}: it must be at least 1")
    trial = min(max(first, 1), most)
    if meets(trial):
        good, bad = trial, 0
        while good > 1:
            trial = good // 2
            if not meets(trial):
                bad = trial
                break
            good = trial
    else:
        bad = trial
        while True:
            if bad == most:
                return None
            good = min(2 * bad, most)
            if meets(good):
                break
            bad = good
    while good - bad > 1:
        trial = (good + bad) // 2
        if meets(trial):
            good = trial
        else:
            bad = trial
    return good
