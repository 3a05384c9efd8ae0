"""Where a TPU kernel runs: compiled on a TPU, interpreted everywhere else."""

from __future__ import annotations

import contextlib
import contextvars
import importlib
from collections.abc import Collection, Iterator
from types import ModuleType
from typing import Any

import jax

_must_compile = contextvars.ContextVar("must_compile", default=False)
_generation = contextvars.ContextVar[str | None]("generation", default=None)
_detect_races = contextvars.ContextVar("detect_races", default=False)


def compiles() -> bool:
    """Whether a TPU kernel traced now is compiled: on a TPU, and under `force_compile`."""
    return _must_compile.get() or jax.default_backend() == "tpu"


def chosen_module(
    name: str, implementation: str | None, others: Collection[str], *arguments: Any
) -> ModuleType | None:
    """The module of an op's TPU kernel, if that is what runs; it is imported only then.

    Args:
      name: of the module in this package; it has a function unsupported_reason(*arguments).
      implementation: what the caller asks for; None for the kernel on a TPU that takes this.
      others: the op's implementations but "tpu".

    Returns:
      The module, or None where one of the others runs.

    Raises:
      ValueError: the implementation is unknown, or "tpu" and the kernel does not take this.
    """
    if implementation not in (None, "tpu", *others):
        names = sorted(["tpu", *others])
        raise ValueError(f"implementation is {implementation!r}; use None or one of {names}")
    if implementation != "tpu" and (implementation is not None or jax.default_backend() != "tpu"):
        return None
    module = importlib.import_module(f"pallas_kernels.{name}")
    reason = module.unsupported_reason(*arguments)
    if reason is not None and implementation is not None:
        raise ValueError(f"implementation is 'tpu', but {reason}, or use 'xla'")
    return module if reason is None else None


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
