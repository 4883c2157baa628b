"""Tests of this package run on one thread: results are then the same on every machine, and small models are faster."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, settings

settings.register_profile("golden", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("golden")


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
