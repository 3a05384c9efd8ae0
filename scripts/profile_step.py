"""Where a step's time goes, operation by operation, on a CPU.

    python scripts/profile_step.py --num_prompts=32 --prompt_len=128 --quantization=int8

The engine decodes `num_prompts` random sequences under JAX's profiler, and then computes prompts;
each gets a table of milliseconds a step: attention, every matrix product by its shapes, sampling,
norms, KV writes, and what the host does while nothing else runs (`host: ...`). How time is shared
out, and why rows add up to the step, says profile_rows.py. `untraced` is the same load without the
profiler, in the same process just before. Neither TensorBoard nor another package is needed.

The last line is one JSON object with the rows of both.
"""

import functools
import json
import pathlib
import tempfile
import time
from typing import Any

import jax
import numpy as np
import profile_rows
from absl import app, flags

from paged_jax import LLM, SamplingParams, demo_model_path
from paged_jax.batch import StepShape
from paged_jax.compile import lower_step

MODEL = flags.DEFINE_string("model", "demo", 'A .gguf file, folder or hub id, or "demo".')
NUM_PROMPTS = flags.DEFINE_integer("num_prompts", 32, "Sequences.", lower_bound=1)
PROMPT_LEN = flags.DEFINE_integer("prompt_len", 128, "Tokens a prompt.", lower_bound=1)
NUM_STEPS = flags.DEFINE_integer("num_steps", 24, "Decode steps, about.", lower_bound=1)
QUANTIZATION = flags.DEFINE_enum(
    "quantization", None, ["int8", "int8_weight_only", "int4"], "Of the weights."
)
KV_CACHE_DTYPE = flags.DEFINE_string("kv_cache_dtype", None, "Of the KV pool; None: the default.")
TRACE = flags.DEFINE_string("trace", None, "A folder to keep the traces in.")


