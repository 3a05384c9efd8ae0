"""The demo model's greedy tokens, against those that transformers gives in float32."""

import json
from pathlib import Path

import pytest

from paged_jax import LLM, BeamSearchParams, SamplingParams

GOLDENS = json.loads(
    (Path(__file__).parent / "goldens" / "smollm2_135m_q4_1_greedy.json").read_text()
)
# Below this margin between the two best logits, float32 sums in another order may decide.
CLOSE_MARGIN = 0.01
SWAP_BYTES = 256 * 2**20
MODES = ("recompute", "swap")


def params_of(golden, **options):
    num_tokens = len(golden["output_token_ids"])
    return SamplingParams(**{"temperature": 0, "max_tokens": num_tokens, **options})


def check(goldens, outputs):
    for golden, output in zip(goldens, outputs, strict=True):
        assert output.prompt_token_ids == golden["prompt_token_ids"]
        for completion in output.outputs:
            check_one(golden, completion)


def check_one(golden, completion):
    ours, theirs = completion.token_ids, golden["output_token_ids"]
    differs = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
    if differs is None:
        assert len(ours) == len(theirs)
        assert completion.text == golden["text"]
    else:
        assert golden["margins"][differs] < CLOSE_MARGIN, (
            f"token {differs} of {golden['messages'][-1]['content'][:40]!r}"
        )


def chat_all(llm):
    messages = [golden["messages"] for golden in GOLDENS]
    return llm.chat(messages, [params_of(golden) for golden in GOLDENS], use_tqdm=False)


def make_llm(path, **options):
    """Seats for all goldens, and a pool that holds them, unless the options say otherwise."""
    defaults = dict(num_gpu_blocks_override=260, max_num_seqs=16, max_num_batched_tokens=128)
    options = {**defaults, **options}
    return LLM(path, dtype="float32", max_model_len=448, warmup=False, **options)


@pytest.fixture(scope="module")
def roomy(demo_model_path):
    return make_llm(demo_model_path, swap_space_bytes=SWAP_BYTES)


@pytest.fixture(scope="module")
def cramped(demo_model_path):
    """39 usable blocks hold one long chat or a few short ones; prompts come in chunks of 16."""
    return make_llm(
        demo_model_path,
        num_gpu_blocks_override=40,
        max_num_batched_tokens=16,
        preemption_mode="recompute",
        swap_space_bytes=SWAP_BYTES,
        enable_host_prefix_cache=True,
    )


@pytest.fixture(scope="module")
def ahead(demo_model_path):
    """Eight seats, so that half of the goldens wait while the others are decoded ahead."""
    return make_llm(demo_model_path, max_num_seqs=8, decode_lookahead=8)


@pytest.fixture(scope="module")
def guessing(demo_model_path):
    return make_llm(demo_model_path, speculation="prompt_lookup")


def check_all_free(llm):
    scheduler = llm.engine.scheduler
    scheduler.check_integrity()
    assert not scheduler.held and not scheduler.requests
    assert scheduler.blocks.pool.num_used_blocks == 0
    assert scheduler.blocks.host.pool.num_used_blocks == 0


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


def test_decoded_ahead_of_what_is_read(ahead):
    check(GOLDENS, chat_all(ahead))
    times = ahead.engine.metrics.steps["decode"]
    assert times.num_tokens > 600
    assert ahead.engine.scheduler.blocks.pool.num_used_blocks == 0


def test_with_guesses_from_the_prompt(guessing):
    outputs = []
    for first in range(0, 16, 4):  # Guesses take seats that are free.
        few = GOLDENS[first : first + 4]
        messages = [golden["messages"] for golden in few]
        outputs += guessing.chat(messages, [params_of(golden) for golden in few], use_tqdm=False)
    check(GOLDENS, outputs)
    metrics = guessing.get_metrics()
    assert metrics["spec_decode_num_draft_tokens"] > 100
    assert metrics["spec_decode_num_accepted_tokens"] > 30
    assert guessing.engine.scheduler.blocks.pool.num_used_blocks == 0


