"""The benchmark against other engines: its protocol, its arithmetic, and the profile's."""

import gzip
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from script_modules import SCRIPTS, import_script

ROOT = Path(__file__).parent.parent
peers_cases = import_script("peers_cases")
peers_envs = import_script("peers_envs")
peers_protocol = import_script("peers_protocol")
peers_report = import_script("peers_report")
profile_rows = import_script("profile_rows")

FAKE_ENGINE = """
import os, subprocess, sys, time
sys.path.insert(0, sys.argv[1])
from peers_protocol import serve

class Fake:
    def __init__(self, settings):
        print("a library's chatter")
        os.write(1, b"and some from C\\n")
        self.child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
        self.settings = settings
    def info(self):
        return {"got": self.settings, "child": self.child.pid}
    def generate(self, prompts, max_tokens, ignore_eos):
        if max_tokens == 13:
            raise ValueError("thirteen")
        if max_tokens == 14:
            print("last words", flush=True)
            os._exit(3)
        if max_tokens == 15:
            time.sleep(60)
        return {"seconds": 0.5, "token_ids": [[sum(p)] * max_tokens for p in prompts]}

serve(Fake)
"""
needs_posix = pytest.mark.skipif(os.name != "posix", reason="workers are stopped by signals")


@pytest.fixture
def worker(tmp_path):
    command = [sys.executable, "-c", FAKE_ENGINE, str(SCRIPTS)]
    with peers_protocol.Worker(
        "fake", command, {"a": 1}, log=tmp_path / "log", timeout_seconds=20
    ) as made:
        yield made


def state_of(pid: int) -> str:
    """The letter that Linux has for what a process is doing, once it is no longer running."""
    for _ in range(200):
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        if state != "R":
            return state
        time.sleep(0.01)
    return "R"


@needs_posix
def test_a_worker_answers_and_sleeps_between_calls(worker):
    assert worker.info["got"] == {"a": 1}
    long = list(range(20_000))  # More than a pipe holds.
    reply = worker.call([[1, 2], long], 3)
    assert reply == {"seconds": 0.5, "token_ids": [[3] * 3, [sum(long)] * 3]}
    if sys.platform == "linux":
        assert state_of(worker._process.pid) == "T"
        assert state_of(worker.info["child"]) == "T"  # It would spin.
    assert worker.call([[5]], 1, True)["token_ids"] == [[5]]


@needs_posix
def test_a_worker_that_fails_says_why_and_goes_on(worker):
    with pytest.raises(peers_protocol.PeerError, match="fake: ValueError: thirteen"):
        worker.call([[1]], 13)
    assert worker.call([[1]], 1)["token_ids"] == [[1]]
    with pytest.raises(peers_protocol.PeerError, match=r"process ended(.|\n)*last words"):
        worker.call([[1]], 14)


@needs_posix
def test_a_worker_that_hangs_is_given_up(worker):
    worker.timeout_seconds = 0.3
    with pytest.raises(peers_protocol.PeerError, match=r"no answer within(.|\n)*chatter"):
        worker.call([[1]], 15)


@needs_posix
def test_closing_a_worker_ends_its_children(worker):
    child = worker.info["child"]
    os.kill(child, 0)
    worker.close()
    for _ in range(200):
        try:
            os.kill(child, 0)
        except ProcessLookupError:
            return
        if sys.platform == "linux" and state_of(child) == "Z":  # Its new parent reaps it.
            return
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    raise AssertionError("the child outlived its worker")


def test_medians_and_ratios_of_rounds():
    # The machine was half as fast in the second round, and the third of b was odd.
    rounds = {"a": [{"x": 10.0}, {"x": 5.0}, {"x": 12.0}], "b": [{"x": 4}, {"x": 2}, {"x": 24}]}
    assert peers_report.medians(rounds["a"]) == {"x": 10.0}
    assert peers_report.ratios(rounds, "x") == {"a": {"b": 2.5}, "b": {"a": 0.4}}
    some = [{"x": 1, "y": 3}, {"x": 2}]
    assert peers_report.medians(some) == {"x": 1.5, "y": 3}
    assert peers_report.agreement([1, 2, 3], [1, 2, 4]) == 2
    assert peers_report.agreement([1, 2, 3], [1, 2]) == 2


def test_a_round_becomes_figures():
    batch = peers_cases.CASES["batch"]
    reply = {"seconds": 2.0, "token_ids": [[1] * 64] * 32}
    assert batch.figures([reply])["output_tokens_per_second"] == 1024
    single = peers_cases.CASES["single"]
    replies = [{"seconds": 0.5, "token_ids": [[7]]}, {"seconds": 2.0, "token_ids": [[7] * 31]}]
    assert single.figures(replies)["decode_tokens_per_second"] == pytest.approx(30 / 1.5)
    replies[1] |= {"draft_tokens": 40, "accepted_tokens": 10}
    assert single.figures(replies)["acceptance"] == 0.25


def test_prompts_are_fresh_and_share_what_they_should():
    case = peers_cases.CASES["prefix"]
    (call,) = case.calls(0, 1000)
    assert [len(prompt) for prompt in call.prompts] == [512] * 64
    assert len({tuple(prompt[:448]) for prompt in call.prompts}) == 1
    assert len({tuple(prompt[:464]) for prompt in call.prompts}) == 64
    assert case.expected_hit_tokens == 63 * 448
    assert case.calls(0, 1000) == case.calls(0, 1000) != case.calls(1, 1000)
    assert case.max_model_len >= 512 + 128
    first, second = peers_cases.CASES["single"].calls(0, 1000)
    assert first.max_tokens == 1 and first.prompts != second.prompts


