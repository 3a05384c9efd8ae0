"""The engine on a tiny random model: equal tokens however they are scheduled, and errors apart."""

import gc
import itertools
import json
import weakref
from typing import Any

import jax
import numpy as np
import pytest
from tiny_engine import (
    EOS,
    GREEDY,
    VOCAB_SIZE,
    check_idle,
    prompts_of,
    run,
    tiny_llm,
    tiny_model,
    tokens_of,
)

from paged_jax import LLM, SamplingParams
from paged_jax.request import RequestStatus


@pytest.fixture(scope="module")
def llm() -> LLM:
    return tiny_llm()


@pytest.fixture(autouse=True)
def all_blocks_free(request):
    yield
    if "llm" in request.fixturenames:
        check_idle(request.getfixturevalue("llm"))


def test_greedy_tokens_do_not_depend_on_how_they_are_scheduled(llm):
    lengths = [1, 3, 7, 8, 9, 20, 33, 60, 12, 5, 41, 16]
    prompts = prompts_of(lengths)
    assert llm.reset_prefix_cache()
    alone = [tokens_of(run(llm, [prompt]))[0] for prompt in prompts]
    assert len({tuple(tokens) for tokens in alone}) > len(prompts) // 2, "too dull to tell apart"
    assert llm.reset_prefix_cache()
    assert tokens_of(run(llm, prompts)) == alone
    warm = run(llm, prompts)
    assert tokens_of(warm) == alone
    assert [o.num_cached_tokens for o in warm] == [(n - 1) // 4 * 4 for n in lengths]
    # 22 blocks of 4 hold 88 tokens: one of the longer ones at a time, so preemption is sure.
    small = tiny_llm(num_gpu_blocks_override=23, max_model_len=88)
    assert tokens_of(run(small, prompts)) == alone
    assert small.get_metrics()["num_preemptions"] > 5
    chunked = tiny_llm(max_num_batched_tokens=8, enable_prefix_caching=False)
    assert tokens_of(run(chunked, prompts)) == alone
    assert chunked.get_metrics()["prefix_cache_queries"] == 0
    oracle = tiny_llm(attention_implementation="reference")
    assert tokens_of(run(oracle, prompts)) == alone


def test_a_seeded_request_gives_the_same_tokens_in_any_company(llm):
    params = SamplingParams(temperature=1.0, top_p=0.9, seed=7, max_tokens=20, ignore_eos=True)
    prompt, *others = prompts_of([9, 5, 30, 14, 2])
    alone = tokens_of(run(llm, [prompt], params))[0]
    loose = SamplingParams(temperature=1.3, max_tokens=20)
    mixed = run(llm, [*others, prompt], [GREEDY, loose, loose, GREEDY, params])
    assert tokens_of(mixed)[-1] == alone
    other_seed = SamplingParams(temperature=1.0, top_p=0.9, seed=8, max_tokens=20, ignore_eos=True)
    assert tokens_of(run(llm, [prompt], other_seed))[0] != alone


def test_n_outputs_are_those_of_counted_seeds(llm):
    (prompt,) = prompts_of([10])
    params: dict[str, Any] = dict(temperature=1.0, max_tokens=12, ignore_eos=True)
    (output,) = run(llm, [prompt], SamplingParams(n=3, seed=40, **params))
    assert [o.index for o in output.outputs] == [0, 1, 2]
    singles = [run(llm, [prompt], SamplingParams(seed=40 + i, **params)) for i in range(3)]
    assert [o.token_ids for o in output.outputs] == [tokens_of(s)[0] for s in singles]


def test_unseeded_requests_differ_and_follow_the_engines_seed():
    prompt = prompts_of([10])[0]
    params = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)
    model = tiny_model()
    first, second, other = (
        tokens_of(run(tiny_llm(model, seed=seed), [prompt] * 3, params)) for seed in (1, 1, 2)
    )
    assert first == second != other
    assert len({tuple(tokens) for tokens in first}) == 3


