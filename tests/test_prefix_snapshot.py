"""Snapshots of the prefix cache: what was saved is hit, gives the same tokens, or is refused."""

import json

import numpy as np
import pytest
from tiny_engine import GREEDY, check_idle, prompts_of, run, tiny_llm, tiny_model, tokens_of

from paged_jax import SamplingParams, array_folder_writer, prefix_snapshot
from paged_jax.array_folder import MANIFEST_FILE, ArrayFolderError
from paged_jax.array_folder_writer import ArrayFolderWriter
from paged_jax.prompts import ParsedPrompt

BLOCK = 4
MODEL = tiny_model()


@pytest.fixture(autouse=True)
def small_batches(monkeypatch):
    monkeypatch.setattr(prefix_snapshot, "_MAX_BATCH_BLOCKS", 5)
    monkeypatch.setattr(array_folder_writer, "_GROUP_BYTES", 1 << 14)


def llm_of(**options):
    return tiny_llm(options.pop("model", MODEL), **{"warmup": False, **options})


@pytest.fixture(scope="module")
def engines():
    return llm_of(), llm_of()


@pytest.fixture
def warm(engines):
    """An engine that is filled and saved; empty at first, as is `later`, which is to load it."""
    return emptied(engines[0])


@pytest.fixture
def later(engines):
    return emptied(engines[1])


def emptied(llm):
    assert llm.reset_prefix_cache()
    return llm


def blocks_of(llm):
    return llm.engine.shards[0].scheduler.blocks


def num_cached(llm):
    return len(blocks_of(llm).pool.prefix_cache)


def num_cached_blocks_of(llm, prompts):
    requests = [llm._request_of(ParsedPrompt(token_ids=prompt)) for prompt in prompts]
    return [len(blocks_of(llm).find_cached(request)) for request in requests]


def cached_tokens(llm, prompts):
    return [output.num_cached_tokens for output in run(llm, prompts)]


