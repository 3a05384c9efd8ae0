"""Resident memory of this process: how much it is, and giving back what nobody uses.

Addresses and sizes are in bytes. Where there is no glibc (on other systems than Linux) nothing is
given back.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import pathlib
import sys
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

_MADV_DONTNEED = 4
_STATUS = pathlib.Path("/proc/self/status")
_MAPS = pathlib.Path("/proc/self/maps")


def resident_bytes() -> dict[str, int]:
    """Bytes in memory now: "anonymous" (heap, arrays), "files" (code, mapped files), "peak".

    "peak" is the largest sum of both so far. Empty where there is no /proc (not Linux).
    """
    if not _STATUS.exists():
        return {}
    fields = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines() if ":" in line)
    names = {"anonymous": "RssAnon", "files": "RssFile", "peak": "VmHWM"}
    # The kernel's unit is "kB" and means KiB.
    return {name: int(fields[field].split()[0]) * 1024 for name, field in names.items()}


def release_unused() -> None:
    """Gives memory back to the system after loading or compiling; tens of milliseconds.

    Of the heap, the pages that are free: a compiler leaves about as many as its program keeps. Of
    XLA's library, code and constants: compiling walks through most of its 230 MB, running through
    little. They are read back from the system's cache of the file where they are needed again.
    """
    libc = _glibc()
    if libc is None:
        return
    libc.malloc_trim(0)
    _release_pages(_library_pages())


@contextlib.contextmanager
def releasing_code(every_seconds: float = 0.05) -> Iterator[None]:
    """Within it, what `release_unused` gives back of XLA's library is given back all the time.

    A compiler's passes run one after the other, each through code of its own: so no more of it is
    in memory than a pass or two need.
    """
    if _glibc() is None:
        yield
        return
    pages, done = _library_pages(), threading.Event()

    def release() -> None:
        while not done.wait(every_seconds):
            _release_pages(pages)

    thread = threading.Thread(target=release, name="paged-jax-release-code", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def discard_zeros(address: int, num_bytes: int) -> None:
    """Gives the pages of a buffer of zeros back to the system, until they are used again.

    They then come as pages of zeros: what is read of the buffer does not change. That holds for
    memory of this process alone, of no file, so that whatever else is left as it is; and so are
    the ends of the buffer, which share their pages.
    """
    libc = _glibc()
    start, num_pages = _whole_pages(address, num_bytes)
    if libc is None or not num_pages:
        return
    end = start + num_pages * mmap.PAGESIZE
    for mapped in _mappings():
        if mapped.is_private and mapped.start < end and start < mapped.end:
            first, last = max(start, mapped.start), min(end, mapped.end)
            libc.madvise(first, last - first, _MADV_DONTNEED)


def absent_bytes(address: int, num_bytes: int) -> int:
    """Of the buffer's whole pages, the bytes that are not in memory: never used, or given back."""
    libc = _glibc()
    start, num_pages = _whole_pages(address, num_bytes)
    if libc is None or not num_pages:
        return 0
    present = (ctypes.c_ubyte * num_pages)()
    if libc.mincore(start, num_pages * mmap.PAGESIZE, present):
        return 0
    return (num_pages - sum(page & 1 for page in bytes(present))) * mmap.PAGESIZE


def _whole_pages(address: int, num_bytes: int) -> tuple[int, int]:
    """Where the first page begins that lies within the buffer, and how many there are."""
    start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    return start, max((address + num_bytes - start) // mmap.PAGESIZE, 0)


@functools.cache
def _glibc() -> Any:
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "malloc_trim"):
        return None
    libc.malloc_trim.argtypes = [ctypes.c_size_t]
    libc.madvise.argtypes = [ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int]
    libc.mincore.argtypes = [ctypes.c_size_t, ctypes.c_size_t, ctypes.c_void_p]
    return libc


class _Mapping(NamedTuple):
    start: int
    end: int
    is_constant: bool  # a file's code, or its beginning with the constants: never written to
    is_private: bool  # of this process alone, and of no file
    name: str


def _mappings() -> Iterator[_Mapping]:
    for line in _MAPS.read_text().splitlines():
        place, rights, offset, _, inode, *name = line.split(maxsplit=5)
        start, end = place.split("-")
        yield _Mapping(
            start=int(start, 16),
            end=int(end, 16),
            is_constant=rights == "r-xp" or (rights == "r--p" and int(offset, 16) == 0),
            is_private=rights == "rw-p" and inode == "0",
            name="".join(name),
        )


def _library_pages() -> list[tuple[int, int]]:
    """Where XLA's library lies in memory, but for what is written to (relocations, variables)."""
    return [
        (mapped.start, mapped.end)
        for mapped in _mappings()
        if mapped.is_constant and mapped.name.endswith("libjax_common.so")
    ]


def _release_pages(ranges: list[tuple[int, int]]) -> None:
    for start, end in ranges:
        _glibc().madvise(start, end - start, _MADV_DONTNEED)
