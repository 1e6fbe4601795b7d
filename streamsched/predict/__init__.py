"""Run times predicted from history. Imports the core alone.

`Combination` is the predictor to use, `history()` and `survival()` are lighter ones with the same calls (`predictor`);
`state` keeps it across restarts, `training` fits its trees in a process of their own, `progress` reads how far a job is
from what it reports, `replay` puts a trace in the order of events. See `docs/prediction.md`.
"""

from .combination import Combination, Drift
from .jobs import LEVELS, Ending, Features, Finished, Quantiles, features_of, finished_of
from .ladders import history, survival
from .predictor import Predictor, Times
from .progress import Lines, Track, reading_of

__all__ = [
    "LEVELS",
    "Combination",
    "Drift",
    "Ending",
    "Features",
    "Finished",
    "Lines",
    "Predictor",
    "Quantiles",
    "Times",
    "Track",
    "features_of",
    "finished_of",
    "history",
    "reading_of",
    "survival",
]
