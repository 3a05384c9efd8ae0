"""Plans for hardware, against the compiler's account and against engines that really run."""

import dataclasses
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest
from tiny_engine import prompts_of, run, tiny_llm, tiny_model

from paged_jax.hardware import find_hardware
from paged_jax.models.presets import LLAMA3_8B, LLAMA3_70B, SMOLLM2_135M
from paged_jax.plan import (
    DoesNotFit,
    HardwarePlan,
    choose_sizes,
    count_params,
    describe,
    find_collectives,
    plan_hardware,
)
from paged_jax.simulate.device_model import ACCELERATORS

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "scripts" / "plan.py"


def test_presets_have_the_published_numbers_of_parameters():
    assert count_params(LLAMA3_8B) == 8_030_261_248
    assert count_params(LLAMA3_70B) == 70_553_706_496
    assert count_params(SMOLLM2_135M) == 134_515_008


@pytest.mark.parametrize(
    ("data", "tensor"),
    [
        (2, 2),
        pytest.param(1, 4, marks=pytest.mark.full),
        pytest.param(4, 1, marks=pytest.mark.full),
    ],
)
def test_figures_are_those_of_an_engine_that_runs(data, tensor):
    """Weights, pool and temporaries of a device, within 5%; blocks to the block."""
    model = tiny_model(num_heads=8, num_kv_heads=4, hidden_size=64, intermediate_size=128)
    hardware = find_hardware("cpu:4", memory_bytes=3_000_000)
    limits: dict[str, Any] = dict(
        max_model_len=128, max_num_seqs=8, max_num_batched_tokens=32, block_size=4
    )
    plan = plan_hardware(
        model.config, hardware, tensor=tensor, dtype="float32", decode_lookahead=1, **limits
    )
    assert (plan.data, plan.tensor) == (data, tensor)
    llm = tiny_llm(
        model,
        data_parallel_size=data,
        tensor_parallel_size=tensor,
        num_gpu_blocks_override=plan.num_blocks,
        attention_implementation="xla",
        **limits,
    )
    run(llm, prompts_of([5, 40, 17, 3]))
    runner = llm.engine.runner
    device = jax.devices()[0]

    def bytes_there(tree):
        shards = [s for leaf in jax.tree.leaves(tree) for s in leaf.addressable_shards]
        return sum(shard.data.nbytes for shard in shards if shard.device == device)

    pool_bytes = plan.num_blocks * plan.block_size * plan.bytes_a_token
    assert plan.weight_bytes == bytes_there(runner.params)
    assert pool_bytes == bytes_there(runner.pool.layers)
    assert plan.temporary_bytes == pytest.approx(runner.temporary_bytes, rel=0.05)
    for step in plan.steps:
        held = plan.weight_bytes + step.aliased_bytes
        assert held == pytest.approx(step.argument_bytes, rel=0.05)
    used = plan.weight_bytes + plan.temporary_bytes + pool_bytes
    block_bytes = plan.block_size * plan.bytes_a_token
    assert plan.usable_bytes - block_bytes < used <= plan.usable_bytes


def test_what_devices_exchange_is_counted():
    model = tiny_model(num_heads=8, num_kv_heads=4)
    hardware = find_hardware("cpu:4", memory_bytes=3_000_000)
    limits: dict[str, Any] = dict(
        max_model_len=64, max_num_seqs=8, max_num_batched_tokens=32, block_size=4
    )
    plan = plan_hardware(model.config, hardware, dtype="float32", decode_lookahead=1, **limits)
    decode = next(step for step in plan.steps if step.name.startswith("decode"))
    found = {c.op: c for c in decode.collectives}
    # After the attention and the MLP of both layers, and of the embedding: 8 tokens of 32 numbers.
    assert found["all-reduce"].count == 5
    assert found["all-reduce"].num_bytes == 5 * 8 * 32 * 4
    assert found["all-gather"].num_bytes == 8 * model.config.vocab_size * 4  # The logits.


def test_collectives_of_a_program_that_starts_and_ends_them():
    program = """
      %a = (f32[8,32]{1,0}, f32[8,128]{1,0}) all-gather-start(f32[8,32]{1,0} %x), dimensions={1}
      %b = f32[8,128]{1,0} all-gather-done(%a)
      %c = (bf16[4,2]{1,0}, f32[3]{0}) all-reduce(bf16[4,2]{1,0} %y, f32[3]{0} %z), to_apply=%add
      %d = s8[16]{0} collective-permute(s8[16]{0} %w), source_target_pairs={{0,1}}
    """
    found = {c.op: (c.count, c.num_bytes) for c in find_collectives(program)}
    assert found == {
        "all-gather": (1, 8 * 128 * 4),
        "all-reduce": (1, 4 * 2 * 2 + 3 * 4),
        "collective-permute": (1, 16),
    }


