"""Batch generation from lines: rows as they finish, errors in their own rows."""

import ast
import json
import os
import queue
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

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
    assert [rows[i]["line"] for i in range(6)] == [1, 3, 4, 5, 6, 7]
    assert [rows[i]["id"] for i in range(6)] == ["first", None, None, 81, 0, None]
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
        '{"prompt": "a", "temprature": 1}': "unknown field 'temprature': did you mean 'temp",
        '{"prompt": "a", "maxTokens": 1}': "unknown field 'maxTokens': did you mean 'max_tokens'",
        '{"prompt": "a", "sampling_param": {}}': "did you mean 'sampling_params'",
        '{"prompt": "a", "id": NaN}': "NaN, which is no finite number",
        '{"prompt": "a", "id": 1e999}': "1e999, which is no finite number",
        '{"prompt": "a", "id": ["x"]}': "id is a JSON list",
        '{"id": "\\ud800", "prompt": "\\ud800"}': "surrogate",
        "[" * 100_000: "^RecursionError: ",
        "9" * 5000: "4300 digits",
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
        row = rows[2 * i + 1]
        with pytest.raises(ValueError, match=message):
            raise ValueError(row["error"])
        assert list(row) == list(rows[0])
        assert (row["text"], row["finish_reason"], row["stop_reason"]) == ("", "error", None)
        assert row["num_prompt_tokens"] == row["num_cached_tokens"] == row["num_output_tokens"] == 0


def test_metadata_beside_the_prompt_is_passed_over(llm):
    names = "category reference answer model source language difficulty step labels"
    line = {"prompt": "abc", **dict.fromkeys(names.split(), "x")}
    rows = serve(llm, [json.dumps(line)])
    assert rows[0]["error"] is None and rows[0]["text"] == texts_of(llm, ["abc"])[0]
    # The prompt's own field may be called anything, even like a parameter.
    assert serve(llm, ['{"stop": "abc"}'], field="stop")[0]["text"] == rows[0]["text"]
    assert serve(llm, ['{"sed": "abc"}'], field="sed")[0]["text"] == rows[0]["text"]


def test_an_unexpected_error_stays_in_its_row(llm, monkeypatch):
    encode = llm.get_tokenizer().encode

    def broken(text, **options):
        if text == "x":
            raise KeyError("no such piece")
        return encode(text, **options)

    monkeypatch.setattr(llm.get_tokenizer(), "encode", broken)
    rows = serve(llm, ["abc", "x", "abc"], is_json=False)
    assert [rows[i]["error"] for i in range(3)] == [None, "KeyError: 'no such piece'", None]


def test_lines_are_read_as_seats_become_free(llm):
    """A file of any length: what is held stays within four times the seats."""
    num_read = num_written = 0

    def lines():
        nonlocal num_read
        for _ in range(200):
            num_read += 1
            assert num_read - num_written <= 4 * llm.engine.config.max_num_seqs
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
    deadline = time.monotonic() + 30
    while any(thread.name == "read lines" for thread in threading.enumerate()):
        assert time.monotonic() < deadline, "the reading thread goes on"
        time.sleep(0.01)


def test_a_row_is_written_while_the_next_line_is_awaited(llm):
    """Each line comes only when the row of the one before has been written."""
    written = queue.Queue()

    def lines():
        for i in range(3):
            yield "abc"
            assert written.get(timeout=30)["index"] == i

    read = read_lines(lines(), DEFAULTS, is_json=False)
    assert serve_lines(llm, read, written.put, chat=False) == (3, 0)


def test_an_error_of_the_source_is_raised_when_its_lines_are_served(llm):
    def lines():
        yield from ["abc", "abd"]
        raise OSError("the disk is gone")

    rows = []
    with pytest.raises(OSError, match="the disk is gone"):
        serve_lines(llm, read_lines(lines(), DEFAULTS, is_json=False), rows.append, chat=False)
    assert sorted(row["index"] for row in rows) == [0, 1]
    assert [row["error"] for row in rows] == [None, None]
    assert not llm.engine.has_unfinished()


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


