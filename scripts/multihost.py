"""Answers a file of prompts with one model over the devices of several processes.

A TPU pod slice, the same command on every host (jax finds the others itself):

    gcloud compute tpus tpu-vm ssh NAME --worker=all --command="python scripts/multihost.py \\
        --model=FOLDER --input=prompts.jsonl --output=rows.jsonl --tensor_parallel_size=8"

SLURM, one task a host:

    srun --nodes=4 --ntasks-per-node=1 python scripts/multihost.py \\
        --model=FOLDER --input=prompts.jsonl --output=rows.jsonl --tensor_parallel_size=8

Plain hosts, on each with its own --process_id:

    python scripts/multihost.py --coordinator=10.0.0.1:1234 --num_processes=2 --process_id=0 \\
        --model=FOLDER --input=prompts.jsonl --output=rows.jsonl --tensor_parallel_size=4

To try it on one machine, two processes of three virtual CPU devices each:

    python scripts/multihost.py --local_processes=2 --cpu_devices=3 --tensor_parallel_size=3 \\
        --model=demo --input=prompts.jsonl --output=rows.jsonl

Every process reads the model; only process 0 reads the input and writes the output. The mesh has
all devices: --data_parallel_size is what --tensor_parallel_size leaves of them. Ports: the
coordinator's, and the next one for the watch (--watch_port), open on process 0's host.

Where a process or a host dies, the others end within 30 seconds (at once, if its host lives) with
status 70 and a line that names it. Started again with the same command, the run goes on: lines that
have a row in the output are passed over, and a last row that was written halfway is cut off first.
Exit status otherwise: 0, or 1 if a row of this run carries an error or the process failed.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import subprocess
import sys
import time
from collections.abc import Iterable

import jax
from absl import app, flags

from paged_jax import LLM, cli
from paged_jax.demo_model import demo_model_path
from paged_jax.models.loader import load_model
from paged_jax.multihost import RowFile, initialize, make_process_mesh, serve
from paged_jax.offline import Line, read_lines
from paged_jax.process_watch import ProcessWatch
from paged_jax.report import report

COORDINATOR = flags.DEFINE_string(
    "coordinator", None, "host:port of process 0; left out on TPU pods and under SLURM."
)
NUM_PROCESSES = flags.DEFINE_integer("num_processes", None, "How many processes; as above.")
PROCESS_ID = flags.DEFINE_integer("process_id", None, "Which of them this is, from 0; as above.")
WATCH_PORT = flags.DEFINE_integer(
    "watch_port", None, "Of process 0, for the watch; by default the one after the coordinator's."
)
LOCAL_PROCESSES = flags.DEFINE_integer(
    "local_processes", 0, "Start so many processes here, to try; needs none of the above."
)
CPU_DEVICES = flags.DEFINE_integer(
    "cpu_devices", None, "Run on so many virtual CPU devices in each process."
)


def main(argv: list[str]) -> int | None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    if cli.INPUT.value == "-" or cli.OUTPUT.value == "-":
        raise app.UsageError("give --input=FILE and --output=FILE, so that the run can be resumed")
    if LOCAL_PROCESSES.value:
        return start_local_processes(LOCAL_PROCESSES.value)
    cli.set_up_logging()
    if CPU_DEVICES.value is not None:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", CPU_DEVICES.value)
    try:
        watch = initialize(
            COORDINATOR.value,
            NUM_PROCESSES.value,
            PROCESS_ID.value,
            watch_port=WATCH_PORT.value,
        )
    except (ValueError, OSError, RuntimeError) as error:
        print(f"multihost.py: {error}", file=sys.stderr)
        return 2
    with watch:
        return run(watch)


def run(watch: ProcessWatch) -> int | None:
    """What every process does; only process 0 opens input and output."""
    is_first = watch.process_id == 0
    if not is_first:
        logging.getLogger("paged_jax").setLevel(logging.WARNING)
    defaults, options = cli.sampling_params(), cli.engine_options()
    with contextlib.ExitStack() as stack:
        lines: Iterable[Line] = ()
        write = on_output = lambda _: None
        if is_first:
            source = stack.enter_context(
                open(cli.INPUT.value, encoding="utf-8-sig", errors="surrogateescape")
            )
            rows = stack.enter_context(contextlib.closing(RowFile(cli.OUTPUT.value)))
            is_json = cli.is_json_input()
            lines = rows.left_of(
                read_lines(source, defaults, is_json=is_json, field=cli.FIELD.value)
            )
            write, on_output = rows.write, stack.enter_context(cli.Bar()).update
            if rows.done:
                print(f"{len(rows.done)} rows are there already", file=sys.stderr)
        tensor = options.pop("tensor_parallel_size")
        data = options.pop("data_parallel_size")
        if data == 1:
            data = max(len(jax.devices()) // tensor, 1)
        model = load_model(
            demo_model_path() if cli.MODEL.value == "demo" else cli.MODEL.value,
            dtype=options["dtype"],
            quantization=options["quantization"],
            mesh=make_process_mesh(data, tensor),
        )
        watch.barrier()  # Disks may differ by minutes, and making the engine is done together.
        llm = LLM(model, **options)
        started = time.perf_counter()
        num_rows, num_errors = serve(
            watch, llm, lines, write, chat=cli.CHAT.value, on_output=on_output
        )
    if is_first and cli.REPORT.value:
        print(report(llm, time.perf_counter() - started), file=sys.stderr)
    if is_first and num_errors:
        print(f"{num_errors} of {num_rows} rows carry an error", file=sys.stderr)
    return 1 if num_errors else None


def start_local_processes(count: int) -> int:
    """Starts this program so often, on this machine; the status of the first that failed."""
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("", 0)) as two:
        ports = one.getsockname()[1], two.getsockname()[1]
    given = [*sys.argv[1:], "--local_processes=0"]
    processes = [
        subprocess.Popen(
            [
                *(sys.executable, sys.argv[0], *given, f"--coordinator=127.0.0.1:{ports[0]}"),
                *(f"--watch_port={ports[1]}", f"--num_processes={count}", f"--process_id={i}"),
            ]
        )
        for i in range(count)
    ]
    while any(process.poll() is None for process in processes):
        with contextlib.suppress(KeyboardInterrupt):  # They get it, too.
            time.sleep(0.2)
    return next((abs(p.returncode) for p in processes if p.returncode), 0)


if __name__ == "__main__":
    app.run(main)
