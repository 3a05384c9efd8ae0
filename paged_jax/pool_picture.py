"""A picture of the pool as SVG: each block a cell, coloured by who has it.

The colours of sequences are those of Okabe and Ito ("Color Universal Design", 2008), which people
with any kind of colour vision tell apart; what is no sequence's is grey, of well separated
lightness. The picture brings its own light card, so it reads the same on a dark page, and it uses
attributes only: a style sheet or an id inside it would reach into the notebook around it.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from xml.sax.saxutils import escape

import numpy as np

from paged_jax.pool_snapshot import BlockStates, Owner, PoolSnapshot, printable

MAX_CELLS = 4096  # A pool of more blocks has several in a cell.

_PALETTE = ("#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7")
# What a cell shows is a number: 0 to 6 a colour of the palette, then these. Where a cell of several
# blocks has as many of one as of another, the smaller number is shown.
_OTHER, _PINNED, _CACHED, _FREE, _NULL = range(len(_PALETTE), len(_PALETTE) + 5)
_FILLS = (*_PALETTE, "#808080", "#303030", "#C8CCD2", "#FFFFFF", "#FFFFFF")
_KIND_NAMES = {
    _OTHER: "in use, holder not listed",
    _PINNED: "pinned, held by no sequence",
    _CACHED: "cached",
    _FREE: "free",
    _NULL: "null block",
}
_DARK_FILLS = ("#009E73", "#0072B2", "#D55E00", "#808080", "#303030")  # Marks on them are white.

_GRID_WIDTH = 882  # pixels; a multiple of each pitch below
_LEFT = 58  # where the grid begins; the block numbers stand to the left of it
_WIDTH = _LEFT + _GRID_WIDTH + 16
_INK, _PALE_INK, _LINE = "#222222", "#6B6B6B", "#9AA0A6"
_NUM_NAMED_GROUPS = 12


def draw_pool(pool: PoolSnapshot) -> str:
    """An <svg> element that shows every block of a pool, and of the host's where there is one.

    A cell is one block, or several alike in a pool of more than `MAX_CELLS`, shown by what most of
    them are. A number or a dot marks shared blocks, a dark frame pinned ones, a pale upper part
    slots that hold no token yet. The pointer on a cell tells of its blocks.
    """
    colours = _group_colours(pool.owners)
    parts: list[str] = []
    y = 14
    for name, states in (("KV pool", pool.device), ("Host memory", pool.host)):
        if states is not None:
            drawing = _Blocks(states, pool.owners, pool.block_size, colours, y)
            parts += drawing.draw(name)
            y = drawing.bottom + 14
    legend, y = _draw_legend(pool, colours, y + 4)
    parts += legend
    height = y + 12
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        f'viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" font-size="12" role="img" '
        'aria-label="Blocks of the KV pool by owner">'
    )
    card = (
        f'<rect x="0.5" y="0.5" width="{_WIDTH - 1}" height="{height - 1}" rx="8" '
        f'fill="#FAFAF8" stroke="{_LINE}"/>'
    )
    return "\n".join([head, card, *parts, "</svg>"])


@dataclasses.dataclass
class _Blocks:
    """The grid of one memory's blocks, drawn from `top` down."""

    states: BlockStates
    owners: Sequence[Owner]
    block_size: int
    colours: dict[str, int]
    top: int

    def __post_init__(self):
        num_blocks = self.states.num_blocks
        self.blocks_per_cell = _blocks_per_cell(num_blocks)
        self.num_cells = -(-num_blocks // self.blocks_per_cell)
        self.pitch = 21 if self.num_cells <= 512 else 14 if self.num_cells <= 2048 else 9
        self.cell = self.pitch - (2 if self.pitch > 14 else 1)
        self.columns = _GRID_WIDTH // self.pitch
        self.grid_top = self.top + 22
        self.bottom = self.grid_top + -(-self.num_cells // self.columns) * self.pitch
        self.codes = _codes(self.states, self.owners, self.colours)
        self.cell_codes = _majority(self._by_cell(self.codes, _NULL + 1))
        self.cell_shared = self._by_cell(self.states.is_shared, False).any(1)
        self.cell_pinned = self._by_cell(self.states.is_pinned, False).any(1)

    def draw(self, name: str) -> Iterator[str]:
        states, n = self.states, self.blocks_per_cell
        usable = states.num_blocks - 1
        heading = (
            f"{name}: {usable:,} blocks of {self.block_size} tokens, "
            f"{100 * states.num_used_blocks / max(usable, 1):.1f}% in use"
        )
        if n > 1:
            heading += f"; a cell is {n} blocks, coloured by what most of them are"
        yield _text(16, self.top + 12, heading, weight="bold")
        step = -(-14 // self.pitch)  # Rows from one number to the next, so that none overlap.
        for row in range(0, -(-self.num_cells // self.columns), step):
            first = row * self.columns * n
            y = self.grid_top + row * self.pitch + self.cell // 2 + 3
            yield _text(_LEFT - 6, y, f"{first:,}", size=9, colour=_PALE_INK, anchor="end")
        yield from self._draw_cells()
        yield '<g pointer-events="none">'  # The cells below answer the pointer.
        yield from self._draw_unfilled()
        yield from self._draw_marks()
        yield "</g>"

    def _draw_cells(self) -> Iterator[str]:
        side = self.cell
        for code in np.unique(self.cell_codes):
            yield f'<g fill="{_FILLS[code]}" stroke="{_LINE}" stroke-width="0.6">'
            for i in np.flatnonzero(self.cell_codes == code).tolist():
                x, y = self._corner(i)
                yield (
                    f'<rect data-cell="{i}" x="{x}" y="{y}" width="{side}" height="{side}">'
                    f"<title>{escape(self._title(i))}</title></rect>"
                )
            yield "</g>"

    def _draw_unfilled(self) -> Iterator[str]:
        """Veils the upper part of blocks in use that are not full; a cell of many has none."""
        if self.blocks_per_cell > 1:
            return
        unfilled = 1 - self.states.num_tokens / self.block_size
        for i in np.flatnonzero(self.states.is_used & (unfilled > 0)).tolist():
            x, y = self._corner(i)
            yield (
                f'<rect x="{x}" y="{y}" width="{self.cell}" '
                f'height="{self.cell * unfilled[i]:.1f}" fill="#FFFFFF" fill-opacity="0.7"/>'
            )

    def _draw_marks(self) -> Iterator[str]:
        side = self.cell
        for i in np.flatnonzero(self.cell_pinned).tolist():
            x, y = self._corner(i)
            yield (
                f'<rect data-pinned="{i}" x="{x + 1}" y="{y + 1}" width="{side - 2}" '
                f'height="{side - 2}" fill="none" stroke="#000000" stroke-width="2"/>'
            )
        if self.blocks_per_cell == 1:
            x, y = self._corner(0)
            yield f'<path d="M{x} {y}l{side} {side}m0 -{side}l-{side} {side}" stroke="{_LINE}"/>'
        for i in np.flatnonzero(self.cell_shared).tolist():
            x, y = self._corner(i)
            is_dark = _FILLS[self.cell_codes[i]] in _DARK_FILLS
            if self.blocks_per_cell == 1 and 2 * self.states.num_tokens[i] < self.block_size:
                is_dark = False  # The veil reaches below its middle.
            ink = "#FFFFFF" if is_dark else "#000000"
            middle = f'data-shared="{i}" fill="{ink}"'
            if self.blocks_per_cell > 1 or side < 16:
                centre = side / 2
                yield f'<circle {middle} cx="{x + centre}" cy="{y + centre}" r="{side / 4.5:.1f}"/>'
            else:
                holders = int(self.states.num_holders[i])
                label = str(holders) if holders < 100 else "99+"
                yield (
                    f'<text {middle} x="{x + side / 2}" y="{y + side / 2 + 3.5}" font-size="9.5" '
                    f'text-anchor="middle">{label}</text>'
                )

    def _title(self, cell: int) -> str:
        """What the pointer tells of a cell."""
        states, n = self.states, self.blocks_per_cell
        first = cell * n
        if n > 1:
            part = slice(first, first + n)
            codes = self.codes[part]
            counts = Counter("in use" if code <= _OTHER else _KIND_NAMES[code] for code in codes)
            counts["shared"] = int(states.is_shared[part].sum())
            counts["pinned"] = int(states.is_pinned[part].sum())
            text = ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)
            return f"blocks {first} to {first + len(codes) - 1}: {text}"
        code = int(self.codes[first])
        if code == _NULL:
            return "block 0: the null block, where padding is read and written"
        holders = int(states.num_holders[first])
        if code < _OTHER:
            what = printable(self.owners[states.owner[first]].request_id, 60)
            what += f" and {holders - 1} more" if holders > 1 else ""
            what += f", {holders} holders" if holders > 1 else ", 1 holder"
        else:
            what = _KIND_NAMES[code]
        pinned = ", pinned" if states.is_pinned[first] and code != _PINNED else ""
        tokens = f", {states.num_tokens[first]} of {self.block_size} tokens"
        return f"block {first}: {what}{pinned}{tokens if code != _FREE else ''}"

    def _corner(self, cell: int) -> tuple[int, int]:
        row, column = divmod(cell, self.columns)
        return _LEFT + column * self.pitch, self.grid_top + row * self.pitch

    def _by_cell(self, values: np.ndarray, filler: int | bool) -> np.ndarray:
        """[num_blocks] -> [num_cells, blocks_per_cell], the last cell filled up."""
        missing = self.num_cells * self.blocks_per_cell - len(values)
        padded = np.append(values, np.full(missing, filler, values.dtype))
        return padded.reshape(self.num_cells, self.blocks_per_cell)


def _draw_legend(pool: PoolSnapshot, colours: dict[str, int], top: int) -> tuple[list[str], int]:
    """The legend's elements, and the y where it ends."""
    memories = [states for states in (pool.device, pool.host) if states is not None]
    codes = np.concatenate([_codes(states, pool.owners, colours) for states in memories])
    sizes = _group_sizes(pool)
    entries = [
        (colours[group], f"{printable(group, 28)} ({count:,})")
        for group, count in list(sizes.items())[:_NUM_NAMED_GROUPS]
    ]
    counts = np.bincount(codes, minlength=_NULL + 1)
    entries += [(c, f"{name} ({counts[c]:,})") for c, name in _KIND_NAMES.items() if counts[c]]
    parts, x, y = [], 16, top
    for code, label in entries:
        width = 28 + round(6.6 * len(label))
        if x + width > _WIDTH - 16:
            x, y = 16, y + 20
        parts.append(
            f'<rect x="{x}" y="{y}" width="12" height="12" fill="{_FILLS[code]}" '
            f'stroke="{_LINE}" stroke-width="0.6"/>'
        )
        if code == _NULL:
            parts.append(f'<path d="M{x} {y}l12 12m0 -12l-12 12" stroke="{_LINE}"/>')
        parts.append(_text(x + 17, y + 10, label))
        x += width
    y += 20
    notes = ["In brackets: blocks, each counted for its first holder."]
    if any(_blocks_per_cell(states.num_blocks) > 1 for states in memories):
        notes.append(
            "A dot: the cell has a block that several sequences hold; a dark frame: one that is "
            "pinned."
        )
    else:
        notes.append(
            "A number or dot: held by several sequences; a dark frame: pinned; a pale upper part: "
            "slots without a token."
        )
    if len(sizes) > len(_PALETTE):
        unnamed = max(len(sizes) - _NUM_NAMED_GROUPS, 0)
        more = f" {unnamed:,} more sequences are not named here." if unnamed else ""
        notes.append(f"{len(_PALETTE)} colours for {len(sizes):,} sequences, so they repeat.{more}")
    for note in notes:
        parts.append(_text(16, y + 10, note, size=11, colour=_PALE_INK))
        y += 16
    return parts, y


def _codes(states: BlockStates, owners: Sequence[Owner], colours: dict[str, int]) -> np.ndarray:
    """int64[num_blocks]: what each block is shown as."""
    colour_of_owner = np.asarray([*(colours[owner.group] for owner in owners), _OTHER])
    codes = np.where(states.is_used, colour_of_owner[states.owner], _FREE)
    codes[states.is_used & (states.num_holders == 0)] = _PINNED
    codes[states.is_cached] = _CACHED
    codes[0] = _NULL
    return codes


def _majority(codes: np.ndarray) -> np.ndarray:
    """[num_cells, n] -> the code most of each row has, the smallest of several such."""
    counts = np.stack([(codes == code).sum(1) for code in range(_NULL + 1)], axis=1)
    return counts.argmax(1)


def _group_colours(owners: Sequence[Owner]) -> dict[str, int]:
    """A colour of the palette for each group of sequences.

    Its name alone chooses the colour, so that a request keeps it from one picture to the next; only
    where more groups have chosen that one than another is the next in the palette taken. The
    groups of the most blocks choose first.
    """
    blocks: Counter[str] = Counter()
    for owner in owners:
        blocks[owner.group] += owner.num_blocks + owner.num_host_blocks
    num_uses = [0] * len(_PALETTE)
    colours = {}
    for group, _ in blocks.most_common():
        digest = hashlib.blake2b(group.encode("utf-8", "replace"), digest_size=4).digest()
        start = int.from_bytes(digest, "little")
        order = [(start + i) % len(_PALETTE) for i in range(len(_PALETTE))]
        colours[group] = min(order, key=num_uses.__getitem__)
        num_uses[colours[group]] += 1
    return colours


def _group_sizes(pool: PoolSnapshot) -> dict[str, int]:
    """How many blocks are coloured for each group, the largest first."""
    sizes = Counter({owner.group: 0 for owner in pool.owners})
    for states in (pool.device, pool.host):
        if states is not None:
            for i, count in Counter(states.owner[states.owner >= 0].tolist()).items():
                sizes[pool.owners[i].group] += count
    return dict(sizes.most_common())


def _blocks_per_cell(num_blocks: int) -> int:
    return -(-num_blocks // MAX_CELLS)


def _text(
    x: int,
    y: int,
    text: str,
    *,
    size: int = 12,
    colour: str = _INK,
    weight: str = "normal",
    anchor: str = "start",
) -> str:
    return (
        f'<text x="{x}" y="{y}" font-size="{size}" font-weight="{weight}" fill="{colour}" '
        f'text-anchor="{anchor}">{escape(text)}</text>'
    )
