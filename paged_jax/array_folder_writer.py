"""Writes folders of arrays, a few arrays at a time; `array_folder` says what these are."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import pathlib
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np

from paged_jax.array_folder import (
    ARRAYS,
    MANIFEST_FILE,
    VERSION,
    StoredArray,
    checksum,
    partial_path,
)

# Arrays are saved together up to this many bytes; a larger one is saved alone.
_GROUP_BYTES = 32 << 20
# Orbax splits the longest dimension, by its divisors, until a chunk is no larger than this.
_CHUNK_BYTES = 8 << 20
# Where the divisors leave crumbs instead (a vocabulary of a prime number of tokens): one chunk.
_MIN_CHUNK_BYTES = 1 << 20


class ArrayFolderWriter:
    """Writes a folder: `add` arrays, then `commit`; leaving the `with` block earlier deletes all.

    Args:
      path: the folder to be; its parents are made.
      kind: what it is, "model checkpoint" say; only readers of the same kind take it.
      overwrite: whether a folder of the same kind may stand at path; it goes when this one is
        whole.

    Attributes:
      folder: where it stands until `commit`; further files may be put here.
      num_bytes: of all arrays so far.

    Raises:
      FileExistsError: there is something at path, or something else than an earlier attempt, which
        would be deleted, where this one is to be written.
    """

    def __init__(self, path: str | os.PathLike[str], kind: str, *, overwrite: bool = False):
        self.path = pathlib.Path(os.path.abspath(pathlib.Path(path).expanduser()))
        if self.path.exists() and not (overwrite and _kind_of(self.path) == kind):
            raise FileExistsError(f"{self.path} exists: delete it, or give another path")
        self.kind = kind
        self.folder = partial_path(self.path)
        self.num_bytes = 0
        self._arrays: dict[str, dict[str, Any]] = {}
        self._waiting: dict[str, np.ndarray] = {}
        self._num_waiting_bytes = 0
        if self.folder.exists() and not (self.folder / ARRAYS).is_dir():
            raise FileExistsError(f"{self.folder} is in the way: delete it, or give another path")
        if self.folder.exists():
            shutil.rmtree(self.folder)
        (self.folder / ARRAYS).mkdir(parents=True)

    def add(self, name: str, values: np.ndarray) -> None:
        """Takes an array, which must not be changed afterwards; it may be on disk, or wait for
        others.

        Raises:
          ValueError: the name is taken, or cannot be a file's, or the array is empty.
        """
        if name in self._arrays or name in self._waiting:
            raise ValueError(f"array {name!r} was added before; give each another name")
        if not name or "/" in name or name.startswith("."):
            raise ValueError(f"array {name!r}: a name is that of a folder, without / and leading .")
        if values.size == 0:
            raise ValueError(f"array {name!r} is empty: {values.shape}; leave it out")
        if self._num_waiting_bytes + values.nbytes > _GROUP_BYTES:
            self._flush()
        self._waiting[name] = values
        self._num_waiting_bytes += values.nbytes
        self.num_bytes += values.nbytes

    def commit(self, content: dict[str, Any]) -> None:
        """Ends the folder: what waits is written, then the manifest, then it gets its name.

        Args:
          content: of JSON's types; readers find it as `ArrayFolder.content`.
        """
        self._flush()
        manifest = {"kind": self.kind, "version": VERSION, "content": content}
        with open(self.folder / MANIFEST_FILE, "w", encoding="utf-8") as file:
            json.dump({**manifest, "arrays": self._arrays}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        replaced = None
        if self.path.exists():
            replaced = tempfile.mkdtemp(prefix=f".{self.path.name}.", dir=self.path.parent)
            os.rename(self.path, pathlib.Path(replaced) / self.path.name)
        os.rename(self.folder, self.path)
        _sync_folder(self.path.parent)
        if replaced is not None:
            shutil.rmtree(replaced, ignore_errors=True)

    def __enter__(self) -> ArrayFolderWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._waiting.clear()
        shutil.rmtree(self.folder, ignore_errors=True)  # Not there any more after a commit.

    def _flush(self) -> None:
        if not self._waiting:
            return
        import orbax.checkpoint as ocp  # Slow to import, and only needed here.

        group = f"{len(list((self.folder / ARRAYS).iterdir())):04}"
        save_args = {
            name: ocp.SaveArgs(chunk_byte_size=_chunk_limit(values.shape, values.dtype))
            for name, values in self._waiting.items()
        }
        # Nothing changes an array meanwhile, so that it need not be copied.
        handlers = ocp.type_handlers.create_type_handler_registry(
            (np.ndarray, ocp.type_handlers.NumpyHandler(deepcopy_host_arrays=False))
        )
        with _quiet():
            handler = ocp.PyTreeCheckpointHandler(
                use_ocdbt=False, use_compression=False, type_handler_registry=handlers
            )
            with ocp.Checkpointer(handler) as checkpointer:
                checkpointer.save(
                    self.folder / ARRAYS / group,
                    args=ocp.args.PyTreeSave(self._waiting, save_args=save_args),
                )
        for name, values in self._waiting.items():
            self._arrays[name] = self._describe(group, name, values)
        self._waiting.clear()
        self._num_waiting_bytes = 0

    def _describe(self, group: str, name: str, values: np.ndarray) -> dict[str, Any]:
        """What the manifest says of an array that was written."""
        zarr = json.loads((self.folder / ARRAYS / group / name / ".zarray").read_bytes())
        stored = StoredArray(group, values.shape, values.dtype, tuple(zarr["chunks"]), ())
        return {
            "group": group,
            "shape": list(values.shape),
            "dtype": values.dtype.name,
            "chunk_shape": list(stored.chunk_shape),
            "crc32": [checksum(values[stored.chunk_box(place)]) for place in stored.chunk_grid()],
        }


def _kind_of(path: pathlib.Path) -> str | None:
    """The kind of a folder that is whole, as far as its manifest says."""
    try:
        return json.loads((path / MANIFEST_FILE).read_text(encoding="utf-8")).get("kind")
    except (OSError, ValueError, AttributeError):
        return None


def _chunk_limit(shape: tuple[int, ...], dtype: np.dtype) -> int | None:
    """The bytes a chunk may have, as orbax is told; None keeps the array in one."""
    chunk = list(shape)
    while (num_bytes := math.prod(chunk) * dtype.itemsize) > _CHUNK_BYTES:
        i = int(np.argmax(chunk))
        chunk[i] = next(n for n in range(chunk[i] - 1, 0, -1) if shape[i] % n == 0)
    return _CHUNK_BYTES if num_bytes >= min(_MIN_CHUNK_BYTES, _CHUNK_BYTES // 16) else None


def _sync_folder(path: pathlib.Path) -> None:
    """Makes a rename within a folder survive a power cut, where the system can."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps orbax from warning, at each save, of what is as it should be: one process's arrays."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
