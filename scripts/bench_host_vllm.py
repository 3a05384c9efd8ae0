"""vLLM's scheduler and block manager under the load of bench_host.py, in an interpreter of its own.

    python scripts/bench_host_vllm.py NUM_SEQS NUM_WINDOWS

Needs vLLM (written against 0.32) and nothing of paged-jax; bench_host.py starts it. Timed are
`Scheduler.schedule` and `Scheduler.update_from_output`, in windows of 16 steps. The last line is
one JSON object with the figures that bench_host.py has for its own.
"""
# pyright: reportMissingImports=false

import json
import pathlib
import sys
import tempfile
import time

import numpy as np
import torch
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

PROMPT_TOKENS = 128
BLOCK_SIZE = 16
MAX_MODEL_LEN = 8192
VOCAB_SIZE = 256
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_MODEL_LEN,
    "vocab_size": VOCAB_SIZE,
}


def make_scheduler(num_seqs: int, num_blocks: int) -> Scheduler:
    """A scheduler with prefix caching for a tiny Llama, without a worker."""
    with tempfile.TemporaryDirectory() as folder:
        pathlib.Path(folder, "config.json").write_text(json.dumps(MODEL))
        model = ModelConfig(
            model=folder, skip_tokenizer_init=True, dtype="float16", max_model_len=MAX_MODEL_LEN
        )
    cache = CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=True)
    config = VllmConfig(
        model_config=model,
        cache_config=cache,
        scheduler_config=SchedulerConfig(
            max_num_seqs=num_seqs,
            max_num_batched_tokens=MAX_MODEL_LEN,
            max_model_len=MAX_MODEL_LEN,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            async_scheduling=False,
        ),
        device_config=DeviceConfig("cpu"),
    )
    spec = FullAttentionSpec(
        block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=torch.float32
    )
    cache.num_gpu_blocks = num_blocks
    return Scheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks=num_blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
        ),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK_SIZE,
        log_stats=False,
    )


def run_step(scheduler: Scheduler, rng: np.random.Generator) -> tuple[float, float]:
    """One step; seconds of its two halves."""
    started = time.perf_counter()
    step = scheduler.schedule()
    scheduled = time.perf_counter()
    ids = list(step.num_scheduled_tokens)
    tokens = [[token] for token in rng.integers(97, 122, len(ids)).tolist()]
    for i, request_id in enumerate(ids):  # A prompt computed in part samples nothing.
        if scheduler.requests[request_id].is_prefill_chunk:
            tokens[i] = []
    result = ModelRunnerOutput(
        req_ids=ids,
        req_id_to_index={request_id: i for i, request_id in enumerate(ids)},
        sampled_token_ids=tokens,
        logprobs=None,
        prompt_logprobs_dict={},
        pooler_output=[],
    )
    ran = time.perf_counter()
    scheduler.update_from_output(step, result)
    return scheduled - started, time.perf_counter() - ran


def main() -> None:
    num_seqs, num_windows = int(sys.argv[1]), int(sys.argv[2])
    num_tokens = PROMPT_TOKENS + (num_windows + 1) * BLOCK_SIZE + num_seqs
    scheduler = make_scheduler(num_seqs, num_seqs * (num_tokens // BLOCK_SIZE + 1) + 1000)
    rng = np.random.default_rng(0)
    init_none_hash(sha256)
    hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
    params = SamplingParams(temperature=0.7, top_p=0.9, ignore_eos=True, max_tokens=MAX_MODEL_LEN)
    for i in range(num_seqs):
        prompt = rng.integers(0, VOCAB_SIZE, PROMPT_TOKENS).tolist()
        scheduler.add_request(
            Request(str(i), prompt, params, pooling_params=None, block_hasher=hasher)
        )
    while len(scheduler.running) < num_seqs:
        run_step(scheduler, rng)
    for _ in range(BLOCK_SIZE):
        run_step(scheduler, rng)
    steps = [run_step(scheduler, rng) for _ in range(num_windows * BLOCK_SIZE)]
    windows = 1e6 * np.array(steps).reshape(num_windows, BLOCK_SIZE, 2)
    totals = windows.sum(axis=2)
    schedule, update = np.median(windows.mean(axis=1), axis=0).tolist()
    figures = {
        "vllm_us_per_step": float(np.median(totals.mean(axis=1))),
        "vllm_min_us_per_step": float(totals.min(axis=0).mean()),
        "vllm_schedule_us": schedule,
        "vllm_update_us": update,
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
