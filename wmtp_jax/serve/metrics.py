"""What `/metrics` tells Prometheus: counts of the engine, and how long requests waited."""

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from wmtp_jax.engine.meter import EngineMeter

_FIRST = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


class Metrics:
    """All of a server's metrics, in a registry of their own."""

    def __init__(self, meter: Callable[[], EngineMeter]):
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(meter))
        self._requests = Counter("wmtp_requests", "Answered requests.", ["path", "status"], registry=self._registry)
        self._first = Histogram(
            "wmtp_time_to_first_token_seconds",
            "From a request's arrival to its first token.",
            buckets=_FIRST,
            registry=self._registry,
        )
        self._token = Histogram(
            "wmtp_time_per_output_token_seconds",
            "Of a request, after its first token.",
            buckets=_TOKEN,
            registry=self._registry,
        )

    def answered(self, path: str, status: int) -> None:
        """One more answer."""
        self._requests.labels(path, str(status)).inc()

    def generated(self, first_seconds: float, token_seconds: float | None) -> None:
        """One more text: the time to its first token, and between later ones."""
        self._first.observe(first_seconds)
        if token_seconds is not None:
            self._token.observe(token_seconds)

    def text(self) -> bytes:
        """In Prometheus's own format."""
        return generate_latest(self._registry)


class _EngineCollector(Collector):
    """Reads the engine's meter when asked."""

    def __init__(self, meter: Callable[[], EngineMeter]):
        self._meter = meter

    def collect(self) -> Iterator[Metric]:
        meter = self._meter()
        for name, what, value in (
            ("wmtp_waiting", "Requests in the queue.", meter.waiting),
            ("wmtp_running", "Requests that are read or decoded.", meter.running),
            ("wmtp_pages", "Pages of the target's cache.", meter.pages),
            ("wmtp_free_pages", "Pages that nobody holds.", meter.free_pages),
        ):
            yield GaugeMetricFamily(name, what, value)
        for name, what, value in (
            ("wmtp_finished", "Requests that came to their end.", meter.finished),
            ("wmtp_preempted", "Times that a request had to give its pages up and be read again.", meter.preempted),
            ("wmtp_prompt_tokens", "Tokens that were read before a text began, or went on.", meter.prefill_tokens),
            ("wmtp_reused_prompt_tokens", "Prompt tokens that an earlier prompt had read.", meter.reused_tokens),
            ("wmtp_output_tokens", "Tokens of texts.", meter.output_tokens),
            ("wmtp_steps", "Steps of the loop.", meter.steps),
        ):
            yield CounterMetricFamily(name, what, value)
        yield _acceptance_lengths(meter)
        yield _acceptance_by_position(meter)


def _acceptance_lengths(meter: EngineMeter) -> Metric:
    counts = meter.histogram.tolist()
    buckets = [(str(float(n + 1)), sum(counts[: n + 1])) for n in range(len(counts))]
    total = sum((n + 1) * count for n, count in enumerate(counts))
    family = HistogramMetricFamily("wmtp_acceptance_length", "Tokens that a row's step emits.")
    family.add_metric([], [*buckets, ("+Inf", sum(counts))], total)
    return family


def _acceptance_by_position(meter: EngineMeter) -> Metric:
    family = GaugeMetricFamily(
        "wmtp_acceptance", "How often a draft was right where those before it were.", labels=["position"]
    )
    for position, share in enumerate(meter.acceptance_by_position, 1):
        family.add_metric([str(position)], share)
    return family
