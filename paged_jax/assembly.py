"""An engine from a model and a configuration: its mesh, its pool, its programs."""

from __future__ import annotations

from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from paged_jax.compile import StepRunner
from paged_jax.config import EngineConfig
from paged_jax.data_parallel import DataParallelEngine
from paged_jax.engine import Engine
from paged_jax.intake import Intake
from paged_jax.kv_calibration import calibrate
from paged_jax.kv_pool import KVPool, uses_tpu_kernels
from paged_jax.models.loader import LoadedModel
from paged_jax.models.partition import TENSOR_AXIS, split_config
from paged_jax.sharding import DATA_AXIS, StepSpecs, check_mesh, make_mesh, specs
from paged_jax.sizing import resolve
from paged_jax.tokenizer import Tokenizer


def choose_mesh(config: EngineConfig, mesh: Mesh | None) -> Mesh | None:
    """The mesh that a configuration asks for, or the one given; None for one device.

    Raises:
      ValueError: the mesh has other axes, or is of another size than the configuration says, or
        there are not as many devices.
    """
    sizes = {
        DATA_AXIS: config.data_parallel_size,
        TENSOR_AXIS: config.tensor_parallel_size,
    }
    if mesh is None:
        if set(sizes.values()) == {1}:
            return None
        return make_mesh(config.data_parallel_size, config.tensor_parallel_size)
    check_mesh(mesh)
    for axis, size in sizes.items():
        if size not in (1, mesh.shape[axis]):
            raise ValueError(
                f"{axis}_parallel_size={size}, and the mesh's axis {axis!r} has the size "
                f"{mesh.shape[axis]}; leave {axis}_parallel_size out"
            )
    return mesh


def make_engine(model: LoadedModel, tokenizer: Tokenizer | None, config: EngineConfig) -> Engine:
    """The engine of a model, on the devices that the model was loaded to.

    Over several rows of a mesh it is a `DataParallelEngine`, which is an engine but for what each
    row has of its own (`shards`); for type checkers it is an Engine, as nearly all are.

    Raises:
      ValueError: a limit does not fit the model or the memory; see `sizing.resolve`.
    """
    mesh = model.mesh
    num_rows = 1 if mesh is None else mesh.shape[DATA_AXIS]
    model_config, where = model.config, None
    if mesh is not None:
        _check_processes(mesh, config)
        model_config = split_config(model.config, mesh.shape[TENSOR_AXIS])
        where = specs(
            model.config,
            mesh,
            quantization=model.quantization,
            kv_dtype=_kv_dtype(model, config),
        )
    scheduler_config, buckets = resolve(
        config, model_config, model.params, dtype=jnp.dtype(_kv_dtype(model, config)), mesh=mesh
    )
    pool = _make_pool(
        model,
        model_config,
        tokenizer,
        config,
        where,
        num_blocks=scheduler_config.num_blocks * num_rows,
        max_model_len=scheduler_config.max_model_len,
    )
    runner = StepRunner(
        model.params,
        pool,
        config=model_config,
        buckets=buckets,
        # Block 0 of the host is never used either.
        num_host_blocks=scheduler_config.num_host_blocks and scheduler_config.num_host_blocks + 1,
        attention_implementation=config.attention_implementation,
        mesh=mesh,
    )
    if config.warmup:
        runner.warm_up()
    intake = Intake(
        scheduler_config,
        vocab_size=model.config.vocab_size,
        eos_token_ids=model.eos_token_ids,
        tokenizer=tokenizer,
        seed=config.seed,
    )
    options: dict[str, Any] = dict(
        log_stats=not config.disable_log_stats,
        swap_alert_tokens_per_second=config.swap_alert_tokens_per_second,
        watch_prefixes=config.watch_prefixes,
    )
    if num_rows == 1:
        engine = Engine(runner, intake, **options)
    else:
        engine = cast(Engine, DataParallelEngine(runner, intake, num_rows=num_rows, **options))
    if scheduler_config.num_host_blocks and config.preemption_mode == "auto":
        bytes_per_second = runner.measure_swap()
        for shard in engine.shards:
            shard.scheduler.costs.swap_bytes_per_second = bytes_per_second
    return engine


def _kv_dtype(model: LoadedModel, config: EngineConfig) -> str:
    return model.dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype


def _make_pool(
    model: LoadedModel,
    model_config: Any,
    tokenizer: Tokenizer | None,
    config: EngineConfig,
    where: StepSpecs | None,
    *,
    num_blocks: int,
    max_model_len: int,
) -> KVPool:
    kv_dtype = _kv_dtype(model, config)
    scales = shardings = None
    if kv_dtype == "int8":
        scales = calibrate(
            model.params,
            config=model_config,
            tokenizer=tokenizer,
            max_model_len=max_model_len,
            mesh=model.mesh,
            param_specs=None if where is None else where.params,
        )
    if model.mesh is not None and where is not None:
        mesh = model.mesh
        shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), where.pool)
    try:
        return KVPool.create(
            model_config,
            num_blocks=num_blocks,
            block_size=config.block_size,
            dtype=jnp.dtype(kv_dtype),
            scales=scales,
            for_tpu=uses_tpu_kernels(config.attention_implementation),
            shardings=shardings,
        )
    except (jax.errors.JaxRuntimeError, MemoryError) as error:
        raise ValueError(
            f"a KV pool of {num_blocks} blocks does not fit the device's memory; lower "
            "kv_cache_memory_bytes, num_gpu_blocks_override or gpu_memory_utilization"
        ) from error


def _check_processes(mesh: Mesh, config: EngineConfig) -> None:
    """Raises ValueError if several processes are asked for what only one can do."""
    processes = {device.process_index for device in mesh.devices.flat}
    if len(processes) > 1 and config.swap_space_bytes:
        raise ValueError(
            f"swap_space_bytes={config.swap_space_bytes}: a mesh of {len(processes)} processes "
            "does not swap, as no process reaches all of a block; set it to 0"
        )
