"""Which compiled program serves a step: the smallest that fits, or a larger one that is at hand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import jax

from paged_jax.batch import Buckets, StepShape
from paged_jax.sampling import SamplingBatch

# Decode steps that run padded in a larger program before a smaller one is compiled for them: enough
# for the dwindling end of a batch to compile nothing, few enough for a long run of few rows to have
# its own program soon. On a CPU a compilation takes as long as padding some 60 steps costs a model
# of 135M parameters, and a few steps a model of a billion or more. Steps are counted, since each
# costs its padding, and not timed: all processes of a mesh must choose alike.
STEPS_WORTH_A_PROGRAM = 16


class StepPrograms:
    """The programs that are ready, and the choice among them.

    A program is for a shape, and for steps of any kind; or it is plain, for steps whose every row
    asks for the likeliest token and nothing more (`SamplingBatch.is_plain`).

    Attributes:
      buckets: the shapes that there may be programs for.
    """

    def __init__(self, buckets: Buckets):
        self.buckets = buckets
        self._whole: dict[StepShape, jax.stages.Compiled] = {}
        self._plain: dict[StepShape, jax.stages.Compiled] = {}
        # By what was wanted: its shape, and whether a plain program would have done.
        self._num_padded_steps: Counter[tuple[StepShape, bool]] = Counter()

    def __len__(self) -> int:
        return len(self._whole) + len(self._plain)

    def add(self, shape: StepShape, program: jax.stages.Compiled, *, is_plain: bool) -> None:
        """Takes a program that is ready."""
        (self._plain if is_plain else self._whole)[shape] = program

    def find(self, shape: StepShape, *samplings: SamplingBatch) -> jax.stages.Compiled | None:
        """A program of this very shape that may run a step.

        Args:
          samplings: what its rows ask for, of each of the mesh's rows or of all together.
        """
        if program := self._whole.get(shape):
            return program
        return self._plain.get(shape) if are_plain(samplings) else None

    def choose_decode(self, num_rows: int, *samplings: SamplingBatch) -> StepShape:
        """The shape that decodes of so many rows run in.

        It is the smallest that holds them if its program is ready, if none of more rows is, or if
        `STEPS_WORTH_A_PROGRAM` steps have wanted it; else the next larger one that is ready. Steps
        with prefills in them never stand in: they cost many times as much.
        """
        smallest = self.buckets.shape_for(num_rows, num_rows)
        if self.find(smallest, *samplings):
            return smallest
        if self._num_padded_steps[smallest, are_plain(samplings)] >= STEPS_WORTH_A_PROGRAM:
            return smallest
        larger = (StepShape(n, n, True) for n in self.buckets.num_seqs if n > smallest.num_seqs)
        return next((shape for shape in larger if self.find(shape, *samplings)), smallest)

    def count_decode(
        self, num_rows: int, shape: StepShape, *samplings: SamplingBatch, num_steps: int
    ) -> None:
        """Notes that decode steps of so many rows run in the shape that was chosen for them."""
        smallest = self.buckets.shape_for(num_rows, num_rows)
        if shape != smallest:
            self._num_padded_steps[smallest, are_plain(samplings)] += num_steps


def are_plain(samplings: Iterable[SamplingBatch]) -> bool:
    """Whether a plain program may run them all."""
    return all(sampling.is_plain for sampling in samplings)
