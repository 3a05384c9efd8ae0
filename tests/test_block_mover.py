"""Moves of blocks: contents against a model in dictionaries, in place, nothing compiled late."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paged_jax import block_mover
from paged_jax.block_mover import BlockMover
from paged_jax.block_moves import BlockMoves
from paged_jax.kv_pool import KVPool

NUM_BLOCKS, NUM_HOST_BLOCKS = 14, 9
# Two layers, [2 * Hkv, rows, width] a block each; the wide ones are a TPU's.
NARROW = ((4, 4, 8), (2, 4, 8))
WIDE = ((4, 8, 128), (2, 8, 128))


def random_blocks(rng: np.random.Generator, num_blocks: int, block, dtype: str) -> np.ndarray:
    """Blocks of random numbers, exact in every dtype."""
    element = np.dtype(getattr(ml_dtypes, dtype, dtype))
    return rng.integers(0, 8, (num_blocks, *block)).astype(element)


@functools.cache
def overwriting(block_ids: tuple[int, ...]) -> Any:
    """The writes of a step: a program that puts ones into blocks of a donated pool."""

    def overwrite(layers):
        return tuple(layer.at[jnp.array(block_ids)].set(1) for layer in layers)

    return jax.jit(overwrite, donate_argnums=0)


class Checked:
    """A mover and its pool, next to the same in dictionaries of block ids."""

    def __init__(
        self,
        blocks=NARROW,
        *,
        dtype: str = "float32",
        num_blocks: int = NUM_BLOCKS,
        num_host_blocks: int = NUM_HOST_BLOCKS,
        implementation: str | None = None,
    ):
        rng = np.random.default_rng(0)
        layers = [random_blocks(rng, num_blocks, block, dtype) for block in blocks]
        self.device = {i: [layer[i].copy() for layer in layers] for i in range(num_blocks)}
        self.host: dict[int, list[np.ndarray]] = {}
        self.pool = KVPool(layers=tuple(map(jnp.array, layers)), head_dim=8)
        self.mover = BlockMover(
            self.pool, num_host_blocks=num_host_blocks, implementation=implementation
        )
        self.mover.warm_up()
        # Pallas's interpreter traces while it runs.
        self.no_tracing = contextlib.nullcontext if implementation == "tpu" else jax.no_tracing

    def apply(self, moves: BlockMoves, written: tuple[int, ...] = ()) -> None:
        """Applies the moves, then a step's writes to the blocks `written`, to both."""
        with self.no_tracing():
            self.pool = self.mover.apply(self.pool, moves)
        if written:
            layers = overwriting(written)(self.pool.layers)
            self.pool = dataclasses.replace(self.pool, layers=layers)
        device, host = dict(self.device), dict(self.host)
        self.host |= {dst: device[src] for src, dst in moves.swap_out}
        self.device |= {dst: device[src] for src, dst in moves.copies}
        self.device |= {dst: host[src] for src, dst in moves.swap_in}
        self.device |= {i: [np.ones_like(part) for part in device[i]] for i in written}

    def check(self) -> None:
        for i, layer in enumerate(self.pool.layers):
            expected = np.stack([self.device[block][i] for block in range(len(self.device))])
            np.testing.assert_array_equal(np.asarray(layer), expected, f"layer {i}")

    def check_host(self) -> None:
        """Brings every host block to the device and looks at it there."""
        room = len(self.device) - 1
        blocks = sorted(self.host)
        for start in range(0, len(blocks), room):
            part = blocks[start : start + room]
            self.apply(BlockMoves(swap_in=tuple((block, i + 1) for i, block in enumerate(part))))
            self.check()


@st.composite
def steps(draw: st.DrawFn) -> list[tuple[BlockMoves, tuple[int, ...], bool]]:
    """Moves with every hazard that the contract allows, blocks that the step writes, settle."""
    device, host = st.integers(1, NUM_BLOCKS - 1), st.integers(1, NUM_HOST_BLOCKS - 1)
    stored: set[int] = set()
    drawn = []
    for _ in range(draw(st.integers(1, 6))):
        ids = draw(st.permutations(range(1, NUM_BLOCKS)))
        num_sources = draw(st.integers(1, NUM_BLOCKS - 1))
        sources, targets = ids[:num_sources], list(ids[num_sources:])
        num_copies = draw(st.integers(0, len(targets)))
        copies = [(draw(st.sampled_from(sources)), targets.pop()) for _ in range(num_copies)]
        free = draw(st.permutations(targets + sources))
        wanted = draw(st.lists(st.sampled_from(sorted(stored)), max_size=6)) if stored else []
        swap_in = list(zip(wanted, free, strict=False))
        overwritten = draw(st.lists(host, unique=True, max_size=6))
        swap_out = [(draw(device), block) for block in overwritten]
        stored.update(overwritten)
        moves = BlockMoves(tuple(swap_out), tuple(copies), tuple(swap_in))
        written = (draw(device),) if draw(st.booleans()) else ()
        drawn.append((moves, written, draw(st.booleans())))
    return drawn


