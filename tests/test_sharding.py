"""Engines on meshes of virtual CPU devices, against the same engine on one device."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from test_goldens import GOLDENS, check, make_llm, params_of
from tiny_engine import GREEDY, prompts_of, run, tiny_llm, tiny_model, tokens_of

import paged_jax as pj
from paged_jax import SamplingParams
from paged_jax.batch import make_batch, make_sampling
from paged_jax.kv_pool import KVPool
from paged_jax.models.loader import load_model, spread_model
from paged_jax.models.params import abstract_params, spread_params
from paged_jax.models.partition import split_config
from paged_jax.models.registry import model_module
from paged_jax.sharding import StepSpecs, for_pmap, make_mesh, on_mesh, specs, stack_rows
from paged_jax.step import sample_step

PROMPTS = prompts_of([5, 40, 17, 3, 29, 60, 8, 12, 33, 21, 7, 18])


@pytest.fixture(scope="module")
def wide():
    """Eight KV heads, sixteen query heads."""
    return tiny_model(num_heads=16, num_kv_heads=8, num_layers=2)


@pytest.fixture(scope="module")
def expected(wide):
    return tokens_of(run(tiny_llm(wide, warmup=False), PROMPTS))


def pointers(llm):
    layers = llm.engine.runner.pool.layers
    return [s.data.unsafe_buffer_pointer() for layer in layers for s in layer.addressable_shards]


def check_idle(llm):
    assert not llm.engine.has_unfinished()
    for shard in llm.engine.shards:
        shard.scheduler.check_integrity()
        assert shard.scheduler.blocks.pool.num_used_blocks == 0


@pytest.mark.parametrize(("data", "tensor"), [(1, 8), (2, 4), (4, 2), (8, 1), (1, 1)])
def test_tokens_are_those_of_one_device_and_the_pool_stays_in_place(wide, expected, data, tensor):
    mesh = make_mesh(data, tensor)
    llm = tiny_llm(wide, mesh=mesh, warmup=False)
    before = pointers(llm)
    assert tokens_of(run(llm, PROMPTS)) == expected
    assert pointers(llm) == before
    assert len(llm.engine.shards) == data
    assert llm.engine.num_seats == data * llm.engine.config.max_num_seqs
    served = [shard.scheduler.blocks.pool.peak_used_blocks for shard in llm.engine.shards]
    assert min(served) > 0
    check_idle(llm)


@pytest.mark.parametrize(
    "options",
    [
        dict(decode_lookahead=6),
        dict(num_gpu_blocks_override=34),  # Preempts.
        dict(num_gpu_blocks_override=34, swap_space_bytes=2**20, preemption_mode="swap"),
        dict(speculation="prompt_lookup", max_num_seqs=16),
        dict(max_num_seqs=2),
    ],
    ids=["ahead", "recompute", "swap", "guesses", "few seats"],
)
def test_every_way_of_serving_gives_the_same_tokens(wide, expected, options):
    llm = tiny_llm(wide, data_parallel_size=2, tensor_parallel_size=2, warmup=False, **options)
    assert tokens_of(run(llm, PROMPTS)) == expected
    metrics = llm.get_metrics()
    if "num_gpu_blocks_override" in options:
        assert metrics["num_preemptions"] > 0
    if "swap_space_bytes" in options:
        assert metrics["num_preemptions_by_mode"]["swap"] > 0
        assert 0 < metrics["swap_in_tokens"] <= metrics["swap_out_tokens"]
    check_idle(llm)


def test_a_row_has_nothing_to_do_while_the_other_decodes_ahead(wide, expected):
    llm = tiny_llm(wide, data_parallel_size=2, decode_lookahead=6, warmup=False)
    assert tokens_of(run(llm, PROMPTS[:1])) == expected[:1]
    check_idle(llm)


def test_devices_share_a_kv_head_where_there_are_more_of_them():
    model = tiny_model(num_heads=8, num_kv_heads=2)
    plain = tokens_of(run(tiny_llm(model, warmup=False), PROMPTS[:6]))
    llm = tiny_llm(model, tensor_parallel_size=8, warmup=False)
    assert tokens_of(run(llm, PROMPTS[:6])) == plain
    # A head each: four times the keys and values of one device.
    assert llm.engine.runner.pool.layers[0].shape[1] == 2 * 8


def test_a_vocabulary_that_cannot_be_cut_is_whole_on_each_device():
    model = tiny_model(vocab_size=261, num_heads=4, num_kv_heads=4)
    llm = tiny_llm(model, tensor_parallel_size=2, warmup=False)
    plain = tiny_llm(model, warmup=False)
    assert tokens_of(run(llm, PROMPTS[:4])) == tokens_of(run(plain, PROMPTS[:4]))
    embed = llm.engine.runner.params.embed
    assert {shard.data.shape for shard in embed.addressable_shards} == {embed.shape}


def test_samples_forks_and_sessions_on_a_mesh(wide):
    sampled = SamplingParams(temperature=0.8, top_p=0.9, seed=3, n=3, max_tokens=12, logprobs=2)
    meshed = tiny_llm(wide, data_parallel_size=2, tensor_parallel_size=2, warmup=False)
    plain = tiny_llm(wide, warmup=False)

    def outputs_of(llm):
        outputs = run(llm, PROMPTS[:5], sampled)
        return [[c.token_ids for c in output.outputs] for output in outputs]

    assert outputs_of(meshed) == outputs_of(plain)
    assert meshed.get_metrics()["cow_copies"] > 0

    def session_tokens(llm):
        sessions = [llm.start({"prompt_token_ids": prompt}) for prompt in PROMPTS[:4]]
        forks = [session.fork() for session in sessions]
        for fork in forks:
            fork.extend([7, 8, 9])
        together = pj.generate_together([*sessions, *forks], GREEDY)
        return tokens_of(together)

    assert session_tokens(meshed) == session_tokens(plain)


@pytest.mark.parametrize("tensor", [2, 4])
def test_int8_weights_and_pools_on_a_mesh_are_near_float32(wide, tensor, tmp_path):
    """Their parts have scales of their own, so that tokens need not be those of one device."""
    mesh = make_mesh(2, tensor)
    declared = model_module(wide.config).param_specs(wide.config)
    params = spread_params(wide.params, declared, mesh, "float32", "int8")
    model = dataclasses.replace(wide, params=params, mesh=mesh, quantization="int8")
    llm = tiny_llm(model, warmup=False, kv_cache_dtype="int8")
    outputs = run(llm, PROMPTS, dataclasses.replace(GREEDY, max_tokens=1, logprobs=0))
    plain = run(
        tiny_llm(wide, warmup=False), PROMPTS, dataclasses.replace(GREEDY, max_tokens=1, logprobs=0)
    )
    ours, theirs = map(first_logprobs, (outputs, plain))
    assert np.abs(ours - theirs).max() < 0.15
    abstract = abstract_params(declared, "float32", "int8", mesh=mesh)
    jax.tree.map(lambda a, b: check_like(a, b), abstract, params)


def first_logprobs(outputs):
    """Of each output's first token."""
    found = []
    for output in outputs:
        logprobs = output.outputs[0].logprobs
        assert logprobs is not None
        found.append(next(iter(logprobs[0].values())).logprob)
    return np.array(found)


