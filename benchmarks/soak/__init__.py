"""Endurance: long mixed load with faults injected. Owns the load, the faults and the report; a process of its own."""

__all__: list[str] = []
