"""Devices that are not here: their compilers hand them out by name, for programs to be compiled.

libtpu holds the compilers of all TPU generations and needs no TPU to run (`pip install libtpu`);
jax's CUDA plugin that of GPUs. What is compiled for such a device is what the device would run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import math
import os
import re
from collections.abc import Iterator
from typing import Any

import jax
from jax.experimental import topologies

from paged_jax.gpu_targets import GPU_TARGETS, REMEDY
from paged_jax.simulate.device_model import ACCELERATORS, Accelerator
from pallas_kernels import gpu_runtime, tpu_runtime

GIB = 2**30
# What a program may use of a device's memory, as its runtime reports it.
_MEMORY_GIB = {
    "v4": 30.75, "v5e": 15.75, "v5p": 95.74, "v6e": 31.25, "tpu7x": 94.75, "h200": 141.0
}  # fmt: skip
# A v4's two cores are one device; libtpu makes them so if told.
_TPU_OPTIONS: dict[str, dict[str, Any]] = {"v4": {"chip_config_name": "megacore"}}
_NAME = re.compile(r"(?P<kind>[a-z0-9]+):(?P<shape>[1-9]\d*(x[1-9]\d*)*)")


@dataclasses.dataclass(frozen=True)
class Hardware:
    """Some devices of one kind.

    Attributes:
      name: as they were asked for, "v5e:4x4".
      kind: a generation of TPUs, a GPU, or "cpu".
      devices: to make a mesh of; nothing runs on them, unless they are CPUs.
      memory_bytes: that programs may use, of each.
      rates: the data sheet's bandwidth and peak; None of a CPU.
      implementation: of the attention op, "tpu", "gpu" or "xla".
    """

    name: str
    kind: str
    devices: list[Any]
    memory_bytes: int
    rates: Accelerator | None
    implementation: str

    @contextlib.contextmanager
    def compiling(self, mesh: jax.sharding.Mesh) -> Iterator[None]:
        """Traces kernels for these devices and not for the machine's own."""
        if self.kind == "cpu":
            yield
        elif self.kind in GPU_TARGETS:
            # The latter keeps the kernels for CPUs out.
            with gpu_runtime.force_compile(), tpu_runtime.force_compile():
                yield
        else:
            with jax.set_mesh(mesh), tpu_runtime.force_compile(self.kind):
                yield


def find_hardware(name: str, *, memory_bytes: int | None = None) -> Hardware:
    """The devices of a topology.

    Args:
      name: "v4:2x2x1", "v5e:4x4", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1" and larger ones of these;
        "h200:8", of one machine; or "cpu:8", this machine's virtual devices.
      memory_bytes: that programs may use of each device; None for what its kind has. CPUs need it.

    Raises:
      ValueError: there is no such topology.
      ImportError: what compiles for it is not installed.
    """
    match = _NAME.fullmatch(name)
    known = [*_MEMORY_GIB, "cpu"]
    if match is None or match["kind"] not in known:
        raise ValueError(
            f"topology={name!r}: give one of {known} and its shape, such as 'v5e:2x2' or 'cpu:8'"
        )
    kind = match["kind"]
    count = math.prod(map(int, match["shape"].split("x")))
    if kind == "cpu":
        return _cpus(name, count, memory_bytes)
    return Hardware(
        name=name,
        kind=kind,
        devices=_gpus(name, kind, count) if kind in GPU_TARGETS else _tpus(name, kind),
        memory_bytes=memory_bytes or int(_MEMORY_GIB[kind] * GIB),
        rates=ACCELERATORS[kind],
        implementation="gpu" if kind in GPU_TARGETS else "tpu",
    )


def _cpus(name: str, count: int, memory_bytes: int | None) -> Hardware:
    devices = jax.devices("cpu")
    if len(devices) < count:
        raise ValueError(
            f"topology={name!r}: jax has {len(devices)} CPU devices; set jax_num_cpu_devices, or "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={count}, before jax starts"
        )
    if memory_bytes is None:
        raise ValueError(
            f"topology={name!r}: say with memory_bytes (--memory_gib) what each device may use"
        )
    return Hardware(name, "cpu", devices[:count], memory_bytes, None, "xla")


def _gpus(name: str, kind: str, count: int) -> list[Any]:
    if importlib.util.find_spec("jax_cuda13_plugin") is None:
        raise ImportError(f"topology={name!r}: {REMEDY}")
    topology = topologies.get_topology_desc(
        platform="cuda",
        topology_name=kind,
        topology=f"1x1x{count}",
        target_config=GPU_TARGETS[kind],
    )
    return list(topology.devices)


def _tpus(name: str, kind: str) -> list[Any]:
    if importlib.util.find_spec("libtpu") is None:
        raise ImportError(
            f"topology={name!r}: compiling for a TPU needs libtpu: pip install libtpu"
        )
    # libtpu would ask a cloud machine's metadata server who it is, and take a lock.
    for variable, value in (
        ("TPU_SKIP_MDS_QUERY", "1"),
        ("TPU_WORKER_HOSTNAMES", "localhost"),
        ("TPU_ACCELERATOR_TYPE", "v5litepod-4"),
        ("ALLOW_MULTIPLE_LIBTPU_LOAD", "1"),
    ):
        os.environ.setdefault(variable, value)
    try:
        topology = topologies.get_topology_desc(
            platform="tpu", topology_name=name, **_TPU_OPTIONS.get(kind, {})
        )
    except Exception as error:
        line = str(error).strip().splitlines()[0]
        raise ValueError(f"topology={name!r} is none that libtpu knows: {line}") from error
    return list(topology.devices)
