"""int8 matrices: a scale for each output channel, and what multiplying by one means.

A matrix is stored as integers in [-127, 127] and one float32 scale a row (output channel), the
largest absolute value of the row over 127, so that values * scale is the matrix but for rounding.

Two modes differ in the product:

- "int8": the activations are quantised too, each row (token) by its own largest absolute value, as
  in LLM.int8() (arXiv:2208.07339) and SmoothQuant's per-token scheme (arXiv:2211.10438). The sums
  are int32, exact, and are scaled afterwards. It is what a CPU's and a TPU's int8 units do. Both
  factors are rotated before they are rounded, see below.
- "int8_weight_only": the integers are widened to the activations' dtype. It halves or quarters the
  bytes of the weights, which is what a decode step waits for, and rounds no activation.

A few channels of a Llama's activations are far larger than the others, and leave them only some
of the 127 steps. So "int8" stores W H and multiplies it with x H, where H is block-diagonal, of
Hadamard matrices of up to 128 columns: x W^T = (x H) (W H)^T / 128, exact but for rounding, and
what was one large number is spread evenly over its block. QuaRot (arXiv:2404.00456) rotates the
residual stream once for all, which leaves the inputs of two matrices a layer as they are, and needs
the norms' weights folded away. A rotation at each product asks nothing of the model around it, and
costs additions.

Another format (int4 with a scale a group in int4.py, fp8) is another class with these methods.
"""

import math
from typing import Literal

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import matmul_cpu
from pallas_kernels.matmul_cpu import NOT_FUSED, Fused

# How matrices may be stored: the two modes here, and int4.py.
QUANTIZATIONS = ("int8", "int8_weight_only", "int4")
Quantization = Literal["int8", "int8_weight_only", "int4"]
INT8_MODES = ("int8", "int8_weight_only")

_MAX_INT8 = 127
# Columns that one Hadamard matrix mixes at the most; a TPU's matrix unit takes as many at a time.
_MAX_HADAMARD_SIZE = 128
# Numbers of a matrix that are quantised at a time, so that the copies this makes stay small.
_CHUNK_NUMBERS = 1 << 22
# XLA's fast int8 products on CPU start at this many rows: one row alone runs 100 times slower.
_MIN_ROWS_ON_CPU = 8


