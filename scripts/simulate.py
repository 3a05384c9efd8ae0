"""What a device, or a fleet, would make of some traffic: the real scheduler in simulated time.

    python scripts/simulate.py --scenario=guide
    python scripts/simulate.py --workload=chat --num_requests=3000 --requests_per_second=12 \\
        --device=h200 --allocators=paged,oracle,reserve_max
    python scripts/simulate.py --workload=azure --trace=azure_2023_conv.csv --device=h200 \\
        --replicas=8 --price_per_hour=3
    python scripts/simulate.py --scenario=hits --trace=mooncake_conversation.jsonl

Scenarios: `run` serves a workload and compares allocators; `guide` runs a published comparison
again and shows its figures beside ours; `hits` tells how much of a Mooncake trace prefix caches of
several sizes would hit. Workloads: `chat` (lognormal lengths), `mooncake` (JSONL), `azure` (CSV),
`prompts` (a JSONL of your own). Models of a step's time: `roofline` of a device,
`constant:SECONDS`, or `fitted:FILE[,FILE...]` to outputs of bench_generate.py.

Prints a table; the last line is one JSON object.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from typing import Any

from absl import app, flags

from paged_jax.config import PREEMPTION_MODES, SchedulerConfig
from paged_jax.simulate import (
    ACCELERATORS,
    ALLOCATORS,
    MODELS,
    ChatTraffic,
    ConstantStepTime,
    DeviceModel,
    FittedStepTime,
    Replica,
    Results,
    StepTime,
    TraceRequest,
    read_azure,
    read_mooncake,
    read_prompts,
    scaled,
)
from paged_jax.simulate.fleet import ROUTERS, make_router, merged, serve
from paged_jax.simulate.guide import arithmetic, compare_guide
from paged_jax.simulate.loop import simulate
from paged_jax.simulate.prefix_hits import lru_hit_ratio, paged_hit_ratio
from paged_jax.simulate.report import compare_published, compare_runs, text_table

SCENARIO = flags.DEFINE_enum("scenario", "run", ["run", "guide", "hits"], "What to simulate.")
WORKLOAD = flags.DEFINE_enum(
    "workload", "chat", ["chat", "mooncake", "azure", "prompts"], "Where requests come from."
)
TRACE = flags.DEFINE_string("trace", None, "File of a workload other than chat.")
RATE_SCALE = flags.DEFINE_float("rate_scale", 1.0, "2: the trace at twice its pace.")
NUM_REQUESTS = flags.DEFINE_integer("num_requests", 3000, "Chats.", lower_bound=1)
RATE = flags.DEFINE_float("requests_per_second", None, "Of chats and prompts; none: all at once.")
PROMPT_MEDIAN = flags.DEFINE_float("prompt_median", 540, "Median tokens of a chat's prompt.")
PROMPT_SIGMA = flags.DEFINE_float("prompt_sigma", 0.8, "Of the logarithm of its length.")
OUTPUT_MEDIAN = flags.DEFINE_float("output_median", 285, "Median tokens of a chat's output.")
OUTPUT_SIGMA = flags.DEFINE_float("output_sigma", 0.6, "Of the logarithm of its length.")
OUTPUT_TOKENS = flags.DEFINE_integer("output_tokens", 256, "Of prompts that do not say.")
SEED = flags.DEFINE_integer("seed", 0, "Of the chats.", lower_bound=0)

USED_ALLOCATORS = flags.DEFINE_list("allocators", "paged", f"Of {', '.join(ALLOCATORS)}.")
DEVICE = flags.DEFINE_enum("device", "a100", list(ACCELERATORS), "A replica's device.")
MODEL = flags.DEFINE_enum("model", "llama-3-8b", list(MODELS), "What it serves.")
STEP_TIME = flags.DEFINE_string("step_time", "roofline", "See above.")
UTILIZATION = flags.DEFINE_float("gpu_memory_utilization", 0.9, "Share of a device's memory.")
KV_GIB = flags.DEFINE_float("kv_gib", None, "GiB of the KV pool, whatever the device.")
BLOCK_SIZE = flags.DEFINE_integer("block_size", 16, "Tokens a block.", lower_bound=1)
MAX_MODEL_LEN = flags.DEFINE_integer("max_model_len", 8192, "Longest request.", lower_bound=2)
MAX_NUM_SEQS = flags.DEFINE_integer("max_num_seqs", 256, "Most requests in a step.", lower_bound=1)
MAX_TOKENS = flags.DEFINE_integer(
    "max_num_batched_tokens", 2048, "Most tokens in a step.", lower_bound=1
)
PREFIX_CACHING = flags.DEFINE_bool("prefix_caching", True, "Whether prompts share blocks.")
PREEMPTION = flags.DEFINE_enum("preemption_mode", "auto", PREEMPTION_MODES, "Of preemption.")
SWAP_GIB = flags.DEFINE_float("swap_gib", 0.0, "GiB of host memory for swapped requests.")

REPLICAS = flags.DEFINE_integer("replicas", 1, "Devices, each with the whole model.", lower_bound=1)
ROUTER = flags.DEFINE_enum("router", "least_loaded", ROUTERS, "Who sends requests to replicas.")
PRICE = flags.DEFINE_float("price_per_hour", None, "Of a device.")
SEEDS = flags.DEFINE_integer("guide_draws", 3, "Draws of the guide's traffic.", lower_bound=1)


def make_requests() -> Iterable[TraceRequest]:
    """The workload that the flags describe, from its beginning."""
    if WORKLOAD.value == "chat":
        return ChatTraffic(
            num_requests=NUM_REQUESTS.value,
            prompt_median_tokens=PROMPT_MEDIAN.value,
            prompt_sigma=PROMPT_SIGMA.value,
            output_median_tokens=OUTPUT_MEDIAN.value,
            output_sigma=OUTPUT_SIGMA.value,
            max_total_tokens=MAX_MODEL_LEN.value,
            requests_per_second=RATE.value,
            seed=SEED.value,
        )
    if TRACE.value is None:
        raise app.UsageError(f"--workload={WORKLOAD.value} needs --trace=FILE")
    if WORKLOAD.value == "prompts":
        requests = read_prompts(
            TRACE.value, output_tokens=OUTPUT_TOKENS.value, requests_per_second=RATE.value
        )
    else:
        requests = {"mooncake": read_mooncake, "azure": read_azure}[WORKLOAD.value](TRACE.value)
    return scaled(requests, RATE_SCALE.value)


def make_device() -> DeviceModel:
    return DeviceModel(ACCELERATORS[DEVICE.value], MODELS[MODEL.value], BLOCK_SIZE.value)


def make_step_time(device: DeviceModel) -> StepTime:
    """The model of a step's time that the flag names."""
    kind, _, value = STEP_TIME.value.partition(":")
    if kind == "constant":
        return ConstantStepTime(float(value))
    if kind == "fitted":
        return FittedStepTime.of_files(value.split(","))
    if kind != "roofline":
        raise app.UsageError(
            f"--step_time={STEP_TIME.value}: it is roofline, constant:SECONDS or fitted:FILES"
        )
    return device


