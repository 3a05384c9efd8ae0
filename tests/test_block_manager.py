import pytest

from paged_jax.block_manager import BlockManager
from paged_jax.prefix_cache import hash_block
from paged_jax.request import Request
from paged_jax.sampling_params import SamplingParams


def make_request(name: str, prompt: list[int], **fields) -> Request:
    params = SamplingParams(max_tokens=1000)
    return Request(name, prompt, params, max_model_len=100_000, **fields)


def admit(manager: BlockManager, request: Request) -> None:
    assert manager.allocate(request)
    manager.cache_full_blocks(request, request.num_tokens)


def test_free_queue_order_of_two_prompts_that_share_48_tokens():
    """The value that vLLM's users rely on: see the free-queue order of its block pool."""
    manager = BlockManager(11, 16)
    common = list(range(48))
    first = make_request("a", common + [100] * 7)
    second = make_request("b", common + [200] * 5)
    admit(manager, first)
    admit(manager, second)
    assert list(second.block_ids)[:3] == list(first.block_ids)[:3]
    manager.free(first)
    manager.free(second)
    expected = [5, 4, 6, 7, 8, 9, 10, 3, 2, 1]
    assert manager.pool.free_queue() == expected
    assert manager.pool.take(10) == expected


def test_a_hit_leaves_the_last_token_to_compute():
    manager = BlockManager(11, 16)
    first = make_request("a", list(range(32)))
    admit(manager, first)
    second = make_request("b", list(range(32)))
    admit(manager, second)
    assert second.num_computed_tokens == second.num_cached_tokens == 16
    assert second.block_ids[0] == first.block_ids[0]
    assert second.block_ids[1] != first.block_ids[1]
    assert (manager.stats.num_query_tokens, manager.stats.num_hit_tokens) == (64, 16)


def test_cache_salt_keeps_tenants_apart():
    manager = BlockManager(20, 16)
    prompt = list(range(33))
    admit(manager, make_request("a", prompt, cache_salt="x"))
    for salt, hit in ((None, 0), ("y", 0), ("x", 32)):
        request = make_request("b", prompt, cache_salt=salt)
        assert manager.allocate(request)
        assert request.num_cached_tokens == hit
        manager.free(request)


def test_allocation_is_all_or_nothing():
    manager = BlockManager(5, 16)
    shared = make_request("a", list(range(32)))
    admit(manager, shared)
    manager.free(shared)
    # Two of the four usable blocks are hits, so they are not free for the rest: 2 + 3 > 4.
    request = make_request("b", [*range(32), *[7] * 40])
    before = manager.pool.free_queue()
    assert not manager.allocate(request)
    assert manager.pool.free_queue() == before
    assert not request.block_ids
    assert manager.stats.num_query_tokens == 32


def test_output_blocks_are_cached_too():
    manager = BlockManager(10, 4)
    request = make_request("a", [1, 2, 3])
    admit(manager, request)
    for token in (4, 5):
        request.token_ids.append(token)
        assert manager.append_slots(request, request.num_tokens)
        manager.cache_full_blocks(request, request.num_tokens)
    manager.free(request)
    again = make_request("b", [1, 2, 3, 4, 5, 6])
    assert manager.allocate(again)
    assert again.num_cached_tokens == 4


def test_double_allocation_is_an_error():
    manager = BlockManager(10, 4)
    request = make_request("a", [1, 2, 3])
    assert manager.allocate(request)
    with pytest.raises(ValueError, match="'a' holds blocks already"):
        manager.allocate(request)


@pytest.mark.parametrize(
    ("fields", "first", "later"),
    [
        ({}, None, None),
        ({"cache_salt": "x"}, (None, None, "x", None), None),
        ({"lora_id": "x"}, ("x", None, None, None), ("x", None, None, None)),
        ({"extra_keys": ("x", 1)}, (None, ("x", 1), None, None), (None, ("x", 1), None, None)),
        (
            {"lora_id": "l", "extra_keys": ("k",), "cache_salt": "s"},
            ("l", ("k",), "s", None),
            ("l", ("k",), None, None),
        ),
    ],
)
def test_extra_keys_are_adapter_own_keys_and_salt_of_the_first_block(fields, first, later):
    request = make_request("a", list(range(8)), **fields)
    assert (request.extra_keys_of(0), request.extra_keys_of(1)) == (first, later)
    request.extend_hashes(2, 4)
    parent = hash_block(None, range(4), first)
    assert request.block_hashes == [parent, hash_block(parent, range(4, 8), later)]


def test_requests_of_other_keys_share_nothing():
    manager = BlockManager(40, 4)
    prompt = list(range(9))
    kinds = [
        {},
        {"cache_salt": "x"},
        {"lora_id": "x"},
        {"extra_keys": ("x",)},
        {"extra_keys": (1,)},
    ]
    for fields in kinds:
        request = make_request("a", prompt, **fields)
        admit(manager, request)
        assert request.num_cached_tokens == 0, fields
    for fields in kinds:
        request = make_request("b", prompt, **fields)
        admit(manager, request)
        assert request.num_cached_tokens == 8, fields


def test_a_scored_prompt_hits_no_more_than_lies_before_its_scores():
    manager = BlockManager(20, 4)
    prompt = list(range(12))
    admit(manager, make_request("a", prompt))
    for score_start, num_hit in ((1, 0), (4, 0), (5, 4), (9, 8), (12, 8), (None, 8)):
        request = make_request("b", prompt, score_start=score_start)
        assert manager.allocate(request)
        assert request.num_computed_tokens == num_hit, score_start
        manager.free(request)


def test_tables_as_an_array():
    manager = BlockManager(10, 4)
    requests = [make_request("a", [1] * 9), make_request("b", [2] * 3)]
    for request in requests:
        assert manager.allocate(request)
    tables = manager.block_tables(requests)
    assert tables.dtype == "int32"
    assert tables.tolist() == [[1, 2, 3], [4, 0, 0]]
    assert manager.block_tables(requests, width=4).tolist() == [[1, 2, 3, 0], [4, 0, 0, 0]]
    with pytest.raises(ValueError, match="width=2 is too small: the longest table has 3 blocks"):
        manager.block_tables(requests, width=2)
