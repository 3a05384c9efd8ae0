"""Any mix of what happens to sequences, with the content of every block checked at every step."""

import collections
import random
from typing import ClassVar

import pytest
from block_model import BlockModel, Follower, holders_of
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from paged_jax.config import SchedulerConfig
from paged_jax.request import Request, RequestStatus
from paged_jax.sampling_params import SamplingParams
from paged_jax.scheduled_step import ScheduledChunk, ScheduledStep
from paged_jax.scheduler import Scheduler

EOS = 2
KEYS = [{}, {"cache_salt": "s"}, {"lora_id": "s"}, {"extra_keys": ("s",)}]
# What the machine must come to, to be worth anything.
WANTED = [
    "num_hit_tokens",
    "num_host_hit_tokens",
    "num_evictions",
    "num_host_evictions",
    "num_cow_copies",
    "num_folded_blocks",
    "swap_in_tokens",
    "swap_out_tokens",
    "host_offload_tokens",
    "a held one gave way",
    "a child forked at once",
    "a pinned prefix",
]
FIELDS = st.fixed_dictionaries(
    dict(
        max_tokens=st.integers(1, 20),
        priority=st.integers(0, 2),
        hold=st.sampled_from([True, True, False]),
        scored=st.sampled_from([False, False, False, True]),
    )
)