def test_a_model_that_does_not_fit_is_refused_with_the_numbers():
    hardware = find_hardware("cpu:2", memory_bytes=2**30)
    with pytest.raises(DoesNotFit, match=r"of 0.90 GiB a device, weights take 7.48 GiB; a request"):
        plan_hardware(LLAMA3_8B, hardware)


@pytest.mark.parametrize(
    ("num_devices", "tensor", "sizes"),
    [(4, None, (1, 4)), (16, None, (2, 8)), (16, 16, (1, 16)), (6, None, (3, 2)), (8, 2, (4, 2))],
)
def test_meshes_cut_a_model_down_to_a_kv_head_each(num_devices, tensor, sizes):
    assert choose_sizes(LLAMA3_8B, num_devices, tensor) == sizes


def test_least_time_of_a_decode():
    """Llama-3-8B on one H200-like device: 16 GB of weights and 128 KiB a token."""
    hardware = find_hardware("cpu:1", memory_bytes=2**40)
    plan = HardwarePlan(
        hardware=hardware,
        config=LLAMA3_8B,
        data=1,
        tensor=1,
        usable_bytes=141 * 10**9,
        weight_bytes=16_060_522_496,
        temporary_bytes=0,
        block_size=16,
        bytes_a_token=131_072,
        num_blocks=4001,
        max_model_len=8192,
        max_num_seqs=64,
        max_num_batched_tokens=2048,
        steps=(),
    )
    assert plan.num_requests(1000) == 4000 // 63
    assert plan.decode_bounds(8, 64) is None  # No data sheet of this machine.
    assert "at most" not in describe(plan, [1000])
    of_h200 = dataclasses.replace(hardware, rates=ACCELERATORS["h200"])
    plan = dataclasses.replace(plan, hardware=of_h200)
    bounds = plan.decode_bounds(64, 1000)
    assert bounds is not None
    by_memory, by_operations = bounds
    embedding = 128_256 * 4096 * 2
    assert by_memory == pytest.approx((16_060_522_496 - embedding + 64e3 * 131_072) / 4.8e12)
    params = 8_030_261_248 - 128_256 * 4096
    assert by_operations == pytest.approx(64 * (2 * params + 4 * 32 * 4096 * 1000) / 989e12)
    assert "a decode of 63 x 1,000 tokens a row takes at least" in describe(plan, [1000])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v9:2x2", "topology='v9:2x2': give one of"),
        ("v5e", "topology='v5e': give one of"),
        ("cpu:0", "topology='cpu:0': give one of"),
        ("cpu:4", "say with memory_bytes"),
        ("cpu:400", "jax has 8 CPU devices"),
    ],
)
def test_unknown_hardware_is_named(name, message):
    with pytest.raises(ValueError, match=message):
        find_hardware(name)


def test_the_script_prints_a_plan_and_says_what_does_not_fit():
    def plan(*flags):
        return subprocess.run(
            [sys.executable, SCRIPT, *flags], capture_output=True, text=True, timeout=120,
            env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False,
        )  # fmt: skip

    done = plan("--model=llama-3-8b", "--topology=cpu:2", "--memory_gib=4")
    assert done.returncode == 1
    assert "weights take 7.48 GiB" in done.stderr and "Traceback" not in done.stderr
    done = plan("--model=nothing", "--topology=cpu:2", "--memory_gib=4")
    assert done.returncode == 1 and "is none of" in done.stderr


needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed"
)
# libtpu takes the process's environment, so that it gets one of its own.
_ON_TPUS = """
import dataclasses, jax
jax.config.update("jax_platforms", "cpu")
from paged_jax.hardware import find_hardware
from paged_jax.models.presets import LLAMA3_8B
from paged_jax.plan import plan_hardware
config = dataclasses.replace(LLAMA3_8B, num_layers=2)
plan = plan_hardware(config, find_hardware({name!r}), max_num_seqs=64, max_num_batched_tokens=512)
for step in plan.steps:
    print(step.num_kernels, step.temporary_bytes, step.aliased_bytes, len(step.collectives))
pool = plan.num_blocks * plan.block_size * plan.bytes_a_token
layer = pool / config.num_layers
assert all(step.num_kernels >= 2 for step in plan.steps)
assert all(step.temporary_bytes < layer / 4 for step in plan.steps), "a pool is copied"
assert all(step.aliased_bytes > 0.8 * pool for step in plan.steps)
assert all(step.collectives for step in plan.steps)
"""


@needs_libtpu
@pytest.mark.full
@pytest.mark.parametrize("name", ["v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"])
def test_kernels_compile_for_tpus_within_a_mesh_and_copy_no_pool(name):
    done = subprocess.run(
        [sys.executable, "-c", _ON_TPUS.format(name=name)], capture_output=True, text=True,
        timeout=600, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
