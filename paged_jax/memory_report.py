"""Who has the engine's memory: every byte by its owner, as a table and as a picture of the pool."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Iterator
from xml.sax.saxutils import escape

from paged_jax.pool_picture import draw_pool
from paged_jax.pool_snapshot import BlockStates, Owner, PoolSnapshot, printable, snapshot

__all__ = ["BlockStates", "MemoryReport", "Owner", "PoolSnapshot", "snapshot"]

_NUM_LISTED_OWNERS = 10
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")

_DEVICE_ROWS = {
    "weights": "weights",
    "kv_in_use": "KV in use",
    "kv_cached": "KV cached",
    "kv_free": "KV free",
    "kv_null": "KV null block",
    "temporary": "temporary",
}
_HOST_ROWS = {
    "swap_in_use": "swap in use",
    "swap_cached": "swap cached",
    "swap_free": "swap free",
    "swap_null": "swap null block",
}


@dataclasses.dataclass(frozen=True, eq=False)
class MemoryReport:
    """An engine's memory at one moment. `print` it, or let a notebook show it.

    Attributes:
      pool: the state of every block.
      block_bytes: bytes of a block of the device, all layers.
      weights_bytes: bytes of the model's weights.
      temporary_bytes: the most that a step needs beside weights and pool.
      host_block_bytes: bytes of a block of the host; None: as on the device.
    """

    pool: PoolSnapshot
    block_bytes: int
    weights_bytes: int = 0
    temporary_bytes: int = 0
    host_block_bytes: int | None = None

    @property
    def memory_bytes(self) -> dict[str, int]:
        """Bytes by owner.

        On the device: weights, kv_in_use, kv_cached (held by nobody, but a hit would find it),
        kv_free, kv_null (block 0, where padding goes), temporary. On the host, where blocks are
        swapped: swap_in_use, swap_cached, swap_free, swap_null. The kv entries add up to the pool,
        the swap entries to the swap space.
        """
        owners = {"weights": self.weights_bytes}
        owners |= _pool_bytes("kv", self.pool.device, self.block_bytes)
        owners["temporary"] = self.temporary_bytes
        if self.pool.host is not None:
            host_block_bytes = self.host_block_bytes
            if host_block_bytes is None:
                host_block_bytes = self.block_bytes
            owners |= _pool_bytes("swap", self.pool.host, host_block_bytes)
        return owners

    @property
    def usage(self) -> float:
        """Share of the pool's usable blocks that are held, 0 to 1."""
        return self.pool.device.num_used_blocks / (self.pool.device.num_blocks - 1)

    @property
    def num_tokens(self) -> int:
        """Tokens whose keys and values lie in blocks in use; a shared one counts once."""
        device = self.pool.device
        return int(device.num_tokens[device.is_used].sum())

    @property
    def num_pinned_blocks(self) -> int:
        return int(self.pool.device.is_pinned.sum())

    @property
    def bytes_saved_by_sharing(self) -> int:
        """What the copies would take if no two sequences shared a block of the device."""
        return self.pool.device.num_copies_saved * self.block_bytes

    def biggest_owners(self, count: int = _NUM_LISTED_OWNERS) -> list[Owner]:
        """The sequences that hold the most blocks, device and host together, in falling order."""
        return sorted(
            self.pool.owners, key=lambda owner: -(owner.num_blocks + owner.num_host_blocks)
        )[:count]

    def svg(self) -> str:
        """The picture: each block a cell, coloured by owner, shared ones marked; an SVG element."""
        return draw_pool(self.pool)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the report, by the name's suffix: .txt, .svg, or .html (picture and table).

        Raises:
          ValueError: the suffix is another.
        """
        path = pathlib.Path(path)
        suffix = path.suffix.lower()
        if suffix == ".txt":
            text = f"{self}\n"
        elif suffix == ".svg":
            text = self.svg() + "\n"
        elif suffix == ".html":
            text = (
                '<!DOCTYPE html>\n<html lang="en">\n<meta charset="utf-8">\n'
                f"<title>Memory report</title>\n{self._repr_html_()}\n</html>\n"
            )
        else:
            raise ValueError(f"path={str(path)!r}: its suffix must be .svg, .html or .txt")
        path.write_text(text, encoding="utf-8")

    def _repr_html_(self) -> str:
        """What a notebook shows: the picture, and the table folded up below it."""
        return (
            f'<div style="max-width:100%;overflow-x:auto">{self.svg()}</div>'
            f"<details><summary>figures</summary><pre>{escape(str(self))}</pre></details>"
        )

    def __str__(self) -> str:
        lines = [*self._byte_lines(), *self._pool_lines(), *self._owner_lines()]
        return "\n".join(lines)

    def __repr__(self) -> str:
        device = self.pool.device
        return (
            f"MemoryReport({device.num_used_blocks} of {device.num_blocks - 1} blocks in use, "
            f"{len(self.pool.owners)} sequences)"
        )

    def _byte_lines(self) -> Iterator[str]:
        owners = self.memory_bytes
        blocks = _pool_counts("kv", self.pool.device)
        sections = [("device", _DEVICE_ROWS)]
        if self.pool.host is not None:
            blocks |= _pool_counts("swap", self.pool.host)
            sections.append(("host", _HOST_ROWS))
        for place, rows in sections:
            total = sum(owners[name] for name in rows)
            yield f"{'memory of the ' + place:<22}{format_bytes(total):>12}"
            for name, title in rows.items():
                share = 100 * owners[name] / max(total, 1)
                count = f"{blocks[name]:>11,} blocks" if name in blocks else ""
                line = f"  {title:<20}{format_bytes(owners[name]):>12}{share:>7.1f}%{count}"
                yield line.replace(" 1 blocks", " 1 block")

    def _pool_lines(self) -> Iterator[str]:
        device, size = self.pool.device, self.pool.block_size
        slots = device.num_used_blocks * size
        yield f"KV pool: {device.num_blocks - 1:,} usable blocks of {size} tokens"
        yield (
            f"  {'in use':<12}{100 * self.usage:.1f}%: {self.num_tokens:,} tokens in "
            f"{slots:,} slots ({100 * self.num_tokens / max(slots, 1):.1f}% filled)"
        )
        yield (
            f"  {'shared':<12}{device.num_shared_blocks:,} blocks; sharing saves "
            f"{device.num_copies_saved:,} copies, {format_bytes(self.bytes_saved_by_sharing)}"
        )
        yield f"  {'pinned':<12}{self.num_pinned_blocks:,} blocks"

    def _owner_lines(self) -> Iterator[str]:
        listed = self.biggest_owners()
        if not listed:
            yield "no sequence holds blocks"
            return
        ids = [printable(owner.request_id, 32) for owner in listed]
        width = max(len("sequence"), *map(len, ids))
        has_host = self.pool.host is not None
        yield (
            f"{'sequence':<{width}}  {'status':<9}{'blocks':>8}{'shared':>8}"
            + (f"{'on host':>9}" if has_host else "")
            + f"{'tokens':>9}"
        )
        for name, owner in zip(ids, listed, strict=True):
            yield (
                f"{name:<{width}}  {owner.status:<9}{owner.num_blocks:>8,}"
                f"{owner.num_shared_blocks:>8,}"
                + (f"{owner.num_host_blocks:>9,}" if has_host else "")
                + f"{owner.num_tokens:>9,}"
            )
        num_more = len(self.pool.owners) - len(listed)
        if num_more:
            yield f"and {num_more:,} more"


def format_bytes(num_bytes: int) -> str:
    """Bytes in the largest IEC unit that leaves 1 or more: "1.50 GiB", "512 B"."""
    exponent = min(max(num_bytes.bit_length() - 1, 0) // 10, len(_UNITS) - 1)
    if exponent == 0:
        return f"{num_bytes} B"
    return f"{num_bytes / 1024**exponent:.2f} {_UNITS[exponent]}"


def _pool_counts(prefix: str, states: BlockStates) -> dict[str, int]:
    return {
        f"{prefix}_in_use": states.num_used_blocks,
        f"{prefix}_cached": states.num_cached_blocks,
        f"{prefix}_free": states.num_free_blocks,
        f"{prefix}_null": 1,
    }


def _pool_bytes(prefix: str, states: BlockStates, block_bytes: int) -> dict[str, int]:
    return {name: n * block_bytes for name, n in _pool_counts(prefix, states).items()}
