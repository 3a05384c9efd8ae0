"""Models of how long a step takes: constant, or fitted to what this machine was measured to do.

A third one, the roofline of a device that need not be at hand, is `device_model.DeviceModel`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from paged_jax.simulate.device_model import StepWork


class StepTime(Protocol):
    """Anything that says how many seconds a step takes.

    Attributes:
      overhead_seconds: of each step, those in which the device waits for the host. The further
        steps of a call spare them, and so does a call that was dispatched ahead.
    """

    @property
    def overhead_seconds(self) -> float: ...

    def step_seconds(self, work: StepWork) -> float: ...

    def decode_seconds(self, num_seqs: int, context_tokens: np.ndarray) -> np.ndarray:
        """The same of several steps in which each of `num_seqs` sequences decodes a token.

        Args:
          num_seqs: sequences.
          context_tokens: int64[num_steps], of all sequences together, at each step's end.
        """
        ...


@dataclasses.dataclass(frozen=True)
class ConstantStepTime:
    """Every step takes as long, whatever it computes."""

    seconds: float
    overhead_seconds: float = 0.0

    def __post_init__(self):
        if not self.seconds > 0:
            raise ValueError(f"seconds={self.seconds!r}: a step must take more than no time")
        if not 0 <= self.overhead_seconds < self.seconds:
            raise ValueError(
                f"overhead_seconds={self.overhead_seconds!r}: it is a part of "
                f"seconds={self.seconds!r}, at least 0 and less than that"
            )

    def step_seconds(self, work: StepWork) -> float:
        return self.seconds

    def decode_seconds(self, num_seqs: int, context_tokens: np.ndarray) -> np.ndarray:
        return np.full(len(context_tokens), self.seconds)


@dataclasses.dataclass(frozen=True)
class FittedStepTime:
    """A line through measured steps: so much a step, a token computed, and a token read.

    Attributes:
      step_seconds_base: of every step.
      seconds_a_token: of every token computed.
      seconds_a_context_token: of every token whose keys and values are read.
      overhead_seconds: the host's share of the base; what was measured does not tell it.
    """

    step_seconds_base: float
    seconds_a_token: float
    seconds_a_context_token: float = 0.0
    overhead_seconds: float = 0.0

    def step_seconds(self, work: StepWork) -> float:
        return (
            self.step_seconds_base
            + self.seconds_a_token * work.num_tokens
            + self.seconds_a_context_token * work.num_context_tokens
        )

    def decode_seconds(self, num_seqs: int, context_tokens: np.ndarray) -> np.ndarray:
        base = self.step_seconds_base + self.seconds_a_token * num_seqs
        return base + self.seconds_a_context_token * context_tokens

    @staticmethod
    def of_bench(runs: Iterable[Mapping[str, Any]]) -> FittedStepTime:
        """Fits the line to results of `scripts/bench_generate.py`, one or more.

        Each gives two observations, its average prefill and decode step. One run fixes the base and
        the cost of a token; runs of other lengths and batches that of context as well. A cost that
        would come out negative is left out, and the others are fitted anew (non-negative least
        squares, by elimination). Errors count relative to the step's time.

        Raises:
          ValueError: a run lacks a field; the message names it.
        """
        rows, seconds = [], []
        for run in runs:
            for kind in ("prefill", "decode"):
                work, step_seconds = _observation(run, kind)
                rows.append((1.0, work.num_tokens, work.num_context_tokens))
                seconds.append(step_seconds)
        if not rows:
            raise ValueError("no result of bench_generate.py was given; give one or more")
        costs = _fit(np.array(rows), np.array(seconds))
        return FittedStepTime(*(float(cost) for cost in costs))

    @staticmethod
    def of_files(paths: Iterable[str | Path]) -> FittedStepTime:
        """Fits the line to files of bench_generate's output: the last line of each is its JSON."""
        texts = [Path(path).read_text().strip() for path in paths]
        return FittedStepTime.of_bench(json.loads(text.splitlines()[-1]) for text in texts)


def _observation(run: Mapping[str, Any], kind: str) -> tuple[StepWork, float]:
    """The average step of a kind: what it computed and read, and its seconds."""
    rate, milliseconds = f"{kind}_tokens_per_second", f"{kind}_ms_per_step"
    for field in (rate, milliseconds, "prompt_len", "output_len"):
        if field not in run:
            raise ValueError(f"{field!r} is missing from a result of bench_generate.py")
    seconds = run[milliseconds] / 1e3
    num_tokens = run[rate] * seconds
    if kind == "prefill":  # A prompt computed as one chunk ends in its own tokens as context.
        num_context = num_tokens
    else:
        num_context = num_tokens * (run["prompt_len"] + run["output_len"] / 2)
    num_rows = num_tokens if kind == "decode" else num_tokens / run["prompt_len"]
    return StepWork(round(num_tokens), round(num_rows), round(num_context), 0), seconds


def _fit(rows: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Non-negative costs of the columns of `rows`, [num_observations, 3], by least squares."""
    columns = [0, 1, 2] if len(rows) > 2 else [0, 1]
    while True:
        weighted = rows[:, columns] / seconds[:, None]
        costs = np.linalg.lstsq(weighted, np.ones(len(seconds)), rcond=None)[0]
        if (costs >= 0).all() or len(columns) == 1:
            break
        del columns[int(np.argmin(costs))]
    found = np.zeros(3)
    found[columns] = costs
    return found
