"""Metrics of the models that rank, by OpenTelemetry's API: they cost nothing until a process has set up its SDK."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from opentelemetry.metrics import CallbackOptions, MeterProvider, Observation, get_meter

from streamsched.routing.least_loaded import ModelSummary

Summaries = Callable[[], Mapping[str, ModelSummary]]
"""By pool, of the pools that this worker has."""
_Read = Callable[[str, ModelSummary], Iterable[Observation]]


def measure_models(summaries: Summaries, refused: Callable[[], int], provider: MeterProvider | None = None) -> None:
    """Have them observed from now on, by `provider` (default: the process's).

    `refused`: models and registries that could not be used, so far.
    """
    meter = get_meter("streamsched", meter_provider=provider)

    def observed(read: _Read) -> Callable[[CallbackOptions], Iterator[Observation]]:
        def callback(_: CallbackOptions) -> Iterator[Observation]:
            for pool, summary in summaries().items():
                yield from read(pool, summary)

        return callback

    meter.create_observable_gauge(
        "streamsched.model.in_use",
        [observed(_in_use)],
        "1",
        "1: the model that is named ranks the pool; 0: its base rule, or the model before it, does",
    )
    meter.create_observable_gauge(
        "streamsched.model.problems", [observed(_problems)], "{problem}", "Reasons why what is named is not in use"
    )
    meter.create_observable_counter(
        "streamsched.model.failures", [observed(_failures)], "{queue}", "Queues that the base rule ranked instead"
    )
    meter.create_observable_gauge(
        "streamsched.model.drift", [observed(_drift)], "1", "Share of the jobs outside of the range of training, alarms"
    )
    meter.create_observable_gauge(
        "streamsched.model.shadow.correlation", [observed(_shadow)], "1", "Of places by the shadow with those in use"
    )
    meter.create_observable_counter(
        "streamsched.model.refused",
        [lambda _: [Observation(refused())]],
        "{model}",
        "Models and registries that could not be used",
    )


def _in_use(pool: str, summary: ModelSummary) -> list[Observation]:
    if not summary.wanted:
        return []
    return [Observation(int(summary.used == summary.wanted), {"pool": pool, "model": summary.wanted})]


def _problems(pool: str, summary: ModelSummary) -> list[Observation]:
    return [Observation(len(summary.problems), {"pool": pool})]


def _failures(pool: str, summary: ModelSummary) -> list[Observation]:
    return [Observation(summary.failures, {"pool": pool})]


def _drift(pool: str, summary: ModelSummary) -> list[Observation]:
    return [Observation(share, {"pool": pool, "feature": name}) for name, share in summary.drift.items()]


def _shadow(pool: str, summary: ModelSummary) -> list[Observation]:
    if summary.shadow is None:
        return []
    return [Observation(summary.shadow.correlation, {"pool": pool, "model": summary.shadow.model})]
