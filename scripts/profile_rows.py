"""From a profiler's trace to a table: where the time of a stretch of steps went, by operation.

XLA on a CPU marks each operation that it runs with its name in the compiled program, and the
program's text (`Compiled.as_text()`) says of each name what it is and which line of Python made it.
Both are read here with the standard library alone.

Time is shared out so that the rows add up to the whole: at any moment it belongs to the operations
that are running, in equal parts where there are several; a loop or a branch counts only while none
of the operations within it runs; and where no operation runs, to what the host was doing.
"""

import dataclasses
import gzip
import json
import pathlib
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

# What the functions of a file compute, and some functions by themselves; any other row is named
# after its function.
FILE_PARTS = {
    "attention": "attention",
    "kv_write": "KV write",
    "sampling": "sampling",
    "bisection": "sampling",
    "decode_loop": "decode loop",
    "decode_rows": "decode loop",
}
FUNCTION_PARTS = {
    "rms_norm": "RMSNorm",
    "apply_rope": "RoPE",
    "rope_tables": "RoPE",
    "rope_write": "RoPE and KV write",
    "swiglu": "SwiGLU",
    "quantize_rows": "quantise activations",
    "vocab_parallel_embedding": "embedding",
    "take_rows": "embedding",
    "_take_rows": "embedding",
}
CONTROL_FLOW = ("while", "conditional", "call")
WINDOW = "profiled steps"
HOST = "host: "
REST = HOST + "other"

_TABLE = r"^{name}\n((?:\d+ .*\n)+)"
_INSTRUCTION = re.compile(
    r"^\s*(?:ROOT )?%(?P<name>\S+) = (?P<shape>.+?) (?P<opcode>[\w-]+)\((?P<rest>.*)$"
)
_COMPUTATION = re.compile(r"^(?:ENTRY )?%(\S+) \(.*\{$")
_ID = re.compile(r"(\w+)=(\d+)")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a program's text."""

    name: str
    shape: str
    opcode: str
    rest: str

    def find(self, pattern: str) -> str | None:
        match = re.search(pattern, self.rest)
        return None if match is None else match[1]

    def operands(self) -> list[str]:
        """Names of its operands."""
        return re.findall(r"%([^\s,)]+)", self.rest.split("), ", 1)[0])


class Program:
    """A compiled program: what each of its operations is.

    Args:
      text: `Compiled.as_text()`.
    """

    def __init__(self, text: str):
        self._tables = {
            name: self._table(text, name)
            for name in ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
        }
        self.computations: dict[str, dict[str, Instruction]] = {}
        current: dict[str, Instruction] = {}
        for line in text.splitlines():
            if header := _COMPUTATION.match(line):
                current = self.computations.setdefault(header[1], {})
            elif found := _INSTRUCTION.match(line):
                current[found["name"]] = Instruction(**found.groupdict())

    def labels(self) -> dict[str, str]:
        """The row of every operation, by name; an empty one for loops and branches."""
        return {
            instruction.name: self._label(instruction, computation)
            for computation in self.computations.values()
            for instruction in computation.values()
        }

    def _label(self, instruction: Instruction, computation: Mapping[str, Instruction]) -> str:
        if instruction.opcode in CONTROL_FLOW:
            return ""
        product = self._product(instruction, computation)
        if product is not None:
            return product
        file, function = self._source(instruction)
        if function in FUNCTION_PARTS:
            return FUNCTION_PARTS[function]
        for prefix, part in FILE_PARTS.items():
            if file == prefix or file.startswith(prefix + "_"):
                return part
        return f"{file}.{function}" if file else f"other: {instruction.opcode}"

    def _product(
        self, instruction: Instruction, computation: Mapping[str, Instruction]
    ) -> str | None:
        """ "product f32[32,576] x f32[960,576]" of a matrix product or what one is fused into."""
        if instruction.opcode == "dot":
            return "product " + self._shapes(instruction, computation)
        if instruction.opcode == "custom-call":
            target = instruction.find(r'custom_call_target="([^"]+)"') or ""
            if "matmul" in target or "dot" in target:
                return "product " + self._shapes(instruction, computation)
            return None
        called = instruction.find(r"calls=%([^\s,]+)")
        inside = self.computations.get(called or "", {})
        for inner in inside.values():
            product = self._product(inner, inside)
            if product is not None:
                return product
        return None

    def _shapes(self, instruction: Instruction, computation: Mapping[str, Instruction]) -> str:
        names = [name for name in instruction.operands() if name in computation][:2]
        return " x ".join(computation[name].shape.split("{")[0] for name in names)

    def _source(self, instruction: Instruction) -> tuple[str, str]:
        """File (without .py) and function of the Python line that made an operation, or ""s."""
        frame = instruction.find(r"stack_frame_id=(\d+)")
        frames = self._tables["StackFrames"]
        if frame is None or frame not in frames:
            called = instruction.find(r"calls=%([^\s,]+)")
            inside = [i for i in self.computations.get(called or "", {}).values()]
            return self._source(inside[-1]) if inside else ("", "")  # The root is the last.
        location = self._tables["FileLocations"][_fields(frames[frame])["file_location_id"]]
        ids = _fields(location)
        path = self._tables["FileNames"][ids["file_name_id"]].strip('"')
        function = self._tables["FunctionNames"][ids["function_name_id"]].strip('"')
        return pathlib.PurePath(path).stem, function.rsplit(".", 1)[-1]

    @staticmethod
    def _table(text: str, name: str) -> dict[str, str]:
        match = re.search(_TABLE.format(name=name), text, re.MULTILINE)
        return {} if match is None else dict(row.split(" ", 1) for row in match[1].splitlines())


