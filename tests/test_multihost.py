"""Several processes as one engine: equal rows, one that dies, and a run that is begun again."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from model_files import tiny_config, write_byte_folder
from tiny_engine import VOCAB_SIZE

from paged_jax import LLM, SamplingParams
from paged_jax.multihost import RowFile, initialize, serve
from paged_jax.offline import Line, read_lines, serve_lines
from paged_jax.process_watch import EXIT_STATUS, ProcessWatch

ROOT = Path(__file__).parent.parent
DEFAULTS = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
LIMITS: dict[str, Any] = dict(
    max_num_seqs=2,
    max_num_batched_tokens=32,
    max_model_len=128,
    block_size=4,
    kv_cache_memory_bytes=2**18,
)
NUM_LINES = 28


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Hugging Face folder of a model with eight KV heads, and a byte-level tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    config = tiny_config(vocab_size=VOCAB_SIZE, num_layers=1, num_heads=8, num_kv_heads=8)
    write_byte_folder(folder, config)
    return folder


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Greedy and sampled requests, one of two outputs, one that is none, and a blank line."""
    lines = []
    for i in range(NUM_LINES):
        line: dict[str, Any] = {"id": f"q{i}", "prompt": "abcdefgh"[: i % 8 + 1] * (1 + i % 5)}
        if i % 4 == 1:
            line |= {"temperature": 0.9}
        if i % 8 == 2:
            line |= {"n": 2, "temperature": 0.7}
        lines.append(json.dumps(line))
    lines[7] = '{"prompt": 7}'
    lines[9:9] = [""]
    path = tmp_path_factory.mktemp("input") / "prompts.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def lines_of(source) -> list[Line]:
    return list(read_lines(source.read_text().splitlines(), DEFAULTS, is_json=True))


def by_index(rows):
    indices = [row["index"] for row in rows]
    assert len(set(indices)) == len(indices), "a row is there twice"
    # What a prompt finds cached depends on what ran beside it.
    return {
        row["index"]: {k: v for k, v in row.items() if k != "num_cached_tokens"} for row in rows
    }


def rows_of(path: Path) -> dict[int, dict[str, Any]]:
    return by_index([json.loads(line) for line in path.read_text().splitlines()])


@pytest.fixture(scope="module")
def llm(folder):
    return LLM(str(folder), **LIMITS)


@pytest.fixture(scope="module")
def expected(llm, source):
    """The rows of one process, on one device."""
    rows = []
    watch = ProcessWatch(0, 1, 20)
    assert serve(watch, llm, lines_of(source), rows.append, chat=False) == (NUM_LINES, 1)
    return by_index(rows)


def test_one_process_gives_the_rows_of_the_ordinary_loop(llm, source, expected):
    rows = []
    serve_lines(llm, iter(lines_of(source)), rows.append, chat=False)
    ordinary = by_index(rows)
    for i in range(NUM_LINES):
        if i % 4 not in (1, 2):  # Those without a seed of their own differ.
            assert ordinary[i] == expected[i]
    # What is left of a run samples what the whole one did.
    rows = []
    left = (line for line in lines_of(source) if line.index % 3 == 1)
    serve(ProcessWatch(0, 1, 20), llm, left, rows.append, chat=False)
    assert by_index(rows) == {i: expected[i] for i in range(NUM_LINES) if i % 3 == 1}


