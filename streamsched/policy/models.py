"""The models that can rank a queue: what lies in a folder of models, checked before anything is used.

    models/
      registry.toml      which model ranks, which one is only compared, which one gets a share of the jobs
      NAME/model.toml    what the model is (`Manifest`)
      NAME/...           the file that it names, a network or an expression; card, training report

Nothing here runs code from a file, follows a path out of the folder, or reads more than a bounded number of bytes.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import stat
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final, Literal

import msgspec
import numpy as np
from msgspec import Struct

from streamsched.core.window import Ranker
from streamsched.errors import UserError

from . import RULES
from . import network as networks
from .expression import ByExpression, Expression, parse
from .features import FEATURES_VERSION, INDEX, NAMES, Features, Float32s
from .network import ByNetwork, Network, UnusableModel

__all__ = [
    "Canary",
    "Manifest",
    "Model",
    "Registry",
    "UnusableModel",
    "is_name",
    "load",
    "model_of",
    "read_registry",
    "rule_without",
    "write_registry",
]

REGISTRY: Final = "registry.toml"
MANIFEST: Final = "model.toml"
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_TOML_MAX: Final = 1 << 16
_FILE_MAX: Final = 1 << 24
"""Bytes: the largest network there can be has half of that."""
TENANTS_MAX: Final = 1_000
POLICY: Final = "model"
"""As a policy: the registry's default. `model:NAME` is that one, whatever the registry says."""


class Manifest(Struct, frozen=True, forbid_unknown_fields=True):
    """`model.toml`."""

    kind: Literal["network", "expression"]
    file: str
    """In the same folder."""
    regime: Literal["plain", "preemptive", "any"]
    """`preemptive`: trained to rank running jobs too, for pools whose `preempt` is `score` or `rank`; `plain`: for
    others."""
    base: str
    """The rule that it was trained from, and that ranks where the model cannot."""
    features_version: int
    reserve_after_s: float | None = None
    """The bound on waits that it was trained with, s; for the reader."""
    ranges: dict[str, tuple[float, float]] = {}
    """Of an expression: least and largest value of features in training (a network's file has its own)."""