def run(checked: Checked, drawn: list[tuple[BlockMoves, tuple[int, ...], bool]]) -> None:
    for moves, written, is_settled in drawn:
        checked.apply(moves, written)
        if is_settled:
            checked.mover.settle()
    checked.check()
    checked.check_host()


@settings(max_examples=60, deadline=None)
@given(steps(), st.sampled_from([1, 2, 64]))
def test_drawn_steps(drawn, blocks_a_chunk: int) -> None:
    with pytest.MonkeyPatch.context() as patch:  # 1 and 2: blocks wait for others to be stored.
        patch.setattr(block_mover, "_LARGE_CHUNK_BLOCKS", blocks_a_chunk)
        run(Checked(), drawn)


@pytest.mark.full
@settings(max_examples=1000, deadline=None)
@given(steps(), st.sampled_from([1, 2, 3, 64]))
def test_many_drawn_steps(drawn, blocks_a_chunk: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_mover, "_LARGE_CHUNK_BLOCKS", blocks_a_chunk)
        run(Checked(), drawn)


# Every hazard at once: see the comments.
HAZARDS = [
    (BlockMoves(swap_out=((1, 1), (2, 2), (3, 3))), (1, 2), False),
    (
        BlockMoves(
            # 1 is read by a swap in, 2 is still on its way; 7 is a source twice.
            swap_out=((7, 1), (8, 2), (7, 4)),
            # 8 was just swapped out; 9 is overwritten by a swap in.
            copies=((9, 8), (9, 10)),
            swap_in=((1, 9), (3, 7), (1, 11)),
        ),
        (7, 12),
        False,
    ),
    (BlockMoves(copies=((8, 1),), swap_in=((4, 2), (2, 3))), (), True),
]


@pytest.mark.parametrize(
    ("dtype", "implementation"),
    [
        *itertools.product(
            ["float32", "uint16", "bfloat16", "int8", "float8_e4m3fn"], ["xla", "reference"]
        ),
        ("float32", "tpu"),  # The kernels' own tests cover its dtypes.
    ],
)
def test_hazards_in_every_dtype(dtype: str, implementation: str) -> None:
    run(Checked(WIDE, dtype=dtype, implementation=implementation), HAZARDS)


def test_hazards_through_another_memory_on_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        block_mover, "pinned_sharding", lambda sharding: sharding.with_memory_kind("pinned_host")
    )
    run(Checked(), HAZARDS)


def test_long_lists_go_in_several_calls() -> None:
    checked = Checked(num_blocks=400, num_host_blocks=251)
    mover, rng = checked.mover, np.random.default_rng(1)
    for num_out in (9, 40, 64, 100, 250):
        device, host = rng.permutation(np.arange(1, 400)), rng.permutation(np.arange(1, 251))
        swap_out = tuple(zip(device[:num_out].tolist(), host[:num_out].tolist(), strict=True))
        checked.apply(BlockMoves(swap_out=swap_out), written=tuple(device[:3].tolist()))
        back = rng.permutation(host[:num_out]).tolist()
        device = rng.permutation(np.arange(1, 400)).tolist()
        copies = tuple((device[300 + i % 90], device[i]) for i in range(130))
        swap_in = tuple(zip(back, device[130 : 130 + num_out], strict=False))
        checked.apply(BlockMoves(copies=copies, swap_in=swap_in))
        checked.check()
    checked.check_host()
    assert mover.transfer_bytes == mover.bytes_a_block * (
        sum((9, 40, 64, 100, 250)) + sum((9, 40, 64, 100, 250)) + 250
    )
    assert mover.transfer_seconds > 0


def test_the_pool_stays_in_its_buffers_and_gathered_blocks_are_bounded() -> None:
    checked = Checked(num_blocks=1_000, num_host_blocks=999)
    mover = checked.mover
    addresses = [layer.unsafe_buffer_pointer() for layer in checked.pool.layers]
    pairs = tuple((i, i) for i in range(1, 999))
    for moves in (
        BlockMoves(swap_out=pairs),
        BlockMoves(copies=tuple((i, i + 500) for i in range(1, 500))),
        BlockMoves(swap_out=pairs, copies=pairs[:0], swap_in=pairs),
    ):
        before = checked.pool
        checked.apply(moves)
        assert before.is_deleted() == bool(moves.copies or moves.swap_in)
        under_way = sum(len(chunk.device_ids) for chunk, _ in mover._outgoing)
        assert 2 * under_way * mover.bytes_a_block <= mover.temporary_bytes
    assert [layer.unsafe_buffer_pointer() for layer in checked.pool.layers] == addresses
    for program in mover._programs.values():
        analysis = program.memory_analysis()
        assert analysis is not None and analysis.temp_size_in_bytes < 2**16, "a copy of a layer"
    checked.check()