class Profiler:
    """Runs loads of one engine, plain and under the profiler."""

    def __init__(self, llm: LLM):
        self.llm = llm
        self.engine = llm.engine
        self._labels: dict[StepShape, dict[str, str]] = {}
        self._num_requests = 0
        self._rng = np.random.default_rng(0)
        # What the host does is marked by names that a trace shows.
        _mark(self.engine.scheduler, "schedule", "schedule")
        _mark(self.engine.scheduler, "update", "process")
        _mark(self.engine.runner, "run", "dispatch")

    def decode(self, folder: pathlib.Path | None) -> tuple[float, float]:
        """Decode steps of all sequences; microseconds of all, and how many."""
        self._add(NUM_PROMPTS.value, PROMPT_LEN.value, 3 * NUM_STEPS.value + 64)
        while self.engine.scheduler.waiting or self._num_computing():
            self.engine.step()
        for _ in range(2):  # Past the steps that the prompts' end may still shape.
            self.engine.step()
        before = self.engine.metrics.generation_tokens
        microseconds = self._window(
            lambda: (
                self.engine.metrics.generation_tokens - before < NUM_STEPS.value * NUM_PROMPTS.value
            ),
            folder,
        )
        num_tokens = self.engine.metrics.generation_tokens - before
        self._abort()
        return microseconds, num_tokens / NUM_PROMPTS.value

    def prefill(self, folder: pathlib.Path | None) -> tuple[float, float]:
        """Steps full of prompt tokens; microseconds of all, and how many."""
        num_steps = 4
        budget = self.engine.config.max_num_batched_tokens
        length = min(budget, self.engine.config.max_model_len - 1)
        self._add(num_steps * budget // length, length, 1)
        times = self.engine.metrics.steps["prefill"]
        before = times.num_steps
        microseconds = self._window(self.engine.has_unfinished, folder)
        return microseconds, times.num_steps - before

    def labels(self, shape: StepShape) -> dict[str, str]:
        """The rows of the operations of one compiled step."""
        runner = self.engine.runner
        lowered = lower_step(
            runner.params,
            runner.pool,
            shape,
            config=self.llm.model.config,
            buckets=runner.buckets,
            implementation=self.llm.config.attention_implementation,
        )
        return profile_rows.Program(lowered.compile().as_text() or "").labels()

    def _window(self, goes_on: Any, folder: pathlib.Path | None) -> float:
        if folder is None:
            started = time.perf_counter()
            while goes_on():
                self.engine.step()
            return 1e6 * (time.perf_counter() - started)
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # It would slow the host down.
        with jax.profiler.trace(str(folder), profiler_options=options):
            started = time.perf_counter()
            with jax.profiler.TraceAnnotation(profile_rows.WINDOW):
                while goes_on():
                    self.engine.step()
            return 1e6 * (time.perf_counter() - started)

    def _add(self, num_prompts: int, length: int, max_tokens: int) -> None:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        for prompt in self._rng.integers(0, self.engine.intake.vocab_size, (num_prompts, length)):
            self._num_requests += 1
            self.engine.add_request(str(self._num_requests), prompt.tolist(), params)

    def _num_computing(self) -> int:
        """Sequences whose prompts are not computed yet."""
        return sum(r.num_computed_tokens < PROMPT_LEN.value for r in self.engine.scheduler.running)

    def _abort(self) -> None:
        for number in range(1, self._num_requests + 1):
            self.engine.abort(str(number))
        while self.engine.has_unfinished():
            self.engine.step()


def _mark(owner: Any, method: str, name: str) -> None:
    """Makes calls of one object's method visible in a trace."""
    plain = getattr(owner, method)

    @functools.wraps(plain)
    def marked(*args: Any, **options: Any) -> Any:
        with jax.profiler.TraceAnnotation(profile_rows.HOST + name):
            return plain(*args, **options)

    setattr(owner, method, marked)


def report(profiler: Profiler, kind: str, shape: StepShape, root: pathlib.Path) -> dict[str, Any]:
    """Profiles one kind of step, prints its table, and gives it as numbers."""
    run = profiler.decode if kind == "decode" else profiler.prefill
    run(None)  # Everything is in memory after this.
    untraced, num_untraced = run(None)
    folder = root / kind
    traced, num_steps = run(folder)
    events = profile_rows.read_trace(folder)
    modules = {event.module for event in events if event.module}
    labels = dict.fromkeys(modules, profiler.labels(shape))
    times, counts = profile_rows.share_out(events, labels)
    print(f"\n{kind}: {num_steps:.0f} steps of {shape}")
    print(profile_rows.table(times, counts, num_steps))
    print(f"{traced / num_steps / 1e3:.3f} ms a step by the clock", end=", ")
    print(f"{untraced / num_untraced / 1e3:.3f} ms untraced")
    return {
        "rows_ms": {row: t / num_steps / 1e3 for row, t in times.items()},
        "ms_per_step": traced / num_steps / 1e3,
        "untraced_ms_per_step": untraced / num_untraced / 1e3,
        "num_steps": num_steps,
    }


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    options: dict[str, Any] = {}
    if KV_CACHE_DTYPE.value is not None:
        options["kv_cache_dtype"] = KV_CACHE_DTYPE.value
    llm = LLM(
        demo_model_path() if MODEL.value == "demo" else MODEL.value,
        dtype="float32",
        quantization=QUANTIZATION.value,
        max_model_len=PROMPT_LEN.value + 3 * NUM_STEPS.value + 64,
        max_num_seqs=NUM_PROMPTS.value,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        **options,
    )
    profiler = Profiler(llm)
    buckets = llm.engine.runner.buckets
    budget = llm.engine.config.max_num_batched_tokens
    shapes = {
        "decode": buckets.shape_for(NUM_PROMPTS.value, NUM_PROMPTS.value),
        "prefill": buckets.shape_for(budget, 1, may_be_decodes=False),
    }
    with tempfile.TemporaryDirectory() as scratch:
        root = pathlib.Path(TRACE.value or scratch)
        reports = {kind: report(profiler, kind, shape, root) for kind, shape in shapes.items()}
    print(json.dumps({"quantization": QUANTIZATION.value, "jax": jax.__version__, **reports}))


if __name__ == "__main__":
    app.run(main)
