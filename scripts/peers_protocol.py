"""Processes that take turns: one engine each, loaded once, asleep while another is measured.

The parent has a `Worker` for each engine; the engine's own script, in an environment of its own,
calls `serve`. Both speak JSON, one object a line:

    parent                                     worker
      {"settings": {...}}             ->         makes the engine
      {"info": {...}}                 <-
      {"call": {"prompts": ...}}      ->         times one call                    (any number of
      {"reply": {"seconds": ...}}     <-                                            these two)
      end of file                     ->         ends

Between its turns a worker's whole process group is stopped by SIGSTOP, so that no thread of it
spins. What an engine prints goes to the worker's log. Standard library only: every environment has
that.
"""

import contextlib
import json
import os
import pathlib
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

LOG_TAIL_LINES = 15


class PeerError(RuntimeError):
    """An engine's process failed; the message ends with the last lines of its log."""


class PeerEngine(Protocol):
    """What a worker's script makes of an engine."""

    def info(self) -> dict[str, Any]:
        """Versions and settings, for the report."""
        ...

    def generate(
        self, prompts: list[list[int]], max_tokens: int, ignore_eos: bool
    ) -> dict[str, Any]:
        """Completes prompts of token ids greedily, all at once if it can.

        Returns:
          "seconds", of the call alone; "token_ids", the outputs; and what else the engine counts.
        """
        ...


class Worker:
    """The parent's end of one engine's process.

    Args:
      name: for messages.
      command: starts the worker's script.
      settings: given to its engine.
      log: a file for all that it prints.
      env: variables beside the parent's own.
      timeout_seconds: how long it may take to get ready, and for each call.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        settings: Mapping[str, Any],
        *,
        log: pathlib.Path,
        env: Mapping[str, str] | None = None,
        timeout_seconds: float = 1800.0,
    ):
        self.name = name
        self.log = log
        self.timeout_seconds = timeout_seconds
        self._rest = b""
        with log.open("wb") as stderr:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env={**os.environ, **(env or {})},
                start_new_session=True,  # A process group of its own: its children stop with it.
                bufsize=0,
            )
        try:
            self.info: dict[str, Any] = self._ask({"settings": dict(settings)})["info"]
            self._signal(signal.SIGSTOP)
        except BaseException:
            self.close()
            raise

    def call(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, ignore_eos: bool = True
    ) -> dict[str, Any]:
        """Wakes the worker for one call of its engine's `generate`; its reply."""
        self._signal(signal.SIGCONT)
        call = {"prompts": prompts, "max_tokens": max_tokens, "ignore_eos": ignore_eos}
        reply = self._ask({"call": call})["reply"]
        self._signal(signal.SIGSTOP)
        return reply

    def close(self) -> None:
        """Ends the process and all that it started."""
        with contextlib.suppress(ProcessLookupError):
            self._signal(signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _signal(self, number: int) -> None:
        os.killpg(self._process.pid, number)

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        line = json.dumps(message).encode() + b"\n"
        try:
            while line:  # An unbuffered pipe takes what it has room for.
                line = line[self._process.stdin.write(line) or 0 :]
        except BrokenPipeError:
            pass  # It ended; reading says so, with its log.
        answer = json.loads(self._read_line())
        if "error" in answer:
            raise PeerError(f"{self.name}: {answer['error']}\n{self._log_tail()}")
        return answer

    def _read_line(self) -> bytes:
        assert self._process.stdout is not None
        deadline = time.monotonic() + self.timeout_seconds
        while b"\n" not in self._rest:
            wait = deadline - time.monotonic()
            ready, _, _ = select.select([self._process.stdout], [], [], max(wait, 0.0))
            if not ready:
                raise PeerError(
                    f"{self.name}: no answer within {self.timeout_seconds:.0f} s; its log, "
                    f"{self.log}, ends:\n{self._log_tail()}"
                )
            piece = os.read(self._process.stdout.fileno(), 1 << 16)
            if not piece:
                raise PeerError(
                    f"{self.name}: its process ended; its log, {self.log}, ends:\n"
                    f"{self._log_tail()}"
                )
            self._rest += piece
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def _log_tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join(lines[-LOG_TAIL_LINES:])


def serve(make_engine: Callable[[dict[str, Any]], PeerEngine]) -> None:
    """A worker's main: makes the engine of the settings it is sent, and answers calls."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # Libraries print to standard output, which is the parent's here.
    engine: PeerEngine | None = None
    for line in sys.stdin:
        message = json.loads(line)
        try:
            if engine is None:
                engine = make_engine(message["settings"])
                answer = {"info": engine.info()}
            else:
                answer = {"reply": engine.generate(**message["call"])}
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers)
