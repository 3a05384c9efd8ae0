import gc
import logging
import socket
import sys
import threading
import urllib.error
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families as parse_text

from paged_jax.metrics import Histogram
from paged_jax.prometheus import METRICS, start_metrics_server


def latencies(*seconds: float) -> dict:
    histogram = Histogram()
    for value in seconds:
        histogram.observe(value)
    return histogram.as_dict()


def example_metrics() -> dict:
    return {
        "num_requests_running": 3,
        "num_requests_waiting": 2,
        "num_requests_swapped": 1,
        "num_requests_held": 0,
        "kv_cache_usage_perc": 0.25,
        "kv_cache_peak_usage_perc": 0.5,
        "prefix_cache_queries": 1000,
        "prefix_cache_hits": 640,
        "prefix_cache_hits_by_tier": {"device": 600, "host": 40},
        "num_preemptions": 5,
        "num_preemptions_by_mode": {"recompute": 2, "swap": 3},
        "prompt_tokens": 2**40,
        "generation_tokens": 77,
        "request_success": {"stop": 4, "length": 1},
        "swap_in_tokens": 48,
        "swap_out_tokens": 64,
        "swap_tokens_per_second": 11.2,
        "host_offload_tokens": 160,
        "cow_copies": 6,
        "evictions": 7,
        "host_evictions": 8,
        "folded_blocks": 9,
        "spec_decode_num_draft_tokens": 8,
        "spec_decode_num_accepted_tokens": 7,
        "memory_bytes": {"weights": 2**33, "kv_in_use": 100, "swap": 0, "temporary": 12},
        "time_to_first_token_seconds": latencies(0.001, 0.03, 0.2, 999.0),
        "inter_token_latency_seconds": latencies(),
        "e2e_request_latency_seconds": latencies(1.0),
    }


def fetch(url: str, accept: str = "*/*") -> tuple[int, str, str]:
    """Status, content type and text of a scrape."""
    request = urllib.request.Request(url, headers={"Accept": accept})
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.headers["Content-Type"], answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.headers["Content-Type"], error.read().decode()


