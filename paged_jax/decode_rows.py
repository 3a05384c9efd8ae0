"""Several decode steps in one call: the rows that it carries from step to step.

A call is given where each sequence stands, and which tokens end it; it draws tokens until it has
made its steps or no row has tokens left to draw. What it hands back is where each sequence stands
then, so that the next call can follow before the host has read a token.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import flax.struct
import jax.numpy as jnp
import numpy as np

from paged_jax.batch import StepBatch
from paged_jax.sampling import SamplingBatch

# Ids that end a row on the device. A row with more of them is ended by the host, some tokens later.
MAX_STOP_TOKENS = 8

# What a field holds: jax arrays inside a step, numpy arrays on their way to it.
Array = Any


@flax.struct.dataclass
class DecodeRows:
    """Where S sequences stand, one a row.

    Attributes:
      token_ids: int32[S], the newest token of each, which the pool does not hold yet.
      positions: int32[S], its position; -1 for a row of padding, which stand at the end.
      num_left: int32[S], how many tokens may still be drawn; 0 for a row that has ended.
    """

    token_ids: Array
    positions: Array
    num_left: Array


@flax.struct.dataclass
class StopRules:
    """When rows end, and what they may not draw before that.

    Attributes:
      token_ids: int32[S, MAX_STOP_TOKENS], ids that end a row, padded with -1.
      first_positions: int32[S], the position from which on a token may end the row; the ids of
        `SamplingBatch.masked_tokens` are masked before it.
    """

    token_ids: Array
    first_positions: Array


class DecodeCall(NamedTuple):
    """What a call of decode steps is made of, besides weights and pool."""

    rows: DecodeRows
    block_tables: Array  # int32[S, B], with room for all tokens of the call
    sampling: SamplingBatch  # `positions` are those of `rows`, and not looked at
    stops: StopRules
    num_steps: Array  # int32[], at most as many as the program was made for


def no_stops(num_seqs: int) -> StopRules:
    """Rules that end nothing and keep every mask, as numpy arrays: for calls of one step."""
    return StopRules(
        token_ids=np.full((num_seqs, MAX_STOP_TOKENS), -1, np.int32),
        first_positions=np.full(num_seqs, np.iinfo(np.int32).max, np.int32),
    )


def step_of(rows: DecodeRows, block_tables: Array, *, block_size: int) -> StepBatch:
    """The next step of some rows, made on device.

    A row that has ended while others go on computes a token of nothing, in the null block: its
    blocks may be another's by the time that this runs.
    """
    num_seqs = rows.token_ids.shape[0]
    is_row = rows.positions >= 0
    is_live = rows.num_left > 0
    positions = jnp.where(is_live, rows.positions, 0)
    tables = jnp.where(is_live[:, None], block_tables, 0)
    blocks = jnp.take_along_axis(tables, positions[:, None] // block_size, axis=1)[:, 0]
    count = jnp.sum(is_row, dtype=jnp.int32)
    indices = jnp.arange(num_seqs, dtype=jnp.int32)
    return StepBatch(
        token_ids=jnp.where(is_live, rows.token_ids, 0),
        positions=positions,
        slot_mapping=jnp.where(is_live, blocks * block_size + positions % block_size, 0),
        query_starts=jnp.minimum(jnp.arange(num_seqs + 1, dtype=jnp.int32), count),
        kv_lens=jnp.where(is_row, positions + 1, 0),
        block_tables=tables,
        num_seqs=count,
        sample_rows=jnp.where(is_row, indices, 0),
    )


def advance(rows: DecodeRows, drawn: Array, stops: StopRules) -> DecodeRows:
    """The rows after a step that drew these tokens, int32[S]."""
    is_live = rows.num_left > 0
    is_stop = jnp.any(drawn[:, None] == stops.token_ids, axis=1)
    ends = is_stop & (rows.positions + 1 >= stops.first_positions)
    return DecodeRows(
        token_ids=jnp.where(is_live, drawn, rows.token_ids),
        positions=jnp.where(is_live, rows.positions + 1, rows.positions),
        num_left=jnp.where(is_live & ~ends, rows.num_left - 1, 0),
    )