class Host:
    """Where a process is started: the prefix of its command, and its address."""

    def __init__(self, address: str, *prefix: str):
        self.address, self.prefix = address, prefix

    def start(self, *command: object, **options: Any) -> subprocess.Popen:
        return subprocess.Popen(
            [*self.prefix, sys.executable, *map(str, command)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            **options,
        )


HERE = Host("127.0.0.1")


@pytest.fixture(scope="module")
def namespaces():
    """Two network namespaces with a link between them, as hosts with names and addresses of their
    own; or why there are none.
    """
    with contextlib.ExitStack() as stack:
        try:
            yield stack.enter_context(two_namespaces())
        except CannotMake as error:
            yield error


class CannotMake(Exception):
    """Why there are no namespaces."""


@contextlib.contextmanager
def two_namespaces():
    names = [f"pj{os.getpid()}{side}" for side in "ab"]
    addresses = ["10.213.7.1", "10.213.7.2"]
    if shutil.which("ip") is None or os.geteuid() != 0:
        raise CannotMake("making network namespaces needs root and the program ip")

    def run(command: str):
        return subprocess.run(command.split(), capture_output=True, text=True, timeout=30)

    made = run(f"ip netns add {names[0]}")
    if made.returncode:
        raise CannotMake(f"no network namespaces here: {made.stderr.strip()}")
    folders = [Path("/etc/netns", name) for name in names]
    try:
        run(f"ip netns add {names[1]}")
        run(f"ip link add {names[0]} netns {names[0]} type veth peer {names[1]} netns {names[1]}")
        hosts = []
        for name, address, folder in zip(names, addresses, folders, strict=True):
            inside = f"ip -n {name}"
            run(f"{inside} address add {address}/24 dev {name}")
            run(f"{inside} link set {name} up")
            if run(f"{inside} link set lo up").returncode:
                raise CannotMake("no links in network namespaces here")
            folder.mkdir(parents=True)  # `ip netns exec` puts it over /etc.
            (folder / "hosts").write_text(
                "127.0.0.1 localhost\n" + "".join(map("{} {}\n".format, addresses, names))
            )
            named = f'hostname {name} && exec "$@"'
            enter = ("ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c", named, "sh")
            hosts.append(Host(address, *enter))
        yield hosts
    finally:
        for name, folder in zip(names, folders, strict=True):
            run(f"ip netns delete {name}")
            shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            Path("/etc/netns").rmdir()


@pytest.fixture
def two_hosts(namespaces):
    """The namespaces; the test is skipped where there are none."""
    if isinstance(namespaces, CannotMake):
        pytest.skip(str(namespaces))
    return namespaces


@pytest.fixture
def hosts(namespaces):
    """The namespaces, or this host twice."""
    return [HERE, HERE] if isinstance(namespaces, CannotMake) else namespaces


def free_port() -> int:
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]


def start(hosts, folder, source, sink, *flags):
    """The script's processes, one on each host, of four devices each."""
    coordinator, watch_port = f"{hosts[0].address}:{free_port()}", free_port()
    limits = [f"--{name}={value}" for name, value in LIMITS.items()]
    return [
        host.start(
            *(ROOT / "scripts" / "multihost.py", *limits, *flags, "--nochat", "--ignore_eos"),
            *(f"--model={folder}", f"--input={source}", f"--output={sink}", "--max_tokens=16"),
            *(f"--coordinator={coordinator}", f"--watch_port={watch_port}", "--cpu_devices=4"),
            *(f"--num_processes={len(hosts)}", f"--process_id={i}", "--noreport"),
        )
        for i, host in enumerate(hosts)
    ]


def end(processes, timeout=240):
    """Their statuses, and what they printed, gloo's lines left out."""
    try:
        texts = [process.communicate(timeout=timeout)[0] for process in processes]
        texts = ["".join(x for x in t.splitlines(True) if "[Gloo]" not in x) for t in texts]
    finally:
        for process in processes:
            process.kill()
    return [process.returncode for process in processes], texts


def kill_mid_run(processes, sink, victim):
    """Kills one when some rows are there; what the others make of it, and after how long."""
    deadline = time.monotonic() + 240
    while not (sink.exists() and sink.read_text().count("\n") >= 3):
        assert time.monotonic() < deadline and processes[victim].poll() is None, end(processes, 1)
        time.sleep(0.005)
    os.kill(processes[victim].pid, signal.SIGKILL)  # Its prefix has become the program by `exec`.
    killed = time.monotonic()
    statuses, texts = end(processes, 60)
    return statuses, texts, time.monotonic() - killed


