"""Drafts by prompt lookup change no token, and save steps where a text repeats itself."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from tiny_engine import GREEDY, check_idle, prompts_of, run, tiny_llm, tiny_model, tokens_of

from paged_jax import LLM, SamplingParams
from paged_jax.prompt_lookup import PromptLookup


def test_the_latest_occurrence_of_the_longest_stretch_is_followed():
    lookup = PromptLookup(5)
    tokens = [1, 2, 3, 4, 9, 9, 1, 2, 3, 4, 7, 8, 6, 5, 3, 4, 0, 1, 2, 3, 4]
    #         of four tokens ^ ends here: 7, 8, ...; the later "3, 4" is a shorter one
    assert lookup.propose(tokens, 5) == [7, 8, 6, 5, 3]
    assert lookup.propose(tokens, 2) == [7, 8]
    assert lookup.propose([*tokens, 11], 5) == []
    # A stretch that is its own end is no guess: nothing follows it yet.
    assert PromptLookup(5).propose([1, 2, 3], 5) == []
    assert PromptLookup(5).propose([3, 3, 3], 5) == [3, 3, 3, 3, 3]
    assert PromptLookup(5).propose([8, 9, 8, 9, 8], 3) == [9, 8, 9]


def test_proposals_are_those_of_a_search_from_scratch():
    rng = np.random.default_rng(0)
    lookup, tokens = PromptLookup(4), rng.integers(0, 4, 5).tolist()

    def search() -> list[int]:
        for size in (4, 3, 2):
            for end in range(len(tokens) - 1, size - 1, -1):
                if tokens[end - size : end] == tokens[-size:]:
                    return (tokens[end:] * 4)[:4]
        return []

    for _ in range(300):
        tokens += rng.integers(0, 4, rng.integers(1, 4)).tolist()
        assert lookup.propose(tokens, 4) == search()


def test_drafts_grow_and_shrink_with_their_luck():
    lookup, tokens = PromptLookup(8), [1, 2] * 20

    def lengths(count: int, share: float) -> list[int]:
        seen = []
        for _ in range(count):
            draft = lookup.propose(tokens, 8)
            seen.append(len(draft))
            if draft:
                lookup.learn(draft, int(share * len(draft)))
        return seen

    assert lengths(2, 1.0) == [8, 8]
    # Never right: shorter and shorter, then a pause of eight, and one guess more.
    assert lengths(12, 0.0) == [8, 4, 2, *[0] * 8, 1]
    assert lengths(8, 0.0) == [0] * 8
    assert lengths(4, 1.0) == [1, 2, 4, 8]
    assert lengths(3, 0.5) == [8, 8, 8]


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model()


@pytest.fixture(scope="module")
def plain(model) -> LLM:
    return tiny_llm(model, max_num_seqs=16, warmup=False)


@pytest.fixture(scope="module")
def drafting(model) -> LLM:
    return tiny_llm(
        model, max_num_seqs=16, speculation="prompt_lookup", num_speculative_tokens=5, warmup=False
    )


@pytest.fixture(autouse=True)
def all_blocks_free(drafting):
    yield
    check_idle(drafting)


def repetitive(count: int) -> list[list[int]]:
    """Prompts that repeat a stretch, so that there is always something to guess."""
    return [prompt[:9] * 3 for prompt in prompts_of([9] * count, seed=count)]


def counts(llm: LLM) -> tuple[int, int]:
    metrics = llm.get_metrics()
    return (
        metrics["spec_decode_num_draft_tokens"],
        metrics["spec_decode_num_accepted_tokens"],
    )


@pytest.mark.parametrize("count", [1, 3, 7])
def test_greedy_tokens_are_the_same(plain, drafting, count):
    prompts = repetitive(count)
    drafted, _ = counts(drafting)
    assert tokens_of(run(drafting, prompts)) == tokens_of(run(plain, prompts))
    assert counts(drafting)[0] > drafted
    assert counts(plain) == (0, 0)


def test_accepted_guesses_save_steps(model):
    """A model whose next token follows from its last one alone soon runs in a circle."""
    layers = tuple(
        layer.replace(out=layer.out * 0, down=layer.down * 0) for layer in model.params.layers
    )
    circular = dataclasses.replace(model, params=model.params.replace(layers=layers))
    llm = tiny_llm(
        circular, max_num_seqs=16, speculation="prompt_lookup", num_speculative_tokens=5,
        warmup=False,
    )  # fmt: skip
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    (output,) = run(llm, [[5, 6, 7]], params)
    plain = tiny_llm(circular, warmup=False)
    assert tokens_of([output]) == tokens_of(run(plain, [[5, 6, 7]], params))
    num_drafted, num_accepted = counts(llm)
    num_steps = sum(times.num_steps for times in llm.engine.metrics.steps.values())
    assert num_steps == 60 - num_accepted
    # A decode that guesses is no prefill, whose speed is measured.
    assert llm.engine.metrics.steps["prefill"].num_steps == 1
    assert num_accepted > 30 and num_accepted > 0.8 * num_drafted
    check_idle(llm)


def test_seeded_samples_and_their_logprobs_are_the_same(plain, drafting):
    prompts = repetitive(3)
    params = [
        SamplingParams(temperature=t, top_k=k, seed=7, max_tokens=24, ignore_eos=True, logprobs=2)
        for t, k in ((0.5, 3), (1.0, 2), (0.7, 0))
    ]
    ours, theirs = run(drafting, prompts, params), run(plain, prompts, params)
    assert tokens_of(ours) == tokens_of(theirs)
    for a, b in zip(ours, theirs, strict=True):
        entries = zip(a.outputs[0].logprobs or (), b.outputs[0].logprobs or (), strict=True)
        for mine, other in entries:
            assert list(mine) == list(other)
            np.testing.assert_allclose(
                [p.logprob for p in mine.values()],
                [p.logprob for p in other.values()],
                rtol=1e-3,
                atol=1e-3,
            )
        assert a.outputs[0].cumulative_logprob == pytest.approx(
            b.outputs[0].cumulative_logprob, rel=1e-3
        )


@pytest.mark.parametrize("at", range(2, 14, 3))
def test_stops_in_the_middle_of_a_draft(plain, drafting, at):
    """A stop token, a stop string and the length end a sequence where they would without drafts."""
    (prompt,) = prompts_of([12], seed=5)
    (answer,) = tokens_of(run(plain, [prompt]))
    again = [*prompt, *answer, *prompt]
    (free,) = tokens_of(run(plain, [again]))
    text = plain.get_tokenizer().decode([free[at]])  # pyright: ignore[reportOptionalMemberAccess]
    cases = [
        SamplingParams(temperature=0, max_tokens=24, stop_token_ids=[free[at]]),
        SamplingParams(temperature=0, max_tokens=at + 1, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=24, min_tokens=at, stop_token_ids=free[:2]),
    ]
    if text.strip() and "\ufffd" not in text:
        cases.append(SamplingParams(temperature=0, max_tokens=24, stop=[text], ignore_eos=True))
    for params in cases:
        ours, theirs = run(drafting, [again], params)[0], run(plain, [again], params)[0]
        mine, other = ours.outputs[0], theirs.outputs[0]
        assert (mine.token_ids, mine.text) == (other.token_ids, other.text)
        assert (mine.finish_reason, mine.stop_reason) == (other.finish_reason, other.stop_reason)


def test_forks_sessions_preemption_and_chunks_beside_drafts(plain, model):
    prompts = repetitive(4)
    small = tiny_llm(
        model,
        num_gpu_blocks_override=30,
        max_model_len=88,
        max_num_batched_tokens=24,
        max_num_seqs=16,
        speculation="prompt_lookup",
        warmup=False,
    )
    assert tokens_of(run(small, prompts)) == tokens_of(run(plain, prompts))
    fork = SamplingParams(temperature=1, top_k=1, n=3, max_tokens=24, ignore_eos=True)
    for output, other in zip(run(small, prompts[:2], fork), run(plain, prompts[:2]), strict=True):
        for completion in output.outputs:
            assert completion.token_ids == other.outputs[0].token_ids
    with small.start({"prompt_token_ids": prompts[0]}) as seq:
        seq.generate(SamplingParams(temperature=0, max_tokens=10, ignore_eos=True))
        seq.generate(SamplingParams(temperature=0, max_tokens=14, ignore_eos=True))
        assert seq.token_ids == prompts[0] + tokens_of(run(plain, prompts[:1], GREEDY))[0]
    assert counts(small)[0] > 0
    check_idle(small)


def test_nobody_is_preempted_for_a_guess(model):
    """Two sequences that just fit the pool without drafts are not disturbed by them."""
    prompts = [p[:8] * 2 for p in prompts_of([8, 8], seed=3)]
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    llm = tiny_llm(
        model,
        num_gpu_blocks_override=17,
        max_model_len=64,
        max_num_seqs=16,
        speculation="prompt_lookup",
        warmup=False,
    )
    run(llm, prompts, params)
    assert llm.get_metrics()["num_preemptions"] == 0
    assert counts(llm)[0] > 0


def test_errors_name_the_field():
    with pytest.raises(ValueError, match=r"speculation='eagle': it must be one of \['prompt_look"):
        tiny_llm(speculation="eagle", warmup=False)
    with pytest.raises(ValueError, match="num_speculative_tokens=0: it must be an integer of at"):
        tiny_llm(speculation="prompt_lookup", num_speculative_tokens=0, warmup=False)
