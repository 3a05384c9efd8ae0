"""Compiled steps: one program for each shape bucket, made before the first request."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
import pathlib
import platform
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from tqdm.auto import tqdm

from paged_jax.batch import Buckets, StepCall, StepShape, empty_batch, make_sampling
from paged_jax.block_mover import BlockMover
from paged_jax.block_moves import NO_MOVES, BlockMoves
from paged_jax.decode_loop import decode_steps
from paged_jax.decode_rows import DecodeCall, DecodeRows, no_stops
from paged_jax.kv_pool import ChannelScales, KVPool
from paged_jax.log import logger
from paged_jax.models.config import ModelConfig
from paged_jax.paths import cache_folder
from paged_jax.process_memory import release_unused, releasing_code
from paged_jax.sampling import SamplerOutput, SamplingBatch
from paged_jax.sharding import DATA_AXIS, StepSpecs, on_mesh, stack_rows
from paged_jax.step import sample_step
from paged_jax.step_programs import StepPrograms

# One function for all engines of the process: a second engine of the same shapes compiles nothing.
_jitted_step = jax.jit(
    sample_step,
    static_argnames=(
        "config",
        "decode_only",
        "attention_implementation",
        "tensor_axis",
        "is_plain",
    ),
    donate_argnames="pool",
)
_jitted_decode = jax.jit(
    decode_steps,
    static_argnames=("max_steps", "config", "attention_implementation", "tensor_axis", "is_plain"),
    donate_argnames="pool",
)


_runners: weakref.WeakSet[StepRunner] = weakref.WeakSet()


def promised_bytes() -> int:
    """Memory that pools of this process will yet take on the host, see `KVPool.absent_bytes`."""
    promised = 0
    for runner in list(_runners):
        try:
            promised += runner.pool.absent_bytes()
        except RuntimeError:  # Its thread has just given the pool to a step.
            continue
    return promised


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

    With a mesh, weights and pool lie on it as `sharding` says, config is that of `split_config`,
    and what a step is given and gives has the mesh's rows as a first dimension.
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
        mesh: Mesh | None = None,
    ):
        self.params = params
        self.pool = pool
        _runners.add(self)
        # A copy: a step that fails takes the pool's own with it.
        self._kv_scales = jax.tree.map(jnp.copy, pool.scales)
        self.mover = BlockMover(pool, num_host_blocks=num_host_blocks, mesh=mesh)
        self.mesh = mesh
        self.buckets = buckets
        self._lower = functools.partial(
            lower_step,
            config=config,
            buckets=buckets,
            implementation=attention_implementation,
            mesh=mesh,
        )
        self.programs = StepPrograms(buckets)
        self.num_weight_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
        # What steps waited for programs that were not ready.
        self.compile_seconds = 0.0
        # The most that a compiled step takes beside weights and pool, by the compiler's account.
        self.temporary_bytes = 0

    def run(
        self,
        shape: StepShape,
        call: StepCall | DecodeCall,
        moves: BlockMoves | Sequence[BlockMoves] = NO_MOVES,
    ) -> tuple[DecodeRows | None, SamplerOutput]:
        """Dispatches a step, or a call of decode steps, after what is moved for it.

        Args:
          shape: of each of the mesh's rows.
          call: of all rows.
          moves: of each row, or of the only one.

        Returns:
          Where the rows of a decode stand then, and what was sampled: of a decode for each of its
          steps, [num_decode_steps, S, ...]. All still on device.
        """
        if moves:
            self.move(moves)
        program = self.programs.find(shape, call.sampling) or self._make(shape, call.sampling)
        if isinstance(call, DecodeCall):
            self.pool, rows, output = program(self.params, pool=self.pool, call=call)
            return rows, output
        self.pool, output = program(self.params, pool=self.pool, **call._asdict())
        return None, output

    @property
    def num_programs(self) -> int:
        """Steps that are compiled so far."""
        return len(self.programs)

    def measure_swap(self) -> float:
        """Bytes a second that blocks travel at between device and host; takes a moment."""
        self.pool, bytes_per_second = self.mover.measure_bandwidth(self.pool)
        return bytes_per_second

    def move(self, moves: BlockMoves | Sequence[BlockMoves]) -> None:
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
        with releasing_code(), ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as threads:
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
        self.pool = self.pool.empty_like(self._kv_scales)
        return True

    def use_kv_scales(self, scales: ChannelScales) -> None:
        """Gives an int8 pool, in which nothing may stand yet, other scales than its own."""
        move = lambda new, old: jax.device_put(new, old.sharding)
        self._kv_scales = jax.tree.map(move, scales, self._kv_scales)
        copies = jax.tree.map(jnp.copy, self._kv_scales)
        self.pool = dataclasses.replace(self.pool, scales=copies)

    def _make(self, shape: StepShape, sampling: SamplingBatch) -> jax.stages.Compiled:
        """The smallest program that serves a step, while the step waits."""
        started = time.perf_counter()
        release_unused()  # The steps before have left their temporaries in the heap.
        with releasing_code():
            program = self._compile(shape, is_plain=sampling.is_plain)
        self.compile_seconds += time.perf_counter() - started
        return program

    def _compile(self, shape: StepShape, is_plain: bool = False) -> jax.stages.Compiled:
        program = self._lower(self.params, self.pool, shape, is_plain=is_plain).compile()
        self.programs.add(shape, program, is_plain=is_plain)
        if (analysis := program.memory_analysis()) is not None:
            self.temporary_bytes = max(self.temporary_bytes, int(analysis.temp_size_in_bytes))
        release_unused()
        return program


def lower_step(
    params,
    pool: KVPool,
    shape: StepShape,
    *,
    config: ModelConfig,
    buckets: Buckets,
    implementation: str | None,
    mesh: Mesh | None = None,
    is_plain: bool = False,
) -> jax.stages.Lowered:
    """The engine's step at one shape, ready to compile.

    Args:
      params, pool: arrays, or trees of `jax.ShapeDtypeStruct`s like them; on the mesh, if any.
      mesh: see `StepRunner`.
      is_plain: for steps whose rows ask for the likeliest token and nothing more.
    """
    static: dict[str, Any] = dict(
        config=config, attention_implementation=implementation, is_plain=is_plain
    )
    sampling = make_sampling([], [], [], num_seqs=shape.num_seqs)
    batch = empty_batch(shape.num_tokens, shape.num_seqs, buckets.table_width)
    if not shape.decode_only:
        if mesh is not None:
            step = functools.partial(sample_step, **static)
            return _lower_on(mesh, step, params, pool, StepCall(batch, sampling))
        return _jitted_step.lower(
            params, pool=pool, batch=batch, sampling=sampling, decode_only=False, **static
        )
    none = np.zeros(shape.num_seqs, np.int32)
    call = DecodeCall(
        rows=DecodeRows(token_ids=none, positions=none, num_left=none),
        block_tables=batch.block_tables,
        sampling=sampling,
        stops=no_stops(shape.num_seqs),
        num_steps=np.int32(0),
    )
    static["max_steps"] = buckets.num_decode_steps
    if mesh is not None:
        return _lower_on(mesh, functools.partial(decode_steps, **static), params, pool, call)
    return _jitted_decode.lower(params, pool=pool, call=call, **static)


def _lower_on(
    mesh: Mesh, step: Callable[..., Any], params, pool: KVPool, call: StepCall | DecodeCall
) -> jax.stages.Lowered:
    """The step of one of a mesh's rows, of all rows, with the arguments of a step of no mesh."""
    mapped = on_mesh(step, mesh, StepSpecs.of_arrays(params, pool))
    call = stack_rows([call] * mesh.shape[DATA_AXIS])

    def run_decode(params, pool, call):
        return mapped(params, pool, call)

    def run_step(params, pool, batch, sampling):
        return mapped(params, pool, batch, sampling)

    if isinstance(call, DecodeCall):
        return jax.jit(run_decode, donate_argnames="pool").lower(params, pool=pool, call=call)
    jitted = jax.jit(run_step, donate_argnames="pool")
    return jitted.lower(params, pool=pool, **call._asdict())


def temporary_bytes(lowered: jax.stages.Lowered) -> int:
    """Peak temporary memory of a step, by the compiler's own account."""
    analysis = lowered.compile().memory_analysis()
    assert analysis is not None, "the backend gives no account of memory"
    return int(analysis.temp_size_in_bytes)


def flatten_steps(output: SamplerOutput, num_steps: int = 1) -> SamplerOutput:
    """Outputs on the host, as one row after the other.

    Of a call of decode steps, [steps, S, ...], the first `num_steps` come as [S * num_steps, ...]:
    row after row, the steps of each together. Of a step they are so already.
    """
    if output.token_ids.ndim == 1:
        return output
    return jax.tree.map(lambda x: x[:num_steps].swapaxes(0, 1).reshape(-1, *x.shape[2:]), output)
