"""Measurements with provenance. Speed is shown here, never by a timed test. Floor 3."""

__all__: list[str] = []
