"""A published comparison, run again: the figures that do not hang on the draw, or on details."""

import pytest
from plain_paging import plain_paging

from paged_jax.simulate import ChatTraffic
from paged_jax.simulate.guide import MAX_TOKENS, arithmetic, run_guide


def test_what_the_guide_says_without_a_draw():
    for comparison in arithmetic():
        assert comparison.median == pytest.approx(comparison.theirs, rel=0.003), comparison.name


@pytest.mark.parametrize(("block_size", "unused", "within"), [(16, 7.4, 0.3), (512, 252.7, 8)])
def test_the_guides_paged_run(block_size, unused, within):
    results = run_guide("paged", block_size=block_size)
    assert results.unused_last_block == pytest.approx(unused, abs=within)
    queued, totals = results.queued.means(), results.totals
    assert queued["running"] == pytest.approx({16: 498, 512: 397}[block_size], rel=0.1)
    assert totals.num_finished == 3000
    if block_size == 512:
        assert queued["internal"] == pytest.approx(0.202, abs=0.02)
    else:
        assert totals.num_steps == pytest.approx(3334, rel=0.1)


def test_the_guides_contiguous_runs():
    reserve = run_guide("reserve_max")
    assert reserve.peak_running == 60
    assert reserve.queued.means()["running"] == pytest.approx(60)
    assert reserve.queued.means()["stored"] == pytest.approx(0.123, rel=0.1)
    assert reserve.queued.means()["external"] == 0
    assert reserve.totals.num_steps == pytest.approx(17_663, rel=0.05)
    oracle = run_guide("oracle")
    assert oracle.queued.means()["free"] == pytest.approx(0.133, rel=0.15)
    assert oracle.totals.fragmented_steps == pytest.approx(2630, rel=0.15)


def test_what_the_guides_preemptions_lose():
    totals = run_guide("paged").totals
    # The newest was admitted a moment ago: it loses its prompt, and hardly a token of its own.
    assert 600 < totals.lost / totals.num_preemptions < 1000
    assert totals.lost_output / totals.num_preemptions < 20
    # The guide: 522 preemptions of 286 tokens each. Shorter victims than prompts are on average
    # need a queue in which short chats pass long ones.
    chats = ChatTraffic(num_requests=3000, max_total_tokens=MAX_TOKENS)
    lengths = [(chat.num_prompt_tokens, chat.num_output_tokens) for chat in chats]
    plain = plain_paging(lengths, 30_720, 16, short_ones_pass=True, spare_blocks=26)
    assert plain.preemptions == pytest.approx(522, rel=0.2)
    assert plain.lost / plain.preemptions == pytest.approx(286, rel=0.1)
