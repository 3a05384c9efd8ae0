import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paged_jax.prefix_cache import hash_block
from paged_jax.prefix_journal import PrefixJournal, PrefixMiss, num_common_tokens

BLOCK = 4


def hashes_of(token_ids, extra_keys=None):
    hashes = []
    for i in range(0, len(token_ids) - BLOCK + 1, BLOCK):
        parent = hashes[-1] if hashes else None
        hashes.append(hash_block(parent, token_ids[i : i + BLOCK], extra_keys))
    return hashes


def explain(
    journal: PrefixJournal, request_id, token_ids, num_hit_blocks: int | None = 0, keys=None
):
    hashes = hashes_of(token_ids, keys)
    return journal.explain(request_id, token_ids, keys, hashes, num_hit_blocks)


def journal_of(*prompts, **bounds) -> PrefixJournal:
    """A journal of prompts "0", "1" and so on, that hit nothing."""
    journal = PrefixJournal(BLOCK, **bounds)
    for i, tokens in enumerate(prompts):
        journal.record_prompt(str(i), tokens, None, 0)
    return journal


def test_a_prompt_that_parts_from_the_nearest_in_the_missed_block():
    prompt = list(range(20))
    nearest = [*range(9), 70, 71, 72]
    journal = journal_of(list(range(5)), nearest, [50, 51])
    miss = explain(journal, "mine", prompt, num_hit_blocks=2)
    assert miss == PrefixMiss(
        request_id="mine",
        reason="never_cached",
        block_size=BLOCK,
        num_prompt_tokens=20,
        num_hit_tokens=8,
        first_missed_block=2,
        nearest_request_id="1",
        num_common_tokens=9,
        first_different_token=9,
        token_id=9,
        nearest_token_id=70,
        common_token_ids=tuple(range(1, 9)),
        our_token_ids=tuple(range(9, 17)),
        nearest_token_ids=(70, 71, 72),
    )
    text = str(miss)
    assert "'mine' hit 8 of its 20 prompt tokens" in text
    assert "block 2 (tokens 8 to 11)" in text
    assert "they part at token 9 (block 2): 9 here, 70 there" in text
    assert "move it behind" in text
    decoded = miss.describe(lambda ids: "/".join(map(str, ids)))
    assert "After '1/2/3/4/5/6/7/8' comes '9/10/11/12/13/14/15/16' here, '70/71/72'" in decoded


def test_all_that_could_be_hit_was():
    prompt = list(range(12))
    journal = journal_of(prompt)
    # Three blocks are full, but the last token is always computed.
    miss = explain(journal, "mine", prompt, num_hit_blocks=2)
    assert (miss.reason, miss.num_hit_tokens, miss.first_missed_block) == ("hit", 8, None)
    assert (miss.num_common_tokens, miss.first_different_token) == (12, None)
    assert "all that can be hit" in str(miss)


@pytest.mark.parametrize("num_tokens, reason", [(0, "too_short"), (4, "too_short"), (5, "evicted")])
def test_too_short_is_less_than_a_block_before_the_last_token(num_tokens, reason):
    prompt = list(range(num_tokens))
    journal = journal_of(prompt)
    journal.record_evicted(hashes_of(range(BLOCK))[0])
    miss = explain(journal, "mine", prompt)
    assert miss.reason == reason
    assert ("Only full blocks of 4 tokens" in str(miss)) == (reason == "too_short")


def test_caching_disabled():
    prompt = list(range(12))
    journal = journal_of(prompt)
    miss = journal.explain("mine", prompt, None, [], caching_enabled=False)
    assert (miss.reason, miss.num_hit_tokens) == ("caching_disabled", 0)
    assert "prefix caching is off" in str(miss)


def test_evicted_and_stored_again():
    prompt = list(range(12))
    journal = journal_of(prompt)
    second = hashes_of(prompt)[1]
    journal.record_evicted(second)
    miss = explain(journal, "mine", prompt, num_hit_blocks=1)
    assert (miss.reason, miss.first_missed_block, miss.num_common_tokens) == ("evicted", 1, 12)
    assert "Block 1 (tokens 4 to 7) was cached, and evicted" in str(miss)
    journal.forget_evicted(second)
    journal.forget_evicted(second)
    miss = explain(journal, "mine", prompt, num_hit_blocks=1)
    assert miss.reason == "never_cached"
    assert "asked at the same moment" in str(miss)
    assert "move it" not in str(miss)


