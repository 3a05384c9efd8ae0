"""What an `LLM` offers around its cache, on an engine: pins, keys, events, reasons, accounts."""

import logging
import urllib.request
import uuid
from typing import Any

import pytest
from tiny_engine import GREEDY, check_idle, prompts_of, run, tiny_llm, tiny_model, tokens_of

from paged_jax import LLM, SamplingParams
from paged_jax.kv_events import BlockRemoved, BlockStored, CacheCleared

BLOCK_BYTES = 1024
ONE = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def llm(model) -> LLM:
    return tiny_llm(model, warmup=False)


def cramped(model, **options: Any) -> LLM:
    sizes = dict(num_gpu_blocks_override=23, max_model_len=64, warmup=False)
    return tiny_llm(model, **{**sizes, **options})


# --- Pins


def test_a_pinned_prefix_stays_under_pressure_and_goes_when_unpinned(model, llm):
    small = cramped(model)
    system, *others = prompts_of([22, 50, 50, 40, 33])
    pinned = small.pin_prefix({"prompt_token_ids": system})
    assert pinned.num_tokens == 20
    pool = small.engine.scheduler.blocks.pool
    assert pool.num_used_blocks == 5
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    for _ in range(2):
        assert tokens_of(run(small, others, params)) == tokens_of(run(llm, others, params))
        [hit] = run(small, [[*system, 1, 2, 3]], ONE)
        assert hit.num_cached_tokens == 20
        small.engine.scheduler.check_integrity()
    assert small.memory_report().num_pinned_blocks == 5
    assert not small.reset_prefix_cache()
    # Twice pinned, it goes with the second unpinning.
    again = small.pin_prefix({"prompt_token_ids": system})
    small.unpin_prefix(again)
    assert pool.num_used_blocks == 5
    small.unpin_prefix(pinned)
    check_idle(small)
    run(small, others)
    [miss] = run(small, [[*system, 1, 2, 3]], ONE)
    assert miss.num_cached_tokens == 0


