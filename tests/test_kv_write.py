"""KV writes: exact contents, nothing else touched, and the pool stays in its buffer."""

from __future__ import annotations

import dataclasses
import functools
import time
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import kv_write_tpu, tpu_runtime
from pallas_kernels.kv_write import write_kv
from pallas_kernels.pool_storage import tpu_pool_shape

NUM_BLOCKS = 9
NUMPY_DTYPES = {
    name: np.dtype(getattr(ml_dtypes, name))
    for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2")
} | {name: np.dtype(name) for name in ("float32", "float16", "int8", "uint16")}
SCALED_DTYPES = ("int8", "float8_e4m3fn", "float8_e5m2")


@dataclasses.dataclass(frozen=True)
class Shape:
    """What a pool is made for; `for_tpu` gives it the rows of 128 lanes that a TPU wants."""

    num_kv_heads: int
    block_size: int
    head_dim: int
    for_tpu: bool = True

    @property
    def pool_shape(self) -> tuple[int, int, int, int]:
        if self.for_tpu:
            return tpu_pool_shape(NUM_BLOCKS, self.num_kv_heads, self.block_size, self.head_dim)
        return NUM_BLOCKS, 2 * self.num_kv_heads, self.block_size, self.head_dim


SHAPES = {
    "a token a row": Shape(2, 16, 128),
    "two tokens a row": Shape(2, 16, 64),
    "filled up": Shape(3, 8, 96),
    "two columns": Shape(1, 24, 192),
    "blocks of four rows": Shape(1, 8, 64),
    "plain": Shape(2, 4, 8, for_tpu=False),
}


def as_bits(array: Any) -> np.ndarray:
    values = np.asarray(array)
    return values.view({1: np.uint8, 2: np.uint16, 4: np.uint32}[values.dtype.itemsize])


def poisoned_pool(seed: int, shape: Shape, dtype: str) -> np.ndarray:
    """Half NaN, or any bytes where the dtype has none."""
    rng = np.random.default_rng(seed)
    if dtype in ("int8", "uint16"):
        limits = np.iinfo(dtype)
        return rng.integers(limits.min, limits.max + 1, shape.pool_shape).astype(dtype)
    values = rng.standard_normal(shape.pool_shape)
    values[rng.random(shape.pool_shape) < 0.5] = np.nan
    return values.astype(NUMPY_DTYPES[dtype])


def tokens(seed: int, num_rows: int, shape: Shape) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.standard_normal((num_rows, shape.num_kv_heads, shape.head_dim), np.float32)


def stored(values: np.ndarray, scale: np.ndarray | None, dtype: str) -> np.ndarray:
    """What a pool of `dtype` should hold for the floats [T, Hkv, D]."""
    if dtype == "uint16":
        return values.astype(ml_dtypes.bfloat16).view(np.uint16)
    if scale is None:
        return values.astype(NUMPY_DTYPES[dtype])
    scaled = values / scale[:, None]
    if dtype == "int8":
        return np.clip(np.rint(scaled), -127, 127).astype(np.int8)
    limit = float(ml_dtypes.finfo(NUMPY_DTYPES[dtype]).max)
    return np.clip(scaled, -limit, limit).astype(NUMPY_DTYPES[dtype])