def scrape(url: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Samples of the text format: (name, labels) -> value."""
    status, content_type, text = fetch(url)
    assert status == 200 and content_type.startswith("text/plain; version=0.0.4")
    samples = [sample for family in parse_text(text) for sample in family.samples]
    found = {(s.name, tuple(sorted(s.labels.items()))): s.value for s in samples}
    assert len(found) == len(samples), "a sample stands twice"
    return found


def test_a_scrape_gives_every_metric_under_its_name():
    metrics = example_metrics()
    assert metrics.keys() == METRICS.keys(), "the example leaves something out"
    with start_metrics_server(example_metrics) as server:
        found = scrape(server.url)
    expected = {}
    for name, spec in METRICS.items():
        full_name, value = f"paged_jax:{name}", metrics[name]
        if spec.kind == "histogram":
            continue
        if spec.kind == "counter":
            full_name += "_total"
        for key, number in value.items() if spec.label else [(None, value)]:
            expected[full_name, ((spec.label, key),) if spec.label else ()] = number
    assert expected["paged_jax:request_success_total", (("finished_reason", "stop"),)] == 4
    assert expected["paged_jax:prefix_cache_hits_by_tier_total", (("tier", "host"),)] == 40
    assert expected["paged_jax:memory_bytes", (("owner", "weights"),)] == 2**33
    assert expected["paged_jax:num_requests_running", ()] == 3
    histograms = {name for name, spec in METRICS.items() if spec.kind == "histogram"}
    numbers = {
        key: value
        for key, value in found.items()
        if not any(key[0].startswith(f"paged_jax:{name}_") for name in histograms)
    }
    assert numbers == expected


def test_a_histogram_has_cumulative_buckets():
    with start_metrics_server(example_metrics) as server:
        found = scrape(server.url)
    name = "paged_jax:time_to_first_token_seconds"
    buckets = {
        float(dict(labels)["le"]): value
        for (sample, labels), value in found.items()
        if sample == f"{name}_bucket"
    }
    values = (0.001, 0.03, 0.2, 999.0)
    bounds = [*Histogram().bounds, float("inf")]
    assert buckets == {bound: sum(v <= bound for v in values) for bound in bounds}
    assert found[f"{name}_count", ()] == 4
    assert found[f"{name}_sum", ()] == pytest.approx(sum(values))
    assert found["paged_jax:inter_token_latency_seconds_count", ()] == 0


def test_kinds_and_help_are_told():
    with start_metrics_server(example_metrics) as server:
        families = {family.name: family for family in parse_text(fetch(server.url)[2])}
    assert families["paged_jax:num_requests_running"].type == "gauge"
    assert families["paged_jax:prompt_tokens"].type == "counter"
    assert families["paged_jax:e2e_request_latency_seconds"].type == "histogram"
    assert all(family.documentation for family in families.values())


@pytest.mark.parametrize(
    "accept",
    [
        # What Prometheus 2 and 3 send.
        "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;"
        "q=0.75,text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
        "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
        "text/plain;version=0.0.4;q=0.3",
    ],
)
def test_names_keep_their_colon_whatever_the_scraper_would_rather_have(accept):
    with start_metrics_server(example_metrics) as server:
        status, content_type, text = fetch(server.url, accept)
    assert status == 200 and content_type == "text/plain; version=0.0.4; charset=utf-8"
    assert {family.name for family in parse_text(text)} == {f"paged_jax:{n}" for n in METRICS}


def test_other_paths_and_methods_are_refused():
    with start_metrics_server(example_metrics) as server:
        assert fetch(server.url.replace("/metrics", "/other"))[0] == 404
        with pytest.raises(urllib.error.HTTPError, match="405"):
            urllib.request.urlopen(server.url, data=b"posted", timeout=10)
        head = urllib.request.Request(server.url, method="HEAD")
        with urllib.request.urlopen(head, timeout=10) as answer:
            assert answer.status == 200 and answer.read() == b""


def test_each_scrape_asks_anew_and_leaves_out_what_is_not_there():
    counts = iter(range(10))
    with start_metrics_server(
        lambda: {"generation_tokens": next(counts), "evictions": None, "text": "no number"},
        namespace="mine",
    ) as server:
        assert scrape(server.url) == {("mine:generation_tokens_total", ()): 0}
        assert scrape(server.url) == {("mine:generation_tokens_total", ()): 1}


def test_a_number_of_another_name_is_given_untyped():
    with start_metrics_server(lambda: {"new_counter": 5}) as server:
        assert scrape(server.url) == {("paged_jax:new_counter", ()): 5}


def test_labels_are_escaped():
    reason = 'a "quoted"\nline \\ é'
    with start_metrics_server(lambda: {"request_success": {reason: 1}}) as server:
        key = ("paged_jax:request_success_total", (("finished_reason", reason),))
        assert scrape(server.url) == {key: 1}


def test_a_failing_scrape_answers_500_is_logged_once_and_the_next_works(caplog):
    failures = [True, True, False, True]

    def get_metrics() -> dict:
        if failures.pop(0):
            raise RuntimeError("no counters today")
        return {"generation_tokens": 1}

    with start_metrics_server(get_metrics) as server:
        answers = [fetch(server.url) for _ in range(4)]
    assert [status for status, _, _ in answers] == [500, 500, 200, 500]
    assert "RuntimeError: no counters today" in answers[0][2]
    warnings = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 2  # The second failure follows the first; the last is a new one.


def test_counters_that_change_while_they_are_read_are_read_again():
    queue, reads = {1: None, 2: None}, []

    def get_metrics() -> dict:
        reads.append(len(queue))
        for key in queue:
            if len(reads) < 4:
                queue[key + 100 * len(reads)] = None  # What another thread may do.
        return {"generation_tokens": 1}

    with start_metrics_server(get_metrics) as server:
        assert scrape(server.url) == {("paged_jax:generation_tokens_total", ()): 1}
    assert len(reads) == 4


def test_the_server_does_not_keep_the_engine_alive():
    class Engine:
        def get_metrics(self) -> dict:
            return {"generation_tokens": 1}

    engine = Engine()
    with start_metrics_server(engine.get_metrics) as server:
        assert fetch(server.url)[0] == 200
        del engine
        gc.collect()
        status, _, text = fetch(server.url)
    assert status == 500 and "the engine is gone" in text


def test_scrapes_are_served_side_by_side():
    """A scraper that hangs, and one whose answer takes long, hold up no other."""
    first, release = threading.Event(), threading.Event()

    def get_metrics() -> dict:
        if not first.is_set():
            first.set()
            release.wait(10)
        return {"generation_tokens": 1}

    with start_metrics_server(get_metrics) as server:
        with socket.create_connection((server.host, server.port)):
            slow = threading.Thread(target=fetch, args=(server.url,))
            slow.start()
            assert first.wait(10)
            assert fetch(server.url)[0] == 200
            release.set()
            slow.join(10)


def test_a_port_in_use_is_named_and_free_again_after_close():
    with start_metrics_server(example_metrics) as server:
        with pytest.raises(OSError, match=f"port={server.port}.*port=0"):
            start_metrics_server(example_metrics, port=server.port)
    server.close()  # A second time does nothing.
    with start_metrics_server(example_metrics, port=server.port) as again:
        assert again.port == server.port
        assert again.url == f"http://127.0.0.1:{server.port}/metrics"
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(again.url, timeout=5)


@pytest.mark.parametrize("options", [{"port": -1}, {"port": 65536}, {"port": True}])
def test_a_port_out_of_range_is_refused(options):
    with pytest.raises(ValueError, match="port="):
        start_metrics_server(example_metrics, **options)


@pytest.mark.parametrize("namespace", ["", "a-b", "1a", "a:"])
def test_a_namespace_that_is_no_name_is_refused(namespace):
    with pytest.raises(ValueError, match="namespace="):
        start_metrics_server(example_metrics, namespace=namespace)


def test_without_the_package_the_error_names_the_mend(monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ImportError, match=r'pip install "paged-jax\[prometheus\]"'):
        start_metrics_server(example_metrics)


def test_buckets_are_cumulative_and_end_at_the_count():
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 9.0):
        histogram.observe(value)
    histogram.observe(2.0, times=3)
    assert histogram.as_dict()["buckets"] == {1.0: 2, 2.0: 6}
    assert histogram.as_dict()["count"] == 7
