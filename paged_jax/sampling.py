"""Sampling on device: from logits to one token a row, without a sort.

Every row has parameters of its own, held in arrays, so that one compiled program serves every mix.
What no row asks for is not paid for: `lax.cond` skips the mask and the draw, the filters and the
logprobs when no row of the batch wants them.

The filters (min-p, top-k, top-p) each keep the tokens whose logit reaches some threshold, so a row
needs one number, not a sorted vocabulary. The thresholds of top-k and top-p are found by bisection,
each pass one reduction over the vocabulary: the idea of the sorting-free sampling kernels of
FlashInfer (Ye et al., 2025), whose pivots this module places at midpoints, and of radix select,
from which it takes the integer image of a float that bounds the number of passes.

The token is drawn by an exponential race: with E_i ~ Exp(1), argmax w_i / E_i is distributed as
w / sum(w). That is the Gumbel-max trick without its second logarithm.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from paged_jax.bisection import bisect, lane_sums, ordered_sum
from paged_jax.sampling_params import MAX_LOGPROBS

MAX_MASKED_TOKENS = 64
"""Width of `SamplingBatch.masked_tokens`: most ids that `min_tokens` can hold back in a row."""

# Lanes of a vector register tile on TPUs, and a width that CPUs vectorise well.
_BLOCK_SIZE = 128
# Blocks that the thresholds are first looked for in; wider than nearly every nucleus.
_NUM_CANDIDATE_BLOCKS = 64
# exp(-104) is 0 in float32: a token this many nats below the likeliest has no weight at all.
_NEGLIGIBLE_NATS = 104.0
# Below this, dividing by the temperature would overflow or meet flushed denormals.
_MIN_TEMPERATURE = 1e-7


# What a field of a batch holds: jax arrays inside a step, numpy arrays on their way to it.
Array = Any


@struct.dataclass
class SamplingBatch:
    """What each of S rows asks of the sampler; `paged_jax.make_sampling` builds one.

    Attributes:
        temperature: float32[S], 0 is greedy.
        top_k: int32[S], 0 is off.
        top_p: float32[S], 1 is off.
        min_p: float32[S], 0 is off.
        seed: uint32[S, 2], low and high word of the row's seed.
        positions: int32[S], position in its sequence of the token to be drawn: the length of the
            prompt after a prefill, and one more at each step.
        masked_tokens: int32[S, MAX_MASKED_TOKENS], ids that may not be drawn, padded with -1.
        num_logprobs: int32[S], alternatives wanted, -1 for no logprobs at all.
        forced_tokens: int32[S], the token that a row gets whatever its logits, -1 to draw one: so
            that a known token's logprob and rank can be had.
    """

    temperature: Any
    top_k: Any
    top_p: Any
    min_p: Any
    seed: Any
    positions: Any
    masked_tokens: Any
    num_logprobs: Any
    forced_tokens: Any

    @property
    def is_plain(self) -> Any:
        """Whether the likeliest token is all that any row asks for: no temperature, no mask, no
        logprobs. A bool of the arrays' kind.
        """
        return ~(
            (self.temperature > 0).any()
            | (self.num_logprobs >= 0).any()
            | (self.masked_tokens >= 0).any()
        )


@struct.dataclass
class SamplerOutput:
    """One token for each of S rows. K = min(MAX_LOGPROBS, V).

    The logprobs are of the raw logits: before the mask, the temperature and the filters. They and
    the ranks are zeros when no row asked for logprobs.

    Attributes:
        token_ids: int32[S].
        logprob: float32[S], of the drawn token.
        rank: int32[S], 1 + the number of tokens with a strictly greater raw logit.
        top_ids: int32[S, K], likeliest first, equal logits by id.
        top_logprobs: float32[S, K].
        is_finite: bool[S], False: nan, +inf or no finite logit; the token means nothing.
    """

    token_ids: Any
    logprob: Any
    rank: Any
    top_ids: Any
    top_logprobs: Any
    is_finite: Any


def sample(logits: jax.Array, batch: SamplingBatch, *, is_plain: bool = False) -> SamplerOutput:
    """Draws one token a row, each row by its own parameters.

    In order: the mask, temperature, min-p, top-k, and top-p over what top-k left. Tokens tied at a
    threshold are all kept. Greedy rows take the likeliest token, the lowest id among equals.

    A row's token is a function of its own logits, parameters, seed and position alone. Logits are
    compared exactly; probability masses (top-p and the draw) are float32 sums.

    A row whose logits hold nan or +inf, or nothing finite (also: nothing left by the mask), is
    reported in `is_finite` with token 0. It does not touch other rows.

    Args:
        logits: float32[S, V].
        batch: arrays of S rows.
        is_plain: promises that `batch` is (`SamplingBatch.is_plain`), for a program of a tenth of
            the size; static.

    Raises:
        ValueError: `logits` is not float32[S, V] with the batch's S.
    """
    logits = jnp.asarray(logits)
    batch = jax.tree.map(jnp.asarray, batch)
    num_rows = batch.temperature.shape[0]
    if logits.ndim != 2 or logits.shape[0] != num_rows or logits.dtype != jnp.float32:
        raise ValueError(
            f"logits is {logits.dtype}{list(logits.shape)}; it must be float32[{num_rows}, vocab] "
            f"to match a SamplingBatch of {num_rows} rows"
        )
    likeliest, raw_max = _argmax(logits)
    # Whether max() passes nan on differs between backends, so nan is looked for.
    has_no_nan = jnp.all(logits < jnp.inf, axis=-1)
    if is_plain:
        largest = jnp.where(has_no_nan, raw_max, jnp.nan)
        return plain_output(likeliest, largest, batch, vocab_size=logits.shape[-1])
    token_ids, row_max = lax.cond(
        jnp.any(batch.temperature > 0) | jnp.any(batch.masked_tokens >= 0),
        lambda: _mask_and_pick(logits, batch),
        lambda: (likeliest, raw_max),
    )
    is_finite = has_no_nan & jnp.isfinite(row_max)
    token_ids = _known_or(token_ids, is_finite, batch)
    details = lax.cond(
        jnp.any(batch.num_logprobs >= 0),
        lambda: _logprobs(logits, raw_max, token_ids),
        lambda: _no_logprobs(*logits.shape),
    )
    return _output(token_ids, details, is_finite)


def plain_output(
    likeliest: jax.Array, largest: jax.Array, batch: SamplingBatch, *, vocab_size: int
) -> SamplerOutput:
    """What `sample` gives for a batch that is plain, from what it takes of the logits.

    Args:
        likeliest: int32[S], where a row's logits are largest.
        largest: float32[S], what they are there; nan if any of them is.
        batch: arrays of S rows, plain ones.
        vocab_size: of the logits, V.
    """
    is_finite = jnp.isfinite(largest)
    token_ids = _known_or(likeliest, is_finite, batch)
    details = _no_logprobs(likeliest.shape[0], vocab_size)
    return _output(token_ids, details, is_finite)


def _output(token_ids, details, is_finite):
    logprob, rank, top_ids, top_logprobs = details
    return SamplerOutput(
        token_ids=token_ids,
        logprob=logprob,
        rank=rank,
        top_ids=top_ids,
        top_logprobs=top_logprobs,
        is_finite=is_finite,
    )


def _known_or(token_ids, is_finite, batch):
    """The tokens that are forced, else those that were drawn, else 0."""
    token_ids = jnp.where(is_finite, token_ids, 0)
    return jnp.where(batch.forced_tokens >= 0, batch.forced_tokens, token_ids)


def _argmax(logits):
    """int32[S], float32[S]: the likeliest token, the lowest id among equals, and its logit."""
    # By blocks: over the whole row XLA reduces (logit, id) pairs one by one on CPU.
    blocks = _in_blocks(logits, -jnp.inf)
    maxima = jnp.max(blocks, axis=-1)
    block = jnp.argmax(maxima, axis=-1)
    within = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    token = block * _BLOCK_SIZE + jnp.argmax(within, axis=-1)
    return token.astype(jnp.int32), jnp.max(maxima, axis=-1)


def _mask_and_pick(logits, batch):
    """int32[S] a random token where the temperature is above 0, else the likeliest one allowed.

    Also float32[S], the greatest logit that the mask leaves.
    """
    logits = _mask_tokens(logits, batch.masked_tokens)
    likeliest, row_max = _argmax(logits)
    token_ids = lax.cond(
        jnp.any(batch.temperature > 0),
        lambda: jnp.where(batch.temperature > 0, _draw(logits, row_max, batch), likeliest),
        lambda: likeliest,
    )
    return token_ids, row_max


def _draw(logits, row_max, batch):
    keys = jax.vmap(_row_key)(batch.seed, batch.positions)
    return _race(draw_weights(logits, row_max, batch), keys)


def _mask_tokens(logits, masked_tokens):
    # A negative index would count from the end; V is out of range and is dropped.
    ids = jnp.where(masked_tokens < 0, logits.shape[-1], masked_tokens)
    rows = jnp.arange(logits.shape[0])[:, None]
    return logits.at[rows, ids].set(-jnp.inf, mode="drop")


def draw_weights(logits: jax.Array, row_max: jax.Array, batch: SamplingBatch) -> jax.Array:
    """What each token weighs in the draw: its probability after temperature and filters, unscaled.

    Args:
        logits: float32[S, V], masked tokens at -inf.
        row_max: float32[S], the greatest logit of each row.
        batch: arrays of S rows. What greedy rows get has no meaning.

    Returns:
        float32[S, V]: 1 for the likeliest token, 0 for what min-p, top-k or top-p drop.
    """
    temperature = jnp.maximum(batch.temperature, _MIN_TEMPERATURE)
    floor = _floor(row_max, temperature, batch.min_p)
    threshold = lax.cond(
        jnp.any(_needs_top_k(batch, logits.shape[-1]) | _needs_top_p(batch)),
        lambda: _threshold(logits, row_max, floor, temperature, batch),
        lambda: floor,
    )
    return _weights(logits, row_max, temperature, threshold)


def _floor(row_max, temperature, min_p):
    """float32[S]: the logit below which a token is dropped by min-p, or weighs nothing anyway."""
    # p >= min_p * p_max is the same as (logit - max) / temperature >= log(min_p); log(0) is -inf.
    nats = jnp.maximum(jnp.log(min_p), -_NEGLIGIBLE_NATS)
    return row_max + temperature * nats


def _weights(logits, row_max, temperature, threshold):
    """float32[S, ...]: probabilities up to a factor per row (1 for the likeliest), or 0."""
    # Subtracting first keeps a tiny temperature from overflowing: no exponent is above 0.
    like = (-1,) + (1,) * (logits.ndim - 1)
    scaled = (logits - row_max.reshape(like)) / temperature.reshape(like)
    return jnp.where(logits >= threshold.reshape(like), jnp.exp(scaled), 0.0)


# --- thresholds of top-k and top-p -------------------------------------------------------------


def _needs_top_k(batch, vocab_size):
    return (batch.temperature > 0) & (batch.top_k > 0) & (batch.top_k < vocab_size)


def _needs_top_p(batch):
    return (batch.temperature > 0) & (batch.top_p > 0) & (batch.top_p < 1)


def _threshold(logits, row_max, floor, temperature, batch):
    """float32[S]: the lowest logit that all filters keep.

    The likeliest tokens usually lie in few blocks of the vocabulary, so the search first runs over
    the blocks with the greatest maxima. What it finds is right for the whole vocabulary when it is
    above all that was left out. The rows where it is not are searched again, over everything.
    """
    blocks = _in_blocks(logits, -jnp.inf)
    needs_top_k = _needs_top_k(batch, logits.shape[-1])
    needs_top_p = _needs_top_p(batch)

    def search(candidates, is_wanted):
        def top_k(lower):
            upper = jnp.where(is_wanted & needs_top_k, row_max, lower)
            return bisect(candidates, None, batch.top_k, lower, upper)

        def top_p(lower):
            upper = jnp.where(is_wanted & needs_top_p, row_max, lower)
            total = ordered_sum(_weights(blocks, row_max, temperature, lower))
            weights = _weights(candidates, row_max, temperature, lower)
            return bisect(candidates, weights, batch.top_p * total, lower, upper)

        lower = lax.cond(jnp.any(needs_top_k), top_k, lambda lower: lower, floor)
        threshold = lax.cond(jnp.any(needs_top_p), top_p, lambda lower: lower, lower)
        return threshold, jnp.where(needs_top_k, lower, threshold)

    is_filtered = needs_top_k | needs_top_p
    if blocks.shape[1] <= 2 * _NUM_CANDIDATE_BLOCKS:
        return search(blocks, is_filtered)[0]
    candidates, _, rest_max = _best_blocks(blocks, _NUM_CANDIDATE_BLOCKS)
    threshold, lowest_found = search(candidates, is_filtered)
    # Row by row, or one wide row would move what its neighbours get by a rounding error.
    is_unsettled = is_filtered & (lowest_found <= rest_max)
    return lax.cond(
        jnp.any(is_unsettled),
        lambda: jnp.where(is_unsettled, search(blocks, is_unsettled)[0], threshold),
        lambda: threshold,
    )


# --- blocks of the vocabulary ------------------------------------------------------------------


def _in_blocks(values, fill):
    """[S, V] -> [S, blocks, _BLOCK_SIZE], the last block filled up with `fill`."""
    num_rows, vocab_size = values.shape
    padding = -vocab_size % _BLOCK_SIZE
    if padding:
        values = jnp.pad(values, ((0, 0), (0, padding)), constant_values=fill)
    return values.reshape(num_rows, -1, _BLOCK_SIZE)


def _best_blocks(blocks, count):
    """The `count` blocks with the greatest maxima, equal ones by index; there must be more.

    They hold the `count` greatest logits (equal ones by id): a token of any other block has that
    many maxima before it.

    Returns:
        float32[S, count, _BLOCK_SIZE] their logits, in order of token id; int32[S, count] their
        indices, ascending; float32[S] the greatest logit of the other blocks.
    """
    maxima, indices = lax.top_k(jnp.max(blocks, axis=-1), count + 1)
    chosen = jnp.sort(indices[:, :count], axis=-1)
    return jnp.take_along_axis(blocks, chosen[:, :, None], axis=1), chosen, maxima[:, count]


# --- the draw ----------------------------------------------------------------------------------


def _row_key(seed, position):
    """The key of one token: from uint32[2] and int32[], whatever PRNG is jax's default."""
    return jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), position)