def check_like(abstract, array):
    assert (abstract.shape, abstract.dtype) == (array.shape, array.dtype)
    assert abstract.sharding == array.sharding


def test_one_body_under_jit_pmap_and_shard_map():
    """The same tokens, and the same pool, from `sample_step` under each of them."""
    model = tiny_model(num_heads=8, num_kv_heads=4)
    prompts, block_size = prompts_of([9, 4, 14]), 4
    tables = [[1, 2, 3], [4], [5, 6, 7, 8]]
    batch = make_batch(prompts, [0, 0, 0], tables, block_size=block_size)
    sampling = make_sampling([GREEDY] * 3, [0] * 3, [len(p) for p in prompts])
    form: dict[str, Any] = dict(num_blocks=12, block_size=block_size)

    pool = KVPool.create(model.config, **form)
    step = functools.partial(sample_step, config=model.config)
    pool, plain = jax.jit(step, donate_argnums=1)(model.params, pool, batch, sampling)

    mesh = make_mesh(1, 4)
    spread = spread_model(model, mesh)
    config = split_config(model.config, 4)
    where = specs(model.config, mesh)
    shardings = jax.tree.map(functools.partial(NamedSharding, mesh), where.pool)
    step = functools.partial(sample_step, config=config)
    mapped = on_mesh(step, mesh, where)
    assert StepSpecs.of_arrays(spread.params, KVPool.create(config, **form, shardings=shardings))

    mesh_pool = KVPool.create(config, **form, shardings=shardings)
    mesh_pool, of_mesh = jax.jit(mapped, donate_argnums=1)(
        spread.params, mesh_pool, stack_rows([batch]), stack_rows([sampling])
    )
    params, pmap_pool = for_pmap(
        (spread.params, KVPool.create(config, **form, shardings=shardings)), mesh
    )
    under_pmap = jax.pmap(
        functools.partial(step, tensor_axis="tensor"),
        axis_name="tensor",
        in_axes=(0, 0, None, None),
        donate_argnums=1,
        devices=list(mesh.devices.flat),
    )
    before = [s.data.unsafe_buffer_pointer() for s in pmap_pool.layers[0].addressable_shards]
    pmap_pool, of_pmap = under_pmap(params, pmap_pool, batch, sampling)
    after = [s.data.unsafe_buffer_pointer() for s in pmap_pool.layers[0].addressable_shards]
    assert after == before
    np.testing.assert_array_equal(of_mesh.token_ids[0], plain.token_ids)
    for row in np.asarray(of_pmap.token_ids):
        np.testing.assert_array_equal(row, plain.token_ids)
    for ours, meshed, whole in zip(pmap_pool.layers, mesh_pool.layers, pool.layers, strict=True):
        # Keys and values of a head each.
        keys = np.concatenate([np.asarray(part)[:, :1] for part in ours], axis=1)
        np.testing.assert_allclose(keys, np.asarray(whole)[:, :4], atol=1e-5)
        np.testing.assert_array_equal(np.asarray(meshed)[:, ::2], keys)


