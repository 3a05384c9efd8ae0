"""The functional core: pure steps `(params, pool, batch) -> (pool, outputs)`.

Neither function jits, shards or donates: put them under your own `jax.jit`, and donate the pool.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from paged_jax.attend import paged_attend
from paged_jax.batch import StepBatch
from paged_jax.kv_pool import KVPool
from paged_jax.models.config import ModelConfig
from paged_jax.models.registry import model_module
from paged_jax.sampling import SamplerOutput, SamplingBatch, sample


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
    )
    # Only the tokens that are asked for meet the output head, the widest product of all.
    rows = hidden[batch.sample_rows]
    logits = model.logits(params, rows, config=config, tensor_axis=tensor_axis)
    return pool.with_caches(caches), logits


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
    pool, logits = forward(
        params,
        pool,
        batch,
        config=config,
        decode_only=decode_only,
        attention_implementation=attention_implementation,
        tensor_axis=tensor_axis,
    )
    return pool, sample(logits, sampling, is_plain=is_plain)
