import itertools
import random
import time
import uuid

import numpy as np
import pytest

from paged_jax.prefix_watch import (
    Difference,
    PrefixWatch,
    TemplateWarning,
    find_anchors,
    find_difference,
    fingerprint,
)

BLOCK = 16
NOUNS = (
    "account address answer balance branch budget carrier catalogue charge client contract courier "
    "customer deadline delivery deposit discount dispatch document email engineer estimate invoice "
    "label ledger letter licence locker manager manual meeting merchant message notice number "
    "office order package parcel partner payment permit policy price product profile purchase "
    "question receipt record refund region reply report request return review schedule seller "
    "service shelf shipment station stock supplier support survey tariff team ticket tracker "
    "transfer truck update voucher warehouse warranty window worker"
).split()
VERBS = "approves checks closes finds loses moves needs opens prints reads returns sends".split()
ADJECTIVES = "blue broken cheap early empty heavy late local new old open paid small".split()


def english(rng: random.Random, num_bytes: int) -> str:
    """Made-up sentences of a small vocabulary, so that chance agreements are frequent."""
    text = ""
    while len(text) < num_bytes:
        adjective, verb = rng.choice(ADJECTIVES), rng.choice(VERBS)
        text += f"The {adjective} {rng.choice(NOUNS)} {verb} the {rng.choice(NOUNS)}. "
    return text[:num_bytes]


def tokens_of(text: str) -> list[int]:
    return list(text.encode())


class Cache:
    """An endless prefix cache: what a prompt hits of all before it."""

    def __init__(self):
        self.blocks = set()

    def hit_and_store(self, tokens) -> int:
        num_hit, chain, hitting = 0, 0, True
        for end in range(BLOCK, len(tokens) + 1, BLOCK):
            chain = hash((chain, tuple(tokens[end - BLOCK : end])))
            hitting = hitting and chain in self.blocks and end < len(tokens)
            num_hit = end if hitting else num_hit
            self.blocks.add(chain)
        return num_hit


def watch_all(prompts, watch=None) -> list[tuple[int, TemplateWarning]]:
    """The warnings, each with the number of prompts that were observed by then."""
    watch, cache = watch or PrefixWatch(BLOCK), Cache()
    warnings = []
    for i, tokens in enumerate(prompts):
        warning = watch.observe(tokens, cache.hit_and_store(tokens))
        if warning is not None:
            warnings.append((i + 1, warning))
    return warnings


class Words:
    """A tokenizer of whole words, so that a UUID has a varying number of tokens."""

    def __init__(self):
        self.ids: dict[str, int] = {}

    def encode(self, text: str) -> list[int]:
        # A UUID's groups break between digits and letters, as in trained vocabularies.
        pieces, last = [""], ""
        for char in text:
            kind = "d" if char.isdigit() else "a" if char.isalpha() else char
            if kind != last:
                pieces.append("")
            pieces[-1] += char
            last = kind
        return [self.ids.setdefault(piece, len(self.ids)) for piece in pieces if piece]


def uuid_story(rng: random.Random, encode, num_prompts: int, *, share: float, system_bytes: int):
    """Prompts of two services, each with its system prompt; one of them has a UUID early on."""
    head = "You are the assistant of a parcel service. Session "
    bad, good = english(rng, system_bytes), english(rng, system_bytes)
    for _ in range(num_prompts):
        question = english(rng, rng.randint(60, 400))
        if rng.random() < share:
            session = uuid.UUID(int=rng.getrandbits(128))
            yield encode(f"{head}{session}. {bad} Question: {question}")
        else:
            yield encode(f"You answer questions about orders. {good} Question: {question}")


