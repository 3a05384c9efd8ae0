"""A published comparison of allocators, run again: its figures beside ours.

The guide ("PagedAttention Explained: How vLLM Pages the KV Cache to Stop Memory Waste") states its
memory and its traffic in words only: 60 GiB, 128 KiB a token, 8,192 tokens at most; 3,000 chats, of
886 tokens in the median and 7,067 at most; every step takes as long, and a prefill none. The
lengths here are chosen to agree with those words, and with what its figures say between the lines:
about 3.2 million tokens in all, and about 1.02 million output tokens (its cost a million, times its
hours). Prompt and output are drawn apart from each other: were the output a fixed share of a chat,
long chats would stay longer and 380, not 498, would fit.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterable, Sequence

from paged_jax.config import SchedulerConfig
from paged_jax.simulate.device_model import LLAMA_3_8B, MODELS
from paged_jax.simulate.loop import simulate
from paged_jax.simulate.results import Results
from paged_jax.simulate.step_time import ConstantStepTime
from paged_jax.simulate.traffic import ChatTraffic

GIB = 2**30
POOL_BYTES = 60 * GIB
MAX_TOKENS = 8192
STEP_SECONDS = 0.025
PRICE_AN_HOUR = 250.0

_PREEMPTIONS = (
    "what preemption loses hangs on how the queue admits, which the guide does not say. Its "
    "victims lost 286 tokens each, and a prompt has 713 on average: so they were short chats. A "
    "queue in which a short chat passes a long one that does not fit, that leaves some 26 blocks "
    "free, and whose victim is the last to have come, gives 540 to 600 preemptions of 280 to 300 "
    "tokens. Here, as in vLLM, the queue is strict and the victim the last that was admitted: it "
    "had just been given room for its whole prompt, so that 700 to 800 are lost, fewer times, "
    "about 11 of them its own output"
)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A figure of the guide and ours.

    Attributes:
      theirs: as published.
      ours: of each draw of the traffic; a single one where nothing is drawn.
      note: why they differ, where they do.
    """

    name: str
    theirs: float
    ours: tuple[float, ...]
    note: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.ours)

    @property
    def difference(self) -> float:
        """Of our median, relative to the guide's figure."""
        return self.median / self.theirs - 1


def config_of(block_size: int) -> SchedulerConfig:
    """The guide's limits: no prefix cache, and no limit but memory on what a step takes."""
    return SchedulerConfig(
        num_blocks=POOL_BYTES // (LLAMA_3_8B.bytes_a_token * block_size) + 1,
        block_size=block_size,
        max_model_len=MAX_TOKENS,
        max_num_seqs=4096,
        max_num_batched_tokens=2**40,
        enable_prefix_caching=False,
        preemption_mode="recompute",
    )


def run_guide(allocator: str, *, block_size: int = 16, seed: int = 0) -> Results:
    """One of the guide's runs on one draw of its traffic."""
    traffic = ChatTraffic(num_requests=3000, max_total_tokens=MAX_TOKENS, seed=seed)
    step_time = ConstantStepTime(STEP_SECONDS)
    return simulate(traffic, config_of(block_size), step_time, allocator=allocator)


def arithmetic() -> list[Comparison]:
    """What needs no simulation: bytes and blocks, of the guide and of the paper it explains."""
    paper = MODELS["opt-13b"].bytes_a_token
    token = LLAMA_3_8B.bytes_a_token
    return [
        Comparison("bytes a token", 131_072, (token,)),
        Comparison("GiB a request of 8,192 tokens", 1.0, (token * 8192 / GIB,)),
        Comparison("blocks of 16 in 60 GiB", 30_720, (POOL_BYTES // (token * 16),)),
        Comparison("paper's 13B model: bytes a token", 819_200, (paper,)),
        Comparison("paper's 13B model: GiB of 2,048 tokens", 1.56, (paper * 2048 / GIB,)),
    ]


def compare_guide(seeds: Iterable[int] = (0, 1, 2)) -> list[Comparison]:
    """All of the guide's simulated figures beside ours, a draw of the traffic for each seed."""
    seeds = list(seeds)
    lengths = [_lengths(seed) for seed in seeds]
    reserve = [run_guide("reserve_max", seed=s) for s in seeds]
    oracle = [run_guide("oracle", seed=s) for s in seeds]
    paged = [run_guide("paged", seed=s) for s in seeds]
    large = [run_guide("paged", block_size=512, seed=s) for s in seeds]

    def each(name: str, theirs: float, runs: Sequence[Results], figure: Callable, note: str = ""):
        return Comparison(name, theirs, tuple(figure(run) for run in runs), note)

    return [
        Comparison(
            "chats: median tokens", 886, tuple(float(statistics.median(t)) for t in lengths)
        ),
        Comparison(
            "chats: longest", 7067, tuple(float(t[-1]) for t in lengths), "one draw of many"
        ),
        each("reserve_max: at once", 60, reserve, lambda r: r.peak_running),
        each("reserve_max: % of memory stored", 12.3, reserve, lambda r: _queued(r, "stored")),
        each("reserve_max: steps", 17_663, reserve, lambda r: r.totals.num_steps),
        each("reserve_max: cost a million", 30, reserve, _cost),
        each("oracle: % free while some wait", 13.3, oracle, lambda r: _queued(r, "free")),
        each("oracle: steps without a gap", 2630, oracle, lambda r: r.totals.fragmented_steps),
        each("paged: at once, on average", 498, paged, lambda r: r.queued.means()["running"]),
        each("paged: steps", 3334, paged, lambda r: r.totals.num_steps),
        each("paged: cost a million", 5.7, paged, _cost),
        each("paged: preemptions", 522, paged, lambda r: r.totals.num_preemptions, _PREEMPTIONS),
        each("paged: recomputed", 149_240, paged, lambda r: r.totals.recomputed, _PREEMPTIONS),
        each("paged: unused in a last block", 7.4, paged, lambda r: r.unused_last_block),
        each("block 512: unused in a last block", 252.7, large, lambda r: r.unused_last_block),
        each("block 512: % reserved but empty", 20.2, large, lambda r: _queued(r, "internal")),
        each("block 512: at once, on average", 397, large, lambda r: r.queued.means()["running"]),
    ]


def _lengths(seed: int) -> list[int]:
    """Tokens of each chat, prompt and output, the shortest first."""
    chats = ChatTraffic(num_requests=3000, max_total_tokens=MAX_TOKENS, seed=seed)
    return sorted(chat.num_prompt_tokens + chat.num_output_tokens for chat in chats)


def _queued(results: Results, name: str) -> float:
    """A share of memory, averaged over the steps that left requests waiting, in percent."""
    return 100 * results.queued.means()[name]


def _cost(results: Results) -> float:
    return results.cost_a_million_tokens(PRICE_AN_HOUR)
