"""The tokens that models are watched on: real text where there is a tokenizer, always the same."""

import numpy as np
import pytest
from tiny_engine import ByteTokenizer

from paged_jax.models.calibration import calibration_token_ids
from paged_jax.tokenizer import Tokenizer

TOKENIZER = Tokenizer.wrap(ByteTokenizer())


@pytest.mark.parametrize("tokenizer", [TOKENIZER, None])
@pytest.mark.parametrize("num_tokens", [1, 300, 20_000])
def test_as_many_as_asked_and_the_same_again(tokenizer, num_tokens):
    ids = calibration_token_ids(tokenizer, 260, num_tokens)
    assert ids.dtype == np.int32 and ids.shape == (num_tokens,)
    assert 0 <= ids.min() and ids.max() < 260
    np.testing.assert_array_equal(ids, calibration_token_ids(tokenizer, 260, num_tokens))
    longer = calibration_token_ids(tokenizer, 260, num_tokens + 50)
    np.testing.assert_array_equal(ids, longer[:num_tokens])


def test_they_are_text_of_several_kinds():
    text = TOKENIZER.decode(calibration_token_ids(TOKENIZER, 260, 1200).tolist())
    for part in ("harbour", "108 * 0.75 = 81", "def moving_average", "assistant:"):
        assert part in text


@pytest.mark.parametrize("vocab_size", [97, 1])
def test_ids_beyond_the_models_are_left_out(vocab_size):
    ids = calibration_token_ids(TOKENIZER, vocab_size, 500)
    assert ids.shape == (500,) and 0 <= ids.min() and ids.max() < vocab_size
