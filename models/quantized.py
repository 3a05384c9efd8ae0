"""int8 matrices: a scale for each output channel, and what multiplying by one means.

A matrix is stored as integers in [-127, 127] and one float32 scale a row (output channel), the
largest absolute value of the row over 127, so that values * scale is the matrix but for rounding.

Two modes differ in the product:

- "int8": the activations are quantised too, each row (token) by its own largest absolute value, as
  in LLM.int8() (arXiv:2208.07339) and SmoothQuant's per-token scheme (arXiv:2211.10438). The sums
  are int32, exact, and are scaled afterwards. It is what a CPU's and a TPU's int8 units do.
- "int8_weight_only": the integers are widened to the activations' dtype. It halves or quarters the
  bytes of the weights, which is what a decode step waits for, and rounds no activation.

Another format (int4 with a scale a group, fp8) is another class with these three methods.
"""

from typing import Literal

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

QUANTIZATIONS = ("int8", "int8_weight_only")
Quantization = Literal["int8", "int8_weight_only"]

_MAX_INT8 = 127
# XLA's fast int8 products on CPU start at this many rows: one row alone runs 100 times slower.
_MIN_ROWS_ON_CPU = 8


@flax.struct.dataclass
class QuantizedMatrix:
    """A matrix [out, in] in int8, or the abstract or numpy form of one."""

    values: jax.Array  # int8[out, in]
    scale: jax.Array  # float32[out]
    mode: Quantization = flax.struct.field(pytree_node=False)
    # Of what it stands for, "float32" or "bfloat16".
    dtype: str = flax.struct.field(pytree_node=False)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def take_rows(self, row_ids: jax.Array) -> jax.Array:
        """Rows of the matrix, [..., in] in its dtype, as an embedding table gives them."""
        rows = self.values[row_ids].astype(jnp.float32) * self.scale[row_ids][..., None]
        return rows.astype(self.dtype)

    def multiply(self, x: jax.Array, out_dtype: jnp.dtype | None = None) -> jax.Array:
        """x @ matrix.T.

        Args:
          x: [..., in] of a float dtype.
          out_dtype: of the result; x.dtype when None.

        Returns: [..., out].
        """
        if self.mode == "int8_weight_only":
            # Float32 and no narrower: the scale is applied before the result is rounded.
            product = _contract(x, self.values.astype(x.dtype), jnp.dtype(jnp.float32))
            return (product * self.scale).astype(out_dtype or x.dtype)
        flat = x.reshape(-1, x.shape[-1])
        values, scale = quantize_rows(flat)
        product = _int8_product(values, self.values).astype(jnp.float32)
        product = product * scale[:, None] * self.scale
        return product.reshape(*x.shape[:-1], -1).astype(out_dtype or x.dtype)


def quantize_matrix(matrix: np.ndarray, mode: Quantization, dtype: str) -> QuantizedMatrix:
    """The int8 form of a float matrix [out, in], made on the host.

    A row of zeros gets the scale 0.
    """
    largest = np.abs(matrix).max(axis=1).astype(np.float32)
    scale = largest / np.float32(_MAX_INT8)
    inverse = np.divide(_MAX_INT8, largest, out=np.zeros_like(largest), where=largest > 0)
    values = np.rint(matrix * inverse[:, None]).astype(np.int8)
    return QuantizedMatrix(jnp.asarray(values), jnp.asarray(scale), mode, dtype)


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
