"""Models in the live service: what ranks when files come, go and break, and what is told of it."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from core_builder import Pool
from model_files import made, network
from msgspec.structs import replace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader, NumberDataPoint

from streamsched.core import events as ev
from streamsched.core.cluster import ClusterState
from streamsched.core.config import SchedulerConfig
from streamsched.core.instructions import Place, Why
from streamsched.core.window import rank
from streamsched.errors import UserError
from streamsched.policy.models import Canary, Registry, write_registry
from streamsched.policy.network import Network
from streamsched.service import pool_model as module
from streamsched.service.meters import measure_models
from streamsched.service.models import ModelFolder, check_policy
from streamsched.service.pool_model import DRIFT_JOBS, Drift, PoolModel, ranker_now
from streamsched.service.settings import Settings

PLAIN = SchedulerConfig(policy="model")
LONGEST = network(run_s=1.0).to_bytes()


class Serving:
    """One pool of a worker, ranked by what its folder of models holds."""

    def __init__(self, folder: Path, config: SchedulerConfig = PLAIN) -> None:
        self.folder = folder
        self.now = 0.0
        self.models = ModelFolder(Settings(scheduler=config, models_dir=str(folder)))
        self.models.poll(0.0)
        self.model = PoolModel("p", self.models, config)
        self.pool = Pool()
        self.pool.node("n", 8)
        for name, run_s in (("long", 900.0), ("short", 10.0), ("middle", 60.0)):
            self.pool.arrive(name, 1, estimate_s=run_s)

    def poll(self) -> None:
        """Twice: after a change files are read once more."""
        for _ in range(2):
            self.now += 1.0
            self.models.poll(self.now)
        self.model.refresh()

    def order(self) -> str:
        return " ".join(job.spec.job_id for _, job in rank(self.pool.state, self.model.ranker, 0.0))

    def look(self) -> None:
        self.now += 10.0
        self.model.look(self.pool.state, lambda: self.now)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With two models, of which the shortest first ranks."""
    made(tmp_path, "short")
    made(tmp_path, "longest", LONGEST, base="lcfs")
    write_registry(tmp_path, Registry(default="short"))
    return tmp_path


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


# ── which one ranks ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_registrys_default_ranks_and_another_takes_its_place(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    serving = Serving(folder)
    assert serving.order() == "short middle long"
    assert (serving.model.ranker.name, serving.model.summary().used) == ("model:short", "short")
    write_registry(folder, Registry(default="longest"))
    serving.poll()
    assert serving.order() == "long middle short"
    summary = serving.model.summary()
    assert (summary.wanted, summary.used, summary.base, summary.problems) == ("longest", "longest", "lcfs", ())
    assert [line.split(" (")[0] for line in caplog.messages] == ["model short", "model longest"]
    assert not serving.model.refresh()


