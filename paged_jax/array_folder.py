"""A folder of named arrays that is whole or is refused: weights, or the blocks of a prefix cache.

    <path>/paged_jax.json    what it is, each array's shape, dtype and checksums: the manifest
    <path>/arrays/0000/      an orbax checkpoint of the first few arrays, a dict by name
    <path>/arrays/0001/      ... of the next few

Orbax saves a tree that is in memory. Saving a few arrays at a time bounds the host memory by those,
and each folder within arrays/ is a checkpoint that orbax itself restores as well (zarr, one file a
chunk, uncompressed). Reading takes the chunks that a slice lies in and no others.

`array_folder_writer` writes it to `<path>.partial`, which is renamed at the end. So nothing is at
`path` until all of it is on disk; and a copy of it that was cut short, or a damaged disk, shows in
the manifest: it comes last, knows the size of every file, and a checksum of every chunk, which is
compared when the chunk is read.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
import math
import os
import pathlib
import zlib
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

MANIFEST_FILE = "paged_jax.json"
VERSION = 1

# The folder of the orbax checkpoints.
ARRAYS = "arrays"
_CHUNKS_UNDER_WAY = 4

Index = tuple[slice, ...]


class ArrayFolderError(ValueError):
    """A folder is unfinished, damaged or of another kind; the message names it and the mend."""


@dataclasses.dataclass(frozen=True)
class StoredArray:
    """An array of a folder: where it is, and the checksum of each chunk, in C order."""

    group: str
    shape: tuple[int, ...]
    dtype: np.dtype
    chunk_shape: tuple[int, ...]
    crc32: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def chunk_bytes(self) -> int:
        return math.prod(self.chunk_shape) * self.dtype.itemsize

    def chunk_grid(self) -> list[tuple[int, ...]]:
        """The place of each chunk in the grid of chunks, in C order."""
        counts = [-(-n // c) for n, c in zip(self.shape, self.chunk_shape, strict=True)]
        return list(itertools.product(*map(range, counts)))

    def chunk_box(self, place: tuple[int, ...]) -> Index:
        """The part of the array that a chunk holds; orbax's chunks divide the array evenly."""
        starts = [i * c for i, c in zip(place, self.chunk_shape, strict=True)]
        return tuple(slice(s, s + c) for s, c in zip(starts, self.chunk_shape, strict=True))


def partial_path(path: pathlib.Path) -> pathlib.Path:
    """Where a folder stands while it is written."""
    return path.with_name(path.name + ".partial")


def is_array_folder(path: pathlib.Path) -> bool:
    """Whether a path is such a folder, whole or not; `ArrayFolder` says which."""
    if (path / ARRAYS).is_dir() or (path / MANIFEST_FILE).is_file():
        return True
    return not path.exists() and partial_path(path).is_dir()


