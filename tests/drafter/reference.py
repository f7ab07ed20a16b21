"""The plain fp32 reference of an EAGLE-3 head: one request, no cache, no kernels, every step recomputed from scratch.

Written from reference/eagle3.md A1-A4, on the tensors as they are in the file, so that a mistake of the loader shows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class ReferenceHead:
    """tensors: under the speculators' names. inverse: [rotary dims / 2] inverse frequencies."""

    tensors: Tensors
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_layers: int = 1
    eps: float = 1e-6
    theta: float = 10_000.0
    inverse: torch.Tensor | None = None
    norm_before_residual: bool = False
    feeds_back_normed: bool = False
    mla: tuple[int, int, int, int] | None = None  # kv_lora, nope, rope, value dims

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.tensors[name].float()

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        bias = self.tensors.get(name + ".bias")
        return F.linear(x, self.tensors[name + ".weight"].float(), None if bias is None else bias.float())

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        if "fc_norm.0.weight" in self.tensors:
            num_norms = sum(name.startswith("fc_norm.") for name in self.tensors)
            chunks = features.chunk(num_norms, dim=-1)
            features = torch.cat([self.norm(c, f"fc_norm.{i}.weight") for i, c in enumerate(chunks)], dim=-1)
        if "input_norm.weight" in self.tensors:
            features = self.norm(features, "input_norm.weight")
        return self.linear(features, "fc")

    def rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:  # [T, heads, D]
        dim = x.shape[-1]
        inverse = self.inverse
        if inverse is None:
            inverse = self.theta ** -(torch.arange(0, dim, 2).double() / dim)
        angle = (positions.double()[:, None] * inverse)[:, None, :]
        cos, sin = angle.cos().float(), angle.sin().float()
        if self.mla:  # interleaved pairs
            a, b = x[..., 0::2], x[..., 1::2]
            return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)

    def attend(self, x: torch.Tensor, prefix: str, positions: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        qkv = self.latent_qkv if self.mla else self.plain_qkv
        q, k, v = qkv(x, prefix, positions)
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[-1])
        weights = scores.masked_fill(~mask, -math.inf).softmax(-1)
        return self.linear(torch.einsum("hqk,khd->qhd", weights, v).flatten(1), prefix + "o_proj")

    def plain_qkv(self, x: torch.Tensor, prefix: str, positions: torch.Tensor) -> list[torch.Tensor]:
        parts = []
        for name in "qkv":
            heads = self.linear(x, f"{prefix}{name}_proj").view(len(x), -1, self.head_dim)
            if f"{prefix}{name}_norm.weight" in self.tensors:
                heads = self.norm(heads, f"{prefix}{name}_norm.weight")
            parts.append(heads if name == "v" else self.rotate(heads, positions))
        return parts

    def latent_qkv(self, x: torch.Tensor, prefix: str, positions: torch.Tensor) -> list[torch.Tensor]:
        assert self.mla
        lora, nope, rope, value = self.mla
        q = self.linear(
            self.norm(self.linear(x, prefix + "q_a_proj"), prefix + "q_a_layernorm.weight"), prefix + "q_b_proj"
        )
        q = q.view(len(x), self.num_heads, nope + rope)
        q = torch.cat((q[..., :nope], self.rotate(q[..., nope:], positions)), -1)
        down = self.linear(x, prefix + "kv_a_proj_with_mqa")
        up = self.linear(self.norm(down[:, :lora], prefix + "kv_a_layernorm.weight"), prefix + "kv_b_proj")
        up = up.view(len(x), self.num_heads, nope + value)
        shared = self.rotate(down[:, None, lora:], positions).expand(-1, self.num_heads, -1)
        return [q, torch.cat((up[..., :nope], shared), -1), up[..., nope:]]

    def states(self, hidden: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:  # [T, H], [T, H] -> [T, H]
        """Causal pass over slots 0 .. T-1: the state before the final norm."""
        positions = torch.arange(len(hidden))
        mask = positions[None, :] <= positions[:, None]
        normed = self.norm(hidden, "layers.0.hidden_norm.weight")
        h = normed if self.norm_before_residual else hidden
        for index in range(self.num_layers):
            prefix = f"layers.{index}."
            x = self.norm(embedded if index == 0 else h, prefix + "input_layernorm.weight")
            x = torch.cat((x, normed), -1) if index == 0 else x
            h = h + self.attend(x, prefix + "self_attn.", positions, mask)
            x = self.norm(h, prefix + "post_attention_layernorm.weight")
            gate, up = self.linear(x, prefix + "mlp.gate_proj"), self.linear(x, prefix + "mlp.up_proj")
            h = h + self.linear(F.silu(gate) * up, prefix + "mlp.down_proj")
        return h

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        return F.linear(self.norm(states, "norm.weight"), self.tensors["lm_head.weight"].float())

    def draft(
        self,
        features: torch.Tensor,  # [>= L-1, F]
        ids: Sequence[int],  # [L]
        num_draft_tokens: int,
        choose: Callable[[torch.Tensor, int], int] = lambda logits, position: int(logits.argmax()),
    ) -> tuple[list[int], list[torch.Tensor]]:
        """Target ids of a chain after ``ids``, and each step's logits."""
        offsets = self.tensors.get("d2t")
        embedding = self.tensors["embed_tokens.weight"].float()
        hidden, tokens, steps = self.fuse(features[: len(ids) - 1]), list(ids[1:]), []
        for step in range(num_draft_tokens):
            last = self.states(hidden, embedding[torch.tensor(tokens)])[-1:]
            steps.append(self.logits(last)[0])
            index = choose(steps[-1], len(ids) + step)
            tokens.append(index + (0 if offsets is None else int(offsets[index])))
            fed_back = self.norm(last, "norm.weight") if self.feeds_back_normed else last
            hidden = torch.cat((hidden, fed_back))
        return tokens[len(ids) - 1 :], steps
