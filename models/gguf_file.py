"""The header of a GGUF file: its metadata and where its tensors lie.

Written against the format's specification (docs/gguf.md of the ggml project) rather than on the
gguf package's reader: that one takes seconds for a large vocabulary, and reads on past the end of a
truncated file.
"""

import dataclasses
import mmap
import os
import struct
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from paged_jax.models.config import ModelLoadError

MAGIC = b"GGUF"
SUPPORTED_VERSIONS = (2, 3)
DEFAULT_ALIGNMENT_BYTES = 32
MAX_ARRAY_DEPTH = 4
MAX_TENSOR_DIMS = 4  # ggml's own limit

# Value type ids of the format, with struct's letters for them.
SCALAR_FORMATS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
STRING_TYPE = 8
ARRAY_TYPE = 9


@dataclasses.dataclass(frozen=True, kw_only=True)
class GgufTensor:
    """Where a tensor lies. shape is in numpy's order, the row length last."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset_bytes: int


class PackedStrings(Sequence[str]):
    """Strings as the file has them, in a quarter of a list's memory; equal to a list of the same.

    A vocabulary and its merges are 100,000 strings, which are read once if at all.
    """

    def __init__(self, data: bytes, starts: array) -> None:
        """data: UTF-8, 8 other bytes before each string. starts: of each, and of one more."""
        self._data = data
        self._starts = starts

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __iter__(self) -> Iterator[str]:
        for start, next_start in zip(self._starts, self._starts[1:], strict=False):
            yield self._data[start : next_start - 8].decode()

    def __getitem__(self, index: Any) -> Any:
        return list(self)[index] if isinstance(index, slice) else self._at(range(len(self))[index])

    def _at(self, i: int) -> str:
        return self._data[self._starts[i] : self._starts[i + 1] - 8].decode()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, list | PackedStrings):
            return NotImplemented
        return list(self) == list(other)

    def __repr__(self) -> str:
        return repr(list(self))


@dataclasses.dataclass(frozen=True, kw_only=True)
class GgufHeader:
    """metadata: plain Python values, lists of strings packed. tensors: in the file's order."""

    path: Path
    file_bytes: int
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]


def gguf_metadata(path: str | os.PathLike[str]) -> dict[str, Any]:
    """All metadata of a GGUF file as plain Python values (str, int, float, bool, lists of them).

    Lists of strings are `PackedStrings`.

    Raises: FileNotFoundError; ModelLoadError when the file is not GGUF, corrupt or truncated.
    """
    return read_header(path).metadata


def read_header(path: str | os.PathLike[str]) -> GgufHeader:
    """Reads the header; the tensors' bytes stay untouched.

    Raises: FileNotFoundError; ModelLoadError when the file is not GGUF, of a version or byte order
        that is not supported, corrupt, or ends within its header.
    """
    path = Path(path)
    with path.open("rb") as file:
        magic = file.read(len(MAGIC))
        if magic != MAGIC:
            raise ModelLoadError(
                f"{path}: not a GGUF file: it starts with {magic!r}, not {MAGIC!r}; give a .gguf "
                "file, or the folder of a Hugging Face model"
            )
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse(path, data)