class Canary(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A model that ranks a share of the jobs: those of some tenants, and a fraction of all others."""

    model: str
    fraction: float = 0.0
    tenants: tuple[str, ...] = ()


class Registry(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """`registry.toml`."""

    default: str = ""
    """The model that ranks; empty: the base rule does."""
    base: str = ""
    """The rule where no model is named, or nothing can be read of the one that is. Empty: FCFS, with preemption LAS."""
    shadow: str = ""
    """A model whose scores are told beside those that are used."""
    canary: Canary | None = None


@dataclass(frozen=True, eq=False)
class Model:
    """One that can be used."""

    name: str
    manifest: Manifest
    digest: str
    """SHA-256 of its file."""
    program: Network | Expression

    @property
    def policy(self) -> str:
        """As decisions name it."""
        return f"{POLICY}:{self.name}"

    @property
    def sees_run_times(self) -> bool:
        """Whether they make a difference to it."""
        looked_at = self.program.looked_at if isinstance(self.program, Network) else self.program.features
        return bool(looked_at & {"run_s", "spread", "work_gpu_s"})

    def ranker(self, features: Features) -> Ranker:
        """`features` may be shared with others that look at the same pool."""
        if isinstance(self.program, Network):
            return ByNetwork(self.policy, self.program, features)
        return ByExpression(self.policy, self.program, features)

    @cached_property
    def _ranges(self) -> tuple[list[int], Float32s, Float32s]:
        """Features that it looks at and whose range of training is known, by place; [feature] low and high."""
        if isinstance(self.program, Network):
            known = {name: (self.program.low[INDEX[name]], self.program.high[INDEX[name]]) for name in NAMES}
            looked_at = self.program.looked_at
        else:
            known, looked_at = dict(self.manifest.ranges), self.program.features
        places = [INDEX[name] for name in NAMES if name in known and name in looked_at]
        low, high = np.array([known[NAMES[place]] for place in places], np.float32).reshape(-1, 2).T
        return places, low, high

    def outside(self, features: Float32s) -> dict[str, float]:
        """Share of the jobs (rows) outside of the range of training, by each feature that it looks at and that has
        one."""
        places, low, high = self._ranges
        if not places or not len(features):
            return {}
        seen = features[:, places]
        shares = ((seen < low) | (seen > high)).mean(axis=0).tolist()
        return {NAMES[place]: share for place, share in zip(places, shares, strict=True)}


def is_name(text: str) -> bool:
    """Whether a model can be called so: it is the name of a folder, and part of a policy's name."""
    return _NAME.fullmatch(text) is not None


def model_of(policy: str) -> str | None:
    """The model that a policy asks for, empty for the registry's default; None for a rule."""
    if policy == POLICY:
        return ""
    return policy.removeprefix(f"{POLICY}:") if policy.startswith(f"{POLICY}:") else None


def rule_without(preempts: bool) -> str:
    """The rule where nobody named one: nothing has to be known of run times."""
    return "las" if preempts else "fcfs"


# ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def load(folder: Path, name: str, preempts: bool | None = None) -> Model:
    """The model of that name in the folder of models. Raises UnusableModel, which says in one line what is wrong.

    `preempts`: whether the ranking decides who runs in the pools that are to be ranked; None: not looked at.
    """
    manifest = read_manifest(folder, name)
    trained = manifest.regime != "plain"
    if preempts is not None and manifest.regime != "any" and trained != preempts:
        raise UnusableModel(
            f"model {name}: trained {'with' if trained else 'without'} preemption: the setting `preempt` has to be"
            f" {'score or rank' if trained else 'off or class'} here"
        )
    where = f"model {name}, {manifest.file}"
    data = _bytes(folder, Path(name) / manifest.file, _FILE_MAX, f"model {name}")
    program = networks.from_bytes(data, where) if manifest.kind == "network" else _expression(data, where)
    return Model(name, manifest, hashlib.sha256(data).hexdigest(), program)


def read_manifest(folder: Path, name: str) -> Manifest:
    """Of that model. Raises UnusableModel."""
    if not is_name(name):
        raise UnusableModel(f"model {name[:100]!r} is no name (letters, digits and ._-, at most 64)")
    where = f"model {name}"
    data = _bytes(folder, Path(name) / MANIFEST, _TOML_MAX, where)
    try:
        manifest = msgspec.toml.decode(data, type=Manifest)
    except (ValueError, RecursionError) as error:  # also of numbers with thousands of digits
        raise UnusableModel(f"{where}, {MANIFEST}: {error}") from None
    if manifest.features_version != FEATURES_VERSION:
        raise UnusableModel(
            f"{where}, {MANIFEST}: features of version {manifest.features_version}, this version has"
            f" {FEATURES_VERSION}; train it anew"
        )
    if manifest.base not in RULES:
        raise UnusableModel(f"{where}, {MANIFEST}: base {manifest.base[:100]!r} is no rule")
    if not is_name(manifest.file):
        raise UnusableModel(f"{where}, {MANIFEST}: file {manifest.file[:100]!r} is no name of a file beside it")
    _check_ranges(f"{where}, {MANIFEST}", manifest.ranges)
    return manifest


def _check_ranges(where: str, ranges: Mapping[str, tuple[float, float]]) -> None:
    for name, (low, high) in ranges.items():
        if name not in INDEX:
            raise UnusableModel(f"{where}: ranges: no feature {name[:100]!r}; there are {', '.join(NAMES)}")
        if not (math.isfinite(low) and math.isfinite(high) and low < high):
            raise UnusableModel(f"{where}: ranges: {name} from {low:g} to {high:g} is no range")


def _expression(data: bytes, where: str) -> Expression:
    """Lines that begin with # are remarks."""
    try:
        lines = data.decode().splitlines()
        return parse(" ".join(line for line in lines if not line.lstrip().startswith("#")))
    except (UserError, UnicodeDecodeError) as error:
        raise UnusableModel(f"{where}: {error}") from None


def _bytes(folder: Path, path: Path, most: int, where: str) -> bytes:
    """Of a plain file inside of the folder, wherever links lead. Raises UnusableModel."""
    try:
        real = (folder / path).resolve(strict=True)
        if not real.is_relative_to(folder.resolve()):
            raise UnusableModel(f"{where}: {folder / path} leads out of {folder}")
        found = real.stat()
        if not stat.S_ISREG(found.st_mode):
            raise UnusableModel(f"{where}: {folder / path} is no file")
        if found.st_size > most:
            raise UnusableModel(f"{where}: {folder / path} has {found.st_size:,} bytes, {most:,} at most")
        with real.open("rb") as file:
            return file.read(most)
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: a loop of links
        told = getattr(error, "strerror", None) or str(error)
        raise UnusableModel(f"{where}: {folder / path}: {told.lower()}") from None


# ── the registry ─────────────────────────────────────────────────────────────────────────────────────────────────────


def read_registry(folder: Path) -> Registry:
    """Raises UnusableModel, also where there is none."""
    where = "registry of models"
    data = _bytes(folder, Path(REGISTRY), _TOML_MAX, where)
    try:
        registry = msgspec.toml.decode(data, type=Registry)
    except (ValueError, RecursionError) as error:  # also of numbers with thousands of digits
        raise UnusableModel(f"{where}: {folder / REGISTRY}: {error}") from None
    try:
        check_registry(registry)
    except UserError as error:
        raise UnusableModel(f"{where}: {folder / REGISTRY}: {error}") from None
    return registry


def check_registry(registry: Registry) -> None:
    """Raises UserError for what it must not say. Whether the models are usable is another question."""
    canary = registry.canary
    for name in (registry.default, registry.shadow, *((canary.model,) if canary is not None else ())):
        if name and not is_name(name):
            raise UserError(f"{name[:100]!r} is no name of a model (letters, digits and ._-, at most 64)")
    if registry.base and registry.base not in RULES:
        raise UserError(f"base {registry.base[:100]!r} is no rule: choose one of {', '.join(sorted(RULES))}")
    if canary is None:
        return
    if not canary.model:
        raise UserError("canary: name a model")
    if not 0.0 <= canary.fraction <= 1.0:
        raise UserError(f"canary: fraction {canary.fraction:g}: expected a number from 0 to 1")
    if canary.fraction == 0.0 and not canary.tenants:
        raise UserError("canary: give a fraction above 0, or tenants")
    if len(canary.tenants) > TENANTS_MAX:
        raise UserError(f"canary: {len(canary.tenants)} tenants, {TENANTS_MAX} at most")


def write_registry(folder: Path, registry: Registry) -> None:
    """At once or not at all. Raises UserError."""
    check_registry(registry)
    path = folder / REGISTRY
    text = (
        "# Which model ranks. `streamsched models` writes this file, so remarks in it do not last; workers look at it"
        " once a second.\n"
    )
    text += "".join(f"{name} = {json.dumps(value)}\n" for name, value in _texts(registry).items())
    if registry.canary is not None:
        text += f"\n[canary]\nmodel = {json.dumps(registry.canary.model)}\nfraction = {registry.canary.fraction!r}\n"
        text += f"tenants = {json.dumps(list(registry.canary.tenants))}\n"
    try:
        _replace(path, text.encode())
    except OSError as error:
        raise UserError(f"{path}: {(error.strerror or str(error)).lower()}") from None


def _texts(registry: Registry) -> dict[str, str]:
    return {name: getattr(registry, name) for name in ("default", "base", "shadow")}


def _replace(path: Path, data: bytes) -> None:
    """Readers see the old file or the new one, also after the machine lost its power."""
    mode = path.stat().st_mode & 0o777 if path.exists() else 0o644
    number, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(number, "wb") as file:
            file.write(data)
            file.flush()
            os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
