"""The simulator and the engine make the same schedules of the same requests, step by step."""

import numpy as np
import pytest
from tiny_engine import tiny_llm

from paged_jax import SamplingParams
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
                "used blocks": self.scheduler.blocks.pool.num_used_blocks,
            }
        )


def engine_steps(llm, prompts, lengths):
    scheduler = llm.engine.scheduler
    recorder, schedule = Recorder(scheduler), scheduler.schedule

    def noted():
        step = schedule()
        recorder.note(step)
        return step

    scheduler.schedule = noted
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


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"enable_prefix_caching": False},
        {"preemption_mode": "swap", "swap_space_bytes": 200_000},
    ],
    ids=["recompute", "no cache", "swap"],
)
def test_the_simulator_schedules_as_the_engine_does(options):
    # 40 blocks of 4 tokens for 24 requests of up to 40: they are preempted, and share prefixes.
    rng = np.random.default_rng(3)
    shared = [rng.integers(0, 256, 13).tolist() for _ in range(2)]
    prompts = [
        [*(shared[i % 3] if i % 3 < 2 else []), *rng.integers(0, 256, n).tolist()]
        for i, n in enumerate(rng.integers(3, 20, 24))
    ]
    lengths = rng.integers(2, 20, 24).tolist()
    llm = tiny_llm(
        num_gpu_blocks_override=41, max_num_seqs=8, max_model_len=64, warmup=False, **options
    )
    ours = simulated_steps(llm.engine.config, prompts, lengths)
    theirs = engine_steps(llm, prompts, lengths)
    for i, (mine, engine) in enumerate(zip(ours, theirs, strict=True)):
        assert mine == engine, f"step {i}"
    assert any(step["preempted"] for step in ours), "nobody was preempted"
    hits = any(start for step in ours for _, start, _ in step["admitted"])
    assert hits or not llm.engine.config.enable_prefix_caching, "nothing was shared"
    if options.get("preemption_mode") == "swap":
        assert any(sum(step["swaps"]) for step in ours)
