"""Answers before anything is bought: how many requests fit, in which blocks, and what they cost.

Most of it is arithmetic on lengths; what utilisation is safe hangs on how requests grow and end,
and is simulated. `scripts/simulate.py --scenario=plan` prints the answers. What a model's programs
take on hardware, which only its compiler knows, is none of them: `scripts/plan.py` compiles them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from paged_jax.config import SchedulerConfig
from paged_jax.simulate.device_model import ModelShape, StepWork
from paged_jax.simulate.loop import simulate
from paged_jax.simulate.report import text_table
from paged_jax.simulate.results import Results
from paged_jax.simulate.search import smallest
from paged_jax.simulate.step_time import StepTime
from paged_jax.simulate.studies import BLOCK_SIZES, limited_by_memory
from paged_jax.simulate.traffic import TraceRequest

# The share of a request's slots that may be empty in its last block.
ALLOWED_WASTE = 0.02
ALLOWED_RECOMPUTED = 0.01


@dataclasses.dataclass(frozen=True)
class BlockSizePlan:
    """What a block size does to requests of one length.

    Attributes:
      num_blocks: that the memory holds.
      num_requests: that fit at once, each as long as it gets.
      unused_tokens: room left in a request's last block, averaged over the steps of its output.
      waste: these, as a share of all slots that the request holds meanwhile.
    """

    block_size: int
    num_blocks: int
    num_requests: int
    unused_tokens: float
    waste: float


@dataclasses.dataclass(frozen=True)
class CapacityPlan:
    """What a device's KV memory can do for requests of one length.

    Attributes:
      bytes_a_token: of keys and values.
      prompt_tokens, output_tokens: of each request.
      reserved_requests: that fit if each reserves `max_model_len` slots in one piece.
      sizes: for each block size, the smallest first.
      block_size: the one to take: the largest that wastes at most `ALLOWED_WASTE`.
      requests_at_once: that fit with it, each half way through its output; as many run together
        where requests begin and end at all times.
      step_seconds, output_tokens_per_second: of steps in which so many run, each of which also
        computes the prompts of those that follow.
      cost_a_million_output_tokens: at the price; None without one.
    """

    bytes_a_token: int
    pool_bytes: int
    prompt_tokens: int
    output_tokens: int
    max_model_len: int
    reserved_requests: int
    sizes: tuple[BlockSizePlan, ...]
    block_size: int
    requests_at_once: int
    step_seconds: float | None = None
    output_tokens_per_second: float | None = None
    cost_a_million_output_tokens: float | None = None

    def text(self) -> str:
        """The answers, for a reader."""
        total = self.prompt_tokens + self.output_tokens
        rows = [["block size", "blocks", "requests at full length", "unused tokens", "waste"]]
        for size in self.sizes:
            rows.append(
                [
                    f"{size.block_size}" + (" *" if size.block_size == self.block_size else ""),
                    f"{size.num_blocks:,}",
                    f"{size.num_requests:,}",
                    f"{size.unused_tokens:.1f}",
                    f"{100 * size.waste:.1f}%",
                ]
            )
        lines = [
            f"{self.pool_bytes / 2**30:.1f} GiB of KV memory, {self.bytes_a_token:,} bytes a "
            f"token; requests of {self.prompt_tokens:,} + {self.output_tokens:,} = {total:,} "
            "tokens",
            "",
            text_table(rows),
            f"* the largest block that leaves at most {100 * ALLOWED_WASTE:.0f}% of a request's "
            "slots empty (the smallest, if none does); larger ones waste memory, smaller ones "
            "make longer tables",
            "",
            f"reserving {self.max_model_len:,} tokens for each, {self.reserved_requests:,} fit",
            f"paged, {self.requests_at_once:,} run at once on average",
        ]
        if self.step_seconds is not None:
            lines.append(
                f"a step then takes {1000 * self.step_seconds:.1f} ms: "
                f"{self.output_tokens_per_second:,.0f} output tokens a second"
            )
        if self.cost_a_million_output_tokens is not None:
            lines.append(f"a million output tokens cost {self.cost_a_million_output_tokens:.3f}")
        return "\n".join(lines)


def plan_capacity(
    model_shape: ModelShape,
    pool_bytes: int,
    *,
    prompt_tokens: int,
    output_tokens: int,
    max_model_len: int = 8192,
    block_sizes: Sequence[int] = BLOCK_SIZES,
    max_num_seqs: int | None = None,
    step_time: StepTime | None = None,
    price_an_hour: float | None = None,
) -> CapacityPlan:
    """How many requests of a length fit a memory, in which blocks, and what their tokens cost.

    Args:
      model_shape: what a token's keys and values weigh.
      pool_bytes: of the KV pool.
      prompt_tokens, output_tokens: of each request; at least 1 each.
      max_model_len: what a server without paging reserves for each.
      block_sizes: to compare.
      max_num_seqs: the most requests in a step; None for no limit but memory.
      step_time: how long a step takes; None for no answer on time and cost.
      price_an_hour: of the device; needs `step_time`.

    Raises:
      ValueError: a length or size is below 1, a request is longer than `max_model_len` or than the
        memory, or there is a price and no step time.
    """
    sizes = sorted(block_sizes)
    named = {"prompt_tokens": prompt_tokens, "output_tokens": output_tokens}
    for name, value in {**named, "block_sizes": sizes[0] if sizes else 0}.items():
        if value < 1:
            raise ValueError(f"{name}={value}: it must be at least 1")
    total = prompt_tokens + output_tokens
    if total > max_model_len:
        raise ValueError(
            f"max_model_len={max_model_len}: a request has {total} tokens; raise the first"
        )
    if price_an_hour is not None and step_time is None:
        raise ValueError(f"price_an_hour={price_an_hour} needs step_time, to know the hours")
    pool_tokens = pool_bytes // model_shape.bytes_a_token
    plans = [_plan_block_size(s, pool_tokens, prompt_tokens, output_tokens) for s in sizes]
    chosen = max((p for p in plans if p.waste <= ALLOWED_WASTE), key=_by_size, default=plans[0])
    if not chosen.num_requests:
        raise ValueError(
            f"pool_bytes={pool_bytes}: it holds {pool_tokens} tokens, and a request has {total}; "
            "give it more memory"
        )
    held_tokens = _mean_context(prompt_tokens, output_tokens) + chosen.unused_tokens
    at_once = int(chosen.num_blocks * chosen.block_size // held_tokens)
    at_once = min(at_once, max_num_seqs or at_once)
    plan = CapacityPlan(
        bytes_a_token=model_shape.bytes_a_token,
        pool_bytes=pool_bytes,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        max_model_len=max_model_len,
        reserved_requests=pool_tokens // max_model_len,
        sizes=tuple(plans),
        block_size=chosen.block_size,
        requests_at_once=at_once,
    )
    if step_time is None:
        return plan
    work = steady_work(at_once, prompt_tokens, output_tokens)
    seconds = float(step_time.step_seconds(work))
    rate, cost = at_once / seconds, None
    if price_an_hour is not None:
        cost = price_an_hour / 3600 / rate * 1e6
    return dataclasses.replace(
        plan,
        step_seconds=seconds,
        output_tokens_per_second=rate,
        cost_a_million_output_tokens=cost,
    )


def steady_work(num_requests: int, prompt_tokens: int, output_tokens: int) -> StepWork:
    """An average step of so many requests that begin and end at all times.

    A share of 1 / output_tokens of them computes its prompt, as one chunk, which gives its first
    token; the others decode.
    """
    prompts = num_requests / output_tokens
    contexts = num_requests * _mean_context(prompt_tokens, output_tokens)
    return StepWork(
        num_tokens=round(num_requests + prompts * (prompt_tokens - 1)),
        num_rows=num_requests,
        num_context_tokens=round(contexts),
        num_pairs=round(contexts + prompts * prompt_tokens * (prompt_tokens - 1) / 2),
    )


@dataclasses.dataclass(frozen=True)
class SafeUtilization:
    """How full memory may be kept.

    Attributes:
      max_num_seqs: requests at once that keep what is computed again within the limit.
      utilization: share of the pool that is held then, on average while others wait.
      recomputed: tokens computed again, as a share of all that were computed.
      beyond: the same two of one request more; None if memory never runs out.
    """

    max_num_seqs: int
    utilization: float
    recomputed: float
    beyond: tuple[float, float] | None

    def text(self) -> str:
        """The answer, for a reader."""
        again = f"{100 * self.recomputed:.2f}% of all tokens are computed again"
        if self.beyond is None:
            return (
                f"safe: as many requests at once as come; {again}, and "
                f"{100 * self.utilization:.1f}% of the pool is held on average"
            )
        held, lost = self.beyond
        return (
            f"safe: {self.max_num_seqs:,} requests at once hold {100 * self.utilization:.1f}% of "
            f"the pool, and {again}; with one more {100 * held:.1f}% and {100 * lost:.2f}%"
        )


def safe_utilization(
    requests: Sequence[TraceRequest],
    config: SchedulerConfig,
    step_time: StepTime,
    *,
    most_recomputed: float = ALLOWED_RECOMPUTED,
) -> SafeUtilization:
    """The highest occupancy at which few tokens are lost to preemption, by simulated runs.

    It looks for the largest `max_num_seqs` that keeps the tokens computed again below a share of
    all, by doubling and bisection; the runs lose more the more requests run at once.

    Args:
      requests: several times as many as fit at once, all there at the beginning
        (`studies.all_at_once`).
      config: the scheduler's limits, but for the number of requests in a step; preempted requests
        are computed again.
      step_time: how long a step takes.
      most_recomputed: the share, 0 to 1.

    Raises:
      ValueError: even one request at a time is above it, or there is none.
    """
    if not requests:
        raise ValueError("there is no request to simulate")
    config = dataclasses.replace(config, preemption_mode="recompute", num_host_blocks=0)
    runs: dict[int, Results] = {}

    def loses(num_seqs: int) -> bool:
        limits = limited_by_memory(config, num_seqs)
        runs[num_seqs] = simulate(requests, limits, step_time)
        return _recomputed(runs[num_seqs]) >= most_recomputed

    usual = max(_fitting(requests, config), 1)
    first_too_many = smallest(loses, first=usual, most=len(requests))
    if first_too_many == 1:
        raise ValueError(
            f"most_recomputed={most_recomputed}: it must be above 0, the share of one request at "
            "a time"
        )
    best = len(requests) if first_too_many is None else first_too_many - 1
    beyond = None
    if first_too_many is not None:
        beyond = _utilization(runs[first_too_many]), _recomputed(runs[first_too_many])
    return SafeUtilization(best, _utilization(runs[best]), _recomputed(runs[best]), beyond)


def _plan_block_size(size: int, pool_tokens: int, prompt: int, output: int) -> BlockSizePlan:
    num_blocks = pool_tokens // size
    # The output's tokens are written at places prompt, prompt + 1, ...: the step that computes the
    # first of them has `prompt` tokens in memory, the last one prompt + output - 1.
    unused = sum(-n % size for n in range(prompt, prompt + output)) / output
    return BlockSizePlan(
        block_size=size,
        num_blocks=num_blocks,
        num_requests=num_blocks // -(-(prompt + output) // size),
        unused_tokens=unused,
        waste=unused / (_mean_context(prompt, output) + unused),
    )


def _mean_context(prompt: int, output: int) -> float:
    """Tokens of a request that are in memory, averaged over the steps that make its output."""
    return prompt + (output - 1) / 2


def _by_size(plan: BlockSizePlan) -> int:
    return plan.block_size


def _fitting(requests: Iterable[TraceRequest], config: SchedulerConfig) -> int:
    """How many requests of the mean length fit the pool."""
    contexts = [_mean_context(r.num_prompt_tokens, r.num_output_tokens) for r in requests]
    return int((config.num_blocks - 1) * config.block_size * len(contexts) / sum(contexts))


def _recomputed(results: Results) -> float:
    return results.totals.recomputed / max(results.totals.computed, 1)


def _utilization(results: Results) -> float:
    averages = results.queued if results.queued.weight else results.always
    return 1 - averages.means()["free"]
