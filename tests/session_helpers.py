"""What tests of sessions share."""

import gc
from typing import Any

from tiny_engine import GREEDY, check_idle, run, tokens_of

from paged_jax import LLM, SamplingParams
from paged_jax.session import Session


def start(llm: LLM, tokens: list[int]) -> Session:
    return llm.start({"prompt_token_ids": tokens})


def greedy(num_tokens: int, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, **options)


def continued(llm: LLM, tokens: list[int], params: SamplingParams = GREEDY) -> list[int]:
    """What `generate` makes of the same tokens."""
    return tokens_of(run(llm, [tokens], params))[0]


def check_nothing_held(llm: LLM) -> None:
    """Nothing is held, once the collector had its say and the engine another step."""
    gc.collect()
    llm.generate([[1]], greedy(1), use_tqdm=False)
    check_idle(llm)
    scheduler = llm.engine.scheduler
    assert not scheduler.held
    assert scheduler.blocks.host is None or scheduler.blocks.host.pool.num_used_blocks == 0