def _parse(path: Path, data: mmap.mmap) -> GgufHeader:
    cursor = _Cursor(path, data, len(MAGIC))
    (version,) = cursor.unpack("I", "the version")
    if version & 0xFFFF == 0:
        raise ModelLoadError(f"{path}: big-endian GGUF is not supported: convert it again")
    if version not in SUPPORTED_VERSIONS:
        raise ModelLoadError(
            f"{path}: GGUF version {version} is not supported, only {SUPPORTED_VERSIONS}: "
            "convert it again with a current llama.cpp"
        )
    num_tensors, num_pairs = cursor.unpack("QQ", "the counts")
    metadata: dict[str, Any] = {}
    for _ in range(num_pairs):
        key = cursor.string("a metadata key")
        (type_id,) = cursor.unpack("I", f"the type of {key!r}")
        metadata[key] = cursor.value(type_id, key)
    infos = [_tensor_info(cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT_BYTES)
    if not isinstance(alignment, int) or alignment < 1:
        raise ModelLoadError(f"{path}: general.alignment={alignment!r} must be 1 or more")
    data_start = -(-cursor.offset // alignment) * alignment
    tensors = {
        info.name: dataclasses.replace(info, offset_bytes=data_start + info.offset_bytes)
        for info in infos
    }
    if len(tensors) != len(infos):
        raise ModelLoadError(f"{path}: corrupt: two tensors have the same name; fetch it again")
    return GgufHeader(path=path, file_bytes=len(data), metadata=metadata, tensors=tensors)


def _tensor_info(cursor: "_Cursor") -> GgufTensor:
    """One tensor's entry; offset_bytes still counts from the start of the tensor data."""
    name = cursor.string("a tensor's name")
    (num_dims,) = cursor.unpack("I", f"the dimensions of {name!r}")
    if not 1 <= num_dims <= MAX_TENSOR_DIMS:
        raise cursor.corrupt(f"tensor {name!r} has {num_dims} dimensions")
    dims = cursor.unpack(f"{num_dims}Q", f"the shape of {name!r}")
    if 0 in dims:
        raise cursor.corrupt(f"tensor {name!r} has an empty dimension")
    type_id, offset_bytes = cursor.unpack("IQ", f"the place of {name!r}")
    # The format lists the fastest-varying dimension first.
    return GgufTensor(name=name, shape=dims[::-1], type_id=type_id, offset_bytes=offset_bytes)


class _Cursor:
    """Reads values one after another and never past the end of the file."""

    def __init__(self, path: Path, data: mmap.mmap, offset: int) -> None:
        self.path = path
        self.data = data
        self.offset = offset

    def corrupt(self, finding: str) -> ModelLoadError:
        return ModelLoadError(
            f"{self.path}: corrupt GGUF header at byte {self.offset}: {finding}; fetch it again"
        )

    def take(self, num_bytes: int, what: str) -> int:
        """Moves past num_bytes and returns where they start."""
        start = self.offset
        if start + num_bytes > len(self.data):
            raise ModelLoadError(
                f"{self.path}: truncated or corrupt: the header needs {num_bytes} bytes at byte "
                f"{start} for {what}, and the file has {len(self.data)} bytes; fetch it again"
            )
        self.offset = start + num_bytes
        return start

    def unpack(self, letters: str, what: str) -> tuple[Any, ...]:
        layout = struct.Struct("<" + letters)
        return layout.unpack_from(self.data, self.take(layout.size, what))

    def string(self, what: str) -> str:
        (num_bytes,) = self.unpack("Q", what)
        start = self.take(num_bytes, what)
        try:
            return self.data[start : self.offset].decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.corrupt(f"{what} is not UTF-8 ({error})") from error

    def strings(self, count: int, what: str) -> PackedStrings:
        begin, size, length_at = self.offset, len(self.data), struct.Struct("<Q").unpack_from
        starts = array("Q", [8])
        for _ in range(count):  # As `string`, in a third of its time.
            start = self.offset + 8
            end = start + length_at(self.data, self.offset)[0] if start <= size else size + 1
            try:
                if end > size:
                    raise ValueError
                self.data[start:end].decode()
            except ValueError:
                self.string(what)
                raise
            self.offset = end
            starts.append(end - begin + 8)
        return PackedStrings(self.data[begin : self.offset], starts)

    def value(self, type_id: int, key: str, depth: int = 0) -> Any:
        if type_id == STRING_TYPE:
            return self.string(key)
        if type_id in SCALAR_FORMATS:
            return self.unpack(SCALAR_FORMATS[type_id], key)[0]
        if type_id != ARRAY_TYPE:
            raise self.corrupt(f"{key!r} has the unknown value type {type_id}")
        if depth == MAX_ARRAY_DEPTH:
            raise self.corrupt(f"{key!r} nests arrays more than {MAX_ARRAY_DEPTH} deep")
        item_type_id, count = self.unpack("IQ", key)
        if item_type_id == STRING_TYPE:
            return self.strings(count, key)
        if item_type_id in SCALAR_FORMATS:
            letter = SCALAR_FORMATS[item_type_id]
            start = self.take(count * struct.calcsize("<" + letter), key)
            return list(struct.unpack_from(f"<{count}{letter}", self.data, start))
        return [self.value(item_type_id, key, depth + 1) for _ in range(count)]
