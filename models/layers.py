"""The pieces a decoder is made of: products, RMSNorm, rotary embedding, SwiGLU."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from paged_jax.models.config import RopeConfig
from paged_jax.models.int4 import Int4Matrix
from paged_jax.models.quantized import QuantizedMatrix
from pallas_kernels import matmul_cpu
from pallas_kernels.matmul_cpu import Fused

# A weight [out, in]: as it is, in int8, or in int4.
Matrix = jax.Array | QuantizedMatrix | Int4Matrix
# Rows of x for which the C++ product is measured to be faster on CPU than XLA's, by the weight's
# dtype. One row of float32 waits for memory in both; of bfloat16 XLA makes a float32 copy.
_KERNEL_ROWS = {"float32": range(2, 1 << 30), "bfloat16": range(1, 8)}


def linear(x: jax.Array, weight: Matrix, *, out_dtype: jnp.dtype | None = None) -> jax.Array:
    """x @ weight.T.

    Args:
        x: [..., in].
        weight: [out, in]. Contracting the last dimension of both is what XLA runs fastest on CPU
            and what checkpoints store.
        out_dtype: dtype of the result, and of the accumulation where it is wider than x;
            x.dtype when None.
    Returns: [..., out].
    """
    if isinstance(weight, QuantizedMatrix | Int4Matrix):
        return weight.multiply(x, out_dtype)
    if _has_kernel(x, weight):
        product = matmul_cpu.matmul(x.reshape(-1, x.shape[-1]), weight)
        return product.reshape(*x.shape[:-1], -1).astype(out_dtype or x.dtype)
    # By default TPUs multiply float32 in bfloat16 passes and GPUs in TF32.
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return lax.dot_general(
        x,
        weight,
        dimension_numbers=(((x.ndim - 1,), (1,)), ((), ())),
        precision=precision,
        preferred_element_type=out_dtype or x.dtype,
    )


def _has_kernel(x: jax.Array, weight: Matrix) -> bool:
    """Whether the C++ product runs here on these, and is the faster one."""
    if isinstance(weight, jax.Array):
        if math.prod(x.shape[:-1]) not in _KERNEL_ROWS.get(str(weight.dtype), ()):
            return False
    return matmul_cpu.unsupported_reason(x, jax.tree.leaves(weight)[0]) is None


def norm_linear(x: jax.Array, norm_weight: jax.Array, weight: Matrix, eps: float) -> jax.Array:
    """linear(rms_norm(x, norm_weight, eps), weight): one operation where the C++ product runs."""
    if x.dtype == jnp.float32 and _has_kernel(x, weight):
        return _fused_linear(x, weight, Fused(norm_weight=norm_weight, norm_eps=eps))
    return linear(rms_norm(x, norm_weight, eps), weight)


def norm_swiglu_linear(
    x: jax.Array, norm_weight: jax.Array, gate_up: Matrix, eps: float
) -> jax.Array:
    """swiglu(norm_linear(x, norm_weight, gate_up, eps)), as norm_linear() does it."""
    # The kernel takes both halves side by side, of int4 in whole blocks.
    unit = 2 * matmul_cpu.INT4_ROWS if isinstance(gate_up, Int4Matrix) else 2
    if x.dtype == jnp.float32 and gate_up.shape[0] % unit == 0 and _has_kernel(x, gate_up):
        fused = Fused(norm_weight=norm_weight, norm_eps=eps, is_swiglu=True)
        return _fused_linear(x, gate_up, fused)
    return swiglu(norm_linear(x, norm_weight, gate_up, eps))


def add_linear(
    residual: jax.Array, x: jax.Array, weight: Matrix, tensor_axis: str | None
) -> jax.Array:
    """residual + row_parallel_linear(x, weight, tensor_axis), as norm_linear() does it."""
    if tensor_axis is None and x.dtype == jnp.float32 and _has_kernel(x, weight):
        return _fused_linear(x, weight, Fused(residual=residual))
    return residual + row_parallel_linear(x, weight, tensor_axis)


def can_find_largest(x: jax.Array, weight: Matrix) -> bool:
    """Whether find_largest() runs here on x[N, in] and weight[out, in]."""
    return not isinstance(weight, Int4Matrix) and _has_kernel(x, weight)


def find_largest(x: jax.Array, weight: Matrix) -> tuple[jax.Array, jax.Array]:
    """Where each row of linear(x, weight) is largest, and that number; see `matmul_cpu.largest`.

    Returns: int32[N], the first of equal ones; float32[N], NaN for a row that holds NaN.
    """
    if isinstance(weight, QuantizedMatrix):
        return weight.largest_by_kernel(x)
    assert isinstance(weight, jax.Array)
    return matmul_cpu.largest(x, weight)


def _fused_linear(x: jax.Array, weight: Matrix, fused: Fused) -> jax.Array:
    """The C++ product of x[N, ...] in float32."""
    if isinstance(weight, QuantizedMatrix | Int4Matrix):
        return weight.multiply_by_kernel(x, fused)
    return matmul_cpu.matmul(x, weight, fused=fused)


def row_parallel_linear(x: jax.Array, weight: Matrix, tensor_axis: str | None) -> jax.Array:
    """linear() where each device of tensor_axis holds a slice of the contracted dimension.

    Partial sums are added in float32, so that bfloat16 is rounded once and not once per device.

    Args:
        x: [..., in / devices]. weight: [out, in / devices].
        tensor_axis: name of the mapped axis to sum over; None on one device.
    Returns: [..., out] in x.dtype, equal on every device.
    """
    if tensor_axis is None:
        return linear(x, weight)
    partial = linear(x, weight, out_dtype=jnp.dtype(jnp.float32))
    return lax.psum(partial, tensor_axis).astype(x.dtype)


def vocab_parallel_embedding(
    table: Matrix, token_ids: jax.Array, *, vocab_size: int, tensor_axis: str | None
) -> jax.Array:
    """Rows of an embedding table that is whole, or split by rows over tensor_axis.

    Args:
        table: [vocab_size, E], or [vocab_size / devices, E].
        token_ids: int32[T], each in [0, vocab_size).
    Returns: [T, E] in the table's dtype, equal on every device.
    """
    num_rows = table.shape[0]
    if tensor_axis is None or num_rows == vocab_size:
        return _take_rows(table, token_ids)
    local_ids = token_ids - lax.axis_index(tensor_axis) * num_rows
    is_local = (local_ids >= 0) & (local_ids < num_rows)
    rows = _take_rows(table, jnp.clip(local_ids, 0, num_rows - 1))
    return lax.psum(jnp.where(is_local[:, None], rows, 0), tensor_axis)


def _take_rows(table: Matrix, row_ids: jax.Array) -> jax.Array:
    if isinstance(table, QuantizedMatrix | Int4Matrix):
        return table.take_rows(row_ids)
    return table[row_ids]


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """x / rms(x) * weight over the last dimension (arXiv:1910.07467), in float32.

    Args: x: [..., E] of any float dtype. weight: [E].
    Returns: [..., E] in x.dtype.
    """
    wide = x.astype(jnp.float32)
    inverse_rms = lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return (wide * inverse_rms * weight.astype(jnp.float32)).astype(x.dtype)


def rope_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Angular frequency of each rotated pair, in radians per position: float64[head_dim / 2].

    The method is RoFormer's (arXiv:2104.09864); the llama3 kind follows the scaling that Llama 3.1
    was released with: a frequency whose wavelength exceeds the original context divided by
    low_freq_factor is divided by factor, one with a wavelength below the original context divided
    by high_freq_factor is kept, and between the two the shares shift linearly.
    """
    frequencies = rope.theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if rope.kind == "linear":
        frequencies = frequencies / rope.factor
    elif rope.kind == "llama3":
        low, high = rope.low_freq_factor, rope.high_freq_factor
        context = rope.original_max_position_embeddings
        assert low is not None and high is not None and context is not None
        turns_in_context = context * frequencies / (2 * math.pi)
        kept_share = np.clip((turns_in_context - low) / (high - low), 0.0, 1.0)
        frequencies = kept_share * frequencies + (1 - kept_share) * frequencies / rope.factor
    if rope.divisors is not None:
        frequencies = frequencies / np.asarray(rope.divisors, dtype=np.float64)
    return frequencies


