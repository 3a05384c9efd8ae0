"""Batch generation from a stream of lines to a stream of rows, in constant memory.

Lines are read as seats become free and rows are written as requests finish, so that a file of any
length can be served, a slow pipe holds nothing up, and what is done is on disk if the program dies.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from paged_jax.llm import LLM
from paged_jax.outputs import RequestOutput
from paged_jax.prompts import parse_prompt, render_prompt
from paged_jax.sampling_params import SamplingParams

# Where a line's prompt is looked for, in this order.
PROMPT_FIELDS = ("messages", "prompt", "prompt_token_ids", "turns", "question", "text")
_ID_FIELDS = ("custom_id", "id", "question_id")
_PARAMS_FIELD = "sampling_params"
_PARAM_NAMES = frozenset(SamplingParams.__dataclass_fields__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Line:
    """One line of input, read.

    Attributes:
      index: its place among the prompts, from 0; blank lines do not count.
      number: its line in the input, from 1; blank lines count.
      custom_id: its "custom_id", "id" or "question_id", if it has one.
      prompt: text, token ids or messages; None if it could not be read.
      params: its own sampling parameters over the defaults; None if they are wrong.
      error: why it cannot be served, None if nothing is known against it.
    """

    index: int
    number: int
    custom_id: Any = None
    prompt: Any = None
    params: SamplingParams | None = None
    error: str | None = None


def read_lines(
    lines: Iterable[str], defaults: SamplingParams, *, is_json: bool, field: str | None = None
) -> Iterator[Line]:
    """Reads prompts, one a line; blank lines are passed over.

    Args:
      lines: a file, or standard input.
      defaults: sampling parameters of lines that bring none.
      is_json: each line is a JSON object (or string); otherwise it is a prompt's text.
      field: the JSON field that holds the prompt; None takes the first of `PROMPT_FIELDS`. A list
        of strings (turns) gives its first. Sampling parameters stand beside it under their names,
        or in an object "sampling_params". A field whose name is nearly that of a sampling parameter
        is refused; all others are passed over.

    Yields:
      A Line for each; one that cannot be read says why in `error`.
    """
    index = 0
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        line = line.rstrip("\r\n")
        if is_json:
            yield _read_json_line(line, defaults, field, index=index, number=number)
        else:
            yield Line(index=index, number=number, prompt=line, params=defaults)
        index += 1


def serve_lines(
    llm: LLM,
    lines: Iterable[Line],
    write: Callable[[dict[str, Any]], None],
    *,
    chat: bool,
    on_output: Callable[[RequestOutput], None] = lambda output: None,
) -> tuple[int, int]:
    """Serves lines and writes one row for each, as they finish.

    Lines are read in a thread, so that requests run on while the next line is awaited. If the
    source fails, what it gave is served before its error is raised.

    Args:
      llm: the engine; nothing else may use it meanwhile.
      lines: from `read_lines`; at most four times the engine's seats of them are held at once.
      write: takes a row: see `row_of`.
      chat: send plain text through the chat template as a user's message (messages always are).
      on_output: is told of each finished request; for progress.

    Returns:
      How many rows were written, and how many of them carry an error.
    """
    engine = llm.engine
    num_seats = engine.num_seats
    # With num_seats in the queue and one in the reader's hand that makes 4 * num_seats.
    most_held = 3 * num_seats - 1
    held: dict[str, Line] = {}
    num_rows = num_errors = 0
    source = _Reader(lines, num_seats)
    try:
        while not source.ended or held:
            while not source.ended and len(held) < most_held:
                line = source.take(wait=not held)
                if line is None:
                    break
                request_id = str(line.index)
                error = line.error or try_add(llm, line, request_id, chat=chat)
                if error is None:
                    held[request_id] = line
                else:
                    write(row_of(line, RequestOutput.refused(request_id, line.index, error)))
                    num_rows, num_errors = num_rows + 1, num_errors + 1
            for output in engine.step() if held else []:
                write(row_of(held.pop(output.request_id), output))
                on_output(output)
                num_rows, num_errors = num_rows + 1, num_errors + bool(output.error)
    finally:
        source.stop()
        for request_id in held:
            engine.abort(request_id)
    if source.error is not None:
        raise source.error
    return num_rows, num_errors


class _Reader:
    """Takes from an iterable in a thread, a bounded number of items ahead.

    The thread is a daemon: a source that gives nothing more does not keep the program alive.

    Attributes:
      ended: whether everything has been taken.
      error: what ended the source early, None if nothing did.
    """

    def __init__(self, source: Iterable[Line], size: int):
        self.ended = False
        self.error: BaseException | None = None
        self._source = source
        self._queue: queue.Queue[Line | None] = queue.Queue(size)
        self._stopped = False
        threading.Thread(target=self._run, name="read lines", daemon=True).start()

    def take(self, *, wait: bool) -> Line | None:
        """The next item; None at the end, or if there is none yet and it shall not wait."""
        try:
            line = self._queue.get(block=wait)
        except queue.Empty:
            return None
        self.ended = line is None
        return line

    def stop(self) -> None:
        """Lets the thread end as soon as its source gives it the chance."""
        self._stopped = True
        while not self._queue.empty():  # A thread that waits to put something in can go on.
            self.take(wait=False)

    def _run(self) -> None:
        try:
            for line in self._source:
                self._queue.put(line)
                if self._stopped:
                    return
        except BaseException as error:
            self.error = error
        self._queue.put(None)


def row_of(line: Line, output: RequestOutput) -> dict[str, Any]:
    """A row of results, with the same fields whether it could be served or not.

    index, line (the number) and id (None if it has none); text, finish_reason, stop_reason and
    num_output_tokens, or `outputs`, a list of these, if there are several; num_prompt_tokens,
    num_cached_tokens and error (None if there is none). logprobs and token_ids where asked for.
    """
    row: dict[str, Any] = {"index": line.index, "line": line.number, "id": line.custom_id}
    outputs = []
    for completion in output.outputs:
        entry: dict[str, Any] = {
            "text": completion.text,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
            "num_output_tokens": len(completion.token_ids),
        }
        if line.params is not None and not line.params.detokenize:
            entry["token_ids"] = completion.token_ids
        if completion.logprobs is not None:
            entry["cumulative_logprob"] = completion.cumulative_logprob
            entry["logprobs"] = [
                [{"token_id": i, **dataclasses.asdict(p)} for i, p in token.items()]
                for token in completion.logprobs
            ]
        outputs.append(entry)
    row.update(outputs[0] if len(outputs) == 1 else {"outputs": outputs})
    row["num_prompt_tokens"] = len(output.prompt_token_ids)
    row["num_cached_tokens"] = output.num_cached_tokens
    row["error"] = output.error
    return row


def try_add(llm: LLM, line: Line, request_id: str, *, chat: bool) -> str | None:
    """Queues a line; returns why that cannot be, or None."""
    assert line.params is not None
    try:
        prompt: Any = line.prompt
        if chat and isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], Mapping):
            parsed = render_prompt(prompt, llm.get_tokenizer())
        else:
            parsed = parse_prompt(prompt, llm.get_tokenizer())
        llm.engine.add_request(request_id, parsed.token_ids, line.params, prompt=parsed.text)
    except Exception as error:  # Whatever is wrong with a line, the others are served.
        return _describe(error)
    return None


def _describe(error: Exception) -> str:
    """A ValueError says what is wrong; other errors are not made for the user: with their type."""
    return str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"


def _read_json_line(
    line: str, defaults: SamplingParams, field: str | None, *, index: int, number: int
) -> Line:
    custom_id = None
    try:
        row = _parse_json(line)
        custom_id = _id_of(row)
        prompt, params = _prompt_of(row, field), _params_of(row, defaults, field)
    except Exception as error:  # Such as RecursionError, of a hundred thousand brackets.
        return Line(index=index, number=number, custom_id=custom_id, error=_describe(error))
    return Line(index=index, number=number, custom_id=custom_id, prompt=prompt, params=params)


def _parse_json(line: str) -> dict[str, Any]:
    try:
        row = json.loads(line, parse_float=_finite, parse_constant=_finite)
    except json.JSONDecodeError as error:
        raise ValueError(f"the line is no JSON: {error}") from None
    if isinstance(row, str):
        row = {"prompt": row}
    if not isinstance(row, dict):
        raise ValueError(f"the line is a JSON {type(row).__name__}; it must be an object or string")
    return row


def _finite(text: str) -> float:
    """Python reads and writes NaN and Infinity, other programs cannot: JSON has no such numbers."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"the line holds {text}, which is no finite number")
    return number


