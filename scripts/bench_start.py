"""Start and memory: each figure from a fresh process, with an empty and with a filled cache.

    python scripts/bench_start.py --quantization=int8 --pool_mb=256

A process imports the package, loads the model, makes the engine, answers one prompt of 128 tokens
with one token, then 32 prompts of 128 with 64 tokens each. "cold" has an empty folder for compiled
programs (the C++ kernels are built before: they need a compiler once a machine), "warm" the one
that a process before it filled. "on demand" compiles a shape when it is first needed
(warmup=False; one for few decodes when some steps have wanted it), "eager" all of them first.

Seconds count from the start of the process. Memory is resident size in MB of 10**6 bytes, code of
libraries included; of the pool, the pages that were written so far. The last line is one JSON
object.
"""

import json
import os
import pathlib
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

from absl import app, flags

MODEL = flags.DEFINE_string("model", "demo", 'A .gguf file, folder or hub id, or "demo".')
QUANTIZATION = flags.DEFINE_enum(
    "quantization", "int8", ["none", "int8", "int8_weight_only", "int4"], "Of the weights."
)
KV_CACHE_DTYPE = flags.DEFINE_string("kv_cache_dtype", "auto", "Of the pool.")
POOL_MB = flags.DEFINE_integer("pool_mb", 256, "Size of the pool, in MiB.", lower_bound=1)
NUM_PROMPTS = flags.DEFINE_integer("num_prompts", 32, "Requests of the round.", lower_bound=1)
ROUNDS = flags.DEFINE_integer("rounds", 3, "Processes of each kind; medians.", lower_bound=1)
CHILD = flags.DEFINE_enum("child", None, ["eager", "on demand"], "Be the measured process.")

PROMPT_LEN, OUTPUT_LEN = 128, 64
STARTED = "PAGED_JAX_BENCH_STARTED"
MODES = ("on demand", "eager")
ROWS = {
    "python_and_jax_s": "Python and jax",
    "package_s": "+ package",
    "load_s": "+ weights",
    "engine_s": "+ engine (pool; eager: all shapes)",
    "first_token_s": "= first token",
    "cpu_first_token_s": "  CPU time until then",
    "rest_s": "32 x (128 + 64) after it",
    "jax_mb": "Python, jax and its libraries",
    "package_mb": "+ package",
    "weights_mb": "weights, by their sizes",
    "pool_mb": "pool, by its size",
    "pool_at_start_mb": "  of it resident with the engine",
    "pool_at_end_mb": "  of it resident after the requests",
    "temporary_mb": "a step's temporaries, by the compiler",
    "programs": "programs compiled or loaded",
    "after_load_mb": "resident after loading",
    "after_engine_mb": "resident with the engine",
    "after_rest_mb": "resident after the requests",
    "programs_mb": "  of it grown by programs and requests",
    "peak_load_mb": "peak until loaded",
    "peak_mb": "peak",
}


