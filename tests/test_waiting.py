from paged_jax.request import Request
from paged_jax.sampling_params import SamplingParams
from paged_jax.waiting import WaitingQueue, rank


def make_request(name: str, arrival: int, priority: int = 0) -> Request:
    request = Request(name, [1], SamplingParams(), max_model_len=10, priority=priority)
    request.arrival_index = arrival
    return request


def names(queue: WaitingQueue) -> str:
    return "".join(request.request_id for request in queue)


def test_first_come_first_served_and_the_preempted_in_front():
    queue = WaitingQueue("fcfs")
    for i, name in enumerate("abc"):
        queue.append(make_request(name, i, priority=9 - i))
    queue.append_first(make_request("z", 9))
    assert names(queue) == "zabc"
    assert queue.pop_first().request_id == "z"
    queue.remove(queue[1])
    assert names(queue) == "ac" and len(queue) == 2
    queue.clear()
    assert not queue


def test_by_priority_then_arrival_wherever_they_come_from():
    queue = WaitingQueue("priority")
    queue.append(make_request("d", 3, priority=2))
    queue.append(make_request("b", 4, priority=1))
    queue.append_first(make_request("e", 5, priority=2))
    queue.append_first(make_request("a", 0, priority=1))
    queue.append(make_request("c", 1, priority=2))
    assert names(queue) == "abcde"
    assert rank(queue[0]) == (1, 0)
