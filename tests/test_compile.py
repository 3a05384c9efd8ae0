"""Programs that are compiled when they are first needed, each as small as its steps allow."""

import jax
import jax.numpy as jnp
import numpy as np
from tiny_engine import prompts_of, run, tiny_llm, tiny_model, tokens_of

from paged_jax import SamplingParams, make_sampling, sample

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.8, seed=3, max_tokens=12, ignore_eos=True)


def test_greedy_requests_compile_no_sampler():
    model, prompts = tiny_model(), prompts_of([5, 20])
    eager, lazy = tiny_llm(model), tiny_llm(model, warmup=False)
    runner = lazy.engine.runner
    assert runner.num_programs == 0
    assert tokens_of(run(lazy, prompts, GREEDY)) == tokens_of(run(eager, prompts, GREEDY))
    num_greedy = runner.num_programs
    assert 0 < num_greedy < len(runner.buckets.shapes())

    # Of the same shapes once more, now with a sampler in them.
    sampled = tokens_of(run(lazy, prompts, SAMPLED))
    assert sampled == tokens_of(run(eager, prompts, SAMPLED))
    assert runner.num_programs == 2 * num_greedy
    # Nothing is compiled for what a program at hand can do.
    mixed = [GREEDY, SAMPLED]
    assert tokens_of(run(lazy, prompts, mixed)) == tokens_of(run(eager, prompts, mixed))
    run(lazy, prompts, GREEDY)
    assert runner.num_programs == 2 * num_greedy
    assert eager.engine.runner.num_programs == len(runner.buckets.shapes())


def test_plain_sampling_draws_what_the_whole_sampler_draws():
    logits = np.random.default_rng(0).normal(size=(4, 300)).astype(np.float32)
    logits[1, 7] = np.nan
    params = [SamplingParams(temperature=0)] * 4
    batch = make_sampling(params, [1] * 4, [9] * 4, forced_tokens=[-1, -1, 5, -1])
    assert batch.is_plain
    whole, plain = (sample(jnp.asarray(logits), batch, is_plain=plain) for plain in (False, True))
    jax.tree.map(np.testing.assert_array_equal, whole, plain)


def test_a_batch_is_plain_only_if_every_row_is():
    greedy = SamplingParams(temperature=0)
    for other in (SamplingParams(temperature=0.1), SamplingParams(temperature=0, logprobs=0)):
        assert not make_sampling([greedy, other], [1, 2], [3, 4]).is_plain
    masked = make_sampling([greedy] * 2, [1, 2], [3, 4], masked_tokens=[[], [5]])
    assert not masked.is_plain
    assert make_sampling([greedy] * 2, [1, 2], [3, 4], num_seqs=8).is_plain
