"""The program `paged-jax-generate` (also scripts/generate.py): prompts in, JSONL rows out."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import time
from collections.abc import Iterator
from typing import IO, Any

from absl import app, flags
from tqdm.auto import tqdm

from paged_jax.config import EngineConfig
from paged_jax.demo_model import demo_model_path
from paged_jax.llm import LLM
from paged_jax.offline import read_lines, serve_lines
from paged_jax.outputs import RequestOutput
from paged_jax.report import report
from paged_jax.sampling_params import SamplingParams

MODEL = flags.DEFINE_string(
    "model",
    "demo",
    'A .gguf file, a Hugging Face folder, a hub id ("org/name"), or "demo": SmolLM2-135M-Instruct.',
)
INPUT = flags.DEFINE_string(
    "input", "-", "File with one prompt a line: .jsonl, or any other for plain text. - is standard "
    "input.",
)  # fmt: skip
OUTPUT = flags.DEFINE_string("output", "-", "File for the rows, in JSONL. - is standard output.")
FORMAT = flags.DEFINE_enum(
    "format", "auto", ["auto", "jsonl", "text"], "Of the input; auto goes by the file's name (and "
    "takes standard input for text).",
)  # fmt: skip
FIELD = flags.DEFINE_string(
    "field", None, "JSON field that holds the prompt; by default the first of messages, prompt, "
    "prompt_token_ids, turns, question, text. Of a list of strings the first is taken.",
)  # fmt: skip
CHAT = flags.DEFINE_bool(
    "chat", True, "Send plain prompts through the model's chat template; --nochat completes them "
    "as they are.",
)  # fmt: skip
MAX_TOKENS = flags.DEFINE_integer("max_tokens", 256, "Most output tokens of a prompt.")
MIN_TOKENS = flags.DEFINE_integer("min_tokens", 0, "Fewest output tokens of a prompt.")
TEMPERATURE = flags.DEFINE_float("temperature", 0.0, "0 is greedy, at most 2.")
TOP_P = flags.DEFINE_float("top_p", 1.0, "Keep the likeliest tokens of this total probability.")
TOP_K = flags.DEFINE_integer("top_k", 0, "Keep the k likeliest tokens; 0 keeps all.")
MIN_P = flags.DEFINE_float("min_p", 0.0, "Keep tokens this share as likely as the likeliest.")
N = flags.DEFINE_integer("n", 1, "Outputs a prompt.")
SEED = flags.DEFINE_integer("seed", None, "Of every prompt; by default each has its own.")
STOP = flags.DEFINE_multi_string("stop", [], "Text that ends an output; may be given again.")
IGNORE_EOS = flags.DEFINE_bool("ignore_eos", False, "Go on after the end-of-sequence token.")
LOGPROBS = flags.DEFINE_integer("logprobs", None, "Likeliest tokens to report at each position.")
DTYPE = flags.DEFINE_enum("dtype", "auto", ["auto", "float32", "bfloat16"], "Of weights and cache.")
MAX_MODEL_LEN = flags.DEFINE_integer("max_model_len", None, "Longest sequence, in tokens.")
MAX_NUM_SEQS = flags.DEFINE_integer("max_num_seqs", None, "Most sequences in a step.")
MAX_NUM_BATCHED_TOKENS = flags.DEFINE_integer(
    "max_num_batched_tokens", None, "Most tokens in a step."
)
KV_CACHE_MEMORY_BYTES = flags.DEFINE_integer("kv_cache_memory_bytes", None, "Size of the KV pool.")
BLOCK_SIZE = flags.DEFINE_integer("block_size", 16, "Tokens a block.")
PREFIX_CACHING = flags.DEFINE_bool("enable_prefix_caching", True, "Share blocks of equal prefixes.")
REPORT = flags.DEFINE_bool("report", True, "End with a short report on standard error.")


def generate() -> None:
    """Entry point of the console script."""
    app.run(main)


def main(argv: list[str]) -> int | None:
    """Serves every line of the input; returns 1 if a row carries an error."""
    logging.getLogger("jax").setLevel(logging.WARNING)  # Absl's handler shows all of it.
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}; use --input=FILE")
    try:
        defaults = SamplingParams(
            n=N.value,
            temperature=TEMPERATURE.value,
            top_p=TOP_P.value,
            top_k=TOP_K.value,
            min_p=MIN_P.value,
            max_tokens=MAX_TOKENS.value,
            min_tokens=MIN_TOKENS.value,
            seed=SEED.value,
            stop=STOP.value,
            ignore_eos=IGNORE_EOS.value,
            logprobs=LOGPROBS.value,
        )
        options = _engine_options()
        source = _open(INPUT.value, sys.stdin, "r")
    except (ValueError, OSError) as error:
        raise app.UsageError(str(error)) from None
    is_json = FORMAT.value == "jsonl" or (FORMAT.value == "auto" and _named_json(INPUT.value))
    with source as lines:
        try:
            model = demo_model_path() if MODEL.value == "demo" else MODEL.value
            llm = LLM(model, **options)
        except (ValueError, OSError, RuntimeError) as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            return 2
        with _open(OUTPUT.value, sys.stdout, "w") as sink, Bar() as bar:
            started = time.perf_counter()
            num_rows, num_errors = serve_lines(
                llm,
                read_lines(lines, defaults, is_json=is_json, field=FIELD.value),
                lambda row: _write(sink, row),
                chat=CHAT.value,
                on_output=bar.update,
            )
            seconds = time.perf_counter() - started
    if REPORT.value:
        print(report(llm, seconds), file=sys.stderr)
    if num_errors:
        print(f"{num_errors} of {num_rows} rows carry an error", file=sys.stderr)
    return 1 if num_errors else None


class Bar:
    """A bar that counts finished prompts and shows the speed of the output."""

    def __init__(self):
        self._bar = tqdm(desc="Processed prompts", unit=" prompts", file=sys.stderr)
        self._num_output = 0

    def update(self, output: RequestOutput) -> None:
        self._num_output += sum(len(o.token_ids) for o in output.outputs)
        elapsed = self._bar.format_dict["elapsed"]
        if elapsed:
            speed = self._num_output / elapsed
            self._bar.set_postfix_str(f"output: {speed:.1f} toks/s", refresh=False)
        self._bar.update(1)

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()


def _engine_options() -> dict[str, Any]:
    options = {
        "dtype": DTYPE.value,
        "max_model_len": MAX_MODEL_LEN.value,
        "max_num_seqs": MAX_NUM_SEQS.value,
        "max_num_batched_tokens": MAX_NUM_BATCHED_TOKENS.value,
        "kv_cache_memory_bytes": KV_CACHE_MEMORY_BYTES.value,
        "block_size": BLOCK_SIZE.value,
        "enable_prefix_caching": PREFIX_CACHING.value,
    }
    EngineConfig(**options)  # Wrong values are refused before a model is loaded.
    return options


def _named_json(name: str) -> bool:
    return name.endswith((".jsonl", ".json", ".ndjson"))


@contextlib.contextmanager
def _opened(file: IO[str], *, close: bool) -> Iterator[IO[str]]:
    try:
        yield file
    finally:
        if close:
            file.close()


def _open(name: str, standard: IO[str], mode: str) -> contextlib.AbstractContextManager[IO[str]]:
    if name == "-":
        return _opened(standard, close=False)
    # A byte that is no UTF-8 spoils its own line, not the run: the tokenizer refuses it by name.
    return _opened(open(name, mode, encoding="utf-8", errors="surrogateescape"), close=True)


def _write(sink: IO[str], row: dict[str, Any]) -> None:
    sink.write(json.dumps(row, ensure_ascii=False) + "\n")
    sink.flush()
