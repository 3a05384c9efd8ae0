"""The engine's step as a program to compile, from a model's sizes alone."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import kernel_programs as kp
import numpy as np
from tpu_aot import Program, tree_bytes

from paged_jax.batch import make_batch, make_sampling
from paged_jax.decode_loop import decode_steps
from paged_jax.decode_rows import DecodeCall, DecodeRows, no_stops
from paged_jax.kv_pool import KVPool
from paged_jax.models.config import ModelConfig
from paged_jax.models.params import abstract_params
from paged_jax.models.presets import LLAMA3_8B, SMOLLM2_135M
from paged_jax.models.quantized import Quantization
from paged_jax.models.registry import model_module
from paged_jax.step import sample_step

# Of a call that decodes: half of the engine's lookahead.
DECODE_STEPS = 4
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
    kv_dtype: str = "bfloat16",
    quantization: Quantization | None = None,
    layer_pool_bytes: int = LAYER_POOL_BYTES,
) -> Program:
    """One step of the engine over a batch, in bfloat16: weights and pool are shapes.

    Of decodes alone, it is a call of up to `DECODE_STEPS` steps.
    """
    heads = kp.AttentionShape(
        name="",
        num_q_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
    )
    pool = kp.pool_of_bytes(layer_pool_bytes, heads, block_size=block_size, dtype=kv_dtype)
    longest = config.max_position_embeddings
    lengths = dataclasses.replace(lengths, max_kv_tokens=longest)
    _, tables, _, _ = lengths.arrays(block_size, pool.num_blocks)
    batch = make_batch(
        [[0] * n for n in lengths.query_lens],
        [kv - n for kv, n in zip(lengths.kv_lens, lengths.query_lens, strict=True)],
        tables.tolist(),
        block_size=block_size,
    )
    kv_pool = KVPool.abstract(
        config, num_blocks=pool.num_blocks, block_size=block_size, dtype=kv_dtype, for_tpu=True
    )
    sampling = make_sampling([], [], [], num_seqs=lengths.num_seqs)
    static = dict(config=config, attention_implementation=implementation)
    if lengths.is_decode_only:
        starts = batch.positions
        rows = DecodeRows(token_ids=batch.token_ids, positions=starts, num_left=starts)
        stops = no_stops(lengths.num_seqs)
        inputs: tuple[Any, ...] = (
            DecodeCall(rows, batch.block_tables, sampling, stops, np.int32(DECODE_STEPS)),
        )
        step = functools.partial(_decode, max_steps=DECODE_STEPS, **static)
    else:
        inputs = batch, sampling
        step = functools.partial(_step, **static)
    params = abstract_params(model_module(config).param_specs(config), "bfloat16", quantization)
    return Program(
        function=step,
        args=(params, kv_pool, *inputs),
        donated=(1,),
        aliased_bytes=tree_bytes(kv_pool),
        # The copy of a single layer would be one too many.
        pool_bytes=tree_bytes(kv_pool.layers[0]),
        # Of each layer qkv, out, gate with up, and down; and the output head.
        int8_products=4 * config.num_layers + 1 if quantization == "int8" else 0,
    )


def _step(params, pool, batch, sampling, **options):
    return sample_step(params, pool, batch, sampling, **options)


def _decode(params, pool, call, **options):
    return decode_steps(params, pool, call, **options)


def fits(config: ModelConfig, hbm_bytes: int) -> bool:
    """Whether the model's step runs on a device with this memory."""
    arrays = tree_bytes(engine_step(config, DECODE, implementation="xla").args)
    # Some memory goes to the program itself and to its temporaries.
    return arrays < 0.9 * hbm_bytes


def small_like(config: ModelConfig) -> ModelConfig:
    """A model that calls the same kernels with the same scalars, and computes next to nothing."""
    return dataclasses.replace(config, vocab_size=128, hidden_size=8, intermediate_size=8)
