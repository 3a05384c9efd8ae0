"""A `tokenizers.Tokenizer` from the metadata of a GGUF file.

GGUF stores the vocabulary, but of the rest only names: `tokenizer.ggml.model` for the algorithm
and `tokenizer.ggml.pre` for how text is split beforehand. What the names mean is defined by
llama.cpp (src/llama-vocab.cpp); the patterns below are those it cites from each model's own
tokenizer.json. The keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

# tokenizer.ggml.token_type
_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6

_KIND_NAMES = {str: "strings", int: "whole numbers", (int, float): "numbers"}

_SPACE_MARK = "\u2581"  # SentencePiece's stand-in for a space

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"


def _words(max_digits: int) -> str:
    """The pattern of GPT-4 and its descendants, with numbers in groups of `max_digits`."""
    digits = r"\p{N}" if max_digits == 1 else rf"\p{{N}}{{1,{max_digits}}}"
    symbols = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
    return rf"{_CONTRACTIONS}|{_LEAD}\p{{L}}+|{digits}|{symbols}|{_SPACES}"


def _cased_words(suffix: str, digits: str) -> str:
    """The pattern of GPT-4o: a word ends where lower case turns to upper."""
    return (
        rf"{_LEAD}{_UPPER}*{_LOWER}+{suffix}|{_LEAD}{_UPPER}+{_LOWER}*{suffix}"
        rf"|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _PreTokenizer:
    """What one name of `tokenizer.ggml.pre` stands for.

    Attributes:
      patterns: regular expressions; each splits what the ones before it left whole.
      ignore_merges: a word that is a token is taken as it is, whatever the merges say.
      add_bos: whether BOS is added where the file does not say.
      nfc: whether text is brought to Unicode's composed form first.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False
    nfc: bool = False


_GPT2_LIKE = _PreTokenizer(patterns=(_GPT2,))
_DIGITS_THEN_GPT2 = _PreTokenizer(patterns=(r"\p{N}", _GPT2))
_LLAMA3 = _PreTokenizer(patterns=(_words(3),), ignore_merges=True, add_bos=True)
_GPT4O = _PreTokenizer(patterns=(_cased_words(f"{_CONTRACTIONS}?", r"\p{N}{1,3}"),))

