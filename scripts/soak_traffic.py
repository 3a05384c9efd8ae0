"""Who asks for what, and when: waves of long requests by day, a trickle at all hours.

A day begins at midnight. From `first_hour` to `last_hour` a wave comes every `wave_minutes`: so
many sequences that every seat of the device is taken, all within `wave_seconds`. Beside the waves
single requests trickle in, by a Poisson process whose rate follows the hour, nothing at midnight
and the most at noon. Everything follows from the seed and the number of the device.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
import random
from collections.abc import Iterator

import numpy as np

DAY_SECONDS = 86_400
SYSTEM_PROMPTS = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrafficOptions:
    """The rhythm, and the shares of what is out of the ordinary; lengths in tokens.

    Attributes:
      wave_sequences: sequences a device is asked for in a wave.
      trickle_per_hour: single requests an hour and device, at noon.
      request_tokens: prompt and output together; a session has as many after its last turn.
      system_tokens: of a system prompt, one of three.
      shared_share: prompts that begin with a system prompt.
      fork_share: requests for four samples.
      session_share: conversations, whose sequence is held between the turns.
      retry_share: requests that are sent twice, to the very token.
      abort_share, abort_within_seconds: requests whose client goes away, and how soon.
      urgent_share, background_share: priorities of -1 and 1.
    """

    hours: float = 48.0
    first_hour: float = 7.0
    last_hour: float = 22.0
    wave_minutes: float = 60.0
    wave_sequences: int = 148
    wave_seconds: float = 10.0
    trickle_per_hour: float = 6.0
    request_tokens: int = 2000
    output_tokens: int = 390
    system_tokens: int = 512
    vocab_size: int = 128_256
    shared_share: float = 0.2
    fork_share: float = 0.01
    session_share: float = 0.01
    num_turns: int = 3
    retry_share: float = 0.01
    abort_share: float = 0.02
    abort_within_seconds: float = 40.0
    urgent_share: float = 0.05
    background_share: float = 0.1


@dataclasses.dataclass(frozen=True, slots=True)
class Arrival:
    """A user's request.

    Attributes:
      seconds: when it comes.
      prompt: its token ids.
      output_tokens: how many it samples; a turn of a session samples as many.
      num_samples: sequences that fork from the prompt.
      turns: tokens that the user adds before each further turn; empty for no session.
      think_seconds: from the end of a turn to the next.
      abort_seconds: after how long the client goes away; None if it stays.
      seed: what the sampled tokens follow from.
    """

    seconds: float
    prompt: list[int]
    output_tokens: int
    num_samples: int = 1
    priority: int = 0
    turns: tuple[tuple[int, ...], ...] = ()
    think_seconds: float = 0.0
    abort_seconds: float | None = None
    seed: int = 0


class Traffic:
    """The arrivals of one device, made as they are asked for.

    Args:
      options: the rhythm and the shares.
      seed: of the whole soak; the system prompts follow from it alone.
      device: number of the device.
    """

    def __init__(self, options: TrafficOptions, seed: int, device: int):
        self.options = options
        shared = np.random.default_rng(seed)
        shape = (SYSTEM_PROMPTS, options.system_tokens)
        self._system_prompts = shared.integers(0, options.vocab_size, shape).tolist()
        self._numbers = np.random.default_rng((seed, device))
        self._chance = random.Random(f"{seed} {device}")

    def wave_starts(self) -> list[float]:
        """When the waves come, in seconds from the beginning."""
        options = self.options
        step = options.wave_minutes * 60
        starts = (i * step for i in range(math.ceil(options.hours * 3600 / step)))
        hours = (options.first_hour, options.last_hour)
        return [s for s in starts if hours[0] <= s % DAY_SECONDS / 3600 < hours[1]]

    def arrivals(self) -> Iterator[Arrival]:
        """All of them, in order of time."""
        times = heapq.merge(self._wave_times(), self._trickle_times())
        for seconds, num_sequences in times:
            while num_sequences > 0:
                for arrival in self._request(seconds):
                    num_sequences -= arrival.num_samples
                    yield arrival

    def _wave_times(self) -> Iterator[tuple[float, int]]:
        """(seconds, sequences wanted): a wave comes in ten parts."""
        num_parts = 10
        for start in self.wave_starts():
            for part in range(num_parts):
                size = self.options.wave_sequences * (part + 1) // num_parts
                size -= self.options.wave_sequences * part // num_parts
                yield start + part * self.options.wave_seconds / num_parts, size

    def _trickle_times(self) -> Iterator[tuple[float, int]]:
        """A Poisson process of a rate that varies, by thinning one of the highest rate."""
        # A stream of its own: the merge asks for times earlier than they are needed.
        chance = random.Random(self._chance.random())
        seconds, most = 0.0, self.options.trickle_per_hour / 3600
        while most > 0:
            seconds += chance.expovariate(most)
            if seconds >= self.options.hours * 3600:
                return
            if chance.random() < (1 - math.cos(2 * math.pi * seconds / DAY_SECONDS)) / 2:
                yield seconds, 1

    def _request(self, seconds: float) -> list[Arrival]:
        """One request; two if its client sends it twice."""
        options, chance = self.options, self._chance
        draw = chance.random
        is_session = draw() < options.session_share
        num_output = options.output_tokens
        num_prompt = options.request_tokens - num_output
        turns: tuple[tuple[int, ...], ...] = ()
        if is_session:  # The prompt's last third comes with the later turns.
            num_output //= options.num_turns
            num_added = num_prompt // 3 // options.num_turns
            num_prompt = options.request_tokens - num_output * options.num_turns
            num_prompt -= num_added * (options.num_turns - 1)
            turns = tuple(tuple(self._tokens(num_added)) for _ in range(options.num_turns - 1))
        head = chance.choice(self._system_prompts) if draw() < options.shared_share else []
        priority = draw()
        arrival = Arrival(
            seconds=seconds,
            prompt=[*head, *self._tokens(num_prompt - len(head))],
            output_tokens=num_output,
            num_samples=4 if not is_session and draw() < options.fork_share else 1,
            priority=-1
            if priority < options.urgent_share
            else int(priority > 1 - options.background_share),
            turns=turns,
            think_seconds=20 + 40 * draw(),
            abort_seconds=options.abort_within_seconds * draw()
            if draw() < options.abort_share
            else None,
            seed=chance.getrandbits(32),
        )
        is_retried = draw() < options.retry_share
        return [arrival] * (2 if is_retried else 1)

    def _tokens(self, num_tokens: int) -> list[int]:
        return self._numbers.integers(0, self.options.vocab_size, num_tokens).tolist()
