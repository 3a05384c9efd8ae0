"""The scripts that compile for a TPU without one, on a few kernels; and how they read reports.

Compiling needs libtpu (`pip install libtpu`), and takes place in processes of its own, whose
environment and dead ends are not pytest's.
"""

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from script_modules import SCRIPTS, import_script

from pallas_kernels.kv_write import write_kv

ROOT = Path(__file__).parent.parent
tpu_static = import_script("tpu_static")
tpu_aot = import_script("tpu_aot")

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="compiling for a TPU needs libtpu: pip install libtpu",
)

# The beginnings of what libtpu 0.0.52 writes, shortened within lines.
LISTING = """\
= control target key start
LH: loop header
LB: loop body
= control target key end

     0   :  { %s1_s15 = smov.u32 [#allocation7]  ;;  %s2_s0 = inlined_call_operand.hbm [\
shape: s32[2], index: 0, kind: input, shape index: {}] } \
/* entry bundle: %paged_attention.1 = (f32[2,32]{1,0:T(8,128)}, f32[2,1]{1,0:T(1,128)}) \
custom-call(%refs_0_.1, %reshape.0) */
   0x1   :  { %4151 = sst [smem:[#allocation115_spill]] %s4108_s4 }
   0x2 LB: > { %s20_s9 = sadd.s32 1, %s19_s9 }
   0x3 PF: >> {}
   0x4   : > { %p21_p0 = scmp.ge.s32.totalorder %s20_s9, 4 }
"""
ESTIMATE = """\
hlo_op_estimate {
  hlo_op_name: "fusion.7"
  estimated_cycles: 140523
  num_equivalent_hlos: 3
}
"""
UNROLLED_TAIL = """\
0x9349: bundle slots:
  %p66681_p1 = scmp.ne.s32.totalorder %s66680_s24, 0


0x934a: bundle slots:


"""
HLO = """\
ENTRY %main.2 (q.1: bf16[2,32,128]) -> bf16[2,32,128] {
  %top_k.1 = (f32[2]{0}, s32[2]{0}) custom-call(%q.1), custom_call_target="TopK"
  %write_kv.3 = bf16[2,32]{1,0} custom-call(%q.1), custom_call_target="tpu_custom_call"
  ROOT %copy_blocks.1 = (bf16[2]{0}) custom-call(%q.1), custom_call_target="tpu_custom_call"
}
"""
VMEM_REPORT = """\
<script>
        const DATA ={
  "global_info": {"module_name": "jit_f", "vmem_capacity": 134217728},
  "hlo_breakdowns": {
    "copy.2": {"blocks": [{"allocations": [{"size": 4096}], "block_size": 4096}],
               "metadata": "", "total_size": 4096},
    "paged_attention.1": {
      "blocks": [
        {"allocations": [{"size": 65536, "tag": "scratch operand"},
                         {"size": 8192, "tag": "spill"}]},
        {"allocations": [{"size": 4096, "tag": "SPILL"}]}],
      "metadata": "op_name=\\"jit(f)/pallas_call\\"", "total_size": 77824}}
};
        const MAX_BYTES = DATA.global_info.vmem_capacity;
</script>
"""


def test_a_listing_tells_its_operation_and_length():
    assert tpu_static.op_name_of_listing("1795-fusion.3-03-final_bundles.txt") == "fusion.3"
    assert tpu_static.op_name_of_listing("1795-TLP-03-final_bundles.txt") is None
    assert tpu_static.op_name_of_listing("1795-<late-x>-03-final_bundles.txt") is None
    assert tpu_static.op_name_of_listing("17-f.3-02-schedule-analysis_final_bundles.txt") is None
    assert tpu_static.parse_opcode(LISTING) == "custom-call"
    assert tpu_static.count_bundles(LISTING) == 5
    assert tpu_static.parse_kernel_names(HLO) == {"write_kv.3", "copy_blocks.1"}


