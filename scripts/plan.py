"""Says before a device is rented whether a model fits it, and how many requests it will hold.

    python scripts/plan.py --model=llama-3-8b --topology=v5e:2x2
    python scripts/plan.py --model=llama-3-70b --topology=v5p:4x4x1 --tensor=8
    python scripts/plan.py --model=path/to/config.json --topology=v6e:2x2 --quantization=int8

The model's prefill and decode steps are compiled for the topology by its own compiler, from shapes
alone: neither weights nor the devices are needed, only `pip install libtpu`, or for h200 the wheels
that an error names. Exit status: 0, or 1 if the model does not fit.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from typing import Any

import jax
from absl import app, flags

from paged_jax.config import KV_CACHE_DTYPES, QUANTIZATIONS
from paged_jax.hardware import GIB, find_hardware
from paged_jax.models.config import ModelConfig
from paged_jax.models.presets import PRESETS
from paged_jax.models.weights_gguf import open_gguf
from paged_jax.models.weights_hf import read_config
from paged_jax.plan import HardwarePlan, describe, plan_hardware

MODEL = flags.DEFINE_string(
    "model",
    None,
    f"One of {', '.join(PRESETS)}; a config.json, or a folder with one; or a .gguf file.",
    required=True,
)
TOPOLOGY = flags.DEFINE_string(
    "topology", None, "Devices: v5e:4x4, v5p:4x4x1, v6e:2x2, h200:8, ...; or cpu:8.", required=True
)
TENSOR = flags.DEFINE_integer(
    "tensor", None, "Devices that the model is cut over; by default a KV head each at most."
)
DTYPE = flags.DEFINE_enum("dtype", "bfloat16", ["bfloat16", "float32"], "Of the weights.")
QUANTIZATION = flags.DEFINE_enum("quantization", None, QUANTIZATIONS, "Of the weights' matrices.")
KV_CACHE_DTYPE = flags.DEFINE_enum("kv_cache_dtype", "auto", KV_CACHE_DTYPES, "Of the KV pool.")
BLOCK_SIZE = flags.DEFINE_integer("block_size", 16, "Tokens a block.")
MAX_MODEL_LEN = flags.DEFINE_integer("max_model_len", None, "Longest request, in tokens.")
MAX_NUM_SEQS = flags.DEFINE_integer("max_num_seqs", 256, "Most sequences in a step of each row.")
MAX_NUM_BATCHED_TOKENS = flags.DEFINE_integer(
    "max_num_batched_tokens", 2048, "Most tokens in a step of each row."
)
UTILIZATION = flags.DEFINE_float(
    "utilization", 0.9, "Share of a device's memory to use.", lower_bound=0.01, upper_bound=1.0
)
MEMORY_GIB = flags.DEFINE_float(
    "memory_gib", None, "Of each device; by default what it has.", lower_bound=0.001
)
LENGTHS = flags.DEFINE_list("lengths", ["1024", "4096", "8192"], "Of requests, in tokens.")
JSON = flags.DEFINE_bool("json", False, "Print the plan as JSON instead.")


def main(argv: list[str]) -> int | None:
    """Prints the plan; returns the exit status."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    kind, _, count = TOPOLOGY.value.partition(":")
    if kind == "cpu" and count.isdecimal() and int(count):  # What else it is, is refused below.
        jax.config.update("jax_num_cpu_devices", int(count))
    jax.config.update("jax_platforms", "cpu")  # Compiling needs no device of this machine.
    try:
        lengths = [int(length) for length in LENGTHS.value]
        memory_bytes = None if MEMORY_GIB.value is None else int(MEMORY_GIB.value * GIB)
        plan = plan_hardware(
            model_config(MODEL.value),
            find_hardware(TOPOLOGY.value, memory_bytes=memory_bytes),
            tensor=TENSOR.value,
            dtype=DTYPE.value,
            quantization=QUANTIZATION.value,  # pyright: ignore[reportArgumentType]
            kv_cache_dtype=KV_CACHE_DTYPE.value,
            block_size=BLOCK_SIZE.value,
            max_model_len=MAX_MODEL_LEN.value,
            max_num_seqs=MAX_NUM_SEQS.value,
            max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS.value,
            utilization=UTILIZATION.value,
        )
    except (ValueError, OSError, ImportError) as error:
        print(f"plan: {error}", file=sys.stderr)
        return 1
    print(json.dumps(_as_json(plan, lengths), indent=1) if JSON.value else describe(plan, lengths))
    return None


def model_config(name: str) -> ModelConfig:
    """The configuration that a name or a path means.

    Raises:
      FileNotFoundError: it is neither.
      ModelLoadError: the file describes a model that is not supported.
    """
    if name in PRESETS:
        return PRESETS[name]
    if not os.path.exists(name):
        raise FileNotFoundError(
            f"model={name!r}: it is none of {list(PRESETS)}, and there is no such file or folder"
        )
    return open_gguf(name).config if name.endswith(".gguf") else read_config(name)


def _as_json(plan: HardwarePlan, lengths: list[int]) -> dict[str, Any]:
    fields = {
        field.name: getattr(plan, field.name)
        for field in dataclasses.fields(plan)
        if field.name not in ("hardware", "config", "steps")
    }
    return {
        "topology": plan.hardware.name,
        "device_memory_bytes": plan.hardware.memory_bytes,
        **fields,
        "num_tokens": plan.num_tokens,
        "requests": {length: plan.num_requests(length) for length in lengths},
        "steps": [dataclasses.asdict(step) for step in plan.steps],
    }


if __name__ == "__main__":
    app.run(main)
