"""`streamsched report-paper`: how a paper compared, on any trace and cluster, and what else it could have seen."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import typer
from rich.console import Console
from rich.progress import Progress

from streamsched.commands.output import make_folder, print_table, write_text
from streamsched.commands.slices import Before, From, Limit, Nodes, ScenarioFile, Slice, TraceFile, given_slice

if TYPE_CHECKING:
    from streamsched.sim.paper import Case, Figure

_DIFFERENCES = (
    "Each batch starts on an empty cluster, and after it nothing comes: there is no queue and no load but its own.",
    "A batch of {size} jobs is {hours:.1f} hours of submissions here (mean), which ask for {asked:,.0f} GPUs in all"
    " (mean) of a cluster of {gpus:,}.",
    "In {idle} of {batches} batches nobody waits under FCFS without backfilling: there no rule can be better.",
    "Utilisation is to the last completion: one long job at the end of a batch lowers it under every rule.",
    "sjf, wfp3, unicep, f1 and EASY see true run times (oracle): nobody could deploy that.",
)
_LEGEND = (
    "Changes are to FCFS without backfilling. By backfill alone: what FCFS gains in wait by the same backfilling, as a"
    " share of what the case gains; by rule alone: so for the rule without backfilling. Both mend much of the same, so"
    " that they may add up to more than all."
)


def report_paper(
    paper: Annotated[Literal["rltune"], typer.Argument(help="rltune: arXiv 2512.10271.")],
    out: Annotated[Path, typer.Option(help="Folder for summary.json and report.html.")],
    scenario: ScenarioFile = None,
    trace: TraceFile = None,
    nodes: Nodes = None,
    submitted_from: From = None,
    submitted_before: Before = None,
    limit: Limit = None,
    batches: Annotated[int | None, typer.Option(min=2, help="Drawn by the seed; all that there are.")] = None,
    batch_jobs: Annotated[int, typer.Option(min=2, help="Consecutive jobs of a batch.")] = 256,
    seed: Annotated[int, typer.Option(min=0, help="Of the drawn batches and of the intervals.")] = 1,
) -> None:
    """Compare rules by a paper's protocol, and on the continuous trace beside it.

    RLTune: batches of 256 consecutive jobs, each on an empty cluster; FCFS, SJF, WFP3, UNICEP, F1 and Slurm's
    multifactor, each without backfilling, with skipping and with EASY. Needs the extra `fast`.
    """
    asked = _asked(given_slice(scenario, trace, nodes, submitted_from, submitted_before, limit))
    found = _run(asked, batches, batch_jobs, seed)
    make_folder(out)
    write_text(out / "summary.json", json.dumps(_document(found), indent=2) + "\n")
    write_text(out / "report.html", _page(found))
    _print(found)


@dataclass(frozen=True)
class _Asked:
    source: Slice
    jobs: Any
    """`fast.Workload` of the jobs that fit the cluster."""
    never_fit: int


@dataclass(frozen=True)
class _Found:
    asked: _Asked
    size: int
    seed: int
    hours: float
    """Mean span of a batch's submissions."""
    gpus: float
    """Mean sum of the GPUs that a batch asks for."""
    cases: list[Case]
    cold: list[list[Figure]]
    """[case][metric] over batches."""
    warm: list[list[Figure]]
    """[case][metric] of the continuous run."""

    @property
    def batches(self) -> int:
        return len(self.cases[0].batches)

    @property
    def idle(self) -> int:
        """Batches in which nobody waits even under FCFS without backfilling."""
        return int((self.cases[0].batches[:, 0] == 0).sum())

    @property
    def differences(self) -> list[str]:
        facts = {
            "size": self.size,
            "hours": self.hours,
            "asked": self.gpus,
            "gpus": sum(self.asked.source.node_gpus),
            "idle": self.idle,
            "batches": self.batches,
        }
        return [text.format(**facts) for text in _DIFFERENCES]


def _asked(source: Slice) -> _Asked:
    from streamsched.sim.fast import Workload

    fitting = source.fitting()
    return _Asked(source=source, jobs=Workload.of(fitting), never_fit=len(source.read().jobs) - len(fitting))


def _run(asked: _Asked, batches: int | None, size: int, seed: int) -> _Found:
    from streamsched.sim import paper

    starts = paper.choose(len(asked.jobs), size, batches, seed)
    rules = paper.known_rules()
    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("rules", total=len(rules) * len(paper.BACKFILLS))
        cases = paper.run(asked.jobs, asked.source.node_gpus, starts, size, rules, lambda: bar.advance(task))
    submit_s, gpus = asked.jobs.submit_s, np.append(0, np.cumsum(asked.jobs.gpus))
    return _Found(
        asked=asked,
        size=size,
        seed=seed,
        hours=float((submit_s[starts + size - 1] - submit_s[starts]).mean()) / 3600.0,
        gpus=float((gpus[starts + size] - gpus[starts]).mean()),
        cases=cases,
        cold=paper.over_batches(cases, seed),
        warm=paper.continuous(cases),
    )


