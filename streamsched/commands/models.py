"""`streamsched models`: what lies in the folder of models, and which of them rank. Workers look once a second."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from msgspec.structs import replace
from rich.console import Console
from rich.table import Table
from rich.text import Text

from streamsched.errors import CheckFailed, UserError
from streamsched.policy import by_name
from streamsched.policy.expression import Expression
from streamsched.policy.models import (
    MANIFEST,
    REGISTRY,
    Canary,
    Model,
    Registry,
    UnusableModel,
    is_name,
    load,
    read_registry,
    write_registry,
)

models_app = typer.Typer(help="The models that can rank: list, check, and choose them.", no_args_is_help=True)
console = Console(highlight=False, width=None if Console().is_terminal else 200)

DirOption = Annotated[
    Path | None, typer.Option("--models-dir", help="The folder of models; the setting models_dir when not given.")
]
NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="A model of the folder.")]
OffOption = Annotated[bool, typer.Option("--off", help="None any more.")]


@models_app.command("list")
def list_command(
    models_dir: DirOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document instead of a table.")] = False,
) -> None:
    """What models there are, which of them are used, and what is wrong with those that cannot be."""
    folder = _folder(models_dir)
    registry, problem = _registry_or_problem(folder)
    named = {registry.default, registry.shadow, registry.canary.model if registry.canary is not None else ""}
    rows = [_row(folder, name, registry) for name in sorted({*_names(folder), *named} - {""})]
    if as_json:
        told = {"folder": str(folder), "registry": _told(registry), "problem": problem, "models": rows}
        typer.echo(json.dumps(told, indent=1))
        return
    table = Table("model", "used as", "kind", "for", "base", "file", "can be used", box=None)
    for row in rows:
        cells = [row[key] or "" for key in ("name", "used_as", "kind", "regime", "base", "digest", "problem")]
        table.add_row(*(Text(cell) for cell in [*cells[:-1], cells[-1] or "yes"]))
    console.print(table)
    if problem:
        console.print(f"{problem}: until there is one, rules rank", markup=False)


@models_app.command("check")
def check_command(name: NameArgument, models_dir: DirOption = None) -> None:
    """Whether the model can be used by this version, and what it is. Exit code 1 when it cannot."""
    folder = _folder(models_dir)
    try:
        model = load(folder, name)
    except UnusableModel as error:
        raise CheckFailed(str(error)) from None
    manifest = model.manifest
    program = str(model.program) if isinstance(model.program, Expression) else _shape(model)
    console.print(f"model {name}: {manifest.kind} of {manifest.file}, SHA-256 {model.digest}", markup=False)
    console.print(f"  {program}", markup=False)
    console.print(f"  trained from {manifest.base}, for pools of regime {manifest.regime}", markup=False)


@models_app.command("use")
def use_command(
    name: Annotated[str, typer.Argument(metavar="[NAME]", help="A model of the folder.")] = "",
    base: Annotated[str | None, typer.Option(help="The rule where no model is named or readable.")] = None,
    off: OffOption = False,
    models_dir: DirOption = None,
) -> None:
    """Rank by this model from now on (with --off by the base rule), in all pools whose policy is `model`."""
    folder = _folder(models_dir)
    if bool(name) == off and not (base is not None and not name and not off):
        raise UserError("models use: give a NAME, or --off, or only --base RULE")
    if name:
        load(folder, name)
    if base is not None:
        by_name(base)
    registry = _registry(folder)
    default = "" if off else name or registry.default
    _write(folder, replace(registry, default=default, base=registry.base if base is None else base))
    typer.echo(f"ranks: {default or 'the base rule'}; workers look once a second, `streamsched status` shows it")


@models_app.command("shadow")
def shadow_command(
    name: Annotated[str, typer.Argument(metavar="[NAME]", help="A model of the folder.")] = "",
    off: OffOption = False,
    models_dir: DirOption = None,
) -> None:
    """Compare the scores of this model with those in use, without using them."""
    folder = _folder(models_dir)
    _one_of(name, off, "shadow")
    if name:
        load(folder, name)
    _write(folder, replace(_registry(folder), shadow=name))
    typer.echo(f"shadow: {name or 'none'}; workers look once a second, `streamsched status` shows it")


@models_app.command("canary")
def canary_command(
    name: Annotated[str, typer.Argument(metavar="[NAME]", help="A model of the folder.")] = "",
    fraction: Annotated[float, typer.Option(help="Share of the jobs, from 0 to 1, drawn by their ids.")] = 0.0,
    tenant: Annotated[list[str] | None, typer.Option(help="All jobs of this tenant; may be repeated.")] = None,
    off: OffOption = False,
    models_dir: DirOption = None,
) -> None:
    """Let this model rank a share of the jobs among themselves; all others keep their places."""
    folder = _folder(models_dir)
    _one_of(name, off, "canary")
    if off and (fraction or tenant):
        raise UserError("models canary: --off goes without a share")
    if name:
        load(folder, name)
    canary = Canary(name, fraction, tuple(dict.fromkeys(tenant or ()))) if name else None
    _write(folder, replace(_registry(folder), canary=canary))
    typer.echo(f"canary: {name or 'none'}; workers look once a second, `streamsched status` shows it")


def _one_of(name: str, off: bool, command: str) -> None:
    if bool(name) == off:
        raise UserError(f"models {command}: give a NAME, or --off")


def _folder(models_dir: Path | None) -> Path:
    """Raises UserError where there is none."""
    from streamsched.service.settings import Settings

    folder = models_dir if models_dir is not None else Path(Settings.from_env().models_dir)
    if not folder.is_dir():
        raise UserError(f"models folder {folder}: not there; name it by --models-dir or STREAMSCHED_MODELS_DIR")
    return folder


def _names(folder: Path) -> list[str]:
    try:
        found = [path.parent.name for path in folder.glob(f"*/{MANIFEST}")]
    except OSError as error:
        raise UserError(f"models folder {folder}: {(error.strerror or str(error)).lower()}") from None
    return sorted(filter(is_name, found))


def _registry(folder: Path) -> Registry:
    """To be changed: one that cannot be read is not written over."""
    if not (folder / REGISTRY).exists():
        return Registry()
    return read_registry(folder)


def _registry_or_problem(folder: Path) -> tuple[Registry, str]:
    try:
        return read_registry(folder), ""
    except UnusableModel as error:
        return Registry(), str(error)


def _write(folder: Path, registry: Registry) -> None:
    write_registry(folder, registry)


def _row(folder: Path, name: str, registry: Registry) -> dict[str, Any]:
    canary = registry.canary
    used = [
        *(["default"] if registry.default == name else []),
        *(["shadow"] if registry.shadow == name else []),
        *([f"canary ({_share(canary)})"] if canary is not None and canary.model == name else []),
    ]
    row: dict[str, Any] = dict.fromkeys(("kind", "regime", "base", "digest", "problem"))
    try:
        model = load(folder, name)
    except UnusableModel as error:
        row["problem"] = str(error)
    else:
        manifest = model.manifest
        row |= {"kind": manifest.kind, "regime": manifest.regime, "base": manifest.base, "digest": model.digest[:12]}
    return {"name": name, "used_as": ", ".join(used)} | row


def _share(canary: Canary) -> str:
    parts = [f"{100.0 * canary.fraction:g}% of the jobs"] if canary.fraction else []
    return " and ".join([*parts, *([f"{len(canary.tenants)} tenants"] if canary.tenants else [])])


def _told(registry: Registry) -> dict[str, Any]:
    canary = registry.canary
    told = {"default": registry.default, "base": registry.base, "shadow": registry.shadow}
    share = {"model": canary.model, "fraction": canary.fraction, "tenants": list(canary.tenants)} if canary else None
    return told | {"canary": share}


def _shape(model: Model) -> str:
    assert not isinstance(model.program, Expression)
    sizes = " x ".join(map(str, model.program.sizes))
    levels = len(model.program.levels_gpu_s)
    return f"layers of {sizes} units" + (f", by {levels} levels of service" if levels else "")
