"""Profiles: TOML data, one table per component. This package holds no code."""

__all__: list[str] = []
