"""A tiny random model with a byte-level tokenizer, and engines of it that compile in a second."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from model_files import tiny_config

from paged_jax import LLM, SamplingParams
from paged_jax.models import llama
from paged_jax.models.loader import FolderSource, LoadedModel
from paged_jax.models.params import init_params

VOCAB_SIZE = 260
EOS = 257
CHAT_TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)


class ByteTokenizer:
    """256 bytes, <s> 256, </s> 257, two spare ids; shaped like a transformers tokenizer."""

    all_special_ids = (256, 257)
    bos_token, eos_token = "<s>", "</s>"
    bos_token_id, eos_token_id = 256, EOS
    chat_template = CHAT_TEMPLATE

    def __len__(self) -> int:
        return VOCAB_SIZE

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        special = {} if skip_special_tokens else {256: b"<s>", 257: b"</s>"}
        pieces = [bytes([i]) if i < 256 else special.get(i, b"") for i in ids]
        return b"".join(pieces).decode("utf-8", errors="replace")


def tiny_model(*, seed: int = 0, dtype: str = "float32", **overrides: Any) -> LoadedModel:
    """A random Llama of two layers over bytes; greedy outputs vary, since weights are large."""
    config = tiny_config(**{"vocab_size": VOCAB_SIZE, **overrides})
    params = init_params(llama.param_specs(config), jax.random.key(seed), dtype)
    params = jax.tree.map(lambda w: w * 8 if w.ndim > 1 else w, params)
    return LoadedModel(
        config=config,
        params=params,
        dtype=dtype,
        eos_token_ids=(EOS,),
        bos_token_id=256,
        generation_defaults={},
        tokenizer_source=FolderSource(path=None),  # pyright: ignore[reportArgumentType]
        name="tiny",
    )


def tiny_llm(model: LoadedModel | None = None, **options: Any) -> LLM:
    """An engine of a tiny model, with few shapes unless the options say otherwise."""
    defaults = dict(
        num_gpu_blocks_override=200,
        block_size=4,
        max_model_len=128,
        max_num_seqs=8,
        max_num_batched_tokens=32,
    )
    if "kv_cache_memory_bytes" in options:
        del defaults["num_gpu_blocks_override"]
    options = {**defaults, **options}
    if not options.get("skip_tokenizer_init"):
        options.setdefault("tokenizer", ByteTokenizer())
    return LLM(model or tiny_model(), **options)


GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def check_idle(llm: LLM) -> None:
    engine = llm.engine
    assert not engine.has_unfinished()
    assert engine.scheduler.blocks.pool.num_used_blocks == 0
    engine.scheduler.check_integrity()


def prompts_of(lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, n).tolist() for n in lengths]


def tokens_of(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def run(llm: LLM, prompts, params: SamplingParams | list[SamplingParams] = GREEDY):
    return llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False
    )
