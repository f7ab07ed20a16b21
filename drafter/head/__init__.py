"""EAGLE-3 heads on disk: their config, their tensors in every public layout, and the one record all become. Floor 1."""

__all__: list[str] = []
