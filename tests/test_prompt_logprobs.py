"""Log-probabilities of prompts, against a dense forward pass, however the prompt is scheduled."""

from typing import Any

import jax
import numpy as np
import pytest
from dense_llama import model_logits
from tiny_engine import check_idle, prompts_of, run, tiny_llm, tiny_model, tokens_of

from paged_jax import LLM, SamplingParams

LENGTHS = [1, 2, 4, 8, 9, 21, 40, 70]


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def llm(model) -> LLM:
    return tiny_llm(model, swap_space_bytes=2**20, warmup=False)


@pytest.fixture(scope="module")
def dense(model):
    """tokens -> [len(tokens), vocab] log-probabilities of the next token."""

    def logprobs(tokens):
        padded = np.zeros(128, np.int32)
        padded[: len(tokens)] = tokens
        logits = model_logits(model.params, padded, np.arange(128), config=model.config)
        return np.asarray(jax.nn.log_softmax(logits))[: len(tokens)]

    return logprobs


def scoring(k: int, **options: Any) -> SamplingParams:
    return SamplingParams(
        **{"temperature": 0, "max_tokens": 5, "ignore_eos": True, "prompt_logprobs": k, **options}
    )


def check(output, dense, k: int) -> None:
    tokens, entries = output.prompt_token_ids, output.prompt_logprobs
    assert len(entries) == len(tokens) and entries[0] is None
    for token, entry, row in zip(tokens[1:], entries[1:], dense(tokens)[:-1], strict=True):
        assert next(iter(entry)) == token
        for token_id, own in entry.items():
            assert own.logprob == pytest.approx(row[token_id], abs=1e-4)
            above, near = (row > row[token_id] + 1e-4).sum(), (row > row[token_id] - 1e-4).sum()
            assert above + 1 <= own.rank <= max(near, above + 1)
        assert {own.rank for own in entry.values()} >= set(range(1, k + 1))
        assert len(entry) in (max(k, 1), k + 1)


@pytest.mark.parametrize("k", [0, 1, 5, 20])
def test_equal_a_dense_forward(llm, dense, k):
    """Prompts of many lengths together: chunks of 32 tokens, and eight rows of logits a step."""
    prompts = prompts_of(LENGTHS)
    expected = tokens_of(run(llm, prompts, scoring(0, prompt_logprobs=None)))
    outputs = run(llm, prompts, scoring(k))
    for output in outputs:
        check(output, dense, k)
    assert tokens_of(outputs) == expected
    check_idle(llm)


def test_with_few_seats_and_among_others(model, llm, dense):
    small = tiny_llm(model, max_num_seqs=2, max_num_batched_tokens=8, warmup=False)
    prompts = prompts_of([21, 9, 30])
    plain = scoring(0, prompt_logprobs=None)
    outputs = run(small, prompts, [scoring(2), plain, scoring(0, logprobs=3)])
    check(outputs[0], dense, 2)
    check(outputs[2], dense, 0)
    assert outputs[1].prompt_logprobs is None
    logprobs = outputs[2].outputs[0].logprobs
    assert logprobs is not None and [len(entry) for entry in logprobs] == [3] * 5
    assert tokens_of(outputs) == tokens_of(run(llm, prompts, plain))
    check_idle(small)


def test_of_a_prompt_with_several_outputs(llm, dense):
    [output] = run(llm, prompts_of([21]), scoring(2, n=3, temperature=1.0, seed=1))
    check(output, dense, 2)
    assert len({tuple(o.token_ids) for o in output.outputs}) == 3


def test_they_stream_once_they_are_known(llm, dense):
    prompt = prompts_of([40])[0]
    *_, last = llm.stream([{"prompt_token_ids": prompt}], scoring(1))
    check(last, dense, 1)


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preempted_in_the_middle(llm, dense, mode):
    """70 tokens take nine steps of eight rows; before each of them, the request is preempted."""
    [prompt] = prompts_of([70])
    engine = llm.engine
    for at_step in range(1, 12):
        engine.add_request("x", prompt, scoring(3))
        outputs, num_steps = [], 0
        while engine.has_unfinished():
            if num_steps == at_step and engine.scheduler.running:
                engine.scheduler.preempt(engine.scheduler.running[0], mode)
            outputs += engine.step()
            num_steps += 1
        check(outputs[0], dense, 3)
        check_idle(llm)


def test_the_prefix_cache_is_not_asked(llm, dense):
    """Each token's logits are wanted, so each token is computed."""
    [prompt] = prompts_of([33], seed=5)
    run(llm, [prompt], scoring(0, prompt_logprobs=None))
    before = llm.get_metrics()
    [output] = run(llm, [prompt], scoring(1))
    check(output, dense, 1)
    assert output.num_cached_tokens == 0
    after = llm.get_metrics()
    for name in ("prefix_cache_queries", "prefix_cache_hits"):
        assert after[name] == before[name]
    [warm] = run(llm, [prompt], scoring(0, prompt_logprobs=None))
    assert warm.num_cached_tokens == 32


def test_a_tokenizer_that_fails_on_them_harms_no_other(llm, monkeypatch):
    prompts = prompts_of([9, 20])
    plain = scoring(0, prompt_logprobs=None, detokenize=False)
    expected = tokens_of(run(llm, prompts, plain))
    with monkeypatch.context() as patch:
        patch.setattr(type(llm.get_tokenizer()), "decode", lambda *_, **__: 1 / 0)
        outputs = run(llm, prompts, [scoring(1), plain])
    assert outputs[0].outputs[0].finish_reason == "error"
    assert outputs[0].error is not None and "ZeroDivisionError" in outputs[0].error
    assert tokens_of(outputs)[1] == expected[1]
    check_idle(llm)


@pytest.mark.parametrize("value", [-1, 21, "1", True, 1.5])
def test_bad_values_are_refused(value):
    with pytest.raises(ValueError, match="prompt_logprobs="):
        SamplingParams(prompt_logprobs=value)