def _id_of(row: dict[str, Any]) -> str | int | float | None:
    name = next((name for name in _ID_FIELDS if name in row), None)
    custom_id = None if name is None else row[name]
    if custom_id is not None and not isinstance(custom_id, (str, int, float)):
        raise ValueError(
            f"{name} is a JSON {type(custom_id).__name__}; it must be text or a number"
        )
    return custom_id


def _prompt_of(row: dict[str, Any], field: str | None) -> Any:
    if field is not None and field not in row:
        raise ValueError(f"the line has no field {field!r}; it has {sorted(row)}")
    name = field or next((name for name in PROMPT_FIELDS if name in row), None)
    if name is None:
        raise ValueError(f"the line has none of {list(PROMPT_FIELDS)}; it has {sorted(row)}")
    prompt = row[name]
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str):
        prompt = prompt[0]
    if not isinstance(prompt, (str, list)):
        raise ValueError(f"{name}={prompt!r}: it must be text, messages or token ids")
    return prompt


def _params_of(row: dict[str, Any], defaults: SamplingParams, field: str | None) -> SamplingParams:
    known = {*PROMPT_FIELDS, *_ID_FIELDS, *_PARAM_NAMES, _PARAMS_FIELD, field}
    for name in row:
        if name not in known and (meant := _nearest(name)):
            raise ValueError(f"unknown field {name!r}: did you mean {meant!r}?")
    own = row.get(_PARAMS_FIELD, {})
    if not isinstance(own, dict):
        raise ValueError(f"sampling_params={own!r}: it must be an object")
    unknown = sorted(set(own) - _PARAM_NAMES)
    if unknown:
        raise ValueError(f"sampling_params has {unknown}, which are no sampling parameters")
    beside = {name: row[name] for name in _PARAM_NAMES if name in row and name != field}
    if not own and not beside:
        return defaults
    return dataclasses.replace(defaults, **{**beside, **own})


def _nearest(name: str) -> str | None:
    """The sampling parameter that a field's name was probably meant for, if there is one."""
    names = [*sorted(_PARAM_NAMES), _PARAMS_FIELD]
    return next(iter(difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.8)), None)
