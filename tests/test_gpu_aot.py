"""The scripts that compile for a GPU without one, and the one that measures on one."""

import json
import operator
import os
import subprocess
import sys
import time
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from script_modules import import_script

from pallas_kernels import gpu_runtime

ROOT = Path(__file__).parent.parent
gpu_static = import_script("gpu_static")
gpu_aot = import_script("gpu_aot")
cases = import_script("bench_gpu_cases")
bench_gpu = import_script("bench_gpu")
bench_gpu_process = import_script("bench_gpu_process")
measures = import_script("bench_gpu_measures")


def has_plugin() -> bool:
    try:
        gpu_aot.require_plugin()
    except ImportError:
        return False
    return True


needs_plugin = pytest.mark.skipif(not has_plugin(), reason=gpu_aot.REMEDY)
needs_kernels = pytest.mark.skipif(
    gpu_runtime.missing_reason() is not None, reason=str(gpu_runtime.missing_reason())
)

LOG = """\
ptxas info    : Function properties for attention_mosaic_gpu_kernel
    16 bytes stack frame, 12 bytes spill stores, 20 bytes spill loads
ptxas info    : Used 75 registers, used 3 barriers, 17 bytes smem
"""
LISTING = """\
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/              @!P0 BRA `(.L_x_1) ;
        /*0020*/                   UTMALDG.4D [UR8], [UR4] ;
        /*0030*/                   HGMMA.64x8x16.F32.BF16 R24, gdesc[UR4], !UPT ;
        /*0040*/             @P1   HGMMA.64x8x16.F32.BF16 R24, gdesc[UR4], R24 ;
.L_x_1:
        /*0050*/                   EXIT ;
"""


def costs(name: str = "attention", log: str = LOG):
    return gpu_static.parse(name, log=log, listing=LISTING, threads=256)


def test_machine_code_is_counted() -> None:
    kernel = costs()
    assert (kernel.registers, kernel.spill_bytes, kernel.threads) == (75, 12, 256)
    assert kernel.matrix_ops == {"HGMMA.64x8x16.F32.BF16": 2}
    assert (kernel.tma_loads, kernel.num_instructions) == (1, 6)


def test_faults_of_the_code_are_named() -> None:
    def fault(kernel, **figures):
        made = gpu_aot.Compilation(
            seconds=0.0,
            temporary_bytes=0,
            aliased_bytes=0,
            spill_bytes=0,
            vmem_bytes=figures.get("vmem_bytes", 1000),
            kernels=(kernel,),
            num_kernel_calls=figures.get("num_kernel_calls", 1),
        )
        programs = figures.get("programs_each", 2)
        return gpu_aot.fault(made, programs_each=programs, needs_kernel=True)

    clean = LOG.replace("12 bytes spill stores", "0 bytes spill stores")
    assert fault(costs(log=clean)) == ""
    assert "spills 12 bytes" in fault(costs())
    assert "no HGMMA" in fault(gpu_static.parse("a", log=clean, listing="", threads=1))
    assert "shared memory" in fault(costs(log=clean), vmem_bytes=300_000)
    assert "too many for 4 each" in fault(costs(log=clean), programs_each=4)
    assert "calls no Mosaic kernel" in fault(costs(log=clean), num_kernel_calls=0)


def test_cases_know_their_bytes_and_operations() -> None:
    case = cases.Case(name="", lengths=((1, 100), (10, 30)), num_q_heads=4, num_kv_heads=2)
    assert case.kv_bytes == 2 * 130 * 2 * 128 * 2
    pairs = 100 + sum(range(21, 31))
    assert case.flops == 4 * pairs * 4 * 128
    assert not case.is_decode and not case.is_scaled


