"""One engine over the devices of several processes: on a TPU pod, under SLURM, or on plain hosts.

    process 0   reads requests --broadcast--.    schedule -> step -> tokens -> rows to the file
    process 1                               '->  schedule -> step -> tokens
    process 2                               '->  schedule -> step -> tokens

Every process runs this loop with an `LLM` of its own on the same mesh. What decides a schedule is
the same in all of them: the requests, in their order; the engine's limits; and the tokens, which
every process reads whole (`sharding`). So they make the same schedule and dispatch the same steps,
and nothing but requests is ever sent. `process_watch` ends all when one dies. Between long work
that each does alone and what they do together stands a barrier, see `ProcessWatch.barrier`.

    with initialize("10.0.0.1:1234", num_processes=2, process_id=0) as watch:
        model = load_model(path, mesh=make_process_mesh(2, 4))
        watch.barrier()
        llm = LLM(model)
        serve(watch, llm, lines, write, chat=True)

`scripts/multihost.py` is the program made of it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import os
import pickle
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from paged_jax.llm import LLM
from paged_jax.offline import Line, row_of, try_add
from paged_jax.outputs import RequestOutput
from paged_jax.process_watch import ProcessWatch, start_watch
from paged_jax.sharding import make_mesh

_MIN_PAYLOAD_BYTES = 4096


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    watch_port: int | None = None,
    silence_seconds: float = 10.0,
) -> ProcessWatch:
    """Joins the other processes; to be called before anything else of jax.

    On TPU pods and under SLURM or Open MPI all arguments may be left out: jax finds them itself.

    Args:
      coordinator_address: "host:port" of process 0, a free port that all others reach.
      num_processes: how many take part; with 1 nothing is joined.
      process_id: which of them this is, from 0.
      watch_port: a second such port, for `process_watch`; None takes the one after the
        coordinator's, or any free one if the coordinator was found by jax.
      silence_seconds: after so long without a word a host counts as dead.

    Returns:
      The watch over all of them, to be used as a context manager around all that they do.

    Raises:
      ValueError: an argument is out of range, or one is missing and nothing here tells it.
      RuntimeError: the coordinator could not be reached.
      OSError, TimeoutError: see `start_watch`.
    """
    given = dict(
        coordinator_address=coordinator_address,
        num_processes=num_processes,
        process_id=process_id,
    )
    _check(given)
    if num_processes == 1:
        return ProcessWatch(0, 1, silence_seconds)
    # Its service takes SIGTERM for a notice that somebody will act on, and nobody would.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(**given, shutdown_timeout_seconds=60)  # pyright: ignore[reportArgumentType]
    except ValueError as error:
        missing = [name for name, value in given.items() if value is None]
        if not missing:
            raise
        raise ValueError(
            f"{', '.join(missing)}: not given, and found out neither from a TPU pod, nor from "
            f"SLURM, nor from Open MPI ({error}); give all of {', '.join(given)}"
        ) from error
    host = port = None
    if coordinator_address is not None:
        host, port = coordinator_address.rsplit(":", 1)
        host = host.strip("[]")
    if watch_port is None:
        watch_port = 0 if port is None else int(port) + 1
    return start_watch(
        jax.process_index(),
        jax.process_count(),
        broadcast,
        address=host,
        port=watch_port,
        silence_seconds=silence_seconds,
    )


def broadcast(value: Any) -> Any:
    """What process 0 gives, in every process; all must call it, between the same steps.

    Args:
      value: anything that pickle takes, of process 0; that of others is not looked at.
    """
    if jax.process_count() == 1:
        return value
    payload = pickle.dumps(value) if jax.process_index() == 0 else b""
    num_bytes = int(multihost_utils.broadcast_one_to_all(np.int32(len(payload))))
    # Few sizes, since each is compiled.
    room = max(_MIN_PAYLOAD_BYTES, 1 << (num_bytes - 1).bit_length())
    padded = np.zeros(room, np.uint8)
    padded[: len(payload)] = np.frombuffer(payload, np.uint8)
    received = multihost_utils.broadcast_one_to_all(padded)
    return pickle.loads(np.asarray(received, np.uint8).tobytes()[:num_bytes])


def make_process_mesh(data_parallel_size: int = 1, tensor_parallel_size: int = 1) -> Mesh:
    """A mesh over the devices of all processes, those of a process beside each other.

    So a row of the mesh, whose devices exchange sums twice a layer, lies within a process where the
    number of its devices is a multiple of tensor_parallel_size. Every process must have devices in
    it.

    Raises:
      ValueError: the sizes do not use up all devices.
    """
    devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    return make_mesh(data_parallel_size, tensor_parallel_size, devices)


def serve(
    watch: ProcessWatch,
    llm: LLM,
    lines: Iterable[Line],
    write: Callable[[dict[str, Any]], None],
    *,
    chat: bool,
    on_output: Callable[[RequestOutput], None] = lambda output: None,
) -> tuple[int, int]:
    """Serves lines as `offline.serve_lines` does, in all processes together.

    Args:
      watch: from `initialize`; nobody begins before all are ready.
      llm: this process's engine, on the mesh of all; nothing else may use it meanwhile.
      lines: from `read_lines`, of process 0; others' are not looked at. The others wait in a
        collective while they are read, so they should come from a file and not from a slow pipe.
      write: takes a row of results, in process 0 only: see `offline.row_of`.
      chat: send plain text through the chat template as a user's message.
      on_output: is told of each finished request, in every process.

    Returns:
      How many rows there were, and how many of them carry an error; the same in every process.

    A line without a seed gets one from the engine's seed and the line's index, so that a run which
    was begun again with the lines that were left samples what the first one would have.
    """
    watch.barrier()
    engine = llm.engine
    most_held = 3 * engine.num_seats
    is_writer = jax.process_index() == 0
    chunks = _chunks_of(lines, most_held, before=lambda: jax.block_until_ready(engine.runner.pool))
    held: dict[str, Line] = {}
    num_rows = num_errors = 0
    waiting: list[Line] = []
    ended = False

    def give(line: Line, output: RequestOutput) -> None:
        nonlocal num_rows, num_errors
        if is_writer:
            write(row_of(line, output))
        num_rows, num_errors = num_rows + 1, num_errors + bool(output.error)

    while not ended or held:
        while not ended and len(held) < most_held:
            if not waiting:
                waiting = next(chunks, [])
                ended = not waiting
                continue
            line = _seeded(waiting.pop(0), engine.intake.seed)
            request_id = str(line.index)
            error = line.error or try_add(llm, line, request_id, chat=chat)
            if error is None:
                held[request_id] = line
            else:
                give(line, RequestOutput.refused(request_id, line.index, error))
        for output in engine.step() if held else []:
            give(held.pop(output.request_id), output)
            on_output(output)
    return num_rows, num_errors


def _chunks_of(
    lines: Iterable[Line], size: int, *, before: Callable[[], Any]
) -> Iterator[list[Line]]:
    """Process 0's lines, in every process, `size` at a time.

    before: is called ahead of each broadcast. A step that is in flight must have ended, as nothing
    orders the collectives of two programs on a CPU.
    """
    iterator = iter(lines)
    is_reader = jax.process_index() == 0
    while True:
        before()
        chunk = broadcast(list(itertools.islice(iterator, size)) if is_reader else None)
        if not chunk:
            return
        yield chunk


def _seeded(line: Line, engine_seed: int) -> Line:
    """The line with a seed of its own, which does not depend on what else is served."""
    if line.params is None or line.params.seed is not None:
        return line
    text = f"{engine_seed}/line {line.index}".encode()
    seed = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
    return dataclasses.replace(line, params=dataclasses.replace(line.params, seed=seed))


class RowFile:
    """The file that rows are written to, and what of it an earlier run has done.

    A last line without an end, from a run that died as it wrote, is cut off.

    Attributes:
      done: of each row that is there its line's number, by its index.

    Raises:
      ValueError: a line of it is no row.
      OSError: it cannot be read or written.
    """

    def __init__(self, path: str):
        self.done: dict[int, int] = {}
        self._path = path
        self._file = open(path, "a+b")
        self._file.seek(0)
        whole_bytes = 0
        for number, line in enumerate(self._file, 1):
            if not line.endswith(b"\n"):
                break
            try:
                row = json.loads(line)
                self.done[row["index"]] = row["line"]
            except (ValueError, KeyError, TypeError):
                raise ValueError(
                    f"{path}: line {number} is no row of an earlier run; give another output"
                ) from None
            whole_bytes += len(line)
        self._file.truncate(whole_bytes)

    def left_of(self, lines: Iterable[Line]) -> Iterator[Line]:
        """The lines that have no row yet.

        Raises:
          ValueError: a row is not of the line with its index.
        """
        for line in lines:
            if line.index not in self.done:
                yield line
            elif self.done[line.index] != line.number:
                raise ValueError(
                    f"{self._path} has a row of index {line.index} and line "
                    f"{self.done[line.index]}, which is line {line.number} of the input: it is of "
                    "another input; give another output"
                )

    def write(self, row: dict[str, Any]) -> None:
        """Appends a row; it is with the system when this returns."""
        self._file.write(json.dumps(row).encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        os.fsync(self._file.fileno())
        self._file.close()


def _check(given: dict[str, Any]) -> None:
    address, number, own = given.values()
    if address is not None and not re.fullmatch(r".+:\d{1,5}", address):
        raise ValueError(
            f"coordinator_address={address!r}: it must be host:port of process 0, such as "
            "10.0.0.1:1234"
        )
    for name, value, least in (("num_processes", number, 1), ("process_id", own, 0)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise ValueError(f"{name}={value!r}: it must be an integer")
        if value is not None and value < least:
            raise ValueError(f"{name}={value}: it must be at least {least}")
    if number is not None and own is not None and own >= number:
        raise ValueError(
            f"process_id={own}, and there are num_processes={number}: it must be 0 to {number - 1}"
        )