def measure(mode: str) -> dict[str, float]:
    """One start of this very process, from its beginning; see ROWS for the names."""
    started = float(os.environ[STARTED])
    figures: dict[str, float] = {}
    marks = [started]

    def mark(name: str) -> None:
        now = time.time()
        figures[name] = now - marks[-1]
        marks.append(now)

    import jax
    import jax.numpy as jnp

    jax.block_until_ready(jnp.zeros(1))
    mark("python_and_jax_s")
    from paged_jax.process_memory import resident_bytes

    def resident_mb() -> float:
        now = resident_bytes()
        return (now["anonymous"] + now["files"]) / 1e6

    figures["jax_mb"] = resident_mb()
    import paged_jax.llm  # noqa: F401  # Names of the package are imported when first used.
    from paged_jax import LLM, SamplingParams, demo_model_path, load_model

    mark("package_s")
    figures["package_mb"] = resident_mb() - figures["jax_mb"]
    quantization: Any = None if QUANTIZATION.value == "none" else QUANTIZATION.value
    path = demo_model_path() if MODEL.value == "demo" else MODEL.value
    model = load_model(path, quantization=quantization)
    mark("load_s")
    figures["after_load_mb"] = resident_mb()
    figures["peak_load_mb"] = resident_bytes()["peak"] / 1e6
    llm = LLM(
        model,
        quantization=quantization,
        kv_cache_dtype=KV_CACHE_DTYPE.value,
        kv_cache_memory_bytes=POOL_MB.value * 2**20,
        max_model_len=PROMPT_LEN + OUTPUT_LEN,
        max_num_seqs=32,
        skip_tokenizer_init=True,
        warmup=mode == "eager",
    )
    mark("engine_s")
    figures["after_engine_mb"] = resident_mb()

    def pool_resident_mb() -> float:
        pool = llm.engine.runner.pool
        return (pool.num_bytes - pool.absent_bytes()) / 1e6

    figures["pool_at_start_mb"] = pool_resident_mb()
    prompts = [[(7 * i + 31 * j) % 8192 for j in range(PROMPT_LEN)] for i in range(33)]
    requests: list[Any] = [{"prompt_token_ids": prompt} for prompt in prompts]
    one = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    llm.generate(requests[:1], one, use_tqdm=False)
    figures["first_token_s"] = time.time() - started
    figures["cpu_first_token_s"] = time.process_time()
    mark("first_request_s")
    many = SamplingParams(temperature=0, max_tokens=OUTPUT_LEN, ignore_eos=True)
    llm.generate(requests[1 : NUM_PROMPTS.value + 1], many, use_tqdm=False)
    mark("rest_s")
    runner = llm.engine.runner
    figures |= {
        "weights_mb": runner.num_weight_bytes / 1e6,
        "pool_mb": runner.pool.num_bytes / 1e6,
        "temporary_mb": runner.temporary_bytes / 1e6,
        "programs": runner.num_programs,
        "pool_at_end_mb": pool_resident_mb(),
        "after_rest_mb": resident_mb(),
        "peak_mb": resident_bytes()["peak"] / 1e6,
    }
    figures["programs_mb"] = figures["after_rest_mb"] - figures["after_load_mb"]
    figures["programs_mb"] -= figures["pool_at_end_mb"]
    return figures


def run_child(mode: str, cache: pathlib.Path) -> dict[str, float]:
    """`measure` in a process of its own, whose compiled programs are in `cache`."""
    env = os.environ | {
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "PAGED_JAX_LOG_LEVEL": "ERROR",
        STARTED: str(time.time()),
    }
    command = [sys.executable, __file__, f"--child={mode}", *sys.argv[1:]]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def run_mode(mode: str) -> dict[str, dict[str, float]]:
    """Medians of cold and of warm starts."""
    runs: dict[str, list[dict[str, float]]] = {"cold": [], "warm": []}
    for _ in range(ROUNDS.value):
        cache = pathlib.Path(tempfile.mkdtemp(prefix="bench_start_"))
        try:
            runs["cold"].append(run_child(mode, cache))
            runs["warm"].append(run_child(mode, cache))
        finally:
            shutil.rmtree(cache)
    return {
        kind: {name: statistics.median(run[name] for run in found) for name in found[0]}
        for kind, found in runs.items()
    }


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    if CHILD.value is not None:
        print(json.dumps(measure(CHILD.value)))
        return
    # Builds the C++ kernels and fetches the model, and brings both into the system's cache.
    with tempfile.TemporaryDirectory() as folder:
        run_child("on demand", pathlib.Path(folder))
    figures = {mode: run_mode(mode) for mode in MODES}
    columns = [(mode, kind) for mode in MODES for kind in ("cold", "warm")]
    print(f"{'':40}" + "".join(f"{mode + ', ' + kind:>18}" for mode, kind in columns))
    for name, title in ROWS.items():
        cells = (f"{figures[mode][kind][name]:18.1f}" for mode, kind in columns)
        print(f"{title:40}" + "".join(cells))
    print(
        json.dumps(
            {
                **figures,
                "rounds": ROUNDS.value,
                "num_prompts": NUM_PROMPTS.value,
                "pool_mib": POOL_MB.value,
                "quantization": QUANTIZATION.value,
                "kv_cache_dtype": KV_CACHE_DTYPE.value,
                "machine": platform.machine(),
                "cores": os.cpu_count(),
                "python": platform.python_version(),
            }
        )
    )


if __name__ == "__main__":
    app.run(main)
