"""The greatest threshold that still gathers a given weight, row by row, without a sort."""

import jax.numpy as jnp
from jax import lax

# Passes between looks at which logits are left in the bracket (a look costs about two passes).
_PASSES_PER_ROUND = 4
# Halving by value settles ordinary logits in about 20 passes. The integer image then takes 32 at
# most for whatever is left, such as values spread over many powers of two.
_MAX_VALUE_PASSES = 24
_MAX_PASSES = _MAX_VALUE_PASSES + 32 + _PASSES_PER_ROUND


def bisect(values, weights, target, lower, upper):
    """float32[S]: the greatest v in [lower, upper] such that what reaches v weighs `target`.

    Let F(v) be the sum of the weights (or the count, when weights is None) where values >= v. F
    falls as v rises. The answer is the greatest v with F(v) >= target, or the least of the values
    from `lower` up if there is none. Rows with lower >= upper are left at `lower`.

    Each pass halves the bracket and costs one reduction over values[S, blocks, lanes]; after
    each round the bracket is drawn in to the values inside it, and a row ends when one is left. F
    is summed in the same order in all passes, so that it is monotone in float32 as well.
    """

    def reach(v):
        reached = values >= v[:, None, None]
        if weights is None:
            return jnp.sum(reached, axis=(1, 2), dtype=jnp.int32)
        return ordered_sum(jnp.where(reached, weights, 0.0))

    def is_open(state):
        num_passes, low, _, high, sum_low = state
        is_row_open = low < high
        if weights is None:  # exactly `target` values reach low: no need to know the least of them
            is_row_open &= sum_low != target
        return jnp.any(is_row_open) & (num_passes < _MAX_PASSES)

    def one_pass(_, state):
        num_passes, low, beyond, high, sum_low = state
        middle = _midpoint(low, high, by_value=num_passes < _MAX_VALUE_PASSES)
        sum_middle = reach(middle)
        # A row that has ended, and waits for others, may have high <= low: it stays at low.
        enough = (sum_middle >= target) & (middle > low)
        low = jnp.where(enough, middle, low)
        sum_low = jnp.where(enough, sum_middle, sum_low)
        high = jnp.where(enough, high, middle)
        beyond = jnp.where(enough, beyond, middle)
        return num_passes + 1, low, beyond, high, sum_low

    def one_round(state):
        state = lax.fori_loop(0, _PASSES_PER_ROUND, one_pass, state)
        num_passes, low, beyond, _, sum_low = state
        low = _least_value_from(values, low)
        inside = jnp.where(values < beyond[:, None, None], values, -jnp.inf)
        return num_passes, low, beyond, jnp.max(inside, axis=(1, 2)), sum_low

    # F(low) >= target and F(beyond) < target; `high` is the greatest value that may be the answer.
    beyond = jnp.full_like(lower, jnp.inf)
    state = (jnp.int32(0), lower, beyond, upper, jnp.full_like(target, -1))
    _, low, _, _, _ = lax.while_loop(is_open, one_round, state)
    return jnp.where(lower < upper, _least_value_from(values, low), lower)


def _least_value_from(values, bound):
    return jnp.min(jnp.where(values >= bound[:, None, None], values, jnp.inf), axis=(1, 2))


def _midpoint(low, high, *, by_value):
    """float32[S] in (low, high] where low < high: halfway in value, or in number of floats."""
    by_count = _float_of_rank((_rank_of(low) >> 1) + (_rank_of(high) >> 1))
    middle = jnp.where(by_value, low + (high - low) * 0.5, by_count)
    # Neighbouring floats, or denormals that the machine flushes, have nothing between them.
    return jnp.where(middle > low, middle, high)


def _rank_of(x):
    """int32: order-preserving image of float32. Negative floats count down as their bits go up."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def _float_of_rank(rank):
    """float32: the inverse of `_rank_of`."""
    return lax.bitcast_convert_type(rank ^ ((rank >> 31) & 0x7FFFFFFF), jnp.float32)


def lane_sums(blocks):
    """[S, blocks, lanes] -> [S, lanes]: sums over the blocks, lane by lane."""
    return jnp.sum(blocks, axis=1)


def ordered_sum(blocks):
    """[S, blocks, lanes] -> [S], added up in an order that does not follow S.

    A plain sum over the last axis is split in ways that depend on the batch's shape, and would move
    the edge of top-p by a rounding error from one batch to another.
    """
    lanes = lane_sums(blocks)
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    return lanes[:, 0]
