"""The simulator and the engine make the same schedules of the same requests, step by step.

Engines that decode ahead have all programs from the start: which call follows hangs on what is
ready.
"""

import numpy as np
import pytest
from tiny_engine import tiny_llm

from paged_jax import LLM, SamplingParams
from paged_jax.simulate import ConstantStepTime, Replica, TraceRequest


class Recorder:
    """What each step does: its chunks, who joins and who is preempted, and the blocks in use."""

    def __init__(self, scheduler):
        self.scheduler = scheduler
        self.numbers: dict[str, int] = {}
        self.steps = []

    def number(self, request):
        """Requests by the order of their first admission: the engine has names of its own."""
        return self.numbers.setdefault(request.request_id, len(self.numbers))

    def note(self, step):
        self.steps.append(
            {
                "chunks": [(self.number(r), start, num) for r, start, num, _ in step.chunks],
                "admitted": [
                    (self.number(c.request), c.start, c.request.num_cached_tokens)
                    for c in step.admitted
                ],
                "preempted": [self.number(r) for r in step.preempted],
                "swaps": (len(step.moves.swap_out), len(step.moves.swap_in)),
                "decode steps": step.num_decode_steps,
                "used blocks": self.scheduler.blocks.pool.num_used_blocks,
            }
        )


def engine_steps(llm, prompts, lengths):
    scheduler = llm.engine.scheduler
    recorder = Recorder(scheduler)

    def noted(make):
        def make_and_note(*args):
            step = make(*args)
            if step is not None:
                recorder.note(step)
            return step

        return make_and_note

    scheduler.schedule, scheduler.extend = noted(scheduler.schedule), noted(scheduler.extend)
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lengths]
    llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    return recorder.steps


def simulated_steps(config, prompts, lengths):
    replica = Replica(config, ConstantStepTime(1.0), on_step=lambda step: recorder.note(step))
    recorder = Recorder(replica.scheduler)
    for prompt, length in zip(prompts, lengths, strict=True):
        replica.offer(TraceRequest(0.0, len(prompt), length, token_ids=prompt))
    replica.finish()
    return recorder.steps


def compare(llm, prompts, lengths):
    """The steps, equal in the engine and the simulator."""
    ours = simulated_steps(llm.engine.config, prompts, lengths)
    theirs = engine_steps(llm, prompts, lengths)
    for i, (mine, engine) in enumerate(zip(ours, theirs, strict=True)):
        assert mine == engine, f"step {i}"
    return ours


def has_hits(steps):
    return any(start for step in steps for _, start, _ in step["admitted"])


def requests_of(
    num_requests: int,
    *,
    shared: int,
    prompt: tuple[int, int],
    output: tuple[int, int],
    vocabulary: int = 256,
):
    """Prompts and output lengths, drawn; two of three prompts begin with one of two prefixes."""
    rng = np.random.default_rng(3)
    prefixes = [rng.integers(0, vocabulary, shared).tolist() for _ in range(2)]
    prompts = [
        [*(prefixes[i % 3] if i % 3 < 2 else []), *rng.integers(0, vocabulary, n).tolist()]
        for i, n in enumerate(rng.integers(*prompt, num_requests))
    ]
    return prompts, rng.integers(*output, num_requests).tolist()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"enable_prefix_caching": False},
        {"preemption_mode": "swap", "swap_space_bytes": 200_000},
    ],
    ids=["recompute", "no cache", "swap"],
)
@pytest.mark.parametrize("lookahead", [1, 4, 8])
def test_the_simulator_schedules_as_the_engine_does(options, lookahead):
    # 40 blocks of 4 tokens for 24 requests of up to 50: they are preempted, and share prefixes.
    llm = tiny_llm(
        num_gpu_blocks_override=41,
        max_num_seqs=8,
        max_model_len=64,
        decode_lookahead=lookahead,
        **options,
    )
    steps = compare(llm, *requests_of(24, shared=13, prompt=(3, 20), output=(2, 20)))
    assert any(step["preempted"] for step in steps), "nobody was preempted"
    assert has_hits(steps) or not llm.engine.config.enable_prefix_caching, "nothing was shared"
    if options.get("preemption_mode") == "swap":
        assert any(sum(step["swaps"]) for step in steps)
    longest = max(step["decode steps"] for step in steps)
    assert longest == max(lookahead // 2, 1)


@pytest.mark.parametrize("lookahead", [4, 8])
def test_decoding_ahead_with_room(lookahead):
    # Ten seats, so that there are programs for 1, 8 and 10 rows, and a pool that suffices.
    llm = tiny_llm(max_num_seqs=10, decode_lookahead=lookahead)
    steps = compare(llm, *requests_of(16, shared=13, prompt=(3, 20), output=(5, 60)))
    calls = [step["decode steps"] for step in steps]
    assert calls.count(lookahead // 2) > 10
    assert 1 < min(count for count in calls if count > 1) < lookahead // 2 or lookahead == 4


@pytest.mark.once
@pytest.mark.parametrize("lookahead", [1, 8])
def test_the_schedules_of_the_demo_model(demo_model_path, lookahead):
    # 30 requests and 20 blocks of 16: three or four fit at a time.
    llm = LLM(
        demo_model_path,
        num_gpu_blocks_override=21,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        max_model_len=160,
        preemption_mode="recompute",
        decode_lookahead=lookahead,
        warmup=lookahead > 1,
    )
    requests = requests_of(30, shared=33, prompt=(3, 60), output=(4, 24), vocabulary=49_000)
    steps = compare(llm, *requests)
    assert sum(len(step["preempted"]) for step in steps) > 3
    assert has_hits(steps)
    assert sum(len(step["admitted"]) for step in steps) > 30
    if lookahead > 1:
        assert any(step["decode steps"] > 1 for step in steps)