def test_alone(cramped):
    outputs = []
    for golden in GOLDENS[:6]:
        assert cramped.reset_prefix_cache()
        outputs += cramped.chat(golden["messages"], params_of(golden), use_tqdm=False)
    check(GOLDENS[:6], outputs)


def check_forks(llm, goldens):
    """Four outputs of each, that always take the likeliest token: all four are the greedy ones."""
    copies = llm.get_metrics()["cow_copies"]
    outputs = llm.generate(
        [{"prompt_token_ids": golden["prompt_token_ids"]} for golden in goldens],
        [params_of(golden, temperature=1.0, top_k=1, n=4) for golden in goldens],
        use_tqdm=False,
    )
    assert all(len(output.outputs) == 4 for output in outputs)
    check(goldens, outputs)
    check_all_free(llm)
    partial = sum(len(golden["prompt_token_ids"]) % 16 > 0 for golden in goldens)
    assert llm.get_metrics()["cow_copies"] - copies >= 3 * partial


def check_preempted(llm, goldens, mode, preempts):
    """All that runs loses its blocks before each step that `preempts` says so of."""
    engine, outputs, num_steps, done = llm.engine, {}, 0, []
    for i, golden in enumerate(goldens):
        engine.add_request(str(i), golden["prompt_token_ids"], params_of(golden))
    while engine.has_unfinished():
        if preempts(num_steps):
            done += [engine.scheduler.preempt(r, mode) for r in list(engine.scheduler.running)]
        outputs |= {output.request_id: output for output in engine.step()}
        num_steps += 1
        assert num_steps < 2000
    assert set(done) == {mode} and len(done) > len(goldens)
    check(goldens, [outputs[str(i)] for i in range(len(goldens))])
    check_all_free(llm)


def check_beams(llm, goldens):
    for golden in goldens:
        [output] = llm.beam_search(
            {"prompt_token_ids": golden["prompt_token_ids"]},
            BeamSearchParams(beam_width=1, max_tokens=len(golden["output_token_ids"])),
        )
        check_one(golden, output.sequences[0])
    check_all_free(llm)


def check_host_tier(llm, golden):
    """Asked again when all blocks were taken for something else, and what they held evicted."""
    pool = llm.engine.scheduler.blocks.pool
    before = llm.get_metrics()["prefix_cache_hits_by_tier"]["host"]
    for _ in range(2):
        check([golden], llm.chat(golden["messages"], params_of(golden), use_tqdm=False))
        pool.release(pool.take(pool.num_free_blocks))
        llm.generate([[1]], params_of(golden, max_tokens=1), use_tqdm=False)  # They move in a step.
    num_hits = llm.get_metrics()["prefix_cache_hits_by_tier"]["host"] - before
    assert num_hits >= (len(golden["prompt_token_ids"]) - 1) // 16 * 16
    check_all_free(llm)


def test_with_four_forks(roomy):
    check_forks(roomy, GOLDENS[:1])


@pytest.mark.parametrize("mode", MODES)
def test_with_preemptions_in_the_middle(roomy, mode):
    check_preempted(roomy, GOLDENS[1:2], mode, (1, 2, 30).__contains__)


def test_as_a_beam_search_of_width_one(roomy):
    check_beams(roomy, GOLDENS[:1])


def test_with_hits_in_the_host_tier(cramped):
    check_host_tier(cramped, GOLDENS[0])


@pytest.mark.full
def test_with_four_forks_in_full(roomy, cramped):
    check_forks(roomy, GOLDENS)
    check_forks(cramped, GOLDENS)


@pytest.mark.full
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("period", [5, 11])
def test_with_preemptions_in_the_middle_in_full(roomy, mode, period):
    for first in range(0, len(GOLDENS), 4):
        goldens = GOLDENS[first : first + 4]
        check_preempted(roomy, goldens, mode, lambda step: step % period == period - 1)


@pytest.mark.full
def test_as_a_beam_search_of_width_one_in_full(roomy):
    check_beams(roomy, GOLDENS)


@pytest.mark.full
def test_with_hits_in_the_host_tier_in_full(cramped):
    for golden in GOLDENS:
        check_host_tier(cramped, golden)
