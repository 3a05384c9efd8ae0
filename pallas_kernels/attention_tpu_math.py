"""The arithmetic that decode items and prefill tiles share: scores, online softmax, outputs.

All of it is in base 2: scores are multiplied by log2(e) once, and exp2 is what the hardware has.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.attention_tpu_spec import LANES, LOG2_E, AttentionSpec

# Stands for the maximum over no score: small, and finite, so that differences stay numbers.
LOWEST = -1e30


class Softmax(NamedTuple):
    """Running softmax of some rows, in base 2; values, or the refs of scratch that hold them."""

    largest: Any  # float32[rows, 128], equal in all lanes: maximum of the scores seen
    total: Any  # float32[rows, 128], equal in all lanes: sum of exp2(score - largest)
    weighted: Any  # float32[rows, width]: sum of exp2(score - largest) * V

    @staticmethod
    def scratch(spec: AttentionSpec, rows: int) -> tuple[Any, Any, Any]:
        statistic = pltpu.VMEM((rows, LANES), jnp.float32)
        return statistic, statistic, pltpu.VMEM((rows, spec.pool.width), jnp.float32)


def scores_of(spec: AttentionSpec, q: jax.Array, k: jax.Array) -> jax.Array:
    """float32[rows, KV rows]: capped scores in base 2 of q [rows, width], which is scaled.

    See `query_factor`. Whichever of q and k comes first makes the rows.
    """
    products = lax.dot_general(
        q.astype(spec.compute_dtype),
        k.astype(spec.compute_dtype),
        (((1,), (1,)), ((), ())),
        preferred_element_type=jnp.float32,
        precision=_precision(spec),
    )
    if spec.soft_cap is None:
        return products
    return jnp.tanh(products) * (spec.soft_cap * LOG2_E)


def query_factor(spec: AttentionSpec) -> float:
    """What the queries are multiplied by before the kernel, to spare it the scores."""
    return spec.scale * LOG2_E if spec.soft_cap is None else spec.scale / spec.soft_cap


def weigh(spec: AttentionSpec, weights: jax.Array, v: jax.Array) -> jax.Array:
    """float32[rows, width]: weights [rows, KV rows] times v [KV rows, width]."""
    return lax.dot_general(
        weights.astype(spec.compute_dtype),
        v.astype(spec.compute_dtype),
        (((1,), (0,)), ((), ())),
        preferred_element_type=jnp.float32,
        precision=_precision(spec),
    )


def _precision(spec: AttentionSpec) -> lax.Precision | None:
    # A TPU multiplies float32 in one bfloat16 pass unless told otherwise.
    return lax.Precision.HIGHEST if spec.compute_dtype == jnp.float32 else None


def cleaned(spec: AttentionSpec, v: jax.Array, first: Any, end: Any) -> jax.Array:
    """K or V [KV rows, width] with zeros but for the tokens from `first` to `end`."""
    token = lax.broadcasted_iota(jnp.int32, v.shape, 0) * spec.pool.tokens_per_row
    if spec.pool.tokens_per_row > 1:
        token += lax.broadcasted_iota(jnp.int32, v.shape, 1) // spec.pool.head_dim
    v = v.astype(spec.compute_dtype)
    return jnp.where((token >= first) & (token < end), v, jnp.zeros_like(v))


def over_lanes(statistic: jax.Array, width: int) -> jax.Array:
    """[rows, width] of a statistic [rows, 128] that is equal in all lanes.

    The registers stand for themselves, where a broadcast of one lane would take 100 cycles.
    """
    if width < LANES:
        return statistic[:, :width]
    return jnp.concatenate([statistic] * (width // LANES), axis=1)


def finished(
    spec: AttentionSpec, state: Softmax, sinks: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Outputs [out rows, width] and log-sum-exps [out rows, 128] of one unit's rows.

    Args:
      state: of the unit's rows, the parities one after the other.
      sinks: base-2 sinks [out rows, 128], or None.
    """
    width, head_dim = spec.pool.width, spec.pool.head_dim
    out_rows = state.largest.shape[0] // spec.pool.tokens_per_row
    parts = [
        Softmax(*(field[parity * out_rows :][:out_rows] for field in state))
        for parity in range(spec.pool.tokens_per_row)
    ]
    largest = parts[0].largest
    for part in parts[1:]:
        largest = jnp.maximum(largest, part.largest)
    if sinks is not None:
        largest = jnp.maximum(largest, sinks)
    total = jnp.zeros_like(largest) if sinks is None else jnp.exp2(sinks - largest)
    weighted = jnp.zeros((out_rows, width), jnp.float32)
    for parity, part in enumerate(parts):
        factor = jnp.exp2(part.largest - largest)
        total += factor * part.total
        values = part.weighted * over_lanes(factor, width)
        # The tokens of a parity have their values in its part of the lanes.
        weighted += pltpu.roll(values, width - parity * head_dim, 1) if parity else values
    lse = jnp.where(total > 0, (largest + jnp.log2(total)) * math.log(2), -jnp.inf)
    total = jnp.maximum(total, jnp.finfo(jnp.float32).tiny)
    return weighted / over_lanes(total, width), lse
