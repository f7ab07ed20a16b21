"""Aux hidden states from an engine that has no flag for them: SGLang 0.5.17 to 0.5.22.

They capture the states for their own EAGLE-3 drafter only. With --enable-return-hidden-states and this, they do so for
nobody's, and their output carries the three states in place of the last one, as 0.5.23's does under its flag.
"""

from __future__ import annotations

from typing import Any

__all__ = ["capture_aux"]


def capture_aux(config: Any, *, is_draft_worker: bool, **kwargs: Any) -> Any:
    """After SGLang resolved what to capture: its default layers, 2, n/2 and n-3, if it wants none itself.

    Args:
        config: SGLang's SpecAuxHiddenStateConfig; changed in place.
    """
    if not is_draft_worker and not config.eagle_use_aux_hidden_state and not config.dflash_use_aux_hidden_state:
        config.eagle_use_aux_hidden_state = True
        config.eagle_aux_hidden_state_layer_ids = None  # the model's own default
    return config
