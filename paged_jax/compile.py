"""Compiled steps: one program for each shape bucket, made before the first request."""

from __future__ import annotations

import functools
import hashlib
import os
import pathlib
import platform
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
from tqdm.auto import tqdm

from paged_jax.batch import Buckets, StepBatch, StepShape, empty_batch, make_sampling
from paged_jax.block_mover import BlockMover
from paged_jax.block_moves import NO_MOVES, BlockMoves
from paged_jax.kv_pool import KVPool
from paged_jax.log import logger
from paged_jax.models.config import ModelConfig
from paged_jax.paths import cache_folder
from paged_jax.sampling import SamplerOutput, SamplingBatch
from paged_jax.step import sample_step

# One function for all engines of the process: a second engine of the same shapes compiles nothing.
_jitted_step = jax.jit(
    sample_step,
    static_argnames=("config", "decode_only", "attention_implementation", "tensor_axis"),
    donate_argnames="pool",
)


def enable_persistent_cache() -> None:
    """Keeps compiled programs on disk for the next process, unless the user set a place already.

    Programs for a CPU hold instructions that another CPU may lack, and home folders are shared
    between machines: so each kind of CPU has a folder of its own. Built C++ kernels lie beside.
    """
    os.environ.setdefault("PAGED_JAX_NATIVE_CACHE", str(cache_folder() / "native"))
    if jax.config.jax_compilation_cache_dir is not None:  # pyright: ignore[reportAttributeAccessIssue]
        return
    jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "xla" / _cpu_kind()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def _cpu_kind() -> str:
    """A short name for this machine's instruction set."""
    features = platform.machine() + platform.processor()
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text().splitlines()
        features += next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return hashlib.sha256(features.encode()).hexdigest()[:12]


class StepRunner:
    """Runs padded steps against the pool that it owns.

    The pool is donated to every step, and the step's result takes its place: its buffers are
    written in place and never copied. Blocks are copied and swapped ahead of the step that needs
    it, by the `mover`.
    """

    def __init__(
        self,
        params,
        pool: KVPool,
        *,
        config: ModelConfig,
        buckets: Buckets,
        num_host_blocks: int = 0,
        attention_implementation: str | None = None,
    ):
        self.params = params
        self.pool = pool
        self.mover = BlockMover(pool, num_host_blocks=num_host_blocks)
        self.buckets = buckets
        self._lower = functools.partial(
            lower_step, config=config, buckets=buckets, implementation=attention_implementation
        )
        self._programs: dict[StepShape, jax.stages.Compiled] = {}
        self.num_weight_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
        # The most that a compiled step takes beside weights and pool, by the compiler's account.
        self.temporary_bytes = 0

    def run(
        self,
        shape: StepShape,
        batch: StepBatch,
        sampling: SamplingBatch,
        moves: BlockMoves = NO_MOVES,
    ) -> SamplerOutput:
        """Dispatches a step, after what is moved for it; returns its outputs, still on device."""
        if moves:
            self.move(moves)
        program = self._programs.get(shape) or self._compile(shape)
        self.pool, output = program(self.params, pool=self.pool, batch=batch, sampling=sampling)
        return output

    def measure_swap(self) -> float:
        """Bytes a second that blocks travel at between device and host; takes a moment."""
        self.pool, bytes_per_second = self.mover.measure_bandwidth(self.pool)
        return bytes_per_second

    def move(self, moves: BlockMoves) -> None:
        """Dispatches moves of blocks alone."""
        self.pool = self.mover.apply(self.pool, moves)

    def settle(self) -> None:
        """Stores the blocks that are on their way to the host; when a step's results were read."""
        self.mover.settle()

    def warm_up(self) -> None:
        """Compiles every shape, a few at a time, or reads it from the cache on disk."""
        start = time.perf_counter()
        shapes = self.buckets.shapes()
        # XLA leaves cores idle while it compiles one program.
        with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as threads:
            moves = threads.submit(self.mover.warm_up)
            done = threads.map(self._compile, shapes)
            bar = tqdm(done, desc="Preparing step shapes", total=len(shapes), leave=False)
            for _ in bar:
                pass
            moves.result()
        seconds = time.perf_counter() - start
        logger.info("Warm-up: %d step shapes ready in %.1f s", len(shapes), seconds)

    def renew_pool(self) -> bool:
        """Makes a new pool if a step failed with the old one in its hands; True if it did."""
        self.mover.reset()
        if not self.pool.is_deleted():
            return False
        self.pool = self.pool.empty_like()
        return True

    def _compile(self, shape: StepShape) -> jax.stages.Compiled:
        program = self._lower(self.params, self.pool, shape).compile()
        self._programs[shape] = program
        if (analysis := program.memory_analysis()) is not None:
            self.temporary_bytes = max(self.temporary_bytes, int(analysis.temp_size_in_bytes))
        return program


def lower_step(
    params,
    pool: KVPool,
    shape: StepShape,
    *,
    config: ModelConfig,
    buckets: Buckets,
    implementation: str | None,
) -> jax.stages.Lowered:
    """The engine's step at one shape, ready to compile.

    Args:
      params, pool: arrays, or trees of `jax.ShapeDtypeStruct`s like them.
    """
    return _jitted_step.lower(
        params,
        pool=pool,
        batch=empty_batch(shape.num_tokens, shape.num_seqs, buckets.table_width),
        sampling=make_sampling([], [], [], num_seqs=shape.num_seqs),
        config=config,
        decode_only=shape.decode_only,
        attention_implementation=implementation,
    )


def temporary_bytes(lowered: jax.stages.Lowered) -> int:
    """Peak temporary memory of a step, by the compiler's own account."""
    analysis = lowered.compile().memory_analysis()
    assert analysis is not None, "the backend gives no account of memory"
    return int(analysis.temp_size_in_bytes)


def to_host(output: SamplerOutput) -> SamplerOutput:
    """Waits for a step's outputs and brings them to the host as numpy arrays."""
    return jax.tree.map(np.asarray, output)
