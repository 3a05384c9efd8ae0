"""Prefixes that must stay: their blocks are held although no sequence holds them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from paged_jax.block_pool import BlockPool


class PrefixPins:
    """Pins hashes rather than blocks: one that is not computed yet is pinned when it is.

    Attributes:
      hashes: what is to stay, and how many pins want it to.
      blocks: the block that holds each, of those that are computed.
    """

    def __init__(self, pool: BlockPool):
        self.pool = pool
        self.hashes: Counter[bytes] = Counter()
        self.blocks: dict[bytes, int] = {}

    def pin(self, block_hashes: Sequence[bytes], *, num_blocks_to_spare: int) -> None:
        """Keeps the blocks of these hashes, from now on or from when they are computed.

        Args:
          block_hashes: of a prompt's full blocks.
          num_blocks_to_spare: what must be left: the blocks of the longest sequence.

        Raises:
          ValueError: it would not be; nothing is pinned then.
        """
        wanted = {*self.hashes, *block_hashes}
        num_usable = self.pool.num_blocks - 1
        if num_usable - len(wanted) < num_blocks_to_spare:
            raise ValueError(
                f"{len(wanted)} pinned blocks would leave {max(num_usable - len(wanted), 0)} of "
                f"{num_usable}, and one request of max_model_len needs {num_blocks_to_spare}; pin "
                "a shorter prefix, unpin another, or give the pool more memory"
            )
        self.hashes.update(block_hashes)
        for block_hash in block_hashes:
            block_id = self.pool.prefix_cache.find(block_hash)
            if block_id is not None:
                self.note_stored(block_hash, block_id)

    def unpin(self, block_hashes: Sequence[bytes]) -> None:
        """Takes a pin back. What no other wants stays cached until it is evicted, a prefix's tail
        before its head.
        """
        self.hashes.subtract(block_hashes)
        gone = [h for h in block_hashes if self.hashes[h] <= 0]
        for block_hash in gone:
            del self.hashes[block_hash]
        self.pool.release([self.blocks.pop(h) for h in gone if h in self.blocks])

    def note_stored(self, block_hash: bytes, block_id: int) -> None:
        """To be called when a block gets its hash: it is held if that hash is to stay."""
        if block_hash in self.hashes and block_hash not in self.blocks:
            self.pool.touch([block_id])
            self.blocks[block_hash] = block_id
