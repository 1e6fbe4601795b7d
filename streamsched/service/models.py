"""The models of a worker: what its folder holds and its registry names, looked at once a second.

    models/ --once a second--> ModelFolder (of a worker) --> PoolModel (of a pool, `pool_model.py`) --> windows

A model is no reason to stop a pool or not to start one. What cannot be read leaves in use what was in use, at the start
the base rule. It is told once in the log, and stays in the pools' summaries for as long as it lasts.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from streamsched.policy import by_name
from streamsched.policy.models import (
    MANIFEST,
    REGISTRY,
    Canary,
    Model,
    Registry,
    UnusableModel,
    load,
    model_of,
    read_manifest,
    read_registry,
    rule_without,
)

from .settings import Settings

log = logging.getLogger(__name__)

POLL_S: Final = 1.0
_AGAIN_S: Final = 3600.0
"""The same line is not said again for so long, however often a file comes and goes."""


class InUse(NamedTuple):
    """What a folder of models and the settings come to. Another object after each change, and what is in it is the same
    object for as long as its files are the same."""

    wanted: str
    model: Model | None
    """None: the base rule ranks."""
    base: str
    shadow: Model | None = None
    canary: Model | None = None
    canary_share: Canary | None = None
    problems: tuple[str, ...] = ()


class ModelFolder:
    """The models of a worker. `poll` reads what has changed; it blocks on the disk, and never raises."""

    def __init__(self, settings: Settings) -> None:
        """The setting `policy` has to ask for a model (`is_model`)."""
        wanted = model_of(settings.scheduler.policy)
        assert wanted is not None, settings.scheduler.policy
        self.folder = Path(settings.models_dir)
        self._only = wanted
        """By the setting; empty: the registry's default."""
        self._preempts = settings.scheduler.preempts_within_class
        self._registry = Registry()
        self._files: dict[str, str] = {}
        """By model, as its manifest names it."""
        self._seen: object = None
        self._settled = False
        self._told: dict[str, float] = {}
        self.in_use = InUse(wanted, None, rule_without(self._preempts))
        self.refused = 0
        """Models (or registries) that could not be used, so far: a metric."""

    def poll(self, now: float) -> bool:
        """Whether anything is another than before."""
        try:
            return self._poll(now)
        except Exception as error:  # models are no reason to end a worker
            line = f"models folder {self.folder}: {type(error).__name__}: {error}"
            if line not in self.in_use.problems:
                log.exception("%s; what is in use stays in use", line)
                self.refused += 1
                self.in_use = self.in_use._replace(problems=(line,))
            return False

    def _poll(self, now: float) -> bool:
        seen = self._marks()
        if seen == self._seen and self._settled:
            return False
        # Files may change while they are read: after a change they are read once more, at the next poll.
        self._settled = seen == self._seen
        before, found = self.in_use, self._read()
        self._seen = self._marks()
        if found == before:
            return False
        self.in_use = found
        self._tell(before, now)
        return True

    async def watch(self, clock: Callable[[], float]) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(POLL_S)
            await asyncio.to_thread(self.poll, clock())

    def _marks(self) -> object:
        """Changes when a file that matters does. Files are looked at through links, as they are read."""
        paths = [self.folder / REGISTRY]
        for name in self._names():
            paths += [self.folder / name / MANIFEST, self.folder / name / self._files.get(name, "")]
        return [(path, _mark(path)) for path in paths if path.name]

    def _names(self) -> list[str]:
        registry = self._registry
        canary = registry.canary.model if registry.canary is not None else ""
        return [name for name in (self._only or registry.default, registry.shadow, canary) if name]

    def _read(self) -> InUse:
        problems: list[str] = []
        registry = self._registry_or_last(problems)
        wanted = self._only or registry.default
        model, base = self._main(wanted, registry, problems)
        shadow = self._other(registry.shadow, "shadow", self.in_use.shadow, problems)
        share = registry.canary
        canary = self._other(share.model if share is not None else "", "canary", self.in_use.canary, problems)
        self._registry = registry
        self._files = {name: self._file_of(name) for name in self._names()}
        return InUse(wanted, model, base, shadow, canary, share if canary is not None else None, tuple(problems))

    def _file_of(self, name: str) -> str:
        try:
            return read_manifest(self.folder, name).file
        except UnusableModel:
            return ""

    def _registry_or_last(self, problems: list[str]) -> Registry:
        try:
            return read_registry(self.folder)
        except UnusableModel as error:
            if self._only and _mark(self.folder / REGISTRY) is None:
                return Registry()  # nobody needs one
            problems.append(str(error))
            return self._registry

    def _main(self, wanted: str, registry: Registry, problems: list[str]) -> tuple[Model | None, str]:
        base = registry.base or rule_without(self._preempts)
        if not wanted:
            return None, base
        try:
            model = load(self.folder, wanted, self._preempts)
        except UnusableModel as error:
            problems.append(str(error))
        else:
            return _kept(self.in_use.model, model), model.manifest.base
        if self.in_use.model is not None:
            return self.in_use.model, self.in_use.base
        try:
            return None, read_manifest(self.folder, wanted).base
        except UnusableModel:
            return None, base

    def _other(self, name: str, what: str, before: Model | None, problems: list[str]) -> Model | None:
        if not name:
            return None
        try:
            return _kept(before, load(self.folder, name, self._preempts))
        except UnusableModel as error:
            problems.append(f"{what}: {error}")
        return before if before is not None and before.name == name else None

    def _tell(self, before: InUse, now: float) -> None:
        used = self.in_use
        instead = f"model {used.model.name} stays in use" if used.model is not None else f"{used.base} ranks"
        new = [line for line in used.problems if line not in before.problems]
        self.refused += len(new)
        for line in new:
            if not 0 <= now - self._told.get(line, -math.inf) < _AGAIN_S:
                log.error("%s; %s", line, instead)
                self._told[line] = now
        if len(self._told) > 1_000:
            self._told.clear()
        if used.model is not None and used.model is not before.model:
            log.info("model %s (%s) ranks; its base rule is %s", used.model.name, used.model.digest[:12], used.base)
        elif used.model is None and before.model is not None:
            log.info("no model is named any more; %s ranks", used.base)
        for what, now_used, then_used in (
            ("compared: shadow", used.shadow, before.shadow),
            ("used for a share: canary", used.canary, before.canary),
        ):
            if now_used is not then_used:
                told = f"{now_used.name} ({now_used.digest[:12]})" if now_used is not None else "none"
                log.info("%s %s", what, told)


def is_model(settings: Settings) -> bool:
    """Whether the policy is a model of the folder, not a rule."""
    return model_of(settings.scheduler.policy) is not None


def check_policy(settings: Settings) -> None:
    """Raises UserError for a rule that there is not. Models are no reason not to start."""
    if not is_model(settings):
        by_name(settings.scheduler.policy)


def _mark(path: Path) -> tuple[int, ...] | None:
    try:
        found = path.stat()
    except (OSError, ValueError):
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino, found.st_ctime_ns


def _kept(before: Model | None, read: Model) -> Model:
    """The one of before, where they are the same."""
    same = before is not None and (before.name, before.manifest, before.digest) == (
        read.name,
        read.manifest,
        read.digest,
    )
    return before if same and before is not None else read
