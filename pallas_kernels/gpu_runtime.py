"""Where a GPU kernel runs: compiled on a Hopper GPU, interpreted everywhere else."""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Iterator
from typing import Any

import jax

try:
    from jax.experimental.pallas import mosaic_gpu as plgpu
except ImportError:  # jaxlib is built without Mosaic GPU on some platforms.
    plgpu = None

# What the kernels use, and jax before 0.11.2 lacks.
_NEEDED = ("kernel", "InterpretGPUParams", "wgmma", "WGMMAAccumulatorRef")
# Of the H100 (SXM) and the H200.
_HOPPER_MULTIPROCESSORS = 132
# The interpreter runs programs one after the other.
_INTERPRETED_MULTIPROCESSORS = 3

_must_compile = contextvars.ContextVar("must_compile", default=False)
_detect_races = contextvars.ContextVar("detect_races", default=False)


@functools.cache
def missing_reason() -> str | None:
    """Why this jax has not what the GPU kernels are written in, and the mend; None if it has."""
    missing = [name for name in _NEEDED if not hasattr(plgpu, name)]
    if not missing:
        return None
    return (
        f"jax {jax.__version__} lacks pallas.mosaic_gpu's {', '.join(missing)}; use jax 0.11.2 or "
        "newer"
    )


def device_reason() -> str | None:
    """Why the default backend's device is none that the kernels are compiled for; None if it is."""
    if jax.default_backend() != "gpu":
        return f"the default backend is {jax.default_backend()!r}, no GPU"
    device = jax.local_devices()[0]
    capability = str(getattr(device, "compute_capability", "unknown"))
    if capability.partition(".")[0] != "9":
        return (
            f"{device.device_kind} has compute capability {capability}, and the kernel is written "
            "for 9.x (Hopper)"
        )
    return None


def other_gpu_reason() -> str | None:
    """Why kernels traced now can neither be compiled nor interpreted; None if they can."""
    on_gpu = jax.default_backend() == "gpu" and not _must_compile.get()
    return device_reason() if on_gpu else None


def interpret_mode() -> Any:
    """The `interpret` argument of `plgpu.kernel` for a kernel traced now.

    False on a Hopper GPU, and under `force_compile`; elsewhere the parameters of Pallas's GPU
    interpreter, whose uninitialised memory is NaN so that a kernel that reads it shows.
    """
    if _must_compile.get() or device_reason() is None:
        return False
    return plgpu.InterpretGPUParams(  # pyright: ignore[reportOptionalMemberAccess]
        detect_races=_detect_races.get(), uninitialized_memory="nan"
    )


def num_multiprocessors() -> int:
    """Of the GPU that a kernel is traced for: the default backend's, an H200's under
    `force_compile`, a very small one's where it is interpreted.
    """
    if _must_compile.get():
        return _HOPPER_MULTIPROCESSORS
    if device_reason() is not None:
        return _INTERPRETED_MULTIPROCESSORS
    return int(getattr(jax.local_devices()[0], "core_count", _HOPPER_MULTIPROCESSORS))


def store(ref: Any, value: jax.Array) -> None:
    """Writes registers to global memory as they lie, in however many pieces that takes."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)  # pyright: ignore[reportOptionalMemberAccess]
    else:  # jax 0.11 writes so anyway.
        ref[...] = value


@contextlib.contextmanager
def force_compile() -> Iterator[None]:
    """Within it, GPU kernels are traced for an H200 although the default backend is none.

    For ahead-of-time compilation against `jax.experimental.topologies`.
    """
    token = _must_compile.set(True)
    try:
        yield
    finally:
        _must_compile.reset(token)


@contextlib.contextmanager
def detect_races() -> Iterator[None]:
    """Within it, interpreted GPU kernels are traced with the race detector on, which raises."""
    token = _detect_races.set(True)
    try:
        yield
    finally:
        _detect_races.reset(token)