def test_a_profile_tells_cycles_and_issued_bundles():
    assert tpu_static.parse_estimate(ESTIMATE) == (140_523, 3)
    assert tpu_static.parse_estimate("") == (None, 1)
    assert tpu_static.parse_issued(UNROLLED_TAIL) == 0x934A + 1
    assert tpu_static.parse_issued("") is None


def test_a_vmem_report_tells_spills_by_operation():
    uses = tpu_static.parse_vmem_report(VMEM_REPORT)
    assert set(uses) == {"copy.2", "paged_attention.1"}
    kernel = uses["paged_attention.1"]
    assert (kernel.total_bytes, kernel.spill_bytes) == (77_824, 12_288)
    assert (uses["copy.2"].total_bytes, uses["copy.2"].spill_bytes) == (4096, 0)
    with pytest.raises(ValueError, match="DATA"):
        tpu_static.parse_vmem_report("<html></html>")


def _repeat(lengths: jax.Array) -> jax.Array:
    """A kernel in whose output row 0 stands twice the sum of `lengths`, counted by loops."""

    def kernel(doubled_ref, out_ref):
        def count(index, total):
            return jax.lax.fori_loop(0, doubled_ref[index], lambda _, n: n + 1, total)

        total = jax.lax.fori_loop(0, doubled_ref.shape[0], count, jnp.int32(0))
        out_ref[...] = jnp.full_like(out_ref, total)

    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((8, 128), jnp.int32),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(1,),
            in_specs=[],
            out_specs=pl.BlockSpec((8, 128), lambda i, _: (0, 0)),
        ),
        interpret=pltpu.InterpretParams(),
    )(lengths * 2)


def test_kernels_get_the_scalars_that_the_program_around_them_makes():
    (call,) = tpu_static.record_kernels(jax.jit(_repeat), [np.array([3, 4], np.int32)])
    assert [scalars.tolist() for scalars in call.scalars] == [[6, 8]]
    assert call.grid == (1,) and call.arrays == () and call.donated == ()
    # They then hold whatever the arguments are, as where these are unknown.
    with tpu_static.known_scalars([call]):
        out = jax.jit(_repeat)(jnp.zeros(2, jnp.int32))
    assert int(out[0, 0]) == 14
    assert int(jax.jit(_repeat)(jnp.zeros(2, jnp.int32))[0, 0]) == 0


def test_a_dead_process_tells_why():
    message = "llo_dumper.cc:17] Static LLO profiling of copy.1 failed: no such DMA"
    stderr = (
        f"E1129 18:20:05.803   21460 client.cc:261] RAW: no\nF1129 18:20:05.548   21460 {message}\n"
    )
    assert tpu_static.parse_fatal_error(stderr) == message
    assert "without a word" in tpu_static.parse_fatal_error("E1129 18:20:05.8 1 a.cc:2] RAW: no")


def test_reports_that_are_slow_to_make_are_not_asked_for():
    for profile in (False, True):
        flags = tpu_static.dump_flags("folder", profile=profile)
        (categories,) = (flag for flag in flags if "category_filter" in flag)
        asked = set(categories.partition("=")[2].split(","))
        assert asked == {"memory-report"} | ({"codegen"} if profile else set())


def test_a_process_that_dies_is_replaced():
    with tpu_static.MortalProcess() as process:
        assert process.run(divmod, 7, 2) == (3, 1)
        assert process.run(os.abort) is None
        assert process.last_words == "the process ended without a word"
        assert process.run(divmod, 7, 2) == (3, 1)
        with pytest.raises(ZeroDivisionError):
            process.run(divmod, 7, 0)


