"""Batch generation from a stream of lines to a stream of rows, in constant memory.

Lines are read as seats become free and rows are written as requests finish, so that a file of any
length can be served, and what is done is on disk if the program dies.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from paged_jax.llm import LLM
from paged_jax.outputs import RequestOutput
from paged_jax.prompts import parse_prompt, render_prompt
from paged_jax.sampling_params import SamplingParams

# Where a line's prompt is looked for, in this order.
PROMPT_FIELDS = ("messages", "prompt", "prompt_token_ids", "turns", "question", "text")
_ID_FIELDS = ("custom_id", "id", "question_id")
_PARAM_NAMES = frozenset(SamplingParams.__dataclass_fields__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Line:
    """One line of input, read.

    Attributes:
      index: its number, from 0; blank lines do not count.
      custom_id: its "custom_id", "id" or "question_id", if it has one.
      prompt: text, token ids or messages; None if it could not be read.
      params: its own sampling parameters over the defaults; None if they are wrong.
      error: why it cannot be served, None if nothing is known against it.
    """

    index: int
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
        or in an object "sampling_params".
    """
    numbered = enumerate(line.rstrip("\r\n") for line in lines if line.strip())
    for index, line in numbered:
        if not is_json:
            yield Line(index=index, prompt=line, params=defaults)
            continue
        custom_id = None
        try:
            row = _parse_json(line)
            custom_id = next((row[name] for name in _ID_FIELDS if name in row), None)
            yield Line(
                index=index,
                custom_id=custom_id,
                prompt=_prompt_of(row, field),
                params=_params_of(row, defaults),
            )
        except (ValueError, TypeError) as error:
            yield Line(index=index, custom_id=custom_id, error=str(error))


def serve_lines(
    llm: LLM,
    lines: Iterable[Line],
    write: Callable[[dict[str, Any]], None],
    *,
    chat: bool,
    on_output: Callable[[RequestOutput], None] = lambda output: None,
) -> tuple[int, int]:
    """Serves lines and writes one row for each, as they finish.

    Args:
      llm: the engine; nothing else may use it meanwhile.
      lines: from `read_lines`; at most four times max_num_seqs of them are held at once.
      write: takes a row: see `row_of`.
      chat: send plain text through the chat template as a user's message (messages always are).
      on_output: is told of each finished request; for progress.

    Returns:
      How many rows were written, and how many of them carry an error.
    """
    engine = llm.engine
    most_waiting = 4 * engine.config.max_num_seqs
    held: dict[str, Line] = {}
    source = iter(lines)
    num_rows = num_errors = 0
    exhausted = False
    try:
        while not exhausted or held:
            while not exhausted and len(held) < most_waiting:
                line = next(source, None)
                if line is None:
                    exhausted = True
                    break
                error = line.error or _try_add(llm, line, chat=chat)
                if error is None:
                    held[str(line.index)] = line
                else:
                    write({**_head(line), "error": error})
                    num_rows, num_errors = num_rows + 1, num_errors + 1
            for output in engine.step():
                write(row_of(held.pop(output.request_id), output))
                on_output(output)
                num_rows, num_errors = num_rows + 1, num_errors + bool(output.error)
    finally:
        for request_id in held:
            engine.abort(request_id)
    return num_rows, num_errors


def row_of(line: Line, output: RequestOutput) -> dict[str, Any]:
    """A row of results: index, id, counts, error, and text and finish_reason (or `outputs`)."""
    row = _head(line)
    row["num_prompt_tokens"] = len(output.prompt_token_ids)
    row["num_cached_tokens"] = output.num_cached_tokens
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
    row["error"] = output.error
    return row


def _head(line: Line) -> dict[str, Any]:
    head: dict[str, Any] = {"index": line.index}
    if line.custom_id is not None:
        head["id"] = line.custom_id
    return head


def _try_add(llm: LLM, line: Line, *, chat: bool) -> str | None:
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
        llm.engine.add_request(str(line.index), parsed.token_ids, line.params, prompt=parsed.text)
    except ValueError as error:
        return str(error)
    return None


def _parse_json(line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"the line is no JSON: {error}") from None
    if isinstance(row, str):
        row = {"prompt": row}
    if not isinstance(row, dict):
        raise ValueError(f"the line is a JSON {type(row).__name__}; it must be an object or string")
    return row


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


def _params_of(row: dict[str, Any], defaults: SamplingParams) -> SamplingParams:
    own = row.get("sampling_params", {})
    if not isinstance(own, dict):
        raise ValueError(f"sampling_params={own!r}: it must be an object")
    unknown = sorted(set(own) - _PARAM_NAMES)
    if unknown:
        raise ValueError(f"sampling_params has {unknown}, which are no sampling parameters")
    beside = {name: row[name] for name in _PARAM_NAMES if name in row}
    if not own and not beside:
        return defaults
    return dataclasses.replace(defaults, **{**beside, **own})
