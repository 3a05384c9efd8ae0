"""One step on many devices: the mesh, where every array lies on it, and the step put under it.

    mesh ("data", "tensor")        tensor ->
                            data   [device 0] [device 1]   row 0: pool 0, block tables 0
                              |    [device 2] [device 3]   row 1: pool 1, block tables 1
                              v    weights: cut along "tensor", the same in each row

A row of the mesh is one model with a pool of its own: its tables count blocks from 0, and no other
row knows them. Along "tensor" a model is cut (`models/partition.py`); a pool has the KV heads where
the weights make them. What a step is given besides weights and pool is small, and lies whole on
every device, [rows, ...]; each row takes its own part. What it returns is gathered likewise, so
that every process of several reads the same tokens and makes the same schedule.

The step itself knows none of this: it runs under `jax.shard_map` as it does under `jax.jit`, with
the name of the axis that it sums over.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from paged_jax.kv_pool import ChannelScales, KVPool
from paged_jax.models.config import ModelConfig
from paged_jax.models.params import partition_specs
from paged_jax.models.partition import TENSOR_AXIS, split_config
from paged_jax.models.quantized import Quantization
from paged_jax.models.registry import model_module

DATA_AXIS = "data"
AXES = (DATA_AXIS, TENSOR_AXIS)


def make_mesh(
    data_parallel_size: int = 1,
    tensor_parallel_size: int = 1,
    devices: Sequence[Any] | None = None,
) -> Mesh:
    """A mesh of data_parallel_size rows of tensor_parallel_size devices.

    Args:
      devices: as many as the product, row after row; None takes the first ones of `jax.devices()`.
        Devices of a row should be near each other, as they exchange sums twice a layer.

    Raises:
      ValueError: there are not as many devices.
    """
    given = jax.devices() if devices is None else list(devices)
    count = data_parallel_size * tensor_parallel_size
    if len(given) < count or (devices is not None and len(given) != count):
        raise ValueError(
            f"data_parallel_size={data_parallel_size} x tensor_parallel_size="
            f"{tensor_parallel_size} needs {count} devices, and there are {len(given)}"
            + ("; lower one of them" if devices is None else "; give as many")
        )
    grid = np.array(given[:count], object).reshape(data_parallel_size, tensor_parallel_size)
    return Mesh(grid, AXES)


def check_mesh(mesh: Mesh) -> None:
    """Raises ValueError unless it is a mesh of the axes "data" and "tensor", in this order."""
    if not isinstance(mesh, Mesh) or mesh.axis_names != AXES:
        names = mesh.axis_names if isinstance(mesh, Mesh) else type(mesh).__name__
        raise ValueError(
            f"mesh={names!r}: it must be a jax.sharding.Mesh with the axes {AXES}; make_mesh(...) "
            "makes one, and an axis may have the size 1"
        )


@dataclasses.dataclass(frozen=True)
class StepSpecs:
    """A `jax.sharding.PartitionSpec` for every array of a step, in trees like the step's own.

    Attributes:
      params: of the weights.
      pool: of the KV pool, whose blocks of all rows lie behind each other in the first dimension.
      call: of what a step is given besides, and of what it returns besides the pool: each array
        [rows, ...] and whole on every device; one for the whole tree.
    """

    params: Any
    pool: Any
    call: P = dataclasses.field(default_factory=P)

    @classmethod
    def of_arrays(cls, params, pool: KVPool) -> StepSpecs:
        """Those of weights and pool that lie on a mesh, arrays or `jax.ShapeDtypeStruct`s."""
        read = lambda tree: jax.tree.map(lambda array: array.sharding.spec, tree)
        return cls(read(params), read(pool))


def specs(
    config: ModelConfig, mesh: Mesh, *, quantization: Quantization | None = None, kv_dtype=None
) -> StepSpecs:
    """Where each array of a step lies on a mesh.

    Args:
      config: the model's shape.
      mesh: of the axes "data" and "tensor".
      quantization: of the weights, as for `load_model`.
      kv_dtype: of the pool; only int8 matters, whose pool has scales.

    Raises:
      ValueError: the model cannot be cut so.
    """
    check_mesh(mesh)
    num_parts = mesh.shape[TENSOR_AXIS]
    split_config(config, num_parts)
    declared = model_module(config).param_specs(config)
    is_int8 = kv_dtype is not None and jnp.dtype(kv_dtype) == jnp.int8
    pool = _pool_specs(config, with_scales=is_int8)
    return StepSpecs(partition_specs(declared, num_parts, quantization), pool)


def abstract_pool_on(mesh: Mesh, model: ModelConfig, *, num_blocks: int, **form: Any) -> KVPool:
    """The shapes of a pool of `num_blocks` blocks in each of a mesh's rows, with their shardings.

    Args:
      model: that of `split_config`.
      **form: further arguments of `KVPool.abstract`.
    """
    pool = KVPool.abstract(model, num_blocks=num_blocks * mesh.shape[DATA_AXIS], **form)
    places = _pool_specs(model, with_scales=pool.scales is not None)
    return jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, place)
        ),
        pool,
        places,
    )


def _pool_specs(config: ModelConfig, *, with_scales: bool) -> KVPool:
    of_scales: Any = P(None, TENSOR_AXIS)
    of_layer: Any = P(DATA_AXIS, TENSOR_AXIS)
    return KVPool(
        layers=(of_layer,) * config.num_layers,
        head_dim=config.head_dim,
        scales=ChannelScales(of_scales, of_scales) if with_scales else None,
    )


def on_mesh(step: Callable[..., tuple], mesh: Mesh, where: StepSpecs) -> Callable[..., tuple]:
    """A step for one row of a mesh, made one for all rows: jit it, and donate the pool.

    Args:
      step: (params, pool, *call, tensor_axis=...) -> (pool, *outputs) of one row, such as
        `sample_step` with its static arguments bound.
      where: `specs` of the same mesh.

    Returns:
      (params, pool, *call) -> (pool, *outputs), where every array of `call` and of the outputs has
      the rows of the mesh as a first dimension.
    """
    num_rows = mesh.shape[DATA_AXIS]
    tensor_axis = TENSOR_AXIS if mesh.shape[TENSOR_AXIS] > 1 else None

    def of_row(params, pool, call):
        row = lax.axis_index(DATA_AXIS) if num_rows > 1 else 0
        own = jax.tree.map(lambda array: array[row], call)
        pool, *outputs = step(params, pool, *own, tensor_axis=tensor_axis)
        if num_rows > 1:
            gather = lambda array: lax.all_gather(array, DATA_AXIS)
        else:
            gather = lambda array: array[None]
        return pool, jax.tree.map(gather, outputs)

    mapped = jax.shard_map(
        of_row,
        mesh=mesh,
        in_specs=(where.params, where.pool, where.call),
        out_specs=(where.pool, where.call),
        check_vma=False,  # It does not see that a sum makes outputs equal on all devices.
    )

    def of_all_rows(params, pool, *call):
        pool, outputs = mapped(params, pool, call)
        return pool, *outputs

    return of_all_rows


def for_pmap(tree: Any, mesh: Mesh) -> Any:
    """What each device of a mesh has of arrays, stacked in a first dimension: for `jax.pmap`.

    `jax.pmap` copies what lies on one device to the others at every call; what this gives lies
    where pmap wants it. Weights and pool of `load_model(..., mesh=...)` and `KVPool.create(...,
    shardings=...)` are so ready for a step under `jax.pmap(step, axis_name="tensor", devices=...)`
    or over the rows of a mesh of tensor size 1.

    Args:
      tree: arrays on the mesh.
      mesh: whose devices pmap gets, in their order: `devices=mesh.devices.flat`.

    Returns:
      The tree with arrays [devices, *part of a device].
    """
    line = Mesh(mesh.devices.reshape(-1), ("devices",))
    stacked = NamedSharding(line, P("devices"))

    def stack(array: jax.Array) -> jax.Array:
        own = {shard.device: shard.data for shard in array.addressable_shards}
        parts = [own[device][None] for device in line.devices if device in own]
        shape = (line.size, *parts[0].shape[1:])
        return jax.make_array_from_single_device_arrays(shape, stacked, parts)

    return jax.tree.map(stack, tree)


def stack_rows(calls: Sequence[Any]) -> Any:
    """What each row is given, as one tree of arrays [rows, ...]."""
    return jax.tree.map(lambda *arrays: np.stack(arrays), *calls)


def unstack_rows(outputs: Any) -> list[Any]:
    """Of each row its part of outputs that are on the host."""
    num_rows = len(jax.tree.leaves(outputs)[0])
    return [jax.tree.map(lambda array: array[row], outputs) for row in range(num_rows)]  # noqa: B023
