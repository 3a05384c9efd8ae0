"""Text to token ids and back, whichever file or object the tokenizer comes from.

`Tokenizer` is what the rest of the package knows. It is made from a Hugging Face folder, from the
metadata of a GGUF file, or around an object of the user's own; `load_tokenizer` tells them apart.
"""

from __future__ import annotations

import inspect
import json
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from paged_jax.chat import (
    ChatTemplateError,
    Message,
    check_template,
    check_template_kwargs,
    render_chat,
)

# The library takes 5 MB and is imported by those who have a text to encode.
if TYPE_CHECKING:
    import tokenizers

# The variables that chat templates know special tokens by.
_TEMPLATE_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


class Tokenizer:
    """Encodes, decodes, and renders chats. Made by the class methods, not directly.

    Attributes:
      bos_token_id, eos_token_id: int, or None where the tokenizer names none.
      vocab_size: ids 0..vocab_size - 1 are valid as input, added tokens included.
      special_token_ids: the ids that `decode(..., skip_special_tokens=True)` leaves out.
      chat_templates: Jinja sources by name; the one that is used by itself is "default".
    """

    def __init__(
        self,
        *,
        encode: Callable[[str, bool], list[int]],
        decode: Callable[[Sequence[int], bool], str],
        vocab_size: int,
        special_token_ids: frozenset[int],
        special_tokens: Mapping[str, str],
        bos_token_id: int | None,
        eos_token_id: int | None,
        chat_templates: Mapping[str, str],
    ):
        self._encode = encode
        self._decode = decode
        self._special_tokens = dict(special_tokens)
        self.vocab_size = vocab_size
        self.special_token_ids = special_token_ids
        self.bos_token_id = bos_token_id
        self.eos_token_id = eos_token_id
        self.chat_templates = dict(chat_templates)

    def __repr__(self) -> str:
        return (
            f"Tokenizer(vocab_size={self.vocab_size}, bos_token_id={self.bos_token_id}, "
            f"eos_token_id={self.eos_token_id}, chat_templates={sorted(self.chat_templates)})"
        )

    @classmethod
    def from_folder(cls, path: str | os.PathLike[str]) -> Tokenizer:
        """Reads tokenizer.json, and what there is of the files beside it.

        Special tokens come from tokenizer_config.json, else special_tokens_map.json; the chat
        template from chat_template.jinja, else chat_template.json, else tokenizer_config.json.
        Truncation and padding that tokenizer.json may ask for are turned off.

        Raises:
          FileNotFoundError: there is no tokenizer.json.
          ValueError: a file cannot be read, or names a token that is not in the vocabulary.
        """
        folder = pathlib.Path(path)
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise FileNotFoundError(
                f"no tokenizer.json in {folder}: give the folder of a Hugging Face model with a "
                "fast tokenizer, or make the file with transformers: "
                "AutoTokenizer.from_pretrained(...).save_pretrained(folder)"
            )
        import tokenizers

        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises a bare Exception
            raise ValueError(
                f"{file} is not a tokenizer of the tokenizers library: {error}"
            ) from error
        config = _read_json(folder / "tokenizer_config.json")
        special_tokens = _named_tokens(folder / "special_tokens_map.json")
        special_tokens |= _named_tokens(folder / "tokenizer_config.json")
        _mark_special(backend, special_tokens, source=folder)
        return cls._from_backend(
            backend, special_tokens=special_tokens, chat_templates=_read_templates(folder, config)
        )

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """Builds the tokenizer that GGUF metadata (keys to plain Python values) describes.

        Raises:
          ValueError: see `paged_jax.tokenizer_gguf.build_tokenizer`.
        """
        from paged_jax.tokenizer_gguf import build_tokenizer

        parts = build_tokenizer(metadata)
        prefix = "tokenizer.chat_template"
        templates = {
            key.removeprefix(prefix).removeprefix(".") or "default": value
            for key, value in metadata.items()
            if key == prefix or key.startswith(prefix + ".")
        }
        templates = _named_templates(templates, source="the GGUF file")
        special_tokens = {f"{role}_token": parts.tokens[i] for role, i in parts.special_ids.items()}
        _mark_special(parts.backend, special_tokens, source="the GGUF file")
        return cls._from_backend(
            parts.backend, special_tokens=special_tokens, chat_templates=templates
        )

    @classmethod
    def wrap(cls, obj: Any) -> Tokenizer:
        """Wraps a tokenizer of the user's own.

        Args:
          obj: a `Tokenizer` (returned as it is), a `tokenizers.Tokenizer`, or an object like a
            transformers tokenizer: `encode(text, add_special_tokens=...)` to ids,
            `decode(ids, skip_special_tokens=...)` to text and `len(obj)`; where it has them,
            `all_special_ids`, `bos_token`, `bos_token_id` and so on, and `chat_template`.

        Raises:
          TypeError: a method is missing.
        """
        import tokenizers

        if isinstance(obj, cls):
            return obj
        if isinstance(obj, tokenizers.Tokenizer):
            # A copy: the caller's object may truncate or pad, and keeps doing so.
            backend = tokenizers.Tokenizer.from_str(obj.to_str())
            return cls._from_backend(backend, special_tokens={}, chat_templates={})
        missing = [name for name in ("encode", "decode") if not callable(getattr(obj, name, None))]
        if not hasattr(obj, "__len__"):
            missing.append("__len__")
        if missing:
            raise TypeError(
                f"tokenizer={type(obj).__name__} lacks {', '.join(missing)}: give a path, a "
                "tokenizers.Tokenizer, or an object with encode, decode and __len__ like a "
                "transformers tokenizer"
            )
        return cls(
            encode=lambda text, add: list(obj.encode(text, add_special_tokens=add)),
            decode=_foreign_decode(obj),
            vocab_size=len(obj),
            special_token_ids=frozenset(getattr(obj, "all_special_ids", None) or ()),
            special_tokens={
                name: str(getattr(obj, name))
                for name in _TEMPLATE_TOKENS
                if getattr(obj, name, None) is not None
            },
            bos_token_id=getattr(obj, "bos_token_id", None),
            eos_token_id=getattr(obj, "eos_token_id", None),
            chat_templates=_named_templates(
                getattr(obj, "chat_template", None), source=type(obj).__name__
            ),
        )

    @classmethod
    def _from_backend(
        cls,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str],
        chat_templates: Mapping[str, str],
    ) -> Tokenizer:
        backend.no_truncation()
        backend.no_padding()

        def token_id(name: str) -> int | None:
            return backend.token_to_id(special_tokens[name]) if name in special_tokens else None

        return cls(
            encode=lambda text, add: backend.encode(text, add_special_tokens=add).ids,
            decode=lambda ids, skip: backend.decode(ids, skip_special_tokens=skip),
            # Ids may have holes, so the largest one counts, not their number.
            vocab_size=max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1,
            special_token_ids=frozenset(
                index
                for index, token in backend.get_added_tokens_decoder().items()
                if token.special
            ),
            special_tokens=special_tokens,
            bos_token_id=token_id("bos_token"),
            eos_token_id=token_id("eos_token"),
            chat_templates=chat_templates,
        )

    @property
    def chat_template(self) -> str | None:
        """The Jinja source that `apply_chat_template` uses by itself."""
        return self.chat_templates.get("default")

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Returns the ids of `text`. Special tokens written out in it become their single ids.

        Args:
          text: any valid Unicode, the empty string included.
          add_special_tokens: add what the tokenizer adds around a text, such as BOS. A rendered
            chat holds it already: pass False.

        Raises:
          TypeError: `text` is not a string.
          ValueError: `text` holds half of a surrogate pair, which has no UTF-8 form.
        """
        if not isinstance(text, str):
            raise TypeError(f"text must be a str, not {type(text).__name__}")
        try:
            return self._encode(text, add_special_tokens)
        except TypeError as error:
            surrogate = next((i for i, c in enumerate(text) if 0xD800 <= ord(c) <= 0xDFFF), None)
            if surrogate is None:
                raise
            raise ValueError(
                f"text holds a lone surrogate {text[surrogate]!a} at character {surrogate}; read "
                "the file as UTF-8, or replace it: text.encode('utf-16', 'surrogatepass')"
                ".decode('utf-16', 'replace')"
            ) from error

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Returns the text of `ids`; bytes that are no valid UTF-8 become U+FFFD."""
        return self._decode(ids, skip_special_tokens)

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        /,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **template_kwargs: Any,
    ) -> str:
        """Renders `messages` into a prompt; encode it with `add_special_tokens=False`.

        Args:
          messages: see `paged_jax.chat.render_chat`, as for the arguments not listed here.
          chat_template: the name of one of `chat_templates`, or a Jinja source. By default
            "tool_use" if there is one and tools are given, else "default".

        Raises:
          ChatTemplateError: there is no template, or see `paged_jax.chat.render_chat`.
        """
        check_template_kwargs(template_kwargs)
        return render_chat(
            self._choose_template(chat_template, has_tools=bool(tools)),
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            **(self._special_tokens | template_kwargs),
        )

    def _choose_template(self, chat_template: str | None, *, has_tools: bool) -> str:
        if chat_template is not None:
            check_template(chat_template)
            return self.chat_templates.get(chat_template, chat_template)
        if has_tools and "tool_use" in self.chat_templates:
            return self.chat_templates["tool_use"]
        if self.chat_template is None:
            names = ", ".join(sorted(self.chat_templates))
            raise ChatTemplateError(
                "this tokenizer has no default chat template; pass chat_template= with "
                + (f"one of its own ({names}) or " if names else "")
                + "a Jinja source, or complete plain prompts instead (LLM.generate; --nochat of "
                "scripts/generate.py)"
            )
        return self.chat_template


