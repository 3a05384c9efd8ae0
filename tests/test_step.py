"""The functional core against dense float32 attention without pages, under the caller's own jit."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense_llama import model_logits
from tiny_engine import tiny_model

import paged_jax as pj
from paged_jax.batch import Buckets, make_sampling
from paged_jax.batch_builder import decodes
from paged_jax.config import SchedulerConfig
from paged_jax.models import int4
from paged_jax.models.quantized import quantize_matrix
from paged_jax.request import Request
from paged_jax.sampling import sample
from paged_jax.sampling_params import SamplingParams
from paged_jax.scheduler import Scheduler

GOLDENS = Path(__file__).parent / "goldens" / "smollm2_135m_q4_1_greedy.json"


def quantize_int8(matrix):
    return quantize_matrix(np.asarray(matrix), "int8", "float32")


def quantize_int4(matrix):
    return int4.quantize_int4(np.asarray(matrix), "float32")


def dense_logits(model, tokens):
    """float32[len, vocab] of one sequence, without pages."""
    return np.asarray(
        model_logits(
            model.params,
            jnp.asarray(tokens, jnp.int32),
            jnp.arange(len(tokens), dtype=jnp.int32),
            config=model.config,
        )
    )


def relative_error(ours, reference):
    return np.abs(ours - reference).max() / np.abs(reference).max()


def check_against_dense(model, sequences, split, block_size, num_blocks):
    """Prefills in two ragged chunks, decodes two tokens each, and compares every step's logits."""
    step = jax.jit(pj.forward, static_argnames="config", donate_argnames="pool")
    blocks = pj.BlockManager(num_blocks, block_size)
    requests = []
    for i, tokens in enumerate(sequences):
        params = SamplingParams(max_tokens=1)
        requests.append(pj.Request(str(i), tokens, params, max_model_len=10_000))
        assert blocks.allocate(requests[-1])
    tables = [request.block_ids for request in requests]
    pool = pj.KVPool.create(model.config, num_blocks=num_blocks, block_size=block_size)
    expected = [dense_logits(model, tokens) for tokens in sequences]
    ends = [len(tokens) - 2 for tokens in sequences]
    spans = [[0, split, end, end + 1, end + 2] for end in ends]
    for phase in range(4):
        starts = [span[phase] for span in spans]
        chunk = [
            tokens[span[phase] : span[phase + 1]]
            for tokens, span in zip(sequences, spans, strict=True)
        ]
        batch = pj.make_batch(
            chunk, starts, tables, block_size=block_size, num_tokens=sum(map(len, chunk)) + 3,
            num_seqs=len(sequences) + 1,
        )  # fmt: skip
        pool, logits = step(model.params, pool, batch, config=model.config)
        for s, span in enumerate(spans):
            reference = expected[s][span[phase + 1] - 1]
            assert relative_error(np.asarray(logits[s]), reference) < 1e-4


def test_paged_logits_equal_dense_ones_on_a_tiny_model():
    rng = np.random.default_rng(0)
    sequences = [rng.integers(0, 256, n).tolist() for n in (40, 9, 23, 70)]
    check_against_dense(tiny_model(), sequences, split=5, block_size=4, num_blocks=60)


def test_paged_logits_equal_dense_ones_on_the_demo_model(demo_model_path):
    model = pj.load_model(demo_model_path, dtype="float32")
    goldens = json.loads(GOLDENS.read_text())[:3]
    sequences = [g["prompt_token_ids"] + g["output_token_ids"][:20] for g in goldens]
    check_against_dense(model, sequences, split=20, block_size=16, num_blocks=64)


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_a_plain_step_takes_what_the_logits_are_largest_at(quantization):
    """Without making them, where a kernel does that; with the same bits as those have."""
    model = tiny_model()
    params = model.params
    if quantization is not None:
        quantize = quantize_int4 if quantization == "int4" else quantize_int8
        params = jax.tree.map(lambda w: quantize(w) if w.ndim == 2 else w, params)
    chunks = [[3, 1, 4], [1, 5], [9], [2, 6, 5, 3]]
    batch = pj.make_batch(chunks, [0] * 4, [[1], [2], [3], [4]], block_size=4, num_seqs=5)
    greedy = SamplingParams(temperature=0)
    free, drawn = SamplingParams(temperature=1.0, seed=5), SamplingParams(temperature=0, logprobs=2)

    def pool():
        return pj.KVPool.create(model.config, num_blocks=5, block_size=4)

    _, logits = pj.forward(params, pool(), batch, config=model.config)
    step = jax.jit(pj.sample_step, static_argnames=("config", "is_plain"))
    for asked in ([greedy] * 4, [greedy, free, greedy, greedy], [greedy, greedy, drawn, greedy]):
        sampling = make_sampling(asked, [1] * 4, [4] * 4, num_seqs=5)
        for plain in {False, bool(sampling.is_plain)}:
            arguments = params, pool(), batch, sampling
            _, output = step(*arguments, config=model.config, is_plain=plain)
            expected = sample(logits, sampling)
            for field in ("token_ids", "rank", "top_ids", "is_finite"):
                ours, theirs = (np.asarray(getattr(o, field))[:4] for o in (output, expected))
                np.testing.assert_array_equal(ours, theirs, err_msg=field)
    known = dataclasses.replace(sampling, forced_tokens=np.full(5, 7, np.int32))
    known = dataclasses.replace(known, num_logprobs=np.full(5, -1, np.int32))
    _, output = step(params, pool(), batch, known, config=model.config)
    assert output.token_ids.tolist()[:4] == [7] * 4
    spoilt = dataclasses.replace(params, final_norm=params.final_norm.at[0].set(np.nan))
    _, output = step(spoilt, pool(), batch, known, config=model.config)
    assert not np.asarray(output.is_finite)[:4].any()


