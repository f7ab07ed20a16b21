"""The trainable EAGLE-3 head: parameters under SpecForge's names, unrolled over all positions of a batch at once.

Slot i holds the feature of target position i and the embedding of token i + 1, at RoPE position i, and predicts token
i + 2. Unroll step j of slot i stands for the j-th recurrent step of a chain that leaves the stable prefix at slot i: it
reads the step-0 keys of slots <= i plus its own chain's keys of steps 1..j. That is exactly what inference computes, so
the same code trains (true next tokens) and drafts (the head's own tokens) for every position in parallel.
Shape letters: B rows, T slots, H hidden, N heads, M key-value heads, D head dim, K draft vocabulary, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from tools.eagle.target import TargetConfig, apply_rope, rope_tables

Choose = Callable[[Tensor, int], Tensor]

__all__ = ["Choose", "EagleHead", "HeadConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadConfig:
    """Sizes of a plain one-layer EAGLE-3 head whose width equals the target's."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    draft_vocab_size: int
    rope_theta: float
    rms_norm_eps: float
    max_position_embeddings: int
    aux_layers: tuple[int, int, int]

    @classmethod
    def for_target(cls, target: TargetConfig, draft_vocab_size: int) -> HeadConfig:
        """The head that has the target's own layer shape."""
        return cls(
            hidden_size=target.hidden_size, num_heads=target.num_heads, num_kv_heads=target.num_kv_heads,
            head_dim=target.head_dim, intermediate_size=target.intermediate_size, vocab_size=target.vocab_size,
            draft_vocab_size=draft_vocab_size, rope_theta=target.rope_theta, rms_norm_eps=target.rms_norm_eps,
            max_position_embeddings=target.max_position_embeddings, aux_layers=target.aux_layers,
        )  # fmt: skip


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed and returned in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:  # [..., H]
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight, self.eps)


