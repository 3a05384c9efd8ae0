"""Decoding ahead of what was read changes no output, and loses nothing to ends on the way."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from tiny_engine import EOS, GREEDY, check_idle, prompts_of, run, tiny_llm, tiny_model, tokens_of

from paged_jax import LLM, SamplingParams, sizing
from paged_jax.config import EngineConfig, SchedulerConfig
from paged_jax.decode_rows import DecodeRows, StopRules, advance, step_of
from paged_jax.dispatch import Flight
from paged_jax.request import Request
from paged_jax.scheduler import Scheduler
from paged_jax.sharding import make_mesh

LOOKAHEADS = [2, 4, 8]


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model()


@pytest.fixture(scope="module")
def engines(model) -> dict[int, LLM]:
    """By lookahead; pools so small that the mix below is preempted."""
    return {
        lookahead: tiny_llm(
            model, decode_lookahead=lookahead, warmup=False, num_gpu_blocks_override=40
        )
        for lookahead in (1, *LOOKAHEADS)
    }


def mix(count: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Requests of every kind: lengths, seeds, stops of each sort, logprobs, several samples."""
    prompts = prompts_of([1 + 5 * i % 23 for i in range(count)], seed=count)
    kinds: list[dict[str, Any]] = [
        dict(temperature=0, max_tokens=17, ignore_eos=True),
        dict(temperature=1.0, seed=3, max_tokens=30),
        dict(temperature=0, max_tokens=21, stop_token_ids=list(range(0, 256, 9))),
        dict(temperature=0.8, top_k=5, seed=4, max_tokens=9, logprobs=3),
        dict(temperature=0.9, seed=5, max_tokens=25, min_tokens=6, stop_token_ids=[1, 2, 3, 4, 5]),
        dict(temperature=1.0, seed=6, max_tokens=28, stop=["a", "7", "Q"]),
        dict(temperature=1.0, seed=7, max_tokens=1),
        dict(temperature=1.0, seed=8, max_tokens=12, n=3),
    ]
    return prompts, [SamplingParams(**kinds[i % len(kinds)]) for i in range(count)]


def outcome(output) -> list[tuple]:
    return [
        (o.token_ids, o.text, o.finish_reason, o.stop_reason, o.cumulative_logprob)
        for o in output.outputs
    ]


@pytest.mark.parametrize("lookahead", LOOKAHEADS)
def test_every_kind_of_request_gives_the_same(engines, lookahead):
    prompts, params = mix(24)
    plain, ahead = engines[1], engines[lookahead]
    before = ahead.get_metrics()["num_preemptions"]
    expected = run(plain, prompts, params)
    assert {o.outputs[0].finish_reason for o in expected} == {"stop", "length"}
    for ours, theirs in zip(run(ahead, prompts, params), expected, strict=True):
        for a, b in zip(outcome(ours), outcome(theirs), strict=True):
            assert a[:4] == b[:4]
            assert a[4] == b[4] if b[4] is None else a[4] == pytest.approx(b[4], abs=1e-3)
    assert ahead.get_metrics()["num_preemptions"] > before
    assert ahead.get_metrics()["generation_tokens"] > 0
    check_idle(ahead)


@pytest.mark.parametrize("lookahead", LOOKAHEADS)
def test_calls_are_as_few_as_the_lookahead_says(model, lookahead):
    llm = tiny_llm(model, decode_lookahead=lookahead, warmup=False)
    calls = count_calls(llm)
    run(llm, prompts_of([5, 6, 7]), SamplingParams(temperature=0, max_tokens=33, ignore_eos=True))
    # The first token comes from the prefill.
    assert len(calls) == 32 // max(lookahead // 2, 1)
    check_idle(llm)


def count_calls(llm: LLM) -> list[int]:
    """A list that grows by each call's number of steps."""
    calls, run_call = [], llm.engine.runner.run

    def counting(shape, call, moves):
        if shape.decode_only:
            calls.append(int(call.num_steps))
        return run_call(shape, call, moves)

    llm.engine.runner.run = counting  # pyright: ignore[reportAttributeAccessIssue]
    return calls


def test_a_call_is_dispatched_before_the_last_ones_tokens_are_read(model, monkeypatch):
    llm = tiny_llm(model, decode_lookahead=4, warmup=False)
    calls = count_calls(llm)
    read = []
    to_host = Flight.to_host
    monkeypatch.setattr(
        Flight, "to_host", lambda flight: (read.append(len(calls)), to_host(flight))[1]
    )
    run(llm, prompts_of([5]), SamplingParams(temperature=0, max_tokens=9, ignore_eos=True))
    # The prefill; then four calls of two steps: at each reading one more is on its way.
    assert read == [0, 2, 3, 4, 4]


