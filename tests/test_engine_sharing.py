"""Forks, preemptions and host memory change no token and leave no block behind."""

import contextlib
from typing import Any

import pytest
from tiny_engine import GREEDY, check_idle, prompts_of, run, tiny_llm, tiny_model, tokens_of

from paged_jax import LLM, SamplingParams
from paged_jax.outputs import RequestOutput
from paged_jax.prefix_cache import hash_block
from paged_jax.request import RequestStatus

BLOCK_SIZE = 4
BLOCK_BYTES = 1024  # 2 x 2 layers x 2 KV heads x 8 numbers x 4 bytes x 4 tokens
SWAP_BYTES = 300 * BLOCK_BYTES
MODES = ("recompute", "swap")
# Sampling that always takes the likeliest token: n of a greedy request is refused.
TOP_1: dict[str, Any] = dict(temperature=1.0, top_k=1, ignore_eos=True)


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def llm(model) -> LLM:
    """Room for everything, and host memory for all of it; a step for each token."""
    return tiny_llm(model, swap_space_bytes=SWAP_BYTES, decode_lookahead=1, warmup=False)


@pytest.fixture(scope="module")
def ahead(model) -> LLM:
    """As `llm`, with four tokens a call and another call in flight."""
    return tiny_llm(model, swap_space_bytes=SWAP_BYTES, decode_lookahead=8, warmup=False)


def cramped(model, **options: Any) -> LLM:
    """22 blocks hold 88 tokens: a few short sequences, or a long one."""
    sizes = dict(num_gpu_blocks_override=23, max_model_len=88, warmup=False)
    return tiny_llm(model, **{**sizes, **options})


@pytest.fixture(autouse=True)
def all_blocks_free(request):
    yield
    if "llm" in request.fixturenames:
        check_all_free(request.getfixturevalue("llm"))


def check_all_free(llm: LLM) -> None:
    check_idle(llm)
    scheduler = llm.engine.scheduler
    assert not scheduler.held and not scheduler.requests
    assert scheduler.blocks.host is None or scheduler.blocks.host.pool.num_used_blocks == 0


