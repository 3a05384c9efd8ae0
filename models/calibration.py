"""The tokens on which a model is watched before it is quantised.

A few hundred tokens of prose, arithmetic, code, lists, dialogue and other languages show where a
model's activations are large: which channels are is a property of the model far more than of the
text (LLM.int8(), arXiv:2208.07339). The texts were written for this file.
"""

import numpy as np

from paged_jax.tokenizer import Tokenizer

# Mixed, so that any few hundred tokens from the start hold several kinds.
_TEXTS = (
    """\
The harbour woke slowly. A woman in a yellow coat untied the last boat and let it drift, while \
above the warehouses gulls argued over something silver. Nobody had told her that the ferry would \
be late again; she read it in the way the ticket seller folded his newspaper.
""",
    """\
A baker sells 36 rolls in the morning and twice as many in the afternoon. Each roll costs $0.75. \
How much does she take in?
In the afternoon she sells 2 * 36 = 72 rolls. That makes 36 + 72 = 108 rolls in all, and \
108 * 0.75 = 81. She takes in $81.
""",
    '''\
def moving_average(values: list[float], width: int) -> list[float]:
    """Mean of every window of `width` neighbours."""
    total = sum(values[:width])
    means = [total / width]
    for left, right in zip(values, values[width:]):
        total += right - left
        means.append(total / width)
    return means
''',
    """\
user: My tomato plants have yellow leaves at the bottom. What should I do?
assistant: Yellow lower leaves often mean one of three things:
1. **Too much water.** Let the soil dry before you water again.
2. **Too little nitrogen.** Feed the plants every two weeks.
3. **Age.** A few old leaves always go first; simply remove them.
""",
    """\
Photosynthesis stores the energy of light in sugars. In the first stage, pigments in the thylakoid \
membrane split water and release oxygen; in the second, enzymes in the stroma build carbon dioxide \
into molecules of three carbon atoms. Both stages stop within minutes when the temperature falls \
below freezing.
""",
    """\
{"id": 4821, "name": "Oslo", "temperature_c": -3.5, "open": true, "tags": ["north", "coast"], \
"visits": [17, 204, 9, 1350]}
| Year | Population | Change |
|------|-----------:|-------:|
| 1990 |    458,364 |    1.2% |
| 2010 |    586,860 |    2.1% |
""",
    """\
Tom walks 5 miles in 2 hours. At this speed, how far does he come in 7 hours?
His speed is 5 / 2 = 2.5 miles an hour, so in 7 hours he walks 2.5 * 7 = 17.5 miles. The answer \
is 17.5.
""",
    """\
Dear Ms. Alvarez, thank you for your letter of 14 March. We have looked into the delay and found \
that your parcel was sent to the wrong depot. A replacement left us this morning, and you should \
have it by Friday at the latest. Please accept our apologies. Kind regards, Peter Lindqvist
""",
    """\
SELECT city, COUNT(*) AS orders FROM sales WHERE year >= 2019 GROUP BY city HAVING COUNT(*) > 10 \
ORDER BY orders DESC;
for (int i = 0; i < n; ++i) { if (a[i] != b[i]) { std::cout << i << "\\n"; return false; } }
$ grep -rn "timeout" src/ | sort | head -5
""",
    """\
The treaty of 1648 ended thirty years of war, but it did not end the quarrel between the cities \
and their princes. Taxes rose, harvests failed twice, and by the spring of 1652 several towns on \
the upper river had closed their gates to the tax collectors.
""",
    """\
Q: Is 91 a prime number? Explain your reasoning.
A: No. A number below 100 is prime if none of 2, 3, 5 and 7 divides it. 91 is odd, its digits sum \
to 10, and it does not end in 0 or 5, but 7 * 13 = 91. Therefore, 91 is not prime.
""",
    """\
Der Zug nach Hamburg hat heute zwanzig Minuten Verspätung. Le marché ouvre à huit heures, sauf le \
dimanche. ¿Dónde está la biblioteca más cercana? 東京の天気は晴れです。
""",
    """\
Write a short poem about the sea.
The tide comes in, the tide goes out,
it never asks what it is about;
it leaves a shell, it takes a stone,
and hums a tune that is its own.
""",
    """\
We prove that the sum of the first n odd numbers is n^2. For n = 1 the sum is 1. Suppose it holds \
for n; the next odd number is 2n + 1, and n^2 + 2n + 1 = (n + 1)^2. Hence the claim follows by \
induction. For example, 1 + 3 + 5 + 7 = 16 = 4^2.
""",
)


def calibration_token_ids(
    tokenizer: Tokenizer | None, vocab_size: int, num_tokens: int
) -> np.ndarray:
    """Tokens of ordinary texts, or pseudo-random ones where nothing can encode a text.

    Args:
      tokenizer: the model's; None for none.
      vocab_size: ids are below it; others, which a tokenizer with more tokens than the model
        might give, are left out.
      num_tokens: how many; the texts start again after about a thousand.

    Returns: int32[num_tokens], the same for the same arguments.
    """
    ids: list[int] = []
    if tokenizer is not None:
        for text in _TEXTS:
            ids += tokenizer.encode(text)
    found = np.array([token_id for token_id in ids if token_id < vocab_size], np.int32)
    if found.size == 0:
        random = np.random.default_rng(0)
        return random.integers(vocab_size, size=num_tokens, dtype=np.int32)
    return np.resize(found, num_tokens)