def _race(weights, keys):
    """int32[S]: index i with probability weights[s, i] / sum(weights[s]).

    In two stages, a lane by its sum over the blocks and then a token of that lane, so that a row
    needs V / _BLOCK_SIZE + _BLOCK_SIZE random numbers instead of V. A weight of 0 never wins.
    """
    blocks = _in_blocks(weights, 0.0)
    num_blocks = blocks.shape[1]
    times = _exponential(keys, _BLOCK_SIZE + num_blocks)
    lane = jnp.argmax(lane_sums(blocks) / times[:, :_BLOCK_SIZE], axis=-1)
    in_lane = jnp.take_along_axis(blocks, lane[:, None, None], axis=2)[:, :, 0]
    block = jnp.argmax(in_lane / times[:, _BLOCK_SIZE:], axis=-1)
    return (block * _BLOCK_SIZE + lane).astype(jnp.int32)


def _exponential(keys, count):
    """float32[S, count] ~ Exp(1), exact down to 2**-32: the small ones decide a race."""
    bits = jax.vmap(lambda key: jax.random.bits(key, (count,), jnp.uint32))(keys)
    uniform = (bits.astype(jnp.float32) + 1.0) * 2.0**-32
    # 1 would give infinity, and lose the race even against a token of weight 0.
    return -jnp.log1p(-jnp.minimum(uniform, 1.0 - 2.0**-24))


