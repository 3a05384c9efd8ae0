"""Resident memory of this process: how much it is, and giving back what nobody uses."""

from __future__ import annotations

import ctypes
import functools
import pathlib
import sys
from typing import Any

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
    XLA's library, the code: compiling walks through most of its 170 MB, running through little.
    That is read back from the system's cache of the file where it is needed again.

    It does nothing where there is no glibc.
    """
    libc = _glibc()
    if libc is None:
        return
    libc.malloc_trim(0)
    for start, end in _library_code():
        libc.madvise(start, end - start, _MADV_DONTNEED)


@functools.cache
def _glibc() -> Any:
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "malloc_trim"):
        return None
    libc.malloc_trim.argtypes = [ctypes.c_size_t]
    libc.madvise.argtypes = [ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int]
    return libc


def _library_code() -> list[tuple[int, int]]:
    """Where XLA's library lies in memory: its code alone, which no process writes to."""
    ranges = []
    for line in _MAPS.read_text().splitlines():
        fields = line.split(maxsplit=5)
        if fields[1] == "r-xp" and fields[-1].endswith("libjax_common.so"):
            start, end = fields[0].split("-")
            ranges.append((int(start, 16), int(end, 16)))
    return ranges