def test_eos_stops_and_its_text_is_left_out():
    # A model that always answers EOS: its head looks at nothing else.
    model = tiny_model(tie_word_embeddings=False)
    head = np.zeros(model.params.lm_head.shape, np.float32)
    params = model.params.replace(
        lm_head=jax.numpy.asarray(head),
        final_norm=jax.numpy.zeros_like(model.params.final_norm),
    )
    llm = tiny_llm(type(model)(**{**vars(model), "params": params}))
    # All logits are equal: greedy takes id 0, the lowest; masked ids make way for the next.
    (output,) = run(llm, [[1, 2]], SamplingParams(temperature=0, max_tokens=3))
    assert output.outputs[0].token_ids == [0, 0, 0]
    assert output.outputs[0].finish_reason == "length"
    stop = SamplingParams(temperature=0, max_tokens=5, stop_token_ids=[0])
    (output,) = run(llm, [[1, 2]], stop)
    completion = output.outputs[0]
    assert (completion.token_ids, completion.text) == ([0], "")
    assert (completion.finish_reason, completion.stop_reason) == ("stop", 0)
    kept = SamplingParams(
        temperature=0, max_tokens=5, stop_token_ids=[0], include_stop_str_in_output=True
    )
    assert run(llm, [[1, 2]], kept)[0].outputs[0].text == "\x00"
    masked = SamplingParams(temperature=0, max_tokens=5, min_tokens=2, stop_token_ids=[0, 1])
    (output,) = run(llm, [[1, 2]], masked)
    assert output.outputs[0].token_ids == [2, 2, 0]


def test_eos_ends_a_request_unless_ignored(llm):
    """Sampling at a high temperature over 260 tokens meets EOS soon."""
    params: dict[str, Any] = dict(temperature=2.0, max_tokens=100)
    prompts = prompts_of([4] * 40)
    stopped = [o.outputs[0] for o in run(llm, prompts, SamplingParams(**params))]
    early = [o for o in stopped if o.finish_reason == "stop"]
    assert early, "none of 40 requests met EOS in 100 tokens"
    for output in early:
        assert output.token_ids[-1] == EOS and EOS not in output.token_ids[:-1]
        assert output.stop_reason is None
    ignoring = run(llm, prompts, SamplingParams(**params, ignore_eos=True))
    assert {len(tokens) for tokens in tokens_of(ignoring)} == {100}


def test_stop_strings_cut_the_text_and_free_the_request(llm):
    (whole,) = run(llm, prompts_of([9]))
    text = whole.outputs[0].text
    stop = text[5:7]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, stop=[stop])
    (cut,) = run(llm, prompts_of([9]), params)
    completion = cut.outputs[0]
    assert completion.text == text[: text.index(stop)]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    assert len(completion.token_ids) < 24


def test_logprobs_are_raw_ranked_and_summed(llm):
    params = SamplingParams(temperature=1.5, max_tokens=10, logprobs=3, seed=1, ignore_eos=True)
    completion = run(llm, prompts_of([9]), params)[0].outputs[0]
    assert completion.logprobs is not None and len(completion.logprobs) == 10
    total = 0.0
    for token_id, entry in zip(completion.token_ids, completion.logprobs, strict=True):
        assert next(iter(entry)) == token_id
        assert len(entry) in (3, 4)
        by_rank = sorted(entry.values(), key=lambda p: p.rank)
        assert [p.rank for p in by_rank[:3]] == [1, 2, 3]
        assert by_rank[0].logprob >= by_rank[1].logprob >= by_rank[2].logprob
        total += entry[token_id].logprob
    assert completion.cumulative_logprob == pytest.approx(total)
    only = SamplingParams(temperature=0, max_tokens=4, logprobs=0, ignore_eos=True)
    entries = run(llm, prompts_of([9]), only)[0].outputs[0].logprobs
    assert entries is not None and [len(entry) for entry in entries] == [1] * 4
    assert all(next(iter(entry.values())).rank == 1 for entry in entries)
    assert run(llm, prompts_of([9]))[0].outputs[0].logprobs is None


def test_a_bad_prompt_costs_the_others_nothing(llm):
    good = prompts_of([9, 20])
    expected = tokens_of(run(llm, good))
    bad = {
        r"empty \(0 tokens\)": [],
        r"128 tokens and max_model_len=128.*at most 127": [1] * 128,
        r"9000 tokens, more than max_model_len=128": [1] * 9000,
        r"prompt_token_ids\[2\]=260 is out of range.*260 tokens.*0 to 259": [1, 2, VOCAB_SIZE],
        r"prompt_token_ids\[0\]=-1 is out of range": [-1],
        r"prompt_token_ids\[1\]='x': it must be an integer": [1, "x"],
    }
    for message, prompt in bad.items():
        outputs = run(llm, [good[0], prompt, good[1]])
        assert tokens_of([outputs[0], outputs[2]]) == expected
        assert outputs[1].finished and outputs[1].outputs[0].finish_reason == "error"
        with pytest.raises(ValueError, match=message):
            raise ValueError(outputs[1].error)
        with pytest.raises(ValueError, match=message):
            run(llm, [prompt])
    with pytest.raises(ValueError, match="3 entries for 2 prompts"):
        run(llm, good, [GREEDY] * 3)