# --- logprobs ----------------------------------------------------------------------------------


def _logprobs(logits, row_max, token_ids):
    """Logprob and rank of the drawn tokens, ids and logprobs of the likeliest ones."""
    vocab_size = logits.shape[-1]
    total = jnp.log(jnp.sum(jnp.exp(logits - row_max[:, None]), axis=-1))
    drawn = jnp.take_along_axis(logits, token_ids[:, None], axis=-1)
    rank = 1 + jnp.sum(logits > drawn, axis=-1, dtype=jnp.int32)
    top_logits, top_ids = _top(logits, min(MAX_LOGPROBS, vocab_size))

    # In this order the large terms cancel before the small one is taken away.
    def logprob(x):
        return (x - row_max[:, None]) - total[:, None]

    return logprob(drawn)[:, 0], rank, top_ids, logprob(top_logits)


def _no_logprobs(num_rows, vocab_size):
    per_row, per_top = (num_rows,), (num_rows, min(MAX_LOGPROBS, vocab_size))
    return (
        jnp.zeros(per_row, jnp.float32),
        jnp.zeros(per_row, jnp.int32),
        jnp.zeros(per_top, jnp.int32),
        jnp.zeros(per_top, jnp.float32),
    )


def _top(logits, count):
    """The `count` greatest logits and their ids, equal ones by id, from few blocks if possible."""
    if logits.shape[-1] <= 2 * count * _BLOCK_SIZE:
        return lax.top_k(logits, count)
    candidates, chosen, _ = _best_blocks(_in_blocks(logits, -jnp.inf), count)
    top_logits, index = lax.top_k(candidates.reshape(logits.shape[0], -1), count)
    block = jnp.take_along_axis(chosen, index // _BLOCK_SIZE, axis=-1)
    return top_logits, block * _BLOCK_SIZE + index % _BLOCK_SIZE