_PRE_TOKENIZERS: dict[str, _PreTokenizer] = {
    "default": _PreTokenizer(
        patterns=(r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")
    ),
    "gpt-2": _GPT2_LIKE,
    "phi-2": _GPT2_LIKE,
    "smollm": _DIGITS_THEN_GPT2,
    "starcoder": _DIGITS_THEN_GPT2,
    "refact": _DIGITS_THEN_GPT2,
    "command-r": dataclasses.replace(_DIGITS_THEN_GPT2, nfc=True),
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "dbrx": _PreTokenizer(patterns=(_words(3),)),
    "smaug-bpe": _PreTokenizer(patterns=(_words(3),)),
    "qwen2": _PreTokenizer(patterns=(_words(1),), nfc=True),
    "deepseek-r1-qwen": _PreTokenizer(patterns=(_words(1),)),
    "tekken": _PreTokenizer(
        patterns=(_cased_words("", r"\p{N}"),), ignore_merges=True, add_bos=True
    ),
    "gpt-4o": _GPT4O,
    "llama4": _GPT4O,
    "deepseek-coder": _PreTokenizer(
        patterns=(
            r"[\r\n]",
            r"\s?\p{L}+",
            r"\s?\p{P}+",
            "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
            r"\p{N}",
        )
    ),
    "deepseek-v3": _PreTokenizer(
        patterns=(
            r"\p{N}{1,3}",
            "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
            r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
            r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
            rf"|{_SPACES}",
        )
    ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class GGUFTokenizer:
    """The parts that `build_tokenizer` finds in a GGUF file.

    Attributes:
      backend: encodes (BOS and EOS included, where the file asks for them) and decodes.
      tokens: the vocabulary, by id.
      special_ids: ids by role ("bos", "eos", "unk", "pad"), where the file has them.
    """

    backend: Tokenizer
    tokens: Sequence[str]
    special_ids: Mapping[str, int]


def build_tokenizer(metadata: Mapping[str, Any]) -> GGUFTokenizer:
    """Builds the tokenizer that `metadata` (GGUF keys to plain Python values) describes.

    Supports the models "gpt2" (byte-level BPE) and "llama" (SentencePiece BPE with byte
    fallback). Control and unknown tokens become special tokens, user-defined ones added tokens.

    SentencePiece merges the pair whose product scores highest, the leftmost first among equals;
    a list of merges cannot say "leftmost". It makes a difference only where two ways of making
    the same token overlap in the text ("a"+"aa", "aa"+"a" in a run of a's).

    Raises:
      ValueError: a key is missing or malformed, or names a model or pre-tokenizer that is not
        supported; the message lists those that are.
    """
    model = metadata.get("tokenizer.ggml.model")
    builders = {"gpt2": _build_byte_level, "llama": _build_sentencepiece}
    if not isinstance(model, str) or model not in builders:
        raise ValueError(
            f"tokenizer.ggml.model={model!r} is not supported; supported: "
            f"{', '.join(builders)}. Pass tokenizer= with a folder that has a tokenizer.json"
        )
    tokens = _read_tokens(metadata)
    special_ids = _read_special_ids(metadata, len(tokens), is_sentencepiece=model == "llama")
    types = _read_column(metadata, "token_type", int, len(tokens)) or [1] * len(tokens)
    backend, add_bos = builders[model](metadata, tokens, types, special_ids)
    _add_tokens(backend, tokens, types)
    _add_bos_and_eos(
        backend,
        special_ids,
        add_bos=_read_switch(metadata, "add_bos_token", add_bos),
        add_eos=_read_switch(metadata, "add_eos_token", False),
    )
    return GGUFTokenizer(backend=backend, tokens=tokens, special_ids=special_ids)


def _read_tokens(metadata: Mapping[str, Any]) -> list[str]:
    tokens = _read_list(metadata, "tokens", str)
    if not tokens:
        raise ValueError("tokenizer.ggml.tokens is missing or empty: the file has no vocabulary")
    # The empty string cannot be a token; such places in the list only keep the ids in step.
    tokens = [token or f"[EMPTY_{index}]" for index, token in enumerate(tokens)]
    if len(set(tokens)) < len(tokens):
        seen: set[str] = set()
        duplicate = next(token for token in tokens if token in seen or seen.add(token))
        raise ValueError(f"tokenizer.ggml.tokens holds {duplicate!r} twice; ids must be unique")
    return tokens


def _read_list(metadata: Mapping[str, Any], name: str, kind: Any) -> Sequence[Any] | None:
    """A list with entries of one type, or None where the file has none."""
    values = metadata.get(f"tokenizer.ggml.{name}")
    if values is None:
        return None
    is_list = isinstance(values, Sequence) and not isinstance(values, str | bytes)
    values = list(values) if is_list else values  # It may be packed, and is read often.
    if not is_list or not all(isinstance(value, kind) for value in values):
        raise ValueError(
            f"tokenizer.ggml.{name}={values!r:.200} must be a list of {_KIND_NAMES[kind]}; the "
            "file is damaged or was converted wrongly"
        )
    return values


def _read_switch(metadata: Mapping[str, Any], name: str, default: bool) -> bool:
    value = metadata.get(f"tokenizer.ggml.{name}", default)
    if not isinstance(value, bool):
        raise ValueError(f"tokenizer.ggml.{name}={value!r:.200} must be true or false")
    return value


def _read_column(
    metadata: Mapping[str, Any], name: str, kind: Any, num_tokens: int
) -> Sequence[Any] | None:
    """A list with one entry a token, or None where the file has none."""
    column = _read_list(metadata, name, kind)
    if column is not None and len(column) != num_tokens:
        raise ValueError(
            f"tokenizer.ggml.{name} has {len(column)} entries for {num_tokens} tokens; the file "
            "is damaged or was converted wrongly"
        )
    return column


def _read_special_ids(
    metadata: Mapping[str, Any], num_tokens: int, *, is_sentencepiece: bool
) -> dict[str, int]:
    ids = {"unk": 0, "bos": 1, "eos": 2} if is_sentencepiece else {}
    keys = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    for role, key in keys.items():
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is None:
            continue
        if not isinstance(token_id, int) or isinstance(token_id, bool):
            raise ValueError(
                f"tokenizer.ggml.{key}_token_id={token_id!r:.200} must be one whole number; the "
                "file is damaged or was converted wrongly"
            )
        if not 0 <= token_id < num_tokens:
            raise ValueError(
                f"tokenizer.ggml.{key}_token_id={token_id} is outside the vocabulary of "
                f"{num_tokens} tokens"
            )
        ids[role] = token_id
    return {role: token_id for role, token_id in ids.items() if token_id < num_tokens}


def _build_byte_level(
    metadata: Mapping[str, Any],
    tokens: Sequence[str],
    types: Sequence[int],
    special_ids: Mapping[str, int],
) -> tuple[Tokenizer, bool]:
    """Byte-level BPE: every byte has a printable character that stands for it.

    A byte that is in no token (SmolLM2 lacks some of control and unassigned characters) is
    dropped by encoding, as in llama.cpp.
    """
    del types, special_ids
    name = metadata.get("tokenizer.ggml.pre")
    if not isinstance(name, str) or name not in _PRE_TOKENIZERS:
        raise ValueError(
            f"tokenizer.ggml.pre={name!r} is not supported; supported: "
            f"{', '.join(sorted(_PRE_TOKENIZERS))}. Pass tokenizer= with a folder that has a "
            "tokenizer.json"
        )
    pre = _PRE_TOKENIZERS[name]
    merges = _read_list(metadata, "merges", str)
    if merges is None:
        raise ValueError("tokenizer.ggml.merges is missing: byte-level BPE needs it")
    backend = _bpe(tokens, [_split_merge(merge) for merge in merges], pre.ignore_merges)
    if pre.nfc:
        backend.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])
    backend.decoder = decoders.ByteLevel()
    return backend, pre.add_bos


def _split_merge(merge: str) -> tuple[str, str]:
    left, separator, right = merge.partition(" ")
    if not (left and separator and right):
        raise ValueError(f"tokenizer.ggml.merges holds {merge!r}; a merge is 'left right'")
    return left, right


def _bpe(
    tokens: Sequence[str], merges: list[tuple[str, str]], ignore_merges: bool, **options: Any
) -> Tokenizer:
    vocabulary = {token: index for index, token in enumerate(tokens)}
    try:
        return Tokenizer(
            models.BPE(vocabulary, merges, ignore_merges=ignore_merges, **options),
        )
    except Exception as error:  # the library raises a bare Exception for merges of no token
        raise ValueError(f"tokenizer.ggml.merges does not fit the vocabulary: {error}") from error


def _build_sentencepiece(
    metadata: Mapping[str, Any],
    tokens: Sequence[str],
    types: Sequence[int],
    special_ids: Mapping[str, int],
) -> tuple[Tokenizer, bool]:
    """SentencePiece BPE: spaces are marks, unknown characters are spelt in byte tokens."""
    scores = _read_column(metadata, "scores", (int, float), len(tokens))
    if scores is None:
        raise ValueError("tokenizer.ggml.scores is missing: the model 'llama' needs it")
    backend = _bpe(
        tokens,
        _merges_from_scores(tokens, scores, types),
        ignore_merges=False,
        unk_token=tokens[special_ids["unk"]] if "unk" in special_ids else None,
        fuse_unk=True,
        byte_fallback=_BYTE in types,
    )
    prefix_space = _read_switch(metadata, "add_space_prefix", True)
    mark_spaces = normalizers.Replace(" ", _SPACE_MARK)
    unmark_spaces = [decoders.Replace(_SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix_space:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE_MARK), mark_spaces])
        backend.decoder = decoders.Sequence([*unmark_spaces, decoders.Strip(" ", 1, 0)])
    else:
        backend.normalizer = mark_spaces
        backend.decoder = decoders.Sequence(unmark_spaces)
    return backend, True


