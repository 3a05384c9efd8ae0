"""Chat templates: a list of messages becomes the text of a prompt.

A chat template is a Jinja program that ships with a model. It is data from elsewhere, so it runs
in Jinja's immutable sandbox. The names it may use beyond Jinja's own (`raise_exception`,
`strftime_now`, `tojson`, the `generation` block, loop controls, trimmed blocks) are those of
https://huggingface.co/docs/transformers/chat_templating_writing.
"""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

Message = Mapping[str, Any]

# Arguments of every function that renders a chat, and so no further variables of a template.
_ARGUMENTS = (
    "messages",
    "tools",
    "chat_template",
    "add_generation_prompt",
    "continue_final_message",
)

_PASS_TEMPLATE = "pass a working template as chat_template="

# Put behind the last message when it is to be continued, and cut from the rendered text again.
# Private-use characters: no template can hold them by chance, and none trims them.
_END_MARK = "\ue000end of message\ue001"


class ChatTemplateError(ValueError):
    """A chat cannot be rendered: the messages are malformed, or the template is."""


class _RaisedByTemplate(Exception):
    """What a template's own call of `raise_exception` becomes."""


class _GenerationBlock(Extension):
    """`{% generation %}...{% endgeneration %}`, which marks a training loss: renders its body."""

    tags = {"generation"}  # noqa: RUF012 (Jinja reads it from the class)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise _RaisedByTemplate(message)


def _strftime_now(format_string: str) -> str:
    return datetime.datetime.now().strftime(format_string)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON. Jinja's own filter escapes <, > and & for HTML, which a model must not see."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


@functools.cache
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", _GenerationBlock],
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


@functools.lru_cache(maxsize=64)
def _compile(source: str) -> jinja2.Template:
    return _environment().from_string(source)


def render_chat(
    template: str,
    messages: Sequence[Message],
    /,
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
    **template_kwargs: Any,
) -> str:
    """Renders `messages` with the Jinja source `template`.

    Args:
      template: the source. It is compiled once and kept.
      messages: dicts with "role" and "content". Content is a string, a list of
        `{"type": "text", "text": ...}` parts (joined by newlines), or None beside "tool_calls".
      add_generation_prompt: end with the header of the assistant's next message.
      continue_final_message: end inside the last message, so that the model continues it.
        Excludes `add_generation_prompt`.
      tools: JSON schemas of functions, for templates that list them.
      **template_kwargs: further variables of the template, such as bos_token; see
        `check_template_kwargs`.

    Returns:
      The prompt. It already holds BOS where the template writes one: encode it with
      `add_special_tokens=False`.

    Raises:
      ChatTemplateError: malformed messages or tools, a template that does not parse, one that
        fails or refuses the messages, both ways of ending the prompt asked for, or a variable that
        has the name of an argument.
    """
    check_template(template)
    check_template_kwargs(template_kwargs)
    if continue_final_message and add_generation_prompt:
        raise ChatTemplateError(
            "continue_final_message=True and add_generation_prompt=True exclude each other; "
            "pass add_generation_prompt=False to continue the last message"
        )
    chat = check_messages(messages)
    if continue_final_message:
        chat[-1]["content"] = (chat[-1]["content"] or "") + _END_MARK
    text = _render(
        _parse(template),
        template,
        template_kwargs
        | {
            "messages": chat,
            "tools": _check_tools(tools),
            "add_generation_prompt": add_generation_prompt,
        },
    )
    if not continue_final_message:
        return text
    head, mark, _ = text.rpartition(_END_MARK)
    if not mark:
        raise ChatTemplateError(
            "continue_final_message=True, but the chat template leaves out the content of the "
            f"last message (role {chat[-1]['role']!r}); end the list with a message it prints"
        )
    return head


def check_template(template: Any) -> None:
    """Raises ChatTemplateError unless `template` is a string."""
    if not isinstance(template, str):
        raise ChatTemplateError(
            f"chat_template={template!r:.200} is of type {type(template).__name__}; it must be a "
            "string with a Jinja source"
        )


def check_template_kwargs(template_kwargs: Mapping[str, Any]) -> None:
    """Raises ChatTemplateError unless the keys can be further variables of a template.

    For functions that take these variables as one mapping and pass it on as keyword arguments.
    """
    if not isinstance(template_kwargs, Mapping):
        raise ChatTemplateError(
            f"the template's variables must be a dict, not a {type(template_kwargs).__name__}"
        )
    for name in template_kwargs:
        if not isinstance(name, str):
            raise ChatTemplateError(
                f"the template's variable {name!r} is of type {type(name).__name__}; names are "
                "strings"
            )
        if name in _ARGUMENTS:
            raise ChatTemplateError(
                f"the template's variable {name!r} is an argument of its own; pass it as that, "
                "or give the variable another name"
            )


