"""A group of ranks that reduce together: its memory, its call counter, its errors, and the launch of one call.

One group serves one stream at a time: calls are counted in the order they run on the GPU. Every rank must make the
same calls (operation, size, tactic) in the same order. Only set-up, renumbering and ``close`` wait for the GPU.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from verifier.allreduce.errors import CallRefused, PeerTimeout
from verifier.allreduce.exchange import Exchange
from verifier.allreduce.library import Call, Control, ErrorWord, KernelLibrary, RankBuffers
from verifier.allreduce.slabs import SlabKind, Slabs, local_slabs, shared_device_slabs, shared_pinned_slabs
from verifier.allreduce.tactics import (
    DTYPES,
    ELEMENT_BYTES,
    MAX_THREADS,
    PACK_BYTES,
    DType,
    Rule,
    Tactic,
    Topology,
    choose_tactic,
    default_rules,
    plan_geometry,
)

__all__ = ["DTYPE_NAMES", "AllReduceGroup", "Norm", "join_group", "virtual_group"]

_PHASES = ("scatter", "cross", "gather")
DTYPE_NAMES: dict[torch.dtype, DType] = {
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float32: "float32",
}
_MAX_STASH_BYTES = 96 * 1024  # one row in fp32; what the smallest supported GPU lets a block have


@dataclass(frozen=True, slots=True, kw_only=True)
class Norm:
    """Fused epilogue of one rank: residual_output = x + residual; output = rms_norm(x + residual, in fp32) * weight.

    residual, residual_output: [rows, H], of the input's dtype; may be the same tensor. weight: [H].
    """

    residual: torch.Tensor  # [rows, H]
    residual_output: torch.Tensor  # [rows, H]
    weight: torch.Tensor  # [H]
    eps: float


@dataclass(slots=True, kw_only=True)
class AllReduceGroup:
    """The ranks from ``first_rank`` on that this process plays (usually one). join_group and virtual_group make it."""

    library: KernelLibrary
    topology: Topology
    slabs: Slabs
    ll_bytes: int
    bulk_bytes: int
    first_rank: int
    controls: list[int]  # device addresses, one per rank played here
    errors: list[int]  # addresses in mapped host memory
    rules: tuple[Rule, ...] = ()
    delay_ns: int = 0  # test builds only
    delay_seed: int = 0
    _last_stream: torch.cuda.Stream | None = field(default=None)

    @property
    def num_ranks_here(self) -> int:
        """How many ranks this process plays."""
        return len(self.controls)

    # ---------------------------------------------------------------- calls

    def tactic_for(self, num_bytes: int) -> Tactic | None:
        """What the table says, or None where the payload fits no buffer."""
        tactic = choose_tactic(self.topology, num_bytes, self.rules)
        if tactic is None or num_bytes > self.capacity(tactic):
            return None
        return tactic

    def capacity(self, tactic: Tactic) -> int:
        """Widest payload in bytes that the family's buffers hold."""
        return self.ll_bytes if tactic.family == "ll" else self.bulk_bytes

    def all_reduce(
        self,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        *,
        tactic: Tactic | None = None,
        norms: Sequence[Norm] | None = None,
    ) -> None:
        """Enqueue one call on the current stream, for each rank played here. outputs[i] may be inputs[i].

        Raises:
            CallRefused: size, dtype, device or alignment don't fit; nothing was launched.
        """
        dtype = self._check_tensors(inputs, outputs, norms)
        num_bytes = inputs[0].numel() * ELEMENT_BYTES[dtype]
        chosen = tactic or self.tactic_for(num_bytes)
        if chosen is None or num_bytes > self.capacity(chosen):
            raise CallRefused(f"{num_bytes} bytes are more than this group's buffers hold")
        call = self.describe(num_bytes, chosen, _row_bytes(inputs[0]) if norms else None)
        for rank in range(self.num_ranks_here):
            norm = norms[rank] if norms else None
            call.ranks[rank] = RankBuffers(
                input=inputs[rank].data_ptr(),
                output=outputs[rank].data_ptr(),
                residual_input=norm.residual.data_ptr() if norm else None,
                residual_output=norm.residual_output.data_ptr() if norm else None,
                control=self.controls[rank],
            )
        stash_bytes = 0
        if norms:
            call.weight = norms[0].weight.data_ptr()
            call.eps = norms[0].eps
            call.row_elements = inputs[0].shape[-1]
            stash_bytes = call.row_elements * 4
            if stash_bytes > _MAX_STASH_BYTES:
                raise CallRefused(f"rows of {call.row_elements} elements are too long for the fused norm")
        stream = self._order_streams()
        self.library.launch(
            call,
            dtype=DTYPES.index(dtype),
            shape=chosen.island_of(self.topology),
            bulk=chosen.family == "bulk",
            threads=_threads(chosen, dtype, call.slice_packs, fused=norms is not None),
            stash_bytes=stash_bytes,
            stream=stream,
        )

    def describe(self, num_bytes: int, tactic: Tactic, row_bytes: int | None = None) -> Call:
        """The call without its tensors."""
        geometry = plan_geometry(self.topology, tactic, num_bytes, row_bytes)
        call = Call()
        for rank, address in enumerate(self.slabs.addresses):
            call.slabs[rank] = address
        call.layout.ll_bytes = self.ll_bytes
        call.layout.bulk_bytes = self.bulk_bytes
        call.layout.world = self.topology.world
        call.num_bytes = num_bytes
        call.slice_packs = geometry.slice_packs
        call.num_slices = geometry.num_slices
        call.first_rank = self.first_rank
        call.num_ranks = self.num_ranks_here
        call.tree_opens = self.topology.tree_opens
        call.pull = tactic.pull_mask
        call.ctas = min(tactic.num_ctas, geometry.num_slices)
        call.delay_ns = self.delay_ns
        call.delay_seed = self.delay_seed
        return call

    def _check_tensors(
        self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], norms: Sequence[Norm] | None
    ) -> DType:
        here = self.num_ranks_here
        if len(inputs) != here or len(outputs) != here or (norms is not None and len(norms) != here):
            raise CallRefused(f"this process plays {here} ranks: one input and output for each")
        first = inputs[0]
        dtype = DTYPE_NAMES.get(first.dtype)
        if dtype is None:
            raise CallRefused(f"{first.dtype} is not one of {', '.join(DTYPES)}")
        if first.numel() == 0:
            raise CallRefused("an empty tensor")
        tensors = [*inputs, *outputs]
        for norm in norms or ():
            tensors += [norm.residual, norm.residual_output]
            if norm.weight.shape != first.shape[-1:]:
                raise CallRefused(f"weight {tuple(norm.weight.shape)} for rows of {first.shape[-1]}")
            _check_tensor(norm.weight, first.dtype)
        for tensor in tensors:
            if tensor.shape != first.shape:
                raise CallRefused(f"shapes differ: {tuple(tensor.shape)} and {tuple(first.shape)}")
            _check_tensor(tensor, first.dtype)
        return dtype

    def _order_streams(self) -> int:
        """The current stream, made to wait for the last one this group was used on."""
        stream = torch.cuda.current_stream()
        last, self._last_stream = self._last_stream, stream
        if last is not None and last != stream and not torch.cuda.is_current_stream_capturing():
            stream.wait_stream(last)
        return int(stream.cuda_stream)

    def member(self, index: int) -> AllReduceGroup:
        """One of the ranks played here as a group of its own over the same memory, for launches of its own stream."""
        return AllReduceGroup(
            library=self.library,
            topology=self.topology,
            slabs=self.slabs,
            ll_bytes=self.ll_bytes,
            bulk_bytes=self.bulk_bytes,
            first_rank=self.first_rank + index,
            controls=[self.controls[index]],
            errors=[self.errors[index]],
            rules=self.rules,
            delay_ns=self.delay_ns,
            delay_seed=self.delay_seed,
        )

    # ---------------------------------------------------------------- state

    def check(self) -> None:
        """Raise if a rank played here has given up waiting. Reads host memory only: cheap, and safe at any time.

        Raises:
            PeerTimeout: with who waited for whom.
        """
        for address in self.errors:
            word = ErrorWord.from_address(address)
            if word.code:
                raise PeerTimeout(
                    rank=word.rank,
                    peer=word.peer,
                    phase=_PHASES[word.phase],
                    epoch=word.epoch,
                    slice_index=word.slice,
                )

    def set_timeout(self, timeout_s: float) -> None:
        """From the next call on, also in captured graphs: long while kernels are compiled, short while serving."""
        for address in self.controls:
            control = self._read_control(address)
            control.timeout_ns = int(timeout_s * 1e9)
            self._write(address + Control.timeout_ns.offset, bytes(ctypes.c_uint64(control.timeout_ns)))

    def epoch(self, index: int = 0) -> int:
        """Number of the next call."""
        return int(self._read_control(self.controls[index]).epoch)

    def set_epoch(self, epoch: int) -> None:
        """Renumber; on all ranks, while none is in a call. For tests of the wrap."""
        for address in self.controls:
            self._write(address, bytes(ctypes.c_uint64(epoch)))

    def _read_control(self, address: int) -> Control:
        control = Control()
        self.library.copy(ctypes.addressof(control), address, ctypes.sizeof(control))
        return control

    def _write(self, address: int, raw: bytes) -> None:
        buffer = ctypes.create_string_buffer(raw, len(raw))
        self.library.copy(address, ctypes.addressof(buffer), len(raw))

    def close(self) -> None:
        """Free everything. The caller sees to it that no rank is in a call (a barrier)."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.slabs.close()
        for address in self.controls:
            self.library.device_free(address)
        for address in self.errors:
            self.library.host_free(address)
        self.controls, self.errors = [], []


def _check_tensor(tensor: torch.Tensor, dtype: torch.dtype) -> None:
    if tensor.dtype != dtype:
        raise CallRefused(f"{tensor.dtype} beside {dtype}")
    if not tensor.is_contiguous():
        raise CallRefused("a tensor is not contiguous")
    if tensor.data_ptr() % PACK_BYTES:
        raise CallRefused(f"a tensor does not start on a {PACK_BYTES}-byte boundary")


def _threads(tactic: Tactic, dtype: DType, slice_packs: int, *, fused: bool) -> int:
    # Under a norm the row alone decides, never the tactic: its sum of squares must come out the same everywhere.
    limit = MAX_THREADS[dtype] if fused else min(tactic.num_threads, MAX_THREADS[dtype])
    return min(limit, -(-slice_packs // 32) * 32)


def _row_bytes(tensor: torch.Tensor) -> int:
    return int(tensor.shape[-1]) * tensor.element_size()


def _whole_packs(num_bytes: int) -> int:
    return max(1, -(-num_bytes // PACK_BYTES)) * PACK_BYTES


def _new_controls(library: KernelLibrary, count: int, timeout_s: float) -> tuple[list[int], list[int]]:
    controls, errors = [], []
    for _ in range(count):
        error = library.host_alloc(ctypes.sizeof(ErrorWord))
        address = library.device_alloc(ctypes.sizeof(Control))
        control = Control(epoch=1, aborted=0, arrived=0, timeout_ns=int(timeout_s * 1e9), error=error)
        library.copy(address, ctypes.addressof(control), ctypes.sizeof(control))
        controls.append(address)
        errors.append(error)
    return controls, errors


def join_group(
    library: KernelLibrary,
    topology: Topology,
    exchange: Exchange,
    *,
    rank: int,
    ll_bytes: int,
    bulk_bytes: int,
    rules: tuple[Rule, ...] | None = None,
    timeout_s: float = 60.0,
) -> AllReduceGroup:
    """Be rank ``rank``; the current CUDA device is its GPU. Collective: every rank calls it.

    Args:
        library: from build_library.
        topology: the same on every rank.
        exchange: a host channel between the ranks, used here only.
        rank: in the topology's order.
        ll_bytes: widest payload of the flag-in-data family; 24 (world 8) buffers of 8 times this are allocated.
        bulk_bytes: widest payload of all; 24 buffers of 4 times this.
        rules: which tactic for which size; None = the defaults.
        timeout_s: how long a rank waits for a peer; see AllReduceGroup.set_timeout.

    Raises:
        SetupFailed: on all ranks, if it fails on one.
    """
    ll_bytes, bulk_bytes = _whole_packs(ll_bytes), _whole_packs(bulk_bytes)
    num_bytes = library.slab_bytes(topology.world, ll_bytes, bulk_bytes)
    share = shared_device_slabs if topology.peer_access else shared_pinned_slabs
    slabs = share(library, exchange, rank=rank, num_bytes=num_bytes)
    library.preload(topology.world)
    controls, errors = _new_controls(library, 1, timeout_s)
    exchange.barrier()  # every slab is zeroed before anyone writes into it
    return AllReduceGroup(
        library=library,
        topology=topology,
        slabs=slabs,
        ll_bytes=ll_bytes,
        bulk_bytes=bulk_bytes,
        first_rank=rank,
        controls=controls,
        errors=errors,
        rules=default_rules(topology) if rules is None else rules,
    )


def virtual_group(
    library: KernelLibrary,
    topology: Topology,
    *,
    ll_bytes: int,
    bulk_bytes: int,
    kind: SlabKind = "device",
    timeout_s: float = 10.0,
) -> AllReduceGroup:
    """All ranks in this process on the current GPU, as co-resident CTAs of one launch."""
    ll_bytes, bulk_bytes = _whole_packs(ll_bytes), _whole_packs(bulk_bytes)
    num_bytes = library.slab_bytes(topology.world, ll_bytes, bulk_bytes)
    slabs = local_slabs(library, world=topology.world, num_bytes=num_bytes, kind=kind)
    library.preload(topology.world)
    controls, errors = _new_controls(library, topology.world, timeout_s)
    return AllReduceGroup(
        library=library,
        topology=topology,
        slabs=slabs,
        ll_bytes=ll_bytes,
        bulk_bytes=bulk_bytes,
        first_rank=0,
        controls=controls,
        errors=errors,
        rules=default_rules(topology),
    )