def _merges_from_scores(
    tokens: Sequence[str], scores: Sequence[float], types: Sequence[int]
) -> list[tuple[str, str]]:
    """Every way to make a token of two others, the best token first.

    SentencePiece keeps no merges: it joins whichever neighbours make the token with the highest
    score, so the order of the scores is the order of the merges.
    """
    not_text = {_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE}
    pieces = [i for i, kind in enumerate(types) if kind not in not_text]
    known = {tokens[i] for i in pieces}
    merges = []
    for index in sorted(pieces, key=lambda i: -scores[i]):
        token = tokens[index]
        for cut in range(1, len(token)):
            if token[:cut] in known and token[cut:] in known:
                merges.append((token[:cut], token[cut:]))
    return merges


def _add_tokens(backend: Tokenizer, tokens: Sequence[str], types: Sequence[int]) -> None:
    """Marks the tokens that are found in text before anything else is done to it."""
    special, added = [], []
    for token, kind in zip(tokens, types, strict=True):
        if kind in (_CONTROL, _UNKNOWN):
            special.append(AddedToken(token, special=True, normalized=False))
        elif kind == _USER_DEFINED:
            added.append(AddedToken(token, special=False, normalized=False))
    backend.add_special_tokens(special)
    backend.add_tokens(added)


def _add_bos_and_eos(
    backend: Tokenizer, special_ids: Mapping[str, int], *, add_bos: bool, add_eos: bool
) -> None:
    """Has `encode(..., add_special_tokens=True)` put BOS before a text and EOS behind it."""
    for role, wanted in (("bos", add_bos), ("eos", add_eos)):
        if wanted and role not in special_ids:
            raise ValueError(
                f"tokenizer.ggml.add_{role}_token is true, but tokenizer.ggml.{role}_token_id is "
                "missing; set one or clear the other"
            )
    roles = [role for role, wanted in (("bos", add_bos), ("eos", add_eos)) if wanted]
    if not roles:
        return
    names = (["bos"] if add_bos else []) + ["$A"] + (["eos"] if add_eos else [])
    backend.post_processor = processors.TemplateProcessing(
        single=names,
        pair=None,
        special_tokens=[
            {"id": role, "ids": [special_ids[role]], "tokens": [role]} for role in roles
        ],
    )
