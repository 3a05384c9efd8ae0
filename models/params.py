"""Parameters from one declaration: abstract tree, check, random initialiser and loading.

A model module declares a tree of ParamSpec, one for each parameter. Everything that needs to know a
parameter's shape, dtype or logical axes reads it there.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from paged_jax.models import int4
from paged_jax.models.config import ModelLoadError
from paged_jax.models.partition import (
    TENSOR_AXIS,
    Part,
    assemble,
    cut_dimension,
    part_of,
    parts_here,
    placements,
    whole_shape,
)
from paged_jax.models.quantized import (
    QUANTIZATIONS,
    Quantization,
    QuantizedMatrix,
    hadamard_size,
    quantize_on_host,
)

DTYPES = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """One tensor of a checkpoint. Names are Hugging Face's until rename_tensors changes them.

    unit: rows (or columns) that stay together when it is cut, a head's.
    """

    name: str
    shape: tuple[int, ...]
    unit: int = 1


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


def stored_form(spec: ParamSpec, quantization: Quantization | None) -> Quantization | None:
    """How one parameter of a quantised model is stored; None: in its dtype.

    With int4, the vocabulary's matrices stay in int8: every token's scores hang on each of their
    numbers, and files in 4 bits keep them wider too. So do rows that are no multiple of 32.
    """
    if not spec.is_matrix:
        return None
    if quantization == "int4" and ("vocab" in spec.axes or not int4.can_hold(spec.shape)):
        return "int8"
    return quantization


def abstract_params(
    specs: Any,
    dtype: str,
    quantization: Quantization | None = None,
    *,
    mesh: Mesh | None = None,
) -> Any:
    """The parameters as jax.ShapeDtypeStruct, for lowering and for planning memory.

    mesh: they carry the shardings that `load_params` gives them there.
    """
    check_dtype(dtype)
    check_quantization(quantization)

    def abstract(spec: ParamSpec) -> Any:
        form = stored_form(spec, quantization)
        if form is None:
            return jax.ShapeDtypeStruct(spec.shape, spec.dtype or dtype)
        if form == "int4":
            return int4.abstract_int4(spec.shape, dtype)
        values = jax.ShapeDtypeStruct(spec.shape, jnp.int8)
        scale = jax.ShapeDtypeStruct(spec.shape[:1], jnp.float32)
        size = hadamard_size(spec.shape[1], form)
        return QuantizedMatrix(values, scale, form, dtype, size)  # pyright: ignore[reportArgumentType]

    if mesh is None:
        return _map_specs(abstract, specs)
    num_parts = mesh.shape[TENSOR_AXIS]

    def spread(spec: ParamSpec) -> Any:
        part = abstract(part_of(spec, num_parts))
        return jax.tree.map(
            lambda leaf, place: jax.ShapeDtypeStruct(
                whole_shape(leaf.shape, place, num_parts),
                leaf.dtype,
                sharding=NamedSharding(mesh, place),
            ),
            part,
            placements(spec, part, num_parts),
        )

    return _map_specs(spread, specs)


def partition_specs(specs: Any, num_parts: int, quantization: Quantization | None = None) -> Any:
    """The parameters' `PartitionSpec`s over the axis "tensor" of so many devices."""
    dtype = DTYPES[0]

    def place(spec: ParamSpec) -> Any:
        part = abstract_params(part_of(spec, num_parts), dtype, quantization)
        return placements(spec, part, num_parts)

    return _map_specs(place, specs)


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


# (name, part or None for all of it) -> the tensor's rows, or None: the checkpoint has no such form.
ReadInt4 = Callable[[str, tuple[slice, ...] | None], int4.Int4Rows | None]


class ReadTensor(Protocol):
    """Gives the named tensor, or a part of it, converted to a dtype."""

    def __call__(
        self, name: str, dtype: np.dtype, index: tuple[slice, ...] | None = None
    ) -> np.ndarray: ...


