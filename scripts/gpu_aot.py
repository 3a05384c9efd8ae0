"""Compiles for a Hopper GPU that is not there, and reports what the compiler made.

The CUDA plugin of jax holds XLA's and Mosaic's compilers for GPUs, and compiles for a GPU that is
described to it by its data sheet. Nothing is run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpu_static
import jax
import numpy as np
import tpu_aot
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from paged_jax.gpu_targets import GPU_TARGETS, REMEDY
from pallas_kernels import gpu_runtime, tpu_runtime

MEMORY_GIB = {"h200": 141}
MAX_SHARED_BYTES = 232_448
REGISTERS = 65_536  # of a multiprocessor


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compilation(tpu_aot.Compilation):
    """What the compilers made of a program.

    Attributes:
      kernels: the code of its Mosaic kernels, but for those that an earlier program of this
        process had too, which are compiled once.
      num_kernel_calls: how many calls of kernels it has.
    """

    kernels: tuple[gpu_static.KernelCosts, ...] = ()
    num_kernel_calls: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compiler:
    """One described device, and the folder for the compiler's reports."""

    mesh: Mesh
    dump_folder: str

    @classmethod
    def open(cls, name: str) -> Compiler:
        """Prepares this process to compile for the named GPU.

        Raises:
          ImportError: the plugin's wheels are not installed.
          KeyError: no such GPU.
        """
        require_plugin()
        folder = tempfile.mkdtemp(prefix="gpu_aot_")
        os.environ["MOSAIC_GPU_DUMP_TO"] = folder
        # The plugin would look for a GPU.
        jax.config.update("jax_platforms", "cpu")
        # A program from the cache would come without its reports.
        jax.config.update("jax_enable_compilation_cache", False)
        topology = topologies.get_topology_desc(
            platform="cuda",
            topology_name=name,
            topology="1x1x1",
            target_config=GPU_TARGETS[name],
        )
        return cls(mesh=Mesh(np.array(topology.devices), ("x",)), dump_folder=folder)

    def lower(self, program: tpu_aot.Program) -> jax.stages.Lowered:
        """Traces the program as on the GPU; errors of its own checks come out here."""
        for path in Path(self.dump_folder).iterdir():
            path.unlink()
        sharding = NamedSharding(self.mesh, PartitionSpec())

        def place(leaf: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype, sharding=sharding)

        # The latter keeps the kernels for CPUs out.
        with gpu_runtime.force_compile(), tpu_runtime.force_compile():
            jitted = jax.jit(program.function, donate_argnums=program.donated)
            return jitted.lower(*jax.tree.map(place, program.args))

    def compile(self, lowered: jax.stages.Lowered) -> Compilation:
        """Compiles what was lowered, and reads the reports."""
        start = time.perf_counter()
        compiled = lowered.compile()
        seconds = time.perf_counter() - start
        memory = compiled.memory_analysis()
        assert memory is not None, "the plugin gives no account of memory"
        kernels = tuple(gpu_static.read_kernels(self.dump_folder))
        return Compilation(
            seconds=seconds,
            temporary_bytes=int(memory.temp_size_in_bytes),
            aliased_bytes=int(memory.alias_size_in_bytes),
            spill_bytes=max((kernel.spill_bytes for kernel in kernels), default=0),
            # Of a kernel's fast memory, whatever it is called.
            vmem_bytes=max(gpu_static.read_shared_bytes(self.dump_folder), default=0),
            kernel_names=frozenset(kernel.name for kernel in kernels),
            kernels=kernels,
            num_kernel_calls=(compiled.as_text() or "").count("mosaic_gpu_v2"),
        )


def require_plugin() -> None:
    """Raises ImportError, with the remedy, unless the CUDA plugin of jax is installed."""
    found = None
    with contextlib.suppress(ImportError):
        found = importlib.util.find_spec("jax_plugins.xla_cuda13")
    if found is None:
        raise ImportError(REMEDY)
    gpu_static.tool("ptxas")
    gpu_static.tool("nvdisasm")


def check(
    compiler: Compiler,
    make_program: Callable[[], tpu_aot.Program],
    *,
    max_temporary_bytes: int | None = None,
    programs_each: int = 1,
    needs_kernel: bool = True,
) -> tpu_aot.Outcome:
    """As `tpu_aot.check`, and judges the kernels' code.

    Args:
      programs_each: of the attention kernel, whose registers must fit a multiprocessor at once.
      needs_kernel: whether there must be a kernel, with HGMMA, that loads by TMA.
    """
    outcome = tpu_aot.check(
        compiler,  # pyright: ignore[reportArgumentType]
        make_program,
        max_temporary_bytes=max_temporary_bytes,
    )
    made = outcome.compilation
    if outcome.status != "compiled" or not isinstance(made, Compilation):
        return outcome
    reason = fault(made, programs_each=programs_each, needs_kernel=needs_kernel)
    return dataclasses.replace(outcome, status="failed", reason=reason) if reason else outcome


def fault(made: Compilation, *, programs_each: int, needs_kernel: bool) -> str:
    """What is wrong with the kernels' code, or ""."""
    if made.vmem_bytes > MAX_SHARED_BYTES:
        return f"a kernel takes {made.vmem_bytes} bytes of shared memory"
    for kernel in made.kernels:
        if kernel.spill_bytes:
            return f"{kernel.name} spills {kernel.spill_bytes} bytes a thread"
        is_attention = "merge" not in kernel.name
        programs = programs_each if is_attention else 1
        if programs * kernel.threads * kernel.registers > REGISTERS:
            return f"{kernel.name} takes {kernel.registers} registers, too many for {programs} each"
        if is_attention and not any(op.startswith("HGMMA") for op in kernel.matrix_ops):
            return f"{kernel.name} has no HGMMA"
        if is_attention and not kernel.tma_loads:
            return f"{kernel.name} has no UTMALDG: it does not load by TMA"
    return "it calls no Mosaic kernel" if needs_kernel and not made.num_kernel_calls else ""


def describe(made: Compilation) -> str:
    """The kernels in words, for a report."""
    parts = []
    for kernel in made.kernels:
        matrix = sum(kernel.matrix_ops.values())
        parts.append(
            f"{kernel.name}: {kernel.registers} registers, {kernel.num_instructions} instructions, "
            f"{matrix} HGMMA, {kernel.tma_loads} UTMALDG"
        )
    return "; ".join(parts)
