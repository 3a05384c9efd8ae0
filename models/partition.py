"""How a model is cut for tensor parallelism: which part of each parameter a device holds.

A device has some of the query heads with the KV heads that they read, some of the columns between
gate_up and down, and some of the vocabulary (Megatron-LM, arXiv:1909.08053): one sum over the
devices after the attention, one after the MLP. Parts are cut from a checkpoint's own tensors, and
fused afterwards:

    tensors of a checkpoint      a device's part of each       the device's parameter
    gate [F, E], up [F, E]   ->  [F / n, E], [F / n, E]    ->  gate_up [2 F / n, E]

With fewer KV heads than devices, several devices hold the same KV head, each with its own share of
that head's query heads. The model that the devices run is then one with more KV heads
(`split_config`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from paged_jax.models.config import ModelConfig
from paged_jax.models.int4 import Int4Matrix
from paged_jax.models.quantized import QuantizedMatrix

TENSOR_AXIS = "tensor"
# The logical axes that are cut; "vocab" only where the devices' shares are equal.
_CUT_AXES = ("kv_heads", "mlp", "vocab")


def split_config(config: ModelConfig, num_devices: int) -> ModelConfig:
    """The model that `num_devices` run together: with a KV head for each of them at least.

    Raises:
      ValueError: the heads or the MLP's columns cannot be shared out, with the sizes that can.
    """
    if num_devices == 1:
        return config
    reason = _misfit(config, num_devices)
    if reason is not None:
        fitting = [n for n in range(2, config.num_heads + 1) if _misfit(config, n) is None]
        raise ValueError(
            f"tensor_parallel_size={num_devices}: {reason}; use "
            + (f"1 or one of {fitting}" if fitting else "1")
        )
    return dataclasses.replace(config, num_kv_heads=max(config.num_kv_heads, num_devices))


def _misfit(config: ModelConfig, num_devices: int) -> str | None:
    for field in ("num_heads", "intermediate_size"):
        if getattr(config, field) % num_devices:
            return f"the model's {field}={getattr(config, field)} is no multiple of it"
    num_kv_heads = config.num_kv_heads
    if num_kv_heads % num_devices and num_devices % num_kv_heads:
        return f"the model's num_kv_heads={num_kv_heads} is neither a multiple nor a divisor of it"
    return None


@dataclasses.dataclass(frozen=True)
class Part:
    """The share that one device of several has of a parameter."""

    index: int = 0
    num_parts: int = 1

    def slices(self, tensor: Any, cut: int | None) -> tuple[slice, ...]:
        """Which part of a `TensorSpec`; the whole where it is not cut (`cut` is None)."""
        whole = [slice(0, size) for size in tensor.shape]
        if cut is not None:
            num_units = tensor.shape[cut] // tensor.unit
            # Fewer heads than devices: neighbours hold the same one.
            num_own = max(num_units // self.num_parts, 1)
            first = self.index * num_units // self.num_parts
            whole[cut] = slice(first * tensor.unit, (first + num_own) * tensor.unit)
        return tuple(whole)


def cut_dimension(spec: Any, num_parts: int) -> int | None:
    """The dimension in which a `ParamSpec` is cut; None where every device has all of it."""
    if num_parts == 1:
        return None
    for dimension, axis in enumerate(spec.axes):
        if axis == "vocab" and spec.shape[dimension] % num_parts:
            return None
        if axis in _CUT_AXES:
            return dimension
    return None


def part_of(spec: Any, num_parts: int) -> Any:
    """The `ParamSpec` of one device's part; of the same shape for each."""
    cut = cut_dimension(spec, num_parts)
    if cut is None:
        return spec
    part = Part(0, num_parts)
    tensors = tuple(
        dataclasses.replace(tensor, shape=tuple(s.stop - s.start for s in part.slices(tensor, cut)))
        for tensor in spec.tensors
    )
    return dataclasses.replace(
        spec, tensors=tensors, num_groups=max(spec.num_groups // num_parts, 1)
    )


def placements(spec: Any, part: Any, num_parts: int) -> Any:
    """A `PartitionSpec` for each array of a parameter.

    The parts of a quantised matrix, whose scales are its own, lie behind each other in the first
    dimension of every array, whichever dimension was cut.

    Args:
      spec: the parameter's `ParamSpec`.
      part: one device's part of it, an array (or its shape) or a `QuantizedMatrix` of them.
    """
    cut = cut_dimension(spec, num_parts)
    if cut is None:
        return jax.tree.map(lambda _: P(), part)
    if isinstance(part, QuantizedMatrix | Int4Matrix):
        return jax.tree.map(lambda _: P(TENSOR_AXIS), part)
    return P(*(TENSOR_AXIS if d == cut else None for d in range(cut + 1)))


def whole_shape(shape: tuple[int, ...], place: P, num_parts: int) -> tuple[int, ...]:
    """Shape of the array of all devices, from that of one device's part."""
    axes = (*place, *(None,) * (len(shape) - len(place)))
    return tuple(
        size * num_parts if axis == TENSOR_AXIS else size
        for size, axis in zip(shape, axes, strict=True)
    )


def parts_here(mesh: jax.sharding.Mesh) -> dict[Any, int]:
    """The devices of the mesh that this process can reach, and which part each of them holds."""
    where = mesh.axis_names.index(TENSOR_AXIS)
    return {
        device: index[where]
        for index, device in np.ndenumerate(mesh.devices)
        if device.process_index == jax.process_index()
    }


def assemble(parts: dict[int, np.ndarray], place: P, mesh: jax.sharding.Mesh) -> jax.Array:
    """One array over all devices of a mesh, from the parts that this process's devices hold.

    Args:
      parts: by their index; of an array that is not cut they are equal.
    """
    shape = next(iter(parts.values())).shape
    num_parts = mesh.shape[TENSOR_AXIS]
    return jax.make_array_from_single_device_arrays(
        whole_shape(shape, place, num_parts),
        jax.sharding.NamedSharding(mesh, place),
        [jax.device_put(parts[index], device) for device, index in parts_here(mesh).items()],
    )
