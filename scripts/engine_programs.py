"""The engine's step as a program to compile, from a model's sizes alone."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import kernel_programs as kp
from tpu_aot import Program, tree_bytes

from paged_jax.batch import make_batch, make_sampling
from paged_jax.kv_pool import KVPool
from paged_jax.models.config import ModelConfig, RopeConfig
from paged_jax.models.params import abstract_params
from paged_jax.models.registry import model_module
from paged_jax.step import sample_step

# The models' published configurations.
SMOLLM2_135M = ModelConfig(
    vocab_size=49_152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    max_position_embeddings=8192,
    tie_word_embeddings=True,
    rms_norm_eps=1e-5,
    rope=RopeConfig(theta=1e5),
)
LLAMA3_8B = ModelConfig(
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_position_embeddings=8192,
    rms_norm_eps=1e-5,
    rope=RopeConfig(theta=5e5),
)
# Twice a step's temporaries and more, so that the copy of one layer would show.
LAYER_POOL_BYTES = 256 * 2**20
# What one of 8 tensor-parallel devices computes, without the sums between them.
LLAMA3_8B_EIGHTH = dataclasses.replace(
    LLAMA3_8B, vocab_size=16_032, intermediate_size=1792, num_heads=4, num_kv_heads=1
)
MODELS = {
    "smollm2-135m": SMOLLM2_135M,
    "llama3-8b": LLAMA3_8B,
    "llama3-8b/8": LLAMA3_8B_EIGHTH,
}


# A step's seats are those of a small engine; the mixed one has two prefill chunks among decodes.
DECODE = kp.Lengths.decodes([1000] * 32)
MIXED = kp.Lengths(query_lens=(200, 26, *[1] * 30), kv_lens=(200, 2000, *[1000] * 30))
STEPS = {"decode": DECODE, "mixed": MIXED}


def engine_step(
    config: ModelConfig,
    lengths: kp.Lengths,
    *,
    implementation: str,
    block_size: int = 16,
    layer_pool_bytes: int = LAYER_POOL_BYTES,
) -> Program:
    """One step of the engine over a batch, in bfloat16: weights and pool are shapes."""
    heads = kp.AttentionShape(
        name="",
        num_q_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
    )
    pool = kp.pool_of_bytes(layer_pool_bytes, heads, block_size=block_size, dtype="bfloat16")
    longest = config.max_position_embeddings
    lengths = dataclasses.replace(lengths, max_kv_tokens=longest)
    _, tables, _, _ = lengths.arrays(block_size, pool.num_blocks)
    batch = make_batch(
        [[0] * n for n in lengths.query_lens],
        [kv - n for kv, n in zip(lengths.kv_lens, lengths.query_lens, strict=True)],
        tables.tolist(),
        block_size=block_size,
    )
    layer = pool.layer(*heads.pool_key)
    layers: Any = (layer,) * config.num_layers  # shapes where a step has arrays
    kv_pool = KVPool(layers=layers, head_dim=config.head_dim)
    step = functools.partial(
        _step,
        config=config,
        decode_only=lengths.is_decode_only,
        attention_implementation=implementation,
    )
    params = abstract_params(model_module(config).param_specs(config), "bfloat16")
    return Program(
        function=step,
        args=(params, kv_pool, batch, make_sampling([], [], [], num_seqs=lengths.num_seqs)),
        donated=(1,),
        aliased_bytes=tree_bytes(kv_pool),
        # The copy of a single layer would be one too many.
        pool_bytes=tree_bytes(layer),
    )


def _step(params, pool, batch, sampling, **options):
    return sample_step(params, pool, batch, sampling, **options)


def fits(config: ModelConfig, hbm_bytes: int) -> bool:
    """Whether the model's step runs on a device with this memory."""
    arrays = tree_bytes(engine_step(config, DECODE, implementation="xla").args)
    # Some memory goes to the program itself and to its temporaries.
    return arrays < 0.9 * hbm_bytes


def small_like(config: ModelConfig) -> ModelConfig:
    """A model that calls the same kernels with the same scalars, and computes next to nothing."""
    return dataclasses.replace(config, vocab_size=128, hidden_size=8, intermediate_size=8)