@needs_plugin
@needs_kernels
@pytest.mark.parametrize("entry", ["llama3-8b block 16 bfloat16", "llama3-8b/8 block 16 int8"])
def test_a_decode_compiles_for_an_h200(entry: str) -> None:
    """Two programs a multiprocessor were planned for both, and `aot_check` counts registers."""
    command = [sys.executable, "scripts/aot_check.py", "--topology=h200", "--processes=1"]
    command += [f"--entries=attention decode {entry}"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    counts = json.loads(run.stdout.splitlines()[-1])
    assert counts["compiled"] == 1 and counts["failed"] == 0, run.stdout + run.stderr[-2000:]
    assert "16 HGMMA, 9 UTMALDG" in run.stdout


@needs_kernels
@pytest.mark.full
def test_the_benchmark_runs(tmp_path: Path) -> None:
    command = [sys.executable, "scripts/bench_gpu.py", "--smoke", "--repeats=1"]
    command += ["--seconds=1800", "--most_seconds=900", f"--output={tmp_path}/report"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    report = json.loads(run.stdout.splitlines()[-1])
    assert run.returncode == 0, run.stdout + run.stderr[-2000:]
    assert report == json.loads((tmp_path / "report").read_text())
    assert all(result["is_right"] for result in report["conformance"])
    timed, copied = report["timed"][0], report["copy"]["bytes_per_second"]
    assert timed["xla"]["seconds"] > 0
    assert timed["gpu"]["share_of_copy"] == timed["kv_bytes"] / timed["gpu"]["seconds"] / copied
    assert report["engine"]["output_tokens_per_second"] > 0


def test_a_lost_measurement_takes_no_other_with_it(tmp_path: Path) -> None:
    """Functions of the standard library stand for kernels that hang or end their process."""
    path = tmp_path / "report"
    with bench_gpu_process.Worker(is_usable=bool) as worker:  # bool() is False: the device is lost.
        bench = bench_gpu.Bench(worker, seconds=120.0, most_seconds=30.0, output=str(path))

        def run(name: str, function, *args, **options) -> dict:
            bench.run(name, bench.report.setdefault(name, {}), function, *args, **options)
            return json.loads(path.read_text())

        assert run("first", dict, [("found", 1)])["first"] == {"found": 1}
        process = worker._process.pid
        assert "exit code 3" in run("dies", os._exit, 3)["dies"]["error"]
        assert run("raises", operator.truediv, 1, 0)["raises"]["error"].startswith("ZeroDivision")
        assert run("second", dict, [("found", 2)])["second"] == {"found": 2}
        assert worker._process.pid != process
        worker._process.kill()  # As when memory runs out between two calls.
        worker._process.join()
        assert run("third", dict, [("found", 3)])["third"] == {"found": 3}
        bench._most_seconds = 0.5
        assert "stopped: not done" in run("hangs", time.sleep, 100)["hangs"]["error"]
        assert "left_out" in run("late", time.sleep, 100, share=0.0)["late"]
        report = run("late", time.sleep, 100, share=0.0)
    assert report["first"] == {"found": 1} and report["second"] == {"found": 2}


class FailingWorker:
    """All checks are wrong, the copy fails, and each attention takes a second."""

    def __init__(self):
        self.calls = []

    def results(self, function, args, seconds):
        self.calls.append((function.__name__, *args[:1]))
        found = dict(check_conformance=dict(is_right=False), copy_bandwidth=dict(error="no room"))
        yield found.get(function.__name__, dict(seconds=1.0))

    def stop(self) -> None:
        self.calls.append(("stop",))


def test_wrong_results_do_not_keep_the_rest_from_being_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for flag, value in dict(SMOKE=False, ENGINE=True, REPEATS=1).items():
        monkeypatch.setattr(bench_gpu, flag, types.SimpleNamespace(value=value))
    worker = FailingWorker()
    path = tmp_path / "report"
    bench = bench_gpu.Bench(worker, seconds=100.0, most_seconds=9.0, output=str(path))
    bench_gpu.measure_all(bench)
    report = json.loads(path.read_text())
    assert [check["is_right"] for check in report["conformance"]] == [False] * 12
    assert [timed["gpu"]["seconds"] for timed in report["timed"]] == [1.0] * 12
    assert report["timed"][0]["gpu"]["kv_bytes_per_second"] == 64 * 2048 * 4096
    assert "share_of_copy" not in report["timed"][0]["gpu"]
    assert sum("jax" in timed for timed in report["timed"]) == 7
    assert sum("xla" in timed for timed in report["timed"]) == 4
    assert worker.calls[-2:] == [("stop",), ("run_engine", False)]
    assert worker.calls.index(("time_attention", "jax")) == 12 + 1 + 12, "ours first"


def test_parts_come_as_they_are_found() -> None:
    with bench_gpu_process.Worker(is_usable=int) as worker:  # int() is 0: lost.
        parts = list(worker.results(map, (dict, [[("a", 1)], [("b", 2)], 3]), seconds=30.0))
    assert parts[:2] == [{"a": 1}, {"b": 2}]
    assert parts[2]["error"].startswith("TypeError")


def test_wrong_rows_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three decodes the second is wrong, by a planted kernel."""
    precisions = {}

    def attend(q, pool, *batch, implementation, **options):
        precisions[implementation, q.dtype.name] = jax.config.jax_default_matmul_precision
        rows = jnp.arange(q.shape[0])[:, None, None]
        return jnp.where((rows == 1) & (implementation == "gpu"), jnp.nan, 1.0) + 0 * q

    monkeypatch.setattr(measures, "ragged_paged_attention", attend)
    case = cases.Case(name="", lengths=((1, 9),) * 3, num_q_heads=2, num_kv_heads=1)
    result = measures.check_conformance(case)
    assert (result["is_right"], result["wrong_rows"], result["num_wrong_rows"]) == (False, [1], 1)
    assert json.loads(json.dumps(result, allow_nan=False))["relative_error"] == "nan"
    assert precisions == {("gpu", "bfloat16"): None, ("xla", "float32"): "highest"}
