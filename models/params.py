"""Parameters from one declaration: abstract tree, check, random initialiser and loading.

A model module declares a tree of ParamSpec, one for each parameter. Everything that needs to know a
parameter's shape, dtype or logical axes reads it there.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paged_jax.models.config import ModelLoadError
from paged_jax.models.quantized import (
    QUANTIZATIONS,
    Quantization,
    QuantizedMatrix,
    hadamard_size,
    quantize_matrix,
)

DTYPES = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """One tensor of a checkpoint. Names are Hugging Face's until rename_tensors changes them."""

    name: str
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParamSpec:
    """One parameter of a model, made of one or more tensors of a checkpoint.

    tensors: fused along their first dimension.
    axes: a logical name per dimension, which a sharding maps to mesh axes; None is never sharded.
    num_groups: with more than one, the rows are interleaved by groups: first the first group's
        share of every tensor in turn, then the second group's, and so on.
    dtype: None for the model's dtype, or a fixed one.
    init_scale: standard deviation of the random initialiser; None initialises to ones.
    """

    tensors: tuple[TensorSpec, ...]
    axes: tuple[str | None, ...]
    num_groups: int = 1
    dtype: str | None = None
    init_scale: float | None = 0.02

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the fused parameter."""
        num_rows = sum(tensor.shape[0] for tensor in self.tensors)
        return (num_rows, *self.tensors[0].shape[1:])

    @property
    def is_matrix(self) -> bool:
        """Whether quantisation takes it: a weight of two dimensions in the model's dtype."""
        return self.dtype is None and len(self.shape) == 2


def _is_spec(node: object) -> bool:
    return isinstance(node, ParamSpec)


def _map_specs(function: Callable[[ParamSpec], Any], specs: Any) -> Any:
    return jax.tree.map(function, specs, is_leaf=_is_spec)


def list_tensors(specs: Any) -> list[TensorSpec]:
    """All tensors that the parameters are made of, in the tree's order."""
    leaves = jax.tree.leaves(specs, is_leaf=_is_spec)
    return [tensor for spec in leaves for tensor in spec.tensors]


def rename_tensors(specs: Any, rename: Callable[[str], str]) -> Any:
    """The same declaration with the tensors under the names of another checkpoint format."""

    def rename_all(spec: ParamSpec) -> ParamSpec:
        renamed = [dataclasses.replace(t, name=rename(t.name)) for t in spec.tensors]
        return dataclasses.replace(spec, tensors=tuple(renamed))

    return _map_specs(rename_all, specs)


def abstract_params(specs: Any, dtype: str, quantization: Quantization | None = None) -> Any:
    """The parameters as jax.ShapeDtypeStruct, for lowering and for planning memory."""
    check_dtype(dtype)
    check_quantization(quantization)

    def abstract(spec: ParamSpec) -> Any:
        if quantization is None or not spec.is_matrix:
            return jax.ShapeDtypeStruct(spec.shape, spec.dtype or dtype)
        values = jax.ShapeDtypeStruct(spec.shape, jnp.int8)
        scale = jax.ShapeDtypeStruct(spec.shape[:1], jnp.float32)
        size = hadamard_size(spec.shape[1], quantization)
        return QuantizedMatrix(values, scale, quantization, dtype, size)  # pyright: ignore[reportArgumentType]

    return _map_specs(abstract, specs)


def init_params(specs: Any, key: jax.Array, dtype: str) -> Any:
    """Random parameters, for tests and benchmarks.

    Each parameter's numbers follow from the key and the parameter's place in the tree.
    """
    check_dtype(dtype)
    leaves, treedef = jax.tree.flatten(specs, is_leaf=_is_spec)

    def init(spec: ParamSpec, key: jax.Array) -> jax.Array:
        leaf_dtype = spec.dtype or dtype
        if spec.init_scale is None:
            return jnp.ones(spec.shape, leaf_dtype)
        return (jax.random.normal(key, spec.shape) * spec.init_scale).astype(leaf_dtype)

    keys = jax.random.split(key, len(leaves))
    return treedef.unflatten([init(spec, key) for spec, key in zip(leaves, keys, strict=True)])


def load_params(
    specs: Any,
    read: Callable[[str, np.dtype], np.ndarray],
    dtype: str,
    quantization: Quantization | None = None,
) -> Any:
    """Reads every parameter, tensor by tensor, onto the default device.

    Host memory beyond the parameters themselves stays near one parameter's, since each is placed
    before the next is read.

    Args:
        specs: tree of ParamSpec under the names that read() knows.
        read: gives the named tensor, converted to the dtype asked for.
        dtype: "float32" or "bfloat16".
        quantization: matrices are quantised as they are read, from float32.
    Raises: ModelLoadError when read() gives another shape than was declared.
    """
    check_dtype(dtype)
    check_quantization(quantization)

    def load(spec: ParamSpec) -> jax.Array | QuantizedMatrix:
        is_quantized = quantization is not None and spec.is_matrix
        leaf_dtype = jnp.dtype("float32" if is_quantized else spec.dtype or dtype)
        parts = []
        for tensor in spec.tensors:
            part = read(tensor.name, leaf_dtype)
            if part.shape != tensor.shape:
                raise ModelLoadError(
                    f"tensor {tensor.name!r} was read as {part.shape}, expected {tensor.shape}"
                )
            parts.append(part)
        fused = _fuse(parts, spec)
        if quantization is not None and is_quantized:
            return quantize_matrix(fused, quantization, dtype)
        return jnp.asarray(fused)

    return _map_specs(load, specs)


def _fuse(parts: list[np.ndarray], spec: ParamSpec) -> np.ndarray:
    if len(parts) == 1:
        return parts[0]
    grouped = [part.reshape(spec.num_groups, -1, *part.shape[1:]) for part in parts]
    return np.concatenate(grouped, axis=1).reshape(spec.shape)


def check_params(params: Any, specs: Any, dtype: str) -> None:
    """Compares parameters from elsewhere with the declaration.

    Raises: ModelLoadError naming every parameter whose shape or dtype differs, or a tree of
        another structure.
    """
    wanted, wanted_tree = jax.tree.flatten_with_path(abstract_params(specs, dtype))
    found, found_tree = jax.tree.flatten_with_path(params)
    if found_tree != wanted_tree:
        raise ModelLoadError(
            f"parameters form another tree than the model's: found {found_tree}, "
            f"expected {wanted_tree}"
        )
    faults = [
        f"{jax.tree_util.keystr(path)}: found {leaf.dtype}{list(leaf.shape)}, "
        f"expected {want.dtype}{list(want.shape)}"
        for (path, leaf), (_, want) in zip(found, wanted, strict=True)
        if leaf.shape != want.shape or leaf.dtype != want.dtype
    ]
    if faults:
        raise ModelLoadError("parameters do not fit the model: " + "; ".join(faults))


def check_dtype(dtype: str) -> None:
    """Raises ValueError unless dtype names a dtype that models run in."""
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r} is not supported: use one of {DTYPES}")


def check_quantization(quantization: str | None) -> None:
    """Raises ValueError unless it is None or names a form that matrices may have."""
    if quantization is not None and quantization not in QUANTIZATIONS:
        raise ValueError(
            f"quantization={quantization!r} is not supported: use None or one of {QUANTIZATIONS}"
        )