SMALL = ["--max_num_seqs=2", "--max_num_batched_tokens=32", "--max_tokens=4", "--nochat"]


def script(*args):
    return [sys.executable, str(ROOT / "scripts" / "generate.py"), *map(str, args)]


def environment(**variables):
    return {**os.environ, "JAX_PLATFORMS": "cpu", **variables}


def run_script(*args, stdin="", **variables):
    return subprocess.run(
        script(*args),
        input=stdin,
        capture_output=True,
        encoding="utf-8",
        env=environment(**variables),
        timeout=300,
    )


def test_the_script_end_to_end(tiny_folder, tmp_path):
    source, sink = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(
        b'\xef\xbb\xbf{"prompt": "abc"}\n{"prompt": \n\n{"prompt": "\xff"}\n{"prompt": "de"}\n'
    )
    sink.write_text("old answers\n" * 1000)
    done = run_script(f"--model={tiny_folder}", f"--input={source}", f"--output={sink}", *SMALL)
    assert done.returncode == 1, done.stderr
    rows = {row["index"]: row for row in map(json.loads, sink.read_text().splitlines())}
    assert [rows[i]["error"] is None for i in range(4)] == [True, False, False, True]
    assert [rows[i]["line"] for i in range(4)] == [1, 2, 4, 5]
    assert rows[0]["num_output_tokens"] == 4
    assert "2 of 4 rows carry an error" in done.stderr
    assert "prefix hits" in done.stderr and "preemptions" in done.stderr
    day = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}"
    with pytest.raises(ValueError, match=f"(^|\n|\r)INFO {day} paged_jax: KV cache size"):
        raise ValueError(done.stderr)
    # Appending to a file, and reading what is no UTF-8, under a locale of ASCII only.
    with sink.open("ab") as stdout:
        piped = subprocess.run(
            script(f"--model={tiny_folder}", "--noreport", *SMALL),
            input=b"\xef\xbb\xbfabc\n\xe9\xff\n" + "\N{SNOWMAN}\n".encode(),
            stdout=stdout,
            stderr=subprocess.PIPE,
            env=environment(LC_ALL="C", PYTHONIOENCODING="ascii", PYTHONUTF8="0"),
            timeout=300,
        )
    assert piped.returncode == 1, piped.stderr
    new = [json.loads(line) for line in sink.read_text("utf-8").splitlines()[4:]]
    new.sort(key=lambda row: row["index"])
    assert [row["text"] for row in new[:2]] == [rows[0]["text"], ""]
    assert "surrogate" in new[1]["error"] and new[2]["error"] is None


def test_rows_are_json_whatever_they_hold(tiny_folder):
    lines = [
        r'{"id": "\ud800", "prompt": "yo"}',
        '{"id": "\N{SNOWMAN}", "prompt": "yo"}',
        "[" * 10**5,
    ]
    stdin = "\n".join(lines)
    done = run_script(
        f"--model={tiny_folder}", "--format=jsonl", *SMALL, stdin=stdin, PYTHONIOENCODING="ascii"
    )
    assert done.returncode == 1, done.stderr
    rows = {row["index"]: row for row in map(json.loads, done.stdout.splitlines())}
    assert [rows[i]["id"] for i in range(3)] == ["\ud800", "\N{SNOWMAN}", None]
    assert "\N{SNOWMAN}" in done.stdout
    assert rows[2]["error"].startswith("RecursionError: ")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
