"""Sessions: sequences forked, extended, scored and continued, as an engine and a dense model do."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense_llama import model_logits
from session_helpers import check_nothing_held, continued, greedy, start
from tiny_engine import GREEDY, prompts_of, run, tiny_llm, tiny_model, tokens_of

from paged_jax import LLM, SamplingParams, generate_together

SWAP_BYTES = 2**20
MAX_MODEL_LEN = 128


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def llm(model) -> LLM:
    return tiny_llm(model, warmup=False)


@pytest.fixture(autouse=True)
def all_free(request):
    yield
    if "llm" in request.fixturenames:
        check_nothing_held(request.getfixturevalue("llm"))


@pytest.fixture(scope="module")
def dense(model):
    """tokens -> float64[len(tokens), vocab] log-probabilities of the next token."""

    def logprobs(tokens):
        padded = np.zeros(MAX_MODEL_LEN, np.int32)
        padded[: len(tokens)] = tokens
        logits = model_logits(model.params, padded, np.arange(MAX_MODEL_LEN), config=model.config)
        rows = np.asarray(jax.nn.log_softmax(jnp.asarray(logits)), np.float64)
        return rows[: len(tokens)]

    return logprobs


def check_entries(entries, tokens, rows, k=0):
    """Each entry holds its token first and the k likeliest, as the rows of the dense model do."""
    assert len(entries) == len(tokens)
    for entry, token, row in zip(entries, tokens, rows, strict=True):
        assert next(iter(entry)) == token
        for token_id, own in entry.items():
            assert own.logprob == pytest.approx(row[token_id], abs=1e-4)
            above, near = (row > row[token_id] + 1e-4).sum(), (row > row[token_id] - 1e-4).sum()
            assert above + 1 <= own.rank <= max(near, above + 1)
        assert {own.rank for own in entry.values()} >= set(range(1, k + 1))
        assert len(entry) in (k, k + 1) if k else len(entry) == 1


# --- Tokens


@pytest.mark.parametrize("num_prompt_tokens", [1, 2, 4, 5, 23, 64])
def test_generate_goes_on_as_the_engine_would(llm, num_prompt_tokens):
    [prompt] = prompts_of([num_prompt_tokens])
    expected = continued(llm, prompt)
    with start(llm, prompt) as seq:
        assert seq.token_ids == prompt and seq.num_computed_tokens == num_prompt_tokens - 1
        got = []
        for count in (1, 7, 3, 13):
            output = seq.generate(greedy(count))
            assert output.prompt_token_ids == prompt + got
            got += output.outputs[0].token_ids
            llm.engine.scheduler.check_integrity()
        assert got == expected and seq.token_ids == prompt + expected
        assert seq.num_computed_tokens == seq.num_tokens - 1
        assert seq.text == llm.get_tokenizer().decode(seq.token_ids)  # pyright: ignore


def test_forks_part_and_share(llm):
    [prompt] = prompts_of([22])
    seq = start(llm, prompt)
    pool = llm.engine.scheduler.blocks.pool
    used = pool.num_used_blocks
    a, b, c = seq.fork(), seq.fork(), seq.fork()
    assert pool.num_used_blocks == used and a.num_computed_tokens == 21
    a.extend("ab").extend([5, 6, 7])
    b.extend(np.array([9]))  # pyright: ignore[reportArgumentType]
    outputs = [s.generate(greedy(12)) for s in (a, b, c)]
    llm.engine.scheduler.check_integrity()
    for tail, output in zip([[97, 98, 5, 6, 7], [9], []], outputs, strict=True):
        assert output.outputs[0].token_ids == continued(llm, prompt + tail, greedy(12))
    assert seq.token_ids == prompt
    grandchild = a.fork()
    assert grandchild.generate(greedy(4)).outputs[0].token_ids == continued(
        llm, a.token_ids, greedy(4)
    )
    for s in (a, b, c, seq, grandchild):
        s.close()
    assert pool.num_used_blocks == 0


def test_extensions_are_computed_when_needed(llm):
    [prompt] = prompts_of([30])
    seq = start(llm, prompt[:3])
    seq.extend(prompt[3:9]).extend([]).extend(prompt[9:])
    assert (seq.num_tokens, seq.num_computed_tokens) == (30, 2)
    assert seq.compute().num_computed_tokens == 29
    assert seq.compute() is seq
    assert seq.generate().outputs[0].finish_reason in ("length", "stop")
    seq.close()


def test_sampled_tokens_are_those_of_generate(llm):
    [prompt] = prompts_of([10])
    params = SamplingParams(temperature=1.0, top_p=0.9, seed=3, max_tokens=12, ignore_eos=True)
    with start(llm, prompt) as seq:
        assert seq.generate(params).outputs[0].token_ids == continued(llm, prompt, params)


def test_a_session_without_tokenizer(model):
    llm = tiny_llm(model, warmup=False, skip_tokenizer_init=True)
    with llm.start([1, 2, 3]) as seq:
        assert seq.text == ""
        with pytest.raises(ValueError, match="more='x' is text, and the engine has no tokenizer"):
            seq.extend("x")
        assert seq.generate(greedy(3)).outputs[0].text == ""
    check_nothing_held(llm)


def test_generate_together_is_one_batch(llm):
    prompts = prompts_of([10, 23, 5, 16, 8, 9, 7, 12, 3, 30])  # More than the eight seats.
    expected = tokens_of(run(llm, prompts))
    sessions = [start(llm, prompt) for prompt in prompts]
    steps = llm.engine.metrics.steps["decode"]
    before = steps.num_steps
    outputs = generate_together(sessions, GREEDY)
    assert tokens_of(outputs) == expected
    assert steps.num_steps - before < 24 * 4
    params = [greedy(i % 3 + 1) for i in range(10)]
    for prompt, output, own in zip(
        prompts, generate_together(sessions, params), params, strict=True
    ):
        first = continued(llm, prompt, greedy(24 + (own.max_tokens or 0)))
        assert output.outputs[0].token_ids == first[24:]
    assert generate_together([]) == []
    for seq in sessions:
        seq.close()


# --- Scores


@pytest.mark.parametrize("num_prompt_tokens", [1, 4, 22])
def test_logprobs_of_a_continuation(llm, dense, num_prompt_tokens):
    prompt, more = prompts_of([num_prompt_tokens, 45])
    rows = dense(prompt + more)[num_prompt_tokens - 1 : -1]
    with start(llm, prompt) as seq:
        check_entries(seq.logprobs(more), more, rows)
        check_entries(seq.logprobs(more[:9], k=3), more[:9], rows[:9], k=3)
        check_entries(seq.logprobs(more[:1], k=20), more[:1], rows[:1], k=20)
        assert seq.token_ids == prompt
        fork = seq.fork().extend(more[:20])
        check_entries(fork.logprobs(more[20:]), more[20:], rows[20:])
        text = fork.logprobs("hi", k=1)
        check_entries(text, [104, 105], dense([*prompt, *more[:20], 104, 105])[-3:-1], k=1)
        assert text[0][104].decoded_token is None or text[0][104].decoded_token == "h"
        fork.close()


def test_next_logprobs_are_the_dense_models(llm, dense):
    [prompt] = prompts_of([22])
    row = dense(prompt)[-1]
    with start(llm, prompt) as seq:
        for k in (1, 5, 20):
            entry = seq.next_logprobs(k)
            assert len(entry) == k
            assert [own.rank for own in entry.values()] == list(range(1, k + 1))
            for token_id, own in entry.items():
                assert own.logprob == pytest.approx(row[token_id], abs=1e-4)
        assert seq.token_ids == prompt
        assert seq.generate(greedy(5)).outputs[0].token_ids == continued(llm, prompt, greedy(5))


def test_scores_in_the_longest_sequence(llm, dense):
    [tokens] = prompts_of([MAX_MODEL_LEN])
    with start(llm, tokens[:100]) as seq:
        rows = dense(tokens)
        check_entries(seq.logprobs(tokens[100:]), tokens[100:], rows[99:-1])
        assert len(seq.generate(greedy(50)).outputs[0].token_ids) == 28
        assert seq.num_tokens == MAX_MODEL_LEN
        with pytest.raises(ValueError, match="128 tokens and max_model_len=128"):
            seq.generate(GREEDY)
        with pytest.raises(ValueError, match="129 tokens"):
            seq.logprobs([1])


# --- Under pressure


@pytest.mark.parametrize("mode", ["recompute", "swap", "auto"])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_others_evict_what_is_only_held(model, llm, dense, mode, prefix_caching):
    small = tiny_llm(
        model,
        num_gpu_blocks_override=23,
        max_model_len=88,
        warmup=False,
        preemption_mode=mode,
        enable_prefix_caching=prefix_caching,
        swap_space_bytes=SWAP_BYTES if mode != "recompute" else 0,
    )
    prompts = prompts_of([20, 26, 15])
    sessions = [start(small, prompt) for prompt in prompts]
    forks = [seq.fork().extend([7]) for seq in sessions]
    run(small, prompts_of([60, 50, 40], seed=1))  # Takes all that there is.
    small.engine.scheduler.check_integrity()
    for prompt, seq, fork in zip(prompts, sessions, forks, strict=True):
        assert fork.generate(greedy(9)).outputs[0].token_ids == continued(
            llm, [*prompt, 7], greedy(9)
        )
        more = [3, 1, 4, 1, 5]
        rows = dense(prompt + more)[len(prompt) - 1 : -1]
        check_entries(seq.logprobs(more, k=2), more, rows, k=2)
        small.engine.scheduler.check_integrity()
    outputs = generate_together(sessions, GREEDY)
    assert tokens_of(outputs) == [continued(llm, prompt) for prompt in prompts]
    small.engine.scheduler.check_integrity()
    if mode == "swap":
        assert small.get_metrics()["swap_out_tokens"] > 0
    for seq in (*sessions, *forks):
        seq.close()
    check_nothing_held(small)


def test_a_reset_waits_for_sessions_and_pins_do_not_mind_them(llm):
    seq = start(llm, prompts_of([20])[0])
    assert llm.reset_prefix_cache() is False
    with llm.start({"prompt_token_ids": [1] * 9, "cache_salt": "a", "extra_keys": [1]}) as salted:
        assert salted.generate(greedy(3)).outputs[0].token_ids == continued(llm, [1] * 9, greedy(3))
    seq.close()
    assert llm.reset_prefix_cache() is True


def test_what_is_no_longer_referred_to_is_freed(llm):
    pool = llm.engine.scheduler.blocks.pool
    seq = start(llm, prompts_of([20])[0])
    fork = seq.fork()
    fork.generate(greedy(8))
    del seq, fork
    gc.collect()
    assert pool.num_used_blocks > 0  # Never at once: a step may be under way.
    run(llm, [[1]], greedy(1))
    assert pool.num_used_blocks == 0
    seq = start(llm, [1, 2, 3, 4, 5])
    seq.close()
    seq.close()
    # A closed one is computed anew.
    assert seq.generate(greedy(3)).outputs[0].token_ids == continued(
        llm, [1, 2, 3, 4, 5], greedy(3)
    )
    seq.close()


# --- Uses


def test_best_of_n_in_a_few_lines(llm, dense):
    with start(llm, prompts_of([20])[0]) as seq:
        forks = [seq.fork() for _ in range(5)]
        params = [
            SamplingParams(temperature=1.0, seed=i, max_tokens=6, ignore_eos=True, logprobs=0)
            for i in range(5)
        ]
        outputs = [output.outputs[0] for output in generate_together(forks, params)]
        best = max(outputs, key=lambda output: output.cumulative_logprob or 0)
        sums = []
        for fork in forks:
            rows = dense(fork.token_ids)[19:-1]
            sums.append(sum(row[t] for row, t in zip(rows, fork.token_ids[20:], strict=True)))
            fork.close()
        assert outputs.index(best) == int(np.argmax(sums))
        assert best.cumulative_logprob == pytest.approx(max(sums), abs=1e-3)


def test_a_tree_search_in_a_few_lines(llm, dense):
    """The likeliest three tokens of two branches each: by forks, and by brute force."""
    [prompt] = prompts_of([11])
    leaves = [(0.0, start(llm, prompt))]
    for _ in range(3):
        grown = []
        for total, seq in leaves:
            for token_id, entry in seq.next_logprobs(2).items():
                grown.append((total + entry.logprob, seq.fork().extend([token_id])))
            seq.close()
        leaves = grown
    total, best = max(leaves, key=lambda leaf: leaf[0])
    tree = [(0.0, prompt)]
    for _ in range(3):
        rows = [dense(tokens)[-1] for _, tokens in tree]
        tree = [
            (t + row[i], [*tokens, int(i)])
            for (t, tokens), row in zip(tree, rows, strict=True)
            for i in np.argsort(-row)[:2]
        ]
    expected, tokens = max(tree, key=lambda leaf: leaf[0])
    assert best.token_ids == tokens and total == pytest.approx(expected, abs=1e-3)
    for _, seq in leaves:
        seq.close()