def test_data_parallel_under_pmap():
    """Each device has a model and a pool; weights are laid out once, not at every call."""
    model = tiny_model()
    mesh = make_mesh(4, 1)
    spread = spread_model(model, mesh)
    prompts = prompts_of([6, 9, 5, 7], seed=1)
    batches = [
        make_batch([prompt], [0], [[1, 2, 3]], block_size=4, num_tokens=12) for prompt in prompts
    ]
    where = specs(model.config, mesh)
    shardings = jax.tree.map(functools.partial(NamedSharding, mesh), where.pool)
    pool = KVPool.create(model.config, num_blocks=4 * 4, block_size=4, shardings=shardings)
    params, pool = for_pmap((spread.params, pool), mesh)
    step = jax.pmap(
        functools.partial(pj.forward, config=model.config),
        axis_name="data",
        donate_argnums=1,
        devices=list(mesh.devices.flat),
    )
    _, logits = step(params, pool, stack_rows(batches))
    for prompt, batch, ours in zip(prompts, batches, np.asarray(logits), strict=True):
        own_pool = KVPool.create(model.config, num_blocks=4, block_size=4)
        _, alone = pj.forward(model.params, own_pool, batch, config=model.config)
        np.testing.assert_allclose(ours[0], alone[0], rtol=1e-4, atol=1e-4, err_msg=str(prompt))


