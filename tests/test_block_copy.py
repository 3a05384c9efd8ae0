"""Block copies, gathers and scatters: exact bytes, nothing else touched, in place."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import block_copy_tpu, tpu_runtime
from pallas_kernels.block_copy import copy_blocks, gather_blocks, scatter_blocks

IMPLEMENTATIONS = ("reference", "xla", "tpu")
TPU_DTYPES = ("float32", "bfloat16", "int8", "float8_e4m3fn", "float8_e5m2")
NUM_BLOCKS = 12
# Layers of one model may differ in heads and width.
LAYER_SHAPES = ((NUM_BLOCKS, 4, 8, 128), (NUM_BLOCKS, 2, 4, 128), (NUM_BLOCKS, 2, 16, 256))


def random_layers(seed: int, dtype: str, num_blocks: int = NUM_BLOCKS) -> tuple[np.ndarray, ...]:
    """Any bytes, some of them NaN; but of NaNs the usual one, which a conversion preserves."""
    rng = np.random.default_rng(seed)
    element = np.dtype(getattr(ml_dtypes, dtype, dtype))
    layers = []
    for shape in LAYER_SHAPES:
        row_bytes = shape[3] * element.itemsize
        layer = rng.integers(0, 256, (num_blocks, *shape[1:3], row_bytes), np.uint8).view(element)
        if dtype in ("float32", "float16", "bfloat16"):
            with np.errstate(invalid="ignore"):
                layer[np.isnan(layer)] = np.nan
        layers.append(layer)
    return tuple(layers)


def assert_same_bytes(actual: Any, expected: tuple[np.ndarray, ...]) -> None:
    assert isinstance(actual, tuple)
    for layer, (ours, theirs) in enumerate(zip(actual, expected, strict=True)):
        ours = np.asarray(ours)
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(
            np.ascontiguousarray(ours).view(np.uint8), theirs.view(np.uint8), f"layer {layer}"
        )


@functools.cache
def jitted(op: Any, implementation: str) -> Any:
    return jax.jit(functools.partial(op, implementation=implementation))


def check_copy(dtype: str, pairs: list[tuple[int, int]], size: int, implementation: str) -> None:
    """Copies (source, destination) pairs, in arrays of `size` filled up with wrong ids."""
    layers = random_layers(0, dtype)
    expected = tuple(layer.copy() for layer in layers)
    for src, dst in pairs:
        if 0 <= src < NUM_BLOCKS and 0 <= dst < NUM_BLOCKS:
            for new, old in zip(expected, layers, strict=True):
                new[dst] = old[src]
    filled_up = pairs + [(5, 6)] * (size - len(pairs))
    src_ids, dst_ids = np.array(filled_up, np.int32).T
    copied = jitted(copy_blocks, implementation)(layers, src_ids, dst_ids, np.int32(len(pairs)))
    assert_same_bytes(copied, expected)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [*TPU_DTYPES, "uint16", "float16"])
def test_blocks_are_copied_and_nothing_else_is_touched(dtype: str, implementation: str) -> None:
    if implementation == "tpu" and dtype not in TPU_DTYPES:
        pytest.skip("no pool for a TPU")
    pairs = [(3, 1), (3, 11), (0, 2), (-1, 4), (7, NUM_BLOCKS), (10, 7), (3, 9), (NUM_BLOCKS, 8)]
    check_copy(dtype, pairs, 10, implementation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("num_copies", [-3, 0, 99])
def test_the_count_is_held_to_the_ids(num_copies: int, implementation: str) -> None:
    layers = random_layers(1, "bfloat16")
    expected = tuple(layer.copy() for layer in layers)
    if num_copies > 0:
        for layer in expected:
            layer[[5, 6]] = layer[[3, 4]]
    ids = np.array([3, 4], np.int32)
    copied = jitted(copy_blocks, implementation)(layers, ids, ids + 2, np.int32(num_copies))
    assert_same_bytes(copied, expected)


@st.composite
def copies(draw: st.DrawFn) -> list[tuple[int, int]]:
    ids = draw(st.permutations(range(NUM_BLOCKS)))
    num_sources = draw(st.integers(1, NUM_BLOCKS - 1))
    sources, free = ids[:num_sources], ids[num_sources:]
    num_copies = draw(st.integers(0, len(free)))
    return [(draw(st.sampled_from(sources)), free[index]) for index in range(num_copies)]


@settings(max_examples=10, deadline=None)
@given(copies())
def test_drawn_copies(pairs: list[tuple[int, int]]) -> None:
    for implementation in IMPLEMENTATIONS:
        check_copy("int8", pairs, NUM_BLOCKS, implementation)


@pytest.mark.full
@settings(max_examples=200, deadline=None)
@given(copies(), st.sampled_from(TPU_DTYPES))
def test_many_drawn_copies(pairs: list[tuple[int, int]], dtype: str) -> None:
    for implementation in IMPLEMENTATIONS:
        check_copy(dtype, pairs, NUM_BLOCKS, implementation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e5m2"])
def test_blocks_go_out_and_come_back_elsewhere(dtype: str, implementation: str) -> None:
    layers, others = random_layers(2, dtype), random_layers(3, dtype)
    out_ids = np.array([4, 4, 0, 11, -2, NUM_BLOCKS + 5], np.int32)
    gathered = jitted(gather_blocks, implementation)(layers, out_ids)
    nearest = [4, 4, 0, 11, 0, 11]
    assert_same_bytes(gathered, tuple(layer[nearest] for layer in layers))

    in_ids = np.array([1, -1, 9, NUM_BLOCKS, 2, 3], np.int32)
    expected = tuple(other.copy() for other in others)
    for new, old in zip(expected, layers, strict=True):
        new[[1, 9, 2]] = old[[4, 0, 0]]
    back = jitted(scatter_blocks, implementation)(others, in_ids, np.int32(5), gathered)
    assert_same_bytes(back, expected)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_any_tree_of_layers_is_taken(implementation: str) -> None:
    first, second, _ = (jnp.asarray(layer) for layer in random_layers(4, "float32"))
    ids = jnp.asarray([3], jnp.int32)
    one = copy_blocks(first, ids, ids + 1, 1, implementation=implementation)
    assert isinstance(one, jax.Array)
    np.testing.assert_array_equal(one[4], first[3])
    tree = copy_blocks({"a": first, "b": [second]}, ids, ids + 1, 1, implementation=implementation)
    np.testing.assert_array_equal(tree["a"], one)
    np.testing.assert_array_equal(tree["b"][0][4], second[3])


def test_the_kernels_wait_for_few_copies_in_flight(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(block_copy_tpu, "_MAX_BLOCKS_IN_FLIGHT", 2)
    jitted.cache_clear()
    with tpu_runtime.detect_races():
        check_copy("int8", [(0, 1), (2, 3), (0, 4), (-1, 6), (5, 7), (2, 8)], 6, "tpu")
    jitted.cache_clear()
    printed = capfd.readouterr()
    assert "RACE" not in printed.out + printed.err


@pytest.mark.parametrize("dtype", ["float32", "uint16", "int8"])
@pytest.mark.parametrize("num_real", [0, 3])
def test_donated_layers_stay_in_their_buffers(dtype: str, num_real: int) -> None:
    layers = tuple(jnp.asarray(layer) for layer in random_layers(5, dtype, num_blocks=2_000))
    addresses = [layer.unsafe_buffer_pointer() for layer in layers]
    ids, count = jnp.arange(1, 17, dtype=jnp.int32), jnp.int32(num_real)
    blocks = gather_blocks(layers, ids)
    expected = [np.asarray(block[:num_real]).copy() for block in blocks]
    copy = jax.jit(copy_blocks, donate_argnums=0).lower(layers, ids, ids + 100, count).compile()
    scatter = jax.jit(scatter_blocks, donate_argnums=0)
    scatter = scatter.lower(layers, ids + 200, count, blocks).compile()
    for compiled in (copy, scatter):
        analysis = compiled.memory_analysis()
        assert analysis is not None and analysis.temp_size_in_bytes < 2**17, (
            "a copy of a layer would be a temporary"
        )
    layers = copy(layers, ids, ids + 100, count)
    assert [layer.unsafe_buffer_pointer() for layer in layers] == addresses
    layers = scatter(layers, ids + 200, count, blocks)
    assert [layer.unsafe_buffer_pointer() for layer in layers] == addresses
    for layer, block in zip(layers, expected, strict=True):
        for start in (101, 201):
            np.testing.assert_array_equal(layer[start : start + num_real], block)


@pytest.mark.parametrize("op_name", ["copy", "gather", "scatter"])
def test_the_kernels_lower_for_a_tpu(op_name: str) -> None:
    layers = tuple(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in LAYER_SHAPES)
    blocks = tuple(jax.ShapeDtypeStruct((6, *shape[1:]), jnp.bfloat16) for shape in LAYER_SHAPES)
    ids, count = jax.ShapeDtypeStruct((6,), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)
    op, arguments = {
        "copy": (copy_blocks, (layers, ids, ids, count)),
        "gather": (gather_blocks, (layers, ids)),
        "scatter": (scatter_blocks, (layers, ids, count, blocks)),
    }[op_name]
    with tpu_runtime.force_compile():
        traced = jax.jit(functools.partial(op, implementation="tpu")).trace(*arguments)
        lowered = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert lowered.count("stablehlo.custom_call @tpu_custom_call") == 1, "one call for all layers"


LAYER = np.zeros((4, 2, 8, 128), np.float32)
IDS = np.zeros(3, np.int32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(layers=()), "layers is empty"),
        (dict(layers=LAYER[0]), "pool_layer has shape"),
        (dict(layers=(LAYER, LAYER[:3])), "layers have 4 and 3 blocks"),
        (dict(src_block_ids=IDS[:0]), r"src_block_ids has shape \(0,\)"),
        (dict(dst_block_ids=IDS[:2]), r"dst_block_ids has shape \(2,\)"),
        (dict(src_block_ids=np.zeros(3, np.float32)), "src_block_ids has dtype float32"),
        (dict(num_copies=np.float32(1)), "num_copies has dtype float32"),
        (dict(num_copies=IDS), r"num_copies has shape \(3,\)"),
        (dict(implementation="cuda"), "implementation is 'cuda'"),
        (dict(implementation="tpu", layers=LAYER[..., :64]), "a block has 8 rows of 64 lanes"),
        (
            dict(implementation="tpu", layers=LAYER.astype(np.float16)),
            "does not move float16",
        ),
        (
            dict(
                implementation="tpu",
                src_block_ids=np.zeros(200_000, np.int32),
                dst_block_ids=np.zeros(200_000, np.int32),
            ),
            "at most 100000 in a call",
        ),
    ],
)
def test_bad_arguments_are_refused_by_name(change: dict, message: str) -> None:
    good = dict(layers=(LAYER,), src_block_ids=IDS, dst_block_ids=IDS, num_copies=1)
    arguments: dict[str, Any] = good | change
    with pytest.raises((ValueError, TypeError), match=message):
        copy_blocks(**arguments)


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        (LAYER[:3], "it must be as layers"),
        ((LAYER[:2],), r"need float32\[3, 2, 8, 128\]"),
        ((LAYER[:3].astype(np.int8),), "blocks has an array int8"),
    ],
)
def test_blocks_that_do_not_fit_their_layers_are_refused(blocks: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        scatter_blocks((jnp.asarray(LAYER),), jnp.asarray(IDS), 1, blocks)