@flax.struct.dataclass
class QuantizedMatrix:
    """A matrix [out, in] in int8, or the abstract or numpy form of one.

    With hadamard_size above 1, values * scale is the matrix times `hadamard_matrix` of that size in
    each block of so many columns, over the size.
    """

    values: jax.Array  # int8[out, in]
    scale: jax.Array  # float32[out]
    mode: Quantization = flax.struct.field(pytree_node=False)
    # Of what it stands for, "float32" or "bfloat16".
    dtype: str = flax.struct.field(pytree_node=False)
    # A power of two that divides `in`; 1 rotates nothing.
    hadamard_size: int = flax.struct.field(pytree_node=False, default=1)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def take_rows(self, row_ids: jax.Array) -> jax.Array:
        """Rows of the matrix, [..., in] in its dtype, as an embedding table gives them."""
        rows = self.values[row_ids].astype(jnp.float32) * self.scale[row_ids][..., None]
        # The matrix is symmetric, and twice is the identity times its size.
        return rotate_blocks(rows, self.hadamard_size).astype(self.dtype)

    def multiply_by_kernel(self, x: jax.Array, fused: Fused = NOT_FUSED) -> jax.Array:
        """float32[N, out] of x[N, in], where `matmul_cpu.unsupported_reason` is None."""
        return matmul_cpu.matmul(
            x,
            self.values,
            self.scale,
            quantizes_x=self.mode == "int8",
            hadamard_size=self.hadamard_size,
            fused=fused,
        )

    def largest_by_kernel(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """As `matmul_cpu.largest`, of multiply_by_kernel(x)."""
        return matmul_cpu.largest(
            x,
            self.values,
            self.scale,
            quantizes_x=self.mode == "int8",
            hadamard_size=self.hadamard_size,
        )

    def multiply(self, x: jax.Array, out_dtype: jnp.dtype | None = None) -> jax.Array:
        """x @ matrix.T.

        Args:
          x: [..., in] of a float dtype.
          out_dtype: of the result; x.dtype when None.

        Returns: [..., out].
        """
        flat = x.reshape(-1, x.shape[-1])
        if matmul_cpu.unsupported_reason(flat, self.values) is None:
            product = self.multiply_by_kernel(flat)
        else:
            product = xla_multiply(self, flat)
        return product.reshape(*x.shape[:-1], -1).astype(out_dtype or x.dtype)


def xla_multiply(matrix: QuantizedMatrix, x: jax.Array) -> jax.Array:
    """float32[N, out], x[N, in] @ matrix.T, as XLA's operations: what runs where no kernel does."""
    if matrix.mode == "int8_weight_only":
        # Float32 and no narrower: the scale is applied before the result is rounded.
        product = _contract(x, matrix.values.astype(x.dtype), jnp.dtype(jnp.float32))
        return product * matrix.scale
    values, scale = quantize_rows(rotate_blocks(x, matrix.hadamard_size))
    product = _int8_product(values, matrix.values).astype(jnp.float32)
    return product * scale[:, None] * matrix.scale


def hadamard_size(num_columns: int, mode: Quantization) -> int:
    """How many columns of a matrix are mixed in that mode: the largest power of two in reach."""
    if mode == "int8_weight_only":
        return 1
    return math.gcd(num_columns, _MAX_HADAMARD_SIZE)


def hadamard_matrix(size: int) -> np.ndarray:
    """Sylvester's, float32[size, size] of 1 and -1: symmetric, its rows orthogonal."""
    matrix = np.ones((1, 1), np.float32)
    while len(matrix) < size:
        matrix = np.kron([[1, 1], [1, -1]], matrix).astype(np.float32)
    return matrix


def rotate_blocks(x: jax.Array, size: int) -> jax.Array:
    """Multiplies each block of `size` columns of x[..., K] by `hadamard_matrix(size)`.

    Its numbers are exact in every dtype, so that x is multiplied as it is, and summed in float32.

    Returns: float32[..., K]; x itself where the size is 1.
    """
    if size == 1:
        return x
    blocks = x.reshape(-1, size)
    matrix = jnp.asarray(hadamard_matrix(size), x.dtype)
    return _contract(blocks, matrix, jnp.dtype(jnp.float32)).reshape(x.shape)


def quantize_matrix(matrix: np.ndarray, mode: Quantization, dtype: str) -> QuantizedMatrix:
    """The int8 form of a float matrix [out, in], made on the host, on the default device."""
    return jax.tree.map(jnp.asarray, quantize_on_host(matrix, mode, dtype))


def quantize_on_host(matrix: np.ndarray, mode: Quantization, dtype: str) -> QuantizedMatrix:
    """The int8 form of a float matrix [out, in], in numpy arrays.

    A row of zeros gets the scale 0.
    """
    size = hadamard_size(matrix.shape[1], mode)
    rotation = hadamard_matrix(size) / np.float32(size)
    values = np.empty(matrix.shape, np.int8)
    scale = np.empty(len(matrix), np.float32)
    num_rows = max(1, _CHUNK_NUMBERS // matrix.shape[1])
    for start in range(0, len(matrix), num_rows):
        chunk = slice(start, start + num_rows)
        rows = matrix[chunk].astype(np.float32, copy=False)
        if size > 1:
            rows = (rows.reshape(-1, size) @ rotation).reshape(rows.shape)
        largest = np.abs(rows).max(axis=1)
        inverse = np.divide(_MAX_INT8, largest, out=np.zeros_like(largest), where=largest > 0)
        values[chunk] = np.rint(rows * inverse[:, None])
        scale[chunk] = largest / np.float32(_MAX_INT8)
    return QuantizedMatrix(values, scale, mode, dtype, size)  # pyright: ignore[reportArgumentType]


def quantize_rows(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """int8[N, K] and float32[N] of x[N, K]: each row by its own largest absolute value."""
    wide = x.astype(jnp.float32)
    largest = jnp.max(jnp.abs(wide), axis=-1)
    inverse = jnp.where(largest > 0, _MAX_INT8 / largest, 0.0)
    values = jnp.round(wide * inverse[:, None]).astype(jnp.int8)
    # A row that holds NaN or inf must not come out as numbers.
    scale = jnp.where(jnp.isfinite(largest), largest / _MAX_INT8, jnp.nan)
    return values, scale


def _int8_product(x: jax.Array, weight: jax.Array) -> jax.Array:
    """int32[N, out] of int8 x[N, in] and weight[out, in]."""
    num_rows = x.shape[0]
    if jax.default_backend() == "cpu" and num_rows < _MIN_ROWS_ON_CPU:
        x = jnp.pad(x, ((0, _MIN_ROWS_ON_CPU - num_rows), (0, 0)))
    return _contract(x, weight, jnp.dtype(jnp.int32))[:num_rows]


def _contract(x: jax.Array, weight: jax.Array, out_dtype: jnp.dtype) -> jax.Array:
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return lax.dot_general(
        x,
        weight,
        dimension_numbers=(((x.ndim - 1,), (1,)), ((), ())),
        precision=precision,
        preferred_element_type=out_dtype,
    )
