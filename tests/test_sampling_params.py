"""SamplingParams: defaults, ranges, types, what is refused and with which words."""

import dataclasses
import math
import subprocess
import sys

import numpy as np
import pytest

from paged_jax.sampling_params import NotYetSupported, SamplingParams

DEFAULTS = dict(
    n=1,
    temperature=1.0,
    top_p=1.0,
    top_k=0,
    min_p=0.0,
    max_tokens=16,
    min_tokens=0,
    seed=None,
    stop=(),
    stop_token_ids=(),
    ignore_eos=False,
    include_stop_str_in_output=False,
    presence_penalty=0.0,
    frequency_penalty=0.0,
    repetition_penalty=1.0,
    logprobs=None,
    prompt_logprobs=None,
    logit_bias=None,
    bad_words=None,
    allowed_token_ids=None,
    skip_special_tokens=True,
    spaces_between_special_tokens=True,
    detokenize=True,
)


def test_names_and_defaults():
    assert dataclasses.asdict(SamplingParams()) == DEFAULTS


@pytest.mark.parametrize(
    "fields",
    [
        dict(n=4),
        dict(temperature=0),
        dict(temperature=2),
        dict(temperature=1e-5),
        dict(top_p=1e-9),
        dict(top_k=100_000),
        dict(min_p=0.0),
        dict(min_p=1.0),
        dict(max_tokens=None, min_tokens=10_000),
        dict(max_tokens=1, min_tokens=1),
        dict(seed=0),
        dict(seed=2**64 - 1),
        dict(stop=["a", "bc"], include_stop_str_in_output=True),
        dict(stop_token_ids=[0, 5], ignore_eos=True),
        dict(logprobs=0),
        dict(logprobs=20),
        dict(detokenize=False, skip_special_tokens=False),
        dict(presence_penalty=0, repetition_penalty=1),
    ],
    ids=str,
)
def test_accepted(fields):
    params = SamplingParams(**fields)
    for name, value in fields.items():
        expected = tuple(value) if isinstance(value, list) else value
        assert getattr(params, name) == expected


@pytest.mark.parametrize(
    ("field", "value", "mend"),
    [
        ("n", 0, "from 1 to 16384"),
        ("n", 1.0, "an int"),
        ("n", True, "an int"),
        ("n", None, "an int"),
        ("temperature", -1, "at least 0 and at most 2"),
        ("temperature", 2.01, "at least 0 and at most 2"),
        ("temperature", math.nan, "at least 0"),
        ("temperature", math.inf, "at most 2"),
        ("temperature", 10**400, "at most 2"),
        ("temperature", "0.5", "a number"),
        ("temperature", True, "a number"),
        ("temperature", None, "a number"),
        ("top_p", 0, "above 0 and at most 1"),
        ("top_p", 1.5, "above 0 and at most 1"),
        ("top_p", math.nan, "above 0"),
        ("top_k", -2, "at least -1"),
        ("top_k", 3.5, "an int"),
        ("min_p", -0.1, "at least 0 and at most 1"),
        ("min_p", 1.1, "at least 0 and at most 1"),
        ("max_tokens", 0, "at least 1"),
        ("max_tokens", "16", "an int"),
        ("min_tokens", -1, "at least 0"),
        ("min_tokens", None, "an int"),
        ("seed", -1, "from 0 to 18446744073709551615"),
        ("seed", 2**64, "from 0 to 18446744073709551615"),
        ("seed", 1.5, "an int"),
        ("stop", "", "not empty"),
        ("stop", ["a", ""], "not empty"),
        ("stop", [3], "a string"),
        ("stop", 3, "a list of strings"),
        ("stop", b"end", "a list of strings"),
        ("stop_token_ids", 3, "a list of token ids"),
        ("stop_token_ids", "3", "a list of token ids"),
        ("ignore_eos", 1, "True or False"),
        ("include_stop_str_in_output", None, "True or False"),
        ("detokenize", "no", "True or False"),
        ("presence_penalty", 2.5, "at least -2 and at most 2"),
        ("frequency_penalty", -2.5, "at least -2 and at most 2"),
        ("repetition_penalty", 0, "above 0 and finite"),
        ("repetition_penalty", math.inf, "above 0 and finite"),
        ("logprobs", 21, "from 0 to 20"),
        ("logprobs", -1, "from 0 to 20"),
        ("logprobs", True, "an int"),
    ],
)
def test_refused_with_the_field_the_value_and_the_mend(field, value, mend):
    with pytest.raises(ValueError, match=field) as error:
        SamplingParams(**{field: value})
    message = str(error.value)
    assert f"{field}={value!r}" in message
    assert mend in message
    assert not isinstance(error.value, NotYetSupported)