def all_tokens(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    """The tokens of each output of each request."""
    return [[completion.token_ids for completion in output.outputs] for output in outputs]


def run_stepwise(llm: LLM, prompts, params, before_step) -> list[RequestOutput]:
    """As `run`, with `before_step(k)` called ahead of step k."""
    engine, outputs = llm.engine, {}
    params = params if isinstance(params, list) else [params] * len(prompts)
    for i, (prompt, own) in enumerate(zip(prompts, params, strict=True)):
        engine.add_request(str(i), prompt, own)
    num_steps = 0
    while engine.has_unfinished():
        before_step(num_steps)
        engine.scheduler.check_integrity()
        outputs |= {output.request_id: output for output in engine.step()}
        num_steps += 1
        assert num_steps < 500, "it does not end"
    return [outputs[str(i)] for i in range(len(prompts))]


def count_steps(llm: LLM, prompts, params) -> int:
    steps = []
    run_stepwise(llm, prompts, params, steps.append)
    return len(steps)


# --- Forks


@pytest.mark.parametrize("num_prompt_tokens", [1, 3, 4, 8, 10, 15, 40])
def test_forks_give_the_greedy_tokens_and_copy_what_they_must(llm, num_prompt_tokens):
    [prompt] = prompts_of([num_prompt_tokens], seed=num_prompt_tokens)
    [expected] = tokens_of(run(llm, [prompt]))
    before = llm.get_metrics()
    params = SamplingParams(**TOP_1, n=4, max_tokens=24)
    [output] = run(llm, [prompt], params)
    assert all_tokens([output]) == [[expected] * 4]
    after = llm.get_metrics()
    # The last prompt block is shared by four; three of them copy it, the last keeps it.
    copies = 3 if num_prompt_tokens % BLOCK_SIZE else 0
    assert after["cow_copies"] - before["cow_copies"] == copies
    assert after["prompt_tokens"] - before["prompt_tokens"] == num_prompt_tokens
    assert after["prefix_cache_queries"] - before["prefix_cache_queries"] == num_prompt_tokens


def test_the_worked_counts_of_forks(llm):
    """A prompt of 30 tokens, four outputs of 10: 7 shared blocks, and 3 more for each."""
    assert llm.reset_prefix_cache()
    [prompt] = prompts_of([30])
    pool = llm.engine.scheduler.blocks.pool
    used = []
    params = SamplingParams(**TOP_1, n=4, max_tokens=10)
    run_stepwise(llm, [prompt], params, lambda _: used.append(pool.num_used_blocks))
    # 39 tokens are computed at the end: 10 blocks, of which 7 are full of prompt. Equal blocks of
    # equal outputs are folded when they are full, so that only the last one is each's own.
    assert used[1] == 8 and max(used) <= 7 + 4 * 3
    # Each its own tokens: nothing to fold.
    used.clear()
    seeded = SamplingParams(temperature=2.0, seed=1, n=4, max_tokens=10, ignore_eos=True)
    run_stepwise(llm, [prompt], seeded, lambda _: used.append(pool.num_used_blocks))
    assert max(used) == 7 + 4 * 3


def test_more_children_than_seats(llm):
    prompts = prompts_of([10, 12])
    expected = tokens_of(run(llm, prompts))
    outputs = run(llm, prompts, SamplingParams(**TOP_1, n=11, max_tokens=24))
    assert all_tokens(outputs) == [[tokens] * 11 for tokens in expected]
    assert [o.index for o in outputs[0].outputs] == list(range(11))


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_forks_of_chunked_prompts_with_preemption(model, llm, prefix_caching):
    prompts = prompts_of([33, 9, 20, 4])
    expected = tokens_of(run(llm, prompts))
    small = cramped(model, max_num_batched_tokens=8, enable_prefix_caching=prefix_caching)
    outputs = run(small, prompts, SamplingParams(**TOP_1, n=5, max_tokens=24))
    assert all_tokens(outputs) == [[tokens] * 5 for tokens in expected]
    assert small.get_metrics()["num_preemptions"] > 2
    check_all_free(small)


def test_streamed_forks_grow_together(llm):
    [prompt] = prompts_of([10])
    [expected] = tokens_of(run(llm, [prompt]))
    params = SamplingParams(**TOP_1, n=4, max_tokens=24)
    seen: list[list[list[int]]] = []
    for output in llm.stream([{"prompt_token_ids": prompt}], params):
        seen += all_tokens([output])
        for tokens in seen[-1]:
            assert tokens == expected[: len(tokens)]
    assert len(seen) == 24 and seen[-1] == [expected] * 4
    assert seen[0] == [expected[:1]] * 4  # All four sample in the step that ends the prefill.


@pytest.mark.parametrize("n", [3, 10])
def test_seeds_of_forks_are_counted_on(llm, n):
    prompts = prompts_of([10, 8])
    base: dict[str, Any] = dict(
        temperature=1.0, top_p=0.9, max_tokens=12, ignore_eos=True, logprobs=1
    )
    outputs = run(llm, prompts, SamplingParams(**base, n=n, seed=40))
    for prompt, output in zip(prompts, outputs, strict=True):
        singles = [SamplingParams(**base, seed=40 + i) for i in range(n)]
        alone = run(llm, [prompt] * n, singles)
        assert [o.token_ids for o in output.outputs] == tokens_of(alone)
        for fork, single in zip(output.outputs, alone, strict=True):
            assert fork.cumulative_logprob == pytest.approx(
                single.outputs[0].cumulative_logprob, abs=1e-4
            )
    assert len({tuple(o.token_ids) for o in outputs[0].outputs}) == n


def test_a_fork_that_is_aborted_or_stops_early_harms_no_sibling(llm):
    [prompt] = prompts_of([10])
    [expected] = tokens_of(run(llm, [prompt]))
    engine = llm.engine
    engine.add_request("x", prompt, SamplingParams(**TOP_1, n=4, max_tokens=24))
    engine.step()
    engine.scheduler.abort("x/0")  # It is the one that computed the prompt.
    engine.scheduler.abort("x/2")
    outputs = []
    while engine.has_unfinished():
        outputs += engine.step()
    [output] = outputs
    assert [o.finish_reason for o in output.outputs] == ["abort", "length", "abort", "length"]
    assert [output.outputs[i].token_ids for i in (1, 3)] == [expected] * 2
    # Aborted before its prompt is computed, it leaves its children to queue by themselves.
    engine.add_request("y", prompts_of([40])[0], SamplingParams(**TOP_1, n=3, max_tokens=4))
    engine.step()
    engine.scheduler.abort("y/0")
    engine.scheduler.check_integrity()
    while engine.has_unfinished():
        outputs += engine.step()
    assert [o.finish_reason for o in outputs[-1].outputs] == ["abort", "length", "length"]
    assert outputs[-1].outputs[1].token_ids == outputs[-1].outputs[2].token_ids


# --- Preemption at every step


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("victims", ["all", "first", "last"])
@pytest.mark.parametrize(("engine", "max_tokens"), [("llm", 7), ("ahead", 16)])
def test_preemption_before_every_step(request, engine, max_tokens, mode, n, victims):
    """Prompts of 7, 12 and 40 tokens, the last in two chunks; with n = 3 there are forks."""
    llm = request.getfixturevalue(engine)
    prompts = prompts_of([7, 12, 40])
    params = SamplingParams(**TOP_1, n=n, max_tokens=max_tokens)
    assert llm.reset_prefix_cache()
    expected = all_tokens(run(llm, prompts, params))
    chosen = {"all": slice(None), "first": slice(1), "last": slice(-1, None)}[victims]
    scheduler, counts = llm.engine.scheduler, []
    for at_step in range(1, count_steps(llm, prompts, params)):
        assert llm.reset_prefix_cache()
        done = []

        def before(step, at_step=at_step, done=done):
            if step == at_step:
                done += [scheduler.preempt(r, mode) for r in list(scheduler.running)[chosen]]

        assert all_tokens(run_stepwise(llm, prompts, params, before)) == expected, at_step
        assert set(done) <= {mode}
        counts.append(len(done))
        check_all_free(llm)
    assert min(counts) > 0
    assert max(counts) == (min(8, 3 * n) if victims == "all" else 1)


@pytest.mark.parametrize("mode", MODES)
def test_preemption_before_each_step_again_and_again(llm, mode):
    """Sampled with seeds, so that a token taken twice or lost would show."""
    prompts = prompts_of([7, 12, 30])
    params = SamplingParams(temperature=1.0, seed=5, n=2, max_tokens=9, ignore_eos=True)
    expected = all_tokens(run(llm, prompts, params))
    scheduler = llm.engine.scheduler

    def before(step):
        if step % 3 == 2:
            for request in list(scheduler.running)[step % 2 :: 2]:
                scheduler.preempt(request, mode)

    outputs = run_stepwise(llm, prompts, params, before)
    assert all_tokens(outputs) == expected
    assert sum(output.metrics.num_preemptions for output in outputs if output.metrics) > 5


def test_a_swapped_request_is_aborted(llm):
    engine = llm.engine
    engine.add_request("x", prompts_of([20])[0], GREEDY)
    engine.step()
    [request] = engine.scheduler.running
    assert engine.scheduler.preempt(request, "swap") == "swap"
    assert request.is_swapped and request.status is RequestStatus.WAITING
    assert llm.get_metrics()["num_requests_swapped"] == 1
    assert not llm.reset_prefix_cache()
    output = engine.abort("x")
    assert output is not None and output.outputs[0].finish_reason == "abort"


# --- Swap space


def run_cramped(model, llm, **options: Any) -> dict[str, Any]:
    """Prompts that do not fit together: tokens as in a roomy engine; its metrics."""
    prompts = prompts_of([10, 23, 16, 40, 33, 21])
    small = cramped(model, **options)
    assert tokens_of(run(small, prompts)) == tokens_of(run(llm, prompts))
    check_all_free(small)
    return small.get_metrics()


def test_swapping_under_pressure(model, llm):
    metrics = run_cramped(model, llm, preemption_mode="swap", swap_space_bytes=SWAP_BYTES)
    assert metrics["num_preemptions_by_mode"]["swap"] >= 3
    assert metrics["num_preemptions_by_mode"]["recompute"] == 0
    assert 0 < metrics["swap_in_tokens"] <= metrics["swap_out_tokens"]


def test_swap_space_that_is_too_small_falls_back_to_recompute(model, llm):
    metrics = run_cramped(model, llm, preemption_mode="swap", swap_space_bytes=3 * BLOCK_BYTES)
    by_mode = metrics["num_preemptions_by_mode"]
    assert by_mode["recompute"] > 0
    assert by_mode["swap"] == 0 or metrics["swap_out_tokens"] <= 12 * by_mode["swap"]


@pytest.mark.parametrize("bytes_per_second", [1.0, 1e15])
def test_auto_takes_the_cheaper_way(model, bytes_per_second):
    small = cramped(model, preemption_mode="auto", swap_space_bytes=SWAP_BYTES)
    costs = small.engine.scheduler.costs
    costs.WEIGHT = 0.0  # The first estimates stay.  # pyright: ignore
    costs.swap_bytes_per_second, costs.prefill_tokens_per_second = bytes_per_second, 1e3
    run(small, prompts_of([10, 23, 16, 40, 33, 21]))
    by_mode = small.get_metrics()["num_preemptions_by_mode"]
    wanted, other = ("swap", "recompute") if bytes_per_second > 1 else ("recompute", "swap")
    assert by_mode[wanted] > 0 and by_mode[other] == 0
    check_all_free(small)


def test_auto_measures_both_speeds(model, llm):
    run_cramped(model, llm, preemption_mode="auto", swap_space_bytes=SWAP_BYTES)
    small = cramped(model, preemption_mode="auto", swap_space_bytes=SWAP_BYTES)
    run(small, prompts_of([10, 23]))
    costs = small.engine.scheduler.costs
    assert costs.swap_bytes_per_second and costs.prefill_tokens_per_second
    assert costs.bytes_a_token == BLOCK_BYTES // BLOCK_SIZE


# --- Host tier of the prefix cache


def test_a_prefix_that_was_evicted_comes_back_from_the_host(model, llm):
    small = cramped(model, swap_space_bytes=SWAP_BYTES, enable_host_prefix_cache=True)
    prompt, *others = prompts_of([41, 60, 60])
    expected = tokens_of(run(llm, [prompt]))
    assert tokens_of(run(small, [prompt])) == expected
    for other in others:
        run(small, [other])
    cache = small.engine.scheduler.blocks.pool.prefix_cache
    assert cache.find(hash_block(None, prompt[:BLOCK_SIZE])) is None
    before = small.get_metrics()
    [output] = run(small, [prompt])
    after = small.get_metrics()
    assert [output.outputs[0].token_ids] == expected
    assert output.num_cached_tokens == 40
    hits = {
        tier: after["prefix_cache_hits_by_tier"][tier] - before["prefix_cache_hits_by_tier"][tier]
        for tier in ("device", "host")
    }
    assert hits["host"] > 0 and sum(hits.values()) == 40
    assert after["host_offload_tokens"] > 0
    # With forks, and with a prompt of whole blocks, whose last block is computed again.
    for other in others:
        run(small, [other])
    [again] = run(small, [prompt[:40]], SamplingParams(**TOP_1, n=3, max_tokens=5))
    assert again.num_cached_tokens == 36
    assert all_tokens([again]) == [[tokens_of(run(llm, [prompt[:40]]))[0][:5]] * 3]
    check_all_free(small)


def test_a_full_host_forgets_the_oldest(model):
    small = cramped(model, swap_space_bytes=12 * BLOCK_BYTES, enable_host_prefix_cache=True)
    prompts = prompts_of([41, 60, 60, 33, 50])
    expected = tokens_of(run(small, prompts))
    for _ in range(2):
        assert tokens_of(run(small, prompts)) == expected
        for prompt, tokens in zip(prompts, expected, strict=True):
            assert tokens_of(run(small, [prompt])) == [tokens]
    assert small.get_metrics()["host_evictions"] > 0
    check_all_free(small)


# --- Priorities


def test_priorities_set_the_order_and_the_victims(model, llm):
    prompts = prompts_of([30, 31, 32, 33])
    expected = tokens_of(run(llm, prompts))
    small = cramped(model, scheduling_policy="priority")
    ended, preempted = [], []
    close, preempt = small.engine._close, small.engine.scheduler.preempt
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            small.engine, "_close", lambda group: ended.append(group.request_id) or close(group)
        )
        patch.setattr(
            small.engine.scheduler,
            "preempt",
            lambda request, mode=None: preempted.append(request.priority) or preempt(request, mode),
        )
        outputs = small.generate(
            [{"prompt_token_ids": p} for p in prompts],
            GREEDY,
            priority=[5, 3, -1, 4],
            use_tqdm=False,
        )
    assert tokens_of(outputs) == expected
    assert ended == ["2", "1", "3", "0"]
    assert preempted and -1 not in preempted
    check_all_free(small)
    for priority, message in (([1], "1 entries for 4"), (True, "=True: it must be"), ("x", "='x'")):
        with pytest.raises(ValueError, match=f"priority.*{message}"):
            small.generate(prompts, GREEDY, priority=priority, use_tqdm=False)  # pyright: ignore
    with pytest.raises(ValueError, match=r"priority=2.*scheduling_policy='priority'"):
        llm.generate(prompts, GREEDY, priority=2, use_tqdm=False)


def test_a_late_urgent_request_overtakes(model):
    small = cramped(model, scheduling_policy="priority", max_num_seqs=2, max_num_batched_tokens=8)
    engine, ended = small.engine, []
    for i in range(4):
        engine.add_request(str(i), prompts_of([20], seed=i)[0], GREEDY, priority=1)
    engine.step()
    engine.add_request("urgent", prompts_of([20], seed=9)[0], GREEDY, priority=0)
    with contextlib.suppress(StopIteration):
        while engine.has_unfinished():
            ended += [output.request_id for output in engine.step()]
    assert ended.index("urgent") <= 2
    check_all_free(small)