def test_work_spreads_evenly_over_four_pools():
    """Blocks in use, on average over the run, within 10% of each other."""
    llm = tiny_llm(
        tiny_model(num_layers=1), data_parallel_size=4, warmup=False, num_gpu_blocks_override=60
    )
    rng = np.random.default_rng(5)
    shared = rng.integers(0, 256, 12).tolist()  # Three blocks that a quarter of them begin with.
    params = []
    for i in range(400):
        prompt = rng.integers(0, 256, int(rng.integers(4, 60))).tolist()
        params.append(
            dataclasses.replace(GREEDY, max_tokens=int(rng.integers(1, 30)), detokenize=False)
        )
        llm.engine.add_request(str(i), shared + prompt if i % 4 == 0 else prompt, params[-1])
    used = []
    num_outputs = 0
    while llm.engine.has_unfinished():
        outputs = llm.engine.step()
        num_outputs += len(outputs)
        assert all(
            len(o.outputs[0].token_ids) == params[int(o.request_id)].max_tokens for o in outputs
        )
        used.append([s.scheduler.blocks.pool.num_used_blocks for s in llm.engine.shards])
    assert num_outputs == 400
    means = np.mean(used, axis=0)
    assert means.max() <= 1.1 * means.min(), means
    check_idle(llm)


def test_a_prefix_draws_requests_to_the_pool_that_has_it():
    llm = tiny_llm(data_parallel_size=4, warmup=False)
    texts = prompts_of([24, 24, 24, 24], seed=2)
    for round_ in range(3):
        prompts = [[*text, round_, i] for i, text in enumerate(texts)]
        run(llm, prompts)
    metrics = llm.get_metrics()
    assert metrics["prefix_cache_hits"] == 2 * 4 * 24
    check_idle(llm)


def test_a_fault_loses_and_changes_nothing(wide, expected, monkeypatch):
    llm = tiny_llm(wide, data_parallel_size=2, tensor_parallel_size=2, warmup=False)
    calls, run_step = [], llm.engine.runner.run

    def failing(*args):
        calls.append(1)
        if len(calls) == 5:
            jax.tree.map(lambda x: x.delete(), llm.engine.runner.pool.layers)  # As a failed step.
            raise RuntimeError("a device is gone")
        return run_step(*args)

    monkeypatch.setattr(llm.engine.runner, "run", failing)
    for i, prompt in enumerate(PROMPTS):
        llm.engine.add_request(str(i), prompt, GREEDY)
    outputs, failures = {}, 0
    while llm.engine.has_unfinished():
        try:
            outputs |= {output.request_id: output for output in llm.engine.step()}
        except RuntimeError:
            failures += 1
    assert failures == 1
    assert tokens_of([outputs[str(i)] for i in range(len(PROMPTS))]) == expected
    check_idle(llm)


@pytest.mark.parametrize("lookahead", [1, 8])
def test_what_one_row_ended_stays_when_another_rows_outputs_fail(
    wide, expected, monkeypatch, lookahead
):
    llm = tiny_llm(wide, data_parallel_size=2, decode_lookahead=lookahead, warmup=False)
    first, second = llm.engine.shards
    take = second.take

    def interrupted(*args):
        if not first.scheduler.requests:  # Its request ended in this very step.
            monkeypatch.undo()
            raise KeyboardInterrupt
        return take(*args)

    monkeypatch.setattr(second, "take", interrupted)
    for i in range(2):
        llm.engine.add_request(str(i), PROMPTS[i], GREEDY)
    outputs, failures = [], 0
    while llm.engine.has_unfinished():
        try:
            outputs += llm.engine.step()
        except KeyboardInterrupt:
            failures += 1
    assert failures == 1
    outputs.sort(key=lambda output: output.request_id)
    assert tokens_of(outputs) == expected[:2]
    check_idle(llm)


