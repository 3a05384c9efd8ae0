"""The decoder with plain dense attention over one sequence: no pages, no cache."""

import functools
import math

import jax
import jax.numpy as jnp

from paged_jax.models import llama


def dense_attend(heads, cache):
    """Causal attention over one whole sequence, without a cache."""
    q, k, v = heads.rotated()
    num_tokens, num_heads, head_dim = q.shape
    k, v = (jnp.repeat(x, num_heads // x.shape[1], axis=1).astype(jnp.float32) for x in (k, v))
    scores = jnp.einsum("thd,shd->hts", q.astype(jnp.float32), k) / math.sqrt(head_dim)
    causal = jnp.tril(jnp.ones((num_tokens, num_tokens), bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf), axis=-1)
    return jnp.einsum("hts,shd->thd", weights, v), cache


@functools.partial(jax.jit, static_argnames=("config", "tensor_axis"))
def model_logits(weights, token_ids, positions, *, config, tensor_axis=None):
    caches = [None] * config.num_layers
    hidden, _ = llama.forward(
        weights, token_ids, positions, caches, dense_attend, config=config, tensor_axis=tensor_axis
    )
    return llama.logits(weights, hidden, config=config, tensor_axis=tensor_axis)