# ── what is told ─────────────────────────────────────────────────────────────────────────────────────────────────────


def _document(found: _Found) -> dict[str, object]:
    asked = found.asked
    return {
        "paper": "RLTune, arXiv 2512.10271",
        "trace": asked.source.trace.name,
        "nodes": asked.source.cluster,
        "jobs": len(asked.jobs),
        "never_fit": asked.never_fit,
        "batch_jobs": found.size,
        "batches": found.batches,
        "batches_without_wait": found.idle,
        "seed": found.seed,
        "differences": found.differences,
        "cases": [
            {
                "rule": case.rule,
                "backfill": case.backfill,
                "oracle": case.oracle,
                "over_batches": _keys(cold),
                "continuous": _keys(warm),
            }
            for case, cold, warm in zip(found.cases, found.cold, found.warm, strict=True)
        ],
    }


def _keys(figures: Sequence[Figure]) -> dict[str, object]:
    from streamsched.sim.paper import METRICS

    told: dict[str, object] = {}
    for key, figure in zip(METRICS, figures, strict=True):
        told[key] = figure.mean
        told[f"{key}_95"] = figure.interval
        told[f"{key}_change"] = figure.change
        told[f"{key}_change_95"] = figure.change_interval
        told[f"{key}_backfill_share"] = figure.backfill_share
        told[f"{key}_rule_share"] = figure.rule_share
    return {key: value for key, value in told.items() if not (value is None and key.endswith("_95"))}


def _rows(found: _Found, figures: list[list[Figure]]) -> list[dict[str, str]]:
    rows = []
    for case, (wait, jct, slowdown, used) in zip(found.cases, figures, strict=True):
        rows.append(
            {
                "rule": case.label,
                "backfill": f"{case.backfill} (oracle)" if case.backfill == "easy" else case.backfill,
                "wait s": _value(wait, "{:,.0f}"),
                "JCT s": _value(jct, "{:,.0f}"),
                "slowdown": _value(slowdown, "{:,.1f}"),
                "utilisation": _value(used, "{:.3f}"),
                "wait to FCFS": _change(wait),
                "JCT to FCFS": _change(jct),
                "slowdown to FCFS": _change(slowdown),
                "by backfill alone": _share(wait.backfill_share),
                "by rule alone": _share(wait.rule_share),
            }
        )
    return rows


def _value(figure: Figure, form: str) -> str:
    between = "" if figure.interval is None else "\n" + " - ".join(form.format(end) for end in figure.interval)
    return form.format(figure.mean) + between


def _change(figure: Figure) -> str:
    if figure.change is None:
        return "-"
    between = figure.change_interval
    return f"{figure.change:+.1%}" + ("" if between is None else f"\n{between[0]:+.0%} to {between[1]:+.0%}")


def _share(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _titles(found: _Found) -> tuple[str, str]:
    return (
        f"{found.batches} batches of {found.size} jobs, each on an empty cluster; below: 95 % intervals over batches",
        f"the same {len(found.asked.jobs):,} jobs in one stream",
    )


def _print(found: _Found) -> None:
    console = Console()
    console = console if console.is_terminal else Console(width=190)
    console.print(f"RLTune's protocol: {found.asked.source.name} on {found.asked.source.cluster}", markup=False)
    for title, figures in zip(_titles(found), (found.cold, found.warm), strict=True):
        print_table(title, _rows(found, figures), names=2, width=190)
    for text in (_LEGEND, *found.differences):
        console.print(f"- {text}", markup=False, highlight=False)
    if found.asked.never_fit:
        console.print(f"- {found.asked.never_fit:,} jobs that these nodes cannot hold are left out.", markup=False)
    if refused := found.asked.source.refused():
        Console(stderr=True).print(refused, markup=False, soft_wrap=True)


def _page(found: _Found) -> str:
    from streamsched.sim import svg

    asked = found.asked
    facts = [
        ("paper", "RLTune, arXiv 2512.10271"),
        ("trace", asked.source.trace.name),
        ("cluster", asked.source.cluster),
        ("jobs", f"{len(asked.jobs):,}; left out, as no nodes could hold them: {asked.never_fit:,}"),
        ("batches", f"{found.batches} of {found.size} consecutive jobs, disjoint; seed {found.seed}"),
        ("estimates", "true run times (oracle)"),
    ]
    body = svg.facts_table(facts)
    body += "<h2>How the two differ</h2>" + svg.items(found.differences)
    for title, figures in zip(_titles(found), (found.cold, found.warm), strict=True):
        body += f"<h2>{title[0].upper()}{title[1:]}</h2>" + svg.table(_rows(found, figures))
        for metric, name in enumerate(("Mean wait, s", "Mean JCT, s", "Mean bounded slowdown")):
            bars = [
                (f"{case.rule}, {case.backfill}", of[metric].mean, of[metric].interval)
                for case, of in zip(found.cases, figures, strict=True)
            ]
            body += svg.bars(name, bars)
    body += f"<p>{_LEGEND}</p>"
    return svg.document(f"streamsched: RLTune's protocol on {asked.source.name}", body)
