"""Ragged latent-attention batches over poisoned pools, and a float64 oracle of plain loops."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """Everything about a batch that compiled code depends on."""

    max_seqs: int = 5
    num_rows: int = 80
    max_blocks: int = 24
    block_size: int = 16
    num_heads: int = 4
    latent_dim: int = 32
    rope_dim: int = 16
    width: int = 48
    q_dtype: str = "float32"
    pool_dtype: str = "float32"

    @property
    def max_kv_tokens(self) -> int:
        return self.max_blocks * self.block_size

    @property
    def scale(self) -> float:
        return 1.5 * (self.latent_dim + self.rope_dim) ** -0.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A batch: `arrays` in the order of the op, and who owns what."""

    shape: Shape
    arrays: tuple[Any, ...]
    query_lens: list[int]
    kv_lens: list[int]

    @property
    def num_real_rows(self) -> int:
        return sum(self.query_lens)


def make_case(shape: Shape, lengths: list[tuple[int, int]], seed: int) -> Case:
    """A batch of (query tokens, tokens before them) a sequence, all else poisoned with NaN.

    Tables are permuted; each sequence shares some of the first one's leading blocks with a chance
    of a half. Query rows of padding are NaN; owned slots hold zeros past their two parts.
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

    key_dim = shape.latent_dim + shape.rope_dim
    pool = rng.standard_normal((num_blocks, shape.block_size, shape.width))
    pool[..., key_dim:] = 0
    pool[~owned] = np.nan
    q = rng.standard_normal((shape.num_rows, shape.num_heads, key_dim))
    q[sum(query_lens) :] = np.nan
    starts = np.full(shape.max_seqs + 1, sum(query_lens), np.int32)
    starts[: len(lengths) + 1] = np.cumsum([0, *query_lens])
    padded_kv_lens = np.zeros(shape.max_seqs, np.int32)
    padded_kv_lens[: len(lengths)] = kv_lens
    return Case(
        shape=shape,
        arrays=(
            jnp.asarray(q[..., : shape.latent_dim], shape.q_dtype),
            jnp.asarray(q[..., shape.latent_dim :], shape.q_dtype),
            _as_stored(pool, shape.pool_dtype),
            jnp.asarray(padded_kv_lens),
            jnp.asarray(tables),
            jnp.asarray(starts),
            jnp.int32(len(lengths)),
        ),
        query_lens=query_lens,
        kv_lens=kv_lens,
    )


def _as_stored(pool: np.ndarray, dtype: str) -> Any:
    if dtype == "uint16":
        return jnp.asarray(pool.astype(ml_dtypes.bfloat16).view(np.uint16))
    return jnp.asarray(pool, dtype)


def oracle(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """out [T, Hq, latent_dim] and lse [T, Hq] in float64, one head of one token at a time."""
    q_latent, q_rope, pool, _, tables, _, _ = (np.asarray(array) for array in case.arrays)
    if pool.dtype == np.uint16:
        pool = pool.view(ml_dtypes.bfloat16)
    q_latent, q_rope, pool = (x.astype(np.float64) for x in (q_latent, q_rope, pool))
    block_size, latent_dim = case.shape.block_size, case.shape.latent_dim
    out = np.zeros(q_latent.shape)
    lse = np.full(q_latent.shape[:2], -np.inf)
    row = 0
    for seq, (query_len, kv_len) in enumerate(zip(case.query_lens, case.kv_lens, strict=True)):
        tokens = np.stack(
            [pool[tables[seq, p // block_size], p % block_size] for p in range(kv_len)]
        )
        latents = tokens[:, :latent_dim]
        rotated = tokens[:, latent_dim : latent_dim + case.shape.rope_dim]
        for position in range(kv_len - query_len, kv_len):
            seen = slice(0, position + 1)
            for head in range(case.shape.num_heads):
                scores = latents[seen] @ q_latent[row, head] + rotated[seen] @ q_rope[row, head]
                scores *= case.shape.scale
                weights = np.exp(scores - scores.max())
                out[row, head] = weights @ latents[seen] / weights.sum()
                lse[row, head] = scores.max() + np.log(weights.sum())
            row += 1
    return out, lse


def relative_errors(case: Case, out: np.ndarray, expected: np.ndarray) -> list[float]:
    """|out - expected| / |expected| by norm, one figure a sequence."""
    ends = np.cumsum([0, *case.query_lens])
    errors = []
    for begin, end in itertools.pairwise(ends):
        difference = out[begin:end].astype(np.float64) - expected[begin:end]
        errors.append(float(np.linalg.norm(difference) / np.linalg.norm(expected[begin:end])))
    return errors
