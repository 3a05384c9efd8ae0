"""What NVIDIA's compiler makes of a Pallas kernel: registers, spills, instructions.

Mosaic GPU leaves each kernel's PTX in a folder if told to. The tools of the CUDA wheels turn it
into the machine code of a Hopper GPU, and need no GPU for that.
"""

from __future__ import annotations

import collections
import dataclasses
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

ARCHITECTURE = "sm_90a"
# Instructions that multiply matrices of a warpgroup, and those of older GPUs' warps.
MATRIX_OPS = ("HGMMA", "QGMMA", "IGMMA", "HMMA", "QMMA", "IMMA")
_INSTRUCTION = re.compile(
    r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9]+)((?:\.\w+)*)", re.M
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelCosts:
    """One kernel's machine code.

    Attributes:
      registers: of a thread.
      spill_bytes: stored to local memory, a thread.
      threads: of a program.
      matrix_ops: how often each instruction that multiplies matrices stands in the code, by its
        name with shape and types.
      opcodes: how often each instruction stands in the code.
    """

    name: str
    registers: int
    spill_bytes: int
    threads: int
    matrix_ops: dict[str, int]
    opcodes: dict[str, int]

    @property
    def num_instructions(self) -> int:
        return sum(self.opcodes.values())

    @property
    def tma_loads(self) -> int:
        return self.opcodes.get("UTMALDG", 0)


def read_kernels(folder: str | Path) -> list[KernelCosts]:
    """The costs of all Mosaic kernels whose PTX lies in the folder, in the order of their names."""
    paths = sorted(Path(folder).glob("*.ptx"))
    return [costs(path) for path in paths if "_mosaic_gpu_kernel" in path.read_text()]


def costs(ptx_path: Path) -> KernelCosts:
    """Compiles one kernel's PTX and counts.

    Raises:
      RuntimeError: the compiler refuses the PTX.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        command = [tool("ptxas"), "-v", f"-arch={ARCHITECTURE}", str(ptx_path), "-o", cubin.name]
        made = subprocess.run(command, capture_output=True, text=True, check=False)
        if made.returncode:
            raise RuntimeError(f"ptxas refuses {ptx_path.name}: {made.stderr[-500:]}")
        listing = subprocess.run(
            [tool("nvdisasm"), "-c", cubin.name], capture_output=True, text=True, check=True
        ).stdout
    threads = _first_number(r"\.(?:req|max)ntid (\d+)", ptx_path.read_text())
    return parse(ptx_path.stem, log=made.stderr + made.stdout, listing=listing, threads=threads)


def read_shared_bytes(folder: str | Path) -> list[int]:
    """Dynamic shared memory of each kernel that was lowered, of a program (block) of it."""
    paths = sorted(Path(folder).glob("*.resources.txt"))
    return [_first_number(r"smem_scratch_bytes=(\d+)", path.read_text()) for path in paths]


def parse(name: str, *, log: str, listing: str, threads: int) -> KernelCosts:
    """The costs from ptxas's log and nvdisasm's listing."""
    found = _INSTRUCTION.findall(listing)
    full_names = collections.Counter(op + rest for op, rest in found if op in MATRIX_OPS)
    return KernelCosts(
        name=name,
        registers=_first_number(r"Used (\d+) registers", log),
        spill_bytes=_first_number(r"(\d+) bytes spill stores", log),
        threads=threads,
        matrix_ops=dict(full_names),
        opcodes=dict(collections.Counter(op for op, _ in found)),
    )


def _first_number(pattern: str, text: str) -> int:
    match = re.search(pattern, text)
    return int(match.group(1)) if match else 0


def tool(name: str) -> str:
    """The path of one of CUDA's tools, from its wheel or the PATH.

    Raises:
      ImportError: it is not installed.
    """
    try:
        import nvidia.cu13 as wheels  # pyright: ignore[reportMissingImports]

        folders = [Path(path) / "bin" for path in wheels.__path__]
    except ImportError:
        folders = []
    for folder in folders:
        if (folder / name).exists():
            return str(folder / name)
    found = shutil.which(name)
    if found is None:
        raise ImportError(f"{name} is not installed; see gpu_aot.REMEDY")
    return found
