"""Matrix products as C++, for CPUs where a compiler is found: x[N, in] @ weight[out, in].T.

The kernel is `matmul_cpu.cc`, which says how it works; it is built on first use (`native_build`)
and called through XLA's foreign function interface. It is an operation like any other: under
jit, in loops, under shard_map, in XLA's persistent cache. vmap runs it one batch after another.
"""

from __future__ import annotations

import ctypes
import dataclasses
import pathlib

import jax
import jax.ffi
import jax.numpy as jnp
import numpy as np

from pallas_kernels import tpu_runtime
from pallas_kernels.native_build import NativeKernel, register_handler

_FOLDER = pathlib.Path(__file__).parent
SOURCE = _FOLDER / "matmul_cpu.cc"
HEADERS = tuple(
    _FOLDER / name
    for name in (
        "matmul_cpu_hadamard.h",
        "matmul_cpu_input.h",
        "matmul_cpu_int4.h",
        "matmul_cpu_output.h",
        "matmul_cpu_panel.h",
        "matmul_cpu_sink.h",
        "matmul_cpu_threads.h",
        "matmul_cpu_wide.h",
        "attention_cpu_math.h",
    )
)
_X_DTYPES = (jnp.float32, jnp.bfloat16)
_WEIGHT_DTYPES = (jnp.float32, jnp.bfloat16, jnp.int8, jnp.uint8)
# Of the blocks that `matmul_cpu_int4.h` describes.
INT4_COLUMNS, INT4_ROWS, INT4_BLOCK_BYTES = 32, 16, 320


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fused:
    """What is done to the rows of x and of the result within a product.

    norm_weight: float32[in]; x / sqrt(mean of its squares + norm_eps) * norm_weight is multiplied.
    is_swiglu: of the product [N, out], an even number of columns, silu(first half) * second half
        is the result, [N, out / 2].
    residual: float32[N, out], added to the result. Not together with is_swiglu.
    """

    norm_weight: jax.Array | None = None
    norm_eps: float = 0.0
    is_swiglu: bool = False
    residual: jax.Array | None = None


NOT_FUSED = Fused()


def unsupported_reason(x: jax.Array, weight: jax.Array) -> str | None:
    """Why the kernel cannot run here on these arguments; None if it can.

    The first call of a process builds or loads the kernel.
    """
    if jax.default_backend() != "cpu":
        return f"the default backend is {jax.default_backend()!r}, no CPU"
    if tpu_runtime.interpret_mode() is False:
        return "the program is compiled for a TPU"
    if x.dtype not in _X_DTYPES:
        return f"x has dtype {x.dtype}; use float32 or bfloat16"
    if weight.dtype not in _WEIGHT_DTYPES:
        return f"weight has dtype {weight.dtype}; use float32, bfloat16, int8 or uint8"
    return missing_reason()


def matmul(
    x: jax.Array,
    weight: jax.Array,
    weight_scale: jax.Array | None = None,
    *,
    quantizes_x: bool = False,
    hadamard_size: int = 1,
    fused: Fused = NOT_FUSED,
    target: str | None = None,
) -> jax.Array:
    """x @ weight.T, times the scale of each output. Only where `unsupported_reason` is None.

    A row's result has the same bits whatever rows stand beside it.

    Args:
      x: float32 or bfloat16 [N, in], in at least 1.
      weight: float32, bfloat16 or int8 [out, in], each row's numbers side by side.
      weight_scale: float32[out], or None for ones.
      quantizes_x: rounds each row of x to int8 by its own largest absolute value, half to even,
        and sums in int32, exact; only with int8 weights. A row that holds NaN or an infinity comes
        out as NaN. Otherwise numbers are widened to float32, multiplied and summed so.
      hadamard_size: a power of two that divides `in`: where x is quantised, each block of so many
        columns is first multiplied by the Hadamard matrix of that size (Sylvester's, of 1 and -1),
        as the weight's columns have been. 1 leaves x as it is.
      fused: what else is done on the way.
      target: of `register`, for another build than this machine's own.

    Returns:
      float32[N, out], with fused.is_swiglu [N, out / 2].

    Raises:
      ValueError: shapes or dtypes do not fit each other; the message names them.
    """
    weight_scale = _check(x, weight, weight_scale, quantizes_x, hadamard_size)
    call = jax.ffi.ffi_call(
        target or _KERNEL.target,
        jax.ShapeDtypeStruct((x.shape[0], _num_results(weight.shape[0], fused)), jnp.float32),
        vmap_method="sequential",
    )
    return call(
        x,
        weight,
        weight_scale,
        *_fused_arrays(fused, x.shape[0], weight.shape),
        quantizes_x=quantizes_x,
        hadamard_size=np.int64(hadamard_size),
        **_fused_attributes(fused),
    )


