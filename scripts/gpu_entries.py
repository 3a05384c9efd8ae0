"""What `aot_check` compiles for a GPU: attention over the models' pools, and the engine's steps."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import engine_programs as ep
import jax
import kernel_programs as kp
import tpu_aot

from pallas_kernels import attention_gpu
from pallas_kernels.pool_storage import pool_layout

IMPLEMENTATION = "gpu"
BLOCK_SIZES = (16, 64, 128)
POOL_DTYPES = ("bfloat16", "int8", "float8_e4m3fn", "float8_e5m2", "float32")
POOL_BYTES = 2**30
DECODES = kp.Lengths.decodes([4096] * 64, max_kv_tokens=8192)
MIXED = kp.Lengths(
    query_lens=(200, 250, *[1] * 62), kv_lens=(200, 4000, *[1000] * 62), max_kv_tokens=8192
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GpuEntry:
    """One program to compile; `quick` ones are the subset."""

    name: str
    quick: bool
    make_program: Callable[[], tpu_aot.Program]
    max_temporary_bytes: int | None = None
    programs_each: int = 1


def all_entries() -> list[GpuEntry]:
    """Everything that is compiled, quick or not."""
    entries = []
    for model in ("smollm2-135m", "llama3-8b"):
        for step, lengths in ep.STEPS.items():
            entries.append(
                GpuEntry(
                    name=f"{step} step {model}",
                    quick=step == "decode",
                    make_program=functools.partial(engine_step, ep.MODELS[model], lengths),
                    max_temporary_bytes=ep.LAYER_POOL_BYTES // 2,
                )
            )
    batches = dict(decode=DECODES, mixed=MIXED)
    for model, block_size, dtype in itertools.product(kp.MODELS, BLOCK_SIZES, POOL_DTYPES):
        pool = kp.pool_of_bytes(POOL_BYTES, model, block_size=block_size, dtype=dtype)
        for batch, lengths in batches.items():
            is_quick = model.name == "llama3-8b" and (block_size == 16 or dtype == "bfloat16")
            # One KV head leaves the compiler the most to hoist, and registers to run out of.
            dtypes = ("bfloat16", "int8") if model.name == "llama3-8b/8" else ("bfloat16",)
            is_quick |= block_size == 16 and dtype in dtypes
            entries.append(
                GpuEntry(
                    name=f"attention {batch} {model.name} block {block_size} {dtype}",
                    quick=is_quick and dtype != "float8_e5m2",
                    make_program=functools.partial(
                        kp.attention, model, pool, lengths, implementation=IMPLEMENTATION
                    ),
                    # Partial results in float32, and the tiles of the queries.
                    max_temporary_bytes=512 * 2**20 if batch == "mixed" else None,
                    programs_each=_programs_each(model, pool) if batch == "decode" else 1,
                )
            )
    return entries


def _programs_each(model: kp.AttentionShape, pool: kp.PoolSpec) -> int:
    """Programs of the kernel for decodes that are planned for a multiprocessor."""
    layer = pool.layer(*model.pool_key)
    shape = (1, model.num_q_heads, model.head_dim)
    q = jax.ShapeDtypeStruct(shape, pool.activation_dtype)
    if attention_gpu.unsupported_reason(q, layer) is not None:
        return 1
    return attention_gpu.launch_specs(q, layer)[0].programs_each


def engine_step(config: Any, lengths: kp.Lengths) -> tpu_aot.Program:
    """One of the engine's steps over a pool as a GPU has it: a token a row."""
    program = ep.engine_step(config, lengths, implementation=IMPLEMENTATION)
    params, pool, *inputs = program.args

    def token_rows(layer: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        form = pool_layout(layer, pool.head_dim)
        shape = (form.num_blocks, 2 * form.num_kv_heads, form.block_size, form.head_dim)
        return jax.ShapeDtypeStruct(shape, layer.dtype)

    pool = dataclasses.replace(pool, layers=tuple(map(token_rows, pool.layers)))
    return dataclasses.replace(program, args=(params, pool, *inputs))