def test_a_pin_survives_a_fault(model, monkeypatch):
    small = cramped(model)
    system, *others = prompts_of([22, 50, 50])
    pinned = small.pin_prefix({"prompt_token_ids": system})
    with monkeypatch.context() as patch:
        patch.setattr(small.engine.runner, "run", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run(small, others)
    assert small.engine.scheduler.blocks.pool.num_used_blocks == 0
    run(small, [[*system, 9]], ONE)  # It is computed again, and kept again.
    assert small.engine.scheduler.blocks.pool.num_used_blocks == 5
    run(small, others)
    [hit] = run(small, [[*system, 1, 2, 3]], ONE)
    assert hit.num_cached_tokens == 20
    small.unpin_prefix(pinned)
    check_idle(small)


def test_a_pin_that_fails_leaves_nothing_pinned(model, monkeypatch):
    small = cramped(model)
    with monkeypatch.context() as patch:
        patch.setattr(small.engine.runner, "run", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            small.pin_prefix([1] * 10)
    assert not small.engine.scheduler.blocks.pins.hashes
    for prompt, message in (
        ([1] * 3, "3 tokens, and a block 4; .* pin a longer one"),
        ([1] * 30, "7 pinned blocks would leave 15 of 22, .* needs 16"),
        ([], "the prompt is empty"),
    ):
        with pytest.raises(ValueError, match=message):
            small.pin_prefix(prompt)
        check_idle(small)
    off = cramped(model, enable_prefix_caching=False)
    with pytest.raises(ValueError, match="enable_prefix_caching=False"):
        off.pin_prefix([1] * 10)


# --- Keys


def test_keys_and_salts_keep_prefixes_apart(llm):
    assert llm.reset_prefix_cache()
    [tokens] = prompts_of([21])
    kinds: list[dict[str, Any]] = [
        {},
        {"cache_salt": "a"},
        {"cache_salt": "b"},
        {"extra_keys": ["a"]},
        {"extra_keys": ["a", 1]},
        {"extra_keys": [1]},
        {"extra_keys": ["1"]},
        {"extra_keys": ["a"], "cache_salt": "a"},
    ]
    prompts = [{"prompt_token_ids": tokens, **kind} for kind in kinds]
    cold = [llm.generate(prompt, GREEDY, use_tqdm=False)[0] for prompt in prompts]
    assert [output.num_cached_tokens for output in cold] == [0] * len(kinds)
    warm = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [output.num_cached_tokens for output in warm] == [20] * len(kinds)
    assert len({tuple(tokens) for tokens in tokens_of([*cold, *warm])}) == 1
    check_idle(llm)
    for bad in ("a", [1.5], [None], {"a": 1}, [True]):
        with pytest.raises(ValueError, match=r"extra_keys=.*list of strings and integers"):
            llm.generate({"prompt_token_ids": tokens, "extra_keys": bad}, GREEDY, use_tqdm=False)


# --- Events


class Mirror:
    """What a router that follows the events believes the cache to hold."""

    def __init__(self, llm: LLM):
        self.blocks = llm.engine.scheduler
        self.queue = llm.kv_events().open_queue()
        self.tiers: dict[str, set[bytes]] = {"device": set(), "host": set()}
        self.tokens: dict[bytes, tuple[int, ...]] = {}
        self.kinds = set()
        self.next_number = 0

    def check(self) -> None:
        for number, event in self.queue.poll():
            assert number == self.next_number
            self.next_number += 1
            self.kinds.add(type(event))
            if isinstance(event, BlockStored):
                self.tiers[event.tier].update(event.block_hashes)
                if event.tier == "device":
                    [block_hash] = event.block_hashes
                    before = self.tokens.get(event.parent_hash or b"", ())
                    self.tokens[block_hash] = before + event.token_ids
            elif isinstance(event, BlockRemoved):
                self.tiers[event.tier].difference_update(event.block_hashes)
            else:
                assert isinstance(event, CacheCleared)
                self.tiers = {"device": set(), "host": set()}
        manager = self.blocks.blocks
        pools = {"device": manager.pool} | ({"host": manager.host.pool} if manager.host else {})
        for tier, pool in pools.items():
            hashes = {pool.prefix_cache.hash_of(i) for i in range(pool.num_blocks)} - {None}
            assert self.tiers[tier] == hashes, tier


@pytest.mark.parametrize("host", [False, True])
def test_events_tell_the_caches_content_at_all_times(model, monkeypatch, host):
    options: dict[str, Any] = {}
    if host:  # Less than all that is evicted, so that the host evicts as well.
        options = dict(
            swap_space_bytes=12 * BLOCK_BYTES, enable_host_prefix_cache=True, preemption_mode="swap"
        )
    small = cramped(model, **options)
    mirror, engine = Mirror(small), small.engine
    prompts = prompts_of([20, 23, 9, 40, 20, 33, 20])
    prompts[4], prompts[6] = prompts[0], prompts[0][:12] + prompts[5][:9]

    def serve():
        forks = SamplingParams(temperature=1.0, top_k=1, n=2, max_tokens=9, ignore_eos=True)
        for i, prompt in enumerate(prompts):
            engine.add_request(str(i), prompt, forks if i % 2 else GREEDY)
        while engine.has_unfinished():
            engine.step()
            mirror.check()

    serve()
    serve()
    assert {BlockStored, BlockRemoved} <= mirror.kinds
    assert small.reset_prefix_cache()
    mirror.check()
    serve()
    for block_hash in mirror.tiers["device"]:  # The chain of events spells the prompts.
        tokens = list(mirror.tokens[block_hash])
        assert any(tokens[:9] == prompt[: len(tokens)][:9] for prompt in prompts)
    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "run", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run(small, prompts)
    mirror.check()
    assert CacheCleared in mirror.kinds
    serve()
    check_idle(small)
    mirror.queue.close()
    assert not small.kv_events()


def test_a_subscriber_that_raises_is_left_out(llm, caplog):
    prompts = prompts_of([21, 30], seed=8)
    expected = tokens_of(run(llm, prompts))
    assert llm.reset_prefix_cache()
    seen = []
    llm.kv_events().subscribe(lambda *_: 1 / 0)
    end = llm.kv_events().subscribe(lambda number, event: seen.append(number))
    assert tokens_of(run(llm, prompts)) == expected
    end()
    assert len(seen) > 5 and "was unsubscribed" in caplog.text
    assert not llm.kv_events()
    check_idle(llm)


# --- Why a prefix missed


def test_each_reason_for_a_miss(model, llm):
    small = cramped(model)
    a, b = prompts_of([41, 41])
    [cold] = run(small, [a], ONE)
    assert small.explain_prefix_miss(cold).reason == "never_cached"
    [warm] = run(small, [a], ONE)
    assert small.explain_prefix_miss(warm).reason == "hit"
    changed = [*a[:14], (a[14] + 1) % 256, *a[15:]]
    [output] = run(small, [changed], ONE)
    miss = small.explain_prefix_miss(output)
    assert miss.reason == "never_cached" and miss.num_hit_tokens == 12
    assert (miss.num_common_tokens, miss.first_different_token) == (14, 14)
    assert miss.nearest_request_id in (cold.request_id, warm.request_id)
    assert "part at token 14 (block 3)" in str(miss)
    salted = {"prompt_token_ids": a, "cache_salt": "s"}
    assert small.explain_prefix_miss(salted).reason == "other_extra_keys"
    [output] = small.generate(salted, ONE, use_tqdm=False)
    assert small.explain_prefix_miss(output).reason == "other_extra_keys"
    run(small, [b, *prompts_of([60, 60, 60], seed=2)])
    assert small.explain_prefix_miss(a).reason == "evicted"
    [output] = run(small, [a], ONE)
    assert small.explain_prefix_miss(output).reason == "evicted"
    assert small.reset_prefix_cache()
    assert small.explain_prefix_miss(a).reason == "cleared"
    assert small.explain_prefix_miss([1, 2, 3]).reason == "too_short"
    [forks] = run(small, [b], SamplingParams(n=2, max_tokens=2))
    assert small.explain_prefix_miss(forks).reason in ("evicted", "cleared")
    off = cramped(model, enable_prefix_caching=False)
    assert off.explain_prefix_miss(a).reason == "caching_disabled"
    check_idle(small)


def test_a_template_with_a_uuid_early_on_is_reported_once(model, caplog):
    rng = uuid.UUID(int=7)
    template = "Request {} of the help desk. " + "Answer in one line, and cite the manual. " * 3
    watching = tiny_llm(model, warmup=False)
    with caplog.at_level(logging.WARNING, logger="paged_jax"):
        for i in range(14):
            name = uuid.uuid5(rng, str(i)).hex[:12]
            watching.generate(template.format(name)[:120], ONE, use_tqdm=False)
    warnings = [r.getMessage() for r in caplog.records if "alike but for" in r.getMessage()]
    assert len(warnings) == 1, warnings
    assert "at token 8" in warnings[0]
    caplog.clear()
    silent = tiny_llm(model, warmup=False, watch_prefixes=False)
    assert silent.engine.watch is None


# --- Accounts


def test_the_memory_report_adds_up(model):
    host = dict(swap_space_bytes=20 * BLOCK_BYTES, enable_host_prefix_cache=True)
    small = cramped(model, preemption_mode="swap", **host)
    engine = small.engine
    pinned = small.pin_prefix({"prompt_token_ids": prompts_of([9], seed=3)[0]})
    seq = small.start({"prompt_token_ids": prompts_of([10])[0]})
    for i, prompt in enumerate(prompts_of([20, 14, 30])):
        params = SamplingParams(temperature=1.0, top_k=1, n=2, max_tokens=20, ignore_eos=True)
        engine.add_request(str(i), prompt, params)
    num_swapped = 0
    while engine.has_unfinished():
        engine.step()
        report, metrics = small.memory_report(), small.get_metrics()
        owners = report.memory_bytes
        kv = [owners[f"kv_{name}"] for name in ("in_use", "cached", "free", "null")]
        assert sum(kv) == 23 * BLOCK_BYTES == engine.runner.pool.num_bytes
        swap = [owners[f"swap_{name}"] for name in ("in_use", "cached", "free", "null")]
        assert sum(swap) == engine.runner.mover.num_host_bytes == 21 * BLOCK_BYTES
        num_swapped += owners["swap_in_use"] > 0
        own = metrics["memory_bytes"]
        for name in ("weights", "temporary", "kv_in_use", "kv_cached"):
            assert own[name] == owners[name] and own[name] >= 0
        assert own["kv_free"] == owners["kv_free"]
        assert own["swap"] == owners["swap_in_use"] + owners["swap_cached"]
        assert owners["weights"] == engine.runner.num_weight_bytes > 0
        assert metrics["kv_cache_usage_perc"] == pytest.approx(report.usage)
        live = [r for r in engine.scheduler.requests.values() if r.block_ids]
        live += [r for r in engine.scheduler.held.values() if r.block_ids]
        assert report.pool.device.num_holders.sum() == sum(len(r.block_ids) for r in live)
        assert "KV in use" in str(report) and report.svg().startswith("<svg")
    assert num_swapped > 0
    assert small.memory_report().num_pinned_blocks == 2
    small.unpin_prefix(pinned)
    seq.close()
    check_idle(small)


METRICS = """
num_requests_running num_requests_waiting num_requests_swapped num_requests_held
kv_cache_usage_perc kv_cache_peak_usage_perc prefix_cache_queries prefix_cache_hits
prefix_cache_hits_by_tier num_preemptions num_preemptions_by_mode swap_in_tokens swap_out_tokens
host_offload_tokens cow_copies evictions host_evictions folded_blocks prompt_tokens
generation_tokens request_success time_to_first_token_seconds inter_token_latency_seconds
e2e_request_latency_seconds swap_tokens_per_second memory_bytes
spec_decode_num_draft_tokens spec_decode_num_accepted_tokens
""".split()


def test_metrics_are_complete_and_served_to_prometheus(llm):
    run(llm, prompts_of([10]), SamplingParams(temperature=1.0, n=3, max_tokens=3, ignore_eos=True))
    with llm.start([1, 2, 3, 4, 5]):
        metrics = llm.get_metrics()
        assert metrics["num_requests_held"] == 1
    assert set(METRICS) == set(metrics)
    assert set(metrics["memory_bytes"]) == {
        "weights", "kv_in_use", "kv_cached", "kv_free", "swap", "temporary",
    }  # fmt: skip
    with llm.start_metrics_server() as server:
        text = urllib.request.urlopen(server.url, timeout=10).read().decode()
    for name in METRICS:
        assert f"paged_jax:{name}" in text, name
    assert f"paged_jax:generation_tokens_total {float(metrics['generation_tokens'])}" in text
    assert 'paged_jax:prefix_cache_hits_by_tier_total{tier="host"} 0.0' in text
    check_idle(llm)
