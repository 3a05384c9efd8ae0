"""transformers on a CPU in float32 as a worker of bench_peers.py."""
# pyright: reportMissingImports=false

import platform
import time
from typing import Any

import torch
import transformers
from peers_protocol import serve


class TransformersPeer:
    """settings: "folder", the model in Hugging Face's form; num_threads."""

    def __init__(self, settings: dict[str, Any]):
        torch.set_num_threads(settings["num_threads"])
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            settings["folder"], dtype=torch.float32
        ).eval()
        self._eos = self._model.generation_config.eos_token_id

    def info(self) -> dict[str, Any]:
        return {
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "dtype": str(self._model.dtype),
            "attention": self._model.config._attn_implementation,
            "num_threads": torch.get_num_threads(),
        }

    def generate(
        self, prompts: list[list[int]], max_tokens: int, ignore_eos: bool
    ) -> dict[str, Any]:
        ids = torch.tensor(prompts)  # Prompts of one call are of one length.
        num_prompt_tokens = ids.shape[1]
        # Not min_new_tokens, which would forbid the token instead of going on after it.
        self._model.generation_config.eos_token_id = None if ignore_eos else self._eos
        started = time.perf_counter()
        with torch.inference_mode():
            output = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=max_tokens,
                pad_token_id=0,
            )
        seconds = time.perf_counter() - started
        return {"seconds": seconds, "token_ids": output[:, num_prompt_tokens:].tolist()}


if __name__ == "__main__":
    serve(TransformersPeer)
