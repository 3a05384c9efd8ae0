"""The sampler against float64 numpy: which tokens may be drawn, logprobs, greedy, isolation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax.sampling import MAX_MASKED_TOKENS, SamplingBatch, draw_weights, sample
from paged_jax.sampling_params import MAX_LOGPROBS

# Above 2 * 64 blocks of 128 the thresholds are first looked for in the best blocks only.
LARGE_VOCAB = 20_001
SMALL_VOCAB = 1000
# Few shapes, so that the tests do not spend their time in the compiler.
NUM_ROWS = 8

step = jax.jit(sample)
weights_of = jax.jit(lambda logits, batch: draw_weights(logits, jnp.max(logits, -1), batch))


def make_batch(num_rows, **fields):
    """Greedy rows, but for the fields given as scalars or as one value a row."""
    dtypes = dict(
        temperature=np.float32,
        top_k=np.int32,
        top_p=np.float32,
        min_p=np.float32,
        positions=np.int32,
        num_logprobs=np.int32,
        forced_tokens=np.int32,
    )
    defaults = dict(temperature=0, top_k=0, top_p=1, min_p=0, positions=0)
    defaults |= dict(num_logprobs=-1, forced_tokens=-1)
    arrays = {
        name: np.broadcast_to(np.asarray(fields.get(name, default), dtypes[name]), (num_rows,))
        for name, default in defaults.items()
    }
    masked = np.full((num_rows, MAX_MASKED_TOKENS), -1, np.int32)
    for row, ids in fields.get("masked", {}).items():
        masked[row, : len(ids)] = ids
    seed = np.zeros((num_rows, 2), np.uint32)
    seed[:, 0] = fields.get("seed", 0)
    return SamplingBatch(seed=seed, masked_tokens=masked, **arrays)


def rng(seed=0):
    return np.random.default_rng(seed)


def neighbouring_floats(count):
    """`count` floats in random order, each one step above another, from 1 up."""
    bits = np.float32(1).view(np.int32) + np.arange(count, dtype=np.int32)
    return rng().permutation(bits.view(np.float32))


LOGITS = {
    "normal": lambda: rng().normal(size=SMALL_VOCAB) * 3,
    "normal, large vocabulary": lambda: rng().normal(size=LARGE_VOCAB) * 3,
    "peaked, large vocabulary": lambda: rng().normal(size=LARGE_VOCAB) ** 3 * 3,
    "flat, large vocabulary": lambda: rng().normal(size=LARGE_VOCAB) * 1e-3,
    "few distinct values": lambda: np.round(rng().normal(size=SMALL_VOCAB) * 2),
    "few distinct, large": lambda: np.round(rng().normal(size=LARGE_VOCAB) * 2),
    "all equal": lambda: np.full(SMALL_VOCAB, -7.25),
    "all equal, large vocabulary": lambda: np.full(LARGE_VOCAB, 3.0),
    "neighbouring floats": lambda: neighbouring_floats(SMALL_VOCAB),
    "neighbouring floats, large": lambda: neighbouring_floats(LARGE_VOCAB),
    "powers of two": lambda: rng().permutation(-(2.0 ** (-np.arange(SMALL_VOCAB) / 10))),
    "mostly -inf": lambda: np.where(
        np.arange(SMALL_VOCAB) % 250 == 3, rng().normal(size=SMALL_VOCAB), -np.inf
    ),
    "mostly -inf, large": lambda: np.where(
        np.arange(LARGE_VOCAB) % 5000 == 3, rng().normal(size=LARGE_VOCAB), -np.inf
    ),
    "huge range": lambda: (
        rng().normal(size=SMALL_VOCAB) * 10.0 ** rng(1).integers(-30, 38, SMALL_VOCAB)
    ),
    "all negative, far away": lambda: -1e4 + rng().normal(size=SMALL_VOCAB),
    "two tokens": lambda: np.array([0.5, -0.25]),
    "seven tokens": lambda: np.arange(7) * 0.5,
    "129 tokens": lambda: rng().normal(size=129),
}

FILTERS = [
    dict(top_k=k, top_p=p, min_p=m, temperature=t)
    for k in (0, 1, 2, 50, 999, 15_000)
    for p, m, t in ((1, 0, 1), (0.9, 0, 0.7), (0.3, 0, 2), (0.99, 0.01, 1), (1, 0.3, 0.5))
] + [
    dict(top_k=0, top_p=1e-6, min_p=0, temperature=1),
    dict(top_k=0, top_p=0.999999, min_p=0, temperature=1.5),
    dict(top_k=3, top_p=0.5, min_p=0, temperature=1e-5),
]


def check_kept(kept, logits, *, top_k, top_p, min_p, temperature):
    """Asserts that kept[V] is what the filters leave, by sorting in float64.

    Where a float32 mass decides, either answer passes within 1e-5 of the boundary.
    """
    slack = 1e-5
    logits = logits.astype(np.float64)
    with np.errstate(over="ignore"):
        nats = (logits - logits.max()) / np.float32(temperature).astype(np.float64)
    weights = np.exp(nats)
    lowest = logits[kept].min()
    assert kept[logits.argmax()]
    # Tied tokens share their fate, and so do all that are likelier. exp(-87) leaves float32.
    assert kept[(logits >= lowest) & (nats > -85)].all()
    assert (nats[kept] > -105).all()

    survives = weights >= min_p * (1 - slack)
    if 0 < top_k < len(logits):
        survives &= logits >= np.sort(logits)[-top_k]
    assert survives[kept].all()
    mass = weights[kept].sum() / weights[survives].sum()
    mass_without_lowest = weights[kept & (logits > lowest)].sum() / weights[survives].sum()
    assert mass >= top_p - slack - (min_p > 0) * 1e-3
    if top_p < 1:
        assert mass_without_lowest < top_p + slack
    else:
        survives_surely = survives & (weights >= min_p * (1 + slack)) & (nats > -85)
        assert kept[survives_surely].all()


@pytest.mark.parametrize("name", LOGITS)
def test_filters_keep_the_tokens_that_sorting_keeps(name):
    logits = LOGITS[name]().astype(np.float32)
    batch = make_batch(len(FILTERS), **{k: [f[k] for f in FILTERS] for k in FILTERS[0]})
    weights = np.asarray(weights_of(jnp.asarray(np.tile(logits, (len(FILTERS), 1))), batch))
    for row, filters in zip(weights, FILTERS, strict=True):
        check_kept(row > 0, logits, **filters)


def test_top_k_keeps_exactly_k_among_neighbouring_floats():
    logits = neighbouring_floats(LARGE_VOCAB)
    ks = [1, 2, 7, 64, 65, 8191, 20_000]
    batch = make_batch(len(ks), temperature=1, top_k=ks)
    weights = np.asarray(weights_of(jnp.asarray(np.tile(logits, (len(ks), 1))), batch))
    assert (weights > 0).sum(-1).tolist() == ks


def test_a_mix_of_filters_gives_each_row_what_it_gets_alone():
    logits = (rng(2).normal(size=(len(FILTERS), LARGE_VOCAB)) * 4).astype(np.float32)
    fields = {k: [f[k] for f in FILTERS] for k in FILTERS[0]}
    together = np.asarray(weights_of(jnp.asarray(logits), make_batch(len(FILTERS), **fields)))
    for row, filters in enumerate(FILTERS):
        alone = weights_of(jnp.asarray(logits[row : row + 1]), make_batch(1, **filters))
        check_kept(np.asarray(alone)[0] > 0, logits[row], **filters)
        np.testing.assert_array_equal(together[row] > 0, np.asarray(alone)[0] > 0)


def test_weights_are_probabilities_at_the_temperature():
    logits = rng(3).normal(size=(3, 700)).astype(np.float32) * 3
    temperatures = np.array([0.3, 1.0, 2.0])
    weights = np.asarray(weights_of(jnp.asarray(logits), make_batch(3, temperature=temperatures)))
    exact = np.exp((logits - logits.max(-1, keepdims=True)) / temperatures[:, None])
    np.testing.assert_allclose(weights, exact, rtol=1e-5)


@pytest.mark.parametrize("vocab_size", [2, SMALL_VOCAB, LARGE_VOCAB])
def test_greedy_rows_take_the_lowest_of_equal_maxima_whatever_their_neighbours(vocab_size):
    logits = np.round(rng(4).normal(size=(NUM_ROWS, vocab_size)) * 2).astype(np.float32)
    expected = logits.argmax(-1)
    if vocab_size > 2:
        assert ((logits == logits.max(-1, keepdims=True)).sum(-1) > 1).any()
    alone = step(logits, make_batch(NUM_ROWS))
    np.testing.assert_array_equal(alone.token_ids, expected)
    temperature = np.arange(NUM_ROWS) % 2
    mixed = step(logits, make_batch(NUM_ROWS, temperature=temperature, top_k=5, top_p=0.9))
    np.testing.assert_array_equal(mixed.token_ids[::2], expected[::2])


def test_tiny_temperatures_neither_overflow_nor_leave_the_maximum():
    logits = rng(5).normal(size=(NUM_ROWS, SMALL_VOCAB)).astype(np.float32) * 100
    temperature = [1e-5, 1e-5, 1e-7, 1e-12, 1e-38, 1e-45, 1e-6, 0]
    batch = make_batch(
        NUM_ROWS, temperature=temperature, top_k=[0, 4] * 4, top_p=[1, 1, 0.9, 1] * 2
    )
    output = step(logits, batch)
    np.testing.assert_array_equal(output.token_ids, logits.argmax(-1))
    assert output.is_finite.all()


def test_a_token_depends_on_its_own_row_only():
    """The same row gives the same token at any batch size and index, with any neighbours."""
    num_rows = 24
    generator = rng(6)
    logits = generator.normal(size=(num_rows, LARGE_VOCAB)).astype(np.float32) * 2
    fields = dict(
        temperature=generator.choice([0.5, 1, 2], num_rows),
        top_k=generator.choice([0, 0, 3, 500], num_rows),
        top_p=generator.choice([1, 0.9, 0.5], num_rows),
        min_p=generator.choice([0, 0.1], num_rows),
        seed=generator.integers(0, 2**32, num_rows),
        positions=generator.integers(0, 4000, num_rows),
    )

    def tokens_of(rows, **changed):
        part = {name: values[rows] for name, values in fields.items()} | changed
        return np.asarray(step(logits[rows], make_batch(len(rows), **part)).token_ids)

    whole = tokens_of(np.arange(num_rows))
    assert len(set(whole.tolist())) > num_rows // 2
    for rows in np.split(generator.permutation(num_rows), 3):
        np.testing.assert_array_equal(tokens_of(rows), whole[rows])
        # Greedy neighbours: the program takes other branches.
        greedy_but_one = np.where(np.arange(8) == 5, fields["temperature"][rows], 0)
        assert tokens_of(rows, temperature=greedy_but_one)[5] == whole[rows[5]]
    for row in range(num_rows):
        assert tokens_of(np.array([row]))[0] == whole[row]


def test_masked_tokens_are_never_taken_and_do_not_touch_the_logprobs():
    logits = rng(7).normal(size=(NUM_ROWS, SMALL_VOCAB)).astype(np.float32) * 3
    order = np.argsort(-logits, axis=-1)
    num_masked = [3, MAX_MASKED_TOKENS, 0, 5, 1, 0, 64, 2]
    batch = make_batch(
        NUM_ROWS,
        temperature=[0, 0, 0, 1, 1, 1, 1, 0],
        top_k=1,
        masked={row: order[row, :count] for row, count in enumerate(num_masked)},
        num_logprobs=2,
    )
    output = step(logits, batch)
    np.testing.assert_array_equal(output.token_ids, order[np.arange(NUM_ROWS), num_masked])
    np.testing.assert_array_equal(output.rank, np.array(num_masked) + 1)
    np.testing.assert_array_equal(output.top_ids, order[:, :MAX_LOGPROBS])


def test_the_last_token_of_the_vocabulary_survives_the_padding_of_the_mask():
    logits = np.zeros((NUM_ROWS, SMALL_VOCAB), np.float32)
    logits[:, -1] = 5
    output = step(logits, make_batch(NUM_ROWS, masked={0: [3]}))
    assert (np.asarray(output.token_ids) == SMALL_VOCAB - 1).all()


@pytest.mark.parametrize("vocab_size", [7, 20, SMALL_VOCAB, LARGE_VOCAB])
@pytest.mark.parametrize("ties", [False, True])
def test_logprobs_and_ranks_are_those_of_the_raw_logits(vocab_size, ties):
    logits = (rng(8).normal(size=(NUM_ROWS, vocab_size)) * 4).astype(np.float32)
    logits[4] -= 1e4
    logits[:, 2:4] = -np.inf
    logits = np.round(logits) + 0 if ties else logits  # + 0: no negative zeros
    batch = make_batch(
        NUM_ROWS, temperature=2, min_p=0.001, num_logprobs=[5, -1, 0, 20, 1, 2, -1, 3]
    )
    output = jax.tree.map(np.asarray, step(logits, batch))

    wide = logits.astype(np.float64)
    shifted = wide - wide.max(-1, keepdims=True)
    exact = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    rows = np.arange(NUM_ROWS)
    np.testing.assert_allclose(output.logprob, exact[rows, output.token_ids], atol=1e-5)
    greater = (wide > wide[rows, output.token_ids][:, None]).sum(-1)
    np.testing.assert_array_equal(output.rank, greater + 1)
    top = np.argsort(-wide, axis=-1, kind="stable")[:, :MAX_LOGPROBS]
    np.testing.assert_array_equal(output.top_ids, top)
    np.testing.assert_allclose(
        output.top_logprobs, np.take_along_axis(exact, top, -1), rtol=1e-6, atol=1e-5
    )


def test_logprobs_are_zeros_when_no_row_wants_them():
    logits = jnp.asarray(rng().normal(size=(NUM_ROWS, SMALL_VOCAB)), jnp.float32)
    output = step(logits, make_batch(NUM_ROWS, temperature=1))
    assert not output.logprob.any() and not output.rank.any()
    assert not output.top_ids.any() and not output.top_logprobs.any()
    assert output.top_ids.shape == (NUM_ROWS, MAX_LOGPROBS)
    narrow = jax.eval_shape(sample, logits[:, :6], make_batch(NUM_ROWS))
    assert narrow.top_ids.shape == (NUM_ROWS, 6)


@pytest.mark.parametrize("vocab_size", [SMALL_VOCAB, LARGE_VOCAB])
def test_a_poisoned_row_is_reported_and_harms_no_other(vocab_size):
    logits = rng(9).normal(size=(NUM_ROWS, vocab_size)).astype(np.float32) * 2
    fields = dict(temperature=[0, 1] * 4, top_k=[0, 9] * 4, top_p=[1, 0.9] * 4, positions=range(8))
    batch = make_batch(NUM_ROWS, num_logprobs=3, **fields)
    clean = step(logits, batch)
    assert clean.is_finite.all()
    logits[1] = np.nan
    logits[2, 17] = np.nan
    logits[5, 100] = np.inf
    logits[6] = -np.inf
    output = step(logits, batch)
    assert output.is_finite.tolist() == [True, False, False, True, True, False, False, True]
    good, bad = [0, 3, 4, 7], [1, 2, 5, 6]
    assert not np.asarray(output.token_ids)[bad].any()
    for name in ("token_ids", "logprob", "rank", "top_ids", "top_logprobs"):
        np.testing.assert_array_equal(
            np.asarray(getattr(output, name))[good], np.asarray(getattr(clean, name))[good]
        )


def test_a_mask_that_leaves_nothing_is_reported():
    logits = np.full((NUM_ROWS, SMALL_VOCAB), -np.inf, np.float32)
    logits[:, 10:14] = 0
    output = step(logits, make_batch(NUM_ROWS, masked={1: [10, 11, 12, 13], 2: [10]}))
    assert output.is_finite.tolist() == [True, False] + [True] * 6
    assert output.token_ids.tolist() == [10, 0, 11] + [10] * 5


def test_one_program_serves_all_parameters():
    num_traces = 0

    def counted(logits, batch):
        nonlocal num_traces
        num_traces += 1
        return sample(logits, batch)

    compiled = jax.jit(counted)
    logits = rng().normal(size=(NUM_ROWS, SMALL_VOCAB)).astype(np.float32)
    for filters in FILTERS:
        compiled(logits, make_batch(NUM_ROWS, num_logprobs=filters["top_k"] % 20, **filters))
    compiled(logits, make_batch(NUM_ROWS, masked={0: [1, 2]}))
    assert num_traces == 1


def test_it_lowers_for_accelerators():
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), make_batch(8))
    logits = jax.ShapeDtypeStruct((8, 49_152), jnp.float32)
    exported = jax.export.export(step, platforms=("tpu", "cuda"))(logits, shapes)
    assert exported.platforms == ("tpu", "cuda")


@pytest.mark.parametrize(
    "logits", [jnp.zeros((3, 5)), jnp.zeros((2, 5), jnp.bfloat16), jnp.zeros(5)], ids=str
)
def test_logits_of_the_wrong_form_are_refused(logits):
    with pytest.raises(ValueError, match=r"logits is .* must be float32\[2, vocab\]"):
        sample(logits, make_batch(2))