def _compilation(**changes: int):
    made = dict(seconds=1.0, temporary_bytes=0, aliased_bytes=1000, spill_bytes=0, vmem_bytes=0)
    made["int8_products"] = 9
    return tpu_aot.Compilation(**made | changes)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (dict(), ""),
        (dict(temporary_bytes=1000), "copied"),
        (dict(temporary_bytes=501), "more than 500"),
        (dict(spill_bytes=65_537), "spilled"),
        (dict(aliased_bytes=999), "in place"),
        (dict(int8_products=8), "8 products of int8 with int8, of 9"),
    ],
)
def test_what_counts_as_failed(changes, reason):
    program = tpu_aot.Program(
        function=abs, args=(), aliased_bytes=1000, pool_bytes=1000, int8_products=9
    )
    found = tpu_aot.fault(_compilation(**changes), program, max_temporary_bytes=500)
    assert reason in found and bool(found) == bool(reason)


def test_only_our_own_checks_refuse():
    pool, slots = jnp.zeros((2, 2, 16, 128)), jnp.zeros(1, jnp.int32)
    with pytest.raises(ValueError) as ours:
        write_kv(pool, jnp.zeros((1, 3, 128)), jnp.zeros((1, 3, 128)), slots)
    assert tpu_aot.is_own_refusal(ours.value)
    with pytest.raises(TypeError) as theirs:
        jnp.zeros(2).reshape(3)
    assert not tpu_aot.is_own_refusal(theirs.value)


def test_topologies_go_by_either_name():
    assert tpu_aot.topology_name("v5e") == tpu_aot.topology_name("v5e:2x2") == "v5e:2x2"
    with pytest.raises(ValueError, match=r"v3.*v5e"):
        tpu_aot.topology_name("v3")


def test_tuning_climbs_to_the_fastest_sizes_and_keeps_clear_wins(tmp_path):
    tune_kernels, kp = map(import_script, ("tune_kernels", "kernel_programs"))
    pool = kp.PoolSpec(num_blocks=64, block_size=16, dtype="bfloat16")
    start = dataclasses.replace(
        tune_kernels.spec_of(kp.MODELS[0], pool).sizes, decode_block_tokens=512, decode_buffers=4
    )

    def decode_seconds(sizes):
        if sizes.decode_buffers * sizes.decode_block_tokens > 4096:
            return None  # does not fit
        return 1.0 / sizes.decode_block_tokens + 0.001 / sizes.decode_buffers

    timers = dict(decode=decode_seconds, prefill=lambda sizes: 1.0 - sizes.prefill_buffers / 1000)
    tuned = tune_kernels.tune(start, timers)
    # The gain of prefill_buffers is below what counts.
    assert set(tuned) == set(tune_kernels.CANDIDATES["decode"])
    assert (tuned["decode_block_tokens"], tuned["decode_buffers"]) == (1024, 4)
    path = tmp_path / "tuned.json"
    tune_kernels.update_file(path, "another", dict(prefill_buffers=4))
    tune_kernels.update_file(path, "this", tuned)
    assert json.loads(path.read_text()) == {"another": dict(prefill_buffers=4), "this": tuned}
    tune_kernels.update_file(path, "this", {})
    assert json.loads(path.read_text()) == {"another": dict(prefill_buffers=4)}


def test_the_kernel_takes_the_sizes_that_are_tuned():
    tune_kernels, kp = map(import_script, ("tune_kernels", "kernel_programs"))
    pool = kp.PoolSpec(num_blocks=64, block_size=16, dtype="bfloat16")
    before = tune_kernels.spec_of(kp.MODELS[0], pool)
    changed = dataclasses.replace(before.sizes, decode_buffers=2 * before.sizes.decode_buffers)
    entry = {tune_kernels.key_of(before): tune_kernels.entry_of(changed)}
    with tune_kernels.forced_sizes(entry):
        assert tune_kernels.spec_of(kp.MODELS[0], pool).sizes == changed
    assert tune_kernels.spec_of(kp.MODELS[0], pool).sizes == before.sizes


def test_tuning_refuses_where_there_is_no_tpu():
    finished = _run(str(SCRIPTS / "tune_kernels.py"))
    assert finished.returncode == 1 and "on a TPU" in finished.stderr


