"""Compiles for TPUs that are not there, and reports what the compiler made.

libtpu holds the real compilers of XLA and Mosaic and needs no TPU to run them: jax hands out the
devices of a topology by name, and whatever is lowered for shapes on such a device is compiled as
it would be on the machine itself.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tpu_static
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import pallas_kernels
from pallas_kernels import tpu_runtime

# The smallest topology of each generation that libtpu knows by name.
TOPOLOGIES = {
    "v4": "v4:2x2x1",
    "v5e": "v5e:2x2",
    "v5p": "v5p:2x2x1",
    "v6e": "v6e:2x2",
    "tpu7x": "tpu7x:2x2x1",
}

# v4's machines show jax a chip of two cores as one device, which libtpu does if told.
TOPOLOGY_OPTIONS = {"v4": {"chip_config_name": "megacore"}}

# Of one device of each, as its compiler knows it.
HBM_GIB = {"v4": 32, "v5e": 16, "v5p": 95, "v6e": 32, "tpu7x": 95}

# A register that does not fit costs a store and a load; this many bytes are no kernel's plan.
MAX_SPILL_BYTES = 64 * 1024
# Temporaries of a kernel call: transposed copies of what goes in and out, never of the pool.
MAX_TEMPORARIES_PER_OPERAND = 4
MIN_TEMPORARY_BYTES = 20 * 2**20


def topology_name(name: str) -> str:
    """libtpu's name of a topology, from that or from a generation's name, such as "v5e".

    Raises:
      ValueError: it is neither.
    """
    full = TOPOLOGIES.get(name, name)
    if full not in TOPOLOGIES.values():
        known = ", ".join([*TOPOLOGIES, *TOPOLOGIES.values()])
        raise ValueError(f"topology is {name!r}; use one of {known}")
    return full


def require_libtpu() -> None:
    """Raises ImportError, with the remedy, unless libtpu is installed."""
    if importlib.util.find_spec("libtpu") is None:
        raise ImportError("compiling for a TPU needs libtpu: pip install libtpu")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compiler:
    """One device of a topology, and the folder for the compiler's reports.

    libtpu reads its flags once a process: open one Compiler a process.
    """

    generation: str
    mesh: Mesh
    dump_folder: str

    @classmethod
    def open(cls, name: str, *, profile: bool = False) -> Compiler:
        """Prepares this process to compile for the named topology.

        Args:
          name: as for `topology_name`.
          profile: also make libtpu execute what it compiles (see `tpu_static`).

        Raises:
          ValueError: no such topology.
          ImportError: libtpu is not installed.
        """
        name = topology_name(name)
        require_libtpu()
        folder = tempfile.mkdtemp(prefix="tpu_aot_")
        # libtpu would ask a cloud machine's metadata server who it is, and take a lock.
        os.environ |= dict(
            TPU_SKIP_MDS_QUERY="1",
            TPU_WORKER_HOSTNAMES="localhost",
            TPU_ACCELERATOR_TYPE="v5litepod-4",
            ALLOW_MULTIPLE_LIBTPU_LOAD="1",
            LIBTPU_INIT_ARGS=" ".join(tpu_static.dump_flags(folder, profile=profile)),
        )
        jax.config.update("jax_platforms", "cpu")
        # A program from the cache would come without its reports.
        jax.config.update("jax_enable_compilation_cache", False)
        generation = name.partition(":")[0]
        topology = topologies.get_topology_desc(
            platform="tpu", topology_name=name, **TOPOLOGY_OPTIONS.get(generation, {})
        )
        device = topology.devices[0]
        return cls(
            generation=generation,
            mesh=Mesh(np.array([device]), ("x",)),
            dump_folder=folder,
        )

    def on_device(self, tree: Any) -> Any:
        """Arrays, or shapes of arrays, as shapes on this compiler's device."""
        sharding = NamedSharding(self.mesh, PartitionSpec())

        def place(leaf: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype, sharding=sharding)

        return jax.tree.map(place, tree)

    def lower(self, program: Program) -> jax.stages.Lowered:
        """Traces the program as on a TPU; errors of its own checks come out here."""
        # Pallas reads off the mesh which TPU it is for.
        with jax.set_mesh(self.mesh), tpu_runtime.force_compile(self.generation):
            jitted = jax.jit(program.function, donate_argnums=program.donated)
            return jitted.lower(*self.on_device(program.args))

    def compile(self, lowered: jax.stages.Lowered) -> Compilation:
        """Compiles what was lowered, and reads the reports."""
        tpu_static.clear_dump(self.dump_folder)
        start = time.perf_counter()
        compiled = lowered.compile()
        seconds = time.perf_counter() - start
        memory = compiled.memory_analysis()
        assert memory is not None, "libtpu gives no account of memory"
        vmem = tpu_static.read_vmem(self.dump_folder)
        hlo = compiled.as_text() or ""
        names = tpu_static.parse_kernel_names(hlo)
        # A kernel that needs no VMEM is not in the report.
        kernels = [vmem[name] for name in names if name in vmem]
        return Compilation(
            seconds=seconds,
            temporary_bytes=int(memory.temp_size_in_bytes),
            aliased_bytes=int(memory.alias_size_in_bytes),
            spill_bytes=max((use.spill_bytes for use in kernels), default=0),
            vmem_bytes=max((use.total_bytes for use in kernels), default=0),
            kernel_names=names,
            int8_products=tpu_static.count_int8_products(hlo),
        )

    def profile(self, program: Program, *, scalars_of: Program | None = None) -> Profile:
        """The static profile of a program whose small arguments are concrete arrays.

        For a compiler opened with profile=True, in a process that may die (see `tpu_static`).

        Args:
          scalars_of: a program that calls the same kernels with the same scalars, for a program
            that is too large to be run on the host; if None, the program itself.
        """
        small = scalars_of or program
        with tpu_runtime.force_compile(self.generation):
            calls = tpu_static.record_kernels(small.function, small.args)
        with tpu_static.known_scalars(calls):
            compilation = self.compile(self.lower(program))
        return Profile(
            compilation=compilation,
            ops=tpu_static.read_profile(self.dump_folder, compilation.kernel_names),
            stored_scalars=sum(scalars.size for call in calls for scalars in call.scalars),
        )

    def profile_kernels_alone(self, program: Program) -> list[Profile]:
        """As `profile`, of each kernel in a program of its own, with nothing of XLA around it."""
        with tpu_runtime.force_compile(self.generation):
            calls = tpu_static.record_kernels(program.function, program.args)
        return [
            self.profile(
                Program(function=call.run, args=(*call.scalars, *call.arrays), donated=call.donated)
            )
            for call in calls
        ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """A function and the shapes it is compiled for.

    Attributes:
      args: trees of arrays or of jax.ShapeDtypeStruct; one on another device is moved.
      donated: indices of the donated arguments.
      aliased_bytes: how many bytes the program must update in place; 0 if it only reads.
      pool_bytes: the size of the KV pool among the arguments, so that a copy of it shows.
      int8_products: how many matrix products must reach the matrix unit in int8, both factors.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    donated: tuple[int, ...] = ()
    aliased_bytes: int = 0
    pool_bytes: int = 0
    int8_products: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compilation:
    """What the compiler made of a program; spills and VMEM are those of its worst kernel."""

    seconds: float
    temporary_bytes: int
    aliased_bytes: int
    spill_bytes: int
    vmem_bytes: int
    kernel_names: frozenset[str] = frozenset()
    int8_products: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Profile:
    """A compiled program and its operations, kernels and XLA's own.

    The totals leave out the stores that made `stored_scalars` known: one bundle each, before all
    else, measured on v5e and v6e.
    """

    compilation: Compilation
    ops: list[tpu_static.OpProfile]
    stored_scalars: int

    @property
    def kernels(self) -> list[tpu_static.OpProfile]:
        return [op for op in self.ops if op.kind == "kernel"]

    @property
    def estimated_cycles(self) -> int | None:
        """Of all operations, one after the other; None if the profile of any failed."""
        return self._total(self.ops, "estimated_cycles")

    @property
    def kernel_estimated_cycles(self) -> int | None:
        return self._total(self.kernels, "estimated_cycles")

    @property
    def kernel_issued_bundles(self) -> int | None:
        return self._total(self.kernels, "issued_bundles")

    def _total(self, ops: list[tpu_static.OpProfile], figure: str) -> int | None:
        figures = [(op.count, getattr(op, figure)) for op in ops]
        if any(value is None for _, value in figures):
            return None
        return sum(count * value for count, value in figures) - self.stored_scalars


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """status is "compiled", "refused" or "failed"; reason is empty when compiled."""

    status: str
    reason: str = ""
    compilation: Compilation | None = None


def check(
    compiler: Compiler,
    make_program: Callable[[], Program],
    *,
    max_temporary_bytes: int | None = None,
) -> Outcome:
    """Compiles a program and judges the result.

    Args:
      make_program: builds it; what our own code refuses here or in tracing counts as refused.
      max_temporary_bytes: more temporary memory than this is a failure; if None, a small multiple
        of the bytes that go in and out, without the pool.
    """
    try:
        program = make_program()
        lowered = compiler.lower(program)
    except Exception as error:
        status = "refused" if is_own_refusal(error) else "failed"
        return Outcome(status=status, reason=first_line(error))
    try:
        compilation = compiler.compile(lowered)
    except Exception as error:
        return Outcome(status="failed", reason=first_line(error))
    limit = max_temporary_bytes
    if limit is None:
        limit = _default_temporary_limit(program, lowered)
    reason = fault(compilation, program, max_temporary_bytes=limit)
    return Outcome(
        status="failed" if reason else "compiled", reason=reason, compilation=compilation
    )


def is_own_refusal(error: BaseException) -> bool:
    """Whether the kernels' own checks raised this: a refusal with a reason, and no accident."""
    if not isinstance(error, (ValueError, TypeError)) or error.__traceback__ is None:
        return False
    raised_in = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
    return raised_in.parent == Path(pallas_kernels.__file__).parent


def fault(compilation: Compilation, program: Program, *, max_temporary_bytes: int) -> str:
    """What is wrong with a compiled program, or ""."""
    temporary = compilation.temporary_bytes
    if program.pool_bytes and temporary >= program.pool_bytes:
        return f"{temporary:,} temporary bytes: the pool of {program.pool_bytes:,} is copied"
    if temporary > max_temporary_bytes:
        return f"{temporary:,} temporary bytes, more than {max_temporary_bytes:,}"
    if compilation.spill_bytes > MAX_SPILL_BYTES:
        return f"{compilation.spill_bytes:,} bytes of spilled registers"
    if compilation.aliased_bytes < program.aliased_bytes:
        return (
            f"{compilation.aliased_bytes:,} bytes are updated in place, not the pool's "
            f"{program.aliased_bytes:,}"
        )
    if compilation.int8_products < program.int8_products:
        return (
            f"{compilation.int8_products} products of int8 with int8, of {program.int8_products}: "
            "the others are widened first"
        )
    return ""


def tree_bytes(tree: Any) -> int:
    """Bytes of all arrays, or shapes of arrays, in a tree."""
    return sum(int(np.prod(a.shape)) * a.dtype.itemsize for a in jax.tree.leaves(tree))


def _default_temporary_limit(program: Program, lowered: jax.stages.Lowered) -> int:
    moved = tree_bytes(program.args) + tree_bytes(lowered.out_info)
    moved -= program.pool_bytes + program.aliased_bytes
    return MIN_TEMPORARY_BYTES + MAX_TEMPORARIES_PER_OPERAND * moved


def first_line(error: BaseException) -> str:
    """An error in one line, for a report."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:2])[:300]}"
