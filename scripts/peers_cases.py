"""What bench_peers.py asks of every engine, as token ids, and the figures of the answers.

    batch           32 prompts of 128 random tokens, 64 output tokens each
    single          one such request alone; decode speed apart from the prompt's
    prefix          64 prompts of 512 tokens that share their first 448, 128 output tokens each
    lookup_summary  the summary of an article, which quotes it: decode speed
    lookup_edit     a class with one method renamed: decode speed

All greedy. Random prompts are fresh in every round, and the same for all engines; they run to their
full length (ignore_eos), the answers of `lookup_*` to their end or a limit. Where a prompt's own
time has to be told from decoding, the round has a second call for one output token: the difference
of the two is the time of the tokens after the first.
"""

import dataclasses
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

Figures = dict[str, float]


class Call(NamedTuple):
    """Prompts given to an engine at once."""

    prompts: list[list[int]]
    max_tokens: int
    ignore_eos: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One load.

    Attributes:
      num_prompts, prompt_tokens, output_tokens: its size.
      shared_tokens: how many the prompts have in common at their beginning.
      figure: the one that engines are compared by.
      base: the engine that the picture's ratios refer to.
      engines: those that it is meant for.
      text: for a prompt of words in the model's chat format; its token ids are in `prompt`.
    """

    name: str
    title: str
    num_prompts: int = 1
    prompt_tokens: int = 0
    shared_tokens: int = 0
    output_tokens: int
    figure: str
    base: str
    engines: tuple[str, ...]
    prompt: tuple[int, ...] = ()

    @property
    def max_model_len(self) -> int:
        """Room for its sequences, and for the prompt on which engines are checked."""
        return max(len(self.prompt) or self.prompt_tokens, 64) + self.output_tokens + 16

    @property
    def expected_hit_tokens(self) -> int:
        """Prompt tokens that all but the first sequence need not compute, in blocks of 16."""
        return (self.num_prompts - 1) * (self.shared_tokens // 16 * 16)

    def calls(self, round_number: int, vocab_size: int) -> list[Call]:
        """What an engine is asked in one round."""
        if self.prompt:
            prompts = [list(self.prompt)]
            return [Call(prompts, 1), Call(prompts, self.output_tokens, ignore_eos=False)]
        rng = random.Random(f"{self.name}/{round_number}")
        if self.figure == "decode_tokens_per_second":
            first, second = (self._random_prompts(rng, vocab_size) for _ in range(2))
            return [Call(first, 1), Call(second, self.output_tokens)]
        return [Call(self._random_prompts(rng, vocab_size), self.output_tokens)]

    def figures(self, replies: Sequence[dict[str, Any]]) -> Figures:
        """Rates and counts of one round, of the replies to `calls`."""
        *first, last = replies
        num_tokens = sum(map(len, last["token_ids"]))
        figures = {
            "output_tokens_per_second": num_tokens / last["seconds"],
            "output_tokens": num_tokens,
            "seconds": last["seconds"],
        }
        if first:
            prefill = first[0]["seconds"]
            rest = num_tokens - len(last["token_ids"])
            figures["prefill_seconds"] = prefill
            figures["decode_tokens_per_second"] = rest / max(last["seconds"] - prefill, 1e-9)
        if self.shared_tokens and "prefix_hit_tokens" in last:
            figures["prefix_hit_tokens"] = last["prefix_hit_tokens"]
        if last.get("draft_tokens"):
            figures["draft_tokens"] = last["draft_tokens"]
            figures["acceptance"] = last["accepted_tokens"] / last["draft_tokens"]
        return figures

    def _random_prompts(self, rng: random.Random, vocab_size: int) -> list[list[int]]:
        shared = [rng.randrange(vocab_size) for _ in range(self.shared_tokens)]
        own = self.prompt_tokens - self.shared_tokens
        return [
            shared + [rng.randrange(vocab_size) for _ in range(own)]
            for _ in range(self.num_prompts)
        ]


OURS = ("ours-float32", "ours-int8", "ours-int8-kv8", "ours-int4")
OURS_LOOKUP = (
    "ours-float32",
    "ours-float32-lookup",
    "ours-int8",
    "ours-int8-lookup",
    "ours-int4",
    "ours-int4-lookup",
)
CASES = {
    "batch": Case(
        name="batch",
        title="32 requests of 128 + 64 tokens",
        num_prompts=32,
        prompt_tokens=128,
        output_tokens=64,
        figure="output_tokens_per_second",
        base="vllm",
        engines=(*OURS, "vllm", "llama", "transformers"),
    ),
    "single": Case(
        name="single",
        title="one request, decoding",
        prompt_tokens=128,
        output_tokens=64,
        figure="decode_tokens_per_second",
        base="llama",
        engines=(*OURS, "vllm", "llama", "transformers"),
    ),
    "prefix": Case(
        name="prefix",
        title="64 requests of 512 + 128 tokens, 448 shared",
        num_prompts=64,
        prompt_tokens=512,
        shared_tokens=448,
        output_tokens=128,
        figure="output_tokens_per_second",
        base="llama",
        engines=(*OURS, "vllm", "llama", "llama-serial", "llama-shared"),
    ),
    "lookup_summary": Case(
        name="lookup_summary",
        title="a summary, decoding",
        output_tokens=128,  # Beyond it the demo model repeats itself.
        figure="decode_tokens_per_second",
        base="llama",
        engines=(*OURS_LOOKUP, "llama"),
    ),
    "lookup_edit": Case(
        name="lookup_edit",
        title="an edit of code, decoding",
        output_tokens=256,
        figure="decode_tokens_per_second",
        base="llama",
        engines=(*OURS_LOOKUP, "llama"),
    ),
}
# To see that all of it runs.
QUICK_SIZES: dict[str, dict[str, int]] = {
    "batch": dict(num_prompts=4, prompt_tokens=32, output_tokens=8),
    "single": dict(prompt_tokens=32, output_tokens=8),
    "prefix": dict(num_prompts=4, prompt_tokens=64, shared_tokens=48, output_tokens=8),
    "lookup_summary": dict(output_tokens=24),
    "lookup_edit": dict(output_tokens=24),
}


def warm_up_calls(case: Case, vocab_size: int) -> list[Call]:
    """Calls that touch what a round will: all its prompts up to 32, and a few decode steps."""
    return [
        call._replace(prompts=call.prompts[:32], max_tokens=min(call.max_tokens, 4))
        for call in case.calls(-1, vocab_size)
    ]
