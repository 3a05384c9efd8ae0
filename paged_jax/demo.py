"""The demo: two dozen prompts, answered together by SmolLM2-135M-Instruct."""

from __future__ import annotations

import argparse
import importlib.resources
import json
import pathlib
import sys
import textwrap
import time

from paged_jax.demo_model import demo_model_path
from paged_jax.llm import LLM
from paged_jax.outputs import CompletionOutput
from paged_jax.report import report
from paged_jax.sampling_params import SamplingParams

_NUM_SHOWN = 6
_WIDTH = 80
_NEXT = """
A model of 135M parameters writes fluently and is often wrong: it shows the engine, not knowledge.
Your own prompts:   echo "Why is the sky blue?" | {python} scripts/generate.py
In Python:          the example "In a notebook" in README.md"""


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
    try:
        params = SamplingParams(temperature=0, max_tokens=args.max_tokens)
        # Few of the step shapes are needed: each is compiled when it is.
        llm = LLM(demo_model_path(), max_model_len=2048, warmup=False)
    except (ValueError, OSError, RuntimeError, ImportError) as error:
        sys.exit(f"{type(error).__name__}: {error}")
    loaded = time.perf_counter()
    conversations = demo_conversations()
    outputs = llm.chat(conversations, params)
    seconds = time.perf_counter() - loaded
    for messages, output in list(zip(conversations, outputs, strict=True))[: max(args.show, 0)]:
        print(f"\n{_shown(messages[-1]['content'], output.outputs[0])}")
    print(f"\nSmolLM2-135M-Instruct, ready in {loaded - started:.1f} s")
    print(report(llm, seconds))
    print(_NEXT.format(python=_python()))


def _shown(question: str, answer: CompletionOutput) -> str:
    """A question and its answer, wrapped; an answer that max_tokens cut off ends in [...]."""
    text = answer.text.strip() + (" [...]" if answer.finish_reason == "length" else "")
    asked = textwrap.fill(question, _WIDTH, initial_indent="> ", subsequent_indent="> ")
    lines = [textwrap.fill(line, _WIDTH, replace_whitespace=False) for line in text.splitlines()]
    return "\n".join([asked, *lines])


def _python() -> str:
    """This Python as one would type it here."""
    try:
        return str(pathlib.Path(sys.executable).relative_to(pathlib.Path.cwd()))
    except ValueError:
        return sys.executable


if __name__ == "__main__":
    main()
