"""A plain model of paging under a queue, without a line in common with the scheduler."""

from typing import NamedTuple


class Outcome(NamedTuple):
    steps: int
    preemptions: int
    lost: int  # Tokens that were computed, and forgotten.
    lost_output: int  # Of them, those that had been sampled.
    sequence_steps: int


def blocks(num_tokens, block_size):
    return -(-num_tokens // block_size)


def plain_paging(lengths, num_blocks, block_size, *, short_ones_pass=False, spare_blocks=0):
    """Serves chats, all there from the beginning: each that runs takes a slot a step.

    Where blocks run out, the newest gives its own back and goes to the front of the queue. Who is
    the first in line is admitted, if there are blocks for its tokens.

    Args:
      lengths: (prompt, output) of each chat.
      short_ones_pass: whether the first that fits is admitted instead, whoever is ahead of it;
        the newest is then the one that came last, and not the one that was admitted last.
      spare_blocks: that an admission leaves free.
    """
    # [tokens known, output left, blocks held, number, prompt]
    waiting = [[prompt, output, 0, i, prompt] for i, (prompt, output) in enumerate(lengths)]
    running, free = [], num_blocks
    steps = preemptions = lost = lost_output = sequence_steps = 0
    while waiting or running:
        preempted, place = False, 0
        while place < len(running):
            one = running[place]
            need = blocks(one[0], block_size) - one[2]
            while need > free and one[2]:
                victim = max(running, key=lambda r: r[3]) if short_ones_pass else running[-1]
                at = running.index(victim)
                del running[at]
                place -= at < place
                free, victim[2] = free + victim[2], 0
                preemptions, preempted = preemptions + 1, True
                lost += victim[0] - 1
                lost_output += victim[0] - victim[4] - 1
                waiting.insert(0, victim)
            if one[2]:
                free, one[2], place = free - need, one[2] + need, place + 1
        while waiting and not preempted:
            room = free - (spare_blocks if running else 0)
            ahead = waiting if short_ones_pass else waiting[:1]
            fits = (i for i, one in enumerate(ahead) if blocks(one[0], block_size) <= room)
            chosen = next(fits, None)
            if chosen is None:
                break
            one = waiting.pop(chosen)
            one[2] = blocks(one[0], block_size)
            free -= one[2]
            running.append(one)
        steps, sequence_steps = steps + 1, sequence_steps + len(running)
        for one in running:
            one[0], one[1] = one[0] + 1, one[1] - 1
        free += sum(held for _, left, held, _, _ in running if not left)
        running = [one for one in running if one[1]]
    return Outcome(steps, preemptions, lost, lost_output, sequence_steps)
