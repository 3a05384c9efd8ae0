"""Chat templates: the dialect, the checks, and errors that say where and what to do."""

from __future__ import annotations

import datetime

import pytest

from paged_jax.chat import (
    ChatTemplateError,
    check_messages,
    check_template_kwargs,
    render_chat,
)

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
USER = {"role": "user", "content": "Hi"}


def render(template: str, messages=(USER,), **kwargs) -> str:
    kwargs.setdefault("add_generation_prompt", False)
    return render_chat(template, messages, **kwargs)


def test_chatml():
    messages = [{"role": "system", "content": "Be brief."}, USER]
    expected = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    assert render(CHATML, messages) == expected
    assert render_chat(CHATML, messages) == expected + "<|im_start|>assistant\n"


def test_blocks_are_trimmed():
    template = "{% for m in messages %}\n    {% if true %}\n{{ m.content }}\n    {% endif %}\n"
    assert render(template + "{% endfor %}\n") == "Hi\n"


def test_tojson_does_not_escape():
    tool = {"name": "größe", "description": "a < b & 'c' > d"}
    text = render("{{ tools[0] | tojson }}", tools=[tool])
    assert text == '{"name": "größe", "description": "a < b & \'c\' > d"}'
    assert render("{{ {'a': 1} | tojson(indent=2) }}") == '{\n  "a": 1\n}'


def test_loop_controls_and_generation_block():
    template = (
        "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}"
        "{% generation %}[{{ m.content }}]{% endgeneration %}{% break %}{% endfor %}"
    )
    messages = [{"role": "system", "content": "no"}, USER, USER]
    assert render(template, messages) == "[Hi]"


def test_generation_block_sees_and_sets_variables():
    template = "{% set x = 1 %}{% generation %}{{ x }}{% set x = 2 %}{% endgeneration %}{{ x }}"
    assert render(template) == "12"


def test_strftime_now():
    today = datetime.datetime.now()
    text = render("{{ strftime_now('%Y-%m-%d') }}")
    assert text in {(today + datetime.timedelta(days=d)).strftime("%Y-%m-%d") for d in (0, 1)}


def test_template_variables_and_undefined_ones_print_nothing():
    assert render("{{ bos_token }}|{{ nothing }}|{{ tools is none }}", bos_token="<s>") == (
        "<s>||True"
    )


def test_content_parts_are_joined():
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert render("{{ messages[0].content }}", [{"role": "user", "content": parts}]) == "one\ntwo"


def test_content_may_be_none_beside_tool_calls():
    message = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    assert render("{{ messages[0].tool_calls[0].name }}", [message]) == "f"


@pytest.mark.parametrize("trim", ["", " | trim"])
def test_continue_final_message(trim):
    template = CHATML.replace("message['content']", f"(message['content']{trim})")
    messages = [USER, {"role": "assistant", "content": "Sure, "}]
    text = render(template, messages, continue_final_message=True)
    assert text == ("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nSure, ")
    assert messages[1]["content"] == "Sure, "  # the caller's messages are left alone


def test_continue_final_message_that_the_template_leaves_out():
    with pytest.raises(ChatTemplateError, match="leaves out the content"):
        render("nothing", continue_final_message=True)


