"""Cost against work: the time of a decode step by the tokens it attends to, and by its batch.

    python scripts/bench_scaling.py --out=docs/scaling

The engine's step (`paged_jax.step.sample_step`) runs over made-up batches:

    context  8 sequences of 128, 256, ..., 4,096 tokens each
    batch    1, 2, 4, ..., 128 sequences of 128 tokens each

Every size has a program of its own, and all a block table of one width: what differs is the work
and not the padding. Sizes are timed in turn, round after round, in one process; a size's
figures are its least and its median time. A straight line through the two ends of a row is what a
cost proportional to the work, on top of a fixed one, would be. `last_step` is how steep the stretch
between the two largest sizes is beside that line: 1 for a cost that is linear, less for a better
one, more for one that grows faster than the work.

The last line is one JSON object; --out=PATH writes it to PATH.json, and PATH.svg with matplotlib
(pip install 'paged-jax[plots]').
"""

import functools
import itertools
import json
import pathlib
import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from absl import app, flags
from peers_report import machine, require_matplotlib

from paged_jax import EngineConfig, KVPool, SamplingParams, demo_model_path, load_model
from paged_jax.batch import StepBatch, make_batch, make_sampling
from paged_jax.compile import enable_persistent_cache
from paged_jax.sampling import SamplingBatch
from paged_jax.step import sample_step

MODEL = flags.DEFINE_string("model", "demo", 'A .gguf file, folder or hub id, or "demo".')
QUANTIZATION = flags.DEFINE_enum("quantization", None, ["int8"], "Of the weights.")
CONTEXT_TOKENS = flags.DEFINE_list("context_tokens", "128 256 512 1024 2048 4096".split(), "Sizes.")
CONTEXT_SEQS = flags.DEFINE_integer("context_seqs", 8, "Sequences of those.", lower_bound=1)
BATCH_SEQS = flags.DEFINE_list("batch_seqs", "1 2 4 8 16 32 64 128".split(), "Sizes.")
BATCH_TOKENS = flags.DEFINE_integer("batch_tokens", 128, "Tokens of those.", lower_bound=1)
REPEATS = flags.DEFINE_integer("repeats", 9, "Rounds.", lower_bound=1)
OUT = flags.DEFINE_string("out", None, "Path of the report, without .json and .svg.")

BLOCK_SIZE = EngineConfig().block_size
# A size as (sequences, tokens of each)
Size = tuple[int, int]