def test_an_eviction_is_known_without_a_prompt_that_covers_the_block():
    # The turn before ended at token 6; the evicted block is of its output.
    prompt = list(range(16))
    journal = journal_of(prompt[:6])
    journal.record_evicted(hashes_of(prompt)[2])
    miss = explain(journal, "mine", prompt, num_hit_blocks=2)
    assert (miss.reason, miss.num_common_tokens) == ("evicted", 6)
    assert (miss.first_different_token, miss.token_id, miss.nearest_token_id) == (6, 6, None)
    assert "begins with the same 6 tokens and ends there" in str(miss)


def test_an_eviction_is_remembered_after_the_request_has_stored_the_block_anew():
    prompt = list(range(12))
    first = hashes_of(prompt)[0]
    journal = journal_of(prompt)
    journal.record_evicted(first)
    journal.record_prompt("mine", prompt, None, 0, missed_hash=first)
    journal.forget_evicted(first)
    journal.record_prompt("later", prompt, None, 8)
    assert explain(journal, "mine", prompt, None).reason == "evicted"
    # The same if the step that admits it stores the block before the prompt is recorded.
    again = [*prompt, 30]
    journal.record_evicted(first)
    journal.forget_evicted(first)
    journal.record_prompt("again", again, None, 0, missed_hash=first)
    assert explain(journal, "again", again, None).reason == "evicted"
    assert explain(journal, "new", again).reason == "never_cached"
    # And the other way round: it was there when it was asked for, and evicted since.
    journal.record_prompt("other", [*prompt[:8], 90, 91, 92, 93, 94], None, 8, missed_hash=b"other")
    journal.record_evicted(b"other")
    other = [*prompt[:8], 90, 91, 92, 93, 94]
    assert explain(journal, "other", other, None).reason == "never_cached"


def test_cleared():
    prompt = list(range(12))
    journal = journal_of(prompt)
    journal.record_evicted(hashes_of(prompt)[0])
    journal.record_cleared()
    miss = explain(journal, "mine", prompt)
    assert miss.reason == "cleared"
    assert "before the prefix cache was reset" in str(miss)
    # Asked for again after the reset: the reset no longer explains a miss of a later request.
    journal.record_prompt("mine", prompt, None, 0, missed_hash=hashes_of(prompt)[0])
    assert explain(journal, "later", prompt).reason == "never_cached"
    # A later reset changes nothing of what happened to this one before.
    journal.record_cleared()
    assert explain(journal, "mine", prompt).reason == "cleared"
    assert explain(journal, "later", prompt).reason == "cleared"


def test_a_reset_after_two_requests_does_not_explain_the_second():
    prompt = list(range(12))
    journal = journal_of(prompt, prompt)
    journal.record_cleared()
    assert explain(journal, "1", prompt).reason == "never_cached"
    assert explain(journal, "mine", prompt).reason == "cleared"


def test_other_extra_keys():
    prompt = list(range(12))
    journal = PrefixJournal(BLOCK)
    journal.record_prompt("lora", prompt, ("adapter", None), 0)
    journal.record_prompt("short", prompt[:3], (), 0)
    miss = explain(journal, "mine", prompt)
    assert (miss.reason, miss.nearest_request_id) == ("other_extra_keys", "lora")
    assert miss.nearest_extra_keys == ("adapter", None) and miss.extra_keys is None
    assert "None here, ('adapter', None) there" in str(miss)
    assert explain(journal, "mine", prompt, keys=("adapter", None)).reason == "never_cached"
    # To cover a block is to have all of its tokens, and no more is needed.
    for num_tokens, reason in ((7, "never_cached"), (8, "other_extra_keys")):
        salted = PrefixJournal(BLOCK)
        salted.record_prompt("salted", prompt[:num_tokens], ("salt",), 0)
        assert explain(salted, "mine", prompt, num_hit_blocks=1).reason == reason
    # Of two that are equally near, the one with equal keys is named; and () is the same as None.
    journal.record_prompt("plain", prompt, (), 0)
    journal.record_prompt("salted", prompt, ("salt",), 0)
    miss = explain(journal, "mine", prompt)
    assert (miss.reason, miss.nearest_request_id) == ("never_cached", "plain")


def test_a_request_on_record_is_compared_with_earlier_ones_only():
    prompt = list(range(12))
    journal = journal_of([0, 1, 2], prompt, prompt)
    miss = explain(journal, "1", prompt)
    assert (miss.nearest_request_id, miss.num_common_tokens) == ("0", 3)
    assert explain(journal, "2", prompt).nearest_request_id == "1"
    assert explain(journal, "new", prompt).nearest_request_id == "2"
    # An id that comes again is the newest of them.
    journal.record_prompt("1", prompt, None, 8)
    assert explain(journal, "1", prompt, None).num_hit_tokens == 8
    assert explain(journal, "1", prompt, None).nearest_request_id == "2"


