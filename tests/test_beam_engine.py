"""Beam search on the engine: transformers' hypotheses, whatever room the beams have."""

import collections
import gc
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_engine import (
    GREEDY,
    ByteTokenizer,
    check_idle,
    prompts_of,
    run,
    tiny_llm,
    tiny_model,
    tokens_of,
)

from paged_jax import LLM, BeamSearchParams, SamplingParams

FOLDER = Path(__file__).parent / "goldens"
MODEL = "beam_tiny"
PARAMS = ("beam_width", "max_tokens", "length_penalty", "early_stopping")


def grouped(model: str) -> list[list[dict[str, Any]]]:
    """The goldens of a model, those of the same parameters together: one call serves them."""
    groups = collections.defaultdict(list)
    for case in json.loads((FOLDER / "beam_search.json").read_text())["cases"]:
        if case["model"] == model:
            key = (*(case[name] for name in PARAMS), *case["eos_token_ids"])
            groups[key].append(case)
    return list(groups.values())


GROUPS = grouped(MODEL)


def check_all_free(llm: LLM) -> None:
    check_idle(llm)
    scheduler = llm.engine.scheduler
    assert not scheduler.held
    assert scheduler.blocks.host is None or scheduler.blocks.host.pool.num_used_blocks == 0


def folder_llm(model: str, **options: Any) -> LLM:
    defaults = dict(
        dtype="float32",
        skip_tokenizer_init=True,
        num_gpu_blocks_override=120,
        block_size=4,
        max_model_len=64,
        max_num_seqs=16,
        max_num_batched_tokens=32,
        warmup=False,
    )
    return LLM(FOLDER / model, **{**defaults, **options})


@pytest.fixture(scope="module")
def roomy() -> LLM:
    return folder_llm(MODEL)


@pytest.fixture(scope="module", params=["recompute", "swap"])
def cramped(request) -> LLM:
    """20 blocks: eight beams of 17 + 24 tokens would take twice as many, without sharing more."""
    swap = dict(preemption_mode="swap", swap_space_bytes=2**20)
    options = swap if request.param == "swap" else {}
    return folder_llm(MODEL, num_gpu_blocks_override=21, **options)


def search(llm: LLM, monkeypatch, cases) -> list:
    """One call for golden cases of equal parameters, with their EOS tokens."""
    first = cases[0]
    prompts = [{"prompt_token_ids": case["prompt_token_ids"]} for case in cases]
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.intake, "eos_token_ids", tuple(first["eos_token_ids"]))
        return llm.beam_search(prompts, BeamSearchParams(**{name: first[name] for name in PARAMS}))


def check(llm: LLM, monkeypatch, cases) -> None:
    for case, output in zip(cases, search(llm, monkeypatch, cases), strict=True):
        assert output.prompt_token_ids == case["prompt_token_ids"]
        assert [s.token_ids for s in output.sequences] == case["token_ids"]
        scores = [s.score for s in output.sequences]
        np.testing.assert_allclose(scores, case["scores"], rtol=1e-4, atol=1e-4)
        for s in output.sequences:
            ended = s.token_ids[-1] in case["eos_token_ids"]
            assert s.finish_reason == ("stop" if ended else "length")
    check_all_free(llm)


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_equals_transformers(roomy, monkeypatch, width):
    groups = [cases for cases in GROUPS if cases[0]["beam_width"] == width]
    assert len(groups) > 15
    for cases in groups[::4]:
        check(roomy, monkeypatch, cases)


@pytest.mark.full
@pytest.mark.parametrize("part", range(10))
def test_equals_transformers_in_full(roomy, monkeypatch, part):
    for cases in GROUPS[part::10]:
        check(roomy, monkeypatch, cases)


@pytest.mark.full
def test_another_model_in_full(monkeypatch):
    llm = folder_llm("tiny_llama3")
    for cases in grouped("tiny_llama3"):
        check(llm, monkeypatch, cases)


def test_in_a_pool_that_holds_a_few_beams(cramped, monkeypatch):
    wide = [cases for cases in GROUPS if cases[0]["beam_width"] == 8 and len(cases) > 1]
    for cases in wide[::6]:
        check(cramped, monkeypatch, cases)
    metrics = cramped.get_metrics()
    assert metrics["kv_cache_peak_usage_perc"] == 1.0
    if cramped.config.preemption_mode == "swap":
        assert metrics["swap_out_tokens"] > 0
    assert metrics["cow_copies"] > 0


@pytest.mark.full
@pytest.mark.parametrize("part", range(8))
def test_in_a_pool_that_holds_a_few_beams_in_full(cramped, monkeypatch, part):
    for cases in GROUPS[part::8]:
        check(cramped, monkeypatch, cases)


def test_without_prefix_caching_and_in_chunks(monkeypatch):
    llm = folder_llm(MODEL, enable_prefix_caching=False, max_num_batched_tokens=16)
    for cases in GROUPS[2::29]:
        check(llm, monkeypatch, cases)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return tiny_llm(tiny_model(), warmup=False)