def test_the_table_names_figures_ratios_and_hits():
    case = peers_cases.CASES["prefix"]
    rounds = {
        "ours-int8": [{case.figure: 30.0, "prefix_hit_tokens": 28224}],
        "llama": [{case.figure: 10.0}],
    }
    text = peers_report.table(peers_report.summarise(case, rounds))
    assert "3.00 x llama" in text and "expected prefix hit tokens 28224, as counted" in text
    assert "prefix hit tokens 28224" in text.splitlines()[1]
    rounds["ours-int8"][0]["prefix_hit_tokens"] -= 16
    assert "NOT as counted" in peers_report.table(peers_report.summarise(case, rounds))


def test_a_picture_is_drawn(tmp_path):
    case = peers_cases.CASES["batch"]
    rounds = {name: [{case.figure: 1.0}, {case.figure: 2.0}] for name in ("ours-int8", "vllm")}
    cases = {"batch": peers_report.summarise(case, rounds)}
    report = {"model": "m", "machine": peers_report.machine(), "cases": cases}
    peers_report.draw(report, tmp_path / "bars.svg")
    assert "<svg" in (tmp_path / "bars.svg").read_text()


def test_an_environment_that_lacks_its_package_names_the_mend(tmp_path):
    empty = tmp_path / "python"
    empty.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    empty.chmod(0o755)
    with pytest.raises(peers_envs.PeerEnvironmentError, match="pip install llama-cpp-python"):
        peers_envs.check_environment("llama", str(empty))
    with pytest.raises(peers_envs.PeerEnvironmentError, match="--make_envs"):
        peers_envs.check_environment("vllm", str(tmp_path / "nothing"))


HLO = """\
HloModule jit_step

FileNames
1 "/a/layers.py"
2 "/a/attention_cpu.py"

FunctionNames
1 "rms_norm"
2 "call.<locals>.attend"

FileLocations
1 {file_name_id=1 function_name_id=1 line=8 end_line=8 column=1 end_column=2}
2 {file_name_id=2 function_name_id=2 line=9 end_line=9 column=1 end_column=2}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=1}

%fused (p0: f32[8,32], p1: f32[128,32]) -> f32[8,128] {
  %p0 = f32[8,32]{1,0} parameter(0)
  %p1 = f32[128,32]{1,0} parameter(1)
  ROOT %dot.1 = f32[8,128]{1,0} dot(%p0, %p1), lhs_contracting_dims={1}, metadata={stack_frame_id=1}
}

ENTRY %main (x: f32[8,32], w: f32[128,32]) -> f32[8,128] {
  %x = f32[8,32]{1,0} parameter(0)
  %w = f32[128,32]{1,0} parameter(1)
  %norm = f32[8,32]{1,0} fusion(%x), kind=kLoop, calls=%other, metadata={stack_frame_id=1}
  %call = (f32[8,32]{1,0}, f32[0]{0}) custom-call(%norm), custom_call_target="a", \
metadata={op_name="a" stack_frame_id=2}
  %loop = f32[8,32]{1,0} while(%norm), condition=%c, body=%b
  ROOT %ynn = f32[8,128]{1,0} fusion(%norm, %w), kind=kCustom, calls=%fused
}
"""


def test_operations_are_named_after_what_made_them():
    labels = profile_rows.Program(HLO).labels()
    assert labels["norm"] == "RMSNorm"
    assert labels["call"] == "attention"
    assert labels["ynn"] == "product f32[8,32] x f32[128,32]"
    assert labels["loop"] == ""


def test_time_is_shared_out_without_rest(tmp_path):
    def event(name: str, start: float, end: float, **args: Any) -> dict[str, Any]:
        return {"ph": "X", "name": name, "ts": start, "dur": end - start, "args": args}

    def op(name: str, start: float, end: float) -> dict[str, Any]:
        return event(name, start, end, hlo_module="jit_step")

    trace = {
        "traceEvents": [
            {"ph": "M", "name": "thread_name"},
            event(profile_rows.WINDOW, 100, 200),
            event("host: schedule", 90, 110),
            op("loop", 110, 170),  # around the next two, which overlap for 10
            op("norm", 110, 130),
            op("ynn", 120, 150),
            op("call", 195, 240),  # ends after the window
        ]
    }
    (tmp_path / "x.trace.json.gz").write_bytes(gzip.compress(json.dumps(trace).encode()))
    labels = {"jit_step": profile_rows.Program(HLO).labels()}
    times, counts = profile_rows.share_out(profile_rows.read_trace(tmp_path), labels)
    assert times == pytest.approx(
        {
            "host: schedule": 10,
            "RMSNorm": 15,
            "product f32[8,32] x f32[128,32]": 25,
            "loops and branches": 20,
            "host: other": 25,
            "attention": 5,
        }
    )
    assert sum(times.values()) == pytest.approx(100)
    assert counts["attention"] == 1
    assert "100.0%" in profile_rows.table(times, counts, 1)


def test_growth_beside_a_straight_line():
    scaling = import_script("bench_scaling")
    work = [1, 2, 4]
    for times, wanted in (([3, 4, 6], 1.0), ([3, 5, 6], 0.5), ([3, 3, 6], 1.5)):
        line = scaling.straight_line(work, times)
        assert line == pytest.approx([3, 4, 6])
        assert scaling.last_step(times, line) == pytest.approx(wanted)
