"""Rotary embedding and KV write as one C++ operation: against float64, XLA, and in place."""

from __future__ import annotations

import dataclasses
import functools
import shutil
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from attention_cases import Shape, heads_of, make_case, oracle, relative_errors
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from paged_jax.attend import paged_attend
from paged_jax.batch import StepBatch
from paged_jax.kv_pool import ChannelScales, ScaledLayer
from paged_jax.models.heads import ProjectedHeads
from pallas_kernels import attention_cpu, rope_write_cpu, tpu_runtime, write_kv
from pallas_kernels.rope_write_cpu import rope_write

pytestmark = pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="no C++ compiler is found"
)
BLOCK_SIZE = 16


@pytest.fixture(autouse=True, scope="module")
def kernels() -> None:
    """Builds them: no program may name one before."""
    assert rope_write_cpu.missing_reason() is None and attention_cpu.missing_reason() is None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """A step's arguments; of `num_rows` rows two are padding and two have slots that are none."""

    num_rows: int = 33
    num_kv_heads: int = 3
    group: int = 3
    head_dim: int = 64
    dtype: str = "float32"
    pool_dtype: str = "float32"
    pool_width: int | None = None
    spare_blocks: int = 3
    seed: int = 0

    @property
    def num_blocks(self) -> int:
        return self.spare_blocks + self.num_rows // 8

    @functools.cached_property
    def arrays(self) -> tuple[jax.Array, ...]:
        """rows, cos, sin, pool_layer, slot_mapping; nobody's numbers in the pool are poison."""
        rng = np.random.default_rng(self.seed)
        shape = (self.num_rows, self.num_kv_heads, self.group + 2, self.head_dim)
        angles = rng.uniform(-np.pi, np.pi, (self.num_rows, self.head_dim // 2))
        slots = BLOCK_SIZE + rng.permutation((self.num_blocks - 1) * BLOCK_SIZE)[: self.num_rows]
        if self.num_rows > 4:
            slots[[2, 4]] = -1, self.num_blocks * BLOCK_SIZE
            slots[-2:] = 0
        return (
            jnp.asarray(rng.standard_normal(shape), self.dtype),
            jnp.asarray(np.cos(angles), jnp.float32),
            jnp.asarray(np.sin(angles), jnp.float32),
            jnp.asarray(self.poisoned_pool()),
            jnp.asarray(slots, jnp.int32),
        )

    def poisoned_pool(self) -> np.ndarray:
        width = self.pool_width or self.head_dim
        tokens_a_row = width // self.head_dim if width % self.head_dim == 0 else 1
        shape = (self.num_blocks, 2 * self.num_kv_heads, BLOCK_SIZE // tokens_a_row, width)
        poison = {"int8": -128, "uint16": 0x7FC1}.get(self.pool_dtype, np.nan)
        return np.full(shape, poison, self.pool_dtype)

    @functools.cached_property
    def scales(self) -> ChannelScales | None:
        if self.pool_dtype != "int8":
            return None
        rng = np.random.default_rng(self.seed + 1)
        shape = (2 * self.num_kv_heads, self.head_dim)
        scale, offset = rng.uniform(0.005, 0.02, shape), rng.uniform(-1, 1, shape)
        return ChannelScales(jnp.asarray(scale, jnp.float32), jnp.asarray(offset, jnp.float32))

    @property
    def options(self) -> dict[str, Any]:
        if self.scales is None:
            return {}
        return dict(channel_scale=self.scales.scale, channel_offset=self.scales.offset)

    def tokens(self, pool_layer: Any) -> np.ndarray:
        """A pool as [slots, 2 * Hkv, numbers of a token]."""
        pool = np.asarray(pool_layer)
        if pool.dtype == np.uint16:
            pool = pool.view(ml_dtypes.bfloat16)
        pool = pool.reshape(*pool.shape[:2], BLOCK_SIZE, -1)
        return pool.transpose(0, 2, 1, 3).reshape(-1, *pool.shape[1:2], pool.shape[3])

    def in_xla(self, rows, cos, sin, pool_layer, slots) -> tuple[jax.Array, jax.Array]:
        q, k, v = ProjectedHeads(rows, cos, sin).rotated()
        if self.scales is not None:
            keys, values = self.scales.halves()
            k, v = keys.to_int8(k), values.to_int8(v)
        return q, write_kv(pool_layer, k, v, slots, implementation="xla")


STEPS = {
    "smollm": Step(),
    "int8": Step(pool_dtype="int8"),
    "bits": Step(pool_dtype="uint16"),
    "many_rows": Step(num_rows=301, pool_dtype="int8"),
    "one_row_group_of_1": Step(num_rows=1, group=1, num_kv_heads=2),
    "group_of_8": Step(group=8, num_kv_heads=1, head_dim=128, pool_dtype="int8"),
    "head_dim_80": Step(head_dim=80, num_rows=7, pool_dtype="int8"),
    "head_dim_6": Step(head_dim=6, num_rows=7),
    "bfloat16": Step(dtype="bfloat16", pool_dtype="uint16"),
    "bfloat16_wide": Step(dtype="bfloat16", head_dim=80),
    "bfloat16_int8": Step(dtype="bfloat16", pool_dtype="int8", group=1),
    "two_tokens_a_row": Step(pool_width=128),
    "padded": Step(head_dim=80, pool_width=128, pool_dtype="int8"),
}


@pytest.mark.parametrize("name", STEPS)
def test_queries_and_pool_are_those_of_float64(name: str) -> None:
    step = STEPS[name]
    rows, cos, sin, pool_layer, slots = step.arrays
    q, written = jax.jit(rope_write)(*step.arrays, **step.options)
    assert q.dtype == rows.dtype and written.shape == pool_layer.shape

    exact, num_rows = np.asarray(rows, np.float64), step.num_rows
    first, second = np.split(exact[:, :, :-1], 2, axis=-1)
    cos, sin = (np.asarray(x, np.float64)[:, None, None] for x in (cos, sin))
    turned = np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    error = 2.0**-8 if rows.dtype == jnp.bfloat16 else 2.0**-22
    size = np.abs(exact).max()
    expected_q = turned[:, :, :-1].reshape(num_rows, -1, step.head_dim)
    assert np.abs(np.asarray(q, np.float64) - expected_q).max() <= error * size

    real = np.concatenate([turned[:, :, -1], exact[:, :, -1]], axis=1)
    before, after = step.tokens(pool_layer), step.tokens(written)
    own = np.asarray([s for s in np.asarray(slots) if BLOCK_SIZE <= s < len(before)], int)
    is_own = np.isin(np.asarray(slots), own)
    assert is_own.sum() == (num_rows - 4 if num_rows > 4 else num_rows)
    found = after[own].astype(np.float64)
    np.testing.assert_array_equal(found[..., step.head_dim :], 0.0)
    found, real = found[..., : step.head_dim], real[is_own]
    if step.scales is not None:
        scale, offset = (np.asarray(x, np.float64) for x in step.options.values())
        stored = np.clip((real - offset) / scale, -127, 127)
        assert (np.abs(stored) == 127).any() and (np.abs(stored) < 127).mean() > 0.5
        assert np.abs(found - stored).max() <= 0.5 + error * size / scale.min()
    else:
        pool_error = error if step.pool_dtype == "float32" else 2.0**-8
        assert np.abs(found - real).max() <= pool_error * size
    # Nobody else's slot is touched, the null block but for its first slot.
    others = np.setdiff1d(np.arange(len(before)), [*own, 0])
    assert before[others].tobytes() == after[others].tobytes()


@pytest.mark.parametrize("name", STEPS)
def test_as_in_xla(name: str) -> None:
    """Where XLA contracts other products, a key between two integers may go to the other one."""
    step = STEPS[name]
    q, written = jax.jit(rope_write)(*step.arrays, **step.options)
    expected_q, expected = jax.jit(step.in_xla)(*step.arrays)
    unit = 2.0**-7 if step.dtype == "bfloat16" else 2.0**-22
    wide = lambda x: np.asarray(x, np.float64)
    np.testing.assert_allclose(wide(q), wide(expected_q), rtol=unit, atol=unit)
    found, expected = (step.tokens(x)[BLOCK_SIZE:].astype(np.float64) for x in (written, expected))
    if step.scales is not None:
        assert (found != expected).mean() < 1e-3 and np.abs(found - expected).max() <= 1
    else:
        unit = unit if step.pool_dtype == "float32" else 2.0**-7
        np.testing.assert_allclose(found, expected, rtol=unit, atol=unit)


def test_rounded_to_even_clipped_and_no_number_is_0() -> None:
    numbers = [0.5, 1.5, 2.5, -0.5, -1.5, 200.0, -200.0, 126.5, np.nan, np.inf]
    row = np.resize(np.array(numbers, np.float32), (1, 1, 1, 10))
    rows = jnp.asarray(np.repeat(row, 3, axis=2))
    cos, sin = jnp.ones((1, 5)), jnp.zeros((1, 5))
    channels = dict(channel_scale=jnp.ones((2, 10)), channel_offset=jnp.zeros((2, 10)))
    pool = jnp.zeros((2, 2, 4, 10), jnp.int8)
    _, written = rope_write(rows, cos, sin, pool, jnp.array([5]), **channels)
    np.testing.assert_array_equal(written[1, 1, 1], [0, 2, 2, 0, -2, 127, -127, 126, 0, 127])


@pytest.mark.parametrize("name", ["int8", "bfloat16", "many_rows"])
def test_a_rows_bits_do_not_depend_on_its_neighbours(name: str) -> None:
    step = STEPS[name]
    rows, cos, sin, pool_layer, slots = step.arrays
    run = jax.jit(rope_write)
    together, pool = run(*step.arrays, **step.options)
    for cut in (slice(5, 6), slice(7, 20)):
        alone, own = run(rows[cut], cos[cut], sin[cut], pool_layer, slots[cut], **step.options)
        np.testing.assert_array_equal(together[cut], alone)
        at = np.asarray(slots[cut])
        np.testing.assert_array_equal(step.tokens(pool)[at], step.tokens(own)[at])


# --- in place ------------------------------------------------------------------------------------


def repeated(step: Step):
    """A loop that writes a step's rows into two pools again and again."""
    rows, cos, sin, _, slots = step.arrays

    def run(pools):
        def body(carry):
            count, *pools = carry
            written = []
            for pool in pools:
                q, pool = rope_write(rows, cos, sin, pool, slots, **step.options)
                # A reader of the pool after the write, as attention is.
                written.append(pool.at[0, 0, 0, 0].set(q[0, 0, 0].astype(pool.dtype)))
            return count + 1, *written

        return jax.lax.while_loop(lambda carry: carry[0] < 3, body, (0, *pools))[1:]

    return run


@pytest.mark.parametrize("name", ["smollm", "int8", "bfloat16"])
@pytest.mark.parametrize("in_loop", [False, True])
def test_a_donated_pool_is_written_where_it_lies(name: str, in_loop: bool) -> None:
    step = dataclasses.replace(STEPS[name], spare_blocks=200, seed=3)
    rows, cos, sin, pool_layer, slots = step.arrays

    def once(pools):
        return tuple(rope_write(rows, cos, sin, p, slots, **step.options)[1] for p in pools)

    expected = step.tokens(step.in_xla(*step.arrays)[1])
    pools = (jnp.array(pool_layer), jnp.array(pool_layer))
    program = jax.jit(repeated(step) if in_loop else once, donate_argnums=0)
    compiled = program.lower(pools).compile()
    before = [pool.unsafe_buffer_pointer() for pool in pools]
    written = compiled(pools)
    assert [pool.unsafe_buffer_pointer() for pool in written] == before
    memory = compiled.memory_analysis()
    assert memory is not None and memory.temp_size_in_bytes < pool_layer.nbytes
    found = step.tokens(written[1])[BLOCK_SIZE:].astype(np.float32)
    expected = expected[BLOCK_SIZE:].astype(np.float32)
    atol = 1.0 if step.scales is not None else 2.0**-7
    np.testing.assert_allclose(found, expected, atol=atol, rtol=0)


def test_a_pool_that_is_not_donated_stays_as_it_was() -> None:
    step = Step()
    before = np.array(step.arrays[3])
    rope_write(*step.arrays)
    np.testing.assert_array_equal(step.arrays[3], before)


def test_under_vmap() -> None:
    """Two pools and two batches of rows, one after the other."""
    steps = [dataclasses.replace(STEPS["int8"], seed=seed) for seed in (5, 6)]
    stacked = [jnp.stack(arrays) for arrays in zip(*(step.arrays for step in steps), strict=True)]
    q, pools = jax.jit(jax.vmap(functools.partial(rope_write, **steps[0].options)))(*stacked)
    for i, step in enumerate(steps):
        expected_q, expected_pool = rope_write(*step.arrays, **steps[0].options)
        np.testing.assert_array_equal(q[i], expected_q)
        np.testing.assert_array_equal(pools[i], expected_pool)


@pytest.mark.parametrize("mapping", ["shard_map", "pmap"])
def test_in_place_over_devices(mapping: str) -> None:
    """Each of two devices has some KV heads, and its part of the pool."""
    step = Step(num_kv_heads=4)
    rows, cos, sin, pool_layer, slots = step.arrays
    expected_q, expected = step.in_xla(*step.arrays)
    devices = jax.devices()[:2]
    by_heads = P(None, "tensor")
    mesh = Mesh(np.array(devices), ("tensor",))
    cut = lambda x, axis: jnp.stack(jnp.split(x, 2, axis=axis))
    # Keys and values of a device's heads lie together.
    keys, values = jnp.split(pool_layer, 2, axis=1)
    parts = jnp.concatenate([cut(keys, 1), cut(values, 1)], axis=2)
    if mapping == "pmap":
        run = jax.pmap(
            rope_write, in_axes=(0, None, None, 0, None), donate_argnums=3, devices=devices
        )
        given = jax.pmap(lambda x: x, devices=devices)(parts)
        arrays = (cut(rows, 1), cos, sin, given, slots)
    else:
        specs = (by_heads, P(), P(), by_heads, P())
        mapped = jax.shard_map(
            rope_write, mesh=mesh, in_specs=specs, out_specs=(by_heads, by_heads), check_vma=False
        )
        run = jax.jit(mapped, donate_argnums=3)
        given = jax.device_put(jnp.concatenate(list(parts), axis=1), NamedSharding(mesh, by_heads))
        arrays = (rows, cos, sin, given, slots)
    pointers = lambda x: sorted(s.data.unsafe_buffer_pointer() for s in x.addressable_shards)
    before = pointers(given)
    q, written = run(*arrays)
    assert pointers(written) == before
    if mapping == "pmap":
        q, written = (jnp.concatenate(list(x), axis=1) for x in (q, written))
    np.testing.assert_allclose(q, expected_q, rtol=1e-6, atol=1e-6)
    own = written.reshape(written.shape[0], 2, 2, 2, *written.shape[2:])
    whole = own.swapaxes(1, 2).reshape(written.shape)
    np.testing.assert_allclose(whole[1:], expected[1:], rtol=1e-6, atol=1e-6)


# --- with attention ------------------------------------------------------------------------------


@pytest.mark.parametrize("q_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("group", [1, 3, 8])
def test_attention_over_channels(q_dtype: str, group: int) -> None:
    shape = Shape(
        num_q_heads=2 * group,
        num_kv_heads=2,
        head_dim=80 if group == 8 else 64,
        pool_dtype="int8",
        q_dtype=q_dtype,
    )
    case = make_case(shape, [(30, 7), (1, 300), (1, 0), (9, 100)], seed=group)
    q, pool, *batch = case.arrays
    rng = np.random.default_rng(group)
    channels = (4, shape.head_dim)
    scale, offset = rng.uniform(0.005, 0.02, channels), rng.uniform(-1, 1, channels)
    scale, offset = (jnp.asarray(x, jnp.float32) for x in (scale, offset))
    out = attention_cpu.attention_over_channels(
        q, pool, *batch, scale=case.options["scale"], channel_scale=scale, channel_offset=offset
    )
    wide = lambda x: np.asarray(x, np.float64)[:, None, :]
    real = np.where(np.asarray(pool) == -128, np.nan, wide(pool)[:, 0] * wide(scale) + wide(offset))
    options = case.options | dict(k_scale=None, v_scale=None)
    options = {name: value for name, value in options.items() if value is not None}
    options |= dict(sliding_window=None, soft_cap=None)
    exact = dataclasses.replace(case, arrays=(q, real, *batch), options=options)
    errors = relative_errors(exact, np.asarray(out, np.float64), oracle(exact))
    assert max(errors) < (1e-2 if q_dtype == "bfloat16" else 3e-6)
    np.testing.assert_array_equal(np.asarray(out[41:], np.float32), 0.0)
    with pytest.raises(ValueError, match=r"channel_scale has shape \(2, .*; give \(4, "):
        attention_cpu.attention_over_channels(
            q, pool, *batch, scale=1.0, channel_scale=scale[:2], channel_offset=offset
        )


def batch_of(num_rows: int) -> StepBatch:
    """One sequence of so many tokens."""
    fields: dict[str, Any] = {field.name: None for field in dataclasses.fields(StepBatch)}
    slots = jnp.arange(num_rows, dtype=jnp.int32) + BLOCK_SIZE
    table = jnp.arange(1, 3, dtype=jnp.int32)[None]
    fields |= dict(token_ids=jnp.zeros(num_rows, jnp.int32), slot_mapping=slots)
    fields |= dict(kv_lens=jnp.array([num_rows], jnp.int32), block_tables=table)
    fields |= dict(query_starts=jnp.array([0, num_rows], jnp.int32), num_seqs=jnp.int32(1))
    return StepBatch(**fields)


@pytest.mark.parametrize("pool_dtype", ["float32", "uint16", "int8"])
def test_attend_takes_it_on_a_cpu(pool_dtype: str) -> None:
    step = Step(num_rows=20, pool_dtype=pool_dtype)
    rows, cos, sin, pool_layer, _ = step.arrays
    heads = ProjectedHeads(rows, cos, sin)
    cache = pool_layer if step.scales is None else ScaledLayer(pool_layer, step.scales)

    def attend(heads, cache, implementation):
        return paged_attend(
            batch_of(20), block_size=BLOCK_SIZE, scale=0.125, implementation=implementation
        )(heads, cache)

    program = jax.jit(attend, static_argnums=2)
    text = lambda name: program.lower(heads, cache, name).as_text()
    assert "paged_rope_write" in text(None) and "paged_rope_write" in text("cpu")
    assert "paged_rope_write" not in text("xla")
    with tpu_runtime.force_compile():
        jax.clear_caches()
        assert "paged_rope_write" not in text(None)
    jax.clear_caches()
    out, found = program(heads, cache, None)
    expected_out, expected = program(heads, cache, "xla")
    np.testing.assert_allclose(out, expected_out, rtol=1e-4, atol=1e-4)
    assert jax.tree.structure(found) == jax.tree.structure(expected)


def test_heads_of_a_test_are_its_queries_keys_and_values() -> None:
    rng = np.random.default_rng(0)
    given = [rng.standard_normal((5, n, 8)).astype(np.float32) for n in (6, 2, 2)]
    for found, wanted in zip(heads_of(*map(jnp.asarray, given)).rotated(), given, strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_what_does_not_fit_is_refused() -> None:
    step = Step()
    rows, cos, sin, pool_layer, slots = step.arrays
    reason = rope_write_cpu.unsupported_reason
    assert reason(rows, pool_layer) is None
    assert "rows has dtype float16" in str(reason(rows.astype(jnp.float16), pool_layer))
    assert "pool_layer has dtype bfloat16" in str(reason(rows, pool_layer.astype(jnp.bfloat16)))
    assert "head_dim is 2048" in str(reason(jnp.zeros((1, 1, 3, 2048)), pool_layer))
    with tpu_runtime.force_compile():
        assert "compiled for a TPU" in str(reason(rows, pool_layer))
    good: dict[str, Any] = dict(
        rows=rows, cos=cos, sin=sin, pool_layer=pool_layer, slot_mapping=slots
    )
    for change, message in (
        (dict(rows=rows[..., :63]), "an even D"),
        (dict(rows=rows[:, :, :2]), "G \\+ 2"),
        (dict(rows=rows[:, :2]), r"need \[num_blocks, 4, rows, 64 or more\]"),
        (dict(cos=cos[:5]), r"cos has shape \(5, 32\)"),
        (dict(sin=sin[:, :8]), r"sin has shape \(33, 8\)"),
        (dict(slot_mapping=slots[1:]), r"slot_mapping has shape \(32,\)"),
        (dict(pool_layer=pool_layer.astype(jnp.int8)), r"channel_scale has shape None.*\(6, 64\)"),
        (dict(channel_offset=jnp.zeros((6, 64))), "channel_offset has shape .* needs None"),
    ):
        with pytest.raises(ValueError, match=message):
            rope_write(**(good | change))