def load_tokenizer(source: Any) -> Tokenizer:
    """Makes a `Tokenizer` from a folder, a tokenizer.json, a .gguf file, or an object.

    Raises:
      FileNotFoundError: the path does not exist, or is a folder without tokenizer.json.
      ValueError: the file is of another kind, or damaged.
      TypeError: an object without the methods needed; see `Tokenizer.wrap`.
    """
    if not isinstance(source, str | os.PathLike):
        return Tokenizer.wrap(source)
    path = pathlib.Path(source)
    if path.is_dir():
        return Tokenizer.from_folder(path)
    if not path.is_file():
        raise FileNotFoundError(
            f"tokenizer={str(path)!r} does not exist: give a folder with a tokenizer.json, or a "
            ".gguf file"
        )
    if path.suffix == ".gguf":
        return Tokenizer.from_gguf(_read_gguf_metadata(path))
    if path.name == "tokenizer.json":
        return Tokenizer.from_folder(path.parent)
    raise ValueError(
        f"tokenizer={str(path)!r} is neither a folder, nor a tokenizer.json, nor a .gguf file"
    )


def _read_gguf_metadata(path: pathlib.Path) -> dict[str, Any]:
    try:
        from gguf import GGUFReader  # optional: only GGUF files need it
    except ImportError as error:
        raise ImportError(
            "reading .gguf files needs the gguf package: pip install 'paged-jax[gguf]'"
        ) from error
    try:
        fields = GGUFReader(path).fields
        return {key: fields[key].contents() for key in fields if key.startswith("tokenizer.")}
    except Exception as error:  # the reader fails in many ways on a damaged file
        raise ValueError(f"{path} cannot be read as GGUF: {error}") from error


