"""Recorded traffic: Mooncake's JSONL, Azure's CSV, and a JSONL of one's own prompts.

Each reader is an iterator over a file that may be of any length, in order of arrival.
"""

from __future__ import annotations

import csv
import datetime
import json
from array import array
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from paged_jax.simulate.traffic import TraceRequest

# Without a tokenizer, as many bytes of text are taken as a token.
BYTES_A_TOKEN = 4
_TEXT_FIELDS = ("prompt", "text", "question", "turns", "messages")


def read_mooncake(path: str | Path) -> Iterator[TraceRequest]:
    """Reads a trace in the form of the Mooncake release: a JSON object a line.

    `timestamp` is in milliseconds; `hash_ids` has a number for each 512 tokens of the prompt, equal
    for equal prefixes, the last for what is left. Source: Qin et al., "Mooncake", FAST 2025.

    Raises:
      ValueError: a line cannot be read; the message has its number and what is wrong.
    """
    with open(path) as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                yield TraceRequest(
                    row["timestamp"] / 1e3,
                    row["input_length"],
                    row["output_length"],
                    row["hash_ids"],
                )
            except (KeyError, TypeError, ValueError) as error:
                raise _unreadable(path, number, error) from error


def read_azure(path: str | Path) -> Iterator[TraceRequest]:
    """Reads a CSV of the Azure Public Dataset: TIMESTAMP, ContextTokens, GeneratedTokens.

    Times count from the first row's. Source: Patel et al., "Splitwise", ISCA 2024.

    Raises:
      ValueError: a row cannot be read; the message has its line and what is wrong.
    """
    first: datetime.datetime | None = None
    with open(path, newline="") as file:
        for number, row in enumerate(csv.DictReader(file), 2):
            try:
                when = datetime.datetime.fromisoformat(row["TIMESTAMP"])
                first = first or when
                seconds = (when - first).total_seconds()
                lengths = int(row["ContextTokens"]), int(row["GeneratedTokens"])
            except (KeyError, TypeError, ValueError) as error:
                raise _unreadable(path, number, error) from error
            yield TraceRequest(seconds, *lengths)


def read_prompts(
    path: str | Path, *, output_tokens: int = 256, requests_per_second: float | None = None
) -> Iterator[TraceRequest]:
    """Reads a JSONL of one's own prompts, whose shared prefixes are then real ones.

    A line has `prompt_token_ids`, or text in one of "prompt", "text", "question", "turns" (the
    first) or "messages". Text is not tokenized: four bytes of it count as a token. It may have
    `output_tokens` and `arrival_seconds`.

    Args:
      path: the file.
      output_tokens: of lines that do not say.
      requests_per_second: evenly spaced arrivals of lines that do not say when; None: all at once.

    Raises:
      ValueError: a line cannot be read; the message has its number and what is wrong.
    """
    with open(path) as file:
        count = 0
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                token_ids = _token_ids(row)
                default = count / requests_per_second if requests_per_second else 0.0
                seconds = float(row.get("arrival_seconds", default))
                num_output = int(row.get("output_tokens", output_tokens))
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise _unreadable(path, number, error) from error
            count += 1
            yield TraceRequest(seconds, len(token_ids), num_output, token_ids=token_ids)


def scaled(requests: Iterable[TraceRequest], rate: float) -> Iterator[TraceRequest]:
    """The same requests, `rate` times as many a second."""
    if not rate > 0:
        raise ValueError(f"rate={rate}: it must be above 0; 2 doubles the load")
    for request in requests:
        yield request._replace(arrival_seconds=request.arrival_seconds / rate)


def _token_ids(row: Mapping[str, Any]) -> array[int]:
    if "prompt_token_ids" in row:
        return array("i", row["prompt_token_ids"])
    field = next((name for name in _TEXT_FIELDS if name in row), None)
    if field is None:
        raise ValueError(f"it has none of {['prompt_token_ids', *_TEXT_FIELDS]}")
    value = row[field]
    if field == "turns":
        value = value[0]
    elif field == "messages":
        value = "".join(f"<{m['role']}>{m['content']}" for m in value)
    if not isinstance(value, str):
        raise ValueError(f"{field}={value!r} is no text")
    text = value.encode()
    return array("i", text + bytes(-len(text) % BYTES_A_TOKEN))


def _unreadable(path: str | Path, number: int, error: Exception) -> ValueError:
    return ValueError(f"{path}, line {number}: {type(error).__name__}: {error}")
