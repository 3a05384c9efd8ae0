"""The arrays of a step, against loops that fill them in token by token and row by row."""

import dataclasses
from array import array
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paged_jax.batch import Buckets, make_batch, make_sampling
from paged_jax.batch_builder import build_steps
from paged_jax.config import SchedulerConfig
from paged_jax.request import Request, RequestStatus
from paged_jax.sampling import MAX_MASKED_TOKENS
from paged_jax.sampling_params import SamplingParams
from paged_jax.scheduler import Scheduler

EOS = 2
BLOCK_SIZE = 4
CONFIG = SchedulerConfig(
    num_blocks=21,
    block_size=BLOCK_SIZE,
    max_model_len=60,
    max_num_seqs=8,
    max_num_batched_tokens=24,
    preemption_mode="swap",
    num_host_blocks=30,
    enable_host_prefix_cache=True,
)
BUCKETS = Buckets.choose(
    max_num_seqs=CONFIG.max_num_seqs,
    max_num_batched_tokens=CONFIG.max_num_batched_tokens,
    max_model_len=CONFIG.max_model_len,
    block_size=BLOCK_SIZE,
)

PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.7, 2.0]),
    top_k=st.sampled_from([0, 5, 2**40]),
    top_p=st.sampled_from([0.1, 1.0, 1e-300]),
    min_p=st.sampled_from([0.0, 0.05]),
    max_tokens=st.integers(1, 20),
    logprobs=st.sampled_from([None, 0, 3]),
    prompt_logprobs=st.sampled_from([None, 2]),
)
# Few prompts and few tokens: prefixes are hit, and blocks of equal content folded.
PROMPTS = st.tuples(st.integers(1, 40), st.integers(0, 1)).map(
    lambda drawn: [10 + (i * drawn[1]) % 3 for i in range(drawn[0])]
)
SEEDS = st.sampled_from([0, 7, 2**63 + 5, 2**64 - 1])