def _parse(template: str) -> jinja2.Template:
    try:
        return _compile(template)
    except jinja2.TemplateSyntaxError as error:
        raise ChatTemplateError(
            f"the chat template does not parse: {error.message} at "
            f"{_quote_line(template, error.lineno)}; {_PASS_TEMPLATE}"
        ) from error
    except Exception as error:  # nested too deeply, or a number of too many digits
        raise ChatTemplateError(
            f"the chat template does not parse: {type(error).__name__}: {error}; {_PASS_TEMPLATE}"
        ) from error


def _render(compiled: jinja2.Template, template: str, variables: Mapping[str, Any]) -> str:
    try:
        return compiled.render(variables)
    except _RaisedByTemplate as error:
        raise ChatTemplateError(
            f"the chat template refuses these messages: {error} (raised at "
            f"{_failing_line(error, template)}); change the messages, or {_PASS_TEMPLATE}"
        ) from error
    except jinja2.UndefinedError as error:
        raise ChatTemplateError(
            f"the chat template uses something undefined: {error.message} at "
            f"{_failing_line(error, template)}; add it to the messages, pass it as a keyword "
            f"argument, or {_PASS_TEMPLATE}"
        ) from error
    except Exception as error:  # a template is a program: it may raise anything
        raise ChatTemplateError(
            f"the chat template failed: {type(error).__name__}: {error} at "
            f"{_failing_line(error, template)}; {_PASS_TEMPLATE}"
        ) from error


def check_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Returns copies of `messages` with string contents, or raises ChatTemplateError.

    The error names the first message at fault by its index.
    """
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise ChatTemplateError(
            f"messages must be a list of dicts with 'role' and 'content', not a "
            f'{type(messages).__name__}; e.g. [{{"role": "user", "content": "Hello"}}]'
        )
    if not messages:
        raise ChatTemplateError("messages is empty; a chat needs at least one message")
    return [_check_message(index, message) for index, message in enumerate(messages)]


def _check_message(index: int, message: Message) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise ChatTemplateError(
            f"messages[{index}] must be a dict with 'role' and 'content', "
            f"not a {type(message).__name__}"
        )
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise ChatTemplateError(
            f"messages[{index}]['role'] is {role!r}; give one such as 'system', 'user', 'assistant'"
        )
    content = message.get("content")
    if isinstance(content, list | tuple):
        content = _join_parts(index, content)
    elif content is None and not message.get("tool_calls"):
        raise ChatTemplateError(
            f"messages[{index}] (role {role!r}) has no 'content'; give it a string"
        )
    elif content is not None and not isinstance(content, str):
        raise ChatTemplateError(
            f"messages[{index}]['content'] is a {type(content).__name__}; give it a string or a "
            'list of {"type": "text", "text": ...} parts'
        )
    return {**message, "content": content}


def _join_parts(index: int, parts: Sequence[Any]) -> str:
    texts = []
    for number, part in enumerate(parts):
        is_text = isinstance(part, Mapping) and part.get("type") == "text"
        if not is_text or not isinstance(part.get("text"), str):
            raise ChatTemplateError(
                f"messages[{index}]['content'][{number}] is {part!r}; only text parts are "
                'served: {"type": "text", "text": ...}'
            )
        texts.append(part["text"])
    return "\n".join(texts)


def _check_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[Mapping[str, Any]] | None:
    if tools is None:
        return None
    if isinstance(tools, str | bytes | Mapping) or not isinstance(tools, Sequence):
        raise ChatTemplateError(
            f"tools={tools!r:.200} is of type {type(tools).__name__}; it must be a list of dicts, "
            "each with a function's JSON schema"
        )
    for index, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise ChatTemplateError(
                f"tools[{index}] must be a dict with the function's JSON schema, "
                f"not a {type(tool).__name__}"
            )
    return list(tools)


def _failing_line(error: BaseException, template: str) -> str:
    """Names the template's line that raised; Jinja puts it into the traceback."""
    line_number = None
    frame = error.__traceback__
    while frame is not None:
        if frame.tb_frame.f_code.co_filename == "<template>":
            line_number = frame.tb_lineno
        frame = frame.tb_next
    return "an unknown line" if line_number is None else _quote_line(template, line_number)


def _quote_line(template: str, line_number: int) -> str:
    lines = template.splitlines()
    line = lines[line_number - 1].strip() if 0 < line_number <= len(lines) else ""
    return f"line {line_number}: {line if len(line) <= 120 else line[:117] + '...'}"