def test_chat_and_its_errors(llm):
    messages = [{"role": "user", "content": "hi"}]
    (output,) = llm.chat(messages, GREEDY, use_tqdm=False)
    assert output.prompt == "<s>user: hi</s><s>assistant: "
    broken = "{% for m in messages %}{{ m['content'] }"
    with pytest.raises(ValueError, match="template"):
        llm.chat(messages, GREEDY, chat_template=broken, use_tqdm=False)
    outputs = llm.chat([messages, [{"role": "user"}]], GREEDY, use_tqdm=False)
    assert tokens_of(outputs[:1]) == tokens_of([output])
    assert outputs[1].error is not None and "content" in outputs[1].error


def test_texts_dicts_and_token_ids_are_the_same_prompt(llm):
    forms = ["abc", {"prompt": "abc"}, {"prompt_token_ids": [97, 98, 99]}, [97, 98, 99]]
    outputs = llm.generate(forms, GREEDY, use_tqdm=False)
    assert len({tuple(tokens) for tokens in tokens_of(outputs)}) == 1
    assert [o.prompt for o in outputs] == ["abc", "abc", None, None]
    for prompt in ({"text": "abc"}, {"prompt": 3}, 3.5, {}):
        with pytest.raises(ValueError, match="prompt"):
            llm.generate([prompt], GREEDY, use_tqdm=False)  # pyright: ignore


@pytest.fixture(scope="module")
def by_steps() -> LLM:
    """A token a call."""
    return tiny_llm(decode_lookahead=1, warmup=False)


def test_streaming_grows_to_the_same_text(llm, by_steps):
    prompts = ["hello", "a longer prompt, of two chunks and more than that"]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, stop=["never met"])
    whole = llm.generate(prompts, params, use_tqdm=False)
    texts: dict[int, list[str]] = {}
    last = {}
    for output in by_steps.stream(prompts, params):
        texts.setdefault(output.prompt_index, []).append(output.outputs[0].text)
        last[output.prompt_index] = output
    assert [last[i].outputs[0].text for i in range(2)] == [o.outputs[0].text for o in whole]
    for pieces in texts.values():
        assert len(pieces) > 10
        assert all(b.startswith(a) for a, b in itertools.pairwise(pieces))
    assert all(output.finished for output in last.values())


@pytest.mark.parametrize(("engine", "length"), [("by_steps", 3), ("llm", 1 + 4)])
def test_leaving_a_stream_or_aborting_frees_the_blocks(request, engine, length):
    llm = request.getfixturevalue(engine)
    for output in llm.stream(prompts_of([9, 20]), GREEDY):
        if len(output.outputs[0].token_ids) == length:
            break
    check_idle(llm)
    ended = {}
    for output in llm.stream(prompts_of([9, 20]), GREEDY):
        if output.prompt_index == 0 and len(output.outputs[0].token_ids) == length:
            llm.abort(output.request_id)
        if output.finished:
            ended[output.prompt_index] = output.outputs[0]
    assert (ended[0].finish_reason, len(ended[0].token_ids)) == ("abort", length)
    assert (ended[1].finish_reason, len(ended[1].token_ids)) == ("length", 24)
    check_idle(llm)


def test_generate_within_a_stream_takes_nothing_from_it(llm):
    expected = tokens_of(run(llm, prompts_of([9, 20])))
    streamed, inner = {}, None
    for output in llm.stream(prompts_of([9, 20]), GREEDY):
        if inner is None:
            inner = run(llm, prompts_of([9, 20])[::-1])
        if output.finished:
            streamed[output.prompt_index] = output.outputs[0].token_ids
    assert inner is not None and tokens_of(inner) == expected[::-1]
    assert [streamed[i] for i in sorted(streamed)] == expected


def test_pool_is_updated_in_place_and_nothing_compiles_after_warm_up():
    """200 requests of 1 to 1,500 tokens, with every mix of sampling parameters."""
    llm = tiny_llm(
        tiny_model(max_position_embeddings=2048),
        num_gpu_blocks_override=130,
        block_size=16,
        max_model_len=1536,
        max_num_batched_tokens=256,
    )

    def addresses():
        return [layer.unsafe_buffer_pointer() for layer in llm.engine.runner.pool.layers]

    before = addresses()
    rng = np.random.default_rng(3)
    lengths = [1, 1500, *np.exp(rng.uniform(0, np.log(1500), 198)).astype(int).tolist()]
    params = [
        SamplingParams(
            temperature=float(rng.choice([0, 0.7])),
            top_k=int(rng.choice([0, 5])),
            top_p=float(rng.choice([1.0, 0.8])),
            min_p=float(rng.choice([0, 0.05])),
            logprobs=[None, 3][int(rng.integers(2))],
            min_tokens=int(rng.integers(3)),
            stop_token_ids=[1, 2],
            max_tokens=int(rng.integers(3, 20)),
        )
        for _ in lengths
    ]
    with jax.no_tracing():
        outputs = run(llm, prompts_of(lengths), params)
    assert all(output.error is None for output in outputs)
    assert addresses() == before
    assert llm.get_metrics()["num_preemptions"] > 0


