"""The forms in which a prompt may be given, brought to one."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from paged_jax.tokenizer import Tokenizer

Prompt: TypeAlias = str | Sequence[int] | Mapping[str, Any]

_FIELDS = ("prompt", "prompt_token_ids", "cache_salt", "extra_keys")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParsedPrompt:
    """A prompt as the engine takes it: its tokens, and its text if it came as text."""

    token_ids: list[int]
    text: str | None = None
    cache_salt: str | None = None
    extra_keys: tuple[str | int, ...] = ()


def as_prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Any]:
    """A list of prompts, of one prompt or of a list: text, token ids, or a dict."""
    if isinstance(prompts, (str, bytes, Mapping)) or not hasattr(prompts, "__iter__"):
        return [prompts]
    as_list: list[Any] = list(prompts)
    if as_list and all(_is_integer(item) for item in as_list):
        return [as_list]
    return as_list


def parse_prompt(prompt: Prompt, tokenizer: Tokenizer | None) -> ParsedPrompt:
    """Brings a prompt to tokens.

    Args:
      prompt: text; a list of token ids; or a dict with "prompt" or "prompt_token_ids" (both: the
        ids are used, the text is given back), and, if wanted, "cache_salt" and "extra_keys" (a
        list of strings and integers): only prompts of equal ones share cached blocks.
      tokenizer: None if the engine has none; then only token ids will do.

    Raises:
      ValueError: it is none of these, or text without a tokenizer.
    """
    if isinstance(prompt, str):
        return ParsedPrompt(token_ids=_encode(prompt, tokenizer), text=prompt)
    if isinstance(prompt, Mapping):
        unknown = [field for field in prompt if field not in _FIELDS]
        if unknown:
            raise ValueError(f"prompt has fields {unknown}; it may have {list(_FIELDS)}")
        text, ids, salt, keys = (prompt.get(field) for field in _FIELDS)
        if text is not None and not isinstance(text, str):
            raise ValueError(f"prompt={text!r}: it must be a string")
        if salt is not None and (not isinstance(salt, str) or not salt):
            raise ValueError(f"cache_salt={salt!r}: it must be a string that is not empty")
        if ids is None and text is None:
            raise ValueError(f"prompt {dict(prompt)!r} has neither 'prompt' nor 'prompt_token_ids'")
        if ids is None:
            token_ids = _encode(text, tokenizer)  # pyright: ignore
        else:
            token_ids = checked_token_ids(ids)
        return ParsedPrompt(
            token_ids=token_ids, text=text, cache_salt=salt, extra_keys=_checked_keys(keys)
        )
    return ParsedPrompt(token_ids=checked_token_ids(prompt))


def render_prompt(
    messages: Any, tokenizer: Tokenizer | None, options: Mapping[str, Any] | None = None
) -> ParsedPrompt:
    """Brings a conversation to tokens through the chat template.

    Args:
      messages: a list of {"role": ..., "content": ...}.
      tokenizer: it holds the template.
      options: arguments of `Tokenizer.apply_chat_template`.

    Raises:
      ValueError: there is no tokenizer or template, the template is broken, or it refuses the
        messages.
    """
    if tokenizer is None:
        raise ValueError("chat needs a tokenizer, and the engine has none (skip_tokenizer_init)")
    text = tokenizer.apply_chat_template(messages, **(options or {}))
    # The template writes the special tokens itself; a second BOS would be one too many.
    return ParsedPrompt(token_ids=tokenizer.encode(text, add_special_tokens=False), text=text)


def _encode(text: str, tokenizer: Tokenizer | None) -> list[int]:
    if tokenizer is None:
        raise ValueError(
            "prompt is text, and the engine has no tokenizer (skip_tokenizer_init); give "
            "{'prompt_token_ids': [...]}"
        )
    return tokenizer.encode(text)


def _checked_keys(keys: Any) -> tuple[str | int, ...]:
    if keys is None:
        return ()
    as_list: list[Any] = list(keys) if isinstance(keys, (list, tuple)) else [None]
    if not all(isinstance(key, (str, int)) and not isinstance(key, bool) for key in as_list):
        raise ValueError(f"extra_keys={keys!r}: it must be a list of strings and integers")
    return tuple(as_list)


def checked_token_ids(ids: Any, name: str = "prompt") -> list[int]:
    """A list of ints, of any iterable of integers; ValueError names `name` otherwise."""
    if isinstance(ids, (str, bytes, Mapping)) or not hasattr(ids, "__iter__"):
        raise ValueError(
            f"{name}={ids!r}: it must be a string, a list of token ids, or a dict with 'prompt' or "
            "'prompt_token_ids'"
        )
    ids = list(ids)
    for i, token_id in enumerate(ids):
        if not _is_integer(token_id):
            field = "prompt_token_ids" if name == "prompt" else name
            raise ValueError(f"{field}[{i}]={token_id!r}: it must be an integer")
    return [operator.index(token_id) for token_id in ids]


def _is_integer(value: Any) -> bool:
    """Whether a value is an integer, numpy's and jax's included, and no truth value."""
    if isinstance(value, bool):
        return False
    try:
        operator.index(value)
    except TypeError:
        return False
    return True
