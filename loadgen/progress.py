"""Progress of a replay: a live bar on a terminal, otherwise a line every ten seconds."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar

from .observe import Observer

_REFRESH_S: Final = 0.25
_LINE_S: Final = 10.0


@dataclass(slots=True)
class Progress:
    total: int
    expected_s: float
    """When the last job would end if none waited, seconds after the start."""
    observer: Observer
    submitted: int = 0
    started: float = field(default_factory=time.monotonic)

    @property
    def completed(self) -> int:
        return min(len(self.observer.finished), self.total)

    @property
    def running(self) -> int:
        return len(self.observer.running)

    @property
    def queued(self) -> int:
        return max(0, self.submitted - self.completed - self.running)

    def eta_s(self) -> float:
        """The later of: as if no job waited from now on; as the mean pace so far tells."""
        elapsed = time.monotonic() - self.started
        pace_s = elapsed / self.completed * (self.total - self.completed) if self.completed else 0.0
        all_submitted = self.submitted >= self.total
        return max(self.expected_s - elapsed, pace_s if all_submitted else 0.0, 0.0)

    def describe(self) -> str:
        return (
            f"submitted {self.submitted}/{self.total}, queued {self.queued}, running {self.running}, "
            f"completed {self.completed}, ETA {_duration(self.eta_s())}"
        )


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


async def show_progress(progress: Progress, console: Console) -> None:
    """Until cancelled."""
    if not console.is_terminal:
        while True:
            await asyncio.sleep(_LINE_S)
            console.print(progress.describe(), highlight=False)
    columns = (BarColumn(bar_width=30), TextColumn("{task.fields[state]}"))
    with Bar(*columns, console=console, transient=True) as bar:
        task = bar.add_task("jobs", total=progress.total, state="")
        while True:
            bar.update(task, completed=progress.completed, state=progress.describe())
            await asyncio.sleep(_REFRESH_S)