def test_a_bad_stop_token_id_is_named_by_its_index():
    with pytest.raises(ValueError, match=r"stop_token_ids\[1\]=-7 .* at least 0"):
        SamplingParams(stop_token_ids=[2, -7])
    with pytest.raises(ValueError, match=r"stop_token_ids\[0\]='2' .* an int"):
        SamplingParams(stop_token_ids=["2"])  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("field", "value", "default"),
    [
        ("presence_penalty", 0.5, 0.0),
        ("frequency_penalty", -2.0, 0.0),
        ("repetition_penalty", 1.1, 1.0),
        ("logit_bias", {3: 1.0}, None),
        ("bad_words", ["no"], None),
        ("allowed_token_ids", [1, 2], None),
        ("spaces_between_special_tokens", False, True),
    ],
)
def test_what_is_not_built_yet_raises_when_set(field, value, default):
    with pytest.raises(NotYetSupported) as error:
        SamplingParams(**{field: value})
    assert str(error.value) == f"{field}={value!r} is not supported yet; leave it at {default!r}"
    assert isinstance(error.value, ValueError)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(min_tokens=17), r"min_tokens=17 must be at most max_tokens=16"),
        (dict(n=2, temperature=0), r"n=2 with temperature=0 .* set n=1, or a temperature"),
        (dict(stop="x", detokenize=False), r"stop=\('x',\) .* detokenize=True"),
    ],
    ids=str,
)
def test_contradictions_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**fields)


def test_normalisation():
    params = SamplingParams(temperature=1, top_k=-1, stop="end", stop_token_ids=iter([7, 8]))  # pyright: ignore[reportArgumentType]
    assert isinstance(params.temperature, float)
    assert params.top_k == 0
    assert params.stop == ("end",)
    assert params.stop_token_ids == (7, 8)
    nothing = SamplingParams(stop=None, stop_token_ids=None)  # pyright: ignore[reportArgumentType]
    assert nothing == SamplingParams()


def test_numpy_scalars_become_python_numbers():
    params = SamplingParams(temperature=np.float32(0.5), top_k=np.int64(5), seed=np.uint64(2**63))  # pyright: ignore[reportArgumentType]
    assert (type(params.temperature), type(params.top_k), type(params.seed)) == (float, int, int)
    assert params.seed == 2**63
    with pytest.raises(ValueError, match="n="):
        SamplingParams(n=np.bool_(True))  # pyright: ignore[reportArgumentType]


def test_params_are_frozen_keyword_only_and_hashable():
    params = SamplingParams(stop=["a"])
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.n = 2  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(TypeError):
        SamplingParams(1)  # pyright: ignore[reportCallIssue]
    assert hash(params) == hash(SamplingParams(stop=("a",)))


def test_replace_copies_and_checks_again():
    params = SamplingParams(temperature=0.5, stop=["a"], seed=3)
    changed = dataclasses.replace(params, temperature=0.0)
    assert changed.is_greedy and not params.is_greedy
    assert (changed.stop, changed.seed) == (("a",), 3)
    with pytest.raises(ValueError, match="temperature=9"):
        dataclasses.replace(params, temperature=9)


def test_children_count_the_seed_up():
    params = SamplingParams(n=3, seed=2**64 - 2, top_k=4)
    children = [params.child(index) for index in range(3)]
    assert [child.seed for child in children] == [2**64 - 2, 2**64 - 1, 0]
    assert all(child == dataclasses.replace(params, n=1, seed=child.seed) for child in children)
    assert SamplingParams(n=2).child(1).seed is None
    for index in (-1, 3):
        with pytest.raises(ValueError, match=rf"index={index} .* n=3"):
            params.child(index)


def test_no_jax_is_imported():
    code = "import sys, paged_jax.sampling_params; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