def rope_tables(
    positions: jax.Array, rope: RopeConfig, head_dim: int
) -> tuple[jax.Array, jax.Array]:
    """cos and sin of position * frequency, exact to float32 for positions below 2**20.

    A float32 product of position and frequency is off by up to half a unit in its last place,
    which at position 100,000 is 0.004 radians. Here the phase is counted in turns, as a fixed-point
    fraction of 32 bits whose whole turns overflow away: frequency = high * 2**-32 + low * 2**-44
    turns, both factors integers, so that phase = position * high + (position * low >> 12) modulo
    2**32, with nothing rounded but the frequency's 44th bit.

    Args: positions: int32[T] in [0, 2**20).
    Returns: two float32[T, head_dim / 2].
    """
    turns = np.mod(rope_frequencies(rope, head_dim) / (2 * math.pi), 1.0)
    fixed_point = np.rint(turns * 2.0**44).astype(np.uint64)
    high = jnp.asarray((fixed_point >> 12).astype(np.uint32))
    low = jnp.asarray((fixed_point & 0xFFF).astype(np.uint32))
    position = positions.astype(jnp.uint32)[:, None]
    phase = position * high + ((position * low) >> 12)
    # Read as signed, the phase is a turn between -1/2 and 1/2: the range where cos and sin are
    # most exact.
    half_turns = lax.bitcast_convert_type(phase, jnp.int32).astype(jnp.float32) * 2.0**-31
    angle = half_turns * math.pi
    return jnp.cos(angle), jnp.sin(angle)


def apply_rope(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates each head's pairs (i, i + D/2), in float32.

    The pairing is Hugging Face's "rotate half", the order in which its checkpoints store the rows
    of the query and key projections.

    Args: x: [T, H, D]. cos, sin: float32[T, D / 2].
    Returns: [T, H, D] in x.dtype.
    """
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)


def swiglu(gate_up: jax.Array) -> jax.Array:
    """silu(gate) * up (arXiv:2002.05202), silu in float32.

    Args: gate_up: [..., 2 * F], gate first.
    Returns: [..., F] in gate_up.dtype.
    """
    gate, up = jnp.split(gate_up.astype(jnp.float32), 2, axis=-1)
    return (jax.nn.silu(gate) * up).astype(gate_up.dtype)
