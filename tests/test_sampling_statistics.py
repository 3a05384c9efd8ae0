"""Draws of the sampler, 20,000 and more a case, against exact float64 probabilities.

Seeds and positions are fixed, so a case passes always or never. A chi-square statistic is turned
into a standard normal deviate (Wilson and Hilferty's cube root); 4 is one chance in 30,000.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax.sampling import SamplingBatch, sample

NUM_DRAWS = 20_480
MAX_DEVIATE = 4.0

step = jax.jit(sample)


def draw(logits, *, seeds, positions, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """int[N]: one token of logits[V] for each of N 64-bit seeds and positions."""
    seeds = np.broadcast_to(np.asarray(seeds, np.uint64), np.shape(positions))
    count = len(positions)
    full = lambda value, dtype: jnp.full(count, value, dtype)
    batch = SamplingBatch(
        temperature=full(temperature, jnp.float32),
        top_k=full(top_k, jnp.int32),
        top_p=full(top_p, jnp.float32),
        min_p=full(min_p, jnp.float32),
        seed=np.stack([seeds & 0xFFFFFFFF, seeds >> 32], -1).astype(np.uint32),
        positions=np.asarray(positions, np.int32),
        masked_tokens=jnp.full((count, 64), -1, jnp.int32),
        num_logprobs=full(-1, jnp.int32),
        forced_tokens=full(-1, jnp.int32),
    )
    rows = jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (count, len(logits)))
    return np.asarray(step(rows, batch).token_ids)


def exact_probabilities(logits, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """float64[V]: temperature, min-p, top-k, top-p, by sorting. No two logits may be equal."""
    scaled = np.asarray(logits, np.float32).astype(np.float64) / temperature
    order = np.argsort(-scaled)
    p = np.exp(scaled - scaled.max())[order]
    p[p < min_p] = 0
    if top_k > 0:
        p[top_k:] = 0
    p /= p.sum()
    p[np.cumsum(p) - p >= top_p] = 0
    probabilities = np.empty_like(p)
    probabilities[order] = p / p.sum()
    return probabilities


def deviate(counts, expected):
    """How far counts are from expected, as a standard normal deviate; rare bins are pooled."""
    rare = expected < 10
    counts = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    used = expected > 0
    chi_square = ((counts - expected)[used] ** 2 / expected[used]).sum()
    freedom = used.sum() - 1
    spread = 2 / (9 * freedom)
    return (np.cbrt(chi_square / freedom) - (1 - spread)) / np.sqrt(spread)


def normal_logits(count, scale):
    return np.random.default_rng(count).normal(size=count) * scale


MIXES = [
    dict(),
    dict(temperature=0.5),
    dict(temperature=2.0),
    dict(top_k=5),
    dict(top_p=0.8),
    dict(min_p=0.05),
    dict(temperature=1.5, top_k=12, top_p=0.9),
    dict(temperature=0.7, top_k=10, top_p=0.95, min_p=0.02),
    dict(temperature=2.0, top_p=0.5, min_p=0.01),
]


@pytest.mark.parametrize("mix", MIXES, ids=str)
def test_tokens_come_with_their_exact_probabilities(mix):
    logits = normal_logits(40, 2.0)
    expected = exact_probabilities(logits, **mix)
    tokens = draw(logits, seeds=1234, positions=np.arange(NUM_DRAWS), **mix)
    counts = np.bincount(tokens, minlength=40)
    assert not counts[expected == 0].any(), "a token outside the support was drawn"
    assert counts[expected * NUM_DRAWS > 10].all(), "a token of the support was never drawn"
    assert abs(deviate(counts, expected * NUM_DRAWS)) < MAX_DEVIATE


def test_seeds_vary_the_token_as_positions_do():
    logits = normal_logits(40, 2.0)
    expected = exact_probabilities(logits) * NUM_DRAWS
    for shift in (0, 32):  # in the low word, and in the high word alone
        seeds = np.arange(NUM_DRAWS, dtype=np.uint64) << np.uint64(shift)
        tokens = draw(logits, seeds=seeds, positions=np.full(NUM_DRAWS, 7))
        assert abs(deviate(np.bincount(tokens, minlength=40), expected)) < MAX_DEVIATE


@pytest.mark.parametrize("scale", [0.0, 1.0])
def test_a_vocabulary_of_many_blocks(scale):
    """1,000 tokens, the last block not full, flat and not: every token gets its share."""
    logits = normal_logits(1000, scale)
    expected = np.exp(logits) / np.exp(logits).sum() * NUM_DRAWS
    counts = np.zeros(1000)
    for part in np.split(np.arange(NUM_DRAWS), 5):
        counts += np.bincount(draw(logits, seeds=99, positions=part), minlength=1000)
    assert abs(deviate(counts, expected)) < MAX_DEVIATE


@pytest.mark.parametrize("mix", [dict(top_k=30), dict(top_p=0.6), dict(temperature=0.5)], ids=str)
def test_a_vocabulary_searched_by_its_best_blocks(mix):
    logits = normal_logits(20_000, 1.5)
    expected = exact_probabilities(logits, **mix)
    counts = np.zeros(20_000)
    for part in np.split(np.arange(4096), 8):
        counts += np.bincount(draw(logits, seeds=5, positions=part, **mix), minlength=20_000)
    # Float32 masses may move the edge of the nucleus by a token that hardly ever comes.
    assert counts[expected == 0].sum() <= 1
    assert abs(deviate(counts, expected * 4096)) < MAX_DEVIATE


@pytest.mark.parametrize("other", ["next position", "next seed", "high word of the seed"])
def test_neighbouring_draws_are_independent(other):
    """Pairs of tokens come with the product of their probabilities."""
    logits = normal_logits(8, 0.7)
    positions, seeds = np.arange(NUM_DRAWS), np.uint64(42)
    first = draw(logits, seeds=seeds, positions=positions)
    if other == "next position":
        first, second = first[:-1], first[1:]
    elif other == "next seed":
        second = draw(logits, seeds=seeds + np.uint64(1), positions=positions)
    else:
        second = draw(logits, seeds=seeds + np.uint64(2**32), positions=positions)
    p = exact_probabilities(logits)
    counts = np.bincount(first * 8 + second, minlength=64)
    assert abs(deviate(counts, np.outer(p, p).ravel() * len(first))) < MAX_DEVIATE


def test_the_deviate_notices_a_bias():
    """The yardstick itself: probabilities 10 percent off are far outside what passes."""
    p = exact_probabilities(normal_logits(40, 2.0))
    biased = p * np.where(np.arange(40) % 2, 1.1, 0.9)
    counts = np.random.default_rng(0).multinomial(NUM_DRAWS, biased / biased.sum())
    assert deviate(counts, p * NUM_DRAWS) > MAX_DEVIATE
