"""The program `paged-jax-generate` (also scripts/generate.py): prompts in, JSONL rows out."""

from __future__ import annotations

import json
import logging
import os
import stat
import sys
import time
from typing import IO, Any

import absl.logging
from absl import app, flags
from tqdm.auto import tqdm

from paged_jax.config import KV_CACHE_DTYPES, EngineConfig
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
DTYPE = flags.DEFINE_enum("dtype", "auto", ["auto", "float32", "bfloat16"], "Of the weights.")
QUANTIZATION = flags.DEFINE_enum(
    "quantization", None, ["int8", "int8_weight_only", "int4"], "Store the weights' matrices so."
)
KV_CACHE_DTYPE = flags.DEFINE_enum(
    "kv_cache_dtype", "auto", KV_CACHE_DTYPES, "Of the KV cache; auto is the weights' dtype."
)
TENSOR_PARALLEL_SIZE = flags.DEFINE_integer(
    "tensor_parallel_size", 1, "Devices that the model is cut over."
)
DATA_PARALLEL_SIZE = flags.DEFINE_integer(
    "data_parallel_size", 1, "How many times the model is there, on devices of its own each."
)
MAX_MODEL_LEN = flags.DEFINE_integer("max_model_len", None, "Longest sequence, in tokens.")
MAX_NUM_SEQS = flags.DEFINE_integer("max_num_seqs", None, "Most sequences in a step.")
MAX_NUM_BATCHED_TOKENS = flags.DEFINE_integer(
    "max_num_batched_tokens", None, "Most tokens in a step."
)
KV_CACHE_MEMORY_BYTES = flags.DEFINE_integer("kv_cache_memory_bytes", None, "Size of the KV pool.")
BLOCK_SIZE = flags.DEFINE_integer("block_size", 16, "Tokens a block.")
PREEMPTION_MODE = flags.DEFINE_enum(
    "preemption_mode",
    "auto",
    ["auto", "recompute", "swap"],
    "For a prompt whose blocks are needed.",
)
SWAP_SPACE_BYTES = flags.DEFINE_integer("swap_space_bytes", 0, "Host memory for swapping.")
HOST_PREFIX_CACHE = flags.DEFINE_bool(
    "enable_host_prefix_cache", False, "Keep evicted prefixes in the swap space."
)
PREFIX_CACHING = flags.DEFINE_bool("enable_prefix_caching", True, "Share blocks of equal prefixes.")
REPORT = flags.DEFINE_bool("report", True, "End with a short report on standard error.")


_USAGE = """Answers prompts with a language model, many at once.

    %s --input=prompts.jsonl --output=answers.jsonl --max_tokens=128
    echo "Why is the sky blue?" | %s

Reads one prompt a line and writes one JSON row for each as it finishes; a prompt that cannot be
read or served gets a row that says why. Exit status: 0, or 1 if any row carries an error, or 2 if
the run could not be begun or went wrong.
"""
# What a shell reports of a program that was ended by SIGINT, or by SIGPIPE.
_INTERRUPTED, _BROKEN_PIPE = 130, 141


def generate() -> None:
    """Entry point of the console script."""
    # --help shows the main module's docstring and key flags, and the main module is a stub.
    sys.modules["__main__"].__doc__ = _USAGE
    for flag in flags.FLAGS.get_flags_for_module(__name__):
        flags.FLAGS.register_key_flag_for_module(sys.argv[0], flag)
    app.run(main, flags_parser=_parse_flags)


def main(argv: list[str]) -> int | None:
    """Serves every line of the input; returns the exit status."""
    set_up_logging()
    if len(argv) > 1:
        return _refuse(f"unexpected arguments {argv[1:]}; use --input=FILE")
    try:
        defaults = sampling_params()
        options = engine_options()
        lines = _open_input(INPUT.value)
        sink = _open_output(OUTPUT.value, lines)
        llm = LLM(demo_model_path() if MODEL.value == "demo" else MODEL.value, **options)
    except (ValueError, OSError, RuntimeError, ImportError) as error:
        return _refuse(str(error))
    except KeyboardInterrupt:
        return _refuse("interrupted before the first row", status=_INTERRUPTED)
    is_json = is_json_input()
    started = time.perf_counter()
    try:
        with sink, Bar() as bar:
            if OUTPUT.value != "-" and _is_regular(sink):
                sink.truncate(0)
            if lines.isatty():
                print("Type prompts, one a line; Ctrl-D ends.", file=sys.stderr)
            num_rows, num_errors = serve_lines(
                llm,
                read_lines(lines, defaults, is_json=is_json, field=FIELD.value),
                lambda row: _write(sink, row),
                chat=CHAT.value,
                on_output=bar.update,
            )
    except BrokenPipeError:  # `| head`: nobody wants the rest.
        return _BROKEN_PIPE
    except KeyboardInterrupt:
        return _refuse("interrupted; the rows written so far are whole", status=_INTERRUPTED)
    except OSError as error:
        return _refuse(str(error))
    if REPORT.value:
        print(report(llm, time.perf_counter() - started), file=sys.stderr)
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


