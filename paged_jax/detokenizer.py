"""Output tokens become text one at a time, and stop strings are found on the way.

`StreamDecoder` turns token ids into pieces of text that never need to be taken back.
`IncrementalDetokenizer` adds what a request asks for: stop strings, the hold-back that streaming
them needs, and the rules for the token that ended generation.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol


class Decoder(Protocol):
    """What this module needs of a tokenizer; `paged_jax.tokenizer.Tokenizer` has it."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def special_token_ids(self) -> Collection[int]: ...

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...


# What tokenizers print for bytes that are not, or not yet, a character.
_REPLACEMENT = "\ufffd"

# A UTF-8 character has at most 4 bytes, and a token at least one.
_MAX_TOKENS_PER_CHARACTER = 4

# Ids kept as left context before it is cut. Decoding this many costs about a microsecond; cutting
# costs one more decode, so it is not done at every token.
_MAX_WINDOW_TOKENS = 16


class StreamDecoder:
    """Decodes a growing list of token ids, in constant work a token.

    The pieces returned by `append` and a last `flush`, joined, equal `tokenizer.decode(all ids)`.
    A token's text can depend on what stands to its left: a character may be spread over several
    tokens, and SentencePiece decoders strip the first space of whatever they are given. So each
    new token is decoded together with a short window of earlier ones, cut where characters end,
    and what that adds to the window's text is the token's piece.

    One exception: SentencePiece byte tokens. Decoders of that kind turn a whole run of byte
    tokens into replacement characters if any of it is invalid UTF-8, even characters completed
    (and handed out) before. Here those stay, and only the invalid bytes are replaced.
    """

    def __init__(self, tokenizer: Decoder, *, skip_special_tokens: bool = True):
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._skipped_ids = tokenizer.special_token_ids if skip_special_tokens else ()
        self._num_ids = tokenizer.vocab_size
        self._window: list[int] = []
        self._num_read = 0  # ids of the window whose text was handed out
        self._window_text = ""  # the text of those: what the next piece comes after
        self._last_piece_start = 0  # where in the window the newest whole piece begins

    def append(self, token_id: int) -> str:
        """Returns the text that `token_id` completes; "" while a character is incomplete."""
        # Skipped tokens are kept out of the window: as its only content they would leave
        # the next token without left context. So are ids beyond the vocabulary, which have no text.
        if token_id in self._skipped_ids or not 0 <= token_id < self._num_ids:
            return ""
        self._window.append(token_id)
        text = self._decode_window()
        if text.endswith(_REPLACEMENT):
            if len(self._window) - self._num_read >= 2 * _MAX_TOKENS_PER_CHARACTER:
                return self._skip_invalid(text)
            # A token may hold whole characters and the beginning of one.
            whole = text.rstrip(_REPLACEMENT)
            piece = whole[len(self._window_text) :]
            if piece:
                self._window_text = whole
            return piece
        piece = text[len(self._window_text) :]
        self._last_piece_start, self._num_read = self._num_read, len(self._window)
        self._window_text = text
        if len(self._window) > _MAX_WINDOW_TOKENS:
            self._cut_window()
        return piece

    def flush(self) -> str:
        """Returns the text of an incomplete character at the end; nothing may follow it."""
        if self._num_read == len(self._window):
            return ""
        text = self._decode_window()
        piece = text[len(self._window_text) :]
        self._num_read, self._window_text = len(self._window), text
        return piece

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip_special_tokens)

    def _decode_window(self) -> str:
        text = self._decode(self._window)
        if not text.startswith(self._window_text):
            # A byte token spoilt its run, which was handed out already: start anew behind it.
            del self._window[: self._num_read]
            self._last_piece_start, self._num_read, self._window_text = 0, 0, ""
            text = self._decode(self._window)
        return text

    def _skip_invalid(self, text: str) -> str:
        """Hands out a long run of invalid bytes, all but the last character.

        Only a character's worth of bytes at the end can still become valid, and they print as one
        replacement character. UTF-8 synchronises itself, so the last few tokens suffice from here.
        """
        piece = text[len(self._window_text) : -1]
        self._window = self._window[-_MAX_TOKENS_PER_CHARACTER:]
        self._last_piece_start, self._num_read = 0, 0
        self._window_text = self._decode(self._window)[:-1]
        return piece

    def _cut_window(self) -> None:
        """Leaves the newest whole piece as context, if it has text."""
        window = self._window[self._last_piece_start :]
        window_text = self._decode(window)
        if window_text:
            self._window, self._window_text = window, window_text
            self._last_piece_start, self._num_read = 0, len(window)


