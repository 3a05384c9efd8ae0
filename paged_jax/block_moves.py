"""What a step must do with blocks before it writes: swaps out, copies, swaps in."""

from __future__ import annotations

import dataclasses

import numpy as np

BlockPairs = tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True)
class BlockMoves:
    """Blocks to move before a step's writes. Device and host blocks are numbered apart.

    A swap out reads the device as it stood before the step, and a swap in reads the host as it
    stood before the step: so a block may be read by one move and overwritten by another. Of the
    copies, no destination is a source, stands there twice, or is written by a swap in.

    Attributes:
      swap_out: (device block, host block).
      copies: (source, destination), both on the device.
      swap_in: (host block, device block).
    """

    swap_out: BlockPairs = ()
    copies: BlockPairs = ()
    swap_in: BlockPairs = ()

    def copy_arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """Sources and destinations of the copies, int32[N] each; `copy_blocks` takes them."""
        pairs = np.array(self.copies, np.int32).reshape(-1, 2)
        return pairs[:, 0], pairs[:, 1]

    def __bool__(self) -> bool:
        return bool(self.swap_out or self.copies or self.swap_in)


NO_MOVES = BlockMoves()