def load_params(
    specs: Any,
    read: ReadTensor,
    dtype: str,
    quantization: Quantization | None = None,
    *,
    mesh: Mesh | None = None,
    read_int4: ReadInt4 | None = None,
) -> Any:
    """Reads every parameter, tensor by tensor, onto the default device or those of a mesh.

    Host memory beyond the parameters themselves stays near one parameter's, since each is placed
    before the next is read. Of a mesh, a process reads the parts that its own devices hold.

    Args:
        specs: tree of ParamSpec under the names that read() knows.
        read: gives the named tensor, or a part of it, converted to the dtype asked for.
        dtype: "float32" or "bfloat16".
        quantization: matrices are quantised as they are read, from float32.
        mesh: with an axis "tensor" that the model is cut over, see `models/partition.py`.
        read_int4: gives the named tensor, or a part of it, as the checkpoint has it in 4 bits, or
            None where it has not.
    Raises: ModelLoadError when read() gives another shape than was declared.
    """
    check_dtype(dtype)
    check_quantization(quantization)

    def load_part(spec: ParamSpec, part: Part) -> Any:
        own = part_of(spec, part.num_parts)
        form = stored_form(own, quantization)
        leaf_dtype = jnp.dtype("float32" if form is not None else spec.dtype or dtype)
        cut = cut_dimension(spec, part.num_parts)
        pieces: list[Any] = []
        for tensor in spec.tensors:
            index = part.slices(tensor, cut)
            if form == "int4" and read_int4 is not None:
                rows = read_int4(tensor.name, None if cut is None else index)
                if rows is not None:
                    pieces.append(rows)
                    continue
            piece = read(tensor.name, leaf_dtype, None if cut is None else index)
            shape = tuple(s.stop - s.start for s in index)
            if piece.shape != shape:
                raise ModelLoadError(
                    f"tensor {tensor.name!r} was read as {piece.shape}, expected {shape}"
                )
            pieces.append(int4.quantize_rows(piece) if form == "int4" else piece)
        if form == "int4":
            return int4.pack_rows(int4.fuse_rows(pieces, lambda arrays: fuse(arrays, own)), dtype)
        fused = fuse(pieces, own)
        return fused if form is None else quantize_on_host(fused, form, dtype)

    if mesh is None:
        return _map_specs(lambda spec: jax.tree.map(jnp.asarray, load_part(spec, Part())), specs)
    num_parts = mesh.shape[TENSOR_AXIS]
    here = sorted(set(parts_here(mesh).values()))

    def load_spread(spec: ParamSpec) -> Any:
        is_cut = cut_dimension(spec, num_parts) is not None
        parts = [load_part(spec, Part(i, num_parts)) for i in (here if is_cut else here[:1])]
        places = placements(spec, parts[0], num_parts)
        if not is_cut:
            parts *= len(here)
        return jax.tree.map(
            lambda place, *leaves: assemble(dict(zip(here, leaves, strict=True)), place, mesh),
            places,
            *parts,
        )

    return _map_specs(load_spread, specs)


def tensors_of(params: Any, specs: Any) -> dict[str, np.ndarray]:
    """A model's parameters taken apart into the tensors that they were fused from, by name.

    Args:
        params: unquantised, on one device.
        specs: their declaration.
    """
    found: dict[str, np.ndarray] = {}

    def take_apart(spec: ParamSpec, array: jax.Array) -> None:
        grouped = np.asarray(array).reshape(spec.num_groups, -1, *spec.shape[1:])
        start = 0
        for tensor in spec.tensors:
            num_rows = tensor.shape[0] // spec.num_groups
            rows = grouped[:, start : start + num_rows]
            found[tensor.name] = rows.reshape(tensor.shape)
            start += num_rows

    jax.tree.map(take_apart, specs, params, is_leaf=_is_spec)
    return found


def spread_params(
    params: Any,
    specs: Any,
    mesh: Mesh,
    dtype: str,
    quantization: Quantization | None = None,
) -> Any:
    """Parameters of one device, cut and placed on a mesh as `load_params` does it."""
    tensors = tensors_of(params, specs)

    def read(name: str, dtype: np.dtype, index: tuple[slice, ...] | None = None) -> np.ndarray:
        return tensors[name][index or ...].astype(dtype, copy=False)

    return load_params(specs, read, dtype, quantization, mesh=mesh)


def fuse(parts: list[np.ndarray], spec: ParamSpec) -> np.ndarray:
    """A parameter from the tensors that it is made of."""
    if len(parts) == 1:
        return parts[0]
    grouped = [part.reshape(spec.num_groups, -1, *part.shape[1:]) for part in parts]
    return np.concatenate(grouped, axis=1).reshape(-1, *parts[0].shape[1:])


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
