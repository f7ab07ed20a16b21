"""Where another all-reduce takes the place of SGLang's, for the tensor-parallel group only.

SGLang 0.5.17 to 0.5.23 has no hook of its own for this. The provider is made when the group is, on every rank, and used
only if every rank could make one: half a group on another kernel would hang. Whether a tensor goes to it depends on
nothing but the tensor's size and type, so all ranks agree on that too.
"""

from __future__ import annotations

import logging
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

__all__ = ["AllReduceGroup", "AllReduceProvider", "AllReduceReplacement"]

log = logging.getLogger("breakeven.plugin")

_GROUP = "tp"


@dataclass(frozen=True, slots=True, kw_only=True)
class AllReduceGroup:
    """The ranks that reduce together. cpu_group, device_group: torch's process groups; device: a torch.device."""

    rank: int
    world_size: int
    cpu_group: Any
    device_group: Any
    device: Any


class AllReduceProvider(Protocol):
    """Another all-reduce (sum). Made by ``factory(group: AllReduceGroup)``, on every rank at the same time."""

    def supports(self, num_bytes: int, dtype: Any, world_size: int) -> bool:
        """It takes tensors of this size and torch.dtype. The answer must be the same on all ranks, at all times."""
        ...

    def all_reduce(self, tensor: Any) -> Any:
        """The sum over all ranks.

        Args:
            tensor: contiguous, on the group's device; may be overwritten. Also called while a CUDA graph is captured.

        Returns:
            a tensor of the same shape and type; may be ``tensor`` itself.

        Raises:
            Exception: ends the engine, for the ranks could not go on together.
        """
        ...


class AllReduceReplacement:
    """One per process; its methods are hooks.

    Args:
        factory: "module:attribute" of the provider's factory.
    """

    def __init__(self, factory: str) -> None:
        self._factory = factory
        self._providers: dict[int, AllReduceProvider] = {}
        self.num_replaced = 0

    def after_group_init(self, result: Any, coordinator: Any, *args: Any, **kwargs: Any) -> None:
        """A group was made: make its provider, unless a rank can't."""
        name = str(getattr(coordinator, "unique_name", "")).partition(":")[0]
        if name != _GROUP or coordinator.world_size == 1:
            return
        group = AllReduceGroup(
            rank=coordinator.rank_in_group,
            world_size=coordinator.world_size,
            cpu_group=coordinator.cpu_group,
            device_group=coordinator.device_group,
            device=coordinator.device,
        )
        provider: AllReduceProvider | None = None
        try:
            provider = pkgutil.resolve_name(self._factory)(group)
        except Exception:  # whatever a provider can't do, the engine's own all-reduce can
            log.exception("breakeven: no all-reduce from %s on rank %d", self._factory, group.rank)
        if _all_ranks(group, provider is not None) and provider is not None:
            self._providers[id(coordinator)] = provider
            log.info("breakeven: all-reduce of %d ranks by %s", group.world_size, self._factory)
        else:
            log.warning("breakeven: the all-reduce stays SGLang's, a rank has no provider")

    def around_all_reduce(self, original: Callable[..., Any], coordinator: Any, input_: Any, *args: Any) -> Any:
        """An all-reduce: the provider's if it takes the tensor, else SGLang's."""
        provider = self._providers.get(id(coordinator))
        if provider is not None and not _is_compiling() and input_.is_contiguous():
            num_bytes = input_.numel() * input_.element_size()
            if provider.supports(num_bytes, input_.dtype, coordinator.world_size):
                self.num_replaced += 1
                return provider.all_reduce(input_)
        return original(coordinator, input_, *args)


def _all_ranks(group: AllReduceGroup, has_provider: bool) -> bool:
    import torch  # lazy: the plugin's modules load without torch

    agreed = torch.tensor([int(has_provider)])
    torch.distributed.all_reduce(agreed, op=torch.distributed.ReduceOp.MIN, group=group.cpu_group)
    return bool(agreed.item())


def _is_compiling() -> bool:
    """Dynamo can't follow a provider; SGLang's own call is a custom op it knows."""
    import torch  # lazy, as above

    return bool(torch.compiler.is_compiling())
