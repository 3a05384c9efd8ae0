"""This engine beside vLLM, llama.cpp and transformers: the same file, prompts and machine, in turn.

    python scripts/bench_peers.py --make_envs=peers --out=peers/report
    python scripts/bench_peers.py --python_llama=... --cases=batch,single --rounds=7

What is measured stands in peers_cases.py. Each engine is a process of its own, in an environment of
its own, that loads the model once and warms up; then they take turns, one at a time, round after
round (A B C, then B C A), and those that wait are stopped by a signal. A figure is the median of
the rounds, a ratio the median of each round's own ratio.

All read one GGUF file. vLLM and transformers, which want a folder, get its weights dequantised to
float32 (peers_export.py). llama.cpp computes in the file's own quantisation, with as many threads
as there are cores; what its three modes are says peers_llama.py. Before the rounds every engine
completes one prompt of words, and the report says how many tokens agree with this engine's in
float32: all of them should where the peer computes in float32 too.

Environments are given by --python_vllm and so on, each the Python of one, or made by --make_envs:
python -m venv, then the pip commands of peers_envs.py. An engine without one is left out.

--profile adds where our own steps' time goes (profile_step.py).
--out=PATH writes PATH.json, and PATH.svg with matplotlib (pip install 'paged-jax[plots]').
"""

import dataclasses
import json
import os
import pathlib
import platform
import signal
import subprocess
import sys
import tempfile
from typing import Any

import peers_cases
import peers_envs
import peers_report
import peers_texts
from absl import app, flags
from peers_cases import CASES, Case
from peers_export import export_folder
from peers_protocol import PeerError, Worker

from paged_jax import demo_model_path
from paged_jax.config import EngineConfig
from paged_jax.models.weights_gguf import open_gguf
from paged_jax.paths import cache_folder
from paged_jax.tokenizer import Tokenizer

SCRIPTS = pathlib.Path(__file__).parent
# Every engine by the name that reports have for it: its worker, and settings of its own.
OURS: dict[str, dict[str, Any]] = {
    "ours-float32": {},
    "ours-int8": {"quantization": "int8"},
    "ours-int8-kv8": {"quantization": "int8", "kv_cache_dtype": "int8"},
    "ours-int4": {"quantization": "int4", "kv_cache_dtype": "int8"},
    "ours-float32-lookup": {"speculation": "prompt_lookup"},
    "ours-int8-lookup": {"quantization": "int8", "speculation": "prompt_lookup"},
    "ours-int4-lookup": {
        "quantization": "int4",
        "kv_cache_dtype": "int8",
        "speculation": "prompt_lookup",
    },
}
PROFILED = ("ours-float32", "ours-int8")
PEERS: dict[str, tuple[str, dict[str, Any]]] = {
    "vllm": ("vllm", {}),
    "llama": ("llama", {"mode": "batched"}),
    "llama-serial": ("llama", {"mode": "serial"}),
    "llama-shared": ("llama", {"mode": "shared"}),
    "transformers": ("transformers", {}),
}
WORKER_ENV = {
    "HF_HUB_OFFLINE": "1",
    "JAX_PLATFORMS": "cpu",
    "VLLM_CPU_KVCACHE_SPACE": "4",
    # By itself vLLM keeps one core free for its scheduler, which on two cores is half of them.
    "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0)))),
}
CHECK_TEXT = "The capital of France is"
CHECK_TOKENS = 32

MODEL = flags.DEFINE_string("model", "demo", 'A .gguf file, or "demo".')
CASE_NAMES = flags.DEFINE_list("cases", list(CASES), "Cases, by name.")
ENGINES = flags.DEFINE_list("engines", [*OURS, *PEERS], "Engines, where a case is meant for them.")
ROUNDS = flags.DEFINE_integer("rounds", 5, "Measured rounds.", lower_bound=1)
OUT = flags.DEFINE_string("out", None, "Path of the report, without .json and .svg.")
QUICK = flags.DEFINE_bool("quick", False, "Small sizes, to see that all of it runs.")
PROFILE = flags.DEFINE_bool("profile", False, "Also where our steps' time goes, by operation.")
MAKE_ENVS = flags.DEFINE_string("make_envs", None, "A folder to make environments in.")
ENVS_PYTHON = flags.DEFINE_string("envs_python", "3.11", "Their Python version.")
PYTHONS = {
    name: flags.DEFINE_string(f"python_{name}", None, f"A Python that has {package}.")
    for name, package in peers_envs.MODULES.items()
}
THREADS = flags.DEFINE_integer("threads", None, "Threads of each engine; None: the cores.")
TIMEOUT = flags.DEFINE_float("timeout_seconds", 1800, "For one engine's start or call.")