@pytest.mark.full
def test_tensor_parts_across_processes_give_the_rows_of_one(folder, source, expected, tmp_path):
    sink = tmp_path / "rows.jsonl"
    processes = start([HERE, HERE], folder, source, sink, "--tensor_parallel_size=8")
    statuses, texts = end(processes)
    assert "1 of 28 rows carry an error" in texts[0], "\n".join(texts)
    assert statuses == [1, 1]
    assert rows_of(sink) == expected


@pytest.mark.once
@pytest.mark.parametrize("victim", [1, pytest.param(0, marks=pytest.mark.full)])
def test_one_of_two_hosts_dies_and_the_run_is_begun_again(
    hosts, folder, source, expected, tmp_path, victim
):
    sink = tmp_path / "rows.jsonl"
    processes = start(hosts, folder, source, sink, "--tensor_parallel_size=4")
    pid = processes[victim].pid
    statuses, texts, seconds = kill_mid_run(processes, sink, victim)
    assert seconds < 60
    assert statuses[victim] == -signal.SIGKILL
    # jax itself ends a process when process 0 is gone, with SIGABRT.
    assert statuses[1 - victim] in ((EXIT_STATUS,) if victim else (EXIT_STATUS, -signal.SIGABRT))
    told = [line for line in texts[1 - victim].splitlines() if f"process {victim} of 2 (" in line]
    assert len(told) == 1 and f"pid {pid}): it died" in told[0], texts[1 - victim]
    assert "start all processes again with the same command" in told[0]
    before = sink.read_bytes()
    assert 3 <= before.count(b"\n") < NUM_LINES
    sink.write_bytes(before + b'{"index": 27, "li')  # As if it had died while it wrote.
    statuses, texts = end(start(hosts, folder, source, sink, "--tensor_parallel_size=4"))
    assert [status in (0, 1) for status in statuses] == [True, True], texts
    assert sink.read_bytes().startswith(before)
    assert rows_of(sink) == expected


@pytest.mark.full
def test_local_processes_of_the_script(folder, source, expected, tmp_path):
    sink = tmp_path / "rows.jsonl"
    limits = [f"--{name}={value}" for name, value in LIMITS.items()]
    process = HERE.start(
        *(ROOT / "scripts" / "multihost.py", *limits, "--nochat", "--ignore_eos"),
        *(f"--model={folder}", f"--input={source}", f"--output={sink}", "--max_tokens=16"),
        *("--local_processes", "2", "--cpu_devices=2", "--tensor_parallel_size=2"),
    )
    statuses, texts = end([process])
    assert statuses == [1], texts
    assert rows_of(sink) == expected


WATCHED = """
import json, os, pathlib, signal, sys, time
from paged_jax.process_watch import start_watch

process_id, num_processes = map(int, sys.argv[1:3])
folder, what = sys.argv[3:5]

def exchange(value):
    path = pathlib.Path(folder, "exchanged")
    if process_id == 0:
        path.with_suffix(".part").write_text(json.dumps(value))
        path.with_suffix(".part").rename(path)
    while not path.exists():
        time.sleep(0.02)
    return json.loads(path.read_text())

address = sys.argv[5] if len(sys.argv) > 5 else None
with start_watch(process_id, num_processes, exchange, address=address, silence_seconds=3) as watch:
    if what == "late":
        time.sleep(2)
    arrived = time.monotonic()
    watch.barrier()
    print("together", arrived, time.monotonic(), flush=True)
    watch.barrier()
    if what == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "fails":
        raise ValueError("no such thing")
    if what == "collective":
        raise RuntimeError("a connection was reset")
    if what == "stays":
        time.sleep(60)
"""


def watched(hosts, tmp_path, *roles):
    command = ("-c", WATCHED)
    return [
        host.start(*command, i, len(roles), tmp_path, role, *hosts[0].address.split(), cwd=ROOT)
        for i, (host, role) in enumerate(zip(hosts, roles, strict=True))
    ]


