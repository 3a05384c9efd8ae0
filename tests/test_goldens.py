"""The demo model's greedy tokens, against those that transformers gives in float32."""

import json
from pathlib import Path

import pytest

from paged_jax import LLM, SamplingParams

GOLDENS = json.loads(
    (Path(__file__).parent / "goldens" / "smollm2_135m_q4_1_greedy.json").read_text()
)
# Below this margin between the two best logits, float32 sums in another order may decide.
CLOSE_MARGIN = 0.01


def params_of(golden):
    return SamplingParams(temperature=0, max_tokens=len(golden["output_token_ids"]))


def check(goldens, outputs):
    for golden, output in zip(goldens, outputs, strict=True):
        assert output.prompt_token_ids == golden["prompt_token_ids"]
        ours, theirs = output.outputs[0].token_ids, golden["output_token_ids"]
        differs = next(
            (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None
        )
        if differs is None:
            assert len(ours) == len(theirs)
            assert output.outputs[0].text == golden["text"]
        else:
            assert golden["margins"][differs] < CLOSE_MARGIN, (
                f"token {differs} of {golden['messages'][-1]['content'][:40]!r}"
            )


def chat_all(llm):
    messages = [golden["messages"] for golden in GOLDENS]
    return llm.chat(messages, [params_of(golden) for golden in GOLDENS], use_tqdm=False)


@pytest.fixture(scope="module")
def roomy(demo_model_path):
    return LLM(
        demo_model_path,
        dtype="float32",
        num_gpu_blocks_override=260,
        max_model_len=448,
        max_num_seqs=16,
        max_num_batched_tokens=128,
        warmup=False,
    )


@pytest.fixture(scope="module")
def cramped(demo_model_path):
    """39 usable blocks hold one long chat or a few short ones; prompts come in chunks of 16."""
    return LLM(
        demo_model_path,
        dtype="float32",
        num_gpu_blocks_override=40,
        max_model_len=448,
        max_num_seqs=16,
        max_num_batched_tokens=16,
        warmup=False,
    )


def test_in_a_batch_of_16_cold_and_warm(roomy):
    cold = chat_all(roomy)
    check(GOLDENS, cold)
    warm = chat_all(roomy)
    check(GOLDENS, warm)
    assert sum(o.num_cached_tokens for o in warm) > 0.8 * sum(len(o.prompt_token_ids) for o in warm)


def test_with_preemption_and_prefill_chunks_of_16(cramped):
    check(GOLDENS, chat_all(cramped))
    assert cramped.get_metrics()["num_preemptions"] > 0
    assert cramped.engine.scheduler.blocks.pool.num_used_blocks == 0


def test_alone(cramped):
    outputs = []
    for golden in GOLDENS[:6]:
        assert cramped.reset_prefix_cache()
        outputs += cramped.chat(golden["messages"], params_of(golden), use_tqdm=False)
    check(GOLDENS[:6], outputs)
