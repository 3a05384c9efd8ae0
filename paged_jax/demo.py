"""The demo: two dozen prompts, answered together by SmolLM2-135M-Instruct."""

from __future__ import annotations

import argparse
import importlib.resources
import json
import time

from paged_jax.demo_model import demo_model_path
from paged_jax.llm import LLM
from paged_jax.report import report
from paged_jax.sampling_params import SamplingParams

_NUM_SHOWN = 6


def demo_conversations() -> list[list[dict[str, str]]]:
    """The shipped prompts; eight of them share a system prompt, and so its blocks."""
    text = importlib.resources.files("paged_jax").joinpath("demo_prompts.jsonl").read_text("utf-8")
    return [json.loads(line)["messages"] for line in text.splitlines()]


def main() -> None:
    """Loads the model, answers the prompts, prints some answers and a report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--max_tokens", type=int, default=96, help="most tokens of an answer")
    parser.add_argument("--show", type=int, default=_NUM_SHOWN, help="answers to print")
    args = parser.parse_args()
    started = time.perf_counter()
    llm = LLM(demo_model_path(), max_model_len=2048)
    loaded = time.perf_counter()
    conversations = demo_conversations()
    outputs = llm.chat(conversations, SamplingParams(temperature=0, max_tokens=args.max_tokens))
    seconds = time.perf_counter() - loaded
    for messages, output in list(zip(conversations, outputs, strict=True))[: args.show]:
        print(f"\n> {messages[-1]['content']}\n{output.outputs[0].text.strip()}")
    print(f"\nSmolLM2-135M-Instruct, ready in {loaded - started:.1f} s")
    print(report(llm, seconds))


if __name__ == "__main__":
    main()