def expected_pool(
    pool: np.ndarray, k: np.ndarray, v: np.ndarray, slots: list[int], shape: Shape
) -> np.ndarray:
    """The pool after the write of stored k and v, one row after another."""
    num_blocks, two_kv_heads, rows, width = pool.shape
    per_row = shape.block_size // rows
    written = pool.copy().reshape(num_blocks, two_kv_heads, shape.block_size, width // per_row)
    for row, slot in enumerate(slots):
        if not 0 <= slot < num_blocks * shape.block_size:
            continue
        block, offset = divmod(slot, shape.block_size)
        written[block, :, offset] = 0
        written[block, :, offset, : shape.head_dim] = np.concatenate([k[row], v[row]])
    return written.reshape(pool.shape)


def token_bits(pool: Any, shape: Shape) -> np.ndarray:
    """The pool's bits, less the first slot of the null block, which holds anything."""
    bits = as_bits(pool).copy()
    per_row = shape.block_size // bits.shape[2]
    bits[0, :, 0, : bits.shape[3] // per_row] = 0
    return bits


@functools.cache
def jitted(implementation: str, races: bool = False) -> Any:
    """`races` only keeps the programs with the race detector apart."""
    return jax.jit(functools.partial(write_kv, implementation=implementation))


def check_write(
    shape: Shape, dtype: str, slots: list[int], implementation: str, write: Any = None
) -> None:
    pool = poisoned_pool(0, shape, dtype)
    k, v = tokens(1, len(slots), shape), tokens(2, len(slots), shape)
    scales: dict[str, Any] = {}
    k_scale = v_scale = None
    if dtype in SCALED_DTYPES:
        k_scale, v_scale = (
            np.random.default_rng(3)
            .uniform(0.004, 0.03, (2, shape.num_kv_heads))
            .astype(np.float32)
        )
        scales = dict(k_scale=k_scale, v_scale=v_scale)
    expected = expected_pool(
        pool, stored(k, k_scale, dtype), stored(v, v_scale, dtype), slots, shape
    )
    written = (write or jitted(implementation))(pool, k, v, np.array(slots, np.int32), **scales)
    assert written.dtype == pool.dtype
    np.testing.assert_array_equal(token_bits(written, shape), token_bits(expected, shape))


# Runs over tile and block edges, all but one row of a tile, decodes, neighbours in a tile that are
# none in the batch, the null block, and slots to be dropped.
MIXED_SLOTS = [0, 33, 10, 11, *range(34, 60), 12, 8, 0, 9, 3, -1, 13]
MIXED_SLOTS += [2**30, 61, 60, *range(65, 72), 0, -7, 0]


@pytest.mark.parametrize("implementation", ["reference", "xla", "tpu"])
@pytest.mark.parametrize(
    ("shape_name", "dtype"),
    [(name, "bfloat16") for name in SHAPES]
    + [("two tokens a row", dtype) for dtype in ("float32", *SCALED_DTYPES)]
    + [("filled up", "int8"), ("plain", "float16"), ("plain", "uint16")],
)
def test_rows_land_in_their_slots_and_nowhere_else(
    shape_name: str, dtype: str, implementation: str
) -> None:
    if implementation == "tpu" and shape_name == "plain":
        pytest.skip("no pool for a TPU")
    check_write(SHAPES[shape_name], dtype, MIXED_SLOTS, implementation)


@pytest.mark.full
@pytest.mark.parametrize("implementation", ["xla", "tpu"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", *SCALED_DTYPES])
@pytest.mark.parametrize("shape_name", [name for name in SHAPES if name != "plain"])
def test_rows_land_in_their_slots_in_every_pool(
    shape_name: str, dtype: str, implementation: str
) -> None:
    check_write(SHAPES[shape_name], dtype, MIXED_SLOTS, implementation)


@pytest.mark.parametrize("slots", [[0] * 3, [-1, 10**6, -(2**31)], [0, 143, 144], [15]])
def test_the_kernel_takes_padding_alone_and_single_rows(slots: list[int]) -> None:
    check_write(SHAPES["a token a row"], "bfloat16", slots, "tpu")


@pytest.mark.parametrize("shape_name", ["a token a row", "two tokens a row"])
def test_the_kernel_reuses_few_tiles_and_small_chunks(
    shape_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four tiles in flight, and chunks of one tile's tokens, some with nothing but padding."""
    monkeypatch.setattr(kv_write_tpu, "_TILES_BYTES", 0)
    monkeypatch.setattr(kv_write_tpu, "_CHUNK_BYTES", 0)
    interleaved = [
        slot for pair in zip(range(96, 112), range(113, 129), strict=True) for slot in pair
    ]
    slots = [0] * 20 + MIXED_SLOTS + [-1] * 17 + interleaved + [0] * 20
    write = jax.jit(functools.partial(write_kv, implementation="tpu"))
    check_write(SHAPES[shape_name], "bfloat16", slots, "tpu", write)


@pytest.mark.parametrize("shape_name", ["a token a row", "two tokens a row"])
def test_the_kernel_has_no_races(shape_name: str, capfd: pytest.CaptureFixture[str]) -> None:
    slots = [40, 56, 41, 57, 42, 58, *range(16, 32), 0, 100, 101, 0]
    with tpu_runtime.detect_races():
        check_write(SHAPES[shape_name], "int8", slots, "tpu", jitted("tpu", races=True))
    printed = capfd.readouterr()
    assert "RACE" not in printed.out + printed.err


@st.composite
def slot_mappings(draw: st.DrawFn, block_size: int) -> list[int]:
    """64 rows: prefill chunks and decodes of sequences that own blocks, then padding.

    Sequences take turns, so that rows of one tile need not be neighbours in the batch.
    """
    blocks = draw(st.permutations(range(1, NUM_BLOCKS)))
    parts: list[list[int]] = []
    while blocks:
        owned = [blocks.pop() for _ in range(draw(st.integers(1, min(3, len(blocks)))))]
        owned_slots = [
            block * block_size + offset for block in owned for offset in range(block_size)
        ]
        start = draw(st.integers(0, len(owned_slots) - 1))
        num_rows = draw(st.sampled_from([1, 1, 2, 5, 17, 40]))
        run = owned_slots[start : start + num_rows]
        cut = draw(st.integers(0, len(run)))
        parts += [run[:cut], run[cut:]]
    rows = [slot for part in draw(st.permutations(parts)) for slot in part]
    dropped = st.sampled_from([0, 0, -1, NUM_BLOCKS * block_size])
    for _ in range(draw(st.integers(0, 4))):
        rows.insert(draw(st.integers(0, len(rows))), draw(dropped))
    return (rows + [0] * 64)[:64]


def check_drawn(data: st.DataObject) -> None:
    shape = SHAPES[data.draw(st.sampled_from(["a token a row", "two tokens a row"]))]
    dtype = data.draw(st.sampled_from(["bfloat16", "int8"]))
    slots = data.draw(slot_mappings(shape.block_size))
    for implementation in ("xla", "tpu"):
        check_write(shape, dtype, slots, implementation)


@settings(max_examples=10, deadline=None)
@given(st.data())
def test_drawn_batches(data: st.DataObject) -> None:
    check_drawn(data)


@pytest.mark.full
@settings(max_examples=400, deadline=None)
@given(st.data())
def test_many_drawn_batches(data: st.DataObject) -> None:
    check_drawn(data)


@pytest.mark.parametrize(
    ("dtype", "implementation"), [*((dtype, "xla") for dtype in SCALED_DTYPES), ("int8", "tpu")]
)
def test_quantising_rounds_to_even_and_clips(dtype: str, implementation: str) -> None:
    shape = SHAPES["a token a row"]
    pool = poisoned_pool(0, shape, dtype)
    values = np.tile(np.array([0.5, 1.5, -2.5, 126.5, 127.4, 500, -1e9, -0.0], np.float32), 16)
    k = np.broadcast_to(values, (1, 2, 128))
    scale = np.array([1, 0.25], np.float32)
    written = jitted(implementation)(
        pool, k, -k, np.array([20], np.int32), k_scale=scale, v_scale=2 * scale
    )
    quantised = np.asarray(written[1, :, 4]).astype(np.float64)
    if dtype == "int8":
        np.testing.assert_array_equal(quantised[0, :8], [0, 2, -2, 126, 127, 127, -127, 0])
        np.testing.assert_array_equal(quantised[3, :5], [-1, -3, 5, -127, -127])
    else:
        largest = {"float8_e4m3fn": 448, "float8_e5m2": 57344}[dtype]
        np.testing.assert_array_equal(quantised[0, [0, 1, 2, 6]], [0.5, 1.5, -2.5, -largest])
        np.testing.assert_array_equal(quantised[3, [0, 6]], [-1, largest])
    # Quantised already, the same elements give the same pool.
    element = NUMPY_DTYPES[dtype]
    k, v = (quantised[rows].astype(element)[None] for rows in (slice(0, 2), slice(2, 4)))
    np.testing.assert_array_equal(
        as_bits(jitted(implementation)(pool, k, v, np.array([20], np.int32))), as_bits(written)
    )


@pytest.mark.parametrize("dtype", ["float32", "uint16", "int8"])
@pytest.mark.parametrize("rows", [(16, 8), (8, 16)])
def test_a_donated_pool_stays_in_its_buffer_and_is_not_read(
    dtype: str, rows: tuple[int, int]
) -> None:
    shape = (20_000, 4, *rows)
    k = jnp.ones((8, 2, 8), "int8" if dtype == "int8" else "float32")
    slots = jnp.arange(100, 108, dtype=jnp.int32)
    step = jax.jit(write_kv, donate_argnums=0)
    pool = jnp.zeros(shape, dtype)
    address = pool.unsafe_buffer_pointer()
    compiled = step.lower(pool, k, k, slots).compile()
    analysis = compiled.memory_analysis()
    assert analysis is not None and analysis.temp_size_in_bytes < 2**16, (
        "a copy of the pool would be a temporary"
    )
    seconds = []
    for _ in range(10):
        start = time.perf_counter()
        pool = compiled(pool, k, k, slots)
        pool.block_until_ready()
        seconds.append(time.perf_counter() - start)
    assert pool.unsafe_buffer_pointer() == address
    # Passing over these 10 MB or more takes over a millisecond; the write takes microseconds.
    assert min(seconds) < 1e-3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_the_kernel_lowers_for_a_tpu_and_aliases_the_pool(dtype: str) -> None:
    shape = SHAPES["two tokens a row"]
    pool = jax.ShapeDtypeStruct(shape.pool_shape, dtype)
    k = jax.ShapeDtypeStruct((32, shape.num_kv_heads, shape.head_dim), dtype)
    write = jax.jit(functools.partial(write_kv, implementation="tpu"), donate_argnums=0)
    with tpu_runtime.force_compile():
        slots = jax.ShapeDtypeStruct((32,), jnp.int32)
        lowered = write.trace(pool, k, k, slots).lower(lowering_platforms=("tpu",)).as_text()
    assert "tpu_custom_call" in lowered
    assert "output_operand_alias" in lowered


GOOD = dict(
    pool_layer=np.zeros((4, 4, 4, 8), np.float32),
    k=np.zeros((3, 2, 8), np.float32),
    v=np.zeros((3, 2, 8), np.float32),
    slot_mapping=np.zeros(3, np.int32),
)
INT8_POOL = np.zeros((4, 4, 4, 8), np.int8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(k=np.zeros((3, 1, 8), np.float32)), "k has shape"),
        (dict(k=np.zeros((3, 2, 9), np.float32)), "head_dim of at most 8"),
        (dict(v=np.zeros((2, 2, 8), np.float32)), "v has shape"),
        (dict(slot_mapping=np.zeros(2, np.int32)), "slot_mapping has shape"),
        (dict(slot_mapping=np.zeros(3, np.float32)), "slot_mapping has dtype float32"),
        (dict(k=np.zeros((3, 2, 8), np.int32)), "k has dtype int32"),
        (dict(k_scale=np.ones(2, np.float32)), "k_scale is given, but a pool of float32"),
        (dict(pool_layer=np.zeros((4, 3, 4, 8), np.float32)), "pool_layer has shape"),
        (dict(pool_layer=np.zeros((4, 4, 4, 8), np.int32)), "pool_layer has dtype int32"),
        (dict(pool_layer=INT8_POOL), "k_scale is None and k has dtype float32"),
        (
            dict(pool_layer=INT8_POOL, k_scale=np.ones(2, np.float32)),
            "v_scale is None and v has dtype float32",
        ),
        (dict(pool_layer=INT8_POOL, k_scale=np.ones(3, np.float32)), "k_scale has shape"),
        (dict(pool_layer=INT8_POOL, k_scale=np.ones(2, np.int32)), "k_scale has dtype int32"),
        (dict(pool_layer=INT8_POOL, k=np.zeros((3, 2, 8), np.int32)), "k has dtype int32"),
        (
            dict(
                pool_layer=INT8_POOL,
                k=np.zeros((3, 2, 8), np.int8),
                k_scale=np.ones(2, np.float32),
            ),
            "k is int8 already",
        ),
        (dict(implementation="cuda"), "implementation is 'cuda'"),
        (dict(implementation="tpu"), "8 lanes, no multiple of 128"),
        (
            dict(
                implementation="tpu",
                pool_layer=np.zeros((4, 4, 12, 128), jnp.bfloat16),
                k=np.zeros((3, 2, 128), np.float32),
                v=np.zeros((3, 2, 128), np.float32),
            ),
            "use a block_size that is a multiple of 8, or use 'xla'",
        ),
        (
            dict(
                implementation="tpu",
                pool_layer=np.zeros((2, 512, 8, 256), np.float32),
                k=np.zeros((3, 256, 256), np.float32),
                v=np.zeros((3, 256, 256), np.float32),
            ),
            "split the heads over devices",
        ),
        (
            dict(implementation="tpu", pool_layer=np.zeros((4, 4, 8, 128), np.float16)),
            "does not store float16",
        ),
    ],
)
def test_bad_arguments_are_refused_by_name(change: dict, message: str) -> None:
    arguments: dict[str, Any] = GOOD | change
    with pytest.raises((ValueError, TypeError), match=message):
        write_kv(**arguments)