def test_decode_batch_equals_make_batch():
    tables = np.array([[3, 5], [2, 0], [0, 0]], np.int32)
    made = pj.make_batch([[7], [8]], [5, 2], [[3, 5], [2]], block_size=4, num_tokens=3, num_seqs=3)
    on_device = pj.decode_batch(
        jnp.array([7, 8, 0], jnp.int32),
        jnp.array([5, 2, -1], jnp.int32),
        jnp.asarray(tables),
        block_size=4,
    )
    for field, expected in vars(made).items():
        np.testing.assert_array_equal(getattr(on_device, field), expected, err_msg=field)


def test_make_batch_lays_out_ragged_chunks():
    batch = pj.make_batch(
        [[10, 11, 12], [20]], [2, 8], [[4, 6], [7, 8, 9]], block_size=4, num_tokens=6, num_seqs=3
    )
    assert batch.token_ids.tolist() == [10, 11, 12, 20, 0, 0]
    assert batch.positions.tolist() == [2, 3, 4, 8, 0, 0]
    assert batch.slot_mapping.tolist() == [18, 19, 24, 36, 0, 0]
    assert batch.query_starts.tolist() == [0, 3, 4, 4]
    assert batch.kv_lens.tolist() == [5, 9, 0]
    assert batch.block_tables.tolist() == [[4, 6, 0], [7, 8, 9], [0, 0, 0]]
    assert batch.num_seqs == 2
    assert {array.dtype for array in jax.tree.leaves(batch)} == {np.dtype(np.int32)}


def test_make_batch_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match="2, 1 and 2 entries"):
        pj.make_batch([[1], [2]], [0], [[1], [2]], block_size=4)
    with pytest.raises(ValueError, match=r"sequence 0: 5 tokens from position 4 .* the 8 slots"):
        pj.make_batch([[1] * 5], [4], [[1, 2]], block_size=4)
    with pytest.raises(ValueError, match=r"sequence 1: 0 tokens"):
        pj.make_batch([[1], []], [0, 0], [[1], [2]], block_size=4)
    with pytest.raises(ValueError, match=r"num_tokens=2 is too small: this batch needs 3"):
        pj.make_batch([[1] * 3], [0], [[1]], block_size=4, num_tokens=2)


@pytest.mark.parametrize(
    ("max_num_seqs", "max_num_batched_tokens"), [(1, 1), (1, 16), (32, 512), (33, 100), (256, 2048)]
)
def test_every_step_has_a_bucket_and_the_buckets_are_few(max_num_seqs, max_num_batched_tokens):
    buckets = Buckets.choose(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=100,
        block_size=16,
    )
    assert buckets.table_width == 7
    shapes = buckets.shapes()
    assert len(shapes) <= 12
    for num_seqs in range(1, max_num_seqs + 1):
        for num_tokens in {num_seqs, num_seqs + 1, max_num_batched_tokens}:
            if num_seqs <= num_tokens <= max_num_batched_tokens:
                shape = buckets.shape_for(num_tokens, num_seqs)
                assert shape in shapes
                assert shape.num_tokens >= num_tokens and shape.num_seqs >= num_seqs
                assert shape.decode_only == (num_tokens == num_seqs)


def test_a_step_that_reads_what_it_writes_is_none_of_decodes() -> None:
    """A request joins whose prompt is cached up to a block that this very step fills."""
    scheduler = Scheduler(
        SchedulerConfig(
            num_blocks=20,
            block_size=4,
            max_model_len=32,
            max_num_seqs=4,
            max_num_batched_tokens=32,
            enable_prefix_caching=True,
        )
    )
    first = Request("a", [1, 2, 3], SamplingParams(max_tokens=8), max_model_len=32)
    scheduler.add(first)
    scheduler.update(scheduler.schedule(), [4])
    scheduler.add(Request("b", [1, 2, 3, 4, 5], SamplingParams(max_tokens=8), max_model_len=32))
    step = scheduler.schedule()
    assert [(chunk.start, chunk.num_tokens) for chunk in step.chunks] == [(3, 1), (4, 1)]
    assert step.chunks[0].request.block_ids[0] == step.chunks[1].request.block_ids[0]
    buckets = Buckets.choose(
        max_num_seqs=4, max_num_batched_tokens=32, max_model_len=32, block_size=4
    )
    assert decodes(step, buckets)
    appending = dataclasses.replace(buckets, decodes_append=True)
    assert not decodes(step, appending)
