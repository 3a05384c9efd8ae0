"""Tokenizers from GGUF metadata, folders and objects, against goldens and hand-worked splits."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from paged_jax.tokenizer import Tokenizer, load_tokenizer
from paged_jax.tokenizer_gguf import build_tokenizer

CHATML = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
GOLDENS = pathlib.Path(__file__).parent / "goldens" / "smollm2_135m_q4_1_greedy.json"


@pytest.fixture(scope="module")
def demo(demo_model_path) -> Tokenizer:
    """The demo model's tokenizer, built from its GGUF metadata."""
    return load_tokenizer(demo_model_path)


def byte_characters() -> list[str]:
    """The character that stands for each byte in a byte-level vocabulary (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in printable)
    table = {byte: chr(byte) for byte in printable}
    table |= {byte: chr(256 + index) for index, byte in enumerate(others)}
    return [table[byte] for byte in range(256)]


def byte_level_metadata(**changes: Any) -> dict[str, Any]:
    """Bytes 0..255, "he" 256, "hel" 257, "lo" 258, "hello" 259, then added tokens."""
    tokens = [*byte_characters(), "he", "hel", "lo", "hello", "<|bos|>", "<|eos|>", "<tool call>"]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * 260 + [3, 3, 4],
        "tokenizer.ggml.merges": ["h e", "he l", "l o"],
        "tokenizer.ggml.bos_token_id": 260,
        "tokenizer.ggml.eos_token_id": 261,
        "tokenizer.chat_template": CHATML,
    }
    metadata |= {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    return {key: value for key, value in metadata.items() if value is not None}


def sentencepiece_metadata(**changes: Any) -> dict[str, Any]:
    """unk, bos, eos, then bytes 3..258, then pieces, the better-scored ones first."""
    scored = {"▁t": -1, "he": -2, "▁the": -3, "in": -4, "▁a": -5, "▁▁": -6, "ing": -7}
    scored |= {character: -100 - i for i, character in enumerate("▁theinga")}
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *scored]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(scored),
        "tokenizer.ggml.scores": [0.0] * 259 + [float(score) for score in scored.values()],
    }
    metadata |= {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    return {key: value for key, value in metadata.items() if value is not None}


# --- the demo model ---------------------------------------------------------------------------


def test_prompts_of_all_goldens(demo):
    goldens = json.loads(GOLDENS.read_text(encoding="utf-8"))
    assert len(goldens) >= 16
    for golden in goldens:
        prompt = demo.apply_chat_template(golden["messages"])
        assert demo.encode(prompt, add_special_tokens=False) == golden["prompt_token_ids"]
        assert demo.decode(golden["output_token_ids"]) == golden["text"]


def test_demo_ids(demo):
    assert (demo.vocab_size, demo.bos_token_id, demo.eos_token_id) == (49152, 1, 2)
    assert demo.special_token_ids == frozenset(range(17))
    assert demo.encode("") == []
    # Written out in text, special tokens are single ids; the template's own text tells them apart.
    assert demo.encode("<|im_start|>user\n") == [1, 4093, 198]
    assert demo.decode([1, 4093, 198]) == "user\n"
    assert demo.decode([1, 4093, 198], skip_special_tokens=False) == "<|im_start|>user\n"


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "   leading, trailing   ",
        "\t\ttabs\r\nand\n\n\nlines ",
        "😀👩‍👧‍👦🇩🇪",
        "你好\uff0c世界\u3002",
        "naïve café e\u0301",
        "def f(x: int) -> str:\n    return f'{x:>8}'\n",
        "3.14159 1,000,000 ٣٤ Ⅷ ½",
        "\x00\x7f\ufeff\ufffd\U0010ffff",
        "<|im_start|>user<|im_end|> <|im_start",
        "it's I'LL don't",
    ],
)
def test_round_trip_of_edge_cases(demo, text):
    ids = demo.encode(text)
    assert demo.decode(ids, skip_special_tokens=False) == text
    assert all(0 <= i < demo.vocab_size for i in ids)


@settings(max_examples=300, deadline=None)
@given(text=st.text(max_size=60))
def test_round_trip_of_any_text(text):
    tokenizer = BYTE_LEVEL
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


def test_round_trip_of_any_text_with_the_demo_vocabulary(demo):
    # These bytes are in no token of this vocabulary, and encoding drops them.
    missing = {0x04, 0x06, 0x13, 0x14, 0x16, 0x1D, 0xF1, 0xF2}
    any_character = st.characters(exclude_categories=["Cs"]).filter(
        lambda character: missing.isdisjoint(character.encode())
    )

    @settings(max_examples=300, deadline=None)
    @given(text=st.text(any_character, max_size=60))
    def check(text):
        assert demo.decode(demo.encode(text), skip_special_tokens=False) == text

    check()


def test_digits_are_single_tokens(demo):
    ids = demo.encode("in 1234567")
    assert [demo.decode([i]) for i in ids] == ["in", " ", *"1234567"]


# --- byte-level BPE from GGUF -----------------------------------------------------------------

BYTE_LEVEL = Tokenizer.from_gguf(byte_level_metadata())


def test_merges_apply_in_order():
    # "h e" comes first, then "he l", which leaves no "l o" for the second l: hel lo.
    assert BYTE_LEVEL.encode("hello") == [257, 258]
    assert BYTE_LEVEL.encode("hell") == [257, ord("l")]
    assert BYTE_LEVEL.encode("é") == list("é".encode())


def test_ignore_merges_takes_whole_words():
    tokenizer = Tokenizer.from_gguf(byte_level_metadata(pre="llama-bpe"))
    assert tokenizer.encode("hello") == [260, 259]  # this pre-tokenizer adds BOS by default


def test_control_tokens_are_special_and_user_defined_ones_are_not():
    text = "hello<|eos|><tool call>"
    ids = BYTE_LEVEL.encode(text)
    assert ids == [257, 258, 261, 262]
    assert BYTE_LEVEL.special_token_ids == {260, 261}
    assert BYTE_LEVEL.decode(ids) == "hello<tool call>"
    assert BYTE_LEVEL.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize(
    ("add_bos", "add_eos", "expected"),
    [(None, None, [256]), (True, None, [260, 256]), (False, True, [256, 261])],
)
def test_bos_and_eos_as_the_file_asks(add_bos, add_eos, expected):
    tokenizer = Tokenizer.from_gguf(
        byte_level_metadata(add_bos_token=add_bos, add_eos_token=add_eos)
    )
    assert tokenizer.encode("he") == expected
    assert tokenizer.encode("he", add_special_tokens=False) == [256]


def split(pre: str, text: str) -> list[str]:
    backend = build_tokenizer(byte_level_metadata(pre=pre)).backend
    assert backend.pre_tokenizer is not None
    return [text[start:end] for _, (start, end) in backend.pre_tokenizer.pre_tokenize_str(text)]


WORDS = "I'm 12345 años\n\n  x!?\n"


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("gpt-2", WORDS, ["I", "'m", " 12345", " años", "\n\n ", " x", "!?", "\n"]),
        ("smollm", WORDS, ["I", "'m", " ", *"12345", " años", "\n\n ", " x", "!?", "\n"]),
        ("llama-bpe", WORDS, ["I", "'m", " ", "123", "45", " años", "\n\n", " ", " x", "!?\n"]),
        ("qwen2", WORDS, ["I", "'m", " ", *"12345", " años", "\n\n", " ", " x", "!?\n"]),
        ("llama-bpe", "WE'LL (see)", ["WE", "'LL", " (", "see", ")"]),
        ("gpt-2", "WE'LL (see)", ["WE", "'", "LL", " (", "see", ")"]),
        ("tekken", "HelloWorld IBMx's 12", ["Hello", "World", " IBMx", "'s", " ", "1", "2"]),
        ("gpt-4o", "HelloWorld's 1234/\n", ["Hello", "World's", " ", "123", "4", "/\n"]),
        ("deepseek-v3", "中文abc 1234!", ["中文", "abc", " ", "123", "4", "!"]),
        ("deepseek-coder", "a b12\n中!", ["a", " b", "1", "2", "\n", "中", "!"]),
        ("default", "Hi, 12345", ["Hi", ",", " ", "123", "45"]),
    ],
)
def test_pre_tokenizers_split_as_worked_by_hand(pre, text, expected):
    assert split(pre, text) == expected


def test_qwen2_composes_and_others_do_not():
    decomposed = "e\u0301"
    assert Tokenizer.from_gguf(byte_level_metadata(pre="qwen2")).encode(decomposed) == list(
        "é".encode()
    )
    assert BYTE_LEVEL.encode(decomposed) == list(decomposed.encode())


# --- SentencePiece BPE from GGUF --------------------------------------------------------------


def pieces(tokenizer: Tokenizer, metadata: dict[str, Any], text: str) -> list[str]:
    tokens = metadata["tokenizer.ggml.tokens"]
    return [tokens[i] for i in tokenizer.encode(text, add_special_tokens=False)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("the", ["▁the"]),  # "▁t" (-1), then "he" (-2), then both (-3)
        ("the thing", ["▁the", "▁t", "h", "ing"]),  # "in" (-4) before "ing" (-7)
        ("  a", ["▁▁", "▁a"]),  # the prefix and two spaces: "▁a" (-5) comes before "▁▁" (-6)
        ("tt", ["▁t", "t"]),
        ("é", ["▁", "<0xC3>", "<0xA9>"]),
        ("\n", ["▁", "<0x0A>"]),
        ("", []),
        ("a<s>the", ["▁a", "<s>", "▁the"]),  # each stretch between special tokens is prefixed
    ],
)
def test_sentencepiece_as_worked_by_hand(text, expected):
    metadata = sentencepiece_metadata()
    tokenizer = Tokenizer.from_gguf(metadata)
    assert pieces(tokenizer, metadata, text) == expected
    if "<s>" not in text:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_sentencepiece_defaults_and_switches():
    tokenizer = Tokenizer.from_gguf(sentencepiece_metadata())
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert tokenizer.special_token_ids == {0, 1, 2}
    assert tokenizer.encode("") == [1]
    plain = Tokenizer.from_gguf(sentencepiece_metadata(add_space_prefix=False, add_bos_token=False))
    assert plain.decode(plain.encode("the")) == "the"
    assert plain.encode("the") == [267, 260]  # "t", "he": no mark, so no "▁t"
    assert plain.decode(plain.encode(" the")) == " the"


# --- what is refused --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (byte_level_metadata(model="t5"), "model='t5' is not supported; supported: gpt2, llama"),
        ({}, "tokenizer.ggml.model=None"),
        (byte_level_metadata(pre="kimi-k2"), "pre='kimi-k2'.*command-r.*qwen2.*smollm"),
        (byte_level_metadata(pre=None), "pre=None"),
        (byte_level_metadata(tokens=[]), "tokens is missing or empty"),
        (byte_level_metadata(tokens=["a", "b", "a"]), "'a' twice"),
        (byte_level_metadata(token_type=[1]), "token_type has 1 entries for 263"),
        (byte_level_metadata(merges=None), "merges is missing"),
        (byte_level_metadata(merges=["he"]), "'he'; a merge is"),
        (byte_level_metadata(merges=["zz q"]), "merges does not fit the vocabulary"),
        (byte_level_metadata(eos_token_id=263), "eos_token_id=263 is outside"),
        (byte_level_metadata(eos_token_id=-1), "eos_token_id=-1 is outside"),
        (byte_level_metadata(eos_token_id=[2]), r"eos_token_id=\[2\] must be one whole number"),
        (byte_level_metadata(bos_token_id="a"), "bos_token_id='a' must be one whole number"),
        (byte_level_metadata(padding_token_id=True), "padding_token_id=True must be one"),
        (byte_level_metadata(model=["gpt2"]), r"model=\['gpt2'\] is not supported"),
        (byte_level_metadata(pre=["gpt-2"]), r"pre=\['gpt-2'\] is not supported"),
        (byte_level_metadata(tokens="abc"), "tokens='abc' must be a list of strings"),
        (byte_level_metadata(tokens=[1, 2]), r"tokens=\[1, 2\] must be a list of strings"),
        (byte_level_metadata(token_type=5), "token_type=5 must be a list of whole numbers"),
        (byte_level_metadata(merges=[1]), r"merges=\[1\] must be a list of strings"),
        (byte_level_metadata(add_bos_token="no"), "add_bos_token='no' must be true or false"),
        (sentencepiece_metadata(scores=["a"]), r"scores=\['a'\] must be a list of numbers"),
        (
            byte_level_metadata() | {"tokenizer.chat_template": 5},
            "the GGUF file: chat_template={'default': 5} must be a string",
        ),
        (byte_level_metadata(bos_token_id=None, add_bos_token=True), "bos_token_id is missing"),
        (sentencepiece_metadata(scores=None), "scores is missing"),
        (sentencepiece_metadata(scores=[1.0]), "scores has 1 entries"),
    ],
)
def test_unsupported_or_damaged_metadata_is_named(metadata, message):
    with pytest.raises(ValueError, match=message):
        Tokenizer.from_gguf(metadata)


def test_text_that_is_no_unicode():
    with pytest.raises(ValueError, match=r"lone surrogate .*ud800.* at character 1"):
        BYTE_LEVEL.encode("a\ud800")
    with pytest.raises(TypeError, match="not bytes"):
        BYTE_LEVEL.encode(b"a")  # pyright: ignore[reportArgumentType]


# --- objects ----------------------------------------------------------------------------------


class TransformersLike:
    """The part of a transformers tokenizer's interface that is used."""

    bos_token, bos_token_id = "<s>", 1
    eos_token, eos_token_id = "</s>", 2
    all_special_ids = (1, 2)
    chat_template = CHATML + "{{ eos_token }}"

    def __len__(self) -> int:
        return 300

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return ([1] if add_special_tokens else []) + [3 + byte for byte in text.encode()]

    def decode(self, ids, skip_special_tokens=False, clean_up_tokenization_spaces=None) -> str:
        assert clean_up_tokenization_spaces is False
        assert skip_special_tokens
        return bytes(i - 3 for i in ids if i > 2).decode(errors="replace")


def test_wrap_transformers_like():
    tokenizer = load_tokenizer(TransformersLike())
    assert tokenizer.encode("a") == [1, 100]
    assert tokenizer.encode("a", add_special_tokens=False) == [100]
    assert tokenizer.decode((1, 100)) == "a"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.vocab_size) == (1, 2, 300)
    assert tokenizer.special_token_ids == {1, 2}
    assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}]) == "<user>x</s>"
    assert load_tokenizer(tokenizer) is tokenizer


def test_wrap_backend_leaves_the_callers_object_alone():
    backend = build_tokenizer(byte_level_metadata()).backend
    backend.enable_truncation(max_length=1)
    assert isinstance(backend, tokenizers.Tokenizer)
    tokenizer = Tokenizer.wrap(backend)
    assert tokenizer.encode("hello") == [257, 258]
    assert backend.encode("hello").ids == [257]
    assert tokenizer.bos_token_id is None


def test_wrap_names_what_is_missing():
    with pytest.raises(TypeError, match="tokenizer=object lacks encode, decode, __len__"):
        load_tokenizer(object())
