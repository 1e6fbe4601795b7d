"""Jobs for the tests of prediction."""

from __future__ import annotations

from streamsched.predict import Ending, Features, Finished


def features(
    name: str = "", *, gpus: int = 1, user: str = "", tenant: str = "t", job_id: str = "", **more: object
) -> Features:
    return Features(gpus=gpus, user=user, tenant=tenant, name=name, job_id=job_id, **more)  # type: ignore[arg-type]


def finished(
    run_s: float, name: str = "", *, ending: Ending = Ending.COMPLETED, steps: float = 0.0, **more: object
) -> Finished:
    return Finished(features=features(name, **more), run_s=run_s, ending=ending, steps=steps)  # type: ignore[arg-type]
