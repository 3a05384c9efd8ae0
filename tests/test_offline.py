"""Batch generation from lines: rows as they finish, errors in their own rows."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from model_files import random_tensors, tiny_config, write_hf_folder
from tiny_engine import VOCAB_SIZE, tiny_llm

from paged_jax import SamplingParams
from paged_jax.offline import read_lines, serve_lines

ROOT = Path(__file__).parent.parent
DEFAULTS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def llm():
    return tiny_llm()


def serve(llm, lines, *, is_json=True, chat=False, field=None, defaults=DEFAULTS):
    rows = []
    read = read_lines(lines, defaults, is_json=is_json, field=field)
    counts = serve_lines(llm, read, rows.append, chat=chat)
    assert counts == (len(rows), sum(row["error"] is not None for row in rows))
    assert not llm.engine.has_unfinished()
    return {row["index"]: row for row in rows}


def texts_of(llm, prompts):
    outputs = llm.generate(prompts, DEFAULTS, use_tqdm=False)
    return [output.outputs[0].text for output in outputs]


def test_every_form_of_a_line(llm):
    lines = [
        '{"prompt": "abc", "custom_id": "first"}',
        "",
        '"abc"',
        '{"prompt_token_ids": [97, 98, 99]}',
        '{"turns": ["abc", "never asked"], "question_id": 81}',
        '{"question": "abc", "answer": "42", "id": 0}',
        '{"messages": [{"role": "user", "content": "hi"}]}',
    ]
    rows = serve(llm, lines)
    (expected,) = texts_of(llm, ["abc"])
    assert [rows[i]["text"] for i in range(5)] == [expected] * 5
    assert [rows[i].get("id") for i in range(6)] == ["first", None, None, 81, 0, None]
    (chat,) = llm.chat([{"role": "user", "content": "hi"}], DEFAULTS, use_tqdm=False)
    assert rows[5]["text"] == chat.outputs[0].text
    assert rows[5]["num_prompt_tokens"] == len(chat.prompt_token_ids)
    assert rows[0]["finish_reason"] == "length" and rows[0]["num_output_tokens"] == 8
    chatted = serve(llm, ['{"prompt": "hi"}'], chat=True)
    assert chatted[0]["text"] == rows[5]["text"]
    assert serve(llm, ['{"q": "abc", "prompt": "x"}'], field="q")[0]["text"] == expected


def test_plain_text_lines(llm):
    rows = serve(llm, ["abc\n", "\n", "de{f\r\n"], is_json=False)
    assert [rows[i]["text"] for i in range(2)] == texts_of(llm, ["abc", "de{f"])


def test_a_line_brings_its_own_sampling(llm):
    lines = [
        '{"prompt": "abc", "max_tokens": 3}',
        '{"prompt": "abc", "sampling_params": {"max_tokens": 4, "logprobs": 1}}',
        '{"prompt": "abc", "temperature": 1.0, "n": 2, "seed": 5}',
    ]
    rows = serve(llm, lines)
    assert rows[0]["num_output_tokens"] == 3
    assert rows[1]["num_output_tokens"] == len(rows[1]["logprobs"]) == 4
    assert [len(o["text"]) > 0 for o in rows[2]["outputs"]] == [True, True]
    json.dumps(rows)


def test_bad_lines_are_reported_in_their_rows(llm):
    bad = {
        '{"prompt": "a"': "no JSON",
        "[1, 2]": "JSON list",
        '{"answer": "a"}': r"none of \['messages', 'prompt'",
        '{"prompt": 5}': "prompt=5",
        '{"prompt": ""}': "empty",
        '{"prompt": "a", "temperature": -1}': "temperature=-1",
        '{"prompt": "a", "n": 0}': "n=0",
        '{"prompt": "a", "sampling_params": {"temp": 1}}': "'temp'",
        '{"prompt": "a", "sampling_params": 3}': "sampling_params=3",
        '{"prompt": "a", "presence_penalty": 1.0}': "presence_penalty=1.0 is not supported yet",
        '{"messages": [{"role": "user"}]}': "content",
        '{"prompt_token_ids": [1, 260]}': r"prompt_token_ids\[1\]=260",
        json.dumps({"prompt": "a" * 9000}): "9000 tokens",
    }
    lines = ['{"prompt": "abc"}']
    for line in bad:
        lines += [line, '{"prompt": "abc"}']
    rows = serve(llm, lines)
    (expected,) = texts_of(llm, ["abc"])
    assert sorted(rows) == list(range(len(lines)))
    for i in range(0, len(lines), 2):
        assert rows[i]["text"] == expected and rows[i]["error"] is None
    for i, message in enumerate(bad.values()):
        with pytest.raises(ValueError, match=message):
            raise ValueError(rows[2 * i + 1]["error"])


def test_lines_are_read_as_seats_become_free(llm):
    """A file of any length: what is held stays within four times the seats."""
    num_read = num_written = 0

    def lines():
        nonlocal num_read
        for _ in range(200):
            num_read += 1
            assert num_read - num_written <= 4 * llm.engine.config.max_num_seqs + 1
            yield '{"prompt": "abc"}'

    def write(row):
        nonlocal num_written
        num_written += 1

    assert serve_lines(llm, read_lines(lines(), DEFAULTS, is_json=True), write, chat=False) == (
        200,
        0,
    )


def test_an_error_of_the_writer_leaves_the_engine_free(llm):
    def write(row):
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        serve_lines(
            llm, read_lines(['{"prompt": "abc"}'] * 9, DEFAULTS, is_json=True), write, chat=False
        )
    assert not llm.engine.has_unfinished()
    assert llm.engine.scheduler.blocks.pool.num_used_blocks == 0


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory):
    """A Hugging Face folder of a tiny model with a byte-level tokenizer."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("tiny")
    config = tiny_config(vocab_size=VOCAB_SIZE)
    write_hf_folder(folder, config, random_tensors(config))
    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def run_script(*args, stdin=""):
    command = [sys.executable, str(ROOT / "scripts" / "generate.py"), *map(str, args)]
    return subprocess.run(
        command,
        input=stdin,
        capture_output=True,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        timeout=300,
    )


