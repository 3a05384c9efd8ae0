"""Several decode steps a call, on device: each step's tokens are the next one's input."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from paged_jax.decode_rows import DecodeCall, DecodeRows, advance, step_of
from paged_jax.kv_pool import KVPool
from paged_jax.models.config import ModelConfig
from paged_jax.sampling import SamplerOutput
from paged_jax.step import sample_step


def decode_steps(
    params,
    pool: KVPool,
    call: DecodeCall,
    *,
    max_steps: int,
    config: ModelConfig,
    attention_implementation: str | None = None,
    tensor_axis: str | None = None,
    is_plain: bool = False,
) -> tuple[KVPool, DecodeRows, SamplerOutput]:
    """Makes up to `call.num_steps` decode steps, fewer if every row ends before.

        step 0          step 1                   step num_steps - 1
        rows -> token -> rows -> token -> ... -> rows -> token
          `-> KV of the row's newest token into the block that the table has for its position

    A row draws what it would draw in as many calls of one step: a token depends on the tokens
    before it, the row's seed and its position alone. It ends at a stop token, or when it has no
    tokens left to draw; stop strings are the host's to find.

    Args:
      params, pool, config, attention_implementation, tensor_axis: as for `forward`; donate the
        pool.
      call: where the rows stand; its block tables have room for every token that it may compute.
      max_steps: the most steps of a call; static.
      is_plain: promises that `call.sampling` is, as for `sample`; static.

    Returns:
      The pool, where the rows stand then, and outputs of each step, [max_steps, S, ...]. Outputs
      of rows that have ended, and of steps that were not made, mean nothing (`is_finite` is True).
    """

    def make_step(pool: KVPool, rows: DecodeRows) -> tuple[KVPool, DecodeRows, SamplerOutput]:
        may_stop = rows.positions + 1 >= call.stops.first_positions
        sampling = dataclasses.replace(
            call.sampling,
            positions=rows.positions + 1,
            masked_tokens=jnp.where(may_stop[:, None], -1, call.sampling.masked_tokens),
        )
        pool, output = sample_step(
            params,
            pool,
            step_of(rows, call.block_tables, block_size=pool.block_size),
            sampling,
            config=config,
            decode_only=True,
            attention_implementation=attention_implementation,
            tensor_axis=tensor_axis,
            is_plain=is_plain,
        )
        output = dataclasses.replace(output, is_finite=output.is_finite | (rows.num_left == 0))
        return pool, advance(rows, output.token_ids, call.stops), output

    call = jax.tree.map(jnp.asarray, call)  # It may be numpy's, and stand outside the jit.
    if max_steps == 1:
        pool, rows, output = make_step(pool, call.rows)
        return pool, rows, jax.tree.map(lambda x: x[None], output)

    shapes = jax.eval_shape(make_step, pool, call.rows)[2]
    outputs = jax.tree.map(lambda x: jnp.zeros((max_steps, *x.shape), x.dtype), shapes)
    outputs = dataclasses.replace(outputs, is_finite=jnp.ones_like(outputs.is_finite))

    def goes_on(carry) -> jax.Array:
        step, _, rows, _ = carry
        return (step < call.num_steps) & jnp.any(rows.num_left > 0)

    def go_on(carry):
        step, pool, rows, outputs = carry
        pool, rows, output = make_step(pool, rows)
        outputs = jax.tree.map(
            lambda all_steps, one: lax.dynamic_update_index_in_dim(all_steps, one, step, 0),
            outputs,
            output,
        )
        return step + 1, pool, rows, outputs

    _, pool, rows, outputs = lax.while_loop(
        goes_on, go_on, (jnp.int32(0), pool, call.rows, outputs)
    )
    return pool, rows, outputs
