"""Cards of learned policies: what each was trained on, and what it reached on jobs that it had not seen.

A model is a folder: one exported policy per seed of training, `training.json` (`Training`) from whoever trained it, and
`card.md` and `card.json` from here. Equal input gives equal bytes: no time, no machine.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from streamsched.errors import UserError

from .judge import Judged, Measure, Part, Regime, best_rule, difference

TRAINING_FILE: Final = "training.json"


class Training(msgspec.Struct, frozen=True, kw_only=True):
    """What whoever trained a policy says of it. Fields that are not known here are left alone."""

    name: str
    method: str
    """For instance "genetic programming" or "PPO"."""
    command: str
    """That trains it again."""
    slice: str
    """On whose jobs it was trained and chosen."""
    trained_on: str
    """Dates: submitted from, submitted before."""
    chosen_on: str
    seeds: list[int]
    commit: str
    features: list[str]
    features_version: int
    run_times: str = "predicted, learned from the jobs before the slice"
    """What it sees of them."""
    limits: list[str] = []


@dataclass(frozen=True, eq=False)
class Table:
    """Rows of one part of one slice and one regime: the rules, and the policy that the card is of."""

    slice: str
    part: Part
    regime: Regime
    rows: Sequence[Judged]

    @property
    def title(self) -> str:
        return f"{self.slice}, {self.part} part, {self.regime}"


def read_training(folder: Path) -> Training:
    """Raises UserError where the file is missing or is none."""
    path = folder / TRAINING_FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=Training)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise UserError(f"{path}: {error}") from None


def write(folder: Path, training: Training, tables: Sequence[Table], chosen_seed: int | None = None) -> None:
    """`card.md` and `card.json`. `chosen_seed`: the best one by the part for choosing, which is the one to use."""
    (folder / "card.md").write_text(text(training, tables, chosen_seed), encoding="utf-8")
    (folder / "card.json").write_bytes(msgspec.json.format(_document(training, tables, chosen_seed), indent=2) + b"\n")


def text(training: Training, tables: Sequence[Table], chosen_seed: int | None = None) -> str:
    facts = {
        "method": training.method,
        "trained on": f"{training.slice}, {training.trained_on}",
        "chosen on": f"{training.slice}, {training.chosen_on}",
        "seeds": ", ".join(map(str, training.seeds))
        + ("" if chosen_seed is None else f"; {chosen_seed} is used, the best one on the part for choosing"),
        "run times": training.run_times,
        "features": f"version {training.features_version}: {', '.join(training.features)}",
        "commit": training.commit,
        "command": f"`{training.command}`",
    }
    lines = [f"# {training.name}", "", "| | |", "|---|---|", *(f"| {key} | {value} |" for key, value in facts.items())]
    for table in tables:
        title = table.title + ("" if table.slice == training.slice else " (cross-trace)")
        lines += [
            "",
            f"## {title[0].upper()}{title[1:]}",
            "",
            *markdown(leading(table.rows)),
            "",
            *compared(table.rows),
        ]
        if any(row.oracle for row in table.rows):
            lines += ["", "ORACLE: sees true run times. Nobody could deploy it."]
    lines += ["", "## Limits", "", *(f"- {limit}" for limit in (*training.limits, *LIMITS))]
    return "\n".join(lines) + "\n"


LIMITS: Final = (
    "Of the rules and oracles the best are shown; card.json has all.",
    "Intervals (95 %) draw the days of the part, the same for all rows. Seven days are few, and queues hold together"
    " for longer than a day: they are rather too narrow.",
    "Arrivals end with the part: its last jobs meet less of a queue than they would, under every policy.",
    "The rule that a policy is set against is the best one by the same jobs, which favours the rules.",
)


def markdown(rows: Sequence[Judged]) -> list[str]:
    """A table, lowest mean wait first, each row set against the best rule that could be deployed."""
    against = best_rule(rows)
    headings = (
        "policy", "sees", "mean wait, s", "against the best rule", "p50", "p99", "longest", "mean JCT", "slowdown",
        "utilisation", "preemptions per job",
    )  # fmt: skip
    ordered = sorted(rows, key=lambda row: (row.values[Measure.MEAN_WAIT], row.name))
    return markdown_table(headings, [_cells(row, against) for row in ordered])


def markdown_table(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Its lines."""
    written = ["| " + " | ".join(map(str, cells)) + " |" for cells in (headings, *rows)]
    return [written[0], "|" + "---|" * len(headings), *written[1:]]