@pytest.mark.parametrize(
    ("roles", "dead", "reason"),
    [
        (("stays", "dies", "stays"), 1, "it died"),
        (("dies", "stays", "stays"), 0, "it died"),
        (("stays", "stays", "fails"), 2, "it failed: ValueError: no such thing"),
        # A collective's error is explained by the death that caused it.
        (("collective", "stays", "dies"), 2, "it died"),
    ],
)
def test_all_end_when_one_does(tmp_path, roles, dead, reason):
    processes = watched([HERE] * 3, tmp_path, *roles)
    pid = processes[dead].pid
    statuses, texts = end(processes, 60)
    own = 1 if roles[dead] == "fails" else -signal.SIGKILL
    assert statuses == [own if i == dead else EXIT_STATUS for i in range(3)], texts
    for i, text in enumerate(texts):
        if i != dead:
            assert f"process {dead} of 3 (" in text and f"pid {pid}): {reason}" in text
            assert text.count("of 3 (") == 1 and "Traceback" not in text


def test_a_normal_end_is_no_death_and_a_barrier_waits(tmp_path):
    statuses, texts = end(watched([HERE] * 3, tmp_path, "ends", "late", "ends"), 60)
    assert statuses == [0, 0, 0], texts
    arrived, left = zip(*(map(float, text.split()[1:3]) for text in texts), strict=True)
    assert max(arrived) - min(arrived) > 1  # One was late, and nobody left before it came.
    assert min(left) >= max(arrived)


def test_a_host_that_falls_silent_counts_as_dead(two_hosts, tmp_path):
    processes = watched(two_hosts, tmp_path, "stays", "stays")
    assert [process.stdout.readline()[:8] for process in processes] == ["together"] * 2
    name = two_hosts[1].prefix[3]
    subprocess.run(["ip", "-n", name, "link", "set", name, "down"], check=True, timeout=30)
    try:
        started = time.monotonic()
        statuses, texts = end(processes, 60)
    finally:
        subprocess.run(["ip", "-n", name, "link", "set", name, "up"], check=True, timeout=30)
    assert statuses == [EXIT_STATUS] * 2
    assert time.monotonic() - started < 30
    for i, text in enumerate(texts):
        assert f"process {1 - i} of 2 ({two_hosts[1 - i].prefix[3]}, pid" in text
        assert "nothing was heard of it for" in text


def test_an_output_of_another_kind_or_input_is_refused(source, tmp_path):
    sink = tmp_path / "rows.jsonl"
    sink.write_text('{"index": 0, "line": 1}\nsomething\n')
    with pytest.raises(ValueError, match="line 2 is no row of an earlier run"):
        RowFile(str(sink))
    assert sink.read_text().endswith("something\n")
    sink.write_text('{"index": 0, "line": 1}\n{"index": 12, "line": 13}\n')
    rows = RowFile(str(sink))
    with pytest.raises(ValueError, match="row of index 12 and line 13, which is line 14 of the in"):
        list(rows.left_of(lines_of(source)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("somewhere", 2, 0), "coordinator_address='somewhere': it must be host:port"),
        (("a:1", 0, 0), "num_processes=0: it must be at least 1"),
        (("a:1", 2, 2), "process_id=2, and there are num_processes=2: it must be 0 to 1"),
        (("a:1", "2", 0), "num_processes='2': it must be an integer"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        initialize(*arguments)


def test_what_is_missing_is_named():
    process = HERE.start(
        *(ROOT / "scripts" / "multihost.py", "--input=a.jsonl", "--output=b.jsonl"),
        *("--num_processes=2", "--process_id=1"),
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    statuses, [text] = end([process], 60)
    assert statuses == [2]
    assert "multihost.py: coordinator_address: not given, and found out neither from a TPU" in text
