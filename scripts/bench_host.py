"""Host microseconds a step: all that an engine does between two steps of the device.

    python scripts/bench_host.py --num_seqs=256

The real engine, scheduler and block manager run against a runner that computes nothing. Sequences
of 128 prompt tokens decode one token a step, with prefix caching. A step has three phases:

    schedule   which sequences go on, their new blocks, the hashes of full ones
    build      the numpy arrays of the compiled step
    process    sampled tokens to their requests, what has ended, counters

Steps are timed in windows of one block (16 steps), so that each window has one new block of every
sequence in it. `us_per_step` is the median window. What a busy machine adds less to:
`min_us_per_step`, for which each of the 16 steps is taken from the window where it was quickest,
and `cpu_us_per_step`, the median of the thread's own CPU time.
`detokenize_us_per_step` is what text comes to on top, with a tokenizer of bytes. Also measured: how
many requests a second are admitted, computed and ended whose prompts of 4,000 tokens are cached.

With --vllm_python, a Python that has vLLM installed, vLLM's scheduler and block manager are timed
in the same way in between (see bench_host_vllm.py): without device arrays, for it builds none.

Prints a table; the last line is one JSON object: "us_per_step" is that of the last --num_seqs, and
"cases" has the figures of each.
"""

import gc
import json
import pathlib
import platform
import statistics
import subprocess
import time
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from absl import app, flags

from paged_jax.batch import Buckets
from paged_jax.compile import StepRunner
from paged_jax.config import SchedulerConfig
from paged_jax.engine import Engine
from paged_jax.intake import Intake
from paged_jax.sampling import SamplerOutput
from paged_jax.sampling_params import SamplingParams
from paged_jax.step_programs import StepPrograms
from paged_jax.tokenizer import Tokenizer

NUM_SEQS = flags.DEFINE_multi_integer(
    "num_seqs", [1, 64, 256, 1024], "Sequences that decode.", lower_bound=1
)
NUM_WINDOWS = flags.DEFINE_integer(
    "num_windows", 15, "Windows of 16 timed steps.", lower_bound=1, upper_bound=400
)
NUM_HITS = flags.DEFINE_integer("num_hits", 100, "Admissions of cached prompts.", lower_bound=1)
VLLM_PYTHON = flags.DEFINE_string("vllm_python", None, "A Python with vLLM, to compare with.")

PROMPT_TOKENS = 128
CACHED_PROMPT_TOKENS = 4000
BLOCK_SIZE = 16
MAX_MODEL_LEN = 8192
VOCAB_SIZE = 256
PHASES = ("schedule", "build", "process")


def clocks() -> tuple[float, float]:
    """Seconds on the wall, and of this thread on a CPU."""
    return time.perf_counter(), time.thread_time()


class FakeRunner:
    """Stands in for a StepRunner: every step samples random bytes. It notes when it was called."""

    mesh = None

    def __init__(self, buckets: Buckets, rng: np.random.Generator):
        self.programs = StepPrograms(buckets)
        self.mover = SimpleNamespace(bytes_a_block=BLOCK_SIZE * 1024, transfer_bytes=0)
        self.called_at = self.returned_at = (0.0, 0.0)
        self._rng = rng

    def run(self, shape, call, moves) -> tuple[Any, SamplerOutput]:
        self.called_at = clocks()
        rows = shape.num_seqs
        output = SamplerOutput(
            token_ids=self._rng.integers(ord("a"), ord("z"), rows, dtype=np.int32),
            logprob=np.zeros(rows, np.float32),
            rank=np.zeros(rows, np.int32),
            top_ids=np.zeros((rows, 1), np.int32),
            top_logprobs=np.zeros((rows, 1), np.float32),
            is_finite=np.ones(rows, bool),
        )
        self.returned_at = clocks()
        return None, output

    def settle(self) -> None:
        """Nothing is on its way."""


class ByteTokenizer:
    """A token is a byte."""

    all_special_ids = ()
    bos_token = eos_token = bos_token_id = eos_token_id = None

    def __len__(self) -> int:
        return VOCAB_SIZE

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, ids, skip_special_tokens: bool = True) -> str:
        return bytes(ids).decode("utf-8", errors="replace")


def make_engine(max_num_seqs: int, num_blocks: int) -> Engine:
    """An engine of which only the host's half is real."""
    config = SchedulerConfig(
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=MAX_MODEL_LEN,
    )
    buckets = Buckets.choose(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=MAX_MODEL_LEN,
        block_size=BLOCK_SIZE,
    )
    runner = FakeRunner(buckets, np.random.default_rng(1))
    return Engine(
        cast(StepRunner, runner),
        Intake(config, vocab_size=VOCAB_SIZE, tokenizer=Tokenizer.wrap(ByteTokenizer())),
        watch_prefixes=True,
    )


