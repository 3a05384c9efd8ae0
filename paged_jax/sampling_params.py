"""What a caller asks of the sampler, checked once, on construction.

Host code: no jax. Names, defaults and ranges are those that users of vLLM know. A field that the
engine cannot honour yet raises `NotYetSupported` when it is set; none is ignored.
"""

import dataclasses
import math
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

MAX_LOGPROBS = 20
"""Most alternatives a request may ask for at each position."""

MAX_SEED = 2**64 - 1

MAX_OUTPUTS = 16384
"""Most outputs of one prompt."""

_NOT_YET_SUPPORTED = {
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "logit_bias": None,
    "bad_words": None,
    "allowed_token_ids": None,
    "spaces_between_special_tokens": True,
}


class NotYetSupported(ValueError):
    """A valid value of a field that this version cannot honour."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request is sampled, when it stops, and what is reported of it.

    Values are normalised: whole numbers become float where a float is meant, a `top_k` of -1
    becomes 0, `stop` and `stop_token_ids` become tuples. Derive a changed copy with
    `dataclasses.replace`, which checks again.

    Names and meanings are vLLM's, but: fields are keyword-only, `temperature` is at most 2, and the
    fields of the last line below are refused until they are supported.

    Attributes:
        n: outputs of the prompt. Output i uses seed + i.
        temperature: 0 to 2; 0 is greedy.
        top_p: keep the likeliest tokens that hold this share of the probability; 1 is off.
        top_k: keep the k likeliest tokens; 0 and -1 are off.
        min_p: keep tokens at least this share as likely as the likeliest; 0 is off.
        max_tokens: most output tokens; None: as many as max_model_len leaves room for.
        min_tokens: EOS and stop_token_ids cannot be sampled before this many output tokens, and no
            stop string is looked for in them.
        seed: 0 to 2**64 - 1. None: the engine draws one from its own seed.
        stop: one or more strings that end the output; the text is cut before the match.
        stop_token_ids: tokens that end the output, besides the model's EOS.
        ignore_eos: go on after EOS.
        include_stop_str_in_output: keep the stop string, or the stop token's text, in the text.
        logprobs: how many of the likeliest tokens to report at each position, 0 (the sampled
            token alone) to 20; None for none.
        prompt_logprobs: the same of the prompt's tokens; such a request does not ask the prefix
            cache.
        detokenize: make text; without it `text` stays "".
        skip_special_tokens: leave special tokens out of the text.
        presence_penalty, frequency_penalty, repetition_penalty, logit_bias, bad_words,
            allowed_token_ids, spaces_between_special_tokens: not supported yet.

    Raises:
        ValueError: a value has the wrong type, is out of range or contradicts another. The message
            names the field, the value and what would be right.
        NotYetSupported: a field that is planned but not built is set to other than its default.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int | None = 16
    min_tokens: int = 0
    seed: int | None = None

    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False

    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0

    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] | None = None
    bad_words: Sequence[str] | None = None
    allowed_token_ids: Sequence[int] | None = None

    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    detokenize: bool = True

    def __post_init__(self) -> None:
        self._normalise("n", _integer(1, MAX_OUTPUTS))
        self._normalise("temperature", _number(0.0, 2.0))
        self._normalise("top_p", _number(0.0, 1.0, low_open=True))
        self._normalise("top_k", _integer(-1))
        self._normalise("min_p", _number(0.0, 1.0))
        self._normalise("max_tokens", _optional(_integer(1)))
        self._normalise("min_tokens", _integer(0))
        self._normalise("seed", _optional(_integer(0, MAX_SEED)))
        self._normalise("stop", _strings)
        self._normalise("stop_token_ids", _token_ids)
        self._normalise("presence_penalty", _number(-2.0, 2.0))
        self._normalise("frequency_penalty", _number(-2.0, 2.0))
        self._normalise("repetition_penalty", _number(0.0, math.inf, low_open=True))
        self._normalise("logprobs", _optional(_integer(0, MAX_LOGPROBS)))
        self._normalise("prompt_logprobs", _optional(_integer(0, MAX_LOGPROBS)))
        for name in (
            "ignore_eos",
            "include_stop_str_in_output",
            "skip_special_tokens",
            "spaces_between_special_tokens",
            "detokenize",
        ):
            self._normalise(name, _boolean)
        object.__setattr__(self, "top_k", max(self.top_k, 0))
        self._refuse_unsupported()
        self._check_combinations()

    @property
    def is_greedy(self) -> bool:
        """True when each token is the likeliest one and no randomness is used."""
        return self.temperature == 0.0

    def child(self, index: int) -> "SamplingParams":
        """The params of output `index` of a request with `n` outputs: n is 1, the seed its own.

        Seeds count up from the request's seed, and wrap at 2**64. Without a seed the child has
        none either.

        Raises:
            ValueError: `index` is not in [0, n).
        """
        if not 0 <= index < self.n:
            raise ValueError(f"index={index!r} of child() must be in [0, n) with n={self.n}")
        seed = None if self.seed is None else (self.seed + index) % (MAX_SEED + 1)
        return dataclasses.replace(self, n=1, seed=seed)

    def _normalise(self, name: str, check: Callable[[str, Any], Any]) -> None:
        object.__setattr__(self, name, check(name, getattr(self, name)))

    def _refuse_unsupported(self) -> None:
        for name, default in _NOT_YET_SUPPORTED.items():
            value = getattr(self, name)
            # An empty list or dict asks for nothing.
            if len(value) > 0 if hasattr(value, "__len__") else value != default:
                raise NotYetSupported(
                    f"{name}={value!r} is not supported yet; leave it at {default!r}"
                )

    def _check_combinations(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens={self.min_tokens} must be at most max_tokens={self.max_tokens}"
            )
        if self.is_greedy and self.n > 1:
            raise ValueError(
                f"n={self.n} with temperature=0 would give {self.n} equal outputs; "
                "set n=1, or a temperature above 0"
            )
        if self.stop and not self.detokenize:
            raise ValueError(
                f"stop={self.stop!r} is looked for in the text, so it needs detokenize=True; "
                "without text use stop_token_ids"
            )


def _integer(low: int, high: int | None = None):
    wanted = f"a whole number of at least {low}" if high is None else f"from {low} to {high}"

    def check(name: str, value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, numbers.Integral):
            raise ValueError(
                f"{name}={value!r} is of type {type(value).__name__}; it must be an int, {wanted}"
            )
        number = int(value)
        if number < low or (high is not None and number > high):
            raise ValueError(f"{name}={value!r} is out of range; it must be {wanted}")
        return number

    return check


def _number(low: float, high: float, *, low_open: bool = False):
    wanted = f"above {low:g}" if low_open else f"at least {low:g}"
    wanted += " and finite" if math.isinf(high) else f" and at most {high:g}"

    def check(name: str, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise ValueError(
                f"{name}={value!r} is of type {type(value).__name__}; it must be a number, {wanted}"
            )
        try:
            number = float(value)
        except OverflowError:  # a whole number beyond all floats
            number = math.inf
        # Written so that nan fails every comparison and is refused.
        in_range = low <= number <= high and not (low_open and number == low)
        if not in_range or math.isinf(number):
            raise ValueError(f"{name}={value!r} is out of range; it must be {wanted}")
        return number

    return check


def _optional(check):
    def check_unless_none(name: str, value: object):
        return None if value is None else check(name, value)

    return check_unless_none


def _boolean(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError(
            f"{name}={value!r} is of type {type(value).__name__}; it must be True or False"
        )
    return value


def _strings(name: str, value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    strings = _tuple_of(name, [value] if isinstance(value, str) else value, "strings")
    for string in strings:
        if not isinstance(string, str) or not string:
            raise ValueError(
                f"{name}={value!r} holds {string!r}; each entry must be a string that is not empty"
            )
    return strings


def _token_ids(name: str, value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    check = _integer(0)
    entries = enumerate(_tuple_of(name, value, "token ids"))
    return tuple(check(f"{name}[{index}]", token_id) for index, token_id in entries)


def _tuple_of(name: str, value: object, what: str) -> tuple[Any, ...]:
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise ValueError(
            f"{name}={value!r} is of type {type(value).__name__}; it must be a list of {what}"
        )
    return tuple(value)
