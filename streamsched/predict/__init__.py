"""Run times predicted from history. Imports the core alone.

`Combination` is the predictor to use; `state` keeps it across restarts, `training` fits its trees in a process of their
own, `progress` reads how far a job is from what it reports. See `docs/prediction.md`.
"""

from .combination import Combination
from .jobs import LEVELS, Ending, Features, Finished, Predictor, Quantiles, features_of, finished_of

__all__ = [
    "LEVELS",
    "Combination",
    "Ending",
    "Features",
    "Finished",
    "Predictor",
    "Quantiles",
    "features_of",
    "finished_of",
]
