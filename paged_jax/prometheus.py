"""A Prometheus endpoint over an engine's counters.

Needs the package prometheus_client (the extra "prometheus"), which writes the text of a scrape;
what is counted, how it is named, and the server stand here.

The answer is in the text format 0.0.4, whatever the scraper would rather have: every scraper reads
it, and prometheus_client 0.26 turns the colons of names into underscores in OpenMetrics 1.0.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import socket
import socketserver
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from paged_jax.log import logger

if TYPE_CHECKING:
    from prometheus_client.core import Metric

_NUM_RETRIES = 5

MetricsSource = Callable[[], Mapping[str, Any]]


@dataclasses.dataclass(frozen=True)
class MetricSpec:
    """How one entry of `get_metrics()` is exposed.

    Attributes:
      kind: a counter's name gets "_total"; a histogram's entry is `Histogram.as_dict()`.
      help: the line of explanation that goes with it.
      label: the entry is a dict, and its keys are values of this label; None: it is a number.
    """

    kind: Literal["gauge", "counter", "histogram"]
    help: str
    label: str | None = None


METRICS: dict[str, MetricSpec] = {
    "num_requests_running": MetricSpec("gauge", "Sequences that hold blocks and are computed."),
    "num_requests_waiting": MetricSpec("gauge", "Sequences that wait for admission."),
    "num_requests_swapped": MetricSpec("gauge", "Sequences whose blocks are in host memory."),
    "num_requests_held": MetricSpec("gauge", "Sequences that hold blocks and are not scheduled."),
    "kv_cache_usage_perc": MetricSpec("gauge", "Share of the KV blocks in use, 0 to 1."),
    "kv_cache_peak_usage_perc": MetricSpec("gauge", "Largest share in use so far, 0 to 1."),
    "swap_tokens_per_second": MetricSpec("gauge", "Tokens swapped a second, in and out, lately."),
    "memory_bytes": MetricSpec("gauge", "Bytes of memory by owner.", "owner"),
    "prefix_cache_queries": MetricSpec("counter", "Tokens asked of the prefix cache."),
    "prefix_cache_hits": MetricSpec("counter", "Tokens found in the prefix cache."),
    "prefix_cache_hits_by_tier": MetricSpec(
        "counter", "Tokens found in the prefix cache, by where they lay.", "tier"
    ),
    "num_preemptions": MetricSpec("counter", "Preemptions of running sequences."),
    "num_preemptions_by_mode": MetricSpec("counter", "Preemptions by their mode.", "mode"),
    "prompt_tokens": MetricSpec("counter", "Prompt tokens taken in."),
    "generation_tokens": MetricSpec("counter", "Tokens generated."),
    "request_success": MetricSpec("counter", "Sequences that ended.", "finished_reason"),
    "swap_in_tokens": MetricSpec("counter", "Tokens whose blocks came back from the host."),
    "swap_out_tokens": MetricSpec("counter", "Tokens whose blocks went to the host."),
    "host_offload_tokens": MetricSpec("counter", "Tokens of evicted blocks kept on the host."),
    "cow_copies": MetricSpec("counter", "Blocks copied because a shared one was written."),
    "evictions": MetricSpec("counter", "Cached blocks of the device that were taken."),
    "host_evictions": MetricSpec("counter", "Cached blocks of the host that were taken."),
    "folded_blocks": MetricSpec("counter", "Full blocks given up for an equal one."),
    "spec_decode_num_draft_tokens": MetricSpec("counter", "Tokens guessed by speculation."),
    "spec_decode_num_accepted_tokens": MetricSpec("counter", "Guesses that were right."),
    "time_to_first_token_seconds": MetricSpec("histogram", "Arrival to first token."),
    "inter_token_latency_seconds": MetricSpec("histogram", "From one token to the next."),
    "e2e_request_latency_seconds": MetricSpec("histogram", "Arrival to last token."),
}


class MetricsServer:
    """Serves a scrape's text from a daemon thread until `close`; a context manager.

    Attributes:
      host, port: where it listens.
      url: what to give to Prometheus, "http://127.0.0.1:8000/metrics".
    """

    def __init__(self, server: WSGIServer, host: str):
        self.host = host
        self.port: int = server.server_address[1]
        self._server = server
        self._thread = threading.Thread(
            target=server.serve_forever,
            kwargs={"poll_interval": 0.05},  # How long `close` may have to wait.
            name=f"metrics server, port {self.port}",
            daemon=True,
        )
        self._thread.start()

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}/metrics"

    def close(self) -> None:
        """Stops listening and frees the port; a second call does nothing."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> MetricsServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"MetricsServer({self.url})"


