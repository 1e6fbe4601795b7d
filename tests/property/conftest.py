"""How hard Hypothesis tries: HYPOTHESIS_PROFILE=deep for a long search; where CI is set, always the same examples."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

_COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}

settings.register_profile("default", max_examples=50, **_COMMON)
settings.register_profile("ci", max_examples=50, derandomize=True, **_COMMON)
settings.register_profile("deep", max_examples=2000, **_COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "default"))