@pytest.mark.parametrize("seed", range(4))
def test_the_uuid_that_cost_40_percent_of_the_hits(seed):
    rng, words = random.Random(seed), Words()
    # About 1,500 tokens; the UUID stands at token 19.
    place = len(words.encode("You are the assistant of a parcel service. Session "))
    assert place == 19
    story = uuid_story(rng, words.encode, 120, share=0.4, system_bytes=4000)
    prompts = list(story)
    warnings = watch_all(prompts)
    num_seen, warning = warnings[0]
    assert num_seen <= 40
    assert abs(warning.first_different_token - place) <= 1
    assert 9 <= warning.num_different_tokens <= 26
    assert warning.num_prompts >= 8
    assert 0.2 <= warning.lost_share <= 0.6
    assert 1300 <= warning.num_lost_tokens / (warning.num_prompts - 1) <= 1600
    # Told again only when the losses have doubled.
    lost = [warning.num_lost_tokens for _, warning in warnings]
    assert 2 <= len(lost) <= 5 and all(b >= 2 * a for a, b in itertools.pairwise(lost))
    names = {i: name for name, i in words.ids.items()}
    text = warning.describe(lambda ids: "".join(names[i] for i in ids))
    assert "Move what differs" in text and f"at token {place} " in text
    assert 3 <= text.count("-") <= 4  # the UUID is shown, or all of it but a digit


@pytest.mark.parametrize("seed", range(4))
def test_the_uuid_story_in_bytes(seed):
    rng = random.Random(seed)
    prompts = list(uuid_story(rng, tokens_of, 100, share=0.4, system_bytes=1500))
    warning = watch_all(prompts)[0][1]
    assert warning.first_different_token == len(
        "You are the assistant of a parcel service. Session "
    )
    assert 34 <= warning.num_different_tokens <= 36
    uuid_in_example = bytes(warning.example_token_ids).decode()
    assert uuid_in_example.count("-") == 4
    assert str(list(warning.example_token_ids)) in str(warning)


@pytest.mark.parametrize("seed", range(4))
def test_the_healthy_part_of_that_traffic_is_quiet(seed):
    rng = random.Random(seed)
    prompts = list(uuid_story(rng, tokens_of, 150, share=0.0, system_bytes=1500))
    assert watch_all(prompts) == []


def test_two_places_that_differ_of_varying_length():
    rng = random.Random(0)
    first, second = english(rng, 200), english(rng, 1200)
    prompts = []
    for i in range(30):
        name, minutes = english(rng, rng.randint(5, 30)), 7 * i
        hour = f"{minutes // 60}:{minutes % 60}"
        prompts.append(
            tokens_of(f"Hello {name}! {first} It is {hour} now. {second} {english(rng, 100)}")
        )
    (_, warning), *_ = watch_all(prompts)
    assert warning.first_different_token in (6, 7, 8, 9, 10)  # some names begin alike
    assert 1300 <= warning.num_lost_tokens / (warning.num_prompts - 1) <= 1450


def test_two_templates_are_told_apart():
    rng = random.Random(0)
    systems = [english(rng, 1500), english(rng, 1500)]
    prompts = [
        tokens_of(f"{'Service ' * i}{rng.getrandbits(64):x} {systems[i]} {english(rng, 100)}")
        for _ in range(20)
        for i in (0, 1)
    ]
    places = {warning.first_different_token for _, warning in watch_all(prompts)}
    assert places == {0, 8}


def test_few_prompts_or_a_small_share_are_no_cause():
    rng = random.Random(0)
    prompts = list(uuid_story(rng, tokens_of, 7, share=1.0, system_bytes=1500))
    assert watch_all(prompts) == []
    assert watch_all(prompts, PrefixWatch(BLOCK, min_prompts=7)) != []
    # One prompt in ten, over many.
    prompts = list(uuid_story(rng, tokens_of, 300, share=0.1, system_bytes=1500))
    assert watch_all(prompts, PrefixWatch(BLOCK, min_lost_share=0.2)) == []
    assert watch_all(prompts, PrefixWatch(BLOCK, min_lost_share=0.05)) != []


