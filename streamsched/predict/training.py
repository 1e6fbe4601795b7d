"""Boosted quantile trees: fitted in a process of their own on jobs that have ended, and swapped in when they are there.

    worker                          child (python -m streamsched.predict.training FOLDER VERSION SEED)
    jobs-7.msgpack  ------------->  replay, fit, export, check
    current.json    <-------------  model-7.msgpack, card-7.json, then current.json (renamed into place: atomic)

The child replays the jobs in the order of their submissions and ends, so that a row holds what was known when its job
was submitted, as it does when the model is asked. Cancelled jobs are left out and the others weighted by the inverse
probability of not being cancelled by then (IPCW: Robins & Rotnitzky 1992); clamped ones stay at their limit, which
leaves quantiles below it right (Powell, J. Econometrics 32, 1986).

The trees leave scikit-learn as numbers (`boosting.py`): the child checks that they predict what scikit-learn does, the
worker that the file's SHA-256 is the one in `current.json`, and that everything in it is in bounds. The folder should
be writable for the service alone, as its state is.
"""

from __future__ import annotations

import hashlib
import heapq
import math
import os
import subprocess
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from streamsched.errors import UserError

from . import boosting
from .boosting import FORMAT, LEAVES_MAX, QUANTILES, DamagedModel, Model, Trees
from .curves import BINS, bin_of, kaplan_meier
from .jobs import Ending, Finished, Floats, usable
from .recent import FEATURES, Recent

JOBS_LEAST: Final = 200
"""With fewer there is no model."""
_ITERATIONS: Final = 60
_BINS: Final = 64
_KEPT: Final = 3
"""Versions that stay in the folder."""
_AGREE: Final = 1e-4
"""How far (ln) the exported trees may be from scikit-learn's."""


class Current(msgspec.Struct, frozen=True):
    """`current.json`: the model to use."""

    version: int
    sha256: str


# ── fitting ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def rows_of(jobs: Sequence[Finished]) -> tuple[Floats, Floats, Floats]:
    """([job, feature], ln run times, weights) of the jobs that can be learned from, by submission.

    Each row is made of the jobs that had ended by its job's submission.
    """
    known = sorted((job for job in jobs if usable(job.run_s)), key=lambda job: job.features.submitted_at)
    weights = _weights(known)
    recent, ends = Recent(), list[tuple[float, int]]()
    rows, values, kept = [], [], []
    for number, job in enumerate(known):
        while ends and ends[0][0] <= job.features.submitted_at:
            recent.observe(known[heapq.heappop(ends)[1]])
        if weights[number] > 0:
            rows.append(recent.row(job.features))
            values.append(math.log(max(job.run_s, 1.0)))
            kept.append(weights[number])
        heapq.heappush(ends, (job.ended_at or job.features.submitted_at + job.run_s, number))
    return np.array(rows).reshape(len(rows), len(FEATURES)), np.array(values), np.array(kept)


def _weights(jobs: Sequence[Finished]) -> list[float]:
    """1 / P(not cancelled by then), at most 10; 0 for cancelled jobs."""
    ended, cancelled = np.zeros(BINS), np.zeros(BINS)
    for job in jobs:
        (cancelled if job.ending is Ending.CANCELLED else ended)[bin_of(job.run_s)] += 1.0
    not_yet = kaplan_meier(cancelled, ended)  # of the time to a cancellation, which an end censors
    return [
        0.0 if job.ending is Ending.CANCELLED else 1.0 / max(float(not_yet[bin_of(job.run_s)]), 0.1) for job in jobs
    ]


