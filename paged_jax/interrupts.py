"""Ctrl-C between the engine's steps, not in the middle of one."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Holds a first Ctrl-C back until the block has ended, and raises KeyboardInterrupt then.

    So the host's books are never left half written. A second Ctrl-C is raised at once. Outside the
    main thread, or where the program has its own handler of SIGINT, nothing changes.
    """
    default = signal.default_int_handler
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not default
    ):
        yield
        return
    held = False

    def hold(signum: int, frame: FrameType | None) -> None:
        nonlocal held
        if held:
            default(signum, frame)
        held = True

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, default)
    if held:
        raise KeyboardInterrupt
