"""Hypothesis for all wire tests: the same examples in every run, no wall-time limit an example."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")
