"""The batches that `bench_gpu` checks and times."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.pool_storage import SCALED_POOL_DTYPES


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A batch: (query tokens, tokens in the cache with those) a sequence, and the layer's form."""

    name: str
    lengths: tuple[tuple[int, int], ...]
    num_q_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16
    q_dtype: str = "bfloat16"
    pool_dtype: str = "bfloat16"
    sliding_window: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False
    # Whether to time the XLA path beside the kernels.
    with_xla: bool = False

    @property
    def is_decode(self) -> bool:
        return all(query_len == 1 for query_len, _ in self.lengths)

    @property
    def is_scaled(self) -> bool:
        return jnp.dtype(self.pool_dtype) in [jnp.dtype(d) for d in SCALED_POOL_DTYPES]

    @property
    def kv_bytes(self) -> int:
        """Keys and values that the batch's rows see, each counted once a sequence."""
        window = self.sliding_window or 2**31
        tokens = sum(min(kv_len, window + query_len - 1) for query_len, kv_len in self.lengths)
        itemsize = jnp.dtype(self.pool_dtype).itemsize
        return 2 * tokens * self.num_kv_heads * self.head_dim * itemsize

    @property
    def flops(self) -> int:
        """Multiplications and additions of all visible (query, key) pairs."""
        pairs = sum(n * (kv_len - n) + n * (n + 1) // 2 for n, kv_len in self.lengths)
        return 4 * pairs * self.num_q_heads * self.head_dim


def _decodes(*kv_lens: int) -> tuple[tuple[int, int], ...]:
    return tuple((1, kv_len) for kv_len in kv_lens)


# From 16 to 16k tokens, as many of each power of two.
_SPREAD = _decodes(*[2**power - power for power in range(4, 15) for _ in range(6)])
_MIXED = ((512, 512), (300, 2300), *_decodes(*[1000] * 62))
CONFORMANCE = (
    Case(name="decode 64 x 2048", lengths=_decodes(*[2048] * 64)),
    Case(name="decode 16 to 16k", lengths=_SPREAD),
    Case(name="mixed", lengths=_MIXED),
    Case(name="mixed, block 128", lengths=_MIXED, block_size=128),
    Case(name="mixed, float16, window, cap", lengths=_MIXED, q_dtype="float16",
         pool_dtype="float16", sliding_window=700, soft_cap=30.0),
    Case(name="mixed, head_dim 64, sinks", lengths=_MIXED, num_q_heads=64, head_dim=64,
         sliding_window=128, has_sinks=True),
    Case(name="mixed, head_dim 256", lengths=_MIXED, num_q_heads=8, num_kv_heads=2, head_dim=256),
    Case(name="mixed, SmolLM2-135M", lengths=_MIXED, num_q_heads=9, num_kv_heads=3, head_dim=64),
    Case(name="mixed, 1 head a group", lengths=_MIXED, num_q_heads=8),
    Case(name="mixed, int8", lengths=_MIXED, pool_dtype="int8"),
    Case(name="mixed, float8_e4m3fn", lengths=_MIXED, pool_dtype="float8_e4m3fn"),
    Case(name="mixed, float8_e5m2", lengths=_MIXED, pool_dtype="float8_e5m2", block_size=64),
)  # fmt: skip
TIMED = (
    Case(name="decode 64 x 2048", lengths=_decodes(*[2048] * 64), with_xla=True),
    Case(name="decode 64 x 2048, block 64", lengths=_decodes(*[2048] * 64), block_size=64),
    Case(name="decode 16 to 16k", lengths=_SPREAD, with_xla=True),
    Case(name="decode 1 x 32768", lengths=_decodes(32768)),
    Case(name="decode 8 x 4096", lengths=_decodes(*[4096] * 8)),
    Case(name="decode 256 x 512", lengths=_decodes(*[512] * 256)),
    Case(name="decode 64 x 2048, int8", lengths=_decodes(*[2048] * 64), pool_dtype="int8"),
    Case(name="decode 64 x 2048, float8", lengths=_decodes(*[2048] * 64),
         pool_dtype="float8_e4m3fn"),
    Case(name="decode 64 x 2048, 64 heads", lengths=_decodes(*[2048] * 64), num_q_heads=64),
    Case(name="prefill 4 x 2048", lengths=((2048, 2048),) * 4, with_xla=True),
    Case(name="prefill 512 after 7680", lengths=((512, 8192),)),
    Case(name="mixed", lengths=_MIXED, with_xla=True),
)  # fmt: skip
SMOKE_CASES = (
    Case(name="decode", lengths=_decodes(100, 1, 64), with_xla=True, num_q_heads=4, num_kv_heads=1),
    Case(name="mixed", lengths=((20, 50), (1, 70)), num_q_heads=4, num_kv_heads=1),
)


def make_arrays(case: Case, *, num_pools: int) -> tuple[Any, dict[str, Any]]:
    """(q, pools, (kv_lens, block_tables, query_starts, num_seqs)) and the op's options.

    Blocks are scattered over the pool. Numbers are random; none is poison.
    """
    rng = np.random.default_rng(0)
    query_lens, kv_lens = map(np.asarray, zip(*case.lengths, strict=True))
    used = (kv_lens + case.block_size - 1) // case.block_size
    # jax's own kernel cuts a table into 16 pieces.
    tables = np.zeros((len(used), -(-int(used.max()) // 16) * 16), np.int32)
    blocks = rng.permutation(int(used.sum())).astype(np.int32) + 1
    for seq, (end, count) in enumerate(zip(np.cumsum(used), used, strict=True)):
        tables[seq, :count] = blocks[end - count : end]
    starts = np.cumsum([0, *query_lens]).astype(np.int32)
    batch = (kv_lens.astype(np.int32), tables, starts, np.int32(len(used)))

    shape = (int(used.sum()) + 1, 2 * case.num_kv_heads, case.block_size, case.head_dim)
    keys = jax.random.split(jax.random.key(0), num_pools + 1)
    pools = [_random_pool(key, shape, case.pool_dtype) for key in keys[1:]]
    q_shape = (int(starts[-1]), case.num_q_heads, case.head_dim)
    q = jax.random.normal(keys[0], q_shape, case.q_dtype)
    options: dict[str, Any] = dict(
        scale=case.head_dim**-0.5, sliding_window=case.sliding_window, soft_cap=case.soft_cap
    )
    if case.has_sinks:
        options["sinks"] = jnp.linspace(-1.0, 1.0, case.num_q_heads)
    if case.is_scaled:
        size = 1 / 60 if case.pool_dtype == "int8" else 1.0
        options["k_scale"] = options["v_scale"] = jnp.full(case.num_kv_heads, size)
    return (q, pools, tuple(map(jnp.asarray, batch))), options


def _random_pool(key: jax.Array, shape: tuple[int, ...], dtype: str) -> jax.Array:
    def make(key: jax.Array) -> jax.Array:
        if dtype == "int8":
            return jax.random.randint(key, shape, -127, 128, jnp.int8)
        return jax.random.normal(key, shape, jnp.bfloat16).astype(dtype)

    return jax.jit(make)(key)
