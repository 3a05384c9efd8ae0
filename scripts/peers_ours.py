"""paged-jax as a worker of bench_peers.py."""

import logging
import platform
import time
from typing import Any

import jax
from peers_protocol import serve

from paged_jax import LLM, SamplingParams


class Ours:
    """settings: the model's path, and "options" of `LLM`."""

    def __init__(self, settings: dict[str, Any]):
        logging.getLogger("jax").setLevel(logging.WARNING)
        self._options = settings["options"]
        self._llm = LLM(settings["model"], skip_tokenizer_init=True, **self._options)

    def info(self) -> dict[str, Any]:
        return {
            "jax": jax.__version__,
            "python": platform.python_version(),
            "options": self._options,
            "num_blocks": self._llm.engine.config.num_blocks,
            "max_num_batched_tokens": self._llm.engine.config.max_num_batched_tokens,
        }

    def generate(
        self, prompts: list[list[int]], max_tokens: int, ignore_eos: bool
    ) -> dict[str, Any]:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=ignore_eos)
        self._llm.reset_prefix_cache()
        before = self._llm.get_metrics()
        started = time.perf_counter()
        outputs = self._llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False
        )
        seconds = time.perf_counter() - started
        after = self._llm.get_metrics()

        def counted(name: str) -> int:
            return after[name] - before[name]

        return {
            "seconds": seconds,
            "token_ids": [output.outputs[0].token_ids for output in outputs],
            "prefix_hit_tokens": counted("prefix_cache_hits"),
            "draft_tokens": counted("spec_decode_num_draft_tokens"),
            "accepted_tokens": counted("spec_decode_num_accepted_tokens"),
        }


if __name__ == "__main__":
    serve(Ours)