def largest(
    x: jax.Array,
    weight: jax.Array,
    weight_scale: jax.Array | None = None,
    *,
    quantizes_x: bool = False,
    hadamard_size: int = 1,
    target: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Where each row of `matmul` is largest, and that number; the rows themselves are not made.

    Args:
      x: float32 or bfloat16 [N, in], in at least 1.
      weight: [out, in], out at least 1.
      weight_scale, quantizes_x, hadamard_size, target: as for `matmul`.

    Returns:
      int32[N], the column, the first of equal ones; float32[N], the number. A row that holds NaN
      gives NaN, and the first column where it stands.

    Raises:
      ValueError: as `matmul`; or the weight has no rows.
    """
    weight_scale = _check(x, weight, weight_scale, quantizes_x, hadamard_size)
    if not weight.shape[0]:
        raise ValueError(f"weight has shape {weight.shape}: of no rows none is the largest")
    call = jax.ffi.ffi_call(
        f"{target or _KERNEL.target}_largest",
        [jax.ShapeDtypeStruct(x.shape[:1], dtype) for dtype in (jnp.int32, jnp.float32)],
        vmap_method="sequential",
    )
    columns, numbers = call(
        x,
        weight,
        weight_scale,
        quantizes_x=quantizes_x,
        hadamard_size=np.int64(hadamard_size),
    )
    return columns, numbers


def matmul_int4(
    x: jax.Array,
    blocks: jax.Array,
    num_out: int,
    *,
    fused: Fused = NOT_FUSED,
    target: str | None = None,
) -> jax.Array:
    """x @ weight.T with a weight of 4 bits. Only where `unsupported_reason` is None.

    Each 32 numbers of a row of x are rounded to int8 by their largest absolute value, half to even.
    A row that holds NaN or an infinity comes out as NaN. A row's result has the same bits whatever
    rows stand beside it.

    Args:
      x: float32 or bfloat16 [N, 32 * B].
      blocks: uint8[ceil(num_out / 16), B, INT4_BLOCK_BYTES], as `matmul_cpu_int4.h` says.
      num_out: rows of the weight; with fused.is_swiglu a multiple of 32.
      fused: what else is done on the way.
      target: of `register`, for another build than this machine's own.

    Returns:
      float32[N, num_out], with fused.is_swiglu [N, num_out / 2].

    Raises:
      ValueError: shapes do not fit each other; the message names them.
    """
    num_panels = -(-num_out // INT4_ROWS)
    if x.ndim != 2 or not x.shape[1] or x.shape[1] % INT4_COLUMNS:
        raise ValueError(f"x has shape {x.shape}; give [N, a multiple of {INT4_COLUMNS}]")
    wanted = (num_panels, x.shape[1] // INT4_COLUMNS, INT4_BLOCK_BYTES)
    if blocks.shape != wanted:
        raise ValueError(
            f"blocks has shape {blocks.shape}; for x {x.shape} and num_out={num_out} give {wanted}"
        )
    if fused.is_swiglu and num_out % (2 * INT4_ROWS):
        raise ValueError(
            f"fused.is_swiglu: num_out={num_out}; give a multiple of {2 * INT4_ROWS}, so that "
            "each half is whole blocks"
        )
    call = jax.ffi.ffi_call(
        f"{target or _KERNEL.target}_int4",
        jax.ShapeDtypeStruct((x.shape[0], _num_results(num_out, fused)), jnp.float32),
        vmap_method="sequential",
    )
    arrays = _fused_arrays(fused, x.shape[0], (num_out, x.shape[1]))
    return call(x, blocks, *arrays, **_fused_attributes(fused))


def _check(
    x: jax.Array,
    weight: jax.Array,
    weight_scale: jax.Array | None,
    quantizes_x: bool,
    hadamard_size: int,
) -> jax.Array:
    """The scales as the kernel takes them: an empty array stands for none."""
    if x.ndim != 2 or weight.ndim != 2 or not x.shape[1] or x.shape[1] != weight.shape[1]:
        raise ValueError(
            f"x {x.shape} and weight {weight.shape} do not fit: give [N, in] and [out, in]"
        )
    if weight.dtype == jnp.uint8:
        raise ValueError("weight has dtype uint8: blocks of int4 are for matmul_int4")
    if quantizes_x and weight.dtype != jnp.int8:
        raise ValueError(f"quantizes_x needs int8 weights, these are {weight.dtype}")
    num_columns = weight.shape[1]
    if hadamard_size < 1 or hadamard_size & (hadamard_size - 1) or num_columns % hadamard_size:
        raise ValueError(
            f"hadamard_size={hadamard_size}: give a power of two that divides the {num_columns} "
            "columns"
        )
    if hadamard_size > 1 and not quantizes_x:
        raise ValueError(f"hadamard_size={hadamard_size} needs quantizes_x=True")
    if weight_scale is None:
        return jnp.zeros(0, jnp.float32)
    if weight_scale.shape != weight.shape[:1]:
        raise ValueError(
            f"weight_scale has shape {weight_scale.shape}; give one for each row of weight "
            f"{weight.shape}"
        )
    return weight_scale.astype(jnp.float32)


def _num_results(num_out: int, fused: Fused) -> int:
    """Columns of the result of a product of num_out columns."""
    if not fused.is_swiglu:
        return num_out
    if num_out % 2:
        raise ValueError(f"fused.is_swiglu: the weight has {num_out} rows; give an even number")
    if fused.residual is not None:
        raise ValueError("fused: give residual or is_swiglu, not both")
    return num_out // 2


def _fused_arrays(
    fused: Fused, num_rows: int, weight_shape: tuple[int, ...]
) -> tuple[jax.Array, jax.Array]:
    """norm_weight and residual as the kernel takes them: an empty array stands for none."""
    arrays = []
    for name, wanted in (
        ("norm_weight", weight_shape[1:]),
        ("residual", (num_rows, *weight_shape[:1])),
    ):
        array = getattr(fused, name)
        if array is None:
            array = jnp.zeros(0, jnp.float32)
        elif array.shape != wanted or array.dtype != jnp.float32:
            raise ValueError(
                f"fused.{name} is {array.dtype}{list(array.shape)}; give float32{list(wanted)}"
            )
        arrays.append(array)
    return arrays[0], arrays[1]


def _fused_attributes(fused: Fused) -> dict[str, np.generic]:
    return {"norm_eps": np.float32(fused.norm_eps), "is_swiglu": np.bool_(fused.is_swiglu)}


def register(library: pathlib.Path, target: str) -> str:
    """Makes a built kernel known to XLA under a name; returns how it multiplies int8.

    Raises:
      OSError, AttributeError: it cannot be loaded, or is another library.
    """
    register_handler(library, target, "PagedMatmul")
    register_handler(library, f"{target}_largest", "PagedMatmulLargest")
    register_handler(library, f"{target}_int4", "PagedMatmulInt4")
    int8_product = ctypes.CDLL(str(library)).PagedMatmulInt8Product
    int8_product.restype = ctypes.c_char_p
    return int8_product().decode()


_KERNEL = NativeKernel(
    name="paged_matmul",
    does="matrix products on CPU run",
    source=SOURCE,
    headers=HEADERS,
    register=register,
)


def missing_reason() -> str | None:
    """Builds and registers the kernel, once a process; why it is not there, or None."""
    return _KERNEL.missing_reason
