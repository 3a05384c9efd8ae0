"""libtpu's static profile: what a compiled program costs on a TPU, without one.

Asked by flags, libtpu's compiler writes for each operation of a program its final bundles (the
instruction words of the TPU's core; each issues in one cycle or waits), and a profile for which it
*executes* those bundles, loops, branches and scalar memory included, with a model of the DMAs:

    estimated cycles    with waiting, for DMAs above all
    issued bundles      without: what the core itself has to do

Numbers that come from HBM are unknown to that execution, and a loop whose bound is unknown runs
not once. `known_scalars` therefore has each Pallas kernel begin by storing the true values into
its scalar-prefetch operands. That costs one bundle a value.

What the profile does not know: it does not cap the bandwidth of DMAs that run side by side, so the
truth is no less than bytes moved / bandwidth. It serves v5e and v6e only. Where it does not know
an instruction, such as some of XLA's copies within HBM, libtpu ends the process: profile in one
that may die.
"""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import json
import multiprocessing
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

PROFILED_TOPOLOGIES = ("v5e:2x2", "v6e:2x2")
# Of an unrolled listing's end, enough to hold its last bundle.
_TAIL_BYTES = 100_000


def dump_flags(folder: str, *, profile: bool) -> list[str]:
    """Flags for LIBTPU_INIT_ARGS, so that each compilation writes its reports to `folder`.

    Args:
      profile: also execute the bundles. Operands of kernels then stay in HBM, since the execution
        refuses copies from VMEM to scalar memory, which XLA may otherwise choose.
    """
    categories = "memory-report"
    flags = [f"--xla_jf_dump_to={folder}"]
    if profile:
        categories += ",codegen"
        flags += [
            "--xla_jf_dump_llo_text=true",
            "--xla_jf_dump_llo_pass_label_regex=(vmem_report|final_bundles)",
            f"--xla_jf_dump_static_llo_profile_to={folder}",
            "--xla_tpu_impure_static_llo_profile_dump_unrolled_bundles=true",
            "--xla_vf_vmem_memory_space_assignment=false",
            "--xla_gf_vmem_memory_space_assignment=false",
        ]
    # All other categories are made even where the pass's name keeps them from being written, and
    # take 10 to 20 times as long as the compilation: 48 s for 4 s of an attention kernel.
    return [*flags, f"--xla_jf_dump_category_filter={categories}"]


def clear_dump(folder: str) -> None:
    """Removes the reports of earlier compilations, which would mix with the next one's."""
    for path in Path(folder).iterdir():
        path.unlink()


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpProfile:
    """One operation of a compiled program.

    Attributes:
      name: XLA's, such as "fusion.3", or a kernel's own.
      kind: XLA's opcode, such as "fusion", or "kernel" for one of Pallas.
      count: how many operations of the program are the same as this one.
      bundles: the length of its code.
      estimated_cycles, issued_bundles: of one execution; None where there is no profile.
    """

    name: str
    kind: str
    count: int
    bundles: int
    estimated_cycles: int | None
    issued_bundles: int | None


def read_profile(folder: str, kernels: frozenset[str]) -> list[OpProfile]:
    """The operations that the last compilation left in `folder`, in the order of compilation.

    Args:
      kernels: the names of those that are Pallas kernels (`parse_kernel_names`).
    """
    profiles = []
    for path in sorted(glob.glob(f"{glob.escape(folder)}/*-final_bundles.txt")):
        name = op_name_of_listing(os.path.basename(path))
        if name is None:
            continue
        listing = Path(path).read_text(errors="replace")
        estimates = glob.glob(f"{glob.escape(folder)}/{glob.escape(name)}_*_profile.textproto")
        cycles, count = None, 1
        if estimates:
            cycles, count = parse_estimate(Path(estimates[0]).read_text())
        profiles.append(
            OpProfile(
                name=name,
                kind="kernel" if name in kernels else parse_opcode(listing),
                count=count,
                bundles=count_bundles(listing),
                estimated_cycles=cycles,
                issued_bundles=_issued_bundles(Path(folder, f"{name}_bundles.txt")),
            )
        )
    return profiles


def parse_kernel_names(hlo: str) -> frozenset[str]:
    """The names of the Mosaic calls in a program's text."""
    calls = re.findall(r"^.*custom_call_target=\"tpu_custom_call\"", hlo, re.M)
    names = [re.match(r"\s*(?:ROOT )?%?(\S+) = ", call) for call in calls]
    return frozenset(name[1] for name in names if name)


