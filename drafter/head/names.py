"""Tensor names: every public spelling to ours, which is the speculators' one.

Detection is by key, never by ``architectures``: official heads say LlamaForCausalLM there.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from drafter.errors import TensorMismatch

__all__ = ["canonical_names", "count_layers"]

_LEGACY = {
    "aux_norm_low.weight": "fc_norm.0.weight",
    "aux_norm_mid.weight": "fc_norm.1.weight",
    "aux_norm_high.weight": "fc_norm.2.weight",
}
# Not weights of the head: RoPE buffers of old exports, and the frozen target parts that speculators trains against.
_NOT_WEIGHTS = re.compile(r".*rotary_emb\.inv_freq|verifier_(norm|lm_head)\.weight")
_LAYER = re.compile(r"layers\.(\d+)\.")


def canonical_names(names: Iterable[str]) -> dict[str, str]:
    """Our name of each tensor to the name in the file; what is no weight of the head is left out.

    Raises:
        TensorMismatch: two tensors of the file mean the same weight.
    """
    found: dict[str, str] = {}
    for name in sorted(names):
        ours = name.removeprefix("model.")
        if ours.startswith("midlayer."):
            ours = "layers.0." + ours.removeprefix("midlayer.")
        ours = _LEGACY.get(ours, ours)
        if _NOT_WEIGHTS.fullmatch(ours):
            continue
        if ours in found:
            raise TensorMismatch(name, f"is the same weight as {found[ours]}")
        found[ours] = name
    return found


def count_layers(names: Iterable[str]) -> int:
    """Number of decoder layers among our names: the highest index plus one, at least one."""
    indexes = [int(match[1]) for name in names if (match := _LAYER.match(name))]
    return max(indexes, default=0) + 1