def _read_json(path: pathlib.Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # the latter when nested too deeply
        raise ValueError(f"{path} is not valid JSON: {error}; fetch it again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object, not a {type(content).__name__}")
    return content


def _named_tokens(path: pathlib.Path) -> dict[str, str]:
    """The special tokens of a JSON file: each a string, or a dict with its "content"."""
    tokens = {}
    config = _read_json(path)
    for name in _TEMPLATE_TOKENS:
        value = config.get(name)
        if value is None:
            continue
        token = value.get("content") if isinstance(value, Mapping) else value
        if not isinstance(token, str):
            raise ValueError(
                f"{path}: {name}={value!r:.200} must be a string, or an object whose 'content' is "
                "one; correct it, or take it out"
            )
        tokens[name] = token
    return tokens


def _mark_special(backend: tokenizers.Tokenizer, named: Mapping[str, str], *, source: Any) -> None:
    """Makes the named tokens special in the backend, so that decoding can leave them out."""
    import tokenizers

    for name in ("bos_token", "eos_token"):
        if name in named and backend.token_to_id(named[name]) is None:
            raise ValueError(
                f"{name}={named[name]!r} of {source} is not in its vocabulary; correct "
                "tokenizer_config.json"
            )
    known = [token for token in named.values() if backend.token_to_id(token) is not None]
    already = {token.content for token in backend.get_added_tokens_decoder().values()}
    backend.add_special_tokens(
        [
            tokenizers.AddedToken(token, special=True, normalized=False)
            for token in dict.fromkeys(known)
            if token not in already
        ]
    )


def _read_templates(folder: pathlib.Path, config: Mapping[str, Any]) -> dict[str, str]:
    templates = _named_templates(
        config.get("chat_template"), source=folder / "tokenizer_config.json"
    )
    json_file = folder / "chat_template.json"
    templates |= _named_templates(_read_json(json_file).get("chat_template"), source=json_file)
    jinja_file = folder / "chat_template.jinja"
    if jinja_file.is_file():
        try:
            templates["default"] = jinja_file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{jinja_file} is not UTF-8: {error}; fetch it again") from error
    return templates


def _named_templates(value: Any, *, source: Any) -> dict[str, str]:
    """One template, a list of {"name", "template"}, or a dict of them, as a dict by name."""
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    pairs: list[tuple[Any, Any]] = [(None, value)]
    if isinstance(value, Mapping):
        pairs = list(value.items())
    elif isinstance(value, list | tuple) and all(isinstance(entry, Mapping) for entry in value):
        pairs = [(entry.get("name"), entry.get("template")) for entry in value]
    if not all(isinstance(part, str) for pair in pairs for part in pair):
        raise ValueError(
            f"{source}: chat_template={value!r:.200} must be a string, or a list of objects whose "
            "'name' and 'template' are strings; correct it, or take it out"
        )
    return dict(pairs)


def _foreign_decode(obj: Any) -> Callable[[Sequence[int], bool], str]:
    """Calls `obj.decode`; the transformers clean-up of " ." to "." is off where it exists.

    It rewrites text that was already streamed, and makes code and poems differ from the tokens.
    """
    options: dict[str, Any] = {}
    try:
        if "clean_up_tokenization_spaces" in inspect.signature(obj.decode).parameters:
            options["clean_up_tokenization_spaces"] = False
    except (TypeError, ValueError):  # a method of an extension module may have no signature
        pass
    return lambda ids, skip: obj.decode(list(ids), skip_special_tokens=skip, **options)
