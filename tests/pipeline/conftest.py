"""Random examples of this package's tests are the same in every run."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("golden", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("golden")
