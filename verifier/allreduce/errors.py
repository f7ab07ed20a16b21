"""What can go wrong with the all-reduce.

AllReduceError
├── KernelBuildFailed   no nvcc, or it failed: its last lines
├── CallRefused         this call can't be made (size, dtype, device, alignment); nothing was launched
├── SetupFailed         memory could not be allocated, mapped or exchanged
└── PeerTimeout         a rank did not answer in time: outputs are NaN, the group is unusable
"""

from __future__ import annotations

__all__ = ["AllReduceError", "CallRefused", "KernelBuildFailed", "PeerTimeout", "SetupFailed"]


class AllReduceError(RuntimeError):
    """Any of the below."""


class KernelBuildFailed(AllReduceError):
    """The CUDA sources can't be compiled here."""


class CallRefused(AllReduceError):
    """The arguments don't fit the group."""


class SetupFailed(AllReduceError):
    """Buffers can't be allocated, mapped or exchanged."""


class PeerTimeout(AllReduceError):
    """``rank`` waited for ``peer`` in ``phase`` of call number ``epoch`` and gave up.

    The outputs of that call and of all later ones are NaN. There is no way back: tear the group down on all ranks.
    """

    def __init__(self, *, rank: int, peer: int, phase: str, epoch: int, slice_index: int) -> None:
        super().__init__(
            f"rank {rank} waited in vain for rank {peer}: phase {phase}, call {epoch}, slice {slice_index}"
        )
        self.rank = rank
        self.peer = peer
        self.phase = phase
        self.epoch = epoch
        self.slice_index = slice_index
