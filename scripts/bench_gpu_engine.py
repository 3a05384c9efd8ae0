"""The engine end to end with random weights, for `bench_gpu`."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from paged_jax import LLM, SamplingParams
from paged_jax.models.loader import FolderSource, LoadedModel
from paged_jax.models.params import init_params
from paged_jax.models.presets import LLAMA3_8B
from paged_jax.models.registry import model_module

NUM_PROMPTS, PROMPT_TOKENS, OUTPUT_TOKENS = 64, 512, 128


def run(*, is_tiny: bool) -> Iterator[dict[str, Any]]:
    """Tokens a second of a random Llama-3-8B in bfloat16: 64 prompts of 512 tokens, 128 out each.

    Yields first the seconds until the engine had answered once, everything compiled; then after
    each further run the best figures so far.

    is_tiny: one small layer, few tokens.
    """
    config, counts = LLAMA3_8B, (NUM_PROMPTS, PROMPT_TOKENS, OUTPUT_TOKENS)
    if is_tiny:
        config = dataclasses.replace(
            config, vocab_size=256, hidden_size=64, intermediate_size=64, num_layers=1,
            num_heads=4, num_kv_heads=1, max_position_embeddings=128,
        )  # fmt: skip
        counts = (2, 20, 4)
    num_prompts, prompt_tokens, output_tokens = counts
    specs = model_module(config).param_specs(config)
    model = LoadedModel(
        config=config,
        params=init_params(specs, jax.random.key(0), "bfloat16"),
        dtype="bfloat16",
        eos_token_ids=(),
        bos_token_id=None,
        generation_defaults={},
        tokenizer_source=FolderSource(path=None),  # pyright: ignore[reportArgumentType]
        name="random",
    )
    limits: dict[str, Any] = dict(max_num_seqs=num_prompts, warmup=False)
    limits["max_model_len"] = 128 if is_tiny else 1024
    if is_tiny:
        limits["num_gpu_blocks_override"] = 32
    start = time.perf_counter()
    with LLM(model, skip_tokenizer_init=True, **limits) as llm:
        rng = np.random.default_rng(0)
        params = SamplingParams(
            temperature=0, max_tokens=output_tokens, ignore_eos=True, detokenize=False
        )

        def generate() -> float:
            prompts = rng.integers(0, config.vocab_size, (num_prompts, prompt_tokens)).tolist()
            begin = time.perf_counter()
            llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
            return time.perf_counter() - begin

        generate()  # compiles
        yield dict(ready_seconds=time.perf_counter() - start)
        seconds = float("inf")
        for _ in range(2):
            seconds = min(seconds, generate())
            yield dict(
                output_tokens_per_second=num_prompts * output_tokens / seconds,
                total_tokens_per_second=num_prompts * (prompt_tokens + output_tokens) / seconds,
                seconds=seconds,
            )
