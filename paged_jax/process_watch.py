"""One process of several dies, and the others end with an error that names it, instead of a hang.

Processes that step together wait for each other in every collective: when one is gone, the others
wait for ever, or end with whatever the transport makes of it. So each has a watchman, a small
process beside it, and the watchmen talk over TCP:

    host a                                      host b
    process 0 <-- pipe --> watchman 0 <-- TCP --> watchman 1 <-- pipe --> process 1
                                     <-- TCP --> watchman 2 <-- pipe --> process 2

    a process dies        its pipe closes: its watchman tells the others, at once
    a host dies           its watchman is silent: known after `silence_seconds` (10 by default)
    a process fails       it tells its watchman why, then ends
    a normal end          it says goodbye first, and is missed by nobody

So within 30 seconds of a death every process has ended, with the exit status 70 and one line on
standard error. The watchman is a process and no thread because a runtime may end its process within
a millisecond (jax does, when process 0 dies), and because a long computation that keeps Python's
lock must not look like a death. What it cannot see is a process that lives and makes no progress.

The watchman itself is `watchman.py`.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from paged_jax.watchman import BEAT_SECONDS, GRACE_SECONDS, PROGRAM, START_SECONDS, line_of

EXIT_STATUS = 70  # EX_SOFTWARE; of a process that ends because another one did.
INTERRUPTED_STATUS = 130


class ProcessWatch:
    """A process's own watchman, started by `start_watch`. A context manager:

        with start_watch(...) as watch:
            ...  # What all processes do together.

    Leaving the block says goodbye. An exception in it is told to the others, printed, and ends the
    process, since an ordinary end would wait for processes that end by themselves: a ValueError,
    OSError or ImportError in one line and with status 1, others with their traceback.
    """

    def __init__(self, process_id: int, num_processes: int, silence_seconds: float):
        self.process_id = process_id
        self.num_processes = num_processes
        self.silence_seconds = silence_seconds
        self._watchman: subprocess.Popen[bytes] | None = None
        self._started = threading.Event()
        self._all_arrived = threading.Semaphore(0)
        self._trouble: str | None = None
        self._closing = False

    def __enter__(self) -> ProcessWatch:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, _: Any) -> None:
        if error is None:
            self.close()
        elif self._watchman is not None:
            self.end_with(error)

    def barrier(self) -> None:
        """Waits, as long as it takes, until all processes have called it as often.

        A collective would do, but the transport may give up on a process that comes late: on CPUs
        after 30 seconds, which is less than loading and compiling may differ by.
        """
        if self._watchman is not None:
            self._say({"kind": "arrived"})
            while not self._all_arrived.acquire(timeout=1):  # Lets Ctrl-C through.
                pass

    def close(self) -> None:
        """Says goodbye: this process's end is no trouble any more."""
        self._closing = True
        self._say({"kind": "bye"})
        if self._watchman is not None:
            self._watchman.wait()
            self._watchman = None

    def end_with(self, error: BaseException) -> None:
        """Ends the process because of an error, after telling the others; does not return.

        An error of the runtime may be what a collective makes of another's death: then the watchmen
        know better, and are waited for.
        """
        if isinstance(error, RuntimeError):
            time.sleep(self.silence_seconds + 2 * GRACE_SECONDS)
        status, reason = 1, f"{type(error).__name__}: {error}"
        if isinstance(error, KeyboardInterrupt):
            status, reason = INTERRUPTED_STATUS, "it was interrupted"
            text = f"process {self.process_id} was interrupted; the rows written so far are whole"
        elif isinstance(error, SystemExit):
            status = error.code if isinstance(error.code, int) else 1
            text = f"process {self.process_id} exits"
        elif isinstance(error, (ValueError, OSError, ImportError)):
            text = f"process {self.process_id} failed: {reason}"
        else:
            text = "".join(traceback.format_exception(error)).rstrip()
        self._closing = True
        self._say({"kind": "failed", "reason": reason[:2000]})
        sys.stdout.flush()
        print(text, file=sys.stderr, flush=True)
        if self._watchman is not None:
            # When process 0 ends, jax ends the others, with messages of its own: they go first.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._watchman.wait(0.3 if self.process_id else 5)
        os._exit(status)

    def _start(self, order: dict[str, Any]) -> int:
        """Starts the watchman; returns the port that it listens on, 0 if on none."""
        self._watchman = subprocess.Popen(
            [sys.executable, "-E", "-S", PROGRAM, json.dumps(order)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is the process's own to see.
        )
        port = self._hear().get("port", 0)
        threading.Thread(target=self._listen, name="process watch", daemon=True).start()
        return port

    def _wait_until_started(self) -> None:
        self._started.wait(START_SECONDS + 10)
        if self._trouble is not None or not self._started.is_set():
            raise TimeoutError(self._trouble or "the watchman of this process does not answer")

    def _listen(self) -> None:
        while message := self._hear():
            if message["kind"] == "ready":
                self._started.set()
            elif message["kind"] == "go":
                self._all_arrived.release()
            elif message["kind"] == "trouble":
                self._trouble = message["reason"]
                self._started.set()
                return
            elif message["kind"] == "dead":
                os._exit(EXIT_STATUS)
        if not self._closing and self._started.is_set():
            print("the watchman of this process is gone; ending", file=sys.stderr, flush=True)
            os._exit(EXIT_STATUS)

    def _hear(self) -> dict[str, Any]:
        """The watchman's next message; empty if there is none any more."""
        assert self._watchman is not None and self._watchman.stdout is not None
        line = self._watchman.stdout.readline()
        return json.loads(line) if line else {}

    def _say(self, message: dict[str, Any]) -> None:
        if self._watchman is None or self._watchman.stdin is None:
            return
        with contextlib.suppress(OSError, ValueError):
            self._watchman.stdin.write(line_of(message))
            self._watchman.stdin.flush()


def start_watch(
    process_id: int,
    num_processes: int,
    exchange: Callable[[Any], Any],
    *,
    address: str | None = None,
    port: int = 0,
    silence_seconds: float = 10.0,
) -> ProcessWatch:
    """Starts this process's watchman; returns when all watchmen have found each other.

    Args:
      process_id, num_processes: as for `jax.distributed.initialize`.
      exchange: gives every process what process 0 calls it with; `multihost.broadcast` does.
      address: a name or IP address of process 0's host that the others reach; None tries all that
        the host has.
      port: that process 0's watchman listens on; 0 takes a free one.
      silence_seconds: after so long without a beat a host counts as dead.

    Raises:
      ValueError: silence_seconds is too short.
      OSError: process 0's port cannot be had.
      TimeoutError: some processes were not there in two minutes; it names them.
    """
    if silence_seconds < 3 * BEAT_SECONDS:
        raise ValueError(f"silence_seconds={silence_seconds}: it must be at least 3")
    watch = ProcessWatch(process_id, num_processes, silence_seconds)
    if num_processes == 1:
        return watch
    order: dict[str, Any] = {
        "process_id": process_id,
        "num_processes": num_processes,
        "silence_seconds": silence_seconds,
    }
    found: dict[str, Any] = {}
    if process_id == 0:
        token = os.urandom(12).hex()
        listened = watch._start({**order, "port": port, "token": token})
        addresses = [address] if address else own_addresses()
        found = {"addresses": addresses, "port": listened, "token": token}
    found = exchange(found)
    if not found["port"]:  # All know, and none waits for the others.
        raise OSError(f"process 0 cannot listen on the port {port}; give another watch_port")
    if process_id > 0:
        watch._start({**order, **found})
    watch._wait_until_started()
    return watch


def own_addresses() -> list[str]:
    """This host's name and its addresses, those first that other hosts are likely to reach."""
    names = [socket.gethostname()]
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # Sends nothing; tells which way packets would leave.
        names.append(probe.getsockname()[0])
    with contextlib.suppress(OSError):
        names += [str(info[4][0]) for info in socket.getaddrinfo(names[0], None)]
    return [*dict.fromkeys(names), "127.0.0.1"]