def leading(rows: Sequence[Judged], rules: int = 10, oracles: int = 3) -> list[Judged]:
    """Learned policies, the best rules and oracles by mean wait, and FCFS with and without skipping."""
    ordered = sorted(rows, key=lambda row: (row.values[Measure.MEAN_WAIT], row.name))
    deployable = [row for row in ordered if not (row.learned or row.oracle)]
    fcfs = [row for row in deployable[rules:] if row.name in ("fcfs, none", "fcfs, skip")]
    known = [row for row in ordered if row.oracle]
    return [*(row for row in ordered if row.learned), *deployable[:rules], *fcfs, *known[:oracles]]


def compared(rows: Sequence[Judged]) -> list[str]:
    """A line for each learned policy: what it has less than the best rule, on the same days."""
    against = best_rule(rows)
    lines = []
    for row in rows:
        if row.learned:
            told = ", ".join(f"{name} {_difference(row, against, measure)}" for measure, name in _COMPARED.items())
            lines.append(f"- {row.name} against {against.name} ({against.sees}): {told}.")
    return lines


_COMPARED: Final = {
    Measure.MEAN_WAIT: "mean wait",
    Measure.P99_WAIT: "p99",
    Measure.MAX_WAIT: "longest",
    Measure.MEAN_JCT: "mean JCT",
}


def _difference(row: Judged, against: Judged, measure: Measure) -> str:
    found = difference(row, against, measure)
    between = "" if found.interval is None else f" ({found.interval[0]:+,.0f} to {found.interval[1]:+,.0f})"
    return f"{found.value:+,.0f}{between}"


def _cells(row: Judged, against: Judged) -> list[str]:
    return [
        f"**{row.name}**" if row.learned else row.name,
        str(row.sees),
        _figure(row, Measure.MEAN_WAIT),
        "-" if row is against else _difference(row, against, Measure.MEAN_WAIT),
        f"{row.values[Measure.P50_WAIT]:,.0f}",
        _figure(row, Measure.P99_WAIT),
        f"{row.values[Measure.MAX_WAIT]:,.0f}",
        _figure(row, Measure.MEAN_JCT),
        _figure(row, Measure.SLOWDOWN, 2),
        f"{row.values[Measure.UTILISATION]:.1%}",
        f"{row.values[Measure.PREEMPTIONS]:.2f}",
    ]


def _figure(row: Judged, measure: Measure, digits: int = 0) -> str:
    """Value, interval, and where there were several seeds the least and the most of them."""
    shown = f"{row.values[measure]:,.{digits}f}"
    interval = row.interval(measure)
    if interval is not None:
        shown += f" ({interval[0]:,.{digits}f} - {interval[1]:,.{digits}f})"
    if row.least:
        shown += f"; seeds {row.least[measure]:,.{digits}f} to {row.most[measure]:,.{digits}f}"
    return shown


def _document(training: Training, tables: Sequence[Table], chosen_seed: int | None) -> bytes:
    found = {
        "training": training,
        "chosen_seed": chosen_seed,
        "tables": [
            {
                "slice": table.slice,
                "part": table.part,
                "regime": table.regime,
                "best_rule": best_rule(table.rows).name,
                "rows": [_row(row, best_rule(table.rows)) for row in table.rows],
            }
            for table in tables
        ],
    }
    return msgspec.json.encode(found)


def _row(row: Judged, against: Judged) -> dict[str, Any]:
    intervals = {measure: row.interval(measure) for measure in row.draws}
    differences = {measure: difference(row, against, measure) for measure in row.values}
    return {
        "name": row.name,
        "sees": row.sees,
        "learned": row.learned,
        "seeds": row.seeds,
        "values": {str(measure): _rounded(value) for measure, value in row.values.items()},
        "intervals": {str(m): [_rounded(end) for end in ends] for m, ends in intervals.items() if ends is not None},
        "to_best_rule": {
            str(measure): [_rounded(found.value), *(_rounded(end) for end in found.interval or ())]
            for measure, found in differences.items()
        },
        "least": {str(measure): _rounded(value) for measure, value in row.least.items()},
        "most": {str(measure): _rounded(value) for measure, value in row.most.items()},
    }


def _rounded(value: float) -> float:
    """Six digits: sums in another order do not change the file."""
    return float(f"{value:.6g}") if math.isfinite(value) else value