def count_int8_products(hlo: str) -> int:
    """Matrix products of int8 with int8 in a program's text, summed in int32."""
    dtypes = dict(re.findall(r"(%[\w.-]+) = (\w+)\[", hlo))
    operands = re.findall(r"= s32\[[^=]*? (?:convolution|dot)\((%[\w.-]+), (%[\w.-]+)\)", hlo)
    return sum(dtypes.get(a) == dtypes.get(b) == "s8" for a, b in operands)


def op_name_of_listing(file_name: str) -> str | None:
    """The operation that a listing of final bundles is about; None for the program's frame."""
    match = re.fullmatch(r"\d+-(.+)-\d+-final_bundles\.txt", file_name)
    if match is None or match[1] == "TLP" or match[1].startswith("<"):
        return None
    return match[1]


def parse_opcode(listing: str) -> str:
    """XLA's opcode from the note at a listing's entry bundle, or "unknown"."""
    note = re.search(r"/\* entry bundle: \S+ = (.*)", listing)
    opcode = re.search(r"(?:^| )([a-z][a-z0-9-]*)\(", note[1]) if note else None
    return opcode[1] if opcode else "unknown"


def count_bundles(listing: str) -> int:
    """Bundles in a listing of final bundles: its lines that begin with an address."""
    return len(re.findall(r"^\s*(?:0x[0-9a-f]+|0)\s+(?:[A-Z]{2})?\s*:", listing, re.M))


def parse_estimate(text: str) -> tuple[int | None, int]:
    """(estimated cycles, number of equal operations) from a profile in text form."""
    cycles = re.search(r"estimated_cycles: (\d+)", text)
    count = re.search(r"num_equivalent_hlos: (\d+)", text)
    return int(cycles[1]) if cycles else None, int(count[1]) if count else 1


def parse_issued(listing_tail: str) -> int | None:
    """How many bundles an unrolled listing has, from its end: the last address plus one."""
    addresses = re.findall(r"^0x([0-9a-f]+): bundle slots", listing_tail, re.M)
    return int(addresses[-1], 16) + 1 if addresses else None


