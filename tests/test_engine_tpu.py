"""The engine with the TPU's kernels, interpreted, in place of the XLA path."""

import pytest
from test_goldens import GOLDENS
from tiny_engine import tiny_llm, tiny_model

from paged_jax import LLM, SamplingParams

PROMPTS = ["a", "the quick brown fox jumps", "the quick brown fox sits"]


def generate(llm: LLM) -> list[list[int]]:
    """Prefills of several chunks next to decodes, and prompts that share a prefix."""
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_same_tokens_as_the_xla_path() -> None:
    model = tiny_model(head_dim=64)
    options = dict(max_model_len=48, max_num_seqs=2, max_num_batched_tokens=16, warmup=False)
    options |= dict(block_size=16, num_gpu_blocks_override=12)
    kernels = tiny_llm(model, attention_implementation="tpu", **options)
    assert kernels.engine.runner.pool.layers[0].shape[2:] == (8, 128)  # two tokens a row
    expected = generate(tiny_llm(model, **options))
    assert generate(kernels) == expected
    assert generate(kernels) == expected  # with a warm prefix cache
    assert kernels.engine.scheduler.blocks.pool.num_used_blocks == 0


def test_a_prompt_that_joins_with_all_but_a_token_cached_while_decoding_ahead() -> None:
    """One that reads what the step may write is no decode for these kernels: it gets one step."""
    options: dict = dict(max_model_len=64, max_num_seqs=2, warmup=False, block_size=16)
    llm = tiny_llm(
        tiny_model(head_dim=64, num_layers=1),
        attention_implementation="tpu",
        decode_lookahead=8,
        num_gpu_blocks_override=30,
        **options,
    )
    prompt = {"prompt_token_ids": list(range(17))}
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    cold, warm = (llm.generate([prompt], params, use_tqdm=False)[0] for _ in range(2))
    assert warm.num_cached_tokens == 16
    assert warm.outputs[0].token_ids == cold.outputs[0].token_ids


def demo_llm(path: str) -> LLM:
    return LLM(
        path,
        dtype="float32",
        num_gpu_blocks_override=20,
        max_model_len=128,
        max_num_seqs=1,
        max_num_batched_tokens=64,
        warmup=False,
        attention_implementation="tpu",
    )


# Thirty layers of interpreted kernels take minutes to compile and seconds a step.
@pytest.mark.full
def test_goldens(demo_model_path) -> None:
    num_prompts, num_tokens = 2, 8
    shortest = sorted(GOLDENS, key=lambda golden: len(golden["prompt_token_ids"]))[:num_prompts]
    outputs = demo_llm(demo_model_path).chat(
        [golden["messages"] for golden in shortest],
        SamplingParams(temperature=0, max_tokens=num_tokens),
        use_tqdm=False,
    )
    for golden, output in zip(shortest, outputs, strict=True):
        assert output.prompt_token_ids == golden["prompt_token_ids"]
        assert list(output.outputs[0].token_ids) == golden["output_token_ids"][:num_tokens]
