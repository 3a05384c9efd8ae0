"""What a run's figures say, in words for a reader who has never run a server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# By the labels of `report.run_rows`, without the spaces that they begin with.
EXPLANATIONS: Mapping[str, str] = {
    "requests served": "Requests that were answered to their last token.",
    "too long, or empty": "Requests turned away: longer than the limit, or without a token.",
    "tokens of a prompt, on average": "How long what is sent is: the question, and all that comes "
    "with it; a token is about four letters.",
    "tokens of an output": "How long the answer is, on average.",
    "simulated hours": "From the first arrival to the last answered token, on the devices' clock.",
    "time in steps, of all time": "How much of that time the devices computed; the rest they had "
    "nothing to do.",
    "steps": "A step gives each running request one more token, or reads a piece of its prompt.",
    "requests a second": "Requests answered a second, by all devices together.",
    "output tokens a second": "Answer tokens a second, by all devices together.",
    "cost a million output tokens": "The devices' price for the whole time, idle time too, for "
    "each million answer tokens.",
    "requests at once on a device, most": "The most requests that shared a device's steps.",
    "on average": "The same, averaged over the time in steps.",
    "while others wait": "The same, over the steps that left some waiting: for memory, or because "
    "the step was full of other prompts.",
    "requests waiting, on average": "How many had come to a device and were not yet let in, as far "
    "as it looks down its queue.",
    "memory that holds tokens": "Share of the KV memory that holds what some request has read or "
    "written: the useful part.",
    "reserved for later tokens": "Set aside for tokens that will come: useful later, empty now.",
    "never used (internal)": "Set aside for a request that will never need it.",
    "free": "Given to nobody.",
    "while a gap was missing (external)": "Free, but in pieces too small for the next in line, "
    "which the total would have fitted.",
    "slots unused, a request": "Tokens of room set aside and never used, for each running request.",
    "preemptions": "How often a running request had to give its memory back, because it ran out.",
    "tokens computed again": "Work done twice, because a preempted request lost what it had.",
    "tokens swapped out": "Tokens of preempted requests that were kept in host memory instead.",
    "prompt tokens found in the cache": "Share of all prompts that the device had computed for an "
    "earlier request and still held, so that it was not computed again.",
    "seconds to the first token, p50": "From arrival to the first answer token: half of the "
    "requests waited at most this long.",
    "milliseconds from token to token, p50": "From one answer token to the next: half of them came "
    "within this time.",
    "seconds a request, p50": "From arrival to the last token: half of the requests took at most "
    "this long.",
    "p90": "Nine of ten, at most.",
    "p99": "Ninety-nine of a hundred, at most.",
}

ALLOCATOR_WORDS: Mapping[str, str] = {
    "paged": "memory in blocks, which a request takes as it grows",
    "reserve_max": "each request reserves as much as the longest one allowed needs, in one piece",
    "oracle": "each request reserves just what it will need, in one piece, as if that were known",
}
# Less than this share of the steps with a queue, or of the time without work, is not worth a word.
_SLIGHT = 0.05


def verdict(run: Mapping[str, Any]) -> str:
    """A sentence or two on what was short in a run, of `Results.figures`."""
    queued, free = run["steps_with_queue"] / max(run["num_steps"], 1), run["mean"]["free"]
    if run["num_preemptions"]:
        again = run["recomputed"] / max(run["computed"], 1)
        return (
            f"Memory was short: {run['num_preemptions']:,} times a request had to give its place "
            f"to another, and {100 * again:.1f}% of all tokens were computed twice."
        )
    if queued > _SLIGHT:
        meanwhile = run["mean_while_queued"]
        if meanwhile["external"] > meanwhile["free"] / 4 > 0:
            return (
                f"Memory was short: requests waited in {100 * queued:.0f}% of the steps, though "
                f"{100 * meanwhile['free']:.0f}% of it was free then, in pieces that were often "
                "too small."
            )
        if meanwhile["free"] < 0.15:
            return f"Memory was short: requests waited for it in {100 * queued:.0f}% of the steps."
        return (
            f"Requests waited in {100 * queued:.0f}% of the steps, though "
            f"{100 * meanwhile['free']:.0f}% of the memory was free then: the steps were full of "
            "other prompts, or as many requests ran as may."
        )
    idle = 1 - run["busy_share"]
    if idle > _SLIGHT:
        return (
            f"Nothing was short: the devices had nothing to do for {100 * idle:.0f}% of the time, "
            f"and while they computed, {100 * (1 - free):.1f}% of the KV memory was in use. Fewer "
            "might do; scripts/simulate.py --scenario=size tells how many."
        )
    return (
        f"The devices computed all of the time, with {100 * (1 - free):.0f}% of the KV memory in "
        "use, and hardly anybody waited to be let in."
    )


def explain(label: str) -> str:
    """The line on a row's label.

    Raises:
      KeyError: there is none.
    """
    return EXPLANATIONS[label.strip()]