def _run(*args: str) -> subprocess.CompletedProcess[str]:
    environment = dict(os.environ, PYTHONPATH=str(ROOT))
    return subprocess.run(
        [sys.executable, *args], capture_output=True, text=True, timeout=100, env=environment
    )


def _last_line(finished: subprocess.CompletedProcess[str]):
    return json.loads(finished.stdout.splitlines()[-1])


@needs_libtpu
@pytest.mark.parametrize("topology", ["v5e", "v6e"])
def test_a_few_kernels_compile(topology):
    kernels = "copy_blocks|write_kv 64 tokens|attention decode|attention decode with write"
    entries = f"^({kernels}) llama3-8b block 16 bfloat16$"
    finished = _run(
        str(SCRIPTS / "aot_check.py"),
        *("--topology", topology, "--quick", "--processes", "1", "--entries", entries),
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    found = _last_line(finished)
    assert (found["compiled"], found["refused"], found["failed"]) == (4, 0, 0)


@needs_libtpu
@pytest.mark.parametrize("topology", ["v5e", "v6e"])
def test_an_int8_step_multiplies_in_int8(topology):
    """Every matrix product of the step: one widened would pass all other checks."""
    program = f"""
import sys
sys.path.insert(0, {str(SCRIPTS)!r})
import dataclasses, engine_programs as ep, tpu_aot
config = dataclasses.replace(ep.SMOLLM2_135M, num_layers=2)
compiler = tpu_aot.Compiler.open({topology!r})
for quantization in ("int8", "int8_weight_only"):
    program = ep.engine_step(
        config, ep.DECODE, implementation="tpu", quantization=quantization
    )
    program = dataclasses.replace(program, int8_products=9)
    print(tpu_aot.check(compiler, lambda: program, max_temporary_bytes=2**30))
"""
    finished = _run("-c", program)
    int8, weight_only = finished.stdout.splitlines()
    assert "status='compiled'" in int8, int8
    assert "0 products of int8 with int8, of 9" in weight_only


@needs_libtpu
def test_a_copied_pool_is_found():
    program = f"""
import sys
sys.path.insert(0, {str(SCRIPTS)!r})
import jax, jax.numpy as jnp, tpu_aot
pool = jax.ShapeDtypeStruct((4096, 16, 128), jnp.float32)
def write(pool):
    return pool.at[0].set(1.0)
def write_and_read_old(pool):
    return pool.at[0].set(1.0), pool[1:].sum(0) + pool[0]
compiler = tpu_aot.Compiler.open("v5e")
for function, donated in ((write, (0,)), (write, ()), (write_and_read_old, (0,))):
    program = tpu_aot.Program(
        function=function, args=(pool,), donated=donated, aliased_bytes=2**25, pool_bytes=2**25
    )
    print(tpu_aot.check(compiler, lambda: program).status)
"""
    finished = _run("-c", program)
    assert finished.stdout.split()[:2] == ["compiled", "failed"], finished.stderr


@needs_libtpu
def test_a_static_profile_counts_what_a_kernel_does():
    finished = _run(
        str(SCRIPTS / "bench_kernels_static.py"),
        *("--topology", "v5e", "--case", "^copy_blocks_q4_kv1_d128_page16$"),
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    (row,) = _last_line(finished)
    # Two reads of an id, their check and a DMA; the bytes of one block twice over HBM.
    assert 10 <= row["issued_slope_per_seq"] <= 60
    # The whole kernel by its 32 blocks, with the launch.
    assert row["issued_per_seq"] > row["issued_slope_per_seq"]
    assert row["floor_cycles_per_seq"] == pytest.approx(2 * 16 * 2 * 128 * 2 / 546, abs=0.1)
    assert row["call_est_cycles"] == pytest.approx(32 * row["est_cycles_per_seq"], rel=0.01)
    assert row["spill_bytes"] == 0