@pytest.mark.parametrize("ending", ["disk full", "broken pipe"])
def test_the_script_ends_while_its_input_stays_open(tiny_folder, ending):
    args = [f"--model={tiny_folder}", *SMALL]
    args += ["--output=/dev/full"] if ending == "disk full" else []
    process = subprocess.Popen(
        script(*args),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    )
    assert process.stdin and process.stdout and process.stderr
    if ending == "broken pipe":
        process.stdin.write(b"abc\n")
        process.stdin.flush()
        assert json.loads(process.stdout.readline())["index"] == 0  # The input is open still.
        process.stdout.close()
    process.stdin.write(b"abc\n" * 5)
    process.stdin.flush()
    status = process.wait(timeout=120)
    printed = process.stderr.read().decode()
    assert "Traceback" not in printed and "Exception" not in printed and "Fatal" not in printed
    assert status == (2 if ending == "disk full" else 141)
    assert ("No space left" in printed) == (ending == "disk full")
    for pipe in (process.stderr, process.stdout):
        pipe.close()
    try:
        process.stdin.close()
    except BrokenPipeError:
        pass


@pytest.mark.once
def test_the_script_refuses_before_it_loads(tiny_folder, tmp_path):
    answers = tmp_path / "answers.jsonl"
    answers.write_text('"abc"\n')
    link = tmp_path / "link.jsonl"
    link.symlink_to(answers)
    for args, message in (
        (["--temperature=-1"], "temperature=-1"),
        (["--temperature=warm"], "temperature=warm"),
        (["--temprature=1"], "'temprature'. Did you mean: temperature"),
        (["--block_size=0"], "block_size=0"),
        (["prompts.jsonl"], "use --input=FILE"),
        ([f"--input={tmp_path}/none.jsonl"], "none.jsonl"),
        ([f"--input={tmp_path}"], "Is a directory"),
        ([f"--output={tmp_path}"], "Is a directory"),
        ([f"--output={tmp_path}/none/out.jsonl"], "none/out.jsonl"),
        ([f"--input={answers}", f"--output={answers}"], "is the file of --input"),
        ([f"--input={answers}", f"--output={link}"], "is the file of --input"),
        ([f"--model={tmp_path}/none.gguf", f"--output={answers}"], "none.gguf"),
    ):
        done = run_script(f"--model={tiny_folder}", *args)
        assert done.returncode == 2 and message in done.stderr
        assert len(done.stderr.splitlines()) == 1 and done.stderr.startswith("generate.py: ")
        assert answers.read_text() == '"abc"\n'


def test_help_lists_the_flags():
    entry = "import sys; sys.argv[0] = 'paged-jax-generate'; "
    entry += "from paged_jax.cli import generate; generate()"
    for command in (script("--help"), [sys.executable, "-c", entry, "--help"]):
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.stdout.startswith("Answers prompts with a language model, many at once.\n")
        for flag in ("--model:", "--input:", "--max_tokens:", "--[no]chat:", "--stop:"):
            assert flag in done.stdout
        assert "%s" not in done.stdout


def test_start_passes_arguments_on(capsys):
    path = ROOT / "scripts" / "start.py"
    names: dict[str, Any] = {"__name__": "start", "__file__": str(path)}
    ast.parse(path.read_text(), feature_version=(3, 8))
    exec(compile(path.read_text(), str(path), "exec"), names)
    parse = names["parse"]
    for arguments, rest in (
        (["demo", "--help"], ["--help"]),
        (["demo", "-h"], ["-h"]),
        (["demo", "--max_tokens", "5", "--show=2"], ["--max_tokens", "5", "--show=2"]),
        (["--python", "3.12", "demo", "--show", "1"], ["--show", "1"]),
        (
            ["test", "-k", "cli", "-p", "no:randomly", "--py"],
            ["-k", "cli", "-p", "no:randomly", "--py"],
        ),
    ):
        options, passed = parse(arguments)
        assert (options.what, passed) == (arguments[2 if "--python" in arguments else 0], rest)
    options, rest = parse(["demo", "--which", "--python", "3.11"])
    assert (options.which, options.python, rest) == (True, "3.11", [])
    with pytest.raises(SystemExit) as ended:
        parse(["--help"])
    assert not ended.value.code and "scripts/start.py demo" in capsys.readouterr().out
