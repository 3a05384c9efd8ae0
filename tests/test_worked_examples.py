"""Worked examples of paged attention's memory, as they are told in articles about it.

They count blocks from 0. Here block 0 is the null block, so their block i is block i + 1.
"""

import dataclasses

import jax.numpy as jnp
import pytest

from paged_jax.block_manager import BlockManager
from paged_jax.block_pool import BlockPool
from paged_jax.config import SchedulerConfig
from paged_jax.kv_pool import KVPool
from paged_jax.request import Request
from paged_jax.sampling_params import SamplingParams
from paged_jax.scheduler import Scheduler

GIB = 2**30
PROMPT = list(range(1000))
# Theirs, from 0, of four samples: three got copies, and the last writer kept the original.
LAST_PROMPT_BLOCKS = [63, 64, 65, 62]


@dataclasses.dataclass(frozen=True)
class Shape:
    num_layers: int
    num_kv_heads: int
    head_dim: int


def make_request(name: str, prompt: list[int]) -> Request:
    return Request(name, prompt, SamplingParams(max_tokens=400), max_model_len=10_000)


def from_zero(blocks: list[int]) -> list[int]:
    return [block - 1 for block in blocks]


def test_copy_on_write_of_four_samples():
    manager = BlockManager(1001, 16, enable_prefix_caching=False)
    parent = make_request("prompt", PROMPT)
    assert manager.allocate(parent)
    parent.num_computed_tokens = 1000
    prompt_blocks = list(parent.block_ids)
    assert from_zero(prompt_blocks) == list(range(63))
    samples = [make_request(str(i), PROMPT) for i in range(4)]
    for sample in samples:
        manager.fork(parent, sample)
    manager.free(parent)
    assert manager.pool.num_used_blocks == 63
    for step in range(200):
        for sample in samples:
            sample.token_ids.append(5000)
            assert manager.append_slots(sample, sample.num_tokens)
        for sample in samples:
            sample.num_computed_tokens = sample.num_tokens
        moves = manager.take_moves()
        # The copies that "a real server also" makes: of the last prompt block, in the first step.
        assert moves.copies == (() if step else ((63, 64), (63, 65), (63, 66)))
    assert manager.pool.num_used_blocks == 114
    assert manager.pool.ref_counts[prompt_blocks[0]] == 4
    assert from_zero([sample.block_ids[62] for sample in samples]) == LAST_PROMPT_BLOCKS
    assert manager.stats.num_cow_copies == 3
    manager.check_integrity(samples)
    for sample in samples:
        manager.free(sample)
    assert manager.pool.num_used_blocks == 0


def test_copy_on_write_of_four_samples_through_the_scheduler():
    """The prompt's own request is the first sample there, and the order is the same."""
    scheduler = Scheduler(
        SchedulerConfig(
            num_blocks=1001, max_model_len=2000, max_num_seqs=4, max_num_batched_tokens=1000
        )
    )
    first, *others = samples = [make_request(str(i), PROMPT) for i in range(4)]
    for other in others:
        other.fork_of = first
        first.children.append(other)
    scheduler.add(first)
    # The first step computes the prompt and samples four times; each later one writes a token.
    for step_index in range(1 + 200):
        step = scheduler.schedule()
        assert [chunk.request for chunk in step.chunks] == samples
        assert [c.num_tokens for c in step.chunks] == ([1] * 4 if step_index else [1000, 0, 0, 0])
        assert step.moves.copies == (((63, 64), (63, 65), (63, 66)) if step_index == 1 else ())
        scheduler.update(step, [5000 + i for i in range(4)])
        scheduler.check_integrity()
    assert [sample.num_computed_tokens for sample in samples] == [1200] * 4
    assert scheduler.blocks.pool.num_used_blocks == 114
    assert scheduler.blocks.pool.ref_counts[first.block_ids[0]] == 4
    assert from_zero([sample.block_ids[62] for sample in samples]) == LAST_PROMPT_BLOCKS


def test_four_replies_without_sharing_take_300_blocks():
    manager = BlockManager(1001, 16, enable_prefix_caching=False)
    for i in range(4):
        assert manager.allocate(make_request(str(i), [*PROMPT, *[5000 + i] * 200]))
    assert manager.pool.num_used_blocks == 300
    assert round(1 - 114 / 300, 2) == 0.62


@pytest.mark.parametrize(
    ("block_size", "num_shared_tokens", "num_blocks", "num_blocks_apart"),
    # With blocks of 128, 7 are shared, and each chat's eighth is its own.
    [(16, 992, 62 + 50, 3150), (128, 896, 7 + 50, 400)],
)
def test_fifty_chats_on_a_prompt_of_1000_tokens(
    block_size, num_shared_tokens, num_blocks, num_blocks_apart
):
    requests = [make_request(str(i), [*PROMPT, 5000 + i]) for i in range(50)]
    together = BlockManager(4000, block_size)
    for i, request in enumerate(requests):
        assert together.allocate(request)
        together.cache_full_blocks(request, request.num_tokens)
        request.num_computed_tokens = request.num_tokens
        assert request.num_cached_tokens == (num_shared_tokens if i else 0)
    assert together.pool.num_used_blocks == num_blocks
    assert together.pool.ref_counts[requests[0].block_ids[0]] == 50
    together.check_integrity(requests)
    apart = BlockManager(4000, block_size, enable_prefix_caching=False)
    for i in range(50):
        assert apart.allocate(make_request(str(i), [*PROMPT, 5000 + i]))
    assert apart.pool.num_used_blocks == num_blocks_apart


def test_a_chat_of_900_tokens_holds_57_blocks():
    manager = BlockManager(100, 16)
    request = make_request("chat", list(range(900)))
    assert manager.allocate(request)
    assert len(request.block_ids) == 57
    assert 900 - 56 * 16 == 4  # Slots used of the last one.


def test_a_pool_of_8_blocks_has_7_to_give():
    assert BlockPool(8).free_queue() == [1, 2, 3, 4, 5, 6, 7]


def test_bytes_of_keys_and_values():
    def bytes_a_token(model: Shape) -> int:
        per_block = KVPool.bytes_a_block(model, block_size=16, dtype=jnp.bfloat16)
        assert per_block % 16 == 0
        return per_block // 16

    grouped = bytes_a_token(Shape(num_layers=32, num_kv_heads=8, head_dim=128))
    assert grouped == 131_072 == 128 * 1024
    assert grouped * 8192 == 1 * GIB
    assert 60 * GIB // (grouped * 16) == 30_720
    assert 60 * GIB // (grouped * 8192) == 60
    # The paper's model of 13 billion parameters: a hidden size of 5,120 is 40 heads of 128.
    large = bytes_a_token(Shape(num_layers=40, num_kv_heads=40, head_dim=128))
    assert large == 819_200 == 800 * 1024
    assert round(large * 2048 / GIB, 2) == 1.56
