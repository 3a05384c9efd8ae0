import pytest

from paged_jax.preemption import PreemptionCosts


def test_recompute_is_taken_until_both_speeds_are_known():
    costs = PreemptionCosts(bytes_a_token=10)
    assert not costs.prefers_swap(100)
    costs.observe_swap(1000, 1.0)
    assert not costs.prefers_swap(100)
    costs.observe_prefill(1, 1.0)
    assert costs.prefers_swap(100)


@pytest.mark.parametrize(("tokens_per_second", "swaps"), [(49, True), (50, False), (51, False)])
def test_a_swap_pays_both_ways(tokens_per_second, swaps):
    # 10 bytes a token at 1,000 bytes a second: 100 tokens a second one way, 50 out and in.
    costs = PreemptionCosts(bytes_a_token=10)
    costs.observe_swap(2000, 2.0)
    costs.observe_prefill(tokens_per_second, 1.0)
    assert costs.prefers_swap(7) is swaps


def test_estimates_move_a_fifth_towards_each_observation():
    costs = PreemptionCosts()
    costs.observe_swap(100, 1.0)
    assert costs.swap_bytes_per_second == 100
    costs.observe_swap(400, 2.0)
    assert costs.swap_bytes_per_second == pytest.approx(120)
    costs.observe_prefill(50, 1.0)
    costs.observe_prefill(0, 1.0)
    costs.observe_prefill(50, 0.0)
    assert costs.prefill_tokens_per_second == 50