def healthy_traffic(kind: str, rng: random.Random):
    system = english(rng, 1500)
    match kind:
        case "distinct prompts":
            return [english(rng, rng.randint(50, 3000)) for _ in range(150)]
        case "short prompts in a chat template":
            return [
                f"<s>system: Be brief and polite.</s><s>user: {english(rng, rng.randint(20, 300))}"
                "</s><s>assistant: "
                for _ in range(150)
            ]
        case "long questions behind a system prompt":
            return [system + english(rng, rng.randint(2000, 5000)) for _ in range(100)]
        case "long documents, a common last line":
            return [english(rng, 2000) + "\nSummarise this text in a line." for _ in range(100)]
        case "growing chats":
            chats = [system] * 12
            prompts = []
            for _ in range(12):
                for i in range(len(chats)):
                    chats[i] += f"user: {english(rng, 100)} assistant: "
                    prompts.append(chats[i])
                    chats[i] += english(rng, 300)
            return prompts
        case "chats that forget their oldest turns":
            turns = [f"user: {english(rng, 100)} assistant: {english(rng, 200)}" for _ in range(60)]
            return [system + "".join(turns[max(0, i - 10) : i]) for i in range(1, 60)]
        case "few-shot examples in another order":
            shots = [f"Q: {english(rng, 200)} A: {english(rng, 150)}\n" for _ in range(8)]
            return [
                "".join(rng.sample(shots, 8)) + f"Q: {english(rng, 200)} A:" for _ in range(100)
            ]
        case "documents found for a question":
            documents = [english(rng, 800) for _ in range(12)]
            return [
                system + "".join(rng.sample(documents, 3)) + english(rng, 100) for _ in range(150)
            ]
        case "one prompt again and again":
            return [system] * 100
    raise AssertionError(kind)


KINDS = [
    "distinct prompts",
    "short prompts in a chat template",
    "long questions behind a system prompt",
    "long documents, a common last line",
    "growing chats",
    "chats that forget their oldest turns",
    "few-shot examples in another order",
    "documents found for a question",
    "one prompt again and again",
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(2))
def test_ordinary_traffic_is_quiet(kind, seed):
    prompts = [tokens_of(text) for text in healthy_traffic(kind, random.Random(seed))]
    assert watch_all(prompts) == []


@pytest.mark.parametrize("kind", ["growing chats", "one prompt again and again"])
def test_prompts_that_an_overfull_cache_never_hits_are_no_template(kind):
    watch = PrefixWatch(BLOCK)
    for text in healthy_traffic(kind, random.Random(0)):
        assert watch.observe(tokens_of(text), 0) is None


def test_random_and_repeated_tokens_are_quiet():
    rng = np.random.default_rng(0)
    watch = PrefixWatch(BLOCK)
    for i in range(50):
        assert watch.observe(rng.integers(0, 128_000, 1000).astype(np.int32), 0) is None
        assert watch.observe([7] * (900 + i), 0) is None
        assert watch.observe([i, *[8, 9] * 500], 0) is None
        assert watch.observe([], 0) is None


def test_memory_is_bounded():
    rng = np.random.default_rng(0)
    watch = PrefixWatch(BLOCK, num_recent_prompts=20, num_kept_prompts=4)
    system = rng.integers(0, 999, 20_000)
    for i in range(200):
        watch.observe([i, *rng.integers(0, 999, 5), *system], 0)
        watch.observe(rng.integers(0, 999, 2000), 0)
    assert len(watch._kept) == 4 and len(watch._recent) == 20 and len(watch._templates) <= 64
    assert sum(len(prompt.token_ids) for prompt in watch._kept.values()) <= 4 * 8192
    assert set(watch._latest_with) == {a for p in watch._kept.values() for a in p.anchors}
    assert watch._num_recent_tokens == sum(num_tokens for num_tokens, _, _ in watch._recent)
    for template in watch._templates.values():
        lost = sum(num_lost for _, other, num_lost in watch._recent if other is template)
        assert template.num_recent_lost_tokens == lost


def test_anchors_depend_on_content_alone():
    tokens = np.random.default_rng(0).integers(0, 128_000, 8000).astype(np.int32)
    anchors = find_anchors(tokens)
    assert 8000 / 16 * 0.8 < len(anchors) < 8000 / 16 * 1.2
    shifted = find_anchors(tokens[1003:], first_position=1003)
    assert shifted == {a: p for a, p in anchors.items() if p >= 1003}
    assert list(shifted.values()) == sorted(shifted.values())
    twice = find_anchors(np.concatenate([tokens, tokens]))
    assert {a: twice[a] for a in anchors} == anchors
    changed = tokens.copy()
    changed[4000] += 1
    gone = set(anchors.values()) ^ set(find_anchors(changed).values())
    assert all(4000 - 15 <= position <= 4000 for position in gone)
    assert find_anchors(tokens[:15]) == {}