def test_the_first_prompt_and_one_that_shares_nothing():
    journal = PrefixJournal(BLOCK)
    miss = explain(journal, "mine", list(range(12)))
    assert (miss.reason, miss.nearest_request_id) == ("never_cached", None)
    assert miss.first_different_token is None
    assert "No earlier prompt is on record" in str(miss)
    journal.record_prompt("0", [99, 1, 2], None, 0)
    miss = explain(journal, "mine", list(range(12)))
    assert (miss.num_common_tokens, miss.first_different_token) == (0, 0)
    assert "has another first token" in str(miss) and "move it" not in str(miss)


def test_bounds():
    journal = journal_of([1, 1], [2, 2], [3, 3], max_prompts=2)
    assert (len(journal), journal.num_tokens) == (2, 4)
    assert explain(journal, "mine", [1, 1, 5, 5, 5]).num_common_tokens == 0
    journal = journal_of([1] * 6, [2] * 3, [3] * 4, max_tokens=8)
    assert (len(journal), journal.num_tokens) == (2, 7)
    journal.record_prompt("long", list(range(100)), None, 0)
    assert (len(journal), journal.num_tokens) == (1, 8)
    assert explain(journal, "mine", list(range(100))).num_common_tokens == 8

    journal = journal_of(list(range(12)), max_evicted=2)
    hashes = hashes_of(range(12))
    for block_hash in (hashes[0], b"a", hashes[0], b"b"):
        journal.record_evicted(block_hash)
    assert explain(journal, "mine", list(range(12))).reason == "evicted"
    journal.record_evicted(b"c")
    assert explain(journal, "mine", list(range(12))).reason == "never_cached"


def test_what_is_recorded_is_a_copy():
    prompt, as_array = list(range(12)), np.arange(12, dtype=np.int32)
    journal = PrefixJournal(BLOCK)
    journal.record_prompt("0", prompt, None, 0)
    journal.record_prompt("1", as_array, None, 0)
    prompt[0] = as_array[0] = 77
    assert explain(journal, "mine", list(range(12))).nearest_request_id == "1"
    assert explain(journal, "mine", list(range(12))).num_common_tokens == 12


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match="max_prompts=0"):
        PrefixJournal(BLOCK, max_prompts=0)
    journal = PrefixJournal(BLOCK)
    with pytest.raises(ValueError, match="'mine' is not on record"):
        explain(journal, "mine", list(range(12)), None)
    with pytest.raises(ValueError, match="block_hashes has 1 hashes"):
        journal.explain("mine", list(range(12)), None, [b"x"], 1)


tokens_lists = st.lists(st.integers(0, 1), max_size=14)


@given(st.lists(tokens_lists, max_size=5), tokens_lists, st.integers(0, 3))
@settings(max_examples=200, deadline=None)
def test_against_a_plain_model(prompts, mine, num_hit_blocks):
    """Nearest, parting point and reason, as loops over the lists say."""

    def common(theirs):
        pairs = itertools.takewhile(lambda p: p[0] == p[1], zip(mine, theirs, strict=False))
        return len(list(pairs))

    for theirs in prompts:
        pair = np.array(mine, np.int32), np.array(theirs, np.int32)
        assert num_common_tokens(*pair) == common(theirs)
    miss = explain(journal_of(*prompts), "mine", mine, num_hit_blocks)
    if len(mine) <= BLOCK:
        assert miss.reason == "too_short"
    elif num_hit_blocks >= (len(mine) - 1) // BLOCK:
        assert miss.reason == "hit"
    else:
        longest = max(map(common, prompts), default=0)
        assert (miss.reason, miss.num_common_tokens) == ("never_cached", longest)
        covered = longest >= (num_hit_blocks + 1) * BLOCK
        assert ("holds the same tokens" in str(miss)) == covered
        if prompts:
            assert miss.first_different_token == (longest if longest < len(mine) else None)
            nearest = prompts[int(miss.nearest_request_id or "")]
            expected = nearest[longest] if longest < min(len(mine), len(nearest)) else None
            assert miss.nearest_token_id == expected


@pytest.mark.parametrize("num_tokens", [63, 64, 65, 200])
def test_common_tokens_of_long_prompts(num_tokens):
    ours = np.arange(num_tokens, dtype=np.int32)
    assert num_common_tokens(ours, ours[:-1]) == num_tokens - 1
    for place in range(num_tokens):
        theirs = ours.copy()
        theirs[place:] += 1
        assert num_common_tokens(ours, theirs) == place
