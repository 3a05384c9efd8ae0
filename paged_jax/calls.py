"""Calls of an `LLM`: from prompts to outputs, several calls at a time on one engine."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from tqdm.auto import tqdm

from paged_jax.engine import Engine
from paged_jax.interrupts import uninterrupted
from paged_jax.log import logger
from paged_jax.outputs import RequestOutput
from paged_jax.prompts import ParsedPrompt
from paged_jax.request import Request
from paged_jax.sampling_params import SamplingParams
from paged_jax.sequence import SequenceOp


class Calls:
    """Runs calls on an engine that nothing else steps.

    Several may be under way at once: a call within a stream's loop, or threads. Each steps the
    engine for all of them, and leaves what came for the others in the mailbox, the newest output of
    each request that a call waits for. One lock is held for a step at a time.
    """

    def __init__(self, engine: Engine):
        self.engine = engine
        self._mailbox: dict[str, RequestOutput] = {}
        self._awaited: set[str] = set()
        self._lock = threading.RLock()
        self._to_release: collections.deque[Request] = collections.deque()
        self._num_requests = 0
        self._closed = False

    def run(
        self,
        parsed: list[ParsedPrompt | ValueError],
        all_params: list[SamplingParams],
        *,
        use_tqdm: bool,
        priorities: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Serves all to their end; outputs in the order of the prompts. See `LLM.generate`."""
        pending, outputs = self._add_all(parsed, all_params, priorities=priorities)
        try:
            with Progress(len(pending), enabled=use_tqdm) as progress:
                while pending:
                    for output in self._step(pending):
                        del pending[output.request_id]
                        outputs.append(output)
                        progress.update(output)
        finally:
            self._drop(pending)
        return sorted(outputs, key=lambda output: output.prompt_index)

    def stream(
        self, parsed: list[ParsedPrompt | ValueError], all_params: list[SamplingParams]
    ) -> Iterator[RequestOutput]:
        """Yields outputs as they grow; see `LLM.stream`."""
        pending: dict[str, int] = {}
        try:
            pending, refused = self._add_all(parsed, all_params, stream=True)
            yield from refused
            while pending:
                for output in self._step(pending):
                    if output.finished:
                        del pending[output.request_id]
                    yield output
        finally:
            self._drop(pending)

    def abort(self, request_id: str) -> RequestOutput | None:
        """Ends a request at once; the call that waits for it gets the same output."""
        with self._lock:
            output = self.engine.abort(request_id)
            if output is not None and request_id in self._awaited:
                self._mailbox[request_id] = output
            return output

    def run_ops(
        self,
        jobs: Sequence[tuple[list[int], SamplingParams, dict[str, Any], SequenceOp]],
        take: Callable[[int, RequestOutput, Request], None],
    ) -> list[RequestOutput]:
        """Serves requests that work on held sequences, to their end.

        Args:
          jobs: (token ids, params, cache keys, op) of each.
          take: called with (place among the jobs, output, sequence) for each sequence that is held
            now; all at once, and no Ctrl-C comes in between.

        Returns:
          The output of each.

        Raises:
          ValueError: the engine refuses one of them; none is served then.
        """
        ids = self._take_ids(len(jobs))
        pending: dict[str, int] = {}
        done: dict[str, RequestOutput] = {}
        ours = list(ids)  # An interrupted step may have ended some whose outputs never came.
        try:
            with self._lock:
                self._check_open()
                for i, (token_ids, params, keys, op) in enumerate(jobs):
                    self.engine.add_request(ids[i], token_ids, params, op=op, **keys)
                    pending[ids[i]] = i
                    self._awaited.add(ids[i])
            while pending:
                for output in self._step(pending):
                    del pending[output.request_id]
                    done[output.request_id] = output
            outputs = [done[name] for name in ids]
            with self._lock, uninterrupted():
                self._check_open()
                for i, name in enumerate(ids):
                    if (request := self.engine.held(name)) is not None:
                        take(i, outputs[i], request)
                ours.clear()  # They are the caller's from here on.
            return outputs
        except BaseException:
            self._drop(pending)
            with self._lock, uninterrupted():
                for name in () if self._closed else ours:
                    if (request := self.engine.held(name)) is not None:
                        self.engine.release(request)
            raise

    def check_prompt(self, token_ids: Sequence[int]) -> list[int]:
        """The prompt as ints, if the engine can serve it; see `Engine.check_prompt`."""
        with self._lock:
            self._check_open()
            return self.engine.check_prompt(token_ids)

    def fork_held(self, parent: Request) -> Request:
        """A held sequence of the same tokens that shares all blocks; see `Scheduler.fork_held`."""
        [request_id] = self._take_ids(1)
        with self._lock, uninterrupted():
            self._check_open()
            return self.engine.fork_held(parent, request_id)

    def release_held(self, request: Request) -> None:
        """Frees a held sequence's blocks."""
        with self._lock, uninterrupted():
            if not self._closed:
                self.engine.release(request)

    def release_later(self, request: Request) -> None:
        """Frees a held sequence's blocks before the next step; safe at any moment."""
        self._to_release.append(request)

    def close(self) -> None:
        """Lets go of the engine; calls that are under way fail at their next step."""
        with self._lock:
            self._closed = True
            del self.engine

    @contextlib.contextmanager
    def idle(self) -> Iterator[None]:
        """Keeps the engine from stepping, for a look at it between two steps."""
        with self._lock:
            self._check_open()
            yield

    def _check_open(self) -> None:
        """To be called with the lock held. Also frees what the garbage collector left to free."""
        if self._closed:
            raise RuntimeError("this LLM is closed; make a new one")
        while self._to_release:
            self.engine.release(self._to_release.popleft())

    def _take_ids(self, count: int) -> list[str]:
        """New request ids, counted up over the engine's life."""
        with self._lock:
            first = self._num_requests
            self._num_requests += count
        return [str(first + i) for i in range(count)]

    def _add_all(
        self,
        parsed: list[ParsedPrompt | ValueError],
        all_params: list[SamplingParams],
        *,
        priorities: Sequence[int] | None = None,
        stream: bool = False,
    ) -> tuple[dict[str, int], list[RequestOutput]]:
        """Queues what can be served: (place in the call by request id, outputs of the refused)."""
        added: dict[str, int] = {}
        refused: list[RequestOutput] = []
        ids = self._take_ids(len(parsed))
        priorities = priorities or [0] * len(parsed)
        first_error: ValueError | None = None
        try:
            for i, prompt in enumerate(parsed):
                try:
                    if isinstance(prompt, ValueError):
                        raise prompt
                    added[ids[i]] = i
                    with self._lock:
                        self.engine.add_request(
                            ids[i],
                            prompt.token_ids,
                            all_params[i],
                            prompt=prompt.text,
                            cache_salt=prompt.cache_salt,
                            extra_keys=prompt.extra_keys,
                            priority=priorities[i],
                            stream=stream,
                        )
                        self._awaited.add(ids[i])
                except ValueError as error:
                    added.pop(ids[i], None)
                    first_error = first_error or error
                    text = None if isinstance(prompt, ValueError) else prompt.text
                    refused.append(RequestOutput.refused(ids[i], i, str(error), prompt=text))
            if first_error is not None and not added:
                raise first_error
        except BaseException:
            self._drop(added)
            raise
        if refused:
            logger.warning(
                "%d of %d prompts refused (see each output's error), the first, prompt %d: %s",
                len(refused),
                len(parsed),
                refused[0].prompt_index,
                refused[0].error,
            )
        return added, refused

    def _step(self, pending: dict[str, int]) -> list[RequestOutput]:
        """What has come for a call's requests; runs a step of the engine if nothing has."""
        with self._lock:
            self._check_open()
            if not self._mailbox.keys() & pending.keys():
                for output in self.engine.step():
                    if output.request_id in self._awaited:
                        self._mailbox[output.request_id] = output
            mine = [request_id for request_id in self._mailbox if request_id in pending]
            outputs = [self._mailbox.pop(request_id) for request_id in mine]
            if not outputs and not self.engine.has_unfinished():
                raise RuntimeError(
                    f"requests {list(pending)} were ended behind this call's back; use LLM.abort"
                )
        for output in outputs:
            if output.finished:
                self._awaited.discard(output.request_id)
        return [dataclasses.replace(o, prompt_index=pending[o.request_id]) for o in outputs]

    def _drop(self, request_ids: Iterable[str]) -> None:
        """Ends what is left of a call's requests."""
        if self._closed:  # There is nothing left to end.
            return
        with self._lock, uninterrupted():
            for request_id in list(request_ids):
                self.engine.abort(request_id)
                self._awaited.discard(request_id)
                self._mailbox.pop(request_id, None)


class Progress:
    """A progress bar over requests, with the speed of tokens in and out so far."""

    def __init__(self, total: int, *, enabled: bool):
        self._bar = tqdm(
            total=total, desc="Processed prompts", dynamic_ncols=True, disable=not enabled
        )
        self._num_input = self._num_output = 0

    def update(self, output: RequestOutput) -> None:
        self._num_input += len(output.prompt_token_ids)
        self._num_output += sum(len(o.token_ids) for o in output.outputs)
        elapsed = self._bar.format_dict["elapsed"]
        if elapsed:
            self._bar.postfix = (
                f"est. speed input: {self._num_input / elapsed:.2f} toks/s, "
                f"output: {self._num_output / elapsed:.2f} toks/s"
            )
        self._bar.update(1)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()
