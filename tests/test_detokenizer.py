"""Incremental detokenisation and stop strings, against decoding everything at every token."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paged_jax.detokenizer import IncrementalDetokenizer, StreamDecoder
from paged_jax.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"


def byte_characters() -> list[str]:
    """The character that stands for each byte in a byte-level vocabulary (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in printable)
    table = {byte: chr(byte) for byte in printable}
    table |= {byte: chr(256 + index) for index, byte in enumerate(others)}
    return [table[byte] for byte in range(256)]


def make_byte_level() -> Tokenizer:
    """Ids 0..255 are the bytes, then come words, split characters and two special tokens."""
    characters = byte_characters()

    def spell(data: bytes) -> str:
        return "".join(characters[byte] for byte in data)

    emoji = "😀".encode()
    words = [b"ab", b" a", b"abc", b" the", b"stop", b"a b", emoji[:2], emoji[2:], emoji[3:] + b"a"]
    words += ["你好".encode()[:4], "👩‍👧".encode()]
    tokens = list(dict.fromkeys(characters + [spell(word) for word in words]))
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [*tokens, "<|end|>", "<|other|>"],
        "tokenizer.ggml.token_type": [1] * len(tokens) + [3, 3],
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.eos_token_id": len(tokens),
    }
    return Tokenizer.from_gguf(metadata)


def make_sentencepiece() -> Tokenizer:
    """Ids: 0..2 unk, bos, eos; 3..258 the bytes; then pieces."""
    pieces = ["▁", "▁▁", "a", "b", "▁a", "▁the", "stop", "é", "b▁a", "."]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(pieces),
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(i) for i in range(len(pieces))],
    }
    return Tokenizer.from_gguf(metadata)


BYTE_LEVEL = make_byte_level()
SENTENCEPIECE = make_sentencepiece()
EOS = BYTE_LEVEL.vocab_size - 2

# Few characters, so that stop strings are met often; several of more than one byte.
SMALL_TEXT = st.text(alphabet="ab .\né😀你", max_size=6)
STOPS = st.lists(SMALL_TEXT.filter(bool), max_size=3).map(tuple)


def byte_ids(text: str) -> list[int]:
    return list(text.encode())


def flatten(chunks: list[list[int]]) -> list[int]:
    return [token_id for chunk in chunks for token_id in chunk]


BYTE_LEVEL_IDS = st.lists(
    st.one_of(
        SMALL_TEXT.map(byte_ids),
        st.text(max_size=4).map(byte_ids),
        st.integers(0, BYTE_LEVEL.vocab_size - 1).map(lambda i: [i]),
        st.integers(256, BYTE_LEVEL.vocab_size - 1).map(lambda i: [i]),
        st.just([0xE4, 0xBD]),  # two thirds of a character
        st.lists(st.sampled_from([0xFF, 0x80, 0xF0]), max_size=20),  # never valid
    ),
    max_size=12,
).map(flatten)

SENTENCEPIECE_IDS = st.lists(
    st.one_of(
        SMALL_TEXT.map(lambda text: [3 + byte for byte in text.encode()]),
        st.integers(0, 2).map(lambda i: [i]),
        st.integers(259, SENTENCEPIECE.vocab_size - 1).map(lambda i: [i]),
    ),
    max_size=12,
).map(flatten)


def naive(
    tokenizer: Tokenizer,
    ids: Sequence[int],
    stop: Sequence[str],
    *,
    include: bool = False,
    min_tokens: int = 0,
    skip: bool = True,
) -> tuple[str, str | None, int]:
    """Decodes everything at every token. Returns the text, the stop string, and tokens used."""
    num_seen_chars = 0
    for num_tokens in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:num_tokens], skip_special_tokens=skip).rstrip(REPLACEMENT)
        matches = [
            (start + len(s), start, s)
            for s in stop
            for start in range(len(text))
            if text.startswith(s, start) and start + len(s) > num_seen_chars
        ]
        if matches and num_tokens > min_tokens:
            end, start, stop_string = min(matches)
            return text[: end if include else start], stop_string, num_tokens
        num_seen_chars = max(num_seen_chars, len(text))
    return tokenizer.decode(ids, skip_special_tokens=skip), None, len(ids)


def run(
    detokenizer: IncrementalDetokenizer, ids: Sequence[int]
) -> tuple[str, str | None, int, list[str]]:
    """Returns the text, the stop string, tokens used, and the pieces as they were streamed."""
    pieces, stop_string, num_tokens = [], None, 0
    for token_id in ids:
        stop_string = detokenizer.append(token_id)
        num_tokens += 1
        pieces.append(detokenizer.take_text())
        if stop_string is not None:
            break
    detokenizer.finish()
    pieces.append(detokenizer.take_text())
    return detokenizer.text, stop_string, num_tokens, pieces