class IncrementalDetokenizer:
    """The text of one output: decoded token by token, and cut at the first stop string.

    The stop string that completes first wins; of those that complete at the same character, the
    longest. Text is cut before it, or behind it with `include_stop_str_in_output`. A match counts
    if it completes after the first `min_tokens` tokens. Work a token is constant: only text that
    is new, and the `max(len(stop)) - 1` characters before it, is searched.

        detokenizer = IncrementalDetokenizer(tokenizer, stop=("\\n\\n",))
        for token_id in ...:
            stop_string = detokenizer.append(token_id, is_stop_token=token_id == eos_token_id)
            print(detokenizer.take_text(), end="")
            if stop_string is not None or ...:
                break
        detokenizer.finish()
        print(detokenizer.take_text())

    Args:
      tokenizer: decodes the ids.
      skip_special_tokens: leave special tokens out of the text.
      stop: stop strings, none of them empty.
      include_stop_str_in_output: keep the stop string, and the stop token's text.
      min_tokens: how many tokens come before a stop string may complete.
    """

    def __init__(
        self,
        tokenizer: Decoder,
        *,
        skip_special_tokens: bool = True,
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        min_tokens: int = 0,
    ):
        if isinstance(stop, str) or not all(isinstance(s, str) and s for s in stop):
            raise ValueError(f"stop={stop!r}: must be a sequence of strings, none of them empty")
        if min_tokens < 0:
            raise ValueError(f"min_tokens={min_tokens}: must be 0 or more")
        self._decoder = StreamDecoder(tokenizer, skip_special_tokens=skip_special_tokens)
        self._stop = tuple(stop)
        self._num_overlap_chars = max((len(s) for s in self._stop), default=1) - 1
        self._num_held_chars = 0 if include_stop_str_in_output else self._num_overlap_chars
        self._include_stop = include_stop_str_in_output
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._finished = False
        self._pieces: list[str] = []  # joined, they are the text; empty ones are left out
        self._num_chars = 0
        self._tail = ""  # the last characters of the text, where a match may have begun
        self._num_taken_chars = 0

    @property
    def finished(self) -> bool:
        """Whether a stop string was met, a stop token came, or `finish` was called."""
        return self._finished

    @property
    def text(self) -> str:
        """All text so far, less an incomplete character at its end; cut at the stop string."""
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    @property
    def num_visible_chars(self) -> int:
        """How much of `text` can no longer be cut: all of it once finished."""
        if self._finished:
            return self._num_chars
        return max(0, self._num_chars - self._num_held_chars)

    def visible_text(self) -> str:
        """The text that may be shown: the whole of it once finished.

        Before, the last `max(len(stop)) - 1` characters are held back: they may be the beginning
        of a stop string. With `include_stop_str_in_output` there is no need to.
        """
        return self.text[: self.num_visible_chars]

    def take_text(self) -> str:
        """Returns the visible text that no earlier call returned. Joined, they are the text."""
        start, end = self._num_taken_chars, self.num_visible_chars
        if end <= start:
            return ""
        self._num_taken_chars = end
        return self._slice(start, end)

    def append(self, token_id: int, *, is_stop_token: bool = False) -> str | None:
        """Adds one token; returns the stop string that it completes, or None.

        Args:
          token_id: the next output token.
          is_stop_token: this token ends generation by its id. Its text is left out, unless
            `include_stop_str_in_output`; no stop string is looked for in it.

        Raises:
          RuntimeError: the output is finished.
        """
        if self._finished:
            raise RuntimeError("append after the output is finished: a stop came before")
        self._num_tokens += 1
        if is_stop_token:
            # A character left incomplete before the stop token stays so.
            piece = self._decoder.append(token_id) if self._include_stop else ""
            self._add(piece + self._decoder.flush())
            self._finished = True
            return None
        piece = self._decoder.append(token_id)
        if not piece:
            return None
        if not self._stop:
            self._add(piece)
            return None
        match = self._find_stop(piece) if self._num_tokens > self._min_tokens else None
        if match is None:
            self._add(piece)
            tail = self._tail + piece
            self._tail = tail[max(0, len(tail) - self._num_overlap_chars) :]
            return None
        stop_string, end = match
        self._cut(piece, end if self._include_stop else end - len(stop_string))
        self._finished = True
        return stop_string

    def finish(self) -> None:
        """Ends the output: the tokens are all there, and nothing is held back any more."""
        if not self._finished:
            self._add(self._decoder.flush())
            self._finished = True

    def _find_stop(self, piece: str) -> tuple[str, int] | None:
        """Returns the winning stop string and where it ends, in characters of `piece`."""
        text, num_tail_chars = self._tail + piece, len(self._tail)
        best: tuple[str, int] | None = None
        for stop_string in self._stop:
            # It must end inside the new piece: an earlier end was looked for before.
            start = text.find(stop_string, max(0, num_tail_chars - len(stop_string) + 1))
            if start < 0:
                continue
            end = start + len(stop_string) - num_tail_chars
            if best is None or (end, -len(stop_string)) < (best[1], -len(best[0])):
                best = stop_string, end
        return best

    def _add(self, piece: str) -> None:
        if piece:
            self._pieces.append(piece)
            self._num_chars += len(piece)

    def _cut(self, piece: str, num_kept_chars: int) -> None:
        """Adds `piece` cut to `num_kept_chars`; where that is negative, earlier text is cut."""
        if num_kept_chars >= 0:
            self._add(piece[:num_kept_chars])
            return
        text = self.text[:num_kept_chars]
        self._pieces, self._num_chars = [text], len(text)

    def _slice(self, start: int, end: int) -> str:
        """`text[start:end]`, touching only the newest pieces."""
        first, piece_start = len(self._pieces), self._num_chars
        while piece_start > start:
            first -= 1
            piece_start -= len(self._pieces[first])
        return "".join(self._pieces[first:])[start - piece_start : end - piece_start]
