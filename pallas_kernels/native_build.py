"""Builds a C++ source next to this file into a shared library, where a compiler is found.

A library is built once for a source, compiler, machine and jax, and kept in a folder of the user.
Nothing here is needed to run: whoever asks for a library must have another way.

Environment:
  PAGED_JAX_NATIVE: 0 switches all native code off.
  PAGED_JAX_NATIVE_CACHE: the folder of built libraries; ~/.cache/paged-jax/native by default.
  CXX: the compiler, with arguments if wished, which overrule those here ("g++ -march=x86-64-v3");
    c++, g++ and clang++ are tried without it.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import hashlib
import logging
import os
import pathlib
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence

import jax
import jax.ffi

_COMPILERS = ("c++", "g++", "clang++")
# -ffast-math would drop the NaN that a broken input must produce. Without errno and traps, loops
# become vectors.
_FLAGS = (
    "-std=gnu++17",
    "-O3",
    "-march=native",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=hidden",
    "-fPIC",
    "-shared",
    "-pthread",
    "-w",  # XLA's headers are not ours to mend
)
_TIMEOUT_SECONDS = 300

_log = logging.getLogger(__name__)


class NativeBuildError(RuntimeError):
    """Why there is no library: native code is off, or no compiler, or it failed."""


def register_handler(library: pathlib.Path, target: str, symbol: str) -> None:
    """Makes a built library's handler known to XLA under a name.

    Raises:
      OSError, AttributeError: it cannot be loaded, or is another library.
    """
    handler = getattr(ctypes.CDLL(str(library)), symbol)
    jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(handler), platform="cpu")


@dataclasses.dataclass(frozen=True, kw_only=True)
class NativeKernel:
    """A C++ source whose operations XLA calls, built and registered when it is first asked for.

    name: what XLA knows it by begins with it. does: for the log, as in "attention on CPU runs".
    source, headers: as for `build_library`.
    register: of a library, under a target's name; raises as `register_handler` does.
    """

    name: str
    does: str
    source: pathlib.Path
    headers: tuple[pathlib.Path, ...]
    register: Callable[[pathlib.Path, str], object]

    @functools.cached_property
    def target(self) -> str:
        """With the sources' digest, so that no program from XLA's cache meets another kernel."""
        return f"{self.name}_{source_digest((self.source, *self.headers))}"

    @functools.cached_property
    def missing_reason(self) -> str | None:
        """Builds and registers it, once a process; why it is not there, or None."""
        try:
            self.register(build_library(self.source, self.headers), self.target)
        except (NativeBuildError, OSError, AttributeError) as error:
            _log.info("%s in XLA, without the C++ kernel: %s", self.does, error)
            return f"there is no C++ kernel: {error}"
        return None


def source_digest(sources: Sequence[pathlib.Path]) -> str:
    """Sixteen hexadecimal digits of the sources' contents: a name that changes with them."""
    digest = hashlib.sha256()
    for source in sources:
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def build_library(source: pathlib.Path, headers: Sequence[pathlib.Path] = ()) -> pathlib.Path:
    """The shared library of `source`, from the cache folder or built into it.

    Args:
      source: a C++ file that may include XLA's FFI headers.
      headers: the files it includes itself, which count for the cache as it does.

    Raises:
      NativeBuildError: switched off, no compiler, no folder to write to, or the compiler failed;
        the message says which, with the end of the compiler's words.
    """
    if os.environ.get("PAGED_JAX_NATIVE", "1") == "0":
        raise NativeBuildError("PAGED_JAX_NATIVE is 0")
    compiler = find_compiler()
    try:
        key = hashlib.sha256(
            "\n".join(
                (
                    source_digest((source, *headers)),
                    *compiler,
                    _output_of([*compiler, "--version"]),
                    *_FLAGS,
                    jax.__version__,
                    _machine(),
                )
            ).encode()
        ).hexdigest()[:32]
        folder = cache_folder()
        library = folder / f"{source.stem}-{key}.so"
        if not library.exists():
            folder.mkdir(parents=True, exist_ok=True)
            _compile(compiler, source, library)
    except OSError as error:
        raise NativeBuildError(f"{source.name} cannot be built: {error}") from error
    return library


def find_compiler() -> list[str]:
    """The C++ compiler's command line, from CXX or from the usual names.

    Raises:
      NativeBuildError: none is found.
    """
    named = shlex.split(os.environ.get("CXX", ""))
    if named:
        if shutil.which(named[0]) is None:
            raise NativeBuildError(f"CXX is {shlex.join(named)!r}, which is not found")
        return named
    for name in _COMPILERS:
        if shutil.which(name) is not None:
            return [name]
    raise NativeBuildError(f"no C++ compiler is found ({', '.join(_COMPILERS)}, or CXX)")


def cache_folder() -> pathlib.Path:
    """Where built libraries are kept."""
    named = os.environ.get("PAGED_JAX_NATIVE_CACHE")
    return pathlib.Path(named or "~/.cache/paged-jax/native").expanduser()


def _compile(compiler: list[str], source: pathlib.Path, library: pathlib.Path) -> None:
    """Compiles into a name of its own, so that no other process loads half a file."""
    descriptor, building = tempfile.mkstemp(dir=library.parent, suffix=".building")
    os.close(descriptor)
    try:
        include = f"-I{jax.ffi.include_dir()}"
        command = [compiler[0], *_FLAGS, *compiler[1:], include, "-o", building, str(source)]
        _output_of(command)
        os.replace(building, library)
    finally:
        pathlib.Path(building).unlink(missing_ok=True)


def _output_of(command: list[str]) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_SECONDS
        )
    except subprocess.TimeoutExpired as error:
        raise NativeBuildError(f"{command[0]} took over {_TIMEOUT_SECONDS} s") from error
    if done.returncode:
        raise NativeBuildError(
            f"{command[0]} ended with {done.returncode}: {done.stderr.strip()[-2000:]}"
        )
    return done.stdout


def _machine() -> str:
    """What -march=native depends on: a library from another machine may not run on this one."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    features = [line for line in lines if line.startswith(("flags", "Features", "model name"))]
    return "\n".join([platform.machine(), platform.processor(), *sorted(set(features))])