def test_a_whole_character_is_not_held_back_by_the_part_of_another_in_its_token():
    mixed = next(
        i for i in range(BYTE_LEVEL.vocab_size) if BYTE_LEVEL.decode([i]) == "你" + REPLACEMENT
    )
    detokenizer = IncrementalDetokenizer(BYTE_LEVEL)
    detokenizer.append(mixed)
    assert detokenizer.take_text() == "你"
    assert IncrementalDetokenizer(BYTE_LEVEL, stop=("你",)).append(mixed) == "你"


@settings(max_examples=600, deadline=None)
@given(ids=BYTE_LEVEL_IDS, stop=STOPS, include=st.booleans(), skip=st.booleans(), data=st.data())
def test_byte_level_equals_the_oracle(ids, stop, include, skip, data):
    min_tokens = data.draw(st.integers(0, 6))
    detokenizer = IncrementalDetokenizer(
        BYTE_LEVEL,
        stop=stop,
        include_stop_str_in_output=include,
        min_tokens=min_tokens,
        skip_special_tokens=skip,
    )
    text, stop_string, num_tokens, pieces = run(detokenizer, ids)
    expected = naive(BYTE_LEVEL, ids, stop, include=include, min_tokens=min_tokens, skip=skip)
    assert (text, stop_string, num_tokens) == expected
    assert "".join(pieces) == text


@settings(max_examples=300, deadline=None)
@given(ids=SENTENCEPIECE_IDS, stop=STOPS, include=st.booleans())
def test_sentencepiece_equals_the_oracle(ids, stop, include):
    detokenizer = IncrementalDetokenizer(
        SENTENCEPIECE, stop=stop, include_stop_str_in_output=include
    )
    text, stop_string, num_tokens, pieces = run(detokenizer, ids)
    assert (text, stop_string, num_tokens) == naive(SENTENCEPIECE, ids, stop, include=include)
    assert "".join(pieces) == text


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=40), data=st.data())
def test_no_replacement_character_is_streamed(text, data):
    """Any text, its bytes in tokens: what is shown is always a beginning of it."""
    text_to_stream = text.replace(REPLACEMENT, "")
    decoder = StreamDecoder(BYTE_LEVEL)
    shown = ""
    for byte in text_to_stream.encode():
        shown += decoder.append(byte)
        assert REPLACEMENT not in shown
        assert text_to_stream.startswith(shown)
    assert shown == text_to_stream
    assert decoder.flush() == ""


@settings(max_examples=200, deadline=None)
@given(ids=BYTE_LEVEL_IDS, stop=STOPS, min_tokens=st.integers(0, 4))
def test_held_back_text_is_as_stated(ids, stop, min_tokens):
    detokenizer = IncrementalDetokenizer(BYTE_LEVEL, stop=stop, min_tokens=min_tokens)
    num_held = max((len(s) for s in stop), default=1) - 1
    for token_id in ids:
        if detokenizer.append(token_id) is not None:
            break
        text = detokenizer.text
        assert detokenizer.visible_text() == text[: max(0, len(text) - num_held)]
    detokenizer.finish()
    assert detokenizer.visible_text() == detokenizer.text


@settings(max_examples=200, deadline=None)
@given(chunks=st.lists(st.integers(3, SENTENCEPIECE.vocab_size - 1), max_size=60))
def test_invalid_byte_tokens_do_not_cost_the_text_around_them(chunks):
    """Whatever bytes come, every piece that is text is shown, in order."""
    decoder = StreamDecoder(SENTENCEPIECE)
    shown = "".join(decoder.append(i) for i in chunks) + decoder.flush()
    pieces = [SENTENCEPIECE.decode([i, 261])[:-1] for i in chunks if i >= 261]
    position = 0
    for piece in pieces:
        position = shown.index(piece, position) + len(piece)


def test_invalid_byte_token_spoils_only_itself():
    ids = [3 + byte for byte in "你".encode()] + [3 + 0xFF, 263, 264]
    text, _, _, pieces = run(IncrementalDetokenizer(SENTENCEPIECE), ids)
    assert text == "你" + REPLACEMENT + " a the"
    assert pieces[:3] == ["", "", "你"]  # streamed as soon as it is complete


def test_stop_inside_a_token_cuts_what_follows_it():
    ids = [*byte_ids("xy"), 256]  # "ab" as one token
    assert BYTE_LEVEL.decode([256]) == "ab"
    for include, expected in ((False, "x"), (True, "xya")):
        detokenizer = IncrementalDetokenizer(
            BYTE_LEVEL, stop=("ya",), include_stop_str_in_output=include
        )
        assert run(detokenizer, ids)[:2] == (expected, "ya")


@pytest.mark.parametrize(
    ("stop", "text", "expected"),
    [
        (("bc", "abc"), "xabcd", ("x", "abc")),  # same end: the longest
        (("abcd", "bc"), "xabcd", ("xa", "bc")),  # the earlier end, though it starts later
        (("b", "ab"), "ab", ("", "ab")),
        (("aa",), "baaa", ("b", "aa")),
        (("\n",), "one\ntwo", ("one", "\n")),
        (("zz",), "abc", ("abc", None)),
    ],
)
def test_which_stop_string_wins(stop, text, expected):
    assert run(IncrementalDetokenizer(BYTE_LEVEL, stop=stop), byte_ids(text))[:2] == expected


