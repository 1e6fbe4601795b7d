"""Models in a running worker: swapped by a command, compared, given a share, and done without where they are broken."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from model_files import made, network
from service_fixture import Service, WorkerProcess, installed

from streamsched.bus import messages as m
from streamsched.service.stacks import Stack

pytestmark = pytest.mark.integration


@pytest.fixture
def service(stack: Stack, tmp_path: Path) -> Iterator[Service]:
    """Models of the shortest and of the longest first. A pool of one node, which is full."""
    folder = tmp_path / "models"
    made(folder, "shortest")
    made(folder, "longest", network(run_s=1.0).to_bytes(), base="lcfs")
    with installed(stack, f"t{uuid.uuid4().hex[:8]}", tmp_path) as running:
        running.env |= {"STREAMSCHED_POLICY": "model", "STREAMSCHED_MODELS_DIR": str(folder)}
        yield running


def command(service: Service, *arguments: str) -> str:
    """As an operator would, in the worker's environment."""
    done = subprocess.run(
        [sys.executable, "-m", "streamsched.cli", *arguments],
        env=service.env,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def submit(service: Service, runs_s: dict[str, float], **more: Any) -> None:
    service.send(
        service.names.arrivals,
        *(
            m.JobArrival(job_id=name, submitted_at=time.time(), gpus_per_worker=8, estimate_s=run_s, **more)
            for name, run_s in runs_s.items()
        ),
    )


def filled(service: Service) -> WorkerProcess:
    """A worker whose only node is taken, with three jobs that wait, in this order of arrival."""
    worker = service.start()
    service.send(service.names.nodes, m.Joined(pool="default", node_id="n", time=time.time(), gpu_type="A", gpus=8))
    submit(service, {"first": 1.0})
    service.wait_job("first", lambda job: job.placement_id is not None)
    for name, run_s in (("long", 900.0), ("short", 10.0), ("middle", 60.0)):
        submit(service, {name: run_s})
        service.wait_job(name, lambda job: job.state == "queued")
    return worker


def order(service: Service, wanted: str) -> m.QueueRanking:
    """The last ranking on the topic, once it is this."""

    def look() -> m.QueueRanking | None:
        last = service.ranking()
        return last if last is not None and " ".join(job.job_id for job in last.jobs) == wanted else None

    found = service.wait_for(look, f"the order {wanted}")
    assert found is not None
    return found


def told(service: Service, right: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """What `streamsched status` says of the model, once it is right."""

    def look() -> dict[str, Any] | None:
        model = json.loads(command(service, "status", "--json"))["default"]["model"]
        return model if right(model) else None

    found = service.wait_for(look, "the status")
    assert found is not None
    return found


def test_the_model_is_swapped_by_a_command_and_a_shadow_is_told(service: Service) -> None:
    command(service, "models", "use", "shortest")
    worker = filled(service)
    assert order(service, "short middle long").policy == "model:shortest"
    command(service, "models", "shadow", "longest")
    shadowed = told(service, lambda model: bool(model["shadow"]))
    assert (shadowed["used"], shadowed["shadow"]["model"], shadowed["shadow"]["correlation"]) == (
        "shortest",
        "longest",
        -1,
    )

    command(service, "models", "use", "longest")
    ranking = order(service, "long middle short")
    assert ranking.policy == "model:longest"
    assert [job.shadow_score for job in ranking.jobs] == sorted(job.shadow_score or 0.0 for job in ranking.jobs)[::-1]
    assert told(service, lambda model: model["used"] == "longest")["problems"] == []
    assert "model longest (" in command(service, "status")

    command(service, "models", "use", "--off", "--base", "lcfs")
    order(service, "middle short long")
    service.wait_for(lambda: "lcfs (no model)" in command(service, "status"), "the status")
    assert worker.said("Traceback") == 0
    assert worker.process.poll() is None, "without a restart"


def test_a_canary_ranks_its_share(service: Service) -> None:
    command(service, "models", "use", "shortest")
    filled(service)
    submit(service, {"brave-1": 20.0, "brave-2": 500.0}, tenant="brave")
    order(service, "short brave-1 middle brave-2 long")
    command(service, "models", "canary", "longest", "--tenant", "brave")
    assert order(service, "short brave-2 middle brave-1 long").policy == "model:shortest/canary:longest"
    assert told(service, lambda model: bool(model["canary"]))["canary"]["model"] == "longest"


@pytest.mark.parametrize("spoil", ["corrupt", "missing", "wrong version"])
def test_a_broken_model_leaves_the_base_rule_until_it_is_mended(service: Service, spoil: str) -> None:
    """The worker starts, says so once, in the log and in `status`."""
    folder = Path(service.env["STREAMSCHED_MODELS_DIR"])
    command(service, "models", "use", "shortest")
    match spoil:
        case "corrupt":
            (folder / "shortest/network.bin").write_bytes(b"rubbish")
        case "missing":
            (folder / "shortest/network.bin").unlink()
        case _:
            made(folder, "shortest", version=99)
    worker = filled(service)
    base = "fcfs" if spoil == "wrong version" else "sjf"
    order(service, "long short middle" if base == "fcfs" else "short middle long")
    status = told(service, lambda model: bool(model["problems"]))
    [problem] = status["problems"]
    assert (status["wanted"], status["used"], status["base"]) == ("shortest", "", base)
    assert problem.startswith("model shortest")
    assert f"{problem}; {base} ranks" in command(service, "status")
    assert worker.said(f"; {base} ranks$") == 1

    made(folder, "shortest")
    told(service, lambda model: model["used"] == "shortest" and not model["problems"])
    assert order(service, "short middle long").policy == "model:shortest"
    assert worker.said("; (fcfs|sjf) ranks$") == 1
    assert worker.said("Traceback") == 0
