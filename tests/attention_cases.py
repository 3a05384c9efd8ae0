"""Ragged batches over poisoned pools, and a float64 oracle that shares no code with the ops."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from paged_jax.models.heads import ProjectedHeads


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """Everything about a batch that compiled code depends on."""

    max_seqs: int = 5
    num_rows: int = 96
    max_blocks: int = 24
    block_size: int = 16
    num_q_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    q_dtype: str = "float32"
    pool_dtype: str = "float32"
    sliding_window: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False
    causal: bool = True
    return_lse: bool = False
    # Numbers a row of the pool, where it is not head_dim: tokens share rows or are padded.
    pool_width: int | None = None

    @property
    def max_kv_tokens(self) -> int:
        return self.max_blocks * self.block_size


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A batch: `arrays` in the order of the op, `options` by keyword, and who owns what."""

    shape: Shape
    arrays: tuple[Any, ...]
    options: dict[str, Any]
    query_lens: list[int]
    kv_lens: list[int]

    @property
    def num_real_rows(self) -> int:
        return sum(self.query_lens)


def make_case(shape: Shape, lengths: list[tuple[int, int]], seed: int) -> Case:
    """A batch of (query tokens, tokens before them) a sequence, every other slot poisoned.

    The tokens before may be negative where queries are not causal: more queries than tokens.

    Tables are permuted; each sequence shares some of the first one's leading blocks with a
    chance of a half. Query rows of padding are NaN.
    """
    rng = np.random.default_rng(seed)
    query_lens = [query_len for query_len, _ in lengths]
    kv_lens = [query_len + history for query_len, history in lengths]
    num_blocks = 1 + shape.max_seqs * shape.max_blocks
    tables = np.zeros((shape.max_seqs, shape.max_blocks), np.int32)
    free = list(rng.permutation(np.arange(1, num_blocks)))
    owned = np.zeros((num_blocks, shape.block_size), bool)
    for seq, kv_len in enumerate(kv_lens):
        used = -(-kv_len // shape.block_size)
        tables[seq, :used] = [free.pop() for _ in range(used)]
        shared = min(used, -(-kv_lens[0] // shape.block_size))
        if seq and rng.random() < 0.5:
            shared = int(rng.integers(0, shared + 1))
            tables[seq, :shared] = tables[0, :shared]
        for position in range(kv_len):
            owned[tables[seq, position // shape.block_size], position % shape.block_size] = True

    pool = _random_pool(rng, shape, num_blocks, ~owned)
    q = rng.standard_normal((shape.num_rows, shape.num_q_heads, shape.head_dim))
    q[sum(query_lens) :] = np.nan
    starts = np.full(shape.max_seqs + 1, sum(query_lens), np.int32)
    starts[: len(lengths) + 1] = np.cumsum([0, *query_lens])
    padded_kv_lens = np.zeros(shape.max_seqs, np.int32)
    padded_kv_lens[: len(lengths)] = kv_lens
    return Case(
        shape=shape,
        arrays=(
            jnp.asarray(q, shape.q_dtype),
            pool,
            jnp.asarray(padded_kv_lens),
            jnp.asarray(tables),
            jnp.asarray(starts),
            jnp.int32(len(lengths)),
        ),
        options=_options(rng, shape),
        query_lens=query_lens,
        kv_lens=kv_lens,
    )


def _random_pool(
    rng: np.random.Generator, shape: Shape, num_blocks: int, poisoned: np.ndarray
) -> jnp.ndarray:
    pool_shape = (num_blocks, 2 * shape.num_kv_heads, shape.block_size, shape.head_dim)
    where = np.broadcast_to(poisoned[:, None, :, None], pool_shape)
    if shape.pool_dtype == "int8":
        pool = rng.integers(-127, 128, pool_shape).astype(np.int8)
        return jnp.asarray(_widened(np.where(where, np.int8(-128), pool), shape))
    pool = _widened(np.where(where, np.nan, rng.standard_normal(pool_shape)), shape)
    if shape.pool_dtype == "uint16":
        return jnp.asarray(pool.astype(ml_dtypes.bfloat16).view(np.uint16))
    return jnp.asarray(pool.astype(jnp.dtype(shape.pool_dtype)))


def _widened(pool: np.ndarray, shape: Shape) -> np.ndarray:
    """A pool of one token a row in rows of pool_width."""
    width = shape.pool_width or shape.head_dim
    if width % shape.head_dim == 0:
        return pool.reshape(*pool.shape[:2], -1, width)
    return np.pad(pool, ((0, 0), (0, 0), (0, 0), (0, width - shape.head_dim)))


def _options(rng: np.random.Generator, shape: Shape) -> dict[str, Any]:
    options: dict[str, Any] = dict(
        scale=shape.head_dim**-0.5,
        sliding_window=shape.sliding_window,
        soft_cap=shape.soft_cap,
        causal=shape.causal,
        return_lse=shape.return_lse,
    )
    if shape.has_sinks:
        options["sinks"] = jnp.asarray(rng.standard_normal(shape.num_q_heads), jnp.float32)
    if shape.pool_dtype == "int8" or shape.pool_dtype.startswith("float8"):
        size = 0.02 if shape.pool_dtype == "int8" else 0.5
        for name in ("k_scale", "v_scale"):
            scales = size * (1 + rng.random(shape.num_kv_heads))
            options[name] = jnp.asarray(scales, jnp.float32)
    return options


def oracle(case: Case) -> np.ndarray:
    """The batch's attention in float64: [T, Hq, D]."""
    return oracle_with_lse(case)[0]


def oracle_with_lse(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Attention [T, Hq, D] and log of its denominator [T, Hq] without the sink, in float64.

    One query head of one token at a time.
    """
    q, pool, _, tables, _, _ = (np.asarray(array) for array in case.arrays)
    if pool.dtype == np.uint16:
        pool = pool.view(ml_dtypes.bfloat16)
    num_kv_heads, block_size = case.shape.num_kv_heads, case.shape.block_size
    pool = pool.reshape(*pool.shape[:2], block_size, -1)[..., : case.shape.head_dim]
    q, pool = q.astype(np.float64), pool.astype(np.float64)
    per_kv_head = case.shape.num_q_heads // num_kv_heads
    unit = np.ones(num_kv_heads)
    k_scale = np.asarray(case.options.get("k_scale", unit), np.float64)
    v_scale = np.asarray(case.options.get("v_scale", unit), np.float64)
    sinks, cap = case.options.get("sinks"), case.options["soft_cap"]
    window = case.options["sliding_window"] or case.shape.max_kv_tokens
    out, lse = np.zeros(q.shape), np.full(q.shape[:2], -np.inf)
    row = -1
    for seq, (query_len, kv_len) in enumerate(zip(case.query_lens, case.kv_lens, strict=True)):
        tokens = np.arange(kv_len)
        blocks, offsets = tables[seq, tokens // block_size], tokens % block_size
        for position in range(kv_len - query_len, kv_len):
            row += 1
            seen = slice(max(0, position - window + 1), position + 1)
            if not case.shape.causal:
                seen = slice(0, kv_len)
            if not tokens[seen].size:
                continue
            for head in range(case.shape.num_q_heads):
                kv_head = head // per_kv_head
                k = pool[blocks[seen], kv_head, offsets[seen]] * k_scale[kv_head]
                v = pool[blocks[seen], num_kv_heads + kv_head, offsets[seen]] * v_scale[kv_head]
                scores = k @ q[row, head] * case.options["scale"]
                if cap is not None:
                    scores = cap * np.tanh(scores / cap)
                sink = -np.inf if sinks is None else float(sinks[head])
                top = max(scores.max(), sink)
                weights = np.exp(scores - top)
                out[row, head] = weights @ v / (weights.sum() + np.exp(sink - top))
                lse[row, head] = top + np.log(weights.sum())
    return out, lse


def relative_errors(case: Case, out: np.ndarray, expected: np.ndarray) -> list[float]:
    """|out - expected| / |expected| by norm, one figure a sequence."""
    ends = np.cumsum([0, *case.query_lens])
    errors = []
    for begin, end in itertools.pairwise(ends):
        difference = out[begin:end].astype(np.float64) - expected[begin:end]
        size = max(np.linalg.norm(expected[begin:end]), np.finfo(np.float32).tiny)
        errors.append(float(np.linalg.norm(difference) / size))
    return errors


def heads_of(q: jax.Array, k: jax.Array, v: jax.Array) -> ProjectedHeads:
    """q[T, Hq, D], k and v[T, Hkv, D] as a model gives them, by angles of 0."""
    grouped = q.reshape(*k.shape[:2], -1, k.shape[2])
    rows = jnp.concatenate([grouped, k[:, :, None], v[:, :, None]], axis=2)
    angles = jnp.zeros((k.shape[0], k.shape[2] // 2), jnp.float32)
    return ProjectedHeads(rows, jnp.cos(angles), jnp.sin(angles))
