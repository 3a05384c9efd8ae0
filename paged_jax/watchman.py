"""The watchman of a process: a program that tells others when it dies. See `process_watch`.

    python watchman.py ORDER    from the process that it watches, by pipes to its standard input and
                                output

ORDER is a JSON object: process_id, num_processes, silence_seconds, token, port, and for others than
process 0 the addresses to find its watchman at. Messages are JSON objects, one a line:

    to the process    port (the first; 0 for none), ready, go, trouble (reason), dead
    from the process  arrived, bye, failed (reason)
    between watchmen  hello, welcome, ready, beat, arrived, go, bye,
                      dead (process, who, when, reason)

It runs without the packages of the environment, so it imports nothing but Python's own modules.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import selectors
import signal
import socket
import sys
import time
from typing import Any

PROGRAM = os.path.abspath(__file__)

BEAT_SECONDS = 1.0
# A process that ends because process 0 did waits so long for that news before it is news itself.
GRACE_SECONDS = 1.5
START_SECONDS = 120.0
_MAX_MESSAGE_BYTES = 2**16
_MEND = "Rows that were written are kept: start all processes again with the same command."


@dataclasses.dataclass
class _Peer:
    """The other end of a connection: a watchman, or one who has not said which."""

    connection: socket.socket
    heard: float
    process_id: int | None = None
    who: str = ""
    buffer: bytes = b""

    def send(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # What is broken is read as closed.
            self.connection.sendall(line_of(message))

    def read(self) -> tuple[list[dict[str, Any]], bool]:
        """Messages that have come, and whether the connection is closed or sends no messages."""
        try:
            data = self.connection.recv(_MAX_MESSAGE_BYTES)
        except OSError:
            data = b""
        self.heard = time.monotonic()
        *lines, self.buffer = (self.buffer + data).split(b"\n")
        try:
            messages = [json.loads(line) for line in lines]
        except ValueError:
            return [], True
        is_sound = all(isinstance(m, dict) and "kind" in m for m in messages)
        return messages, not (data and is_sound and len(self.buffer) < _MAX_MESSAGE_BYTES)


class Watchman:
    """Watches its own process by a pipe and the other watchmen by TCP, in one thread.

    Process 0's has a connection to each of the others, and passes on what it learns; another's has
    one, to process 0's.
    """

    def __init__(self, order: dict[str, Any]):
        self._own_id: int = order["process_id"]
        self._num_processes: int = order["num_processes"]
        self._silence_seconds: float = order["silence_seconds"]
        self._token: str = order["token"]
        self._parent = os.getppid()
        self._who = f"{socket.gethostname()}, pid {self._parent}"
        self._selector = selectors.DefaultSelector()
        self._peers: list[_Peer] = []
        self._is_ready = False
        self._num_arrived = 0  # At the barrier; process 0's watchman counts.
        self._orphaned: float | None = None  # When the own process was found dead.
        self._started = self._beaten = time.monotonic()
        self._from_parent = b""
        os.set_blocking(0, False)
        self._selector.register(0, selectors.EVENT_READ, self._read_parent)

    def listen(self, port: int) -> None:
        """Takes connections; tells the own process the port, 0 if it cannot be had."""
        try:
            server = _listen_on(port)
        except OSError:
            self._tell_parent({"port": 0})
            sys.exit(1)
        self._tell_parent({"port": server.getsockname()[1]})
        self._selector.register(server, selectors.EVENT_READ, lambda: self._accept(server))

    def connect(self, addresses: list[str], port: int) -> None:
        """Finds process 0's watchman at the first address that answers with the right token."""
        self._tell_parent({"port": 0})
        until = self._started + START_SECONDS
        while time.monotonic() < until and os.getppid() == self._parent:
            for address in addresses:
                with contextlib.suppress(OSError):
                    peer = _Peer(socket.create_connection((address, port), 3), time.monotonic())
                    peer.process_id = 0
                    peer.connection.settimeout(3)
                    hello = {"token": self._token, "process": self._own_id, "who": self._who}
                    peer.send({"kind": "hello", **hello})
                    messages, is_closed = peer.read()
                    if not is_closed and messages and messages[0]["kind"] == "welcome":
                        peer.who = messages[0]["who"]
                        self._add(peer)
                        for message in messages[1:]:
                            self._take(peer, message)
                        return
            time.sleep(0.5)
        where = ", ".join(addresses)
        self._give_up(f"process {self._own_id} reaches the watchman of process 0 at none of {where}"
                      f", port {port}; open the port, or give another watch_port")  # fmt: skip

    def run(self) -> None:
        """Watches until the end of the own process, or of another."""
        while True:
            for key, _ in self._selector.select(0.25):
                key.data()
            now = time.monotonic()
            if now - self._beaten >= BEAT_SECONDS:
                self._beaten = now
                for peer in self._peers:
                    peer.send({"kind": "beat"})
            if self._orphaned is None and os.getppid() != self._parent:
                self._orphaned = now
            for peer in list(self._peers):
                if now - peer.heard > self._silence_seconds:
                    self._lose(peer, f"nothing was heard of it for {now - peer.heard:.0f} s")
            grace = 0.0 if self._own_id == 0 else GRACE_SECONDS
            if self._orphaned is not None and now - self._orphaned >= grace:
                self._end_orphaned("it died")
            if not self._is_ready and now > self._started + START_SECONDS:
                here = {peer.process_id for peer in self._peers} | {self._own_id}
                missing = sorted(set(range(self._num_processes)) - here)
                self._give_up(f"processes {missing} did not come; look at what they print")

    def _read_parent(self) -> None:
        data = os.read(0, _MAX_MESSAGE_BYTES)
        *lines, self._from_parent = (self._from_parent + data).split(b"\n")
        for message in map(json.loads, lines):
            if message["kind"] == "bye":
                self._say_goodbye()
            elif message["kind"] == "arrived" and self._own_id == 0:
                self._count_arrival()
            elif message["kind"] == "arrived":
                self._peers[0].send(message)
            else:
                self._end_orphaned(f"it failed: {message['reason']}")
        if not data:
            self._selector.unregister(0)
            self._orphaned = self._orphaned or time.monotonic()

    def _accept(self, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            connection, _ = server.accept()
            connection.settimeout(3)
            peer = _Peer(connection, time.monotonic())
            self._selector.register(
                connection, selectors.EVENT_READ, lambda: self._read_stranger(peer)
            )

    def _read_stranger(self, peer: _Peer) -> None:
        """Who does not say the token is none of ours."""
        messages, is_closed = peer.read()
        if not messages and not is_closed:
            return
        self._selector.unregister(peer.connection)
        hello = messages[0] if messages else {}
        if hello.get("token") != self._token:
            peer.connection.close()
            return
        peer.process_id, peer.who = hello["process"], hello["who"]
        peer.send({"kind": "welcome", "who": self._who})
        self._add(peer)
        if len(self._peers) == self._num_processes - 1:
            self._be_ready()

    def _add(self, peer: _Peer) -> None:
        peer.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._peers.append(peer)
        self._selector.register(
            peer.connection, selectors.EVENT_READ, lambda: self._read_peer(peer)
        )

    def _be_ready(self) -> None:
        self._is_ready = True
        for peer in self._peers:
            peer.send({"kind": "ready"})
        self._tell_parent({"kind": "ready"})

    def _read_peer(self, peer: _Peer) -> None:
        messages, is_closed = peer.read()
        for message in messages:
            self._take(peer, message)
        if is_closed and peer in self._peers:
            self._lose(peer, "its host closed the connection")

    def _take(self, peer: _Peer, message: dict[str, Any]) -> None:
        if message["kind"] == "ready":
            self._be_ready()
        elif message["kind"] == "arrived":
            self._count_arrival()
        elif message["kind"] == "go":
            self._tell_parent(message)
        elif message["kind"] == "bye":
            self._drop(peer)
        elif message["kind"] == "dead":
            self._end_because_of(message)

    def _count_arrival(self) -> None:
        # None can arrive twice before all have: it waits.
        self._num_arrived += 1
        if self._num_arrived == self._num_processes:
            self._num_arrived = 0
            for peer in self._peers:
                peer.send({"kind": "go"})
            self._tell_parent({"kind": "go"})

    def _drop(self, peer: _Peer) -> None:
        self._peers.remove(peer)
        self._selector.unregister(peer.connection)
        peer.connection.close()

    def _lose(self, peer: _Peer, reason: str) -> None:
        self._drop(peer)
        when = time.strftime(
            "%H:%M:%S UTC", time.gmtime(time.time() - time.monotonic() + peer.heard)
        )
        lost = {"process": peer.process_id, "who": peer.who, "when": when, "reason": reason}
        self._end_because_of({"kind": "dead", **lost})

    def _end_because_of(self, verdict: dict[str, Any]) -> None:
        """Another died: says so to those who cannot know, and ends the own process."""
        for peer in self._peers:
            if peer.process_id != verdict["process"]:
                peer.send(verdict)
        text = (
            f"process {verdict['process']} of {self._num_processes} ({verdict['who']}): "
            f"{verdict['reason']} (last heard of at {verdict['when']}). Process {self._own_id} "
            f"({self._who}) ends too, since a step needs all of them. {_MEND}"
        )
        with contextlib.suppress(OSError):  # Nobody may be reading.
            print(text, file=sys.stderr, flush=True)
        self._tell_parent({"kind": "dead"})
        deadline = time.monotonic() + 3
        while os.getppid() == self._parent and time.monotonic() < deadline:
            time.sleep(0.02)
        if os.getppid() == self._parent:  # It cannot even run the thread that listens.
            os.kill(self._parent, signal.SIGKILL)
        self._leave(0)

    def _end_orphaned(self, reason: str) -> None:
        """The own process died or is about to end: says so to the others."""
        when = time.strftime("%H:%M:%S UTC", time.gmtime())
        own = {"process": self._own_id, "who": self._who, "when": when, "reason": reason}
        for peer in self._peers:
            peer.send({"kind": "dead", **own})
        self._leave(0)

    def _say_goodbye(self) -> None:
        for peer in self._peers:
            peer.send({"kind": "bye"})
        self._leave(0)

    def _give_up(self, reason: str) -> None:
        self._tell_parent({"kind": "trouble", "reason": reason})
        self._leave(1)

    def _leave(self, status: int) -> None:
        """Closes so that what was sent last arrives: unread data would make a reset of it."""
        for peer in self._peers:
            with contextlib.suppress(OSError):
                peer.connection.shutdown(socket.SHUT_WR)
                peer.connection.settimeout(2)
                while peer.connection.recv(_MAX_MESSAGE_BYTES):
                    pass
        sys.exit(status)

    def _tell_parent(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            os.write(1, line_of(message))


def _listen_on(port: int) -> socket.socket:
    """A server on all of the host's addresses, of either kind where it has both."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def line_of(message: dict[str, Any]) -> bytes:
    """A message as it is sent."""
    return json.dumps(message).encode() + b"\n"


def _main(order: dict[str, Any]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    watchman = Watchman(order)
    if order["process_id"] == 0:
        watchman.listen(order["port"])
    else:
        watchman.connect(order["addresses"], order["port"])
    watchman.run()


if __name__ == "__main__":
    _main(json.loads(sys.argv[1]))
