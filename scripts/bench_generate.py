"""Speed of the whole engine on random prompts: prefill, decode, and where a step's time goes.

    python scripts/bench_generate.py --num_prompts=32 --prompt_len=128 --output_len=64

Greedy, without stopping at end-of-sequence, warmed up by one round first. The last line is one JSON
object. Rates: `output_tokens_per_second` is output tokens over the whole time; prefill and decode
rates are tokens computed in steps of that kind over the time of those steps.
"""

import json
import logging
import platform
import resource
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from paged_jax import LLM, SamplingParams, demo_model_path, make_sampling, sample
from paged_jax.config import KV_CACHE_DTYPES

MODEL = flags.DEFINE_string("model", "demo", 'A .gguf file, folder or hub id, or "demo".')
NUM_PROMPTS = flags.DEFINE_integer("num_prompts", 32, "Requests.", lower_bound=1)
PROMPT_LEN = flags.DEFINE_integer("prompt_len", 128, "Tokens a prompt.", lower_bound=1)
OUTPUT_LEN = flags.DEFINE_integer("output_len", 64, "Tokens an output.", lower_bound=1)
MAX_NUM_SEQS = flags.DEFINE_integer("max_num_seqs", 32, "Most sequences in a step.", lower_bound=1)
DTYPE = flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "Of the weights.")
QUANTIZATION = flags.DEFINE_enum(
    "quantization", None, ["int8", "int8_weight_only", "int4"], "Of the weights."
)
KV_CACHE_DTYPE = flags.DEFINE_enum(
    "kv_cache_dtype", "auto", KV_CACHE_DTYPES, "Of the KV cache; auto is the weights' dtype."
)
DECODE_LOOKAHEAD = flags.DEFINE_integer(
    "decode_lookahead", None, "Tokens decoded ahead of what was read; the engine's choice if unset."
)
ROUNDS = flags.DEFINE_integer("rounds", 3, "Measured rounds; medians are reported.", lower_bound=1)


def run_round(llm: LLM, rng: np.random.Generator) -> dict[str, float]:
    """One round of fresh random prompts; figures from the engine's own step times."""
    vocab_size = llm.model.config.vocab_size
    prompts = rng.integers(0, vocab_size, (NUM_PROMPTS.value, PROMPT_LEN.value)).tolist()
    params = SamplingParams(temperature=0, max_tokens=OUTPUT_LEN.value, ignore_eos=True)
    steps = llm.engine.metrics.steps
    before = {kind: vars(times).copy() for kind, times in steps.items()}
    started = time.perf_counter()
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False
    )
    seconds = time.perf_counter() - started
    num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    assert num_tokens == NUM_PROMPTS.value * OUTPUT_LEN.value
    figures = {"output_tokens_per_second": num_tokens / seconds, "seconds": seconds}
    host = device = 0.0
    for kind, times in steps.items():
        delta = {name: value - before[kind][name] for name, value in vars(times).items()}
        step_host = delta["schedule_seconds"] + delta["process_seconds"]
        total = step_host + delta["device_seconds"]
        figures[f"{kind}_tokens_per_second"] = delta["num_tokens"] / total if total else 0.0
        figures[f"{kind}_steps"] = delta["num_steps"]
        figures[f"{kind}_ms_per_step"] = 1e3 * total / max(delta["num_steps"], 1)
        host, device = host + step_host, device + delta["device_seconds"]
    figures["host_seconds"], figures["device_seconds"] = host, device
    return figures


def sampling_seconds(vocab_size: int, num_seqs: int) -> float:
    """Seconds of the sampler alone for a full greedy batch; it is part of the device's time."""
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(num_seqs, vocab_size)), jnp.float32)
    jitted, batch = jax.jit(sample), make_sampling([], [], [], num_seqs=num_seqs)
    times = []
    for _ in range(12):
        started = time.perf_counter()
        jax.block_until_ready(jitted(logits, batch))
        times.append(time.perf_counter() - started)
    return float(np.median(times[2:]))


def peak_rss_bytes() -> int:
    """Largest resident size of this process so far (Linux counts it in KiB, macOS in bytes)."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def main(argv: list[str]) -> None:
    logging.getLogger("jax").setLevel(logging.WARNING)
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    model = demo_model_path() if MODEL.value == "demo" else MODEL.value
    length = PROMPT_LEN.value + OUTPUT_LEN.value
    started = time.perf_counter()
    llm = LLM(
        model,
        dtype=DTYPE.value,
        quantization=QUANTIZATION.value,
        kv_cache_dtype=KV_CACHE_DTYPE.value,
        decode_lookahead=DECODE_LOOKAHEAD.value,
        max_model_len=length,
        max_num_seqs=MAX_NUM_SEQS.value,
        skip_tokenizer_init=True,
    )
    ready = time.perf_counter() - started
    rng = np.random.default_rng(0)
    run_round(llm, rng)
    rounds = [run_round(llm, rng) for _ in range(ROUNDS.value)]
    figures = {name: float(np.median([r[name] for r in rounds])) for name in rounds[0]}
    num_steps = figures["prefill_steps"] + figures["decode_steps"]
    seats = llm.engine.runner.buckets.num_seqs[-1]
    sampling = sampling_seconds(llm.model.config.vocab_size, seats) * num_steps
    for name, value in figures.items():
        print(f"{name:28} {value:12.3f}")
    print(
        json.dumps(
            {
                "output_tokens_per_second": figures["output_tokens_per_second"],
                "prefill_tokens_per_second": figures["prefill_tokens_per_second"],
                "decode_tokens_per_second": figures["decode_tokens_per_second"],
                "peak_rss_bytes": peak_rss_bytes(),
                "step_seconds": {
                    "host": figures["host_seconds"],
                    "device": figures["device_seconds"] - sampling,
                    "sampling": sampling,
                },
                "prefill_ms_per_step": figures["prefill_ms_per_step"],
                "decode_ms_per_step": figures["decode_ms_per_step"],
                "ready_seconds": ready,
                "rounds": ROUNDS.value,
                "num_prompts": NUM_PROMPTS.value,
                "prompt_len": PROMPT_LEN.value,
                "output_len": OUTPUT_LEN.value,
                "max_num_seqs": MAX_NUM_SEQS.value,
                "dtype": DTYPE.value,
                "quantization": QUANTIZATION.value,
                "kv_cache_dtype": KV_CACHE_DTYPE.value,
                "decode_lookahead": llm.engine.config.decode_lookahead,
                "backend": jax.default_backend(),
                "jax": jax.__version__,
                "python": platform.python_version(),
            }
        )
    )


if __name__ == "__main__":
    app.run(main)
