"""int4 matrices: a scale and a minimum for each 32 columns of a row, and their products.

A number is stored as q in 0..15 and stands for scale * q + minimum, both float16. It is the form
that llama.cpp calls Q4_1 (5 bits a number), and a tensor that a GGUF file stores so, or as Q4_0
(whose minimum is -8 scales), keeps its numbers exactly. Anything else is rounded, each group of 32
from its smallest to its largest number.

Products are taken on a CPU by the C++ kernel with the activations in int8, each 32 of them by their
own largest absolute value, so that one large channel takes no steps from others than its
neighbours (as QServe, arXiv:2405.04532, and llama.cpp do). Elsewhere the weight is widened to the
activations' dtype, in each call.

The arrays lie as the kernel reads them, see matmul_cpu_int4.h.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import matmul_cpu
from pallas_kernels.matmul_cpu import INT4_COLUMNS, INT4_ROWS, NOT_FUSED, Fused

_MAX_INT4 = 15
_NIBBLE_BYTES = INT4_ROWS * INT4_COLUMNS // 2  # of a block; the scales and minima follow
# Numbers of a matrix that are quantised at a time, so that the copies this makes stay small.
_CHUNK_NUMBERS = 1 << 22


@dataclasses.dataclass(frozen=True)
class Int4Rows:
    """Rows of a matrix on the host, each as it is, so that rows can be put together.

    nibbles: uint8[rows, groups, 16]; byte i has the group's column i below and 16 + i above.
    scale, minimum: float16[rows, groups].
    """

    nibbles: np.ndarray
    scale: np.ndarray
    minimum: np.ndarray

    @property
    def shape(self) -> tuple[int, int]:
        """Of the matrix."""
        return self.nibbles.shape[0], self.nibbles.shape[1] * INT4_COLUMNS


@flax.struct.dataclass
class Int4Matrix:
    """A matrix [out, in] in int4, or the abstract or numpy form of one."""

    blocks: jax.Array  # uint8[ceil(out / 16), in / 32, INT4_BLOCK_BYTES]
    num_rows: int = flax.struct.field(pytree_node=False)
    # Of what it stands for, "float32" or "bfloat16".
    dtype: str = flax.struct.field(pytree_node=False)

    @property
    def shape(self) -> tuple[int, int]:
        return self.num_rows, self.blocks.shape[1] * INT4_COLUMNS

    def take_rows(self, row_ids: jax.Array) -> jax.Array:
        """Rows of the matrix, [..., in] in its dtype, as an embedding table gives them."""
        panels = _widen(self.blocks[row_ids // INT4_ROWS])
        places = (row_ids % INT4_ROWS)[..., None, None]
        rows = jnp.take_along_axis(panels, places, axis=-2)
        return rows[..., 0, :].astype(self.dtype)

    def multiply_by_kernel(self, x: jax.Array, fused: Fused = NOT_FUSED) -> jax.Array:
        """float32[N, out] of x[N, in], where `matmul_cpu.unsupported_reason` is None."""
        return matmul_cpu.matmul_int4(x, self.blocks, self.num_rows, fused=fused)

    def multiply(self, x: jax.Array, out_dtype: jnp.dtype | None = None) -> jax.Array:
        """x @ matrix.T.

        Args:
          x: [..., in] of a float dtype.
          out_dtype: of the result; x.dtype when None.

        Returns: [..., out].
        """
        flat = x.reshape(-1, x.shape[-1])
        if matmul_cpu.unsupported_reason(flat, self.blocks) is None:
            product = self.multiply_by_kernel(flat)
        else:
            product = xla_multiply(self, flat)
        return product.reshape(*x.shape[:-1], -1).astype(out_dtype or x.dtype)


def xla_multiply(matrix: Int4Matrix, x: jax.Array) -> jax.Array:
    """float32[N, out], x[N, in] @ matrix.T, as XLA's operations: what runs where no kernel does.

    The activations are not rounded; the weight is, to their dtype.
    """
    weight = _widen(matrix.blocks).reshape(-1, x.shape[-1])[: matrix.num_rows]
    return lax.dot_general(
        x,
        weight.astype(x.dtype),
        dimension_numbers=(((1,), (1,)), ((), ())),
        precision=lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )


def _widen(blocks: jax.Array) -> jax.Array:
    """float32[..., 16, in] of blocks[..., in / 32, INT4_BLOCK_BYTES]: 16 rows side by side."""
    batch = blocks.shape[:-2]
    num_groups = blocks.shape[-2]
    nibbles = blocks[..., :_NIBBLE_BYTES].reshape(*batch, num_groups, 4, INT4_ROWS, 4)
    halves = jnp.stack([nibbles & 15, nibbles >> 4], axis=-4)  # [..., groups, half, 4, rows, 4]
    numbers = jnp.moveaxis(halves, -2, -4)  # [..., groups, rows, half, 4, 4]
    numbers = numbers.reshape(*batch, num_groups, INT4_ROWS, INT4_COLUMNS).astype(jnp.float32)
    factors = blocks[..., _NIBBLE_BYTES:].reshape(*batch, num_groups, 2, INT4_ROWS, 2)
    factors = lax.bitcast_convert_type(factors, jnp.float16).astype(jnp.float32)
    scale, minimum = factors[..., 0, :, None], factors[..., 1, :, None]
    rows = jnp.swapaxes(numbers * scale + minimum, -2, -3)
    return rows.reshape(*batch, INT4_ROWS, num_groups * INT4_COLUMNS)


def can_hold(shape: tuple[int, ...]) -> bool:
    """Whether a matrix [out, in] of that shape has an int4 form: its rows are whole groups."""
    return len(shape) == 2 and shape[1] % INT4_COLUMNS == 0


def quantize_rows(matrix: np.ndarray) -> Int4Rows:
    """Rounds a float matrix [out, in], `in` a multiple of 32, each group by its smallest and
    largest number.
    """
    num_rows, num_groups = len(matrix), matrix.shape[1] // INT4_COLUMNS
    nibbles = np.empty((num_rows, num_groups, INT4_COLUMNS // 2), np.uint8)
    scale = np.empty((num_rows, num_groups), np.float16)
    minimum = np.empty_like(scale)
    rows_per_chunk = max(1, _CHUNK_NUMBERS // matrix.shape[1])
    for start in range(0, num_rows, rows_per_chunk):
        chunk = slice(start, start + rows_per_chunk)
        groups = matrix[chunk].astype(np.float32, copy=False)
        groups = groups.reshape(-1, num_groups, INT4_COLUMNS)
        minimum[chunk] = groups.min(axis=-1)
        lowest = minimum[chunk].astype(np.float32)
        scale[chunk] = (groups.max(axis=-1) - lowest) / _MAX_INT4
        step = scale[chunk].astype(np.float32)
        inverse = np.divide(1, step, out=np.zeros_like(step), where=step > 0)
        steps = np.rint((groups - lowest[..., None]) * inverse[..., None])
        values = np.clip(steps, 0, _MAX_INT4).astype(np.uint8)
        low, high = np.split(values, 2, axis=-1)
        nibbles[chunk] = low | high << 4
    return Int4Rows(nibbles, scale, minimum)


def int4_rows_of_ggml(blocks: np.ndarray, *, has_minimum: bool) -> Int4Rows:
    """ggml's own rows, with nothing rounded.

    Args:
      blocks: uint8[rows, groups, 20] of Q4_1 (scale and minimum, float16, then the nibbles as they
        stand in `Int4Rows`), or [rows, groups, 18] of Q4_0, which has no minimum.
      has_minimum: whether it is Q4_1.
    """
    num_bytes = 4 if has_minimum else 2
    factors = np.ascontiguousarray(blocks[..., :num_bytes]).view(np.float16)
    scale = factors[..., 0]
    # Of Q4_0, q stands for scale * (q - 8).
    minimum = factors[..., 1] if has_minimum else scale * np.float16(-8)
    return Int4Rows(blocks[..., num_bytes:], scale, minimum)


def fuse_rows(
    parts: Sequence[Int4Rows], fuse: Callable[[list[np.ndarray]], np.ndarray]
) -> Int4Rows:
    """One matrix of several; `fuse` puts arrays together whose first dimensions are rows."""
    names = [field.name for field in dataclasses.fields(Int4Rows)]
    return Int4Rows(*(fuse([getattr(part, name) for part in parts]) for name in names))


def pack_rows(rows: Int4Rows, dtype: str) -> Int4Matrix:
    """The matrix of those rows, in a numpy array. Rows that fill up the last 16 are zeros."""
    num_rows, num_groups = rows.scale.shape
    num_panels = -(-num_rows // INT4_ROWS)
    padding = num_panels * INT4_ROWS - num_rows

    def panels(array: np.ndarray, *inner: int) -> np.ndarray:
        padded = np.pad(array, ((0, padding), *((0, 0),) * (array.ndim - 1)))
        return padded.reshape(num_panels, INT4_ROWS, num_groups, *inner)

    blocks = np.empty((num_panels, num_groups, matmul_cpu.INT4_BLOCK_BYTES), np.uint8)
    # [panel, row, group, word, byte] to [panel, group, word, row, byte].
    nibbles = panels(rows.nibbles, 4, 4).transpose(0, 2, 3, 1, 4)
    blocks[..., :_NIBBLE_BYTES] = nibbles.reshape(num_panels, num_groups, _NIBBLE_BYTES)
    factors = np.stack([panels(rows.scale), panels(rows.minimum)], axis=1)
    factors = np.ascontiguousarray(factors.transpose(0, 3, 1, 2))  # [panel, group, which, row]
    blocks[..., _NIBBLE_BYTES:] = factors.view(np.uint8).reshape(num_panels, num_groups, -1)
    return Int4Matrix(blocks, num_rows, dtype)  # pyright: ignore[reportArgumentType]


def quantize_int4(matrix: np.ndarray, dtype: str) -> Int4Matrix:
    """The int4 form of a float matrix [out, in], made on the host, on the default device."""
    return jax.tree.map(jnp.asarray, pack_rows(quantize_rows(matrix), dtype))


def abstract_int4(shape: tuple[int, ...], dtype: str) -> Int4Matrix:
    """The int4 form of a matrix of that shape as jax.ShapeDtypeStruct."""
    blocks_shape = (
        -(-shape[0] // INT4_ROWS),
        shape[1] // INT4_COLUMNS,
        matmul_cpu.INT4_BLOCK_BYTES,
    )
    blocks = jax.ShapeDtypeStruct(blocks_shape, jnp.uint8)
    return Int4Matrix(blocks, shape[0], dtype)  # pyright: ignore[reportArgumentType]