def test_min_tokens_counts_where_a_match_completes():
    ids = byte_ids("stop and stop")
    for min_tokens, expected in ((3, ""), (4, "stop and "), (12, "stop and ")):
        detokenizer = IncrementalDetokenizer(BYTE_LEVEL, stop=("stop",), min_tokens=min_tokens)
        assert run(detokenizer, ids)[0] == expected
    detokenizer = IncrementalDetokenizer(BYTE_LEVEL, stop=("stop",), min_tokens=13)
    assert run(detokenizer, ids)[0] == "stop and stop"


@pytest.mark.parametrize(
    ("include", "skip", "expected"),
    [(False, True, "hi"), (False, False, "hi"), (True, True, "hi"), (True, False, "hi<|end|>")],
)
def test_stop_token_text(include, skip, expected):
    detokenizer = IncrementalDetokenizer(
        BYTE_LEVEL, skip_special_tokens=skip, include_stop_str_in_output=include
    )
    for token_id in byte_ids("hi"):
        detokenizer.append(token_id)
    assert detokenizer.append(EOS, is_stop_token=True) is None
    assert detokenizer.finished
    assert detokenizer.text == detokenizer.take_text() == expected


def test_stop_token_that_is_text_releases_what_was_held():
    detokenizer = IncrementalDetokenizer(BYTE_LEVEL, stop=("abcdef",))
    for token_id in byte_ids("abc"):
        detokenizer.append(token_id)
    assert detokenizer.take_text() == ""
    detokenizer.append(ord("}"), is_stop_token=True)
    assert detokenizer.take_text() == "abc"
    with pytest.raises(RuntimeError, match="finished"):
        detokenizer.append(ord("a"))


def test_incomplete_character_is_shown_at_the_end_only():
    detokenizer = IncrementalDetokenizer(BYTE_LEVEL)
    for byte in "a😀".encode()[:-1]:
        detokenizer.append(byte)
    assert detokenizer.text == "a"
    detokenizer.finish()
    detokenizer.finish()
    assert detokenizer.text == "a" + REPLACEMENT


def test_spaces_of_sentencepiece_survive_special_tokens_between_words():
    ids = [263, 1, 2, 264]  # "▁a", <s>, </s>, "▁the"
    assert run(IncrementalDetokenizer(SENTENCEPIECE), ids)[0] == "a the"
    detokenizer = IncrementalDetokenizer(SENTENCEPIECE, skip_special_tokens=False)
    expected = SENTENCEPIECE.decode(ids, skip_special_tokens=False)
    assert run(detokenizer, ids)[0] == expected


def test_spaces_of_sentencepiece_survive_over_long_outputs():
    ids = [264, 259, 263, 260, 268] * 40
    text, _, _, pieces = run(IncrementalDetokenizer(SENTENCEPIECE), ids)
    assert text == "".join(pieces) == SENTENCEPIECE.decode(ids)
    assert text.startswith("the  a  . the  a")


def test_ids_without_text_are_passed_over():
    """Models pad their embedding: an id beyond the vocabulary may be sampled."""
    beyond = SENTENCEPIECE.vocab_size + 7
    detokenizer = IncrementalDetokenizer(SENTENCEPIECE)
    assert run(detokenizer, [263, beyond, 264])[0] == "a the"


class CountingTokenizer:
    """Counts the ids that it is asked to decode."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.vocab_size = tokenizer.vocab_size
        self.special_token_ids = tokenizer.special_token_ids
        self.num_decoded = 0

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        self.num_decoded += len(ids)
        return self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)


@pytest.mark.parametrize(
    "pattern",
    [
        pytest.param(byte_ids("some words "), id="text"),
        pytest.param(byte_ids("你好"), id="three bytes a character"),
        pytest.param([0xFF], id="never valid"),
        pytest.param(byte_ids(REPLACEMENT), id="genuine replacement characters"),
        pytest.param([0xF0, 0x9F], id="beginnings without end"),
        pytest.param([EOS], id="special tokens"),
    ],
)
def test_work_a_token_is_constant(pattern):
    ids = (pattern * 3000)[:3000]
    counting = CountingTokenizer(BYTE_LEVEL)
    detokenizer = IncrementalDetokenizer(counting, stop=("never met",))
    assert run(detokenizer, ids)[0] == BYTE_LEVEL.decode(ids)
    assert counting.num_decoded < 32 * len(ids)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"stop": "word"}, "stop='word'"),
        ({"stop": ("a", "")}, "stop="),
        ({"min_tokens": -1}, "min_tokens=-1"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        IncrementalDetokenizer(BYTE_LEVEL, **arguments)
