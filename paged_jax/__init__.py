"""paged-jax: serving language models from a paged KV cache, in JAX.

`LLM` is the engine; the functional core (`KVPool`, `BlockManager`, `make_batch`, `decode_batch`,
`forward`, `sample_step`, `decode_steps`) is for programs of your own. Names are loaded when they
are first used, so that the host half (scheduler, blocks) can be used without importing jax.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paged_jax.batch import StepBatch, decode_batch, make_batch, make_sampling
    from paged_jax.beam_driver import BeamSearchOutput
    from paged_jax.beam_search import BeamSearchParams
    from paged_jax.block_manager import BlockManager
    from paged_jax.block_moves import BlockMoves
    from paged_jax.block_pool import BlockPool
    from paged_jax.config import EngineConfig, SchedulerConfig
    from paged_jax.decode_loop import decode_steps
    from paged_jax.decode_rows import DecodeCall, DecodeRows, StopRules
    from paged_jax.demo_model import demo_model_path
    from paged_jax.kv_pool import KVPool
    from paged_jax.llm import LLM
    from paged_jax.memory_report import MemoryReport
    from paged_jax.models.config import ModelConfig
    from paged_jax.models.loader import LoadedModel, load_model
    from paged_jax.outputs import CompletionOutput, Logprob, RequestOutput
    from paged_jax.prefix_journal import PrefixMiss
    from paged_jax.request import Request
    from paged_jax.sampling import SamplerOutput, SamplingBatch, sample
    from paged_jax.sampling_params import SamplingParams
    from paged_jax.scheduler import Scheduler
    from paged_jax.session import Session, generate_together
    from paged_jax.step import forward, sample_step
    from paged_jax.tokenizer import Tokenizer

_MODULE_OF = {
    "BeamSearchOutput": "beam_driver",
    "BeamSearchParams": "beam_search",
    "BlockManager": "block_manager",
    "BlockMoves": "block_moves",
    "BlockPool": "block_pool",
    "CompletionOutput": "outputs",
    "DecodeCall": "decode_rows",
    "DecodeRows": "decode_rows",
    "EngineConfig": "config",
    "KVPool": "kv_pool",
    "LLM": "llm",
    "LoadedModel": "models.loader",
    "Logprob": "outputs",
    "MemoryReport": "memory_report",
    "ModelConfig": "models.config",
    "PrefixMiss": "prefix_journal",
    "Request": "request",
    "RequestOutput": "outputs",
    "SamplerOutput": "sampling",
    "SamplingBatch": "sampling",
    "SamplingParams": "sampling_params",
    "Scheduler": "scheduler",
    "SchedulerConfig": "config",
    "Session": "session",
    "StepBatch": "batch",
    "StopRules": "decode_rows",
    "Tokenizer": "tokenizer",
    "decode_batch": "batch",
    "decode_steps": "decode_loop",
    "demo_model_path": "demo_model",
    "forward": "step",
    "generate_together": "session",
    "load_model": "models.loader",
    "make_batch": "batch",
    "make_sampling": "batch",
    "sample": "sampling",
    "sample_step": "step",
}

__all__ = [
    "BeamSearchOutput",
    "BeamSearchParams",
    "BlockManager",
    "BlockMoves",
    "BlockPool",
    "CompletionOutput",
    "DecodeCall",
    "DecodeRows",
    "EngineConfig",
    "KVPool",
    "LLM",
    "LoadedModel",
    "Logprob",
    "MemoryReport",
    "ModelConfig",
    "PrefixMiss",
    "Request",
    "RequestOutput",
    "SamplerOutput",
    "SamplingBatch",
    "SamplingParams",
    "Scheduler",
    "SchedulerConfig",
    "Session",
    "StepBatch",
    "StopRules",
    "Tokenizer",
    "decode_batch",
    "decode_steps",
    "demo_model_path",
    "forward",
    "generate_together",
    "load_model",
    "make_batch",
    "make_sampling",
    "sample",
    "sample_step",
]
__version__ = "0.1.0"


def __getattr__(name: str):
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULE_OF])
