"""Where a TPU kernel runs: compiled on a TPU, interpreted everywhere else."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any

import jax

_must_compile = contextvars.ContextVar("must_compile", default=False)
_generation = contextvars.ContextVar[str | None]("generation", default=None)
_detect_races = contextvars.ContextVar("detect_races", default=False)


def compiles() -> bool:
    """Whether a TPU kernel traced now is compiled: on a TPU, and under `force_compile`."""
    return _must_compile.get() or jax.default_backend() == "tpu"


def interpret_mode() -> Any:
    """The `interpret` argument of `pl.pallas_call` for a TPU kernel traced now.

    False on a TPU, and under `force_compile`; elsewhere the parameters of Pallas's TPU
    interpreter, whose uninitialised memory is NaN so that a kernel that reads it shows.
    """
    if compiles():
        return False
    from jax.experimental.pallas import tpu as pltpu  # not needed to run on other devices

    is_watched = _detect_races.get()
    # Copies done at the wait show what is read before it, copies done at the start let the
    # detector see what is never waited for.
    mode = "eager" if is_watched else "on_wait"
    return pltpu.InterpretParams(
        detect_races=is_watched, uninitialized_memory="nan", dma_execution_mode=mode
    )


# By a part of `jax.Device.device_kind`, in lower case.
_GENERATIONS = {
    "v4": "v4",
    "v5 lite": "v5e",
    "v5e": "v5e",
    "v5p": "v5p",
    "v5": "v5p",
    "v6": "v6e",
    "7x": "tpu7x",
}


def tpu_generation() -> str | None:
    """ "v4", "v5e", "v5p", "v6e" or "tpu7x": the TPU that a kernel is traced for; None if unknown.

    That of `force_compile`, else of the default backend's first device.
    """
    if _generation.get() is not None or jax.default_backend() != "tpu":
        return _generation.get()
    kind = jax.devices()[0].device_kind.lower()
    return next((name for part, name in _GENERATIONS.items() if part in kind), None)


@contextlib.contextmanager
def force_compile(generation: str | None = None) -> Iterator[None]:
    """Within it, TPU kernels are traced for a TPU although the default backend is none.

    For ahead-of-time compilation against `jax.experimental.topologies`.

    Args:
      generation: as `tpu_generation` returns it; None traces kernels that fit every one.
    """
    tokens = _must_compile.set(True), _generation.set(generation)
    try:
        yield
    finally:
        _must_compile.reset(tokens[0])
        _generation.reset(tokens[1])


@contextlib.contextmanager
def detect_races() -> Iterator[None]:
    """Within it, interpreted TPU kernels are traced with the race detector on."""
    token = _detect_races.set(True)
    try:
        yield
    finally:
        _detect_races.reset(token)
