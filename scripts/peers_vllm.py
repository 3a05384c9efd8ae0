"""vLLM on a CPU (written against 0.32) as a worker of bench_peers.py."""
# pyright: reportMissingImports=false

import platform
import time
from typing import Any

import torch
import vllm
from peers_protocol import serve


class VllmPeer:
    """settings: "folder", the model in Hugging Face's form; max_model_len, max_num_seqs."""

    def __init__(self, settings: dict[str, Any]):
        self._settings = settings
        self._llm = vllm.LLM(
            settings["folder"],
            dtype="float32",
            max_model_len=settings["max_model_len"],
            max_num_seqs=settings["max_num_seqs"],
            skip_tokenizer_init=True,
            enable_prefix_caching=True,
            disable_log_stats=False,  # Without them it counts no prefix hits.
        )

    def info(self) -> dict[str, Any]:
        config = self._llm.llm_engine.vllm_config
        return {
            "vllm": vllm.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "dtype": "float32",
            "compilation_mode": str(config.compilation_config.mode),
            "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
            "block_size": config.cache_config.block_size,
            "num_blocks": config.cache_config.num_gpu_blocks,
        }

    def generate(
        self, prompts: list[list[int]], max_tokens: int, ignore_eos: bool
    ) -> dict[str, Any]:
        params = vllm.SamplingParams(
            temperature=0, max_tokens=max_tokens, ignore_eos=ignore_eos, detokenize=False
        )
        self._llm.reset_prefix_cache()
        started = time.perf_counter()
        outputs = self._llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False
        )
        seconds = time.perf_counter() - started
        return {
            "seconds": seconds,
            "token_ids": [list(output.outputs[0].token_ids) for output in outputs],
            "prefix_hit_tokens": sum(output.num_cached_tokens or 0 for output in outputs),
        }


if __name__ == "__main__":
    serve(VllmPeer)
