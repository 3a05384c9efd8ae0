"""What a device, or a fleet, would make of some traffic: the real scheduler in simulated time.

    python scripts/simulate.py --scenario=guide
    python scripts/simulate.py --workload=chat --num_requests=3000 --requests_per_second=12 \\
        --device=h200 --allocators=paged,oracle,reserve_max
    python scripts/simulate.py --workload=azure --trace=azure_2023_conv.csv --device=h200 \\
        --replicas=8 --price_per_hour=3
    python scripts/simulate.py --scenario=hits --trace=mooncake_conversation.jsonl
    python scripts/simulate.py --scenario=size --num_requests=1000000 --requests_per_second=278 \\
        --device=h200 --ttft_p95=1 --autoscale_load=64
    python scripts/simulate.py --scenario=plan --device=h200 --price_per_hour=3

Scenarios: `run` serves a workload and compares allocators, with --html=FILE as a report with
pictures; `guide` runs a published comparison again and shows its figures beside ours; `hits` tells
how much of a Mooncake trace prefix caches of several sizes would hit; `size` how many devices a
workload needs for a latency target; `plan` how many requests fit, in which blocks, how full memory
may be kept, and what tokens cost.

Workloads: `chat` (lognormal lengths), `mooncake` (JSONL), `azure` (CSV), `prompts` (a JSONL of your
own). Models of a step's time: `roofline` of a device, `constant:SECONDS`, or
`fitted:FILE[,FILE...]` to outputs of bench_generate.py.

Prints tables and sentences; the last line is one JSON object.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from absl import app, flags

from paged_jax.config import PREEMPTION_MODES, SchedulerConfig
from paged_jax.process_memory import resident_bytes
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
from paged_jax.simulate.autoscaler import AutoscalePolicy, serve_autoscaled
from paged_jax.simulate.explanations import ALLOCATOR_WORDS, verdict
from paged_jax.simulate.fleet import ROUTERS, make_router, merged, serve
from paged_jax.simulate.guide import arithmetic, compare_guide
from paged_jax.simulate.loop import simulate
from paged_jax.simulate.planner import plan_capacity, safe_utilization
from paged_jax.simulate.prefix_hits import lru_hit_ratio, paged_hit_ratio
from paged_jax.simulate.report import compare_published, compare_runs, text_table
from paged_jax.simulate.sizing_fleet import FleetAnswer, devices_for, p95_seconds
from paged_jax.simulate.studies import all_at_once

SCENARIO = flags.DEFINE_enum(
    "scenario", "run", ["run", "guide", "hits", "size", "plan"], "What to simulate."
)
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
LOOKAHEAD = flags.DEFINE_integer(
    "decode_lookahead",
    1,
    "Tokens that are decoded ahead of what the host has read; engines take 8 by default.",
    lower_bound=1,
)
PREFIX_CACHING = flags.DEFINE_bool("prefix_caching", True, "Whether prompts share blocks.")
PREEMPTION = flags.DEFINE_enum("preemption_mode", "auto", PREEMPTION_MODES, "Of preemption.")
SWAP_GIB = flags.DEFINE_float("swap_gib", 0.0, "GiB of host memory for swapped requests.")

REPLICAS = flags.DEFINE_integer("replicas", 1, "Devices, each with the whole model.", lower_bound=1)
ROUTER = flags.DEFINE_enum("router", "least_loaded", ROUTERS, "Who sends requests to replicas.")
PRICE = flags.DEFINE_float("price_per_hour", None, "Of a device.")
HTML = flags.DEFINE_string("html", None, "File for a report with pictures, of `run`.")
TTFT_P95 = flags.DEFINE_float("ttft_p95", 1.0, "Target of `size`: seconds to the first token.")
ITL_P95 = flags.DEFINE_float("itl_p95", None, "Another: seconds from token to token.")
MOST_DEVICES = flags.DEFINE_integer("most_devices", 4096, "That `size` may take.", lower_bound=1)
AUTOSCALE_LOAD = flags.DEFINE_float(
    "autoscale_load", None, "Of `size`: also serve with devices for so many requests each."
)
STARTUP = flags.DEFINE_float("startup_seconds", 120.0, "Of a device that is added.")
REQUEST_PROMPT = flags.DEFINE_integer(
    "request_prompt", None, "Of `plan`: tokens of a request's prompt; none: the workload's mean."
)
REQUEST_OUTPUT = flags.DEFINE_integer("request_output", None, "The same of its output.")
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
        decode_lookahead=LOOKAHEAD.value,
    )


def run_allocator(allocator: str, config: SchedulerConfig, step_time: StepTime) -> Results:
    """The workload on all replicas."""
    if REPLICAS.value == 1:
        return simulate(make_requests(), config, step_time, allocator=allocator)
    replicas = [Replica(config, step_time, allocator=allocator) for _ in range(REPLICAS.value)]
    return merged(serve(make_requests(), replicas, make_router(ROUTER.value)))


def describe(device: DeviceModel, config: SchedulerConfig) -> dict[str, str]:
    """What is simulated, by name, for a reader who has not seen the flags."""
    if WORKLOAD.value == "chat":
        pace = f"{RATE.value:g} a second on average" if RATE.value else "all at once"
        traffic = (
            f"{NUM_REQUESTS.value:,} made-up chats, {pace}; lognormal lengths, in the median "
            f"{PROMPT_MEDIAN.value:g} tokens of prompt and {OUTPUT_MEDIAN.value:g} of output"
        )
    else:
        pace = "" if RATE_SCALE.value == 1 else f", at {RATE_SCALE.value:g} times its pace"
        traffic = f"{WORKLOAD.value} trace {Path(TRACE.value or '').name}{pace}"
    chip, model = device.accelerator, device.model
    kind, _, value = STEP_TIME.value.partition(":")
    step_time = f"{value} s, whatever it computes" if kind == "constant" else STEP_TIME.value
    if kind == "roofline":
        step_time = (
            f"roofline: what a step reads at {100 * chip.bandwidth_share:.0f}% of "
            f"{chip.bytes_per_second / 1e12:.2f} TB/s, or what it computes at "
            f"{100 * chip.operations_share:.0f}% of {chip.operations_per_second / 1e12:.0f} "
            f"TFLOP/s, whichever is longer, and {1000 * chip.step_overhead_seconds:g} ms"
        )
    devices = f"{REPLICAS.value} x {chip.name}, {model.name} on each"
    if REPLICAS.value > 1:
        devices += f", behind a router: {ROUTER.value}"
    settings = {
        "Traffic": traffic,
        "Model": f"{model.name}: weights {model.weight_bytes / 2**30:.1f} GiB, "
        f"{model.bytes_a_token // 1024} KiB of keys and values a token",
        "Devices": devices,
        "KV memory of a device": f"{(config.num_blocks - 1) * device.bytes_a_block / 2**30:.1f} "
        f"GiB: {config.num_blocks - 1:,} blocks of {config.block_size} tokens",
        "Limits": f"a request: at most {config.max_model_len:,} tokens; a step: at most "
        f"{config.max_num_seqs:,} requests and {config.max_num_batched_tokens:,} tokens",
        "Step time": step_time,
    }
    settings["Memory management"] = "; ".join(
        f"{name}: {ALLOCATOR_WORDS[name]}" for name in USED_ALLOCATORS.value
    )
    if config.decode_lookahead > 1:
        settings["Decoding ahead"] = (
            f"by up to {config.decode_lookahead} tokens, in calls of {config.num_decode_steps} "
            "steps, where nobody waits; those spare the device the wait for the host"
        )
    if PRICE.value is not None:
        settings["Price"] = f"{PRICE.value:g} an hour and device, in whatever currency"
    return settings


def run_workload() -> dict[str, Any]:
    """Serves the workload with each allocator; prints what it came to."""
    device = make_device()
    config, step_time = make_config(device), make_step_time(device)
    settings = describe(device, config)
    print("\n".join(f"{name}: {value}" for name, value in settings.items()) + "\n")
    started = time.process_time()
    runs = {name: run_allocator(name, config, step_time) for name in USED_ALLOCATORS.value}
    seconds = time.process_time() - started
    figures = {name: run.figures(PRICE.value) for name, run in runs.items()}
    print(compare_runs(figures) + "\n")
    print("\n".join(f"{name}: {verdict(run)}" for name, run in figures.items()))
    num_sequence_steps = sum(f["num_sequence_steps"] for f in figures.values())
    pace, peak = num_sequence_steps / seconds, resident_bytes().get("peak", 0)
    print(
        f"\nsimulated at {pace:,.0f} sequence-steps a second of CPU time, in "
        f"{peak / 2**20:.0f} MiB of memory"
    )
    if HTML.value is not None:
        from paged_jax.simulate.html_report import NOTES, write_report
        from paged_jax.simulate.report_pictures import report_pictures

        write_report(
            HTML.value,
            title=f"{device.model.name} on {REPLICAS.value} x {device.accelerator.name}, simulated",
            settings=settings,
            figures=figures,
            pictures=report_pictures(make_requests, config, step_time, runs),
            notes=NOTES,
        )
        print(f"report: {HTML.value}")
    return {
        "runs": figures,
        "cpu_seconds": seconds,
        "sequence_steps_per_cpu_second": pace,
        "peak_memory_bytes": peak,
    }


def run_size() -> dict[str, Any]:
    """How many devices the workload needs; with --autoscale_load, also an autoscaled fleet."""
    device = make_device()
    config, step_time = make_config(device), make_step_time(device)
    answer = devices_for(
        make_requests,
        config,
        step_time,
        ttft_p95_seconds=TTFT_P95.value,
        itl_p95_seconds=ITL_P95.value,
        router=ROUTER.value,
        most=MOST_DEVICES.value,
    )
    print(answer.text())
    found: dict[str, Any] = dataclasses.asdict(answer)
    if answer.sample.end_seconds == math.inf:  # JSON knows no such number.
        found["sample"]["end_seconds"] = None
    if AUTOSCALE_LOAD.value is not None:
        if answer.sample.end_seconds != math.inf:
            print("autoscaling is left out: it takes all of the time, not a stretch")
        else:
            found["autoscaled"] = run_autoscaled(answer, config, step_time)
    return found


def run_autoscaled(
    answer: FleetAnswer, config: SchedulerConfig, step_time: StepTime
) -> dict[str, Any]:
    """What an autoscaled fleet does with the sample that an answer rests on."""
    one_in, load = answer.sample.one_in, AUTOSCALE_LOAD.value
    assert load is not None
    most = max(MOST_DEVICES.value // one_in, 1)
    policy = AutoscalePolicy(target_load=load, most=most, startup_seconds=STARTUP.value)
    requests = answer.sample.of(make_requests())
    fleet = serve_autoscaled(requests, config, step_time, policy, router=ROUTER.value)
    ttft, itl = p95_seconds(fleet.results)
    hours, peak = fleet.device_hours * one_in, fleet.peak_devices * one_in
    print(
        f"autoscaled to {load:g} requests a device: {hours:,.2f} device-hours, at most {peak:,} "
        f"devices; 95 of 100 first tokens within {ttft:.3f} s"
    )
    if answer.num_devices is not None:
        fixed = answer.num_devices * fleet.results.end_seconds / 3600
        print(f"the fleet of fixed size: {fixed:,.2f} device-hours")
    return {
        "device_hours": hours,
        "peak_devices": peak,
        "ttft_p95_seconds": ttft,
        "itl_p95_seconds": itl,
    }


def run_plan() -> dict[str, Any]:
    """What fits the device, and what it costs."""
    device = make_device()
    config, step_time = make_config(device), make_step_time(device)
    requests = all_at_once(make_requests(), 4000)
    if not requests:
        raise app.UsageError("the workload has no requests")
    mean_prompt = sum(r.num_prompt_tokens for r in requests) / len(requests)
    mean_output = sum(r.num_output_tokens for r in requests) / len(requests)
    plan = plan_capacity(
        device.model,
        (config.num_blocks - 1) * device.bytes_a_block,
        prompt_tokens=REQUEST_PROMPT.value or round(mean_prompt),
        output_tokens=REQUEST_OUTPUT.value or max(round(mean_output), 1),
        max_model_len=config.max_model_len,
        step_time=step_time,
        price_an_hour=PRICE.value,
    )
    safe = safe_utilization(requests, config, step_time)
    print(f"{plan.text()}\n\n{safe.text()} (simulated, {len(requests):,} requests)")
    return {"plan": dataclasses.asdict(plan), "safe": dataclasses.asdict(safe)}


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
    scenarios = {
        "run": run_workload,
        "guide": run_guide,
        "hits": run_hits,
        "size": run_size,
        "plan": run_plan,
    }
    print(json.dumps(scenarios[SCENARIO.value]()))


if __name__ == "__main__":
    app.run(main)