class ArrayFolder:
    """A whole folder, opened to be read.

    Opening it compares the size of every file; what is in them is compared when it is read.

    Attributes:
      content: what its writer gave to `commit`.
      arrays: what is known of each array, by name.

    Raises:
      FileNotFoundError: there is nothing at path.
      ArrayFolderError: the folder is unfinished, was written only in part or is damaged, is of
        another kind, or of a later version of this package.
    """

    def __init__(self, path: str | os.PathLike[str], kind: str):
        self.path = pathlib.Path(os.path.abspath(pathlib.Path(path).expanduser()))
        self.kind = kind
        manifest = self._read_manifest()
        try:
            self.content: dict[str, Any] = manifest["content"]
            self.arrays = {
                name: StoredArray(
                    group=entry["group"],
                    shape=tuple(entry["shape"]),
                    dtype=jnp.dtype(entry["dtype"]),
                    chunk_shape=tuple(entry["chunk_shape"]),
                    crc32=tuple(entry["crc32"]),
                )
                for name, entry in manifest["arrays"].items()
            }
        except (KeyError, TypeError, AttributeError) as error:
            raise self._damaged(f"{MANIFEST_FILE} lacks or garbles {error}") from error
        for name, stored in self.arrays.items():
            self._check_files(name, stored)

    def read(
        self, name: str, dtype: np.dtype | None = None, index: Index | None = None
    ) -> np.ndarray:
        """An array, or a part of it, from the chunks that it lies in.

        Host memory beyond the result stays near a few chunks.

        Args:
          name: of `arrays`.
          dtype: what it is converted to; None leaves it as it is.
          index: a slice a dimension, of step 1; dimensions that are left out are taken whole.

        Raises:
          ArrayFolderError: there is no such array, it cannot be converted to that dtype, or what
            was read differs from what was written.
          ValueError: the index does not fit.
        """
        if name not in self.arrays:
            raise ArrayFolderError(f"{self.path} holds no array {name!r}: {_few(self.arrays)}")
        stored = self.arrays[name]
        dtype = stored.dtype if dtype is None else jnp.dtype(dtype)
        if not _is_castable(stored.dtype, dtype):
            raise ArrayFolderError(
                f"{self.path}: array {name!r} is stored as {stored.dtype} and was asked for as "
                f"{dtype}: ask for a dtype of its kind"
            )
        wanted = _bounds(name, stored.shape, index)
        out = np.empty([s.stop - s.start for s in wanted], dtype)
        for box, values in self._read_chunks(name, stored, wanted):
            both = [_overlap(w, b) for w, b in zip(wanted, box, strict=True)]
            target = tuple(_shift(s, -w.start) for s, w in zip(both, wanted, strict=True))
            out[target] = values[tuple(_shift(s, -b.start) for s, b in zip(both, box, strict=True))]
        return out

    def _read_chunks(
        self, name: str, stored: StoredArray, wanted: Index
    ) -> Iterator[tuple[Index, np.ndarray]]:
        """The chunks that overlap a part of an array, a few being read ahead."""
        import tensorstore

        folder = self.path / ARRAYS / stored.group / name
        under_way: collections.deque[tuple[tuple[int, ...], int, Any]] = collections.deque()
        try:
            spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": f"{folder}/"}}
            store = tensorstore.open({**spec, "fill_missing_data_reads": False}).result()
            for place, crc32 in zip(stored.chunk_grid(), stored.crc32, strict=True):
                box = stored.chunk_box(place)
                overlaps = [_overlap(w, b) for w, b in zip(wanted, box, strict=True)]
                if all(s.start < s.stop for s in overlaps):
                    under_way.append((place, crc32, store[box].read()))
                if len(under_way) >= _CHUNKS_UNDER_WAY:
                    yield self._finish(name, stored, *under_way.popleft())
            while under_way:
                yield self._finish(name, stored, *under_way.popleft())
        except ArrayFolderError:
            raise
        except (ValueError, OSError) as error:
            raise self._damaged(f"array {name!r} cannot be read ({error})") from error

    def _finish(
        self, name: str, stored: StoredArray, place: tuple[int, ...], crc32: int, future: Any
    ) -> tuple[Index, np.ndarray]:
        values: np.ndarray = future.result()
        if values.dtype != stored.dtype or checksum(values) != crc32:
            file = self.path / ARRAYS / stored.group / name / _chunk_file(place)
            raise self._damaged(f"array {name!r}: {file} is not what was written")
        return stored.chunk_box(place), values

    def _read_manifest(self) -> dict[str, Any]:
        path = self.path / MANIFEST_FILE
        unfinished = partial_path(self.path)
        if not self.path.exists() and unfinished.exists():
            raise ArrayFolderError(
                f"{self.path} was never finished: writing stopped half-way, and left {unfinished}; "
                f"write the {self.kind} again"
            )
        if not self.path.exists():
            raise FileNotFoundError(f"no {self.kind} at {self.path}")
        if not path.is_file():
            raise ArrayFolderError(
                f"{self.path} is no whole {self.kind}, it has no {MANIFEST_FILE}, which is written "
                "last: write or copy it again"
            )
        try:
            manifest = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise self._damaged(f"{MANIFEST_FILE} is not valid JSON ({error})") from error
        if not isinstance(manifest, dict):
            raise self._damaged(f"{MANIFEST_FILE} holds no object")
        if manifest.get("kind") != self.kind:
            raise ArrayFolderError(
                f"{self.path} is a {manifest.get('kind')}: give the path of a {self.kind}"
            )
        if manifest.get("version") != VERSION:
            raise ArrayFolderError(
                f"{self.path} is a {self.kind} of version {manifest.get('version')!r}, and this "
                f"package reads version {VERSION}: update paged-jax, or write it again"
            )
        return manifest

    def _check_files(self, name: str, stored: StoredArray) -> None:
        folder = self.path / ARRAYS / stored.group / name
        try:
            sizes = {entry.name: entry.stat().st_size for entry in os.scandir(folder)}
        except OSError as error:
            raise self._damaged(f"array {name!r} cannot be found ({error})") from error
        for place in stored.chunk_grid():
            size = sizes.get(_chunk_file(place))
            if size != stored.chunk_bytes:
                found = "is missing" if size is None else f"has {size} bytes"
                raise self._damaged(
                    f"array {name!r}: {folder / _chunk_file(place)} {found}, and "
                    f"{stored.chunk_bytes} were written"
                )

    def _damaged(self, finding: str) -> ArrayFolderError:
        return ArrayFolderError(
            f"{self.path}: damaged, or copied only in part: {finding}; write or copy the "
            f"{self.kind} again"
        )


def _bounds(name: str, shape: tuple[int, ...], index: Index | None) -> Index:
    index = index or ()
    if len(index) > len(shape) or any(s.step not in (None, 1) for s in index):
        raise ValueError(f"index={index}: array {name!r} of shape {shape} takes slices of step 1")
    whole = (slice(None),) * (len(shape) - len(index))
    ranges = [s.indices(n) for s, n in zip((*index, *whole), shape, strict=True)]
    return tuple(slice(start, max(start, stop)) for start, stop, _ in ranges)


def _overlap(a: slice, b: slice) -> slice:
    return slice(max(a.start, b.start), min(a.stop, b.stop))


def _shift(s: slice, by: int) -> slice:
    return slice(s.start + by, s.stop + by)


def _is_castable(stored: np.dtype, wanted: np.dtype) -> bool:
    if jnp.issubdtype(stored, jnp.floating):
        return bool(jnp.issubdtype(wanted, jnp.floating))
    return stored == wanted


def _chunk_file(place: tuple[int, ...]) -> str:
    return ".".join(map(str, place)) or "0"


def checksum(values: np.ndarray) -> int:
    """zlib's crc32 of an array's bytes in C order."""
    return zlib.crc32(np.ascontiguousarray(values).reshape(-1).view(np.uint8))


def _few(names: Any) -> str:
    names = list(names)
    return f"it holds {', '.join(names[:4])}" + (f" and {len(names) - 4} more" * (len(names) > 4))