def test_two_ways_to_end_exclude_each_other():
    with pytest.raises(ChatTemplateError, match="add_generation_prompt=False"):
        render_chat(CHATML, [USER], continue_final_message=True)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages is empty"),
        ("Hello", "must be a list of dicts .* not a str"),
        (USER, "must be a list of dicts .* not a dict"),
        (None, "not a NoneType"),
        (5, "not a int"),
        ((USER for _ in range(1)), "not a generator"),
        ({USER["role"]}, "not a set"),
        ([USER, None], r"messages\[1\] must be a dict .*, not a NoneType"),
        ([[USER]], r"messages\[0\] must be a dict .*, not a list"),
        ([{}], r"messages\[0\]\['role'\] is None"),
        ([USER, "Hello"], r"messages\[1\] must be a dict"),
        ([{"content": "x"}], r"messages\[0\]\['role'\] is None"),
        ([{"role": "", "content": "x"}], r"messages\[0\]\['role'\] is ''"),
        ([USER, {"role": "user"}], r"messages\[1\] \(role 'user'\) has no 'content'"),
        ([{"role": "user", "content": 3}], r"messages\[0\]\['content'\] is a int"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}],
            r"messages\[0\]\['content'\]\[0\] .* only text parts",
        ),
    ],
)
def test_malformed_messages_are_named(messages, message):
    with pytest.raises(ChatTemplateError, match=message):
        check_messages(messages)
    with pytest.raises(ValueError, match=message):
        render(CHATML, messages)


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ([print], r"tools\[0\] must be a dict"),
        (5, "tools=5 is of type int; it must be a list of dicts"),
        ("f", "tools='f' is of type str"),
        ({"name": "f"}, "tools={'name': 'f'} is of type dict"),
        (iter([{}]), "of type list_iterator"),
    ],
)
def test_tools_must_be_schemas(tools, message):
    with pytest.raises(ChatTemplateError, match=message):
        render(CHATML, tools=tools)


@pytest.mark.parametrize("template", [5, None, b"x", ["x"]])
def test_template_must_be_a_string(template):
    with pytest.raises(ChatTemplateError, match=r"chat_template=.* must be a string"):
        render_chat(template, [USER])


def test_template_variables_leave_the_arguments_alone():
    for name in ("messages", "chat_template"):
        with pytest.raises(ChatTemplateError, match=f"variable '{name}' is an argument"):
            render_chat(CHATML, [USER], **{name: [USER]})  # pyright: ignore[reportArgumentType]
    for name in ("messages", "tools", "add_generation_prompt", "continue_final_message"):
        with pytest.raises(ChatTemplateError, match=f"variable '{name}' is an argument"):
            check_template_kwargs({"bos_token": "<s>", name: None})
    with pytest.raises(ChatTemplateError, match="variable 5 is of type int"):
        check_template_kwargs({5: "x"})  # pyright: ignore[reportArgumentType]
    with pytest.raises(ChatTemplateError, match="must be a dict, not a list"):
        check_template_kwargs(["x"])  # pyright: ignore[reportArgumentType]
    assert render_chat("{{ template }}", [USER], template="mine") == "mine"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("a\n{% for m in messages %}\n{{ m }", "does not parse.*line 3"),
        ("a\n{% iff x %}", "does not parse.*line 2"),
        ("{{ messages | nonsense }}", "does not parse.*line 1"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "does not parse: RecursionError"),
        ("{{ " + "9" * 5000 + " }}", "does not parse: ValueError"),
        (
            "a\n{% if messages[0].role != 'x' %}\n{{ raise_exception('Unknown role ' + "
            "messages[0].role) }}{% endif %}",
            r"refuses these messages: Unknown role user \(raised at line 3",
        ),
        ("a\nb\n{{ messages[0].nope.deeper }}", "something undefined.*line 3"),
        ("\n\n{{ 1 / 0 }}", "ZeroDivisionError.*line 3"),
        ("{{ messages[0].content + 1 }}", "TypeError.*line 1"),
        ("{{ messages.append(1) }}", "SecurityError.*line 1"),
        ("{{ ''.__class__.__mro__ }}", "line 1"),
    ],
)
def test_broken_templates_name_the_line_and_the_mend(template, message):
    with pytest.raises(ChatTemplateError, match=message) as caught:
        render(template)
    assert "chat_template=" in str(caught.value)


def test_rendering_twice_is_independent():
    template = "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    template += "{% endfor %}{{ ns.n }}"
    assert [render(template, [USER] * n) for n in (1, 3, 2)] == ["1", "3", "2"]