def test_the_script_end_to_end(tiny_folder, tmp_path):
    source, sink = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(b'{"prompt": "abc"}\n{"prompt": \n{"prompt": "\xff"}\n{"prompt": "de"}\n')
    small = ["--max_num_seqs=2", "--max_num_batched_tokens=32", "--max_tokens=4", "--nochat"]
    done = run_script(f"--model={tiny_folder}", f"--input={source}", f"--output={sink}", *small)
    assert done.returncode == 1, done.stderr
    rows = {row["index"]: row for row in map(json.loads, sink.read_text().splitlines())}
    assert [rows[i]["error"] is None for i in range(4)] == [True, False, False, True]
    assert rows[0]["num_output_tokens"] == 4
    assert "2 of 4 rows carry an error" in done.stderr
    assert "prefix hits" in done.stderr and "preemptions" in done.stderr
    piped = run_script(f"--model={tiny_folder}", "--noreport", *small, stdin="abc\n")
    assert piped.returncode == 0, piped.stderr
    assert json.loads(piped.stdout)["text"] == rows[0]["text"]


def test_the_script_refuses_before_it_loads(tiny_folder, tmp_path):
    for args, message in (
        (["--temperature=-1"], "temperature=-1"),
        (["--block_size=0"], "block_size=0"),
        ([f"--input={tmp_path}/none.jsonl"], "none.jsonl"),
        ([f"--model={tmp_path}/none.gguf"], "none.gguf"),
    ):
        done = run_script(f"--model={tiny_folder}", *args)
        assert done.returncode != 0 and message in done.stderr
        assert "Traceback" not in done.stderr
