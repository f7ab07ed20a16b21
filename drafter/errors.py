"""Errors of the drafter, split by who can do something about them.

DrafterError
├── HeadError                    the head's files; whoever chose or converted the head
│   ├── HeadFileError            no such file, or not readable as what it claims to be
│   ├── HeadConfigError          config.json: a field is missing, of the wrong type or contradicts another
│   ├── MissingTensor            a tensor the layout needs is not in the file
│   ├── UnusedTensors            the file holds tensors this loader would ignore, so it would run another model
│   ├── TensorMismatch           a tensor has the wrong shape, or contradicts another one
│   └── UnsupportedHead          a known feature that is not implemented
├── DeviceError                  the GPU; whoever shares it out
│   ├── OutOfDeviceMemory        a load or a batch does not fit into what is free; the next one may
│   └── DeviceLost               a kernel failed for good: every later call would fail too, so the process ends
└── DraftRejected                one round can't be served; becomes DraftFailed with its code (inside the process)

The gateway's client raises wire.errors.PeerError: PeerLost, PeerLate, or PeerRefused with DraftFailed's code.
"""

from __future__ import annotations

from collections.abc import Collection

__all__ = [
    "DeviceError",
    "DeviceLost",
    "DraftRejected",
    "DrafterError",
    "HeadConfigError",
    "HeadError",
    "HeadFileError",
    "MissingTensor",
    "OutOfDeviceMemory",
    "TensorMismatch",
    "UnsupportedHead",
    "UnusedTensors",
]


class DrafterError(Exception):
    """Base of everything drafter/ raises."""


class HeadError(DrafterError):
    """The head's files can't be used as they are."""


class HeadFileError(HeadError):
    """No such file, or not readable as what it claims to be."""


class HeadConfigError(HeadError):
    """A field of config.json is missing, of the wrong type or contradicts another; ``key`` names it."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(f"config.json: {key}: {message}")
        self.key = key


class MissingTensor(HeadError):
    """A tensor the layout needs is not in the file; running without it would mean random weights."""

    def __init__(self, name: str, why: str = "") -> None:
        super().__init__(f"the head has no tensor {name}" + (f": {why}" if why else ""))
        self.name = name


class UnusedTensors(HeadError):
    """Tensors this loader would ignore; the head was trained as a model that is not this one."""

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(f"the head holds tensors that nothing uses: {', '.join(sorted(names))}")
        self.names = frozenset(names)


class TensorMismatch(HeadError):
    """A tensor has the wrong shape, or contradicts another one; ``name`` says which."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(f"tensor {name}: {message}")
        self.name = name


class UnsupportedHead(HeadError):
    """A known feature of other heads that is not implemented here."""


class DeviceError(DrafterError):
    """The GPU can't do what it is asked."""


class OutOfDeviceMemory(DeviceError):
    """A load or a batch does not fit into the GPU's free memory. The process goes on."""


class DeviceLost(DeviceError):
    """A kernel failed for good; CUDA answers nothing in this process any more."""


class DraftRejected(DrafterError):
    """One round can't be served. ``code`` is one of those in wire.messages.DraftFailed."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