class Attention(nn.Module):
    """Projections of the draft layer; queries, keys and values read the 2H concatenation."""

    def __init__(self, c: HeadConfig) -> None:
        super().__init__()
        self.config = c
        self.q_proj = nn.Linear(2 * c.hidden_size, c.num_heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(2 * c.hidden_size, c.num_kv_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(2 * c.hidden_size, c.num_kv_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.num_heads * c.head_dim, c.hidden_size, bias=False)

    def _split(self, x: Tensor) -> Tensor:  # [B, T, heads * D] -> [B, heads, T, D]
        return x.view(*x.shape[:-1], -1, self.config.head_dim).transpose(1, 2)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # x [B, T, 2H]
        """q [B, N, T, D], k and v [B, M, T, D], rotated by cos and sin [T, D]."""
        q, k, v = (self._split(p(x)) for p in (self.q_proj, self.k_proj, self.v_proj))
        return apply_rope(q, cos, sin), apply_rope(k, cos, sin), v


def attend(q: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """Step-0 keys causally, then one key of each later step on the diagonal. q [B, N, T, D] -> [B, T, N * D]."""
    if len(keys) == 1:
        mixed = F.scaled_dot_product_attention(q, keys[0], values[0], is_causal=True, enable_gqa=True)
        return mixed.transpose(1, 2).flatten(2)
    return attend_chain(q, keys[0], values[0], torch.stack(keys[1:]), torch.stack(values[1:]))


def attend_chain(q: Tensor, key: Tensor, value: Tensor, chain_keys: Tensor, chain_values: Tensor) -> Tensor:
    """``attend`` for the later steps; chain_keys and chain_values are [J, B, M, T, D]."""
    batch, _, steps, dim = q.shape
    grouped = q.reshape(batch, key.shape[1], -1, steps, dim) * dim**-0.5  # [B, M, G, T, D]
    base = (grouped.flatten(2, 3) @ key.transpose(-1, -2)).view(batch, key.shape[1], -1, steps, steps)
    future = torch.ones(steps, steps, dtype=torch.bool, device=q.device).triu(1)
    chain = (grouped[None] * chain_keys[:, :, :, None]).sum(-1)  # [J, B, M, G, T]
    scores = torch.cat([base.masked_fill(future, float("-inf")), chain.movedim(0, -1).to(base.dtype)], dim=-1)
    with torch.autocast(q.device.type, enabled=False):  # autocast would write the weights as float32
        weights = scores.softmax(-1)  # accumulates in float32 inside
    mixed = (weights[..., :steps].flatten(2, 3) @ value).view_as(grouped)
    mixed = mixed + (weights[..., steps:].movedim(-1, 0)[..., None] * chain_values[:, :, :, None]).sum(0)
    return mixed.flatten(1, 2).transpose(1, 2).flatten(2)


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, c: HeadConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # [B, T, H]
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class DraftLayer(nn.Module):
    """The one decoder layer."""

    def __init__(self, c: HeadConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.hidden_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = Attention(c)
        self.mlp = MLP(c)

    def forward(
        self, embeds: Tensor, hidden: Tensor, cos: Tensor, sin: Tensor, keys: list[Tensor], values: list[Tensor]
    ) -> Tensor:
        """One step at all slots; appends this step's keys and values. Returns the pre-norm state [B, T, H]."""
        q, k, v = self.project(embeds, hidden, cos, sin)
        keys.append(k)
        values.append(v)
        return self.finish(hidden, attend(q, keys, values))

    def project(self, embeds: Tensor, hidden: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of one step: the embedding comes FIRST in the 2H concatenation."""
        x = torch.cat([self.input_layernorm(embeds), self.hidden_norm(hidden)], dim=-1)
        return self.self_attn.project(x, cos, sin)

    def finish(self, hidden: Tensor, mixed: Tensor) -> Tensor:
        """Adds the attention's output [B, T, N * D] and the MLP to the residual stream."""
        hidden = hidden + self.self_attn.o_proj(mixed)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))  # type: ignore[no-any-return]


class EagleHead(nn.Module):
    """fc, one draft layer, norm and the draft vocabulary's output rows.

    Args:
        config: Sizes.
        embed: [V, H] the target's embedding; borrowed, never trained, never saved.
        draft_ids: [K] int64 ascending target ids of the draft vocabulary.
    """

    embed: Tensor
    d2t: Tensor
    t2d: Tensor
    aux_scale: Tensor
    cos: Tensor
    sin: Tensor

    def __init__(self, config: HeadConfig, embed: Tensor, draft_ids: Tensor) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(3 * config.hidden_size, config.hidden_size, bias=False)
        self.midlayer = DraftLayer(config)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, len(draft_ids), bias=False)
        mask = torch.zeros(config.vocab_size, dtype=torch.bool)
        mask[draft_ids] = True
        self.register_buffer("d2t", draft_ids - torch.arange(len(draft_ids)))
        self.register_buffer("t2d", mask)
        self.register_buffer("embed", embed, persistent=False)
        cos, sin = rope_tables(config.head_dim, config.rope_theta, config.max_position_embeddings, embed.device)
        # Training only: features divided by their own root mean square, see ``initialise``; folded into fc when saved.
        self.register_buffer("aux_scale", torch.ones(3 * config.hidden_size, device=embed.device), persistent=False)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    @property
    def draft_ids(self) -> Tensor:
        """[K] target id of every draft token."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def initialise(self, target_norm: Tensor, seed: int, aux_rms: Tensor | None = None) -> None:
        """Starts from the target: its rows as lm_head, its final norm, and an fc that passes the deepest feature on.

        The residual stream is anything but even: SmolLM2's deepest feature has a root mean square of 24, single
        dimensions stand at 350. So fc reads features scaled to 1 in every dimension, which optimisers take for granted,
        and norm undoes that for the logits. docs/LOG.md says what it was worth.

        Args:
            target_norm: [H] weight of the target's final norm.
            seed: Of the random weights.
            aux_rms: [3H] root mean square of every feature dimension; None leaves the features as they are.
        """
        generator = torch.Generator().manual_seed(seed)
        width = self.config.hidden_size
        with torch.no_grad():
            for name, weight in self.named_parameters():
                if weight.ndim == 2:
                    draw = torch.randn(weight.shape, generator=generator) * weight.shape[1] ** -0.5
                    weight.copy_(draw * (0.2 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0))
            self.fc.weight.mul_(0.1)
            self.fc.weight[:, 2 * width :] += torch.eye(width, device=self.fc.weight.device)
            self.lm_head.weight.copy_(self.embed[self.draft_ids])
            self.norm.weight.copy_(target_norm)
            if aux_rms is not None:
                self.aux_scale.copy_(1.0 / aux_rms)
                deepest = aux_rms[2 * width :]
                self.norm.weight.mul_(deepest / deepest.pow(2).mean().sqrt())

    def copy_weights(self, other: EagleHead) -> None:
        """Takes over a saved head's weights, undoing the folded feature scale."""
        self.load_state_dict(other.state_dict())
        with torch.no_grad():
            self.fc.weight.div_(self.aux_scale)

    def folded_fc(self) -> Tensor:
        """[H, 3H] the fc weight that reads unscaled features."""
        return self.fc.weight * self.aux_scale

    def logits(self, hidden: Tensor) -> Tensor:  # [..., H] pre-norm
        """[..., K] logits over the draft vocabulary."""
        return self.lm_head(self.norm(hidden))  # type: ignore[no-any-return]

    def unroll(self, aux: Tensor, ids: Tensor, num_steps: int, choose: Choose | None = None) -> list[Tensor]:
        """Runs ``num_steps`` draft steps from every slot.

        Args:
            aux: [B, T, 3H] target features.
            ids: [B, T] the tokens at the same positions.
            num_steps: Draft tokens per chain.
            choose: None for training-time test: step j reads the true token i + 1 + j. Else (logits [B, T, K], step) ->
                target ids [B, T], and step j reads what step j - 1 chose, as inference does.

        Returns:
            Pre-norm states [B, T, H] of every step, or the chosen target ids [B, T] if ``choose`` is given. The last
            1 + j slots of step j have no true token to read and mean nothing.
        """
        slots = ids.shape[1]
        hidden = self.fc(aux * self.aux_scale)
        embeds = F.embedding(ids, self.embed)
        keys: list[Tensor] = []
        values: list[Tensor] = []
        outputs: list[Tensor] = []
        for step in range(num_steps):
            if choose is None or step == 0:
                read = F.pad(embeds[:, step + 1 :], (0, 0, 0, min(step + 1, slots)))
            else:
                read = F.embedding(outputs[-1], self.embed)
            # The tables are float32 and the products are cast back: positions must not be rounded to bf16.
            cos, sin = self.cos[step : step + slots], self.sin[step : step + slots]
            hidden = self.midlayer(read, hidden, cos, sin, keys, values)
            outputs.append(hidden if choose is None else choose(self.logits(hidden), step))
        return outputs