def first_request_only(llm):
    """Prompts of 41 tokens, 10 full blocks each, run one after the other: the last used last."""
    prompts = prompts_of([41, 41, 41])
    for prompt in prompts:
        run(llm, [prompt], SamplingParams(temperature=0, max_tokens=1))
    return prompts


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "bfloat16"])
def test_a_later_engine_hits_what_was_saved_and_gives_the_same_tokens(
    tmp_path, warm, later, kv_cache_dtype
):
    if kv_cache_dtype != "auto":
        warm, later = (llm_of(kv_cache_dtype=kv_cache_dtype) for _ in range(2))
    prompts = prompts_of([41, 9, 57], seed=3)
    prompts.append(prompts[0][:24] + prompts[1])
    cold_tokens = tokens_of(run(warm, prompts))
    assert warm.save_prefix_cache(tmp_path / "s") == num_cached(warm)
    assert tokens_of(run(warm, prompts)) == cold_tokens  # Saving has changed nothing.
    before = later.get_metrics()["prefix_cache_hits"]
    assert later.load_prefix_cache(tmp_path / "s") == num_cached(later) > 30
    check_idle(later)
    outputs = run(later, prompts)
    assert tokens_of(outputs) == cold_tokens
    hits = [output.num_cached_tokens for output in outputs]
    assert hits == [(len(p) - 1) // BLOCK * BLOCK for p in prompts]
    assert later.get_metrics()["prefix_cache_hits"] - before == sum(hits)
    check_idle(later)


def test_generated_tokens_are_saved_as_well(tmp_path, warm, later):
    [prompt] = prompts_of([21])
    [output] = run(warm, [prompt])
    conversation = prompt + output.outputs[0].token_ids
    warm.save_prefix_cache(tmp_path / "s")
    later.load_prefix_cache(tmp_path / "s")
    assert cached_tokens(later, [[*conversation, 1, 2, 3]]) == [len(conversation) // BLOCK * BLOCK]


def test_a_smaller_pool_takes_the_last_used_whole_from_their_heads(tmp_path, warm):
    prompts = first_request_only(warm)
    assert warm.save_prefix_cache(tmp_path / "s") == 30
    small = llm_of(num_gpu_blocks_override=18, max_model_len=64)
    assert small.load_prefix_cache(tmp_path / "s") == 17
    assert num_cached_blocks_of(small, prompts) == [0, 7, 10]
    check_idle(small)
    # They are evicted in that order too: the tail of the one that was used first.
    run(small, prompts_of([9], seed=9), SamplingParams(temperature=0, max_tokens=1))
    assert num_cached_blocks_of(small, prompts) == [0, 4, 10]


def test_what_is_cached_or_under_way_stays(tmp_path, warm, later):
    saved = first_request_only(warm)
    warm.save_prefix_cache(tmp_path / "s")
    busy = llm_of(num_gpu_blocks_override=60)
    own = prompts_of([50, 33], seed=8)
    cold = tokens_of(run(later, own))
    run(busy, own[1:])
    run(busy, saved[:1])  # Equal blocks are not stored twice.
    before = num_cached(busy)
    restored, seen = None, []
    for output in busy.stream([{"prompt_token_ids": own[0]}], GREEDY):
        if len(output.outputs[0].token_ids) == 5:
            restored = busy.load_prefix_cache(tmp_path / "s")
            busy.engine.shards[0].scheduler.check_integrity()
        seen = output.outputs[0].token_ids
    assert restored is not None and 0 < restored <= 20
    assert seen == cold[0]
    assert num_cached(busy) >= before + restored
    assert tokens_of(run(busy, own)) == cold
    assert busy.load_prefix_cache(tmp_path / "s") in range(0, 21)
    check_idle(busy)


def test_saving_in_the_middle_of_requests(tmp_path, warm, later):
    prompts = prompts_of([37, 50], seed=5)
    cold, done = tokens_of(run(later, prompts)), {}
    for i, output in enumerate(warm.stream([{"prompt_token_ids": p} for p in prompts], GREEDY)):
        if i == 6:
            assert warm.save_prefix_cache(tmp_path / "s") >= 9 + 12
        done[output.prompt_index] = output.outputs[0].token_ids
    assert [done[0], done[1]] == cold
    emptied(later).load_prefix_cache(tmp_path / "s")
    assert cached_tokens(later, prompts) == [36, 48]
    assert tokens_of(run(later, prompts)) == cold


def test_pinned_prefixes_and_salts(tmp_path, warm, later):
    [pinned, salted] = prompts_of([33, 21])
    pin = warm.pin_prefix({"prompt_token_ids": pinned})
    warm.generate([{"prompt_token_ids": salted, "cache_salt": "a"}], GREEDY, use_tqdm=False)
    warm.save_prefix_cache(tmp_path / "s")
    warm.unpin_prefix(pin)
    later.load_prefix_cache(tmp_path / "s")
    assert cached_tokens(later, [pinned, salted]) == [32, 0]
    again = {"prompt_token_ids": salted, "cache_salt": "a"}
    [output] = later.generate([again], GREEDY, use_tqdm=False)
    assert output.num_cached_tokens == 20


def test_events_tell_of_restored_blocks(tmp_path, warm, later):
    prompts = first_request_only(warm)
    warm.save_prefix_cache(tmp_path / "s")
    hashes = []
    unsubscribe = later.kv_events().subscribe(lambda _, event: hashes.extend(event.block_hashes))
    later.load_prefix_cache(tmp_path / "s")
    unsubscribe()
    request = later._request_of(ParsedPrompt(token_ids=prompts[2]))
    request.extend_hashes(10, BLOCK)
    assert hashes[:10] == request.block_hashes  # The last used first, its head first.
    assert len(set(hashes)) == 30


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(model=tiny_model(seed=1)), "its weights are others; load the same weights"),
        (
            dict(model=tiny_model(num_layers=3)),
            r"its model.num_layers is 2, and here it is 3; load the model that it was saved with",
        ),
        (dict(block_size=8), "its block_size is 4, and here it is 8; make the engine with the sam"),
        (dict(kv_cache_dtype="bfloat16"), "its block_form is 'float32.* the same kv_cache_dtype"),
        (dict(model=tiny_model(dtype="bfloat16")), "its block_form is "),
        (
            dict(model=tiny_model(dtype="bfloat16"), kv_cache_dtype="float32"),
            "its weights are others",
        ),
    ],
)
def test_another_engines_snapshot_is_refused(tmp_path, warm, options, message):
    run(warm, prompts_of([20]))
    warm.save_prefix_cache(tmp_path / "s")
    other = llm_of(**options)
    with pytest.raises(ArrayFolderError, match=f"s was saved by another engine: {message}"):
        other.load_prefix_cache(tmp_path / "s")
    assert num_cached(other) == 0
    check_idle(other)