def test_a_stop_ends_its_row_on_the_device(model):
    """The row stands where its last token does, whatever steps and calls come after it."""
    llm = tiny_llm(model, decode_lookahead=8, warmup=False)
    plain = tiny_llm(model, decode_lookahead=1, warmup=False)
    (prompt,) = prompts_of([6], seed=3)
    sampled = SamplingParams(temperature=1.0, seed=2, max_tokens=40, ignore_eos=True)
    tokens = tokens_of(run(plain, [prompt], sampled))[0]
    stop = next(token for i, token in enumerate(tokens) if i > 5 and token not in tokens[:i])
    params = dataclasses.replace(sampled, stop_token_ids=[stop])
    rows_after, run_call = [], llm.engine.runner.run

    def noting(shape, call, moves):
        rows, output = run_call(shape, call, moves)
        if rows is not None:
            rows_after.append(jax.tree.map(np.asarray, rows))
        return rows, output

    llm.engine.runner.run = noting  # pyright: ignore[reportAttributeAccessIssue]
    (output,) = run(llm, [prompt], params)
    assert output.outputs[0].token_ids == tokens[: tokens.index(stop) + 1]
    assert output.outputs[0].stop_reason == stop
    last = rows_after[-1]
    assert last.num_left[0] == 0 and last.token_ids[0] == stop
    assert last.positions[0] == len(prompt) + tokens.index(stop)
    check_idle(llm)


def test_new_arrivals_join_at_once_and_aborts_take_effect(engines):
    ahead, plain = engines[8], engines[1]
    prompts = prompts_of([4, 9, 13, 3], seed=9)
    params = SamplingParams(temperature=0.9, seed=1, max_tokens=40, ignore_eos=True)
    expected = tokens_of(run(plain, prompts, params))
    engine = ahead.engine
    outputs: dict[str, Any] = {}

    def step() -> None:
        for output in engine.step():
            outputs[output.request_id] = output
        engine.scheduler.check_integrity()

    engine.add_request("0", prompts[0], params)
    engine.add_request("gone", prompts[3], params)
    for _ in range(3):
        step()
    engine.add_request("1", prompts[1], params)
    step()  # reads what is in flight
    step()
    assert len(engine.scheduler.running) == 3
    aborted = engine.abort("gone")
    assert aborted is not None
    given = aborted.outputs[0].token_ids
    assert given == expected[3][: len(given)] and len(given) < 40
    engine.add_request("2", prompts[2], params)
    while engine.has_unfinished():
        step()
    assert [outputs[str(i)].outputs[0].token_ids for i in range(3)] == expected[:3]
    check_idle(ahead)


def test_aborting_all_leaves_nothing_behind(engines):
    engine = engines[8].engine
    engine.add_request("a", [1, 2, 3], GREEDY)
    for _ in range(2):
        engine.step()
    engine.abort("a")
    assert not engine.has_unfinished()
    check_idle(engines[8])
    # What is in flight is read and dropped, whoever comes next.
    assert tokens_of(run(engines[8], prompts_of([7]))) == tokens_of(
        run(engines[1], prompts_of([7]))
    )


@pytest.mark.parametrize("at", [1, 2, 4])
def test_a_fault_loses_and_changes_nothing(model, monkeypatch, at):
    llm = tiny_llm(model, decode_lookahead=4, warmup=False)
    plain = tiny_llm(model, decode_lookahead=1, warmup=False)
    prompts = prompts_of([5, 8], seed=at)
    to_host, reads = Flight.to_host, []

    def failing(flight):
        reads.append(1)
        if len(reads) == at:
            raise RuntimeError("the device is gone")
        return to_host(flight)

    for i, prompt in enumerate(prompts):
        llm.engine.add_request(str(i), prompt, GREEDY)
    monkeypatch.setattr(Flight, "to_host", failing)
    outputs = {}
    failures = 0
    while llm.engine.has_unfinished():
        try:
            for output in llm.engine.step():
                outputs[output.request_id] = output
        except RuntimeError:
            failures += 1
    assert failures == 1
    ours = [outputs[str(i)] for i in range(2)]
    assert tokens_of(ours) == tokens_of(run(plain, prompts))
    check_idle(llm)


def test_a_conversation_hits_as_many_tokens(engines):
    """Blocks that were filled ahead are cached like those filled step by step."""
    hits = []
    for lookahead in (1, 8):
        llm = engines[lookahead]
        assert llm.reset_prefix_cache()
        before = llm.engine.scheduler.blocks.stats.num_hit_tokens
        (first,) = run(llm, [list(range(9))], SamplingParams(temperature=0, max_tokens=30))
        history = [*range(9), *first.outputs[0].token_ids]
        run(llm, [[*history, 5, 6]], SamplingParams(temperature=0, max_tokens=3))
        hits.append(llm.engine.scheduler.blocks.stats.num_hit_tokens - before)
    assert hits[0] == hits[1] > 30


def make_scheduler(*, num_blocks: int, max_num_seqs: int) -> Scheduler:
    config = SchedulerConfig(
        num_blocks=num_blocks,
        block_size=4,
        max_model_len=32,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=32,
        decode_lookahead=16,
    )
    return Scheduler(config)