def make_config(device: DeviceModel) -> SchedulerConfig:
    """A replica's limits as the flags have them."""
    num_blocks = device.num_blocks(UTILIZATION.value)
    if KV_GIB.value is not None:
        num_blocks = int(KV_GIB.value * 2**30) // device.bytes_a_block
    return SchedulerConfig(
        num_blocks=num_blocks + 1,
        block_size=BLOCK_SIZE.value,
        max_model_len=MAX_MODEL_LEN.value,
        max_num_seqs=MAX_NUM_SEQS.value,
        max_num_batched_tokens=MAX_TOKENS.value,
        enable_prefix_caching=PREFIX_CACHING.value,
        preemption_mode=PREEMPTION.value,
        num_host_blocks=int(SWAP_GIB.value * 2**30) // device.bytes_a_block,
    )


def run_allocator(allocator: str, config: SchedulerConfig, step_time: StepTime) -> Results:
    """The workload on all replicas."""
    if REPLICAS.value == 1:
        return simulate(make_requests(), config, step_time, allocator=allocator)
    replicas = [Replica(config, step_time, allocator=allocator) for _ in range(REPLICAS.value)]
    return merged(serve(make_requests(), replicas, make_router(ROUTER.value)))


def run_workload() -> dict[str, Any]:
    """Serves the workload with each allocator; prints what it came to."""
    device = make_device()
    config, step_time = make_config(device), make_step_time(device)
    pool_gib = (config.num_blocks - 1) * device.bytes_a_block / 2**30
    print(
        f"{REPLICAS.value} x {device.accelerator.name}, {device.model.name}: weights "
        f"{device.model.weight_bytes / 2**30:.1f} GiB, KV pool {pool_gib:.1f} GiB = "
        f"{config.num_blocks - 1:,} blocks of {config.block_size} tokens "
        f"({device.model.bytes_a_token // 1024} KiB a token)\n"
        f"a request: at most {config.max_model_len:,} tokens; a step: at most "
        f"{config.max_num_seqs:,} requests and {config.max_num_batched_tokens:,} tokens\n"
        f"step time: {STEP_TIME.value}; workload: {TRACE.value or WORKLOAD.value}"
        + (f"; router: {ROUTER.value}" if REPLICAS.value > 1 else "")
        + "\n"
    )
    started = time.perf_counter()
    figures = {
        name: run_allocator(name, config, step_time).figures(PRICE.value)
        for name in USED_ALLOCATORS.value
    }
    seconds = time.perf_counter() - started
    print(compare_runs(figures))
    num_sequence_steps = sum(f["num_sequence_steps"] for f in figures.values())
    print(f"\n{num_sequence_steps / seconds:,.0f} sequence-steps a second of real time")
    return {"runs": figures, "wall_seconds": seconds}


def run_guide() -> dict[str, Any]:
    """The published figures beside ours."""
    comparisons = [*arithmetic(), *compare_guide(range(SEEDS.value))]
    print(compare_published(comparisons))
    return {c.name: {"published": c.theirs, "ours": c.ours} for c in comparisons}


def run_hits() -> dict[str, Any]:
    """Hit ratios of a Mooncake trace against the cache's size."""
    if TRACE.value is None:
        raise app.UsageError("--scenario=hits needs --trace=FILE, of Mooncake's form")
    rows, ratios = [["cache, tokens", "least recently used", "block manager"]], {}
    for capacity in (3_000_000, 10_000_000, 50_000_000, None):
        lru = lru_hit_ratio(read_mooncake(TRACE.value), capacity)
        paged = None
        if capacity is not None:
            requests = read_mooncake(TRACE.value)
            paged = paged_hit_ratio(requests, capacity, BLOCK_SIZE.value)
        name = "endless" if capacity is None else f"{capacity:,}"
        rows.append([name, f"{lru:.4f}", "" if paged is None else f"{paged:.4f}"])
        ratios[name] = {"lru": lru, "paged": paged}
    print(text_table(rows))
    return ratios


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    run = {"run": run_workload, "guide": run_guide, "hits": run_hits}[SCENARIO.value]
    print(json.dumps(run()))


if __name__ == "__main__":
    app.run(main)