def test_without_a_store_only_copies_are_compiled_and_swaps_are_refused() -> None:
    checked = Checked(num_host_blocks=0)
    assert set(checked.mover._programs) == {("copy", 64)}
    assert checked.mover.num_host_bytes == checked.mover.temporary_bytes == 0
    with pytest.raises(ValueError, match=r"swap_out holds \(1, 1\), and num_host_blocks=0"):
        checked.apply(BlockMoves(swap_out=((1, 1),)))
    with pytest.raises(ValueError, match="num_host_blocks=0"):
        checked.mover.measure_bandwidth(checked.pool)
    checked.apply(BlockMoves())
    checked.apply(BlockMoves(copies=((1, 2),)))
    checked.check()


def test_sizes() -> None:
    mover = Checked(dtype="int8").mover
    assert mover.bytes_a_block == 4 * 4 * 8 + 2 * 4 * 8
    assert mover.num_host_bytes == NUM_HOST_BLOCKS * mover.bytes_a_block
    with pytest.raises(ValueError, match="num_host_blocks=-1: it must be 0"):
        Checked(num_host_blocks=-1)


@pytest.mark.parametrize(
    ("moves", "error"),
    [
        (BlockMoves(swap_out=((1, 1), (1, 9))), r"swap_out\[1\]=\(1, 9\): host block 9 .* 1 to 8"),
        (BlockMoves(swap_out=((14, 1),)), r"device block 14 is out of range; use 1 to 13"),
        (BlockMoves(swap_in=((0, 1),)), r"swap_in\[0\]=\(0, 1\): host block 0"),
        (BlockMoves(swap_in=((1, -1),)), r"device block -1"),
        (BlockMoves(copies=((1, 2), (0, 3))), r"copies\[1\]=\(0, 3\): device block 0"),
        (BlockMoves(swap_out=((1, 3), (2, 3))), r"swap_out write to host block 3 more than once"),
        (BlockMoves(copies=((1, 3), (2, 3))), r"write to device block 3 more than once"),
        (BlockMoves(copies=((1, 3),), swap_in=((1, 3),)), r"device block 3 more than once"),
        (BlockMoves(copies=((1, 3), (3, 4))), r"device block 3 as a source and as a destination"),
    ],
)
def test_wrong_moves_are_refused_before_anything_moves(moves: BlockMoves, error: str) -> None:
    checked = Checked()
    checked.apply(BlockMoves(swap_out=((5, 1),)))
    with pytest.raises(ValueError, match=error):
        checked.mover.apply(checked.pool, moves)
    checked.check()
    checked.check_host()


def test_a_measurement_leaves_the_pool_and_the_counters_alone() -> None:
    checked = Checked(num_host_blocks=5)
    checked.apply(BlockMoves(swap_out=((5, 1), (6, 2))))
    counted = checked.mover.transfer_bytes
    with jax.no_tracing():
        checked.pool, bytes_a_second = checked.mover.measure_bandwidth(checked.pool)
    assert 0 < bytes_a_second < 1e12 and checked.mover.transfer_bytes == counted
    checked.check()
    checked.check_host()


def test_after_a_fault_it_serves_again(monkeypatch: pytest.MonkeyPatch) -> None:
    checked = Checked()
    checked.apply(BlockMoves(swap_out=((5, 1), (6, 2))))
    checked.mover.settle()
    out = BlockMoves(swap_out=((7, 2), (8, 3)))

    def fail(*_: Any) -> None:
        raise RuntimeError("the transfer broke")

    checked.mover.apply(checked.pool, out)
    with monkeypatch.context() as patch:  # While it is stored.
        patch.setattr(block_mover, "_write_rows", fail)
        with pytest.raises(RuntimeError, match="the transfer broke"):
            checked.mover.settle()
    checked.mover.apply(checked.pool, out)
    with monkeypatch.context() as patch:  # On its way in, with the pool in the copies' hands.
        patch.setattr(jax, "device_put", fail)
        pool, moves = checked.pool, BlockMoves(copies=((1, 2),), swap_in=((1, 3),))
        with pytest.raises(RuntimeError, match="the transfer broke"):
            checked.mover.apply(pool, moves)
    assert pool.is_deleted()
    counted = checked.mover.transfer_bytes
    checked.mover.reset()
    checked.mover.settle()
    assert checked.mover.transfer_bytes == counted
    layers = zip(*(checked.device[i] for i in range(NUM_BLOCKS)), strict=True)
    checked.pool = dataclasses.replace(pool, layers=tuple(jnp.array(layer) for layer in layers))
    del checked.host[2]  # The first swap of it is stored, but it may hold anything now.
    run(checked, HAZARDS)


def test_a_second_mover_of_the_same_shapes_compiles_nothing(caplog) -> None:
    Checked()
    with jax.log_compiles(), caplog.at_level("WARNING"):
        Checked()
    assert not [r for r in caplog.records if "Compiling" in r.getMessage()]
