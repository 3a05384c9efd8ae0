"""How well a model predicts texts, and what quantisation costs: mean negative log-likelihood.

    python scripts/eval_nll.py --input=gsm8k_test.jsonl --quantization=int8 --num_texts=100
    python scripts/eval_nll.py --input=gsm8k_test.jsonl --kv_cache_dtype=int8

Scores every token of each text but the first by `prompt_logprobs`, with the float32 model too, and
compares. Rows of the input are JSON objects; the texts are their fields (question and answer by
default), joined by a newline. The last line is one JSON object: mean NLL in nats a token of both,
their relative difference, and how often both find the same token the likeliest.
"""

import json
import logging
import pathlib
from typing import Any

from absl import app, flags

from paged_jax import LLM, SamplingParams, demo_model_path
from paged_jax.config import KV_CACHE_DTYPES

MODEL = flags.DEFINE_string("model", "demo", 'A .gguf file, folder or hub id, or "demo".')
INPUT = flags.DEFINE_string("input", None, "A file of JSON rows.", required=True)
FIELDS = flags.DEFINE_list("fields", ["question", "answer"], "Fields that make a text.")
NUM_TEXTS = flags.DEFINE_integer("num_texts", 100, "Rows to take.", lower_bound=1)
MAX_TOKENS = flags.DEFINE_integer("max_tokens", 400, "Longer texts are cut.", lower_bound=2)
QUANTIZATION = flags.DEFINE_enum(
    "quantization", None, ["int8", "int8_weight_only", "int4"], "Of what is compared with float32."
)
KV_CACHE_DTYPE = flags.DEFINE_enum(
    "kv_cache_dtype", "auto", KV_CACHE_DTYPES, "Of what is compared with float32."
)


def read_texts() -> list[str]:
    """The texts of the input's first rows."""
    lines = pathlib.Path(INPUT.value).read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines if line.strip()][: NUM_TEXTS.value]
    return ["\n".join(str(row[field]) for field in FIELDS.value) for row in rows]


def score(model: str, texts: list[str], **options: Any) -> list[tuple[float, int]]:
    """(log-probability, likeliest token) of every scored token of all texts, in order.

    options: of the LLM.
    """
    llm = LLM(
        model,
        dtype="float32",
        **options,
        max_model_len=MAX_TOKENS.value + 1,
        max_num_seqs=128,
        max_num_batched_tokens=256,
        warmup=False,
    )
    tokenizer = llm.get_tokenizer()
    assert tokenizer is not None
    prompts = [{"prompt_token_ids": tokenizer.encode(text)[: MAX_TOKENS.value]} for text in texts]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1, detokenize=False)
    scores = []
    for output in llm.generate(prompts, params):
        for entry in (output.prompt_logprobs or [])[1:]:
            assert entry is not None
            own = next(iter(entry.values()))
            likeliest = min(entry, key=lambda token_id, entry=entry: entry[token_id].rank)
            scores.append((own.logprob, likeliest))
    llm.close()
    return scores


def main(argv: list[str]) -> None:
    logging.getLogger("jax").setLevel(logging.WARNING)
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    if QUANTIZATION.value is None and KV_CACHE_DTYPE.value == "auto":
        raise app.UsageError("nothing to compare: give --quantization or --kv_cache_dtype")
    model = str(demo_model_path()) if MODEL.value == "demo" else MODEL.value
    texts = read_texts()
    options = {"quantization": QUANTIZATION.value, "kv_cache_dtype": KV_CACHE_DTYPE.value}
    plain, quantized = score(model, texts), score(model, texts, **options)
    nll, quantized_nll = (-sum(p for p, _ in s) / len(s) for s in (plain, quantized))
    same = sum(a == b for (_, a), (_, b) in zip(plain, quantized, strict=True))
    figures = {
        **options,
        "num_texts": len(texts),
        "num_tokens": len(plain),
        "nll_float32": nll,
        "nll_quantized": quantized_nll,
        "relative_difference": quantized_nll / nll - 1,
        "greedy_agreement": same / len(plain),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    app.run(main)