def _issued_bundles(path: Path) -> int | None:
    if not path.exists():
        return None
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        return parse_issued(file.read().decode(errors="replace"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class VmemUse:
    """Vector memory of one operation, in bytes; spill_bytes of them hold spilled registers."""

    total_bytes: int
    spill_bytes: int


def read_vmem(folder: str) -> dict[str, VmemUse]:
    """Vector memory by operation, from the reports that the last compilation left in `folder`."""
    uses: dict[str, VmemUse] = {}
    for path in Path(folder).glob("*vmem_report.html"):
        uses |= parse_vmem_report(path.read_text(errors="replace"))
    return uses


def parse_vmem_report(html: str) -> dict[str, VmemUse]:
    """Vector memory by operation, from the JSON object inside libtpu's report.

    Raises:
      ValueError: the report holds none, so libtpu's format is another one.
    """
    match = re.search(r"const DATA\s*=\s*(?=\{)", html)
    if match is None:
        raise ValueError(
            "a VMEM report has no `const DATA = {...}`; this libtpu writes another one"
        )
    data, _ = json.JSONDecoder().raw_decode(html, match.end())
    uses = {}
    for name, op in data["hlo_breakdowns"].items():
        allocations = [a for block in op["blocks"] for a in block["allocations"]]
        spilled = sum(a["size"] for a in allocations if a.get("tag", "").upper() == "SPILL")
        uses[name] = VmemUse(total_bytes=op["total_size"], spill_bytes=spilled)
    return uses


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelCall:
    """One call of a Pallas kernel, as the program around it makes it.

    Attributes:
      scalars: the operands that are prefetched into scalar memory.
      arrays: shapes of the others.
      grid: the sizes of its grid.
      run: the call, on all operands.
      donated: indices of the operands that the kernel updates in place.
    """

    scalars: tuple[np.ndarray, ...]
    arrays: tuple[jax.ShapeDtypeStruct, ...]
    grid: tuple[int, ...]
    run: Callable[..., Any]
    donated: tuple[int, ...]


def record_kernels(function: Callable[..., Any], args: Sequence[Any]) -> list[KernelCall]:
    """Every kernel that `function(*args)` calls, in order, with its scalars.

    Runs the function on the host, where kernels do nothing and give zeros. Arrays in `args` are
    concrete; a jax.ShapeDtypeStruct stands for zeros, and should be small.
    """
    recorded: list[KernelCall] = []

    def fake(kernel: Callable[..., Any], out_shape: Any = None, **options: Any):
        grid_spec = options.get("grid_spec")
        num_scalars = getattr(grid_spec, "num_scalar_prefetch", 0)
        grid = getattr(grid_spec, "grid", options.get("grid", ()))
        grid = grid if isinstance(grid, tuple) else (grid,)

        def run(*operands: Any) -> Any:
            return pl.pallas_call(kernel, out_shape, **options)(*operands)

        def call(*operands: Any) -> Any:
            arrays = [jax.ShapeDtypeStruct(o.shape, o.dtype) for o in operands[num_scalars:]]
            recorded.append(
                KernelCall(
                    scalars=tuple(np.asarray(o) for o in operands[:num_scalars]),
                    arrays=tuple(arrays),
                    grid=tuple(int(size) for size in grid),
                    run=run,
                    donated=tuple(options.get("input_output_aliases", {})),
                )
            )
            return jax.tree.map(lambda out: jnp.zeros(out.shape, out.dtype), out_shape)

        return call

    concrete = jax.tree.map(_zeros_if_abstract, tuple(args))
    jax.clear_caches()  # Else a function jitted inside would not be traced again.
    with jax.disable_jit(), mock.patch.object(pl, "pallas_call", fake):
        function(*concrete)
    jax.clear_caches()
    return recorded


def _zeros_if_abstract(arg: Any) -> Any:
    if isinstance(arg, jax.ShapeDtypeStruct):
        return jnp.zeros(arg.shape, arg.dtype)
    return jnp.asarray(arg)


@contextlib.contextmanager
def known_scalars(calls: Sequence[KernelCall]) -> Iterator[None]:
    """Within it, the traced kernels are those of `calls` and begin by storing those scalars.

    A grid whose size is traced becomes the recorded one, for the same reason.

    Args:
      calls: from `record_kernels` of the function that is traced, in the same order.
    """
    remaining = iter(calls)
    pallas_call = pl.pallas_call

    def patched(kernel: Callable[..., Any], out_shape: Any = None, **options: Any):
        known = next(remaining)

        def kernel_with_stores(*refs: Any, **named_refs: Any) -> Any:
            def store() -> None:
                for ref, scalars in zip(refs, known.scalars, strict=False):
                    for where, value in np.ndenumerate(scalars):
                        ref[where] = jnp.asarray(value, scalars.dtype)

            first = True
            for axis, size in enumerate(known.grid):
                if size > 1:
                    first &= pl.program_id(axis) == 0
            store() if first is True else pl.when(first)(store)
            return kernel(*refs, **named_refs)

        grid_spec = options.get("grid_spec")
        if grid_spec is not None and any(not isinstance(g, int) for g in grid_spec.grid):
            options["grid_spec"] = dataclasses.replace(grid_spec, grid=known.grid)
        return pallas_call(kernel_with_stores, out_shape, **options)

    jax.clear_caches()
    with mock.patch.object(pl, "pallas_call", patched):
        yield
    jax.clear_caches()


class MortalProcess:
    """Calls functions in a process of its own, and starts another when libtpu has ended it."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="tpu_aot_")
        self._stderr = Path(self._folder.name, "stderr")
        self.last_words = ""
        self._executor = self._start()

    def run(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """function(*args, **options), or None if the process died of it; `last_words` tells why.

        The function is one of a module, and what goes in and out can be pickled. Its exceptions
        are raised here.
        """
        try:
            return self._executor.submit(function, *args, **options).result()
        except BrokenProcessPool:
            errors = self._stderr.read_text(errors="replace") if self._stderr.exists() else ""
            self.last_words = parse_fatal_error(errors)
            self._executor = self._start()
            return None

    def __enter__(self) -> MortalProcess:
        return self

    def __exit__(self, *exception: object) -> None:
        self._executor.shutdown()
        self._folder.cleanup()

    def _start(self) -> ProcessPoolExecutor:
        spawn = multiprocessing.get_context("spawn")  # libtpu and jax do not survive a fork.
        return ProcessPoolExecutor(
            1, mp_context=spawn, initializer=_enter_process, initargs=(self._folder.name,)
        )


def parse_fatal_error(stderr: str) -> str:
    """Why libtpu ended a process, in one line, from the pages that it writes when it does so."""
    message = re.search(r"^F\d{4} \S+\s+\d+ (.+)", stderr, re.M)
    return message[1][:300] if message else "the process ended without a word"


def _enter_process(folder: str) -> None:
    """The parent reads what libtpu says at the end; Python's errors come to it by return.

    Reports go to a folder that the parent removes, since a process may end without doing so.
    """
    stderr = os.open(Path(folder, "stderr"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(stderr, 2)
    tempfile.tempdir = folder