def fit(jobs: Sequence[Finished], version: int, seed: int) -> Model:
    """Raises UserError: too few jobs, or no scikit-learn."""
    try:
        from sklearn.ensemble import HistGradientBoostingRegressor
    except ModuleNotFoundError:
        raise UserError("training needs scikit-learn: pip install 'streamsched[predict]'") from None
    rows, values, weights = rows_of(jobs)
    if len(rows) < JOBS_LEAST:
        raise UserError(f"{len(rows)} finished jobs are too few to train on; at least {JOBS_LEAST} are needed")
    fitted = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what scikit-learn deprecates is for whoever pins it, not for the log
        for level in QUANTILES:
            forest = HistGradientBoostingRegressor(
                loss="quantile",
                quantile=level,
                learning_rate=0.1,
                max_iter=_ITERATIONS,
                max_leaf_nodes=LEAVES_MAX,
                min_samples_leaf=20,
                l2_regularization=1.0,
                max_bins=_BINS,
                early_stopping=False,
                random_state=seed,
            )
            fitted.append(forest.fit(rows, values, sample_weight=weights))
    model = export(fitted, version)
    _check(model, fitted, rows[:: max(1, len(rows) // 2_000)])
    return model


def export(fitted: Sequence[Any], version: int) -> Model:
    """scikit-learn's forests, one per quantile, as numbers. Relies on its internals, which is why `_check` follows."""
    forests = [[stage[0].nodes for stage in forest._predictors] for forest in fitted]
    trees = [nodes for forest in forests for nodes in forest]
    every = np.concatenate(trees)
    splits = every[every["is_leaf"] == 0]
    thresholds = [
        np.unique(splits["num_threshold"][splits["feature_idx"] == feature]).tolist()
        for feature in range(len(FEATURES))
    ]
    masks = [np.full((len(values) + 1, len(trees)), (1 << LEAVES_MAX) - 1, np.uint16) for values in thresholds]
    places = [{value: place for place, value in enumerate(values)} for values in thresholds]
    leaves = np.zeros((len(trees), LEAVES_MAX), np.float32)
    for tree, nodes in enumerate(trees):
        _export_tree(nodes, tree, places, masks, leaves)
    return Model(
        format=FORMAT,
        version=version,
        features=FEATURES,
        baselines=tuple(float(np.ravel(forest._baseline_prediction)[0]) for forest in fitted),
        trees=tuple(len(forest) for forest in forests),
        thresholds=tuple(map(tuple, thresholds)),
        masks=tuple(mask.tobytes() for mask in masks),
        leaves=leaves.tobytes(),
    )


def _export_tree(
    nodes: Any, tree: int, places: Sequence[dict[float, int]], masks: Sequence[np.ndarray[Any, Any]], leaves: Any
) -> None:
    """Number the leaves from left to right; where a node's test fails, those on its left are impossible."""

    def walk(number: int, first: int) -> int:
        """The number of the leaf after those under this node, the first of which is `first`."""
        node = nodes[number]
        if node["is_leaf"]:
            leaves[tree, first] = node["value"]
            return first + 1
        middle = walk(int(node["left"]), first)
        gone = np.uint16(((1 << middle) - (1 << first)) ^ 0xFFFF)
        feature = int(node["feature_idx"])
        masks[feature][places[feature][float(node["num_threshold"])] + 1 :, tree] &= gone
        return walk(int(node["right"]), middle)

    if walk(0, 0) > LEAVES_MAX:
        raise UserError("a tree has more leaves than can be exported")


def _check(model: Model, fitted: Sequence[Any], rows: Floats) -> None:
    theirs = np.sort(np.stack([forest.predict(rows) for forest in fitted], axis=1), axis=1)
    apart = float(np.abs(Trees(model).quantiles_ln(rows) - theirs).max())
    if not apart <= _AGREE:
        raise UserError(f"the exported trees differ from scikit-learn's by {apart:g}: this version cannot be exported")


# ── files ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def write(folder: Path, model: Model, jobs: Sequence[Finished], seed: int) -> None:
    """Model and card, then the pointer to them."""
    data = boosting.encode(model)
    digest = hashlib.sha256(data).hexdigest()
    _replace(folder / f"model-{model.version}.msgpack", data)
    _replace(
        folder / f"card-{model.version}.json", msgspec.json.format(msgspec.json.encode(card(model, jobs, seed, digest)))
    )
    _replace(folder / "current.json", msgspec.json.encode(Current(model.version, digest)))
    for old in folder.glob("model-*.msgpack"):
        if (version := _version(old)) <= model.version - _KEPT:
            old.unlink(missing_ok=True)
            (folder / f"card-{version}.json").unlink(missing_ok=True)


def card(model: Model, jobs: Sequence[Finished], seed: int, digest: str) -> dict[str, Any]:
    """What this model is and what it was made from."""
    import sklearn

    ends = [job.ended_at for job in jobs]
    return {
        "what": "quantiles of ln(run time, s) of GPU jobs",
        "version": model.version,
        "sha256": digest,
        "learner": f"scikit-learn {sklearn.__version__} HistGradientBoostingRegressor",
        "quantiles": QUANTILES,
        "trees": model.trees,
        "features": FEATURES,
        "seed": seed,
        "jobs": len(jobs),
        "censored": sum(job.censored for job in jobs),
        "ended_from": moment(min(ends)),
        "ended_until": moment(max(ends)),
    }


def moment(epoch_s: float) -> str:
    """RFC 3339; as it stands where it is no time."""
    try:
        return datetime.fromtimestamp(epoch_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    except (ValueError, OverflowError, OSError):
        return f"{epoch_s:g} s"


def load(folder: Path) -> Trees | None:
    """The current model; None where there is none. Raises DamagedModel."""
    try:
        pointer = msgspec.json.decode((folder / "current.json").read_bytes(), type=Current)
        data = (folder / f"model-{pointer.version}.msgpack").read_bytes()
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        raise DamagedModel(f"{folder}: no usable current.json: {error}") from None
    if hashlib.sha256(data).hexdigest() != pointer.sha256:
        raise DamagedModel(f"{folder}: model-{pointer.version}.msgpack is not what was trained; it is left out")
    return boosting.decode(data)


def _replace(path: Path, data: bytes) -> None:
    part = path.with_suffix(".part")
    with part.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def _version(path: Path) -> int:
    digits = path.stem.rpartition("-")[2]
    return int(digits) if digits.isdecimal() else -1


# ── the schedule ─────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class Training:
    """When to train and what came of it. `poll` is called now and then, and never waits for the child."""

    folder: Path
    every_jobs: int = 2_000
    every_s: float = 3_600.0
    limit_s: float = 900.0
    """A child that takes longer is killed."""
    seed: int = 1
    failures: int = 0
    last_failure: str = ""
    _child: subprocess.Popen[bytes] | None = None
    _started_s: float = field(default=-math.inf)
    _version: int = 0
    _jobs_then: int = 0

    def resume(self, boosted: boosting.Boosting, now_s: float) -> None:
        """Use the folder's current model, where there is one; its successor is due as if it had been trained just now.
        Raises DamagedModel."""
        trees = load(self.folder)
        if trees is not None:
            boosted.use(trees)
            self._started_s, self._jobs_then = now_s, boosted.observed

    def poll(self, boosted: boosting.Boosting, now_s: float) -> bool:
        """Start a child when it is time, or swap its model in when it is done: then True."""
        if self._child is not None:
            return self._finish(boosted, now_s)
        new = boosted.observed - self._jobs_then
        if len(boosted.finished) >= JOBS_LEAST and new >= self.every_jobs and now_s - self._started_s >= self.every_s:
            self._start(boosted, now_s)
        return False

    def _start(self, boosted: boosting.Boosting, now_s: float) -> None:
        self._started_s, self._jobs_then = now_s, boosted.observed
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._sweep()
            newest = max(map(_version, self.folder.glob("model-*.msgpack")), default=0)
            self._version = max(newest, boosted.trees.version if boosted.trees else 0) + 1
            _replace(self._jobs_file, msgspec.msgpack.encode(list(boosted.finished)))
            arguments = [str(self.folder), str(self._version), str(self.seed)]
            with self._errors_file.open("wb") as errors:
                self._child = subprocess.Popen(
                    [sys.executable, "-m", "streamsched.predict.training", *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=errors,
                    env={**os.environ, "OMP_NUM_THREADS": "1"},
                )
        except OSError as error:
            self._failed(f"{self.folder}: {error.strerror or error}")

    def _sweep(self) -> None:
        """What a child or a worker that was killed, or a full disk, left half done: the folder has no other owner."""
        for pattern in ("jobs-*.msgpack", "*.part"):
            for left in self.folder.glob(pattern):
                left.unlink(missing_ok=True)

    @property
    def _jobs_file(self) -> Path:
        return self.folder / f"jobs-{self._version}.msgpack"

    @property
    def _errors_file(self) -> Path:
        return self.folder / "training.log"

    def _finish(self, boosted: boosting.Boosting, now_s: float) -> bool:
        child = self._child
        assert child is not None
        code = child.poll()
        if code is None and now_s - self._started_s < self.limit_s:
            return False
        if code is None:
            child.kill()
            child.wait()
        self._child = None
        self._jobs_file.unlink(missing_ok=True)
        if code != 0:
            self._failed(f"took over {self.limit_s:g} s" if code is None else self._last_words(code))
            return False
        try:
            trees = load(self.folder)
        except DamagedModel as error:
            self._failed(str(error))
            return False
        if trees is not None:
            boosted.use(trees)
        return trees is not None

    def _last_words(self, code: int) -> str:
        """Of a child that failed; where its folder is full or gone there are none."""
        try:
            told = self._errors_file.read_text(errors="replace").strip().rpartition("\n")[2]
        except OSError as error:
            told = f"{self._errors_file}: {error.strerror}"
        return told or f"ended with {code} and could not say why: is {self.folder} full?"

    def _failed(self, why: str) -> None:
        self.failures += 1
        self.last_failure = f"training of run times: {why}; the model before it stays"

    def stop(self) -> None:
        """End a child that still runs."""
        if self._child is not None:
            self._child.kill()
            self._child.wait()
            self._child = None
            self._jobs_file.unlink(missing_ok=True)


def main(arguments: Sequence[str]) -> int:
    """The child. Its last line on standard error says what went wrong."""
    folder, version, seed = Path(arguments[0]), int(arguments[1]), int(arguments[2])
    os.nice(10)
    try:
        jobs = msgspec.msgpack.decode((folder / f"jobs-{version}.msgpack").read_bytes(), type=list[Finished])
        write(folder, fit(jobs, version, seed), jobs, seed)
    except (UserError, OSError, msgspec.MsgspecError) as error:
        sys.stderr.write(f"{error}\n")
        return UserError.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
