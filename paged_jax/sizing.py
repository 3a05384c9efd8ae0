"""How long, how many and how much: the numbers that the user left to the engine."""

from __future__ import annotations

import math
import os
import pathlib
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from paged_jax.batch import Buckets
from paged_jax.block_mover import swap_temporary_bytes
from paged_jax.compile import lower_step, promised_bytes, temporary_bytes
from paged_jax.config import EngineConfig, SchedulerConfig
from paged_jax.kv_pool import KVPool, uses_tpu_kernels
from paged_jax.log import logger
from paged_jax.models.config import ModelConfig
from paged_jax.sharding import abstract_pool_on

GIB = 2**30

# On a CPU the pool shares its memory with everything else the user runs, so that the engine takes a
# round gibibyte by default (or one request of the maximum length) and not nine tenths of it all.
CPU_POOL_BYTES = 1 * GIB

# Eight tokens ahead spare a CPU what the host does between steps of a few milliseconds. Steps of a
# large model are long: little is spared then, the tokens come in slow bursts, and who arrives is
# kept waiting. A step takes at least the reading of the weights, of so many about 25 ms.
CPU_LOOKAHEAD_BYTES = 512 * 2**20


def resolve(
    config: EngineConfig, model: ModelConfig, params, *, dtype, mesh: Mesh | None = None
) -> tuple[SchedulerConfig, Buckets]:
    """Settles every limit of an engine, and the shapes of its steps.

    Args:
      model: over a mesh that of `split_config`.
      dtype: of the KV pool, which need not be the weights'.
      mesh: what the weights are spread over; the limits are those of each of its rows.

    Raises:
      ValueError: max_model_len is beyond the model's; or the pool can't hold one request of the
        maximum length, naming the longest that would fit.
    """
    device = jax.devices()[0] if mesh is None else mesh.devices.flat[0]
    on_cpu = device.platform == "cpu"
    num_rows, num_parts = (1, 1) if mesh is None else mesh.devices.shape
    max_model_len = _max_model_len(config, model)
    max_num_seqs = config.max_num_seqs or min(
        32 if on_cpu else 256, config.max_num_batched_tokens or 256
    )
    max_num_batched_tokens = config.max_num_batched_tokens or max(
        512 if on_cpu else 2048, max_num_seqs
    )
    decode_lookahead = config.decode_lookahead or _lookahead(config, params, on_cpu=on_cpu)
    buckets = Buckets.choose(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        block_size=config.block_size,
        decodes_append=uses_tpu_kernels(config.attention_implementation),
        drafts=config.speculation is not None,
        num_decode_steps=max(decode_lookahead // 2, 1),
    )
    pool_form: dict[str, Any] = dict(
        block_size=config.block_size,
        dtype=dtype,
        for_tpu=uses_tpu_kernels(config.attention_implementation),
    )
    bytes_a_block = KVPool.bytes_a_block(model, **pool_form)
    if config.num_gpu_blocks_override is not None:
        num_blocks = config.num_gpu_blocks_override
    else:
        if config.kv_cache_memory_bytes is not None:
            pool_bytes = config.kv_cache_memory_bytes
        elif on_cpu:
            longest = (-(-max_model_len // config.block_size) + 1) * bytes_a_block
            room = int(available_host_bytes() * config.gpu_memory_utilization)
            pool_bytes = min(room // num_rows, max(CPU_POOL_BYTES, longest))
        else:
            room = _device_room(config, model, params, buckets, pool_form, mesh)
            pool_bytes = room * num_parts
            if config.swap_space_bytes:
                pool_bytes -= swap_temporary_bytes(bytes_a_block)
        num_blocks = _least_of_processes(max(pool_bytes, 0) // bytes_a_block, mesh)
        if num_blocks < 2:
            mend = (
                f"raise kv_cache_memory_bytes to at least {2 * bytes_a_block}"
                if config.kv_cache_memory_bytes is not None
                else f"free memory, or raise gpu_memory_utilization={config.gpu_memory_utilization}"
            )
            raise ValueError(
                f"the KV pool would have {pool_bytes} bytes, and two blocks of {config.block_size} "
                f"tokens need {2 * bytes_a_block}; {mend}"
            )
    num_host_blocks = config.swap_space_bytes // bytes_a_block
    if config.swap_space_bytes and not num_host_blocks:
        raise ValueError(
            f"swap_space_bytes={config.swap_space_bytes} holds no block of {config.block_size} "
            f"tokens, which takes {bytes_a_block}; raise it to a multiple of that, or set it to 0"
        )
    resolved = SchedulerConfig(
        num_blocks=num_blocks,
        block_size=config.block_size,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        enable_prefix_caching=config.enable_prefix_caching,
        policy=config.scheduling_policy,
        preemption_mode=config.preemption_mode,
        num_host_blocks=num_host_blocks,
        enable_host_prefix_cache=config.enable_host_prefix_cache,
        num_speculative_tokens=config.num_speculative_tokens if config.speculation else 0,
        decode_lookahead=decode_lookahead,
    )
    num_tokens = (num_blocks - 1) * config.block_size
    logger.info("Available KV cache memory: %.2f GiB", num_blocks * bytes_a_block / GIB)
    logger.info("KV cache size: %s tokens", f"{num_tokens:,}")
    logger.info(
        "Maximum concurrency for %s tokens per request: %.2fx",
        f"{max_model_len:,}",
        num_tokens / max_model_len,
    )
    return resolved, buckets


def available_host_bytes() -> int:
    """Memory that this process could still take: the system's and its control group's say.

    Pools of engines that it has already count as taken, although the system gives their memory as
    they fill. Those of other processes count as far as they are filled.
    """
    candidates = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    meminfo = pathlib.Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                candidates.append(int(line.split()[1]) * 1024)
    group = pathlib.Path("/sys/fs/cgroup")
    try:
        limit = int((group / "memory.max").read_text())
        candidates.append(limit - int((group / "memory.current").read_text()))
    except (OSError, ValueError):  # No control group, or one without a limit ("max").
        pass
    return max(min(candidates) - promised_bytes(), 0)


def _least_of_processes(number: int, mesh: Mesh | None) -> int:
    """The smallest that any process of a mesh comes with: their schedules must be the same."""
    if mesh is None or len({device.process_index for device in mesh.devices.flat}) == 1:
        return number
    return int(np.min(multihost_utils.process_allgather(np.int32(number))))


def _max_model_len(config: EngineConfig, model: ModelConfig) -> int:
    limit = model.max_position_embeddings
    if config.max_model_len is None:
        return limit
    if config.max_model_len > limit:
        raise ValueError(
            f"max_model_len={config.max_model_len} is more than the {limit} tokens that the model "
            f"was made for; set it to at most {limit}"
        )
    return config.max_model_len


def _lookahead(config: EngineConfig, params, *, on_cpu: bool) -> int:
    """Tokens to decode ahead, where the user left it open.

    Two are a step a call and the next one dispatched before it is read, which keeps nobody waiting
    for more than one step.
    """
    if config.speculation:
        return 1
    return 2 if on_cpu and device_bytes(params) > CPU_LOOKAHEAD_BYTES else 8


def device_bytes(tree: Any) -> int:
    """What one device holds of arrays, or of their shapes; on a mesh or not."""
    total = 0
    for leaf in jax.tree.leaves(tree):
        sharding = getattr(leaf, "sharding", None)
        shape = leaf.shape if sharding is None else sharding.shard_shape(leaf.shape)
        total += math.prod(shape) * leaf.dtype.itemsize
    return total


def _device_room(
    config: EngineConfig,
    model: ModelConfig,
    params,
    buckets: Buckets,
    pool_form: dict[str, Any],
    mesh: Mesh | None,
) -> int:
    """A device's memory times utilisation, less what is in use, less the largest step's."""
    device = jax.local_devices()[0]
    if mesh is not None:
        device = next(d for d in mesh.devices.flat if d.process_index == jax.process_index())
    stats = device.memory_stats()
    if not stats or "bytes_limit" not in stats:
        raise ValueError(
            f"{device} does not report its memory; set kv_cache_memory_bytes to the pool's size"
        )
    small_pool = KVPool.abstract(model, num_blocks=2, **pool_form)
    if mesh is not None:
        small_pool = abstract_pool_on(mesh, model, num_blocks=2, **pool_form)
    largest = lower_step(
        params,
        small_pool,
        buckets.shapes()[0],
        config=model,
        buckets=buckets,
        implementation=config.attention_implementation,
        mesh=mesh,
    )
    limit = int(stats["bytes_limit"] * config.gpu_memory_utilization)
    return limit - stats.get("bytes_in_use", 0) - temporary_bytes(largest)