def test_nobody_is_preempted_for_a_longer_call():
    """Three sequences in a pool that holds them just so: calls shrink, and none is preempted."""
    scheduler = make_scheduler(num_blocks=10, max_num_seqs=3)
    for i in range(3):
        prompt = [10 * i, 1, 2, 3, 4, 5]
        scheduler.add(Request(str(i), prompt, SamplingParams(max_tokens=6), max_model_len=32))
    steps = []
    while scheduler.has_unfinished():
        step = scheduler.schedule()
        steps.append(step.num_decode_steps)
        one = step.num_decode_steps == 1
        scheduler.update(step, [7 if one else [7] * step.num_decode_steps for _ in step.chunks])
        scheduler.check_integrity()
    assert steps == [1, 5]
    assert scheduler.num_preemptions == 0


def test_a_wanted_seat_is_not_decoded_past():
    scheduler = make_scheduler(num_blocks=50, max_num_seqs=2)
    for i, max_tokens in enumerate([4, 20, 20]):
        params = SamplingParams(max_tokens=max_tokens)
        scheduler.add(Request(str(i), [i, 1, 2], params, max_model_len=32))
    scheduler.update(scheduler.schedule(), [7, 7])
    step = scheduler.schedule()
    assert step.num_decode_steps == 3  # of request "0", for whose seat "2" waits
    assert scheduler.extend(step) is None
    scheduler.update(step, [[7] * 3, [7] * 3])
    step = scheduler.schedule()
    assert [chunk.request.request_id for chunk in step.chunks] == ["1", "2"]


def test_pool_stays_where_it_is_and_nothing_is_compiled_anew(model):
    llm = tiny_llm(model, decode_lookahead=6)
    layers = llm.engine.runner.pool.layers
    addresses = [layer.unsafe_buffer_pointer() for layer in layers]
    with jax.no_tracing():
        run(llm, *mix(16))
    layers = llm.engine.runner.pool.layers
    assert [layer.unsafe_buffer_pointer() for layer in layers] == addresses
    check_idle(llm)


def test_rows_that_ended_write_to_the_null_block():
    rows = DecodeRows(
        token_ids=np.array([5, 6, 7, 0], np.int32),
        positions=np.array([9, 3, 4, -1], np.int32),
        num_left=np.array([2, 0, 1, 0], np.int32),
    )
    tables = np.arange(1, 13, dtype=np.int32).reshape(4, 3)
    step = step_of(jax.tree.map(jax.numpy.asarray, rows), tables, block_size=4)
    assert step.slot_mapping.tolist() == [3 * 4 + 1, 0, 8 * 4, 0]
    assert step.kv_lens.tolist() == [10, 1, 5, 0]
    assert step.query_starts.tolist() == [0, 1, 2, 3, 3]
    assert step.block_tables[1].tolist() == [0, 0, 0]
    stops = StopRules(
        token_ids=np.array([[EOS, 8], [-1, -1], [EOS, -1], [-1, -1]], np.int32),
        first_positions=np.array([11, 0, 0, 0], np.int32),
    )
    after = advance(rows, np.array([8, 8, EOS, 0], np.int32), stops)
    # Row 0 draws a stop id at position 10, one too early for it to stop; row 2 ends.
    assert after.num_left.tolist() == [1, 0, 0, 0]
    assert after.positions.tolist() == [10, 3, 5, -1]
    assert after.token_ids.tolist() == [8, 6, EOS, 0]


def test_bad_values_are_named(model):
    with pytest.raises(ValueError, match="decode_lookahead=0"):
        tiny_llm(model, decode_lookahead=0)
    assert (
        dataclasses.replace(
            SchedulerConfig(
                num_blocks=9, max_model_len=9, max_num_seqs=1, max_num_batched_tokens=9
            ),
            decode_lookahead=7,
        ).num_decode_steps
        == 3
    )


def test_the_engines_own_choice(model, monkeypatch):
    """Eight tokens, on a CPU two if the weights that a device holds are many."""
    num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), model.params)

    def chosen(params, limit: int, **options: Any) -> int:
        monkeypatch.setattr(sizing, "CPU_LOOKAHEAD_BYTES", limit)
        config = EngineConfig(num_gpu_blocks_override=50, max_model_len=64, **options)
        return sizing.resolve(config, model.config, params, dtype=np.float32)[0].decode_lookahead

    for params in (model.params, abstract):
        assert chosen(params, num_bytes) == 8
        assert chosen(params, num_bytes - 1) == 2
    assert chosen(model.params, num_bytes, speculation="prompt_lookup") == 1
    assert chosen(model.params, 0, decode_lookahead=5) == 5
    # Over a mesh it is what each device holds that takes time to read, in its stored form.
    cut = NamedSharding(make_mesh(2, 4), PartitionSpec("tensor"))
    quarters = jax.ShapeDtypeStruct((8, 10), np.int8, sharding=cut)
    assert (
        sizing.device_bytes([quarters, jax.device_put(np.zeros((4, 6), np.int16), cut)]) == 20 + 12
    )