def _fields(row: str) -> dict[str, str]:
    return dict(_ID.findall(row))


@dataclasses.dataclass(frozen=True)
class Event:
    """A stretch of a trace, in microseconds; module is None for what the host does."""

    start: float
    end: float
    name: str
    module: str | None


def read_trace(folder: pathlib.Path) -> list[Event]:
    """The events of the one trace below a folder that `jax.profiler` wrote.

    Raises:
      FileNotFoundError: there is none.
    """
    paths = sorted(folder.rglob("*.trace.json.gz"))
    if not paths:
        raise FileNotFoundError(f"no *.trace.json.gz below {folder}: nothing was traced")
    trace: dict[str, Any] = json.loads(gzip.decompress(paths[-1].read_bytes()))
    return [
        Event(e["ts"], e["ts"] + e["dur"], e["name"], e.get("args", {}).get("hlo_module"))
        for e in trace["traceEvents"]
        if e.get("ph") == "X"
    ]


def share_out(
    events: Iterable[Event], labels: Mapping[str, Mapping[str, str]]
) -> tuple[dict[str, float], Counter[str]]:
    """Microseconds and calls of each row within the event named WINDOW.

    Args:
      events: of a trace.
      labels: for each module of a trace, the rows of its operations (`Program.labels`).

    Returns:
      Times, which add up to the window's length, and how often an operation of each row ran.
    Raises:
      ValueError: the trace has no such window.
    """
    events = list(events)
    window = next((e for e in events if e.name == WINDOW), None)
    if window is None:
        raise ValueError(f"the trace has no event {WINDOW!r}; the run was not marked")
    counts: Counter[str] = Counter()
    # (time, starts, rank, row): rank 0 for operations, 1 for loops around them, 2 for the host.
    edges: list[tuple[float, bool, int, str]] = []
    for event in events:
        start, end = max(event.start, window.start), min(event.end, window.end)
        if start >= end:
            continue
        if event.module is not None:
            row = labels.get(event.module, {}).get(event.name, f"other: {event.name}")
            rank = 0 if row else 1
            row = row or "loops and branches"
            counts[row] += 1
        elif event.name.startswith(HOST):
            rank, row = 2, event.name
        else:
            continue
        edges += [(start, True, rank, row), (end, False, rank, row)]
    return _sweep(edges, window), counts


def _sweep(edges: list[tuple[float, bool, int, str]], window: Event) -> dict[str, float]:
    times: dict[str, float] = {}
    active: tuple[Counter[str], ...] = (Counter(), Counter(), Counter())
    now = window.start
    for at, starts, rank, row in sorted(edges):
        _credit(times, active, at - now)
        now = at
        rows = active[rank]
        rows[row] += 1 if starts else -1
        if not rows[row]:
            del rows[row]
    _credit(times, active, window.end - now)
    return times


def _credit(times: dict[str, float], active: tuple[Counter[str], ...], length: float) -> None:
    running = next((rows for rows in active if rows), Counter({REST: 1}))
    total = running.total()
    for row, count in running.items():
        times[row] = times.get(row, 0.0) + length * count / total


def table(times: Mapping[str, float], counts: Mapping[str, int], num_steps: float) -> str:
    """Rows of milliseconds a step, share and calls a step, the largest first, and their sum."""
    total = sum(times.values())
    width = max(map(len, (*times, "sum")))
    lines = [f"{'':{width}} {'ms a step':>10} {'share':>7} {'calls':>8}"]
    for row, microseconds in sorted(times.items(), key=lambda item: -item[1]):
        lines.append(
            f"{row:{width}} {microseconds / num_steps / 1e3:10.3f} {microseconds / total:7.1%} "
            f"{counts.get(row, 0) / num_steps:8.1f}"
        )
    lines.append(f"{'sum':{width}} {total / num_steps / 1e3:10.3f} {1:7.1%}")
    return "\n".join(lines)