def start_metrics_server(
    get_metrics: MetricsSource,
    *,
    port: int = 0,
    host: str = "127.0.0.1",
    namespace: str = "paged_jax",
) -> MetricsServer:
    """Serves an engine's counters to Prometheus, at http://host:port/metrics.

    A scrape calls `get_metrics` in a thread of the server's. One that fails answers with status 500
    and the reason; the first such failure of a row is logged, and the engine goes on.

    Args:
      get_metrics: `llm.get_metrics`, or any function that gives a dict under the names of
        `METRICS`. Names not given are left out; numbers under other names are given as untyped. A
        bound method does not keep its object alive: scrapes answer 500 once that is gone.
      port: 0 takes a free one; see the result's `port`.
      host: the address to listen at; "0.0.0.0" lets other machines ask, and anyone who can reach
        the port then reads the counters.
      namespace: what the names begin with, as in "paged_jax:num_requests_running".

    Raises:
      ImportError: prometheus_client is missing.
      ValueError: port or namespace is out of range.
      OSError: the address is not to be had, for instance because the port is in use.
    """
    try:
        from prometheus_client import CollectorRegistry, generate_latest
    except ImportError as error:
        raise ImportError(
            "the Prometheus endpoint needs the package prometheus_client; "
            'pip install "paged-jax[prometheus]"'
        ) from error
    if isinstance(port, bool) or not isinstance(port, int) or not 0 <= port <= 65535:
        raise ValueError(f"port={port!r}: it must be an integer from 0 (any free port) to 65535")
    if not re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*", namespace):
        raise ValueError(
            f"namespace={namespace!r}: it must be letters, digits and underscores, and begin with "
            "no digit"
        )
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(_without_keeping_alive(get_metrics), namespace))
    server = _listen(host, port)
    server.set_app(_make_app(lambda: generate_latest(registry)))
    return MetricsServer(server, host)


class _Collector:
    """Turns `get_metrics()` into Prometheus metric families, anew for each scrape."""

    def __init__(self, get_metrics: MetricsSource, namespace: str):
        self._get_metrics = get_metrics
        self._namespace = namespace

    def collect(self) -> Iterator[Metric]:
        from prometheus_client.core import UntypedMetricFamily

        for name, value in self._read().items():
            full_name = f"{self._namespace}:{name}"
            spec = METRICS.get(name)
            if spec is not None and value is not None:
                yield _family(full_name, spec, value)
            elif isinstance(value, (int, float)):
                yield UntypedMetricFamily(full_name, name, value=value)

    def _read(self) -> Mapping[str, Any]:
        """The counters, read anew if a queue of the engine's, which runs on, changed meanwhile."""
        for _ in range(_NUM_RETRIES):
            try:
                return self._get_metrics()
            except RuntimeError as error:
                if "during iteration" not in str(error):
                    raise
        return self._get_metrics()


def _family(name: str, spec: MetricSpec, value: Any) -> Metric:
    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
    )

    if spec.kind == "histogram":
        buckets = [(str(float(bound)), count) for bound, count in value["buckets"].items()]
        buckets.append(("+Inf", value["count"]))
        return HistogramMetricFamily(name, spec.help, buckets=buckets, sum_value=value["sum"])
    family_type = CounterMetricFamily if spec.kind == "counter" else GaugeMetricFamily
    if spec.label is None:
        return family_type(name, spec.help, value=value)
    family = family_type(name, spec.help, labels=[spec.label])
    for key, number in value.items():
        family.add_metric([str(key)], number)
    return family


def _without_keeping_alive(get_metrics: MetricsSource) -> MetricsSource:
    """`get_metrics`, but a bound method's object may be deleted: its weights are not held here."""
    if not inspect.ismethod(get_metrics):
        return get_metrics
    method = weakref.WeakMethod(get_metrics)

    def call() -> Mapping[str, Any]:
        alive = method()
        if alive is None:
            raise RuntimeError("the engine is gone; close this server")
        return alive()

    return call


def _make_app(scrape: Callable[[], bytes]) -> Callable[..., Any]:
    """The WSGI app that answers /metrics with `scrape()`, and its errors with status 500."""
    failing = False

    def answer(environ: dict[str, Any]) -> tuple[str, str, bytes]:
        nonlocal failing
        if environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
            return "405 Method Not Allowed", "text/plain; charset=utf-8", b"use GET\n"
        if environ["PATH_INFO"] not in ("/metrics", "/metrics/", "/"):
            return "404 Not Found", "text/plain; charset=utf-8", b"the metrics are at /metrics\n"
        try:
            text = scrape()
        except Exception as error:
            if not failing:  # Scrapes come every few seconds; one line will do.
                logger.warning("A scrape of the metrics failed", exc_info=True)
            failing = True
            reason = f"{type(error).__name__}: {error}\n".encode(errors="replace")
            return "500 Internal Server Error", "text/plain; charset=utf-8", reason
        failing = False
        return "200 OK", "text/plain; version=0.0.4; charset=utf-8", text

    def app(environ: dict[str, Any], start_response: Callable[..., Any]) -> list[bytes]:
        status, content_type, body = answer(environ)
        headers = [("Content-Type", content_type), ("Content-Length", str(len(body)))]
        start_response(status, headers)
        return [] if environ["REQUEST_METHOD"] == "HEAD" else [body]

    return app


class _Handler(WSGIRequestHandler):
    timeout = 10  # Seconds; a client that sends nothing holds no thread for ever.

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: a line for every scrape would drown the engine's own."""


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    daemon_threads = True  # A hanging client must not keep the program from ending.

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away in the middle of an answer is no fault of the engine's."""
        logger.debug("The connection to %s broke", client_address, exc_info=True)


def _listen(host: str, port: int) -> WSGIServer:
    try:
        family, *_, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        server_type = type("_Server", (_Server,), {"address_family": family})
        return server_type((str(address[0]), port), _Handler)
    except OSError as error:
        message = (
            f"cannot listen at host={host!r}, port={port}: {error.strerror or error}; give another "
            "port (port=0: any free one), or a host that is this machine's"
        )
        raise OSError(error.errno, message) from error
