"""The GPU kernels on a GPU: right at real shapes, then timed, then under the engine.

    python scripts/bench_gpu.py --output gpu.json

Takes less than 8 minutes: what the time no longer allows for is left out, and named. Needs a
Hopper GPU and jax 0.11.2 or newer. With --smoke it runs a few tiny shapes wherever it is, the
kernels interpreted where there is no GPU: a test of the script.

1. Conformance: the kernels against the XLA path in float32 over the same numbers.
2. Decode, prefill and mixed batches, of Llama-3-8B's heads: as bytes of keys and values a second
   beside the bandwidth of a large copy, and as floating-point operations a second; against jax's
   own paged attention and the XLA path.
3. The engine, end to end, with a random Llama-3-8B in bfloat16.

Everything is measured in a second process, which is ended and replaced when a measurement hangs
or takes the device down with it; tracebacks go to standard error. The last line is one JSON
object. The file of --output has it from the first result on, and is written anew after each.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import bench_gpu_measures as measures
from absl import app, flags
from bench_gpu_cases import CONFORMANCE, SMOKE_CASES, TIMED, Case
from bench_gpu_process import Worker

OUTPUT = flags.DEFINE_string("output", "", "File for the JSON object; none if empty.")
SECONDS = flags.DEFINE_float(
    "seconds", 450.0, "Of all: checks begin in the first third, timings before the last quarter."
)
SMOKE = flags.DEFINE_bool("smoke", False, "Tiny shapes, to test the script anywhere.")
ENGINE = flags.DEFINE_bool("engine", True, "Whether to run the engine too.")
MOST_SECONDS = flags.DEFINE_float(
    "most_seconds", 75.0, "Of one measurement, the start of its process and compilation among them."
)
REPEATS = flags.DEFINE_integer("repeats", 8, "Timings of each program; the least counts.")

COPIED_NUMBERS = 2**30


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    # As an error, so that the measuring process is ended too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    with Worker(measures.device_answers) as worker:
        bench = Bench(
            worker,
            seconds=SECONDS.value,
            most_seconds=MOST_SECONDS.value,
            output=OUTPUT.value,
        )
        bench.run("device", bench.report, measures.device)
        reason = bench.report.get("error") or bench.report.get("no_kernels")
        if reason is not None and not SMOKE.value:
            raise app.UsageError(f"{reason}; --smoke tests the script without a GPU")
        try:
            measure_all(bench)
        finally:
            print(bench.save(), flush=True)
    checked = bench.report["conformance"]
    wrong = [result["name"] for result in checked if not result.get("is_right", False)]
    if wrong:
        raise SystemExit(f"wrong or not checked: {', '.join(wrong)}")


def measure_all(bench: Bench) -> None:
    """The three parts, into the report."""
    report = bench.report
    report["conformance"] = []
    for case in SMOKE_CASES if SMOKE.value else CONFORMANCE:
        result = dict(name=case.name)
        report["conformance"].append(result)
        bench.run(case.name, result, measures.check_conformance, case, share=0.35)
    report["copy"] = {}
    num_copied = 2**20 if SMOKE.value else COPIED_NUMBERS
    bench.run("copy", report["copy"], measures.copy_bandwidth, num_copied, REPEATS.value)
    report["timed"] = []
    time_all(bench, SMOKE_CASES[:1] if SMOKE.value else TIMED)
    if ENGINE.value:
        bench.worker.stop()  # The next one has all of the device's memory.
        report["engine"] = {}
        bench.run("engine", report["engine"], measures.run_engine, SMOKE.value, is_long=True)


def time_all(bench: Bench, cases: Sequence[Case]) -> None:
    """Ours of all cases first: what it is compared with comes if there is time."""
    results: list[dict[str, Any]] = bench.report["timed"]
    results += [dict(name=case.name, kv_bytes=case.kv_bytes, flops=case.flops) for case in cases]
    for implementation in measures.IMPLEMENTATIONS:
        if implementation == "jax" and "no_kernels" in bench.report:
            continue  # It cannot be interpreted.
        for case, result in zip(cases, results, strict=True):
            if not measures.takes(implementation, case):
                continue
            # By the implementation's name, lest one's error stand beside another's seconds.
            found = result[implementation] = {}
            bench.run(
                f"{case.name}: {implementation}",
                found,
                measures.time_attention,
                implementation,
                case,
                REPEATS.value,
                share=0.75,
            )
            if "seconds" in found:
                more = rates(case, found["seconds"], bench.report["copy"])
                found.update(more)
                print(f"{'':10s}{_words(more)}", flush=True)


def rates(case: Case, seconds: float, copy: dict[str, Any]) -> dict[str, float]:
    """What a layer's seconds come to, beside the copy's if that is known."""
    bandwidth = case.kv_bytes / seconds
    found = dict(kv_bytes_per_second=bandwidth, flops_per_second=case.flops / seconds)
    if "bytes_per_second" in copy:
        found["share_of_copy"] = bandwidth / copy["bytes_per_second"]
    return found


class Bench:
    """Runs measurements until the time is up, and keeps what is known after each."""

    def __init__(self, worker: Worker, *, seconds: float, most_seconds: float, output: str):
        self.worker = worker
        self.report: dict[str, Any] = dict(date=time.strftime("%Y-%m-%d"))
        self._start, self._output = time.monotonic(), output
        self._seconds, self._most_seconds = seconds, most_seconds

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._start

    def run(
        self,
        name: str,
        result: dict[str, Any],
        measure: Callable[..., Any],
        *args: Any,
        share: float = 1.0,
        is_long: bool = False,
    ) -> None:
        """Puts into `result`, which stands in the report, what measure(*args) finds, bit by bit,
        or why there is nothing: an error, or no time. It begins within a share of the time, and
        is ended at the time's end, or unless it is long when it takes more than `most_seconds`."""
        found: dict[str, Any] = {}
        if self.elapsed > share * self._seconds:
            parts = iter([dict(left_out="no time was left")])
        else:
            seconds = self._seconds - self.elapsed
            if not is_long:
                seconds = min(seconds, self._most_seconds)
            parts = self.worker.results(measure, args, seconds)
        for part in parts:
            found |= part
            result.update(part)
            self.save()
        print(f"{self.elapsed:6.1f} s  {name:40s} {_words(found)}", flush=True)

    def save(self) -> str:
        """The report as one line, which is also put into the file, in one piece."""
        self.report["seconds"] = round(self.elapsed, 1)
        line = json.dumps(self.report)
        if self._output:
            part = f"{self._output}.part"
            with open(part, "w") as file:
                file.write(line + "\n")
            os.replace(part, self._output)
        return line


def _words(result: dict[str, Any]) -> str:
    def word(value: Any) -> str:
        return f"{value:.4g}" if isinstance(value, float) else str(value)

    return "  ".join(f"{key} {word(value)}" for key, value in result.items())


if __name__ == "__main__":
    app.run(main)