def expected_batch(step, shape):
    """The fields of the StepBatch of a step."""
    tokens, positions, slots, starts, lens, tables, rows = [], [], [], [0], [], [], []
    for chunk in step.chunks:
        request = chunk.request
        for position in range(chunk.start, chunk.end):
            block = request.block_ids[position // BLOCK_SIZE]
            tokens.append(request.token_ids[position])
            positions.append(position)
            slots.append(block * BLOCK_SIZE + position % BLOCK_SIZE)
        rows += range(len(tokens) - chunk.num_rows, len(tokens))
        if chunk.num_tokens:
            starts.append(len(tokens))
            lens.append(chunk.end)
            tables.append(list(request.block_ids))
    padded = np.zeros((shape.num_seqs, BUCKETS.table_width), np.int32)
    for row, table in zip(padded, tables, strict=False):
        row[: len(table)] = table
    starts += [len(tokens)] * (shape.num_seqs + 1 - len(starts))
    return {
        "token_ids": pad(tokens, shape.num_tokens),
        "positions": pad(positions, shape.num_tokens),
        "slot_mapping": pad(slots, shape.num_tokens),
        "query_starts": np.array(starts, np.int32),
        "kv_lens": pad(lens, shape.num_seqs),
        "block_tables": padded,
        "num_seqs": np.int32(len(lens)),
        "sample_rows": pad(rows, shape.num_seqs),
    }


def expected_sampling(step, shape):
    """The fields of the SamplingBatch of a step."""
    rows = []
    for chunk in step.chunks:
        request, params = chunk.request, chunk.request.params
        masked = []
        if request.num_output_tokens < params.min_tokens:
            masked = list({EOS, *params.stop_token_ids})
        for position in range(chunk.end - chunk.num_rows + 1, chunk.end + 1):
            is_known = request.score_start is not None and position < request.num_tokens
            wanted = params.prompt_logprobs if is_known else params.logprobs
            row = {
                "temperature": np.float32(params.temperature),
                "top_k": min(params.top_k, 2**31 - 1),
                "top_p": max(np.float32(params.top_p), np.float32(2.0**-120)),
                "min_p": np.float32(params.min_p),
                "seed": [request.seed % 2**32, request.seed // 2**32],
                "positions": position,
                "masked_tokens": masked + [-1] * (MAX_MASKED_TOKENS - len(masked)),
                "num_logprobs": -1 if wanted is None else wanted,
                "forced_tokens": request.token_ids[position] if is_known else -1,
            }
            rows.append(row)
    padding = dict.fromkeys(rows[0], 0) | {"top_p": 1, "num_logprobs": -1, "forced_tokens": -1}
    padding |= {"seed": [0, 0], "masked_tokens": [-1] * MAX_MASKED_TOKENS}
    rows += [padding] * (shape.num_seqs - len(rows))
    return {name: np.array([row[name] for row in rows]) for name in padding}


def pad(values, size):
    return np.array(values + [0] * (size - len(values)), np.int32)


def check_equal(made, expected):
    assert set(vars(made)) == set(expected)
    for name, values in expected.items():
        np.testing.assert_array_equal(getattr(made, name), values, err_msg=name)


def run_step(scheduler: Scheduler, sample: Callable[[], int]) -> list:
    """A step of the scheduler, with its arrays checked; gives them with copies of them."""
    step = scheduler.schedule()
    if not step.chunks:
        return []
    shape, [(batch, sampling)] = build_steps([step], BUCKETS, block_size=BLOCK_SIZE)
    check_equal(batch, expected_batch(step, shape))
    check_equal(sampling, expected_sampling(step, shape))
    scheduler.update(step, [sample() for _ in step.chunks])
    scheduler.check_integrity()
    fields = [*vars(batch).values(), *vars(sampling).values()]
    return [(field, field.copy()) for field in fields]


def add_family(scheduler: Scheduler, draw, name: str) -> None:
    """A request and perhaps some that fork from it, of a held sequence or of a prompt."""
    prompt, params = draw(PROMPTS), draw(PARAMS)
    anchor = draw(st.sampled_from([None, *scheduler.held.values()]))
    if anchor is not None:
        prompt = [*anchor.token_ids, 9]
    if draw(st.booleans()):
        stop_ids = draw(st.sampled_from([(), (13, 14)]))
        num_tokens = min(3, params.max_tokens)
        params = dataclasses.replace(params, min_tokens=num_tokens, stop_token_ids=stop_ids)
    if not 0 < len(prompt) < CONFIG.max_model_len:
        return
    is_scored = params.prompt_logprobs is not None and len(prompt) > 1 and anchor is None
    family: list[Request] = []
    for i in range(draw(st.integers(1, 3))):
        request = Request(
            f"{name}/{i}",
            prompt,
            params,
            max_model_len=CONFIG.max_model_len,
            eos_token_ids=(EOS,),
            seed=draw(SEEDS),
            score_start=draw(st.integers(1, len(prompt) - 1)) if is_scored and i == 0 else None,
            prefill_only=not family and anchor is not None and draw(st.booleans()),
            hold=draw(st.booleans()),
            fork_of=family[0] if family else anchor,
        )
        if family and family[0].prefill_only:
            break
        family.append(request)
    family[0].children.extend(family[1:])
    scheduler.add(family[0])


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_arrays_of_random_schedules_equal_plain_loops(data):
    draw = data.draw
    scheduler = Scheduler(CONFIG)
    given_away = []
    for i in range(draw(st.integers(5, 40))):
        action = draw(st.sampled_from(["step"] * 5 + ["add"] * 2 + ["preempt", "abort", "release"]))
        running = [r for r in scheduler.running if r.status is RequestStatus.RUNNING]
        if action == "step":
            made = run_step(scheduler, lambda: draw(st.integers(9, 11)))
            # A device may still read the arrays of the step before: they are as they were.
            for field, copy in given_away:
                np.testing.assert_array_equal(field, copy)
            given_away = made
        elif action == "add":
            add_family(scheduler, draw, str(i))
        elif action == "preempt" and running:
            scheduler.preempt(draw(st.sampled_from(running)), draw(st.sampled_from(["swap", None])))
        elif action == "abort" and scheduler.requests:
            scheduler.abort(draw(st.sampled_from(list(scheduler.requests))))
        elif action == "release" and scheduler.held:
            scheduler.release(draw(st.sampled_from(list(scheduler.held.values()))))


def test_a_scored_prompt_in_chunks_of_24_and_6_tokens_and_a_decode():
    scheduler = Scheduler(CONFIG)
    params = SamplingParams(max_tokens=2, prompt_logprobs=1, logprobs=3)
    prompt = list(range(10, 40))
    scheduler.add(Request("a", prompt, params, max_model_len=60, score_start=27))
    assert [run_step(scheduler, lambda: 9) != [] for _ in range(4)] == [True, True, True, False]


def test_the_public_functions_give_the_same_arrays():
    scheduler = Scheduler(CONFIG)
    for name, prompt, seed in (("a", [3, 4, 5, 6, 7], 1), ("b", [8, 9], 2**40)):
        params = SamplingParams(temperature=0.5, top_p=0.9, logprobs=2)
        scheduler.add(Request(name, prompt, params, max_model_len=60, seed=seed))
    step = scheduler.schedule()
    shape, [(batch, sampling)] = build_steps([step], BUCKETS, block_size=BLOCK_SIZE)
    requests = [chunk.request for chunk in step.chunks]
    plain = make_batch(
        [request.token_ids for request in requests],
        [0, 0],
        [list(request.block_ids) for request in requests],
        block_size=BLOCK_SIZE,
        num_tokens=shape.num_tokens,
        num_seqs=shape.num_seqs,
        table_width=BUCKETS.table_width,
    )
    check_equal(batch, vars(plain))
    params, seeds = [r.params for r in requests], [r.seed for r in requests]
    check_equal(sampling, vars(make_sampling(params, seeds, [5, 2], num_seqs=shape.num_seqs)))


@pytest.mark.parametrize("as_table", [list, tuple, np.array, lambda t: array("q", t)])
def test_tables_of_any_kind_of_integers(as_table):
    batch = make_batch([[1], [2]], [5, 0], [as_table([3, 5]), as_table([2])], block_size=4)
    np.testing.assert_array_equal(batch.block_tables, [[3, 5], [2, 0]])
    np.testing.assert_array_equal(batch.slot_mapping, [21, 8])


def test_an_empty_batch_is_all_padding():
    batch = make_batch([], [], [], block_size=4, num_tokens=2, num_seqs=2, table_width=3)
    assert batch.num_seqs == 0 and not any(np.any(field) for field in vars(batch).values())


def test_masked_tokens_of_some_rows():
    params = [SamplingParams()] * 3
    batch = make_sampling(params, [0, 1, 2], [4, 5, 6], masked_tokens=[[], [7, 8], []], num_seqs=4)
    expected = np.full((4, MAX_MASKED_TOKENS), -1)
    expected[1, :2] = 7, 8
    np.testing.assert_array_equal(batch.masked_tokens, expected)
    with pytest.raises(ValueError, match="3, 2 and 3 entries"):
        make_sampling(params, [0, 1], [4, 5, 6])