def make_step(
    size: Size, table_width: int, rng: np.random.Generator, vocab_size: int
) -> tuple[StepBatch, SamplingBatch]:
    """One decode of sequences that have so many tokens, the new one included."""
    num_seqs, num_tokens = size
    blocks_a_seq = -(-num_tokens // BLOCK_SIZE)
    # As an engine that has run for a while would have them: anywhere.
    blocks = 1 + rng.permutation(num_seqs * blocks_a_seq).reshape(num_seqs, blocks_a_seq)
    batch = make_batch(
        rng.integers(0, vocab_size, (num_seqs, 1)).tolist(),
        [num_tokens - 1] * num_seqs,
        blocks.astype(int).tolist(),
        block_size=BLOCK_SIZE,
        table_width=table_width,
    )
    greedy = [SamplingParams(temperature=0)] * num_seqs
    sampling = make_sampling(greedy, [0] * num_seqs, [num_tokens] * num_seqs)
    return batch, sampling


class Steps:
    """The engine's step, and a pool with room for the largest size, which each step takes over."""

    def __init__(self, sizes: Sequence[Size]):
        enable_persistent_cache()
        path = demo_model_path() if MODEL.value == "demo" else MODEL.value
        quantization: Any = QUANTIZATION.value
        self.model = load_model(path, dtype="float32", quantization=quantization)
        num_blocks = 1 + max(seqs * -(-tokens // BLOCK_SIZE) for seqs, tokens in sizes)
        self.pool = KVPool.create(self.model.config, num_blocks=num_blocks, block_size=BLOCK_SIZE)
        step = functools.partial(sample_step, config=self.model.config, decode_only=True)
        self._jitted = jax.jit(step, donate_argnames="pool")

    def run(self, batch: StepBatch, sampling: SamplingBatch) -> float:
        """Seconds of one step, until its tokens are there."""
        started = time.perf_counter()
        self.pool, output = self._jitted(
            self.model.params, pool=self.pool, batch=batch, sampling=sampling
        )
        np.asarray(output.token_ids)
        return time.perf_counter() - started


def measure(sizes: Sequence[Size]) -> dict[Size, list[float]]:
    """Seconds of each size's step, once a round."""
    steps = Steps(sizes)
    vocab_size = steps.model.config.vocab_size
    width = max(-(-tokens // BLOCK_SIZE) for _, tokens in sizes)
    rng = np.random.default_rng(0)
    batches = {size: make_step(size, width, rng, vocab_size) for size in sizes}
    for size in sizes:
        steps.run(*batches[size])  # Compiles it.
    seconds: dict[Size, list[float]] = {size: [] for size in sizes}
    for _, size in itertools.product(range(REPEATS.value), sizes):
        seconds[size].append(steps.run(*batches[size]))
    return seconds


def row_of(sizes: Sequence[Size], seconds: dict[Size, list[float]]) -> dict[str, Any]:
    """A row of sizes: its work in live tokens or sequences, its times, and how it grows."""
    times = [min(seconds[size]) for size in sizes]
    work = [size[0] if len({s[0] for s in sizes}) > 1 else size[0] * size[1] for size in sizes]
    line = straight_line(work, times)
    return {
        "sizes": [{"num_seqs": seqs, "tokens_a_seq": tokens} for seqs, tokens in sizes],
        "work": work,
        "least_ms": [1e3 * t for t in times],
        "median_ms": [1e3 * statistics.median(seconds[size]) for size in sizes],
        "line_ms": [1e3 * t for t in line],
        "last_step": last_step(times, line),
    }


def straight_line(work: Sequence[float], times: Sequence[float]) -> list[float]:
    """Times on the line through the first and the last size."""
    if len(work) < 2 or work[-1] == work[0]:
        return list(times)
    slope = (times[-1] - times[0]) / (work[-1] - work[0])
    return [times[0] + slope * (w - work[0]) for w in work]


def last_step(times: Sequence[float], line: Sequence[float]) -> float:
    """Growth to the last size beside the line's; 1 where there is none to compare."""
    if len(times) < 3 or line[-1] <= line[-2]:
        return 1.0
    return (times[-1] - times[-2]) / (line[-1] - line[-2])


def draw(report: dict[str, Any], path: pathlib.Path) -> None:
    """Two panels: step time against live tokens, and against sequences.

    Raises:
      ImportError: matplotlib is missing.
    """
    plt = require_matplotlib()
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    labels = {
        "context": f"live KV tokens, {report['context_seqs']} sequences",
        "batch": f"sequences of {report['batch_tokens']} tokens",
    }
    for (name, label), axis in zip(labels.items(), axes, strict=True):
        row = report[name]
        axis.plot(row["work"], row["line_ms"], color="#999999", lw=1, label="straight line")
        axis.plot(row["work"], row["least_ms"], "o-", color="#2a6f97", label="least")
        axis.plot(row["work"], row["median_ms"], "x", color="#2a6f97", label="median")
        axis.set_xlabel(label)
        axis.set_ylabel("ms a decode step")
        axis.set_xlim(left=0)
        axis.set_ylim(bottom=0)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, fontsize=8)
        title = f"last stretch {row['last_step']:.2f} x as steep as the line"
        axis.set_title(title, fontsize=9, loc="left")
    about = report["machine"]
    dtype = report["quantization"] or "float32"
    figure.suptitle(
        f"{report['model']}, {dtype}, {about['cores']} cores of {about['cpu']}", fontsize=9
    )
    figure.savefig(path)
    plt.close(figure)


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    rows: dict[str, list[Size]] = {
        "context": [(CONTEXT_SEQS.value, int(tokens)) for tokens in CONTEXT_TOKENS.value],
        "batch": [(int(seqs), BATCH_TOKENS.value) for seqs in BATCH_SEQS.value],
    }
    seconds = measure(list(dict.fromkeys(itertools.chain(*rows.values()))))
    report: dict[str, Any] = {
        "model": pathlib.Path(MODEL.value).stem if MODEL.value != "demo" else "SmolLM2-135M",
        "quantization": QUANTIZATION.value,
        "context_seqs": CONTEXT_SEQS.value,
        "batch_tokens": BATCH_TOKENS.value,
        "repeats": REPEATS.value,
        "jax": jax.__version__,
        "machine": machine(),
        **{name: row_of(sizes, seconds) for name, sizes in rows.items()},
    }
    for name in rows:
        row = report[name]
        print(f"{name}: the last stretch is {row['last_step']:.2f} times as steep as the line")
        print(f"{'sequences':>10}{'tokens each':>12}{'least ms':>10}{'median ms':>10}{'line':>8}")
        for i, size in enumerate(row["sizes"]):
            print(
                f"{size['num_seqs']:10}{size['tokens_a_seq']:12}{row['least_ms'][i]:10.1f}"
                f"{row['median_ms'][i]:10.1f}{row['line_ms'][i]:8.1f}"
            )
    if OUT.value:
        path = pathlib.Path(OUT.value)
        path.with_name(path.name + ".json").write_text(json.dumps(report, indent=1) + "\n")
        try:
            draw(report, path.with_name(path.name + ".svg"))
        except ImportError as error:
            print(f"No picture: {error}")
    print(json.dumps(report))


if __name__ == "__main__":
    app.run(main)
