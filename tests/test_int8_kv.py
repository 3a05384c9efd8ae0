"""An int8 KV pool: exact up to its rounding, never copied, and four times as large a cache."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import heads_of
from test_worked_examples import Shape
from tiny_engine import GREEDY, check_idle, prompts_of, run, tiny_llm, tiny_model, tokens_of

import paged_jax as pj
from paged_jax import LLM, EngineConfig, SamplingParams
from paged_jax.attend import paged_attend
from paged_jax.kv_calibration import calibrate
from paged_jax.kv_pool import ChannelScales, KVPool

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 4, 2, 64, 16
MODEL = Shape(num_layers=1, num_kv_heads=NUM_KV_HEADS, head_dim=HEAD_DIM)
MAX_MODEL_LEN = 88
BLOCK_BYTES = 256  # 2 x 2 layers x 2 KV heads x 8 numbers x 4 tokens of the tiny model


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def llm(model) -> LLM:
    return int8_llm(model, max_model_len=MAX_MODEL_LEN)


def int8_llm(model, **options: Any) -> LLM:
    return tiny_llm(model, kv_cache_dtype="int8", **options)


def addresses(llm: LLM) -> list[int]:
    return [layer.unsafe_buffer_pointer() for layer in llm.engine.runner.pool.layers]


# --- the pool and its attention ------------------------------------------------------------------


def channels(rng: np.random.Generator, num_tokens: int, num_heads: int, offset) -> np.ndarray:
    """float32[num_tokens, num_heads, D] around offset[D], channels a hundredfold apart."""
    sizes = 10.0 ** np.random.default_rng(7).uniform(-1, 1, (num_heads, HEAD_DIM))
    values = sizes * (rng.uniform(-1, 1, (num_tokens, num_heads, HEAD_DIM)) + offset)
    return values.astype(np.float32)


def attended(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Causal attention of one sequence in float64; q are its last rows."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    k, v = (np.repeat(x, NUM_HEADS // NUM_KV_HEADS, axis=1) for x in (k, v))
    scores = np.einsum("thd,shd->hts", q, k) * HEAD_DIM**-0.5
    hidden = np.triu(np.ones((len(q), len(k)), bool), len(k) - len(q) + 1)
    scores = np.where(hidden, -np.inf, scores)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.einsum("hts,shd->thd", weights / weights.sum(axis=-1, keepdims=True), v)


def rounded(values: np.ndarray, scale: np.ndarray, offset: np.ndarray) -> np.ndarray:
    """What the pool makes of values[T, Hkv, D], as real numbers."""
    stored = np.clip(np.round((values - offset) / scale), -127, 127)
    return stored.astype(np.float64) * scale + offset


def exactly(values: np.ndarray, scale: np.ndarray, offset: np.ndarray) -> np.ndarray:
    return values


def uniform_scales(scale: float, offset: float = 0.0) -> ChannelScales:
    shape = (1, 2 * NUM_KV_HEADS, HEAD_DIM)
    return ChannelScales(np.full(shape, scale, np.float32), np.full(shape, offset, np.float32))


@pytest.mark.parametrize("implementation", ["reference", "xla", None, "tpu"])
def test_attention_is_that_over_the_rounded_cache(implementation: str | None) -> None:
    """Two sequences: prefills in two chunks, then a step of decodes."""
    rng = np.random.default_rng(1)
    lengths, tables = [35, 21], [[5, 2, 7], [3, 6]]
    away = rng.uniform(-3, 3, HEAD_DIM)
    k, v = ([channels(rng, n, NUM_KV_HEADS, away) for n in lengths] for _ in "kv")
    spans_of = [np.concatenate(x).max(axis=0) - np.concatenate(x).min(axis=0) for x in (k, v)]
    # Of what stands at the edges of a channel's range a little is clipped.
    scale = np.stack(spans_of).astype(np.float32) * (0.99 / 254)
    offset = np.stack(
        [np.concatenate(x).min(axis=0) + s / 2 for x, s in zip((k, v), spans_of, strict=True)]
    )
    # Scores of a few units.
    q = [rng.uniform(-1, 1, (n, NUM_HEADS, HEAD_DIM)) / spans_of[0].repeat(2, 0) for n in lengths]
    q = [(4 * x).astype(np.float32) for x in q]
    shape = (1, 2 * NUM_KV_HEADS, HEAD_DIM)
    pool = KVPool.create(
        MODEL,
        num_blocks=8,
        block_size=BLOCK_SIZE,
        dtype=jnp.int8,
        scales=ChannelScales(scale.reshape(shape), offset.reshape(shape)),
        for_tpu=implementation == "tpu",
    )
    assert pool.layers[0].dtype == jnp.int8

    @functools.partial(jax.jit, static_argnames="decode_only")
    def attend(q, k, v, cache, batch, decode_only):
        return paged_attend(
            batch,
            block_size=BLOCK_SIZE,
            scale=HEAD_DIM**-0.5,
            decode_only=decode_only,
            implementation=implementation,
        )(heads_of(q, k, v), cache)

    spans = [(0, 8), (8, 34), (34, 35)], [(0, 19), (19, 20), (20, 21)]
    for step in range(3):
        here = [(s, *own[step]) for s, own in enumerate(spans)]
        rows = lambda arrays, here=here: np.concatenate([arrays[s][a:b] for s, a, b in here])
        batch = pj.make_batch(
            [[0] * (b - a) for _, a, b in here],
            [a for _, a, _ in here],
            tables,
            block_size=BLOCK_SIZE,
        )
        out, cache = attend(*map(rows, (q, k, v)), pool.caches[0], batch, decode_only=step == 2)
        pool = pool.with_caches((cache,))
        keys, values = (scale[0], offset[0]), (scale[1], offset[1])
        expected, exact = (
            np.concatenate(
                [attended(q[s][a:b], f(k[s][:b], *keys), f(v[s][:b], *values)) for s, a, b in here]
            )
            for f in (rounded, exactly)
        )
        largest = np.abs(np.concatenate(v)).max(axis=0).repeat(2, axis=0)  # of query heads
        assert (np.abs(out - expected) / largest).max() < 1e-5
        # A score is wrong by at most `wrong`, its weight by a factor of exp(2 * wrong), and a value
        # by half a step, or by what was clipped.
        steps = 0.5 + 127 * (1 / 0.99 - 1)
        query = np.abs(rows(q)) * HEAD_DIM**-0.5
        wrong = (query * scale[0].repeat(2, axis=0)).sum(axis=-1, keepdims=True) * steps
        bound = np.expm1(2 * wrong) * largest + scale[1].repeat(2, axis=0) * steps
        assert (np.abs(out - exact) <= bound).all()
        assert np.median(bound / largest) < 0.5, "a bound that forbids nothing"


def test_what_is_stored_is_rounded_to_even_and_clipped() -> None:
    pool = KVPool.create(
        MODEL, num_blocks=2, block_size=4, dtype=jnp.int8, scales=uniform_scales(2.0, 10.0)
    )
    batch = jax.tree.map(jnp.asarray, pj.make_batch([[0]], [0], [[1]], block_size=4))
    attend = paged_attend(batch, block_size=4, scale=1.0)
    numbers = [1.0, 3.0, 5.0, -1.0, -3.0, 4.9, 254.0, 255.0, 900.0, -900.0]
    row = np.resize(np.array(numbers, np.float32), (1, NUM_KV_HEADS, HEAD_DIM))
    row = jnp.asarray(row)
    query = jnp.zeros((1, NUM_HEADS, HEAD_DIM))
    out, cache = attend(heads_of(query, row + 10, row + 10), pool.caches[0])
    expected = np.resize([0, 2, 2, 0, -2, 2, 127, 127, 127, -127], row.shape)
    written = pool.with_caches((cache,)).layers[0]
    np.testing.assert_array_equal(written[1, :, 0], np.concatenate([expected[0]] * 2))
    np.testing.assert_array_equal(out[0], np.repeat(2 * expected[0] + 10, 2, axis=0))


def test_scales_belong_to_int8_pools() -> None:
    sizes: dict[str, Any] = dict(num_blocks=4, block_size=4)
    with pytest.raises(ValueError, match=r"scales has shape None, .* needs \(1, 4, 64\)"):
        KVPool.create(MODEL, dtype=jnp.int8, **sizes)
    with pytest.raises(ValueError, match="leave scales out"):
        KVPool.create(MODEL, scales=uniform_scales(1.0), **sizes)
    with pytest.raises(ValueError, match="float32, bfloat16 or int8"):
        KVPool.create(MODEL, dtype=jnp.float16, **sizes)
    pool = KVPool.create(MODEL, dtype=jnp.int8, scales=uniform_scales(3.0), **sizes)
    kept = pool.empty_like().scales
    assert kept is not None and (kept.scale == 3).all()
    jax.tree.map(lambda array: array.delete(), pool)
    assert pool.is_deleted()
    renewed = pool.empty_like(uniform_scales(4.0))
    assert renewed.scales is not None and (renewed.scales.scale == 4).all()
    assert not renewed.is_deleted()


# --- calibration ---------------------------------------------------------------------------------


def test_calibrated_channels_use_their_range_and_clip_little(model) -> None:
    llm = int8_llm(model, num_gpu_blocks_override=100, warmup=False)
    run(llm, prompts_of([100, 90, 80], seed=5), SamplingParams(temperature=0, max_tokens=1))
    for layer in llm.engine.runner.pool.layers:
        used = np.abs(np.asarray(layer[1:], np.int32)).transpose(1, 3, 0, 2).reshape(4, 8, -1)
        used = used[:, :, used.any(axis=(0, 1))]
        assert used.shape[-1] == 100 + 90 + 80
        assert (used == 127).mean() < 0.002
        assert used.max(axis=-1).min() > 40


def calibrated(model, params) -> ChannelScales:
    return calibrate(params, config=model.config, tokenizer=None, max_model_len=512)


def test_scales_follow_the_weights(model) -> None:
    scales = calibrated(model, model.params)
    assert scales.scale.shape == scales.offset.shape == (2, 4, 8)
    assert scales.scale.dtype == scales.offset.dtype == np.float32 and (scales.scale > 0).all()
    doubled = [layer.replace(qkv=layer.qkv * 2) for layer in model.params.layers]
    louder = model.params.replace(layers=(doubled[0], *model.params.layers[1:]))
    twice = calibrated(model, louder)
    np.testing.assert_allclose(twice.scale[0], 2 * scales.scale[0], rtol=1e-4)
    np.testing.assert_allclose(twice.offset[0], 2 * scales.offset[0], rtol=1e-4, atol=1e-5)


def test_a_model_that_is_not_finite_is_refused(model) -> None:
    params = model.params.replace(embed=model.params.embed * np.nan)
    with pytest.raises(ValueError, match="not finite on ordinary text; check its weights"):
        calibrated(model, params)


# --- the engine ----------------------------------------------------------------------------------


def test_tokens_do_not_depend_on_how_they_are_scheduled(model, llm) -> None:
    """Company, prefix hits, chunks, preemption and swapping; the pool stays where it is."""
    prompts = prompts_of([3, 7, 20, 33, 60, 12, 41])
    before = addresses(llm)
    with jax.no_tracing():
        alone = [tokens_of(run(llm, [prompt]))[0] for prompt in prompts]
        assert len({tuple(tokens) for tokens in alone}) > len(prompts) // 2, "too dull"
        warm = run(llm, prompts)
    assert tokens_of(warm) == alone
    assert sum(output.num_cached_tokens for output in warm) > 100
    assert addresses(llm) == before
    check_idle(llm)
    # 22 blocks hold 88 tokens, so that preemption is sure. The scales depend on max_model_len.
    small: dict[str, Any] = dict(num_gpu_blocks_override=23, max_model_len=MAX_MODEL_LEN)
    for mode in ("recompute", "swap"):
        cramped = int8_llm(model, preemption_mode=mode, swap_space_bytes=300 * BLOCK_BYTES, **small)
        before = addresses(cramped)
        assert tokens_of(run(cramped, prompts)) == alone
        metrics = cramped.get_metrics()
        assert metrics["num_preemptions_by_mode"][mode] >= 3
        assert addresses(cramped) == before
        check_idle(cramped)


def test_forks_continue_as_a_whole_prompt_does(llm) -> None:
    (prompt,) = prompts_of([22])
    expected = tokens_of(run(llm, [prompt, [*prompt, 5]]))
    with llm.start({"prompt_token_ids": prompt}) as session, session.fork() as fork:
        fork.extend([5])
        assert fork.generate(GREEDY).outputs[0].token_ids == expected[1]
        assert session.generate(GREEDY).outputs[0].token_ids == expected[0]
    params = SamplingParams(n=3, temperature=1.0, top_k=1, max_tokens=24, ignore_eos=True)
    (output,) = run(llm, [prompt], params)
    assert [completion.token_ids for completion in output.outputs] == expected[:1] * 3
    check_idle(llm)


def test_a_pool_lost_in_a_failed_step_gets_its_scales_again(llm) -> None:
    prompts = prompts_of([9, 20])
    expected = tokens_of(run(llm, prompts))
    runner = llm.engine.runner
    jax.tree.map(lambda array: array.delete(), runner.pool)
    assert runner.renew_pool()
    assert llm.reset_prefix_cache()
    assert tokens_of(run(llm, prompts)) == expected


def test_most_tokens_are_those_of_float32(model, llm) -> None:
    prompts = prompts_of([9, 20, 33, 48], seed=3)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    plain, rounded = (run(own, prompts, params) for own in (tiny_llm(model), llm))
    errors, same = [], []
    for a, b in zip(plain, rounded, strict=True):
        assert a.prompt_logprobs is not None and b.prompt_logprobs is not None
        for x, y in zip(a.prompt_logprobs[1:], b.prompt_logprobs[1:], strict=True):
            assert x is not None and y is not None
            token_id = next(iter(x))
            errors.append(abs(x[token_id].logprob - y[token_id].logprob))
            best = [min(entry, key=lambda t, entry=entry: entry[t].rank) for entry in (x, y)]
            same.append(best[0] == best[1])
    assert np.mean(errors) < 0.1 and np.mean(same) > 0.8
    assert max(errors) > 1e-4, "nothing was rounded"


# --- sizes ---------------------------------------------------------------------------------------


def test_four_times_the_blocks_of_float32(model) -> None:
    options: dict[str, Any] = dict(kv_cache_memory_bytes=240 * BLOCK_BYTES, warmup=False)
    options |= dict(swap_space_bytes=40 * BLOCK_BYTES)
    for kv_cache_dtype, share in {"auto": 4, "float32": 4, "bfloat16": 2, "int8": 1}.items():
        llm = tiny_llm(model, kv_cache_dtype=kv_cache_dtype, **options)
        runner = llm.engine.runner
        assert llm.engine.config.num_blocks == runner.pool.num_blocks == 240 // share
        assert runner.pool.num_bytes == 240 * BLOCK_BYTES
        assert runner.mover.bytes_a_block == share * BLOCK_BYTES
        assert runner.mover.num_host_blocks == 40 // share + 1
        assert llm.engine.scheduler.costs.bytes_a_token == share * BLOCK_BYTES // 4
        memory = llm.memory_report().memory_bytes
        kv_bytes = {k: n for k, n in memory.items() if k.startswith("kv_")}
        assert sum(kv_bytes.values()) == 240 * BLOCK_BYTES
        assert memory["kv_null"] == share * BLOCK_BYTES


def test_the_engines_dtype_is_one_of_those_it_serves(model) -> None:
    for value in ("int4", "fp8_e4m3", None):
        with pytest.raises(ValueError, match=f"kv_cache_dtype={value!r}: it must be one of .*int8"):
            EngineConfig(kv_cache_dtype=value)  # pyright: ignore[reportArgumentType]


def test_a_pool_may_be_wider_or_narrower_than_its_model(model) -> None:
    """A wider one changes nothing."""
    prompts = prompts_of([9, 20])
    narrow = tiny_model(dtype="bfloat16")
    expected = tokens_of(run(tiny_llm(narrow, warmup=False), prompts))
    llm = tiny_llm(narrow, kv_cache_dtype="float32", warmup=False)
    assert llm.engine.runner.pool.layers[0].dtype == jnp.float32
    assert tokens_of(run(llm, prompts)) == expected
    rounded = tiny_llm(model, kv_cache_dtype="bfloat16", warmup=False)
    assert rounded.engine.runner.pool.layers[0].dtype in (jnp.bfloat16, jnp.uint16)
    before = addresses(rounded)
    assert [len(tokens) for tokens in tokens_of(run(rounded, prompts))] == [24, 24]
    assert addresses(rounded) == before