class BlockMachine(RuleBasedStateMachine):
    """Arrivals, steps, forks, continuations, preemptions, pins, resets, aborts and faults.

    Attributes:
      live: the unfinished requests, by id.
      tokens: what each sequence must consist of.
      unscored: the places whose log-probabilities are wanted and were not computed yet.
      follower: knows of the prefix cache what its events tell.
      reached: how often the states came up that the machine is for, over all runs.
    """

    reached: ClassVar[collections.Counter[str]] = collections.Counter()

    @initialize(
        block_size=st.integers(2, 4),
        longest=st.sampled_from([6, 9, 12]),
        slack=st.sampled_from([0, 0, 1, 2, 6]),
        max_num_seqs=st.integers(1, 5),
        max_num_batched_tokens=st.sampled_from([5, 9, 40, 100]),
        enable_prefix_caching=st.sampled_from([True, False, True]),
        num_host_blocks=st.sampled_from([0, 4, 40, 40]),
        enable_host_prefix_cache=st.sampled_from([True, True, False]),
        policy=st.sampled_from(["fcfs", "priority", "priority"]),
        preemption_mode=st.sampled_from(["swap", "swap", "swap", "recompute", "auto"]),
    )
    def start(self, block_size, longest, slack, **fields):
        config = SchedulerConfig(
            num_blocks=longest + 1 + slack,
            block_size=block_size,
            max_model_len=longest * block_size,
            **fields,
        )
        self.longest_blocks = longest
        self.scheduler = Scheduler(config)
        self.model = BlockModel(block_size)
        self.follower = Follower()
        self.scheduler.blocks.listeners.events.subscribe(self.follower)
        self.live: dict[str, Request] = {}
        self.tokens: dict[str, list[int]] = {}
        self.unscored: dict[str, set[int]] = {}
        self.pinned: list[list[bytes]] = []
        self.num_requests = 0
        self.swapped_between_steps = False

    # What users do.

    @rule(
        starts=st.lists(st.integers(10, 12), min_size=1, max_size=4),
        length=st.integers(1, 30),
        branch=st.integers(1, 60),
        keys=st.sampled_from([0, 0, 0, 0, 0, 1, 2, 3]),
        num_outputs=st.sampled_from([1, 2, 4]),
        fields=FIELDS,
    )
    def add(self, starts, length, branch, keys, num_outputs, fields):
        """A burst of requests of like prompts, so that prefixes are often shared."""
        length = min(length, self.scheduler.config.max_model_len - 1)
        for start in starts:
            prompt = [start, *[10] * (length - 1)]
            if branch < length:
                prompt[branch] = 11
            first, *others = [
                self._request(prompt, is_first=not i, **KEYS[keys], **fields)
                for i in range(num_outputs)
            ]
            for other in others:
                other.fork_of = first
                first.children.append(other)
            self._add(first)

    @precondition(lambda self: self.scheduler.held)
    @rule(
        data=st.data(),
        extra=st.integers(0, 6),
        takes_over=st.booleans(),
        prefill_only=st.booleans(),
        fields=FIELDS,
    )
    def continue_held(self, data, extra, takes_over, prefill_only, fields):
        """A request from a held sequence: it goes on from it, or beside it."""
        parent = self._pick_held(data)
        limit = self.scheduler.config.max_model_len - (not prefill_only)
        tokens = (parent.token_ids + [10 + i % 2 for i in range(extra)])[:limit]
        # A sequence that computes its tokens only lacks one at least.
        if prefill_only and len(tokens) < 2 + parent.num_computed_tokens:
            return
        request = self._request(
            tokens,
            cache_salt=parent.cache_salt,
            lora_id=parent.lora_id,
            extra_keys=parent.extra_keys,
            prefill_only=prefill_only,
            fork_of=parent,
            takes_over=takes_over,
            **fields,
        )
        self._add(request)

    @precondition(lambda self: self.scheduler.held)
    @rule(data=st.data())
    def fork_held(self, data):
        parent = self._pick_held(data)
        child = self.scheduler.fork_held(parent, self._name())
        assert child.token_ids == parent.token_ids and child.token_ids is not parent.token_ids
        self.tokens[child.request_id] = list(child.token_ids)

    @precondition(lambda self: self.scheduler.held)
    @rule(data=st.data())
    def release_held(self, data):
        request = self._pick_held(data)
        self.scheduler.release(request)
        assert not request.block_ids and not request.host_block_ids

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data):
        self._abort(self._pick(data, self.live))

    @precondition(lambda self: self.live and self.scheduler.config.enable_prefix_caching)
    @rule(data=st.data())
    def pin(self, data):
        request = self._pick(data, self.live)
        config, pins = self.scheduler.config, self.scheduler.blocks.pins
        twin = request.twin("")
        twin.extend_hashes(twin.num_tokens // config.block_size, config.block_size)
        hashes = twin.block_hashes[: config.num_blocks - 1 - self.longest_blocks]
        wanted = {h for other in [*self.pinned, hashes] for h in other}
        if len(wanted) + self.longest_blocks > config.num_blocks - 1:
            with pytest.raises(ValueError, match="would leave"):
                pins.pin(hashes, num_blocks_to_spare=self.longest_blocks)
        elif hashes:
            pins.pin(hashes, num_blocks_to_spare=self.longest_blocks)
            self.pinned.append(hashes)
            self.reached["a pinned prefix"] += 1

    @precondition(lambda self: self.pinned)
    @rule(data=st.data())
    def unpin(self, data):
        hashes = self.pinned.pop(data.draw(st.integers(0, len(self.pinned) - 1)))
        self.scheduler.blocks.pins.unpin(hashes)

    @rule()
    def reset_prefix_cache(self):
        in_use = any(r.block_ids or r.host_block_ids for r in self._sequences())
        in_use = in_use or bool(self.scheduler.blocks.pins.blocks)
        assert self.scheduler.blocks.reset_prefix_cache() == (not in_use)
        if not in_use:
            assert len(self.scheduler.blocks.pool.prefix_cache) == 0

    # What the engine does.

    @rule(count=st.integers(1, 4), seed=st.integers(0, 2**32 - 1))
    def step(self, count, seed):
        draw = random.Random(seed)
        for _ in range(count):
            self._preempt_some(draw)
            self._step(draw)
            self.accounts_are_true()

    @rule(when=st.sampled_from(["between steps", "in a step", "after a step"]), data=st.data())
    def fault(self, when, data):
        """Whatever state it left behind, the tokens that were taken in are what is kept."""
        scheduler = self.scheduler
        if when != "between steps":
            step = scheduler.schedule()
        if when == "after a step":
            self._check_rows(step)
            for request, token, *_ in scheduler.update(step, [10] * len(step.chunks)):
                if token >= 0:
                    self.tokens[request.request_id].append(token)
        scheduler.running.reverse()
        scheduler.waiting.clear()
        for name, request in list(self.live.items()):
            if request.num_output_tokens and data.draw(st.booleans()):
                request.token_ids.pop()
                self.tokens[name].pop()
                request.finish_reason = request.stop_reason = None
            elif request.finish_reason is not None:
                del self.live[name]
        scheduler.restart(self.live.values())
        self.model.lose_all()
        self.swapped_between_steps = False

    @invariant()
    def accounts_are_true(self):
        if not hasattr(self, "scheduler"):
            return
        self.scheduler.check_integrity()
        self.model.check(self.scheduler, self._sequences())
        assert set(self.scheduler.requests) == set(self.live)
        self.follower.check(self.scheduler.blocks)
        for request in self._sequences():
            assert request.token_ids == self.tokens[request.request_id], "tokens lost or doubled"

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return
        scheduler, draw = self.scheduler, random.Random(self.num_requests)
        bound = 100 + sum(3 * r.max_total_tokens for r in self.live.values())
        for i in range(bound):
            if not self.live:
                break
            if i < 30:
                self._preempt_some(draw)
            self._step(draw)
            self.accounts_are_true()
        assert not self.live and not scheduler.has_unfinished(), "a request never ends"
        for request in list(scheduler.held.values()):
            scheduler.release(request)
        for hashes in self.pinned:
            scheduler.blocks.pins.unpin(hashes)
        pools = [scheduler.blocks.pool]
        pools += [scheduler.blocks.host.pool] if scheduler.blocks.host else []
        for pool in pools:
            assert sorted(pool.free_queue()) == list(range(1, pool.num_blocks)), "not all are free"
        assert scheduler.blocks.reset_prefix_cache()
        stats = vars(scheduler.blocks.stats)
        self.reached.update(stats)
        self.reached.update(
            {f"preemptions by {k}": n for k, n in scheduler.num_preemptions_by_mode.items()}
        )

    # How.

    def _step(self, draw: random.Random) -> None:
        scheduler, config = self.scheduler, self.scheduler.config
        before = holders_of(self._sequences(), scheduler.blocks.pins.blocks.values())
        held = [request for request in scheduler.held.values() if request.block_ids]
        step = scheduler.schedule()
        after = holders_of(self._sequences(), scheduler.blocks.pins.blocks.values())
        self.reached["steps that compute"] += bool(step.chunks)
        self.reached["a held one gave way"] += sum(not r.block_ids for r in held)
        self.reached["a child forked at once"] += sum(c.num_tokens == 0 for c in step.chunks)
        assert step.num_tokens <= config.max_num_batched_tokens
        assert sum(chunk.num_rows for chunk in step.chunks) <= config.max_num_seqs
        assert step.chunks or not self.live or self.swapped_between_steps, "stuck"
        self.swapped_between_steps = False
        self.model.run(step, before, after)
        self._check_rows(step)
        if step.chunks and draw.random() < 0.05:  # Between dispatch and result.
            self._abort(draw.choice(step.chunks).request)
        sampled = [
            10 if draw.random() < 0.7 else draw.choice([11, 11, 11, EOS]) for _ in step.chunks
        ]
        for request, token, *_ in scheduler.update(step, sampled):
            if token >= 0:
                self.tokens[request.request_id].append(token)
            if request.status in (RequestStatus.FINISHED, RequestStatus.HELD):
                assert request.finish_reason in ("stop", "length")
                assert (request.status is RequestStatus.HELD) == request.hold
                assert not self.unscored[request.request_id]
                del self.live[request.request_id]

    def _preempt_some(self, draw: random.Random) -> None:
        """Takes running requests' blocks between two steps, whether there is need or not."""
        while self.scheduler.running and draw.random() < 0.2:
            request = draw.choice(self.scheduler.running)
            done = self.scheduler.preempt(request, draw.choice(["swap", "swap", "recompute", None]))
            assert request.status is RequestStatus.WAITING and not request.block_ids
            assert done == "swap" or not (request.is_swapped or request.num_computed_tokens)
            self.accounts_are_true()
            self.swapped_between_steps |= done == "swap"

    def _check_rows(self, step: ScheduledStep) -> None:
        """Every sampled or scored place has its row of logits, and a token computed for it."""
        last: ScheduledChunk | None = None
        for chunk in step.chunks:
            if chunk.num_tokens == 0:  # It samples from the logits of the chunk before it.
                assert last is not None and (chunk.end, chunk.samples) == (last.end, last.samples)
                assert chunk.request.token_ids == last.request.token_ids
            last, request = chunk, chunk.request
            if request.score_start is not None:
                assert 1 <= chunk.num_rows <= chunk.num_tokens
                rows = range(chunk.end - chunk.num_rows + 1, chunk.end + 1)
                self.unscored[request.request_id].difference_update(rows)

    def _request(
        self, tokens, *, max_tokens, scored, is_first=True, prefill_only=False, **fields
    ) -> Request:
        if self.scheduler.config.policy == "fcfs":
            fields["priority"] = 0
        return Request(
            self._name(),
            tokens,
            SamplingParams(max_tokens=max_tokens),
            max_model_len=self.scheduler.config.max_model_len,
            eos_token_ids=(EOS,),
            prefill_only=prefill_only,
            score_start=1 + len(tokens) // 3 if scored and is_first and len(tokens) > 1 else None,
            **fields,
        )

    def _add(self, request: Request) -> None:
        self.scheduler.add(request)
        for member in [request, *request.children]:
            self.live[member.request_id] = member
            self.tokens[member.request_id] = list(member.token_ids)
            scored = range(member.score_start or member.num_tokens, member.num_tokens)
            self.unscored[member.request_id] = set(scored)

    def _abort(self, request: Request) -> None:
        assert self.scheduler.abort(request.request_id) is request
        assert not request.block_ids and not request.host_block_ids
        del self.live[request.request_id]

    def _name(self) -> str:
        self.num_requests += 1
        return str(self.num_requests)

    def _pick(self, data, requests: dict[str, Request]) -> Request:
        return requests[data.draw(st.sampled_from(sorted(requests)))]

    def _pick_held(self, data) -> Request:
        held = self.scheduler.held
        swapped = {name: request for name, request in held.items() if request.is_swapped}
        request = self._pick(data, swapped or held)
        self.reached["use of a held one that is swapped"] += request.is_swapped
        return request

    def _sequences(self) -> list[Request]:
        return [*self.live.values(), *self.scheduler.held.values()]


def run(**options):
    BlockMachine.reached.clear()
    run_state_machine_as_test(BlockMachine, settings=settings(deadline=None, **options))
    print(dict(BlockMachine.reached))
    missed = [name for name in WANTED if not BlockMachine.reached[name]]
    assert not missed, f"the machine never came to: {missed}"


@pytest.mark.once
def test_blocks_hold_what_their_sequences_need():
    run(max_examples=120, stateful_step_count=40, derandomize=True)


@pytest.mark.full
def test_blocks_hold_what_their_sequences_need_full():
    run(max_examples=1200, stateful_step_count=50)