def find_pythons() -> dict[str, str]:
    """The environment of each peer that is wanted and has one; made or checked."""
    wanted = dict.fromkeys(
        PEERS[engine][0]
        for case in map(case_named, CASE_NAMES.value)
        for engine in case.engines
        if engine in PEERS and engine in ENGINES.value
    )
    given = {name: PYTHONS[name].value for name in wanted}
    pythons = {name: python for name, python in given.items() if python}
    if MAKE_ENVS.value:
        missing = [name for name in wanted if name not in pythons]
        folder = pathlib.Path(MAKE_ENVS.value)
        pythons |= peers_envs.make_environments(folder, missing, ENVS_PYTHON.value)
    for name, python in pythons.items():
        peers_envs.check_environment(name, python)
    return pythons


def case_named(name: str) -> Case:
    if name not in CASES:
        raise app.UsageError(f"--cases={name}: give some of {','.join(CASES)}")
    return CASES[name]


class Bench:
    """One model, and what workers need to know of it."""

    def __init__(self, model: pathlib.Path, pythons: dict[str, str], logs: pathlib.Path):
        self.model = model
        self.pythons = pythons
        self.logs = logs
        self.threads = THREADS.value or os.cpu_count() or 1
        checkpoint = open_gguf(model)
        assert checkpoint.tokenizer_metadata is not None
        self.vocab_size = checkpoint.config.vocab_size
        self.tokenizer = Tokenizer.from_gguf(checkpoint.tokenizer_metadata)
        self.folder: pathlib.Path | None = None
        if pythons.keys() & {"vllm", "transformers"}:
            status = model.stat()
            name = f"{model.stem}-{status.st_size:x}-{int(status.st_mtime):x}"
            self.folder = export_folder(model, cache_folder() / "peers" / name)

    def case(self, name: str) -> Case:
        """A case at the size asked for, its prompt in tokens."""
        case = case_named(name)
        if QUICK.value:
            case = dataclasses.replace(case, **peers_cases.QUICK_SIZES[name])
        texts = {
            "lookup_summary": peers_texts.SUMMARY_PROMPT,
            "lookup_edit": peers_texts.EDIT_PROMPT,
        }
        if name in texts:
            text = self.tokenizer.apply_chat_template([{"role": "user", "content": texts[name]}])
            ids = self.tokenizer.encode(text, add_special_tokens=False)
            case = dataclasses.replace(case, prompt=tuple(ids))
        return case

    def engines(self, case: Case) -> list[str]:
        """Those that take part in a case; a line for each that is left out."""
        chosen = []
        for engine in case.engines:
            reason = None
            if engine not in ENGINES.value:
                continue
            if engine in PEERS and (name := PEERS[engine][0]) not in self.pythons:
                reason = f"no environment: give --python_{name} or --make_envs"
            unknown = set(OURS.get(engine, ())) - set(EngineConfig.__dataclass_fields__)
            if unknown:
                reason = f"the engine has no option {', '.join(unknown)}"
            if reason is None:
                chosen.append(engine)
            else:
                print(f"{case.name}: {engine} is left out, {reason}", flush=True)
        return chosen

    def start(self, engine: str, case: Case) -> Worker:
        """A warm worker of one engine, sized for a case."""
        limits = dict(max_model_len=case.max_model_len, max_num_seqs=case.num_prompts)
        settings: dict[str, Any] = {"model": str(self.model), "num_threads": self.threads}
        env = dict(WORKER_ENV)
        if engine in OURS:
            script, python = "ours", sys.executable
            if case.prompt:  # A draft's verification takes seats.
                del limits["max_num_seqs"]
            settings["options"] = {"dtype": "float32", **OURS[engine], **limits}
        else:
            script, own = PEERS[engine]
            python = self.pythons[script]
            settings |= {**own, **limits, "folder": str(self.folder)}
            env["PYTHONPATH"] = ""  # Its packages are those of its environment.
        worker = Worker(
            engine,
            [python, str(SCRIPTS / f"peers_{script}.py")],
            settings,
            log=self.logs / f"{case.name}-{engine}.log",
            env=env,
            timeout_seconds=TIMEOUT.value,
        )
        try:
            for call in peers_cases.warm_up_calls(case, self.vocab_size):
                worker.call(*call)
        except BaseException:
            worker.close()
            raise
        return worker

    def measure(self, case: Case) -> dict[str, Any]:
        """A case's summary: all its engines, round after round."""
        workers: dict[str, Worker] = {}
        try:
            for engine in self.engines(case):
                print(f"{case.name}: starting {engine}", flush=True)
                workers[engine] = self.start(engine, case)
            agreement = self._compare(workers)
            rounds: dict[str, list[peers_cases.Figures]] = {engine: [] for engine in workers}
            names = list(workers)
            for number in range(ROUNDS.value):
                calls = case.calls(number, self.vocab_size)
                turn = number % max(len(names), 1)
                for engine in names[turn:] + names[:turn]:
                    replies = [workers[engine].call(*call) for call in calls]
                    rounds[engine].append(case.figures(replies))
            summary = peers_report.summarise(case, rounds)
            for engine, worker in workers.items():
                summary["engines"][engine]["info"] = worker.info
                summary["engines"][engine]["agreement"] = agreement[engine]
            return summary
        finally:
            for worker in workers.values():
                worker.close()

    def _compare(self, workers: dict[str, Worker]) -> dict[str, dict[str, Any]]:
        """How far each engine's greedy tokens go with those of the first one, ours in float32."""
        prompt = self.tokenizer.encode(CHECK_TEXT)
        tokens = {
            engine: worker.call([prompt], CHECK_TOKENS)["token_ids"][0]
            for engine, worker in workers.items()
        }
        reference = next(iter(tokens.values()), [])
        found = {}
        for engine, own in tokens.items():
            num_equal = peers_report.agreement(reference, own)
            found[engine] = {"equal_tokens": num_equal, "of": CHECK_TOKENS}
            if num_equal < CHECK_TOKENS and engine in ("vllm", "transformers"):
                print(f"{engine}: parts from {next(iter(tokens))} at token {num_equal}")
        return found