def test_counters_and_histograms():
    llm = tiny_llm()
    run(llm, [[1] * 20, [1] * 20], SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))
    metrics = llm.get_metrics()
    assert metrics["prompt_tokens"] == 40 and metrics["generation_tokens"] == 10
    assert metrics["prefix_cache_queries"] == 40 and metrics["prefix_cache_hits"] == 16
    assert metrics["request_success"] == {"length": 2}
    assert metrics["num_requests_running"] == metrics["num_requests_waiting"] == 0
    assert metrics["kv_cache_usage_perc"] == 0.0
    assert metrics["time_to_first_token_seconds"]["count"] == 2
    assert metrics["inter_token_latency_seconds"]["count"] == 8
    assert metrics["e2e_request_latency_seconds"]["sum"] > 0
    json.dumps(metrics)


def test_many_short_requests_leave_every_block_free(llm):
    rng = np.random.default_rng(0)
    prompts = prompts_of(rng.integers(1, 12, 1000).tolist())
    outputs = run(llm, prompts, SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
    assert [len(tokens) for tokens in tokens_of(outputs)] == [3] * 1000
    assert llm.engine.scheduler.blocks.pool.num_free_blocks == 199


def test_an_engine_can_be_deleted_and_made_again():
    def live_bytes():
        gc.collect()
        return sum(array.nbytes for array in jax.live_arrays())

    model = tiny_model()
    before = live_bytes()
    for _ in range(3):
        llm = tiny_llm(model)
        run(llm, [[1, 2, 3]])
        engine = weakref.ref(llm.engine)
        del llm
        assert live_bytes() == before
        assert engine() is None
    with tiny_llm(model):
        pass
    assert live_bytes() == before


def test_options_are_checked():
    for options, message in (
        (dict(max_model_len=513), "max_model_len=513 is more than the 512"),
        (dict(num_gpu_blocks_override=10), r"max_model_len=128 .*hold 36 tokens"),
        (dict(kv_cache_memory_bytes=100), r"100 bytes, and two blocks of 4 tokens need"),
        (dict(dtype="float16"), "dtype='float16'"),
        (dict(quantization="int3"), "quantization='int3': it must be one of"),
        (
            dict(tensor_parallel_size=0),
            "tensor_parallel_size=0: it must be an integer of at least 1",
        ),
        (dict(gpu_memory_utilization=1.5), "gpu_memory_utilization=1.5"),
        (dict(max_seqs=3), "unknown option 'max_seqs'"),
        (dict(max_num_seqs=0), "max_num_seqs=0"),
    ):
        options: dict[str, Any]
        with pytest.raises(ValueError, match=message):
            tiny_llm(**options)


def test_the_pool_is_sized_from_bytes():
    # 2 x 2 layers x 2 KV heads x 8 numbers x 4 bytes x 4 tokens = 1,024 bytes a block.
    llm = tiny_llm(kv_cache_memory_bytes=60 * 1024 + 100)
    assert llm.engine.config.num_blocks == llm.engine.runner.pool.num_blocks == 60
    assert llm.engine.runner.pool.num_bytes == 60 * 1024


def test_bfloat16_serves_and_its_pool_stays_in_place():
    llm = tiny_llm(tiny_model(dtype="bfloat16"))
    before = [layer.unsafe_buffer_pointer() for layer in llm.engine.runner.pool.layers]
    outputs = run(llm, prompts_of([9, 40]))
    assert [len(tokens) for tokens in tokens_of(outputs)] == [24, 24]
    after = [layer.unsafe_buffer_pointer() for layer in llm.engine.runner.pool.layers]
    assert before == after


def test_status_follows_the_request(llm):
    llm.engine.add_request("x", [1, 2, 3], GREEDY)
    request = llm.engine.scheduler.requests["x"]
    assert request.status is RequestStatus.WAITING
    llm.engine.step()
    assert request.status is RequestStatus.RUNNING
    with pytest.raises(ValueError, match="request_id='x' is in use"):
        llm.engine.add_request("x", [1], GREEDY)
    llm.engine.add_request("y/1", [1, 2, 3], GREEDY)
    with pytest.raises(ValueError, match="its output 1 would be 'y/1', which is in use"):
        llm.engine.add_request("y", [1], SamplingParams(n=2))
    llm.abort("y/1")
    llm.abort("x")
    assert request.status is RequestStatus.FINISHED
    assert llm.abort("x") is None