def test_many_prompts_at_once_equal_one_by_one(llm):
    prompts = [{"prompt_token_ids": tokens} for tokens in prompts_of([3, 10, 8, 21, 1])]
    params = BeamSearchParams(beam_width=3, max_tokens=8)
    together = llm.beam_search(prompts, params)
    alone = [llm.beam_search(prompt, params)[0] for prompt in prompts]
    for a, b in zip(together, alone, strict=True):
        assert [s.token_ids for s in a.sequences] == [s.token_ids for s in b.sequences]
        assert [s.score for s in a.sequences] == pytest.approx([s.score for s in b.sequences])
    check_all_free(llm)


def test_one_beam_is_greedy(llm):
    prompts = prompts_of([10, 8, 40])
    params = BeamSearchParams(beam_width=1, max_tokens=24, ignore_eos=True)
    outputs = llm.beam_search([{"prompt_token_ids": p} for p in prompts], params)
    generated = run(llm, prompts, SamplingParams(**{**vars(GREEDY), "logprobs": 0}))
    assert [output.sequences[0].token_ids for output in outputs] == tokens_of(generated)
    for output, other in zip(outputs, generated, strict=True):
        [s] = output.sequences
        assert s.cumulative_logprob == pytest.approx(other.outputs[0].cumulative_logprob, abs=1e-3)
        assert s.text == other.outputs[0].text
        assert s.score == pytest.approx(s.cumulative_logprob / 24)
    check_all_free(llm)


def test_beams_share_their_prompt(llm):
    """Eight beams of a 60-token prompt never hold its 15 blocks more than once."""
    pool = llm.engine.scheduler.blocks.pool
    assert llm.reset_prefix_cache()
    pool.peak_used_blocks = 0
    params = BeamSearchParams(beam_width=8, max_tokens=8, ignore_eos=True)
    before = llm.get_metrics()["prompt_tokens"]
    llm.beam_search({"prompt_token_ids": prompts_of([60])[0]}, params)
    assert pool.peak_used_blocks <= 15 + 8 * 3
    assert llm.get_metrics()["prompt_tokens"] - before == 60
    check_all_free(llm)


def test_text_prompts_and_the_models_length(llm):
    [output] = llm.beam_search("hello", BeamSearchParams(beam_width=2, max_tokens=4))
    assert output.prompt == "hello"
    tokenizer = ByteTokenizer()
    for s in output.sequences:
        assert s.text == tokenizer.decode(s.token_ids)
    params = BeamSearchParams(beam_width=2, max_tokens=50, ignore_eos=True)
    [output] = llm.beam_search([[7] * 125], params)
    assert [len(s.token_ids) for s in output.sequences] == [3, 3]
    assert llm.beam_search([], params) == []
    check_all_free(llm)


def test_errors_say_what_to_mend_and_leave_nothing(llm):
    two = BeamSearchParams(beam_width=2, max_tokens=4)
    for prompts, params, message in (
        ([[1], []], two, r"the prompt is empty \(0 tokens\)"),
        ([[1], [1] * 128], two, "128 tokens and max_model_len=128"),
        ([[1], [260]], two, r"prompt_token_ids\[0\]=260 is out of range"),
        (["a", 3.5], two, "prompt=3.5: it must be a string"),
        ("a", BeamSearchParams(beam_width=20, max_tokens=4), "beam_width=20: .* at most 19"),
        ("a", GREEDY, "params=.*SamplingParams.*it must be BeamSearchParams"),
        ("a", None, "params=None.*it must be BeamSearchParams"),
    ):
        with pytest.raises(ValueError, match=message):
            llm.beam_search(prompts, params)
        check_all_free(llm)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("at_step", [1, 2, 6])
@pytest.mark.parametrize("loses_pool", [False, True])
def test_a_failed_step_leaves_no_beam(llm, monkeypatch, error, at_step, loses_pool):
    prompts = [{"prompt_token_ids": tokens} for tokens in prompts_of([10, 21])]
    params = BeamSearchParams(beam_width=4, max_tokens=8)
    expected = llm.beam_search(prompts, params)
    runner, calls = llm.engine.runner, []
    inner = runner.run

    def failing(*args):
        calls.append(args)
        output = inner(*args)
        if len(calls) == at_step:
            if loses_pool:
                for layer in runner.pool.layers:
                    layer.delete()
            raise error("injected")
        return output

    with monkeypatch.context() as patch:
        patch.setattr(runner, "run", failing)
        with pytest.raises(error, match="injected"):
            llm.beam_search(prompts, params)
    gc.collect()
    check_all_free(llm)
    again = llm.beam_search(prompts, params)
    assert [[s.token_ids for s in o.sequences] for o in again] == [
        [s.token_ids for s in o.sequences] for o in expected
    ]
    check_all_free(llm)


def test_a_tokenizer_that_fails_leaves_no_beam(llm, monkeypatch):
    params = BeamSearchParams(beam_width=3, max_tokens=5)
    with monkeypatch.context() as patch:
        patch.setattr(type(llm.get_tokenizer()), "decode", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            llm.beam_search(["abc", "defg"], params)
    check_all_free(llm)
    assert len(llm.beam_search("abc", params)[0].sequences) == 3