def write(report: dict[str, Any], out: str) -> None:
    """The report as PATH.json and, with matplotlib, PATH.svg."""
    path = pathlib.Path(out)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_name(path.name + ".json").write_text(json.dumps(report, indent=1) + "\n")
    try:
        peers_report.draw(report, path.with_name(path.name + ".svg"))
    except ImportError as error:
        print(f"No picture: {error}")


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    # So that workers, which may be stopped, end with this process.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    unknown = set(ENGINES.value) - {*OURS, *PEERS}
    if unknown:
        raise app.UsageError(f"--engines={','.join(unknown)}: give some of {[*OURS, *PEERS]}")
    try:
        pythons = find_pythons()
    except peers_envs.PeerEnvironmentError as error:
        raise app.UsageError(str(error)) from error
    model = pathlib.Path(demo_model_path() if MODEL.value == "demo" else MODEL.value)
    logs = pathlib.Path(tempfile.mkdtemp(prefix="bench-peers-"))
    print(f"Logs of the engines: {logs}", flush=True)
    bench = Bench(model, pythons, logs)
    report: dict[str, Any] = {
        "model": model.stem,
        "machine": peers_report.machine(),
        "python": platform.python_version(),
        "commit": commit(),
        "command": ["python", "scripts/bench_peers.py", *sys.argv[1:]],
        "environments": {name: peers_envs.ENVIRONMENTS[name] for name in pythons},
        "rounds": ROUNDS.value,
        "threads": bench.threads,
        "cases": {},
    }
    for name in CASE_NAMES.value:
        try:
            summary = bench.measure(bench.case(name))
        except PeerError as error:
            sys.exit(f"{name}: {error}")
        if summary["engines"]:
            report["cases"][name] = summary
            print(peers_report.table(summary), flush=True)
            if OUT.value:  # After every case: what is measured is kept if a later one fails.
                write(report, OUT.value)
    if PROFILE.value:
        report["profile"] = {name: profile(model, name) for name in PROFILED}
        if OUT.value:
            write(report, OUT.value)
    print(json.dumps(report))


def profile(model: pathlib.Path, engine: str) -> dict[str, Any]:
    """Where an engine of ours spends its steps, as `profile_step.py` finds and prints it."""
    command = [sys.executable, str(SCRIPTS / "profile_step.py"), f"--model={model}"]
    command += [f"--{field}={value}" for field, value in OURS[engine].items()]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    *table, figures = done.stdout.strip().splitlines()
    print("\n".join([engine, *table]), flush=True)
    return json.loads(figures)


def commit() -> str | None:
    """The revision that is measured, "+" behind it where files differ; None outside git."""
    command = ["git", "-C", str(SCRIPTS), "describe", "--always", "--dirty=+"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


if __name__ == "__main__":
    app.run(main)
