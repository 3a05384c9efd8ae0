"""Tokenizers from Hugging Face folders: files, special tokens, templates, and what is refused."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest
from test_tokenizer import BYTE_LEVEL, byte_level_metadata

from paged_jax.chat import ChatTemplateError
from paged_jax.tokenizer import Tokenizer, load_tokenizer
from paged_jax.tokenizer_gguf import build_tokenizer

CHATML = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


@pytest.fixture
def folder(tmp_path) -> pathlib.Path:
    backend = build_tokenizer(byte_level_metadata()).backend
    backend.enable_truncation(max_length=2)
    backend.enable_padding(length=5)
    backend.save(str(tmp_path / "tokenizer.json"))
    write(tmp_path, "tokenizer_config.json", bos_token="<|bos|>", eos_token={"content": "<|eos|>"})
    return tmp_path


def write(folder: pathlib.Path, name: str, **content: Any) -> None:
    (folder / name).write_text(json.dumps(content), encoding="utf-8")


def test_folder(folder):
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.encode("hello hello") == [257, 258, ord(" "), 257, 258]  # not cut, not padded
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (260, 261)
    assert tokenizer.vocab_size == 263
    assert tokenizer.special_token_ids == {260, 261}
    assert tokenizer.chat_template is None
    for source in (folder, str(folder), folder / "tokenizer.json"):
        assert load_tokenizer(source).encode("hello") == [257, 258]


def test_folder_marks_named_tokens_special(folder):
    write(folder, "tokenizer_config.json", eos_token="hello")
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.eos_token_id == 259
    assert tokenizer.decode([257, 259]) == "hel"


def test_folder_special_tokens_map(folder):
    write(folder, "special_tokens_map.json", bos_token="hello", eos_token={"content": "<|bos|>"})
    write(folder, "tokenizer_config.json", bos_token="<|bos|>")
    tokenizer = Tokenizer.from_folder(folder)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (260, 260)


def test_folder_templates(folder):
    messages = [{"role": "user", "content": "x"}]
    config = {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}
    write(folder, "tokenizer_config.json", **config, chat_template="{{ bos_token }}config")
    assert Tokenizer.from_folder(folder).apply_chat_template(messages) == "<|bos|>config"
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    write(folder, "tokenizer_config.json", **config, chat_template=named)
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.apply_chat_template(messages) == "plain"
    assert tokenizer.apply_chat_template(messages, tools=[{"name": "f"}]) == "tools"
    assert tokenizer.apply_chat_template(messages, chat_template="tool_use") == "tools"
    assert tokenizer.apply_chat_template(messages, chat_template="{{ eos_token }}") == "<|eos|>"
    write(folder, "chat_template.json", chat_template="json")
    assert Tokenizer.from_folder(folder).apply_chat_template(messages) == "json"
    (folder / "chat_template.jinja").write_text("{{ key }}", encoding="utf-8")
    assert Tokenizer.from_folder(folder).apply_chat_template(messages, key="jinja") == "jinja"


def test_broken_template_fails_only_when_rendered(folder):
    (folder / "chat_template.jinja").write_text("{% for %}", encoding="utf-8")
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.encode("hello") == [257, 258]
    with pytest.raises(ChatTemplateError, match=r"does not parse.*line 1"):
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}])


def test_no_template_says_what_to_pass(folder):
    with pytest.raises(ChatTemplateError, match=r"pass chat_template=.*plain prompts.*--nochat"):
        Tokenizer.from_folder(folder).apply_chat_template([{"role": "user", "content": "x"}])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chat_template": 5}, "chat_template=5 is of type int; it must be a string"),
        ({"chat_template": ["x"]}, r"chat_template=\['x'\] is of type list"),
        ({"chat_template": b"x"}, "chat_template=b'x' is of type bytes"),
        ({"messages": []}, "variable 'messages' is an argument of its own"),
        ({"tools": 5}, "tools=5 is of type int; it must be a list of dicts"),
    ],
)
def test_chat_arguments_refused(options, message):
    with pytest.raises(ChatTemplateError, match=message):
        BYTE_LEVEL.apply_chat_template([{"role": "user", "content": "x"}], **options)


def test_template_variables_may_have_the_names_of_internal_arguments():
    messages = [{"role": "user", "content": "x"}]
    text = BYTE_LEVEL.apply_chat_template(
        messages, chat_template="{{ template }} {{ source }}", template="a", source="b"
    )
    assert text == "a b"


def test_folder_errors(folder, tmp_path_factory):
    empty = tmp_path_factory.mktemp("empty")
    with pytest.raises(FileNotFoundError, match=r"no tokenizer.json in .*save_pretrained"):
        load_tokenizer(empty)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        load_tokenizer(empty / "missing")
    (empty / "weights.bin").write_bytes(b"")
    with pytest.raises(ValueError, match="neither a folder"):
        load_tokenizer(empty / "weights.bin")
    (empty / "model.gguf").write_bytes(b"GGUF but cut")
    with pytest.raises(ValueError, match="cannot be read as GGUF"):
        load_tokenizer(empty / "model.gguf")
    write(folder, "tokenizer_config.json", eos_token="nope")
    with pytest.raises(ValueError, match=r"eos_token='nope' of .* is not in its vocabulary"):
        load_tokenizer(folder)
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer_config.json is not valid JSON"):
        load_tokenizer(folder)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer.json is not a tokenizer"):
        load_tokenizer(folder)


DEEP_JSON = '{"a": ' + "[" * 200_000 + "]" * 200_000 + "}"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer_config.json", DEEP_JSON, "tokenizer_config.json is not valid JSON.*fetch it"),
        ("special_tokens_map.json", DEEP_JSON, "special_tokens_map.json is not valid JSON"),
        ("chat_template.json", DEEP_JSON, "chat_template.json is not valid JSON"),
        ("tokenizer_config.json", b'{"a": "\xff"}', "tokenizer_config.json is not valid JSON"),
        ("tokenizer_config.json", "[]", "tokenizer_config.json must hold a JSON object"),
        ("chat_template.jinja", b"\xff\xfe", "chat_template.jinja is not UTF-8.*fetch it again"),
        ("tokenizer.json", b'{"a": "\xff"}', "tokenizer.json is not a tokenizer"),
        ("tokenizer.json", DEEP_JSON, "tokenizer.json is not a tokenizer"),
    ],
)
def test_folder_with_broken_files_names_them(folder, name, content, message):
    (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(ValueError, match=message):
        Tokenizer.from_folder(folder)


@pytest.mark.parametrize("name", ["bos_token", "eos_token", "pad_token", "unk_token"])
@pytest.mark.parametrize("file", ["tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("value", [5, True, ["<|bos|>"], {}, {"content": 5}], ids=repr)
def test_special_token_of_a_wrong_type_is_named(folder, file, name, value):
    write(folder, file, **{name: value})
    with pytest.raises(ValueError, match=rf"{file}: {name}=.* must be a string, or an object"):
        Tokenizer.from_folder(folder)


@pytest.mark.parametrize(
    "value", [5, [5], ["x"], [{"name": "a"}], [{"name": [], "template": "x"}], {"default": 5}]
)
@pytest.mark.parametrize("file", ["tokenizer_config.json", "chat_template.json"])
def test_chat_template_of_a_wrong_type_is_named(folder, file, value):
    write(folder, file, chat_template=value)
    with pytest.raises(ValueError, match=rf"{file}: chat_template=.* must be a string, or a list"):
        Tokenizer.from_folder(folder)
