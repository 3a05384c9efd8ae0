"""A process that measures for `bench_gpu`, and may die or hang without taking results with it."""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

# A kernel that hangs the device may keep its process from ending at once.
_JOIN_SECONDS = 10.0


class Worker:
    """Calls functions in a process of its own, and starts another one when that is lost.

    A fault of a kernel leaves the process's device unusable, or never returns. The process is
    started by the first call: this one must not take the device itself.
    """

    def __init__(self, is_usable: Callable[[], bool]):
        """is_usable: a module's function, called in the process after an error there; where it
        says no or raises, the process ends and another one takes the next call."""
        self._is_usable = is_usable
        self._process: Any = None
        self._pipe: Any = None

    def results(
        self, function: Callable[..., Any], args: tuple[Any, ...], seconds: float
    ) -> Iterator[dict[str, Any]]:
        """The dicts that function(*args) yields, or the one that it returns, as they come.

        The last one has the key "error" if the function raised, its process died of it, or it
        took longer than `seconds`, those that a new process takes to start among them.
        """
        end = time.monotonic() + seconds
        try:
            self._start()
            self._pipe.send((function, args))
            while True:
                if not self._pipe.poll(max(0.0, end - time.monotonic())):
                    self.stop()
                    yield dict(error=f"stopped: not done after {seconds:.0f} s")
                    return
                kind, result = self._pipe.recv()
                if kind == "done":
                    return
                yield result
                if kind == "lost":
                    self.stop()
                    return
        except (EOFError, OSError):
            yield dict(error=f"the process ended with exit code {self.stop()}")

    def stop(self) -> int | None:
        """Ends the process, whatever it does, and gives its exit code; the next call gets a new
        one, with all of the device's memory."""
        process, self._process = self._process, None
        if process is None:
            return None
        self._pipe.close()
        process.join(1.0)  # One that has died, or that sees the pipe's end, says so itself.
        if process.exitcode is None:
            process.kill()
            process.join(_JOIN_SECONDS)
        return process.exitcode

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def _start(self) -> None:
        if self._process is not None and self._process.is_alive():
            return
        self.stop()
        spawn = multiprocessing.get_context("spawn")  # CUDA does not survive a fork.
        self._pipe, other_end = spawn.Pipe()
        self._process = spawn.Process(target=_serve, args=(other_end, self._is_usable), daemon=True)
        self._process.start()
        other_end.close()  # Else the pipe would not end with the process.


def _serve(pipe: Any, is_usable: Callable[[], bool]) -> None:
    """The process's loop: (function, args) in; ("part", dict)s and ("done", None) out."""
    while True:
        try:
            function, args = pipe.recv()
        except (EOFError, KeyboardInterrupt):
            return
        try:
            result = function(*args)
            for part in [result] if isinstance(result, dict) else result or ():
                pipe.send(("part", part))
        except Exception as error:  # Such as memory that does not suffice.
            traceback.print_exc()
            words = dict(error=f"{type(error).__name__}: {str(error)[:500]}")
            if not _holds(is_usable):
                pipe.send(("lost", words))
                return
            pipe.send(("part", words))
        pipe.send(("done", None))


def _holds(is_usable: Callable[[], bool]) -> bool:
    try:
        return is_usable()
    except Exception:
        return False