def pieces(*sizes, seed=0):
    """Runs of random tokens, all of them distinct."""
    rng = np.random.default_rng(seed)
    tokens = rng.choice(128_000, sum(sizes), replace=False).astype(np.int32)
    return np.split(tokens, np.cumsum(sizes)[:-1])


def difference(ours, theirs, num_hit_tokens=0) -> Difference | None:
    ours, theirs = np.concatenate(ours), np.concatenate(theirs)
    return find_difference(fingerprint(ours, num_hit_tokens), fingerprint(theirs, 0))


def summary(found: Difference | None):
    return found and (found.start, found.stop, found.num_equal_tokens)


@pytest.mark.parametrize("seed", range(10))
def test_difference(seed):
    head, a, b, x, y, z, long, end = pieces(20, 300, 300, 10, 25, 1, 130, 200, seed=seed)
    assert summary(difference([head, x, a, end], [head, y, a, long])) == (20, 30, 300)
    assert summary(difference([head, x, a], [head, y, a], 16)) == (20, 30, 300)
    assert summary(difference([x, a], [z, a])) == (0, 10, 300)
    # Two differing stretches, both of another length; and what is too long to be a mere detail.
    found = difference([head, x, a, z, b], [head, y, a, x, b])
    assert summary(found) == (20, 30, 600)
    assert summary(difference([head, x, a, long, b], [head, y, a, z, b])) == (20, 30, 300)
    assert summary(difference([head, x, a, z, b], [head, y, a, long, b])) == (20, 30, 300)
    assert difference([head, long, a], [head, z, a]) is None
    assert difference([head, z, a], [head, long, a]) is None
    # The landmark is the template's, not the pair's.
    assert found and found == difference([head, x, a, y, b], [head, z, a, x, b])
    # Left out on one side, another order, nothing equal, equal to the end.
    assert difference([head, a], [head, x, a]) is None
    assert difference([head, x, a], [head, a]) is None
    assert difference([head, a, b], [head, b, a]) is None
    assert difference([head, a], [head, b]) is None
    assert difference([head, a], [head, a]) is None
    assert difference([head, a, x], [head, a]) is None


def test_a_short_equal_stretch_counts_as_different():
    for seed in range(1000):
        head, a, x, y, v, w, short = pieces(20, 300, 10, 25, 3, 4, 24, seed=seed)
        if len(find_anchors(short)) >= 2:
            break
    else:
        raise AssertionError("no stretch of 24 tokens has two anchors")
    found = difference([head, x, short, v, a], [head, y, short, w, a])
    assert summary(found) == (20, 20 + 10 + 24 + 3, 300)


def test_a_hit_that_goes_on_behind_the_difference_is_no_loss():
    rng = np.random.default_rng(0)
    (system,) = pieces(1000)
    prompts = [np.concatenate([rng.integers(0, 999, 5), system]) for _ in range(20)]
    watch = PrefixWatch(BLOCK)
    assert all(watch.observe(prompt, 320) is None for prompt in prompts)
    assert any(watch.observe(prompt, 0) is not None for prompt in prompts)


def test_short_templates_are_not_worth_a_warning():
    rng = np.random.default_rng(0)
    for num_tokens, warned in ((62, False), (70, True)):
        (system,) = pieces(num_tokens, seed=3)
        watch = PrefixWatch(BLOCK)
        prompts = [np.concatenate([rng.integers(0, 999, 5), system]) for _ in range(20)]
        assert any(watch.observe(prompt, 0) is not None for prompt in prompts) == warned


def test_a_good_hit_is_nearly_free():
    tokens = list(range(4000))
    watch = PrefixWatch(BLOCK)
    start = time.perf_counter()
    for _ in range(1000):
        watch.observe(tokens, 3984)
    # About a microsecond; the bound leaves room for a busy machine.
    assert (time.perf_counter() - start) / 1000 < 50e-6


@pytest.mark.parametrize(
    "options, message",
    [
        ({"block_size": 0}, "block_size=0"),
        ({"min_prompts": 1}, "min_prompts=1"),
        ({"min_lost_share": 20}, "min_lost_share=20"),
        ({"num_recent_prompts": 4}, "num_recent_prompts=4"),
        ({"num_kept_prompts": 0}, "num_kept_prompts=0"),
    ],
)
def test_bad_arguments_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        PrefixWatch(**{"block_size": BLOCK, **options})
