"""The README's programs run as they stand."""

import re
from pathlib import Path

import numpy as np
import pytest

import paged_jax as pj

README = (Path(__file__).parent.parent / "README.md").read_text()


def program(heading: str) -> str:
    section = README.split(f"## {heading}\n")[1].split("\n## ")[0]
    (code,) = re.findall(r"```python\n(.*?)```", section, re.S)
    return code


def test_the_functional_core_under_the_readers_own_jit(demo_model_path, monkeypatch, capsys):
    monkeypatch.setenv("PAGED_JAX_DEMO_MODEL", str(demo_model_path))
    names: dict = {}
    exec(compile(program("In your own jit"), "README.md", "exec"), names)
    printed = capsys.readouterr().out
    assert printed.startswith("The capital of France is Paris")
    # The same tokens as the engine's.
    llm = pj.LLM(
        names["model"],
        num_gpu_blocks_override=64,
        max_model_len=128,
        max_num_seqs=2,
        max_num_batched_tokens=32,
        warmup=False,
    )
    ours = np.concatenate([np.asarray(names["first"])[None], np.asarray(names["rest"])]).T.tolist()
    second_best = ours[2].pop(0)
    prompts = [*names["prompts"], [*names["prompts"][0], second_best]]
    params = [
        pj.SamplingParams(temperature=0, max_tokens=len(tokens), ignore_eos=True) for tokens in ours
    ]
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params)
    assert ours == [output.outputs[0].token_ids for output in outputs]
    assert len(names["sources"]) == 1, "the fork shares a partly filled block"
    start = pj.SamplingParams(temperature=0, max_tokens=1, logprobs=2)
    (output,) = llm.generate([{"prompt_token_ids": prompts[0]}], start)
    logprobs = output.outputs[0].logprobs
    assert logprobs is not None and [*logprobs[0]] == [ours[0][0], second_best]


def test_forks_searches_and_scores(demo_model_path, capsys):
    llm = pj.LLM(
        demo_model_path, num_gpu_blocks_override=64, max_model_len=128, max_num_seqs=8,
        max_num_batched_tokens=32, warmup=False,
    )  # fmt: skip
    section = README.split("### Forks, searches, scores\n")[1]
    code = re.findall(r"```python\n(.*?)```", section, re.S)[0]
    exec(compile(code, "README.md", "exec"), {"llm": llm, "SamplingParams": pj.SamplingParams})
    printed = capsys.readouterr().out
    assert printed.startswith("Once upon a time there was a king who")
    assert "KV in use" in printed and "Lisbon" in printed
    assert not llm.engine.scheduler.held
    assert llm.engine.scheduler.blocks.pool.num_used_blocks == 0


def test_the_kernels_without_the_engine(capsys):
    names: dict = {}
    exec(compile(program("The kernels alone"), "README.md", "exec"), names)
    assert capsys.readouterr().out == "(4, 8, 128) True\n"
    # The decode's row again, in numpy: its 20 tokens are all of block 2 and the first 4 of block 3.
    pool, q = (np.asarray(names[name], np.float64) for name in ("pool", "q"))
    group = names["num_q_heads"] // names["num_kv_heads"]
    tokens = np.concatenate([pool[2], pool[3]], axis=1)[:, :20]
    for head in range(names["num_q_heads"]):
        keys = tokens[head // group]
        values = tokens[names["num_kv_heads"] + head // group]
        weights = np.exp(keys @ q[3, head] * names["head_dim"] ** -0.5)
        expected = weights @ values / weights.sum()
        np.testing.assert_allclose(names["out"][3, head], expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(pool[3, :2, 3], names["k"][3])


@pytest.mark.parametrize("name", sorted(pj.__all__))
def test_every_public_name_is_there_and_documented(name):
    assert (getattr(pj, name).__doc__ or "").strip()
