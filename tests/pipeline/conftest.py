"""Tests of this package run on one thread: results are then the same on every machine, and small models are faster."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, settings

settings.register_profile("golden", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("golden")


@pytest.fixture(autouse=True, scope="module")
def one_thread_for_what_is_made_once() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)  # a test before may have changed it