def _parse_flags(argv: list[str]) -> list[str]:
    try:
        return flags.FLAGS(argv)
    except flags.Error as error:
        sys.exit(_refuse(f"{error} (--help lists the flags)"))


def _refuse(message: str, *, status: int = 2) -> int:
    """Says in one line why the run ends."""
    text = " ".join(message.split())
    print(f"{os.path.basename(sys.argv[0])}: {text}", file=sys.stderr)
    return status


def set_up_logging() -> None:
    """The library's form of lines; absl's own handler has taken the place of the library's."""
    logging.getLogger("jax").setLevel(logging.WARNING)  # Absl's handler shows all of it.
    form = logging.Formatter("%(levelname)s %(asctime)s %(name)s: %(message)s")
    absl.logging.get_absl_handler().setFormatter(form)


def sampling_params() -> SamplingParams:
    """Those of the flags."""
    return SamplingParams(
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


def engine_options() -> dict[str, Any]:
    """Fields of `EngineConfig` by the flags; ValueError names the one that is wrong."""
    options = {
        "dtype": DTYPE.value,
        "quantization": QUANTIZATION.value,
        "kv_cache_dtype": KV_CACHE_DTYPE.value,
        "tensor_parallel_size": TENSOR_PARALLEL_SIZE.value,
        "data_parallel_size": DATA_PARALLEL_SIZE.value,
        "max_model_len": MAX_MODEL_LEN.value,
        "max_num_seqs": MAX_NUM_SEQS.value,
        "max_num_batched_tokens": MAX_NUM_BATCHED_TOKENS.value,
        "kv_cache_memory_bytes": KV_CACHE_MEMORY_BYTES.value,
        "block_size": BLOCK_SIZE.value,
        "enable_prefix_caching": PREFIX_CACHING.value,
        "preemption_mode": PREEMPTION_MODE.value,
        "swap_space_bytes": SWAP_SPACE_BYTES.value,
        "enable_host_prefix_cache": HOST_PREFIX_CACHE.value,
    }
    EngineConfig(**options)  # Wrong values are refused before a model is loaded.
    return options


def is_json_input() -> bool:
    """Whether the flags say that the input is JSONL."""
    is_named_so = INPUT.value.endswith((".jsonl", ".json", ".ndjson"))
    return FORMAT.value == "jsonl" or (FORMAT.value == "auto" and is_named_so)


def _open_input(name: str) -> IO[str]:
    """A byte that is no UTF-8 spoils its own line, not the run: the tokenizer refuses it by name.

    Nobody closes the file: a thread may be reading it to the end, and closing would wait for that.
    """
    # Standard input is opened anew, since the locks of sys.stdin would hold up the program's end.
    file = 0 if name == "-" else name
    return open(file, encoding="utf-8-sig", errors="surrogateescape", closefd=file != 0)


def _open_output(name: str, source: IO[str]) -> IO[str]:
    """Opens without truncating: an old file stays whole if the model turns out to be missing.

    Raises:
      ValueError: it is the input's file.
      OSError: it cannot be written.
    """
    file = 1 if name == "-" else name
    sink = open(file, "w" if file == 1 else "a", encoding="utf-8", closefd=file != 1)
    # Terminals, pipes and /dev/null may well be both.
    if _is_regular(sink) and os.path.sameopenfile(source.fileno(), sink.fileno()):
        sink.close()
        raise ValueError(f"--output={name} is the file of --input; give another")
    return sink


def _is_regular(file: IO[str]) -> bool:
    return stat.S_ISREG(os.fstat(file.fileno()).st_mode)


def _write(sink: IO[str], row: dict[str, Any]) -> None:
    line = json.dumps(row, ensure_ascii=False)
    if not line.isascii():
        try:
            line.encode()
        except UnicodeEncodeError:  # Half of a surrogate pair can only be written as an escape.
            line = json.dumps(row)
    sink.write(line + "\n")
    sink.flush()