def test_an_int8_pool_takes_the_snapshots_scales_while_it_is_empty(tmp_path):
    prompts = prompts_of([30, 41])
    warm = llm_of(kv_cache_dtype="int8")
    tokens = tokens_of(run(warm, prompts))
    warm.save_prefix_cache(tmp_path / "s")
    other = llm_of(kv_cache_dtype="int8", max_model_len=96)  # The scales follow it.
    own_tokens = tokens_of(run(other, prompts))
    with pytest.raises(ArrayFolderError, match="has other int8 scales than this pool, which holds"):
        other.load_prefix_cache(tmp_path / "s")
    assert tokens_of(run(other, prompts)) == own_tokens
    emptied(other).load_prefix_cache(tmp_path / "s")
    outputs = run(other, prompts)
    assert [output.num_cached_tokens for output in outputs] == [28, 40]
    assert tokens_of(outputs) == tokens
    check_idle(other)
    # A fault that takes the pool leaves the scales.
    for layer in other.engine.runner.pool.layers:
        layer.delete()
    with pytest.raises(RuntimeError):
        run(other, prompts)
    assert tokens_of(run(other, prompts)) == tokens


def test_unfinished_and_damaged_snapshots_are_refused(tmp_path, warm, later):
    llm, other = warm, later
    first_request_only(llm)
    writer = ArrayFolderWriter(tmp_path / "s", prefix_snapshot.KIND)
    writer.add("row.0.blocks.000000.layer.000", np.ones(3))
    writer._flush()  # And here the process is killed; tests/test_array_folder.py does that.
    with pytest.raises(ArrayFolderError, match="s was never finished: writing stopped half-way"):
        other.load_prefix_cache(tmp_path / "s")
    with pytest.raises(FileNotFoundError, match=r"no prefix snapshot at .*nothing"):
        other.load_prefix_cache(tmp_path / "nothing")
    llm.save_prefix_cache(tmp_path / "s")
    manifest = json.loads((tmp_path / "s" / MANIFEST_FILE).read_text())
    del manifest["content"]["hashes"]
    (tmp_path / "s" / MANIFEST_FILE).write_text(json.dumps(manifest))
    with pytest.raises(ArrayFolderError, match=r"its description is no snapshot's .'hashes'."):
        other.load_prefix_cache(tmp_path / "s")
    llm.save_prefix_cache(tmp_path / "s")  # Replaces it.
    [path] = (tmp_path / "s").glob("arrays/*/row.0.blocks.000003.layer.001/0.0.0.0")
    content = bytearray(path.read_bytes())
    content[7] ^= 1
    path.write_bytes(content)
    with pytest.raises(ArrayFolderError, match=r"'row.0.blocks.000003.layer.001'.*not what was w"):
        other.load_prefix_cache(tmp_path / "s")
    assert num_cached(other) == 15  # The three batches before it.
    check_idle(other)


def test_what_cannot_be_saved_is_refused(tmp_path, warm):
    llm = llm_of(enable_prefix_caching=False)
    with pytest.raises(ValueError, match="enable_prefix_caching=False: there is no prefix cache"):
        llm.save_prefix_cache(tmp_path / "s")
    (tmp_path / "s").mkdir()
    with pytest.raises(FileExistsError, match="s exists: delete it, or give another path"):
        warm.save_prefix_cache(tmp_path / "s")


def test_an_empty_cache_makes_an_empty_snapshot(tmp_path, warm, later):
    assert warm.save_prefix_cache(tmp_path / "s") == 0
    assert later.load_prefix_cache(tmp_path / "s") == 0