def test_a_miss_is_explained_by_the_row_that_served_it():
    llm = tiny_llm(data_parallel_size=2, warmup=False, num_gpu_blocks_override=34)
    texts = [list(range(start, start + 20)) for start in (100, 10)]  # One a row.
    run(llm, texts)
    for text, name in zip(texts, "01", strict=True):
        miss = llm.explain_prefix_miss({"prompt_token_ids": [*text[:2], *[1] * 20]})
        assert (miss.nearest_request_id, miss.num_common_tokens) == (name, 2)
    for shard in llm.engine.shards:
        pool = shard.scheduler.blocks.pool
        pool.release(pool.take(pool.num_free_blocks))
    outputs = run(llm, texts)
    assert [llm.explain_prefix_miss(output).reason for output in outputs] == ["evicted"] * 2


def test_aborts_reach_queued_and_running_requests(wide):
    llm = tiny_llm(wide, data_parallel_size=2, warmup=False, max_num_seqs=1)
    for i in range(5):
        llm.engine.add_request(str(i), PROMPTS[0], GREEDY)
    with pytest.raises(ValueError, match="request_id='4' is in use"):
        llm.engine.add_request("4", PROMPTS[0], GREEDY)
    llm.engine.step()
    assert llm.get_metrics()["num_requests_waiting"] == 3
    for name in ("0", "4"):
        output = llm.engine.abort(name)
        assert output is not None and output.outputs[0].finish_reason == "abort"
    assert llm.engine.abort("4") is None
    left = []
    while llm.engine.has_unfinished():
        left += [output.request_id for output in llm.engine.step()]
    assert sorted(left) == ["1", "2", "3"]
    check_idle(llm)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            dict(tensor_parallel_size=3),
            "tensor_parallel_size=3: the model's num_heads=16 is no mul",
        ),
        (dict(data_parallel_size=9), "needs 9 devices, and there are 8; lower one of them"),
        (dict(tensor_parallel_size=16), "needs 16 devices"),
        (dict(mesh=Mesh(np.array(jax.devices()[:2]), ("x",))), r"mesh=\('x',\): it must be"),
        (
            dict(mesh=make_mesh(2, 2), tensor_parallel_size=4),
            "tensor_parallel_size=4, and the mesh's axis 'tensor' has the size 2",
        ),
    ],
)
def test_what_cannot_be_is_named(wide, options, message):
    with pytest.raises(ValueError, match=message):
        tiny_llm(wide, warmup=False, **options)


def test_a_model_on_another_mesh_is_not_moved(wide):
    spread = spread_model(wide, make_mesh(2, 2))
    with pytest.raises(ValueError, match="load it with load_model"):
        tiny_llm(spread, mesh=make_mesh(1, 4), warmup=False)


@pytest.mark.parametrize(
    ("data", "tensor"),
    [
        (2, 3),
        pytest.param(1, 3, marks=pytest.mark.full),
        pytest.param(4, 1, marks=pytest.mark.full),
        pytest.param(8, 1, marks=pytest.mark.full),
    ],
)
def test_goldens(demo_model_path, data, tensor, request):
    goldens = GOLDENS if "full" in request.config.getoption("-m", "") else GOLDENS[:8]
    llm = make_llm(demo_model_path, data_parallel_size=data, tensor_parallel_size=tensor)
    messages = [golden["messages"] for golden in goldens]
    check(goldens, llm.chat(messages, [params_of(g) for g in goldens], use_tqdm=False))
    check_idle(llm)


def test_each_process_reads_only_its_parts(demo_model_path):
    """Weights loaded to a mesh are those of one device, cut."""
    mesh = make_mesh(2, 3)
    spread = load_model(demo_model_path, dtype="float32", mesh=mesh)
    whole = load_model(demo_model_path, dtype="float32")
    layer, cut = whole.params.layers[3], spread.params.layers[3]
    np.testing.assert_array_equal(cut.out, layer.out)
    np.testing.assert_array_equal(cut.qkv, layer.qkv)  # Groups of heads lie together in both.
    gate, up = jnp.split(layer.gate_up, 2)
    parts = [np.concatenate(pair) for pair in zip(np.split(gate, 3), np.split(up, 3), strict=True)]
    np.testing.assert_array_equal(cut.gate_up, np.concatenate(parts))
    assert cut.gate_up.addressable_shards[0].data.shape == (1024, 576)
