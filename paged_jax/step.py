"""The functional core: pure steps `(params, pool, batch) -> (pool, outputs)`.

Neither function jits, shards or donates: put them under your own `jax.jit`, and donate the pool.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from paged_jax.attend import paged_attend
from paged_jax.batch import StepBatch
from paged_jax.kv_pool import KVPool
from paged_jax.models.config import ModelConfig
from paged_jax.models.registry import model_module
from paged_jax.sampling import SamplerOutput, SamplingBatch, plain_output, sample


def forward(
    params,
    pool: KVPool,
    batch: StepBatch,
    *,
    config: ModelConfig,
    decode_only: bool = False,
    attention_implementation: str | None = None,
    tensor_axis: str | None = None,
) -> tuple[KVPool, jax.Array]:
    """Computes a step's tokens: writes their keys and values, gives each sequence's next logits.

    Args:
      params: the model's weights, as `load_model` gives them.
      pool: the KV pool; donate it, or it is copied.
      batch: tokens, positions and block tables, padded or not.
      config: the model's shape; static.
      decode_only: promises that every sequence has one token in the batch, which makes a smaller
        program; static.
      attention_implementation: see `pallas_kernels.ragged_paged_attention`; static.
      tensor_axis: name of the mapped axis that the model is split over, None for one device.

    Returns:
      The pool, and float32[S, vocab_size]: the logits after each token of `batch.sample_rows`,
      the last one of each sequence. Rows of padding mean nothing.
    """
    pool, rows = _hidden_rows(
        params,
        pool,
        batch,
        config=config,
        decode_only=decode_only,
        attention_implementation=attention_implementation,
        tensor_axis=tensor_axis,
    )
    return pool, model_module(config).logits(params, rows, config=config, tensor_axis=tensor_axis)


def _hidden_rows(
    params,
    pool: KVPool,
    batch: StepBatch,
    *,
    config: ModelConfig,
    decode_only: bool,
    attention_implementation: str | None,
    tensor_axis: str | None,
) -> tuple[KVPool, jax.Array]:
    """As `forward`, before the output head: [S, E], after each token of `batch.sample_rows`."""
    model = model_module(config)
    batch = jax.tree.map(jnp.asarray, batch)  # It may be numpy's, and stand outside the jit.
    attend = paged_attend(
        batch,
        block_size=pool.block_size,
        scale=config.head_dim**-0.5,
        decode_only=decode_only,
        implementation=attention_implementation,
    )
    hidden, caches = model.forward(
        params,
        batch.token_ids,
        batch.positions,
        pool.caches,
        attend,
        config=config,
        tensor_axis=tensor_axis,
        # Only the tokens that are asked for meet the output head, the widest product of all.
        rows=batch.sample_rows,
    )
    return pool.with_caches(caches), hidden


def sample_step(
    params,
    pool: KVPool,
    batch: StepBatch,
    sampling: SamplingBatch,
    *,
    config: ModelConfig,
    decode_only: bool = False,
    attention_implementation: str | None = None,
    tensor_axis: str | None = None,
    is_plain: bool = False,
) -> tuple[KVPool, SamplerOutput]:
    """`forward`, and one sampled token for each sequence; the engine's whole device step.

    is_plain: as for `sample`; static.
    """
    model = model_module(config)
    pool, rows = _hidden_rows(
        params,
        pool,
        batch,
        config=config,
        decode_only=decode_only,
        attention_implementation=attention_implementation,
        tensor_axis=tensor_axis,
    )
    sampling = jax.tree.map(jnp.asarray, sampling)

    def sample_logits() -> SamplerOutput:
        logits = model.logits(params, rows, config=config, tensor_axis=tensor_axis)
        return sample(logits, sampling, is_plain=is_plain)

    def take_likeliest() -> SamplerOutput:
        token_ids, scores = model.likeliest(params, rows)
        return plain_output(token_ids, scores, sampling, vocab_size=config.vocab_size)

    if tensor_axis is not None or not model.can_find_likeliest(params, rows):
        return pool, sample_logits()
    if is_plain:
        return pool, take_likeliest()
    return pool, lax.cond(sampling.is_plain, take_likeliest, sample_logits)
