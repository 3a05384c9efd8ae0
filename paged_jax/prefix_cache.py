"""The index of the prefix cache: which block holds which tokens, known by a chained hash.

A block's hash covers its own tokens and, through its parent's hash, every token before them, so
equal hashes mean equal prefixes. The chain is that of vLLM's automatic prefix caching; sha256
makes it equal across processes and runs, and safe against crafted collisions.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterable, Sequence

ROOT_HASH = hashlib.sha256(b"paged-jax prefix root").digest()

# In a fixed order; a JSON value each.
ExtraKeys = tuple[object, ...]


def hash_block(
    parent: bytes | None, token_ids: Iterable[int], extra_keys: ExtraKeys | None = None
) -> bytes:
    """sha256 of a full block: its parent's hash, its token ids, and what else sets it apart.

    Args:
      parent: hash of the block before it, None for a prompt's first block.
      token_ids: the block's tokens, each an int32.
      extra_keys: what else sets the block apart, in a fixed order, of JSON's types: see
        `Request.extra_keys_of`. None where there is nothing.

    Returns:
      32 bytes, equal for equal input in any process.
    """
    ids = array("i", token_ids)
    keys = b""
    if extra_keys is not None:
        keys = json.dumps(extra_keys, separators=(",", ":")).encode()
    # The count before the ids and the keys last: no two inputs spell the same bytes.
    parts = (parent or ROOT_HASH, len(ids).to_bytes(4, "little"), ids.tobytes(), keys)
    return hashlib.sha256(b"".join(parts)).digest()


class PrefixCache:
    """Hash -> blocks, and block -> hash. It knows nothing of reference counts.

    Two full blocks of equal content may both stand here, since tables are append-only; a lookup
    gives the one that came first.
    """

    def __init__(self):
        self._blocks: dict[bytes, dict[int, None]] = {}
        self._hashes: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._hashes)

    def insert(self, block_hash: bytes, block_id: int) -> None:
        """Records that `block_id` holds the tokens of `block_hash`."""
        if block_id in self._hashes:
            raise ValueError(f"block {block_id} carries a hash already; drop it first")
        self._hashes[block_id] = block_hash
        self._blocks.setdefault(block_hash, {})[block_id] = None

    def drop(self, block_id: int) -> bytes | None:
        """Forgets a block's hash, because its slots will be written anew; gives it, or None."""
        block_hash = self._hashes.pop(block_id, None)
        if block_hash is None:
            return None
        blocks = self._blocks[block_hash]
        del blocks[block_id]
        if not blocks:
            del self._blocks[block_hash]
        return block_hash

    def hash_of(self, block_id: int) -> bytes | None:
        """The hash a block carries, or None."""
        return self._hashes.get(block_id)

    def find(self, block_hash: bytes) -> int | None:
        """The first block of this hash, or None."""
        blocks = self._blocks.get(block_hash)
        return None if blocks is None else next(iter(blocks))

    def match(self, block_hashes: Sequence[bytes]) -> list[int]:
        """The blocks that hold the longest cached prefix of a chain of block hashes."""
        hit = []
        for block_hash in block_hashes:
            block_id = self.find(block_hash)
            if block_id is None:
                break
            hit.append(block_id)
        return hit

    def clear(self) -> None:
        """Forgets every hash."""
        self._blocks.clear()
        self._hashes.clear()
