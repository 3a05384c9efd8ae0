"""The engine's loop: schedule, run, postprocess, one step at a time."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from typing import Any

from paged_jax.batch import build_step
from paged_jax.compile import StepRunner, to_host
from paged_jax.config import SchedulerConfig
from paged_jax.interrupts import uninterrupted
from paged_jax.log import logger
from paged_jax.metrics import Metrics, StepTimes
from paged_jax.outputs import RequestOutput
from paged_jax.request import Request
from paged_jax.sampling import MAX_MASKED_TOKENS, SamplerOutput
from paged_jax.sampling_params import SamplingParams
from paged_jax.scheduler import ScheduledStep, Scheduler
from paged_jax.sequence import SequenceGroup, SequenceState
from paged_jax.tokenizer import Tokenizer

_NOT_FINITE = "the model's logits are no numbers (NaN or inf), or min_tokens masks every token"


class Engine:
    """Serves requests of token ids: `add_request`, then `step` until nothing is unfinished.

    Args:
      runner: the compiled steps and the KV pool.
      config: the scheduler's limits; its num_blocks is the pool's.
      vocab_size: token ids must lie below it.
      eos_token_ids: tokens that end an output.
      tokenizer: makes text of tokens; None leaves text empty.
      seed: seeds of requests that bring none are drawn from it and their number.
    """

    def __init__(
        self,
        runner: StepRunner,
        config: SchedulerConfig,
        *,
        vocab_size: int,
        eos_token_ids: tuple[int, ...] = (),
        tokenizer: Tokenizer | None = None,
        seed: int = 0,
        log_stats: bool = False,
    ):
        self.runner = runner
        self.config = config
        self.scheduler = Scheduler(config)
        self.metrics = Metrics()
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids
        self.seed = seed
        self.log_stats = log_stats
        self._groups: dict[str, SequenceGroup] = {}
        # Outputs of a step that was interrupted when it was through; the next step gives them.
        self._undelivered: list[RequestOutput] = []
        self._sequences: dict[str, tuple[SequenceGroup, SequenceState]] = {}
        self._num_seeds_drawn = 0
        self._last_log = (time.monotonic(), 0)

    def has_unfinished(self) -> bool:
        """Whether `step` has something to do or to give."""
        return bool(self._groups or self._undelivered)

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        prompt: str | None = None,
        cache_salt: str | None = None,
        stream: bool = False,
    ) -> None:
        """Queues a request.

        Args:
          request_id: unique among the unfinished ones.
          prompt_token_ids: the prompt; 1 to max_model_len - 1 ids below vocab_size.
          params: how to sample.
          prompt: the prompt's text, given back with the output.
          cache_salt: requests share cached prefixes only with those of the same salt.
          stream: whether `step` gives an output for every new token, or only at the end.

        Raises:
          ValueError: the id is in use, the prompt is empty, too long or has an id out of range, or
            the sampling parameters do not fit the model. Nothing is queued then.
        """
        if request_id in self._groups:
            raise ValueError(
                f"request_id={request_id!r} is in use; give each unfinished request its own"
            )
        token_ids = self._checked_prompt(prompt_token_ids)
        self._check_params(params, len(token_ids))
        group = SequenceGroup(request_id, prompt, token_ids, params, [], stream)
        for i in range(params.n):
            child = params.child(i)
            request = Request(
                request_id if params.n == 1 else f"{request_id}/{i}",
                token_ids,
                child,
                max_model_len=self.config.max_model_len,
                eos_token_ids=self.eos_token_ids,
                seed=self._draw_seed() if child.seed is None else child.seed,
                cache_salt=cache_salt,
            )
            if request.request_id in self._sequences:  # "a" with n=2 is "a/0" and "a/1" inside.
                raise ValueError(
                    f"request_id={request_id!r}: its output {i} would be {request.request_id!r}, "
                    "which is in use; give the request another id"
                )
            group.sequences.append(SequenceState(i, request, self.tokenizer))
        with uninterrupted():
            for sequence in group.sequences:
                self.scheduler.add(sequence.request)
                self._sequences[sequence.request.request_id] = (group, sequence)
            self._groups[request_id] = group
            self.metrics.prompt_tokens += len(token_ids)

    def abort(self, request_id: str) -> RequestOutput | None:
        """Ends a request and frees its blocks at once.

        Returns:
          Its output so far, with finish reason "abort"; None if no such request is unfinished.
        """
        late = [output for output in self._undelivered if output.request_id == request_id]
        self._undelivered = [o for o in self._undelivered if o.request_id != request_id]
        group = self._groups.get(request_id)
        if group is None:
            return late[-1] if late else None
        with uninterrupted():
            for sequence in group.sequences:
                self.scheduler.abort(sequence.request.request_id)
            return self._close(group)

    def step(self) -> list[RequestOutput]:
        """Runs one step.

        Returns:
          The outputs of requests that ended, and of those streamed ones that got a token.

        If the step fails, every live request goes back to the queue, to be computed anew, and the
        error is raised; tokens already given are kept, and the same ones are sampled again where
        some were not given yet. A first Ctrl-C waits for the step's end (see `interrupts`); what
        the step has made is then given by the next one.
        """
        with uninterrupted():
            try:
                self._undelivered += self._run_step()
            except BaseException:
                self._recover()
                raise
        outputs, self._undelivered = self._undelivered, []
        return outputs

    def reset_prefix_cache(self) -> bool:
        """Forgets every cached prefix; False, with nothing changed, while any block is in use."""
        return self.scheduler.reset_prefix_cache()

    def get_metrics(self) -> dict[str, Any]:
        """The engine's counters since it was made, under their Prometheus names.

        Counts: num_requests_running and _waiting (now; each of `n` outputs is one),
        num_preemptions, prompt_tokens (a prompt once, whatever its `n`), generation_tokens,
        request_success (by finish reason, each of `n` outputs). In tokens: prefix_cache_queries and
        prefix_cache_hits (each of `n` outputs asks; preempted requests do not). From 0 to 1:
        kv_cache_usage_perc and kv_cache_peak_usage_perc. Latencies in seconds, as count, sum, mean
        and p95 (the upper bound of the histogram's bucket that it falls in):
        time_to_first_token_seconds, inter_token_latency_seconds, e2e_request_latency_seconds.
        """
        metrics, scheduler = self.metrics, self.scheduler
        blocks = scheduler.blocks
        return {
            "num_requests_running": len(scheduler.running),
            "num_requests_waiting": len(scheduler.waiting),
            "kv_cache_usage_perc": blocks.pool.usage,
            "kv_cache_peak_usage_perc": blocks.peak_used_blocks / (self.config.num_blocks - 1),
            "prefix_cache_queries": blocks.stats.num_query_tokens,
            "prefix_cache_hits": blocks.stats.num_hit_tokens,
            "num_preemptions": scheduler.num_preemptions,
            "prompt_tokens": metrics.prompt_tokens,
            "generation_tokens": metrics.generation_tokens,
            "request_success": dict(metrics.request_success),
            "time_to_first_token_seconds": metrics.time_to_first_token.as_dict(),
            "inter_token_latency_seconds": metrics.inter_token_latency.as_dict(),
            "e2e_request_latency_seconds": metrics.e2e_request_latency.as_dict(),
        }

    def _checked_prompt(self, prompt_token_ids: Sequence[int]) -> list[int]:
        token_ids = [int(token_id) for token_id in prompt_token_ids]
        self.scheduler.check_length(len(token_ids))
        if min(token_ids) < 0 or max(token_ids) >= self.vocab_size:
            i = next(i for i, t in enumerate(token_ids) if not 0 <= t < self.vocab_size)
            raise ValueError(
                f"prompt_token_ids[{i}]={token_ids[i]} is out of range: the model's vocabulary has "
                f"{self.vocab_size} tokens, so ids go from 0 to {self.vocab_size - 1}"
            )
        return token_ids

    def _run_step(self) -> list[RequestOutput]:
        started = time.perf_counter()
        step = self.scheduler.schedule()
        if not step.chunks:
            if self.scheduler.has_unfinished():
                raise RuntimeError(f"the scheduler is stuck: {self.scheduler}")
            return []
        block_size = self.config.block_size
        shape, batch, sampling = build_step(step, self.runner.buckets, block_size=block_size)
        dispatched = time.perf_counter()
        sampled = to_host(self.runner.run(shape, batch, sampling))
        received = time.perf_counter()
        outputs = self._process(step, sampled)
        self._count(step, started, dispatched, received)
        return outputs

    def _check_params(self, params: SamplingParams, num_prompt_tokens: int) -> None:
        for token_id in params.stop_token_ids:
            if token_id >= self.vocab_size:
                raise ValueError(
                    f"stop_token_ids holds {token_id}, and the model's vocabulary has "
                    f"{self.vocab_size} tokens; leave it out"
                )
        room = self.config.max_model_len - num_prompt_tokens
        if params.min_tokens > room:
            raise ValueError(
                f"min_tokens={params.min_tokens} does not fit: the prompt has {num_prompt_tokens} "
                f"tokens and max_model_len={self.config.max_model_len} leaves room for {room}"
            )
        num_masked = len({*params.stop_token_ids, *self.eos_token_ids})
        if params.min_tokens and num_masked > MAX_MASKED_TOKENS:
            raise ValueError(
                f"min_tokens={params.min_tokens} masks {num_masked} EOS and stop tokens, and "
                f"{MAX_MASKED_TOKENS} can be masked; give fewer stop_token_ids, or min_tokens=0"
            )
        if params.stop and self.tokenizer is None:
            raise ValueError(
                f"stop={list(params.stop)!r} needs a tokenizer, and the engine has none "
                "(skip_tokenizer_init); use stop_token_ids"
            )

    def _draw_seed(self) -> int:
        text = f"{self.seed}/{self._num_seeds_drawn}".encode()
        self._num_seeds_drawn += 1
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")

    def _process(self, step: ScheduledStep, sampled: SamplerOutput) -> list[RequestOutput]:
        """Takes a step's tokens; ends and hands out what they complete."""
        rows = {}
        for row, chunk in enumerate(step.chunks):
            rows[chunk.request.request_id] = row
            if chunk.samples and not sampled.is_finite[row]:
                self._fail(chunk.request, _NOT_FINITE)
        touched: dict[str, SequenceGroup] = {}
        for chunk in step.chunks:  # Those that failed above are in no result of the scheduler's.
            if chunk.request.finish_reason == "error":
                self._touch(chunk.request, touched)
        token_ids = sampled.token_ids[: len(step.chunks)].tolist()
        for request, token_id in self.scheduler.update(step, token_ids):
            group, sequence = self._sequences[request.request_id]
            self.metrics.generation_tokens += 1
            try:
                stop = sequence.append(token_id, sampled, rows[request.request_id])
            except Exception as error:  # A tokenizer's fault is its request's alone.
                self._fail(request, f"{type(error).__name__}: {error}")
            else:
                if stop is not None and request.finish_reason != "stop":
                    request.stop_reason = stop
                    request.finish_reason = "stop"
                    self.scheduler.finish(request)
            if group.stream or request.finish_reason is not None:
                self._touch(request, touched)
        outputs = []
        for group in touched.values():
            if group.finished:
                outputs.append(self._close(group))
            elif group.stream:
                outputs.append(group.output())
        return outputs

    def _touch(self, request: Request, touched: dict[str, SequenceGroup]) -> None:
        group = self._sequences[request.request_id][0]
        touched[group.request_id] = group

    def _fail(self, request: Request, error: str) -> None:
        logger.error("Request %s failed: %s", request.request_id, error)
        request.finish_reason = "error"
        self.scheduler.finish(request)
        self._sequences[request.request_id][1].error = error

    def _close(self, group: SequenceGroup) -> RequestOutput:
        """Forgets an ended request, and counts it."""
        del self._groups[group.request_id]
        for sequence in group.sequences:
            request = sequence.request
            del self._sequences[request.request_id]
            self.metrics.count_finished(request)
        return group.output()

    def _recover(self) -> None:
        """After a fault: no block and no queue is trusted, and no request is lost."""
        self._sequences.clear()
        unfinished = []
        for group in list(self._groups.values()):
            for sequence in group.sequences:
                self._sequences[sequence.request.request_id] = (group, sequence)
                if not sequence.is_done():
                    sequence.rewind()
                    unfinished.append(sequence.request)
            if group.finished:  # It ended in the very step that failed.
                self._undelivered.append(self._close(group))
        self.scheduler.restart(unfinished)
        if self.runner.renew_pool():
            logger.warning("A step failed with the KV pool in its hands; made a new one")

    def _count(
        self, step: ScheduledStep, started: float, dispatched: float, received: float
    ) -> None:
        is_decode = step.num_tokens == len(step.chunks)
        times: StepTimes = self.metrics.steps["decode" if is_decode else "prefill"]
        ended = time.perf_counter()
        times.num_steps += 1
        times.num_tokens += step.num_tokens
        times.schedule_seconds += dispatched - started
        times.device_seconds += received - dispatched
        times.process_seconds += ended - received
        if self.log_stats:
            self._log_stats()

    def _log_stats(self) -> None:
        then, tokens_then = self._last_log
        seconds = time.monotonic() - then
        if seconds < 10:
            return
        tokens = self.metrics.generation_tokens
        blocks = self.scheduler.blocks
        hit_rate = blocks.stats.num_hit_tokens / max(blocks.stats.num_query_tokens, 1)
        logger.info(
            "%.1f output tokens/s, running %d, waiting %d, KV cache %.1f%%, prefix hits %.1f%%",
            (tokens - tokens_then) / seconds,
            len(self.scheduler.running),
            len(self.scheduler.waiting),
            100 * blocks.pool.usage,
            100 * hit_rate,
        )
        self._last_log = (time.monotonic(), tokens)
