"""What each figure of a run's table says, in a line for a reader who has never run a server."""

from __future__ import annotations

from collections.abc import Mapping

# By the labels of `report.run_rows`, without the spaces that they begin with.
EXPLANATIONS: Mapping[str, str] = {
    "requests served": "Requests that were answered to their last token.",
    "too long, or empty": "Requests turned away: longer than the limit, or without a token.",
    "tokens of a prompt, on average": "How long the question is; a token is about four letters.",
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
    "while others wait": "The same, over the steps when more wanted to run: what the device can "
    "hold.",
    "requests waiting, on average": "How many had come and were not yet let in, as far as the "
    "device looks down its queue.",
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
    "prompt tokens found in the cache": "Share of prompts that another request had computed "
    "before, so that it was not computed again.",
    "seconds to the first token, p50": "From arrival to the first answer token: half of the "
    "requests waited at most this long.",
    "seconds from token to token, p50": "From one answer token to the next: half of them came "
    "within this time.",
    "seconds a request, p50": "From arrival to the last token: half of the requests took at most "
    "this long.",
    "p90": "Nine of ten, at most.",
    "p99": "Ninety-nine of a hundred, at most.",
}


def explain(label: str) -> str:
    """The line on a row's label.

    Raises:
      KeyError: there is none.
    """
    return EXPLANATIONS[label.strip()]