def test_none_named_is_the_base_rule(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    serving = Serving(folder)
    write_registry(folder, Registry(base="lcfs"))
    serving.poll()
    assert serving.order() == "middle short long"
    summary = serving.model.summary()
    assert (summary.wanted, summary.used, summary.base, summary.problems) == ("", "", "lcfs", ())
    assert caplog.messages[-1] == "no model is named any more; lcfs ranks"


def test_the_setting_may_name_one_whatever_the_registry_says(folder: Path) -> None:
    config = SchedulerConfig(policy="model:longest")
    assert Serving(folder, config).model.summary().used == "longest"
    (folder / "registry.toml").unlink()
    serving = Serving(folder, config)
    assert (serving.model.summary().used, serving.model.summary().problems) == ("longest", ())


@pytest.mark.parametrize(
    ("spoil", "ranks", "said"),
    [
        ("missing folder", "fcfs", "registry of models: .*registry.toml: no such file"),
        ("missing registry", "fcfs", "registry of models: .*registry.toml: no such file"),
        ("missing model", "fcfs", "model short: .*model.toml: no such file"),
        ("missing file", "sjf", "model short: .*network.bin: no such file"),
        ("corrupt", "sjf", "model short, network.bin: cut or damaged"),
        ("wrong version", "fcfs", "model short, model.toml: features of version 99"),
        ("wrong regime", "sjf", "model short: trained with preemption: the setting `preempt` has to be score or rank"),
    ],
)
def test_what_cannot_be_used_at_the_start_leaves_the_base_rule_and_is_said_once(
    folder: Path, caplog: pytest.LogCaptureFixture, spoil: str, ranks: str, said: str
) -> None:
    """In the log, in the summary that `status` shows, and as a metric."""
    match spoil:
        case "missing folder":
            folder = folder / "nowhere"
        case "missing registry":
            (folder / "registry.toml").unlink()
        case "missing model":
            (folder / "short/model.toml").unlink()
        case "missing file":
            (folder / "short/network.bin").unlink()
        case "corrupt":
            (folder / "short/network.bin").write_bytes(LONGEST[:-1])
        case "wrong version":
            made(folder, "short", version=99)
        case _:
            made(folder, "short", regime="preemptive")
    serving = Serving(folder)
    for _ in range(5):
        serving.poll()
    assert serving.model.ranker.name == ranks
    assert serving.order() == ("short middle long" if ranks == "sjf" else "long short middle")
    summary = serving.model.summary()
    assert (summary.used, summary.base) == ("", ranks)
    [problem] = summary.problems
    caplog_errors = errors(caplog)
    assert caplog_errors == [f"{problem}; {ranks} ranks"]
    assert re.match(said, problem)
    points = measured(serving)
    assert points["streamsched.model.problems"] == [({"pool": "p"}, 1)]
    assert points["streamsched.model.refused"] == [({}, 1)]
    assert points.get("streamsched.model.in_use", []) == (
        [] if not summary.wanted else [({"pool": "p", "model": "short"}, 0)]
    )


def test_with_preemption_nothing_known_is_las(tmp_path: Path) -> None:
    config = SchedulerConfig(policy="model", preempt="rank")
    assert Serving(tmp_path, config).model.ranker.name == "las"


def test_what_breaks_while_in_use_stays_in_use_and_comes_back(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    serving = Serving(folder)
    file = folder / "short/network.bin"
    good = file.read_bytes()
    for _ in range(3):
        file.write_bytes(good[:100])
        serving.poll()
        assert serving.order() == "short middle long"
        summary = serving.model.summary()
        assert summary.used == "short"
        assert len(summary.problems) == 1
        file.write_bytes(good)
        serving.poll()
        assert serving.model.summary().problems == ()
    assert errors(caplog) == ["model short, network.bin: cut or damaged (its digest differs); model short stays in use"]
    (folder / "registry.toml").write_text("default = ")
    serving.poll()
    assert serving.model.summary().used == "short"
    assert len(errors(caplog)) == 2


def test_a_model_written_anew_under_its_name_is_read_anew(folder: Path) -> None:
    serving = Serving(folder)
    (folder / "short/network.bin").write_bytes(LONGEST)
    serving.poll()
    assert serving.order() == "long middle short"
    made(folder, "short", "-gpus - run_s", kind="expression", file="rule.txt")
    serving.poll()
    assert serving.order() == "short middle long"


def test_files_that_stay_the_same_change_nothing(folder: Path) -> None:
    serving = Serving(folder)
    ranker = serving.model.ranker
    for name in ("registry.toml", "short/network.bin", "short/model.toml"):
        (folder / name).touch()
    serving.poll()
    assert serving.model.ranker is ranker


def test_a_change_while_files_are_read_is_seen(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The registry is another as soon as it was read, with the marks of the one before."""
    serving = Serving(folder)
    serving.poll()
    read = ModelFolder._read

    def slow(self: ModelFolder) -> object:
        found = read(self)
        write_registry(folder, Registry(default="longest"))
        monkeypatch.setattr(ModelFolder, "_read", read)
        return found

    monkeypatch.setattr(ModelFolder, "_read", slow)
    (folder / "short/model.toml").touch()
    serving.poll()
    assert serving.model.summary().used == "longest"


def test_a_folder_that_does_what_nobody_thought_of_ends_no_worker(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    serving = Serving(folder)

    def broken(*_: object) -> object:
        raise RuntimeError("out of order")

    monkeypatch.setattr(ModelFolder, "_read", broken)
    for name in ("longest", "short", "longest"):
        write_registry(folder, Registry(default=name))
        serving.poll()
    assert serving.order() == "short middle long"
    assert serving.model.summary().problems == (f"models folder {folder}: RuntimeError: out of order",)
    assert len(errors(caplog)) == 1
    monkeypatch.undo()
    serving.poll()
    assert (serving.order(), serving.model.summary().problems) == ("long middle short", ())


def test_a_rule_that_there_is_not_is_refused_and_a_model_is_not() -> None:
    check_policy(Settings(scheduler=SchedulerConfig(policy="model:nobody")))
    with pytest.raises(UserError, match="unknown policy 'nobody'"):
        check_policy(Settings(scheduler=SchedulerConfig(policy="nobody")))


def test_commands_rank_as_a_worker_would(folder: Path) -> None:
    ranker, problems = ranker_now(Settings(scheduler=PLAIN, models_dir=str(folder)))
    assert (ranker.name, problems) == ("model:short", ())
    (folder / "short/network.bin").unlink()
    ranker, [problem] = ranker_now(Settings(scheduler=PLAIN, models_dir=str(folder)))
    assert ranker.name == "sjf"
    assert "no such file" in problem
    assert ranker_now(Settings(scheduler=SchedulerConfig(policy="smallest")))[0].name == "smallest"


# ── a model that fails while it ranks ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("how", ["raises", "nan", "inf", "too few"])
def test_a_queue_that_the_model_cannot_rank_is_ranked_by_its_base_rule(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    serving = Serving(folder)

    def broken(network: Network, features: Sequence[Sequence[float]]) -> np.ndarray:  # type: ignore[type-arg]
        if how == "raises":
            raise ZeroDivisionError
        return np.full(len(features) - (how == "too few"), {"nan": math.nan, "inf": math.inf}.get(how, 0.0))

    monkeypatch.setattr(Network, "scores", broken)
    for _ in range(3):
        assert serving.order() == "short middle long"
    [line] = errors(caplog)
    assert line.startswith("pool p: model:short: ")
    assert line.endswith("; sjf ranks that queue. Told once")
    assert serving.model.summary().failures == 3
    monkeypatch.undo()
    assert serving.order() == "short middle long"
    assert serving.model.summary().failures == 3
    assert measured(serving)["streamsched.model.failures"] == [({"pool": "p"}, 3)]


# ── shadow ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_shadow_is_compared_and_not_used(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    write_registry(folder, Registry(default="short", shadow="longest"))
    serving = Serving(folder)
    assert serving.order() == "short middle long"
    assert serving.model.summary().shadow is None, "nothing was compared yet"
    for _ in range(8):
        serving.look()
    shadow = serving.model.summary().shadow
    assert shadow is not None
    assert (shadow.model, shadow.jobs, shadow.correlation, shadow.first, shadow.looks) == ("longest", 3, -1.0, 1.0, 8)
    scores = serving.model.shadow_scores
    assert sorted(scores, key=lambda name: -scores[name]) == ["long", "middle", "short"]
    told = [line for line in caplog.messages if "against" in line]
    assert told[0].startswith("pool p: shadow model:longest against model:short: 3 jobs, correlation of places -1.000")
    assert len(told) == 2, "once a minute"
    assert measured(serving)["streamsched.model.shadow.correlation"] == [({"pool": "p", "model": "longest"}, -1.0)]
    ranker = serving.model.ranker
    write_registry(folder, Registry(default="short"))
    serving.poll()
    assert serving.model.ranker is ranker, "what ranks is the same as before"
    serving.look()
    assert serving.model.summary().shadow is None
    assert serving.model.shadow_scores == {}


def test_a_shadow_that_cannot_be_used_is_told_and_disturbs_nobody(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_registry(folder, Registry(default="short", shadow="nobody"))
    serving = Serving(folder)
    serving.look()
    assert serving.order() == "short middle long"
    assert errors(caplog) == [
        f"shadow: model nobody: {folder}/nobody/model.toml: no such file or directory; model short stays in use"
    ]


def test_a_clock_that_was_set_back_does_not_stop_the_looks(folder: Path) -> None:
    write_registry(folder, Registry(default="short", shadow="longest"))
    serving = Serving(folder)
    for now in (1e9, 5.0, 5.5, 6.0):
        serving.model.look(serving.pool.state, lambda now=now: now)  # type: ignore[misc]
    shadow = serving.model.summary().shadow
    assert shadow is not None
    assert shadow.looks == 3, "at 5.5 s it was not due"


def test_a_look_that_fails_is_told_once(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> object:
        raise ZeroDivisionError

    write_registry(folder, Registry(default="short", shadow="longest"))
    serving = Serving(folder)
    monkeypatch.setattr(module, "likeness", broken)
    for _ in range(3):
        serving.look()
    assert errors(caplog) == ["pool p: looking at the queue for model:short: ZeroDivisionError. Told once"]
    assert serving.model.summary().failures == 3


# ── canary ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_canary_ranks_its_share_and_what_came_of_it_is_told(folder: Path) -> None:
    write_registry(folder, Registry(default="short", canary=Canary("longest", tenants=("brave",))))
    serving = Serving(folder)
    for name, run_s in (("b1", 20.0), ("b2", 500.0)):
        serving.pool.arrive(name, 1, estimate_s=run_s, tenant="brave")
    assert serving.order() == "short b2 middle b1 long"
    assert serving.model.ranker.name == "model:short/canary:longest"

    state = waited(serving.pool, {"b1": 30.0, "b2": 10.0, "long": 5.0})
    placed = [
        Place(placement_id=f"{n}:0:1", job_id=n, attempt=1, allocations=(), lease_until=9.0, why=Why())
        for n in state.jobs
    ]
    serving.model.placed(placed, state)
    canary = serving.model.summary().canary
    assert canary is not None
    assert (canary.model, canary.placed, canary.wait_s) == ("longest", 2, 20.0)
    assert (canary.others_placed, canary.others_wait_s) == (3, pytest.approx(5.0 / 3))

    write_registry(folder, Registry(default="short"))
    serving.poll()
    assert serving.order() == "short b1 middle b2 long"
    assert serving.model.summary().canary is None


def waited(pool: Pool, waits: dict[str, float]) -> ClusterState:
    """With these waits of the past."""
    for name, job in list(pool.state.jobs.items()):
        pool.state.jobs[name] = replace(job, waited_s=waits.get(name, 0.0))
    return pool.state


def test_a_canary_over_a_rule(folder: Path) -> None:
    write_registry(folder, Registry(base="fcfs", canary=Canary("longest", fraction=1.0)))
    serving = Serving(folder)
    assert serving.order() == "long middle short"
    assert serving.model.ranker.name == "fcfs/canary:longest"


# ── drift ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_jobs_outside_of_the_range_of_training_are_an_alarm_until_they_have_gone(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    serving = Serving(folder)
    for number in range(40):
        serving.pool.arrive(f"odd{number}", 1, estimate_s=1e8)
    for _ in range(20):
        serving.look()
    assert serving.model.summary().drift == {"run_s": pytest.approx(40 / 43)}
    [line] = errors(caplog)
    assert line == "pool p: model short drifts: jobs outside of the range of training, by feature: run_s 93%"
    assert measured(serving)["streamsched.model.drift"] == [({"pool": "p", "feature": "run_s"}, pytest.approx(40 / 43))]
    for number in range(40):
        serving.pool.command(ev.CancelRequested, f"odd{number}")
    for _ in range(400):
        serving.look()
    assert serving.model.summary().drift == {}
    assert errors(caplog)[1:] == ["pool p: model short: jobs are within the range of training again"]


def test_a_few_odd_jobs_are_no_alarm_and_an_alarm_does_not_flap() -> None:
    drift = Drift()
    assert not drift.look(0.0, int(DRIFT_JOBS) - 1, {"gpus": 1.0}), "too few to tell"
    assert drift.look(1.0, 10, {"gpus": 1.0})
    now, changes = 1.0, 0
    for step in range(2_000):
        now += 10.0
        changes += drift.look(now, 50, {"gpus": 0.11 if step % 2 else 0.08})
    assert changes == 0, "between the two limits an alarm stays"
    for _ in range(500):
        now += 10.0
        changes += drift.look(now, 50, {"gpus": 0.07})
    assert (changes, drift.alarms) == (0, {"gpus"})
    for _ in range(500):
        now += 10.0
        changes += drift.look(now, 50, {"gpus": 0.04})
    assert (changes, drift.alarms) == (1, set())


def test_another_model_has_not_drifted_yet(folder: Path) -> None:
    serving = Serving(folder)
    for number in range(40):
        serving.pool.arrive(f"odd{number}", 1, estimate_s=1e8)
    for _ in range(20):
        serving.look()
    assert serving.model.summary().drift
    write_registry(folder, Registry(default="longest"))
    serving.poll()
    assert not serving.model.summary().drift


# ── metrics ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def measured(serving: Serving) -> dict[str, list[tuple[dict[str, object], float]]]:
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    measure_models(lambda: {"p": serving.model.summary()}, lambda: serving.models.refused, provider)
    data = reader.get_metrics_data()
    provider.shutdown()
    assert data is not None
    found: dict[str, list[tuple[dict[str, object], float]]] = {}
    for resource in data.resource_metrics:
        for scope in resource.scope_metrics:
            for metric in scope.metrics:
                for point in metric.data.data_points:
                    assert isinstance(point, NumberDataPoint)
                    found.setdefault(metric.name, []).append((dict(point.attributes or {}), point.value))
    return found


def test_a_model_in_use_is_measured_as_such(folder: Path) -> None:
    points = measured(Serving(folder))
    assert points["streamsched.model.in_use"] == [({"pool": "p", "model": "short"}, 1)]
    assert points["streamsched.model.problems"] == [({"pool": "p"}, 0)]
