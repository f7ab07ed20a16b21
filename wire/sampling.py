"""Sampling parameters as they cross process borders.

The order in which the target applies them is fixed and documented in verifier/embedded/sampling.py.
"""

from typing import Literal

import msgspec

__all__ = ["Grammar", "SamplingParams"]


class Grammar(msgspec.Struct, frozen=True, kw_only=True):
    """What the output must look like, from its first token to its last.

    Fields:
        kind: "json_schema" (text is the schema as JSON), "regex" (the whole output matches) or "lark" (llguidance's
            dialect of Lark, rule ``start``).
    """

    kind: Literal["json_schema", "regex", "lark"]
    text: str


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How the target turns the logits of one position into one token id.

    Every field has a neutral default, so ``SamplingParams()`` is plain sampling at temperature 1.

    Fields:
        temperature: 0 means greedy (argmax, lowest id wins a tie); otherwise logits are divided by it.
        top_k: number of most likely ids kept; 0 keeps all.
        top_p: smallest set of most likely ids whose probability sums to at least this; 1 keeps all.
        min_p: ids less likely than this share of the most likely one are dropped; 0 keeps all.
        repetition_penalty: > 0, divides positive and multiplies negative logits of ids seen in prompt or output.
        presence_penalty, frequency_penalty: subtracted once, or once per occurrence, for ids seen in the output.
        logit_bias: (token id, bias) pairs added to the raw logits.
        seed: key of the counter-based noise, 0 <= seed < 2**63. Same seed, same text, speculation on or off.
        min_new_tokens: the first this-many output tokens can't be one of ``eos_ids``.
        eos_ids: the ids that ``min_new_tokens`` holds back, and that may end an output with a ``grammar``.
        grammar: ids that can't continue the output in it get no probability; None = anything goes.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    min_new_tokens: int = 0
    eos_ids: tuple[int, ...] = ()
    grammar: Grammar | None = None

    @property
    def is_greedy(self) -> bool:
        """True if the token is the argmax of the processed logits, so no noise is drawn."""
        return self.temperature == 0.0