def timed_step(engine: Engine) -> dict[str, float]:
    """Runs a step; seconds of each phase, of all, and of CPU time in all."""
    schedule, runner = engine.scheduler.schedule, cast(Any, engine.runner)
    scheduled_at = (0.0, 0.0)

    def noting_schedule():
        nonlocal scheduled_at
        step = schedule()
        scheduled_at = clocks()
        return step

    engine.scheduler.schedule = noting_schedule
    started = clocks()
    engine.step()
    ended = clocks()
    del engine.scheduler.schedule
    return {
        "schedule": scheduled_at[0] - started[0],
        "build": runner.called_at[0] - scheduled_at[0],
        "process": ended[0] - runner.returned_at[0],
        "total": ended[0] - runner.returned_at[0] + runner.called_at[0] - started[0],
        "cpu": ended[1] - runner.returned_at[1] + runner.called_at[1] - started[1],
    }


def decode_windows(num_seqs: int, *, detokenize: bool) -> dict[str, np.ndarray]:
    """Microseconds of what `timed_step` gives, each as [windows, steps of a window]."""
    num_tokens = PROMPT_TOKENS + (NUM_WINDOWS.value + 1) * BLOCK_SIZE + num_seqs
    engine = make_engine(num_seqs, num_blocks=num_seqs * (num_tokens // BLOCK_SIZE + 1) + 1000)
    params = SamplingParams(
        temperature=0.7, top_p=0.9, max_tokens=MAX_MODEL_LEN, detokenize=detokenize
    )
    rng = np.random.default_rng(0)
    for i in range(num_seqs):
        engine.add_request(str(i), rng.integers(0, VOCAB_SIZE, PROMPT_TOKENS).tolist(), params)
    while engine.scheduler.waiting:
        engine.step()
    for _ in range(BLOCK_SIZE):
        engine.step()
    assert len(engine.scheduler.running) == num_seqs
    steps = [timed_step(engine) for _ in range(NUM_WINDOWS.value * BLOCK_SIZE)]
    return {
        name: 1e6 * np.array([step[name] for step in steps]).reshape(-1, BLOCK_SIZE)
        for name in steps[0]
    }


def measure_decode(num_seqs: int) -> dict[str, float]:
    """The figures of one number of sequences, in microseconds a step."""
    plain = decode_windows(num_seqs, detokenize=False)
    with_text = decode_windows(num_seqs, detokenize=True)
    figures = {
        "us_per_step": median_window(plain["total"]),
        "min_us_per_step": quickest(plain["total"]),
        "cpu_us_per_step": median_window(plain["cpu"]),
    }
    for phase in PHASES:
        figures[f"{phase}_us"] = median_window(plain[phase])
        figures[f"min_{phase}_us"] = quickest(plain[phase])
    figures["detokenize_us_per_step"] = quickest(with_text["total"]) - quickest(plain["total"])
    return figures


def median_window(steps: np.ndarray) -> float:
    return float(np.median(steps.mean(axis=1)))


def quickest(steps: np.ndarray) -> float:
    return float(steps.min(axis=0).mean())


def measure_hits() -> float:
    """Requests a second, from `add_request` to their only token, whose prompts are cached."""
    engine = make_engine(32, num_blocks=20_000)
    params = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, VOCAB_SIZE, CACHED_PROMPT_TOKENS).tolist()
    engine.add_request("first", prompt, params)
    while engine.has_unfinished():
        engine.step()
    rates = []
    for repeat in range(5):
        started = time.perf_counter()
        for i in range(NUM_HITS.value):
            engine.add_request(f"{repeat}/{i}", prompt, params)
        while engine.has_unfinished():
            engine.step()
        rates.append(NUM_HITS.value / (time.perf_counter() - started))
    stats = engine.scheduler.blocks.stats
    num_cached = CACHED_PROMPT_TOKENS - 1 - (CACHED_PROMPT_TOKENS - 1) % BLOCK_SIZE
    assert stats.num_hit_tokens == 5 * NUM_HITS.value * num_cached
    return statistics.median(rates)


def measure_vllm(num_seqs: int) -> dict[str, float]:
    """vLLM's figures for the same load, in its own interpreter."""
    script = pathlib.Path(__file__).with_name("bench_host_vllm.py")
    command = [VLLM_PYTHON.value, str(script), str(num_seqs), str(NUM_WINDOWS.value)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    cases = []
    for num_seqs in NUM_SEQS.value:
        case = {"num_seqs": num_seqs, **measure_decode(num_seqs)}
        gc.collect()
        if VLLM_PYTHON.value:
            case |= measure_vllm(num_seqs)
        if not cases:
            print("  ".join(case))
        print("  ".join(f"{value:{len(name)}.0f}" for name, value in case.items()), flush=True)
        cases.append(case)
    admissions = measure_hits()
    print(f"prefix hits of {CACHED_PROMPT_TOKENS} tokens admitted a second: {admissions:.0f}")
    print(
        json.dumps(
            {
                "us_per_step": cases[-1]["us_per_step"],
                "prefix_hit_admissions_per_second": admissions,
                "cases": cases,
                "num_windows": NUM_WINDOWS.value,
                "python": platform.python_version(),
            }
        )
    )


if __name__ == "__main__":
    app.run(main)
