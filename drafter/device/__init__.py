"""The head on a GPU: padded rows instead of ragged ones, and chains that come back to the host once. Floor 1."""

__all__: list[str] = []
