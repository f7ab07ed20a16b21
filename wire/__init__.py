"""What the processes say to each other: messages, their codec, the ZeroMQ link, the tensor ring. Floor 0."""

__all__: list[str] = []
