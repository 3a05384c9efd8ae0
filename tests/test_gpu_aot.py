"""The scripts that compile for a GPU without one, and the one that measures on one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from script_modules import import_script

from pallas_kernels import gpu_runtime

ROOT = Path(__file__).parent.parent
gpu_static = import_script("gpu_static")
gpu_aot = import_script("gpu_aot")
cases = import_script("bench_gpu_cases")


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
        return gpu_aot.fault(made, max_spill_bytes=0, programs_each=programs, needs_kernel=True)

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
def test_a_decode_compiles_for_an_h200() -> None:
    command = [sys.executable, "scripts/aot_check.py", "--topology=h200", "--processes=1"]
    command += ["--entries=attention decode llama3-8b block 16 bfloat16"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    counts = json.loads(run.stdout.splitlines()[-1])
    assert counts["compiled"] == 1 and counts["failed"] == 0, run.stdout + run.stderr[-2000:]
    assert "16 HGMMA, 9 UTMALDG" in run.stdout


@needs_kernels
@pytest.mark.full
def test_the_benchmark_runs() -> None:
    command = [sys.executable, "scripts/bench_gpu.py", "--smoke", "--repeats=1", "--noengine"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    report = json.loads(run.stdout.splitlines()[-1])
    assert all(result["is_right"] for result in report["conformance"]), run.stdout
    assert report["timed"][0]["gpu_seconds"] > 0
