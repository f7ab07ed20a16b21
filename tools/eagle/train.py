"""Trains a head on token shards: training-time test, soft targets, AdamW, everything inside a time box.

    python -m tools.eagle.train --model SmolLM2.gguf --tokenizer tokenizer.json --tokens data/train \\
        --eval-tokens data/eval --draft-vocab 8192 --ttt 6 --lr 1e-3 --minutes 10 --out runs/a

Writes a head folder to --out (and to --copy-to at every checkpoint), ``state.pt`` to resume from and ``report.json``.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from tools.eagle.corpus import Conversation, bucketed_batches, save_corpus
from tools.eagle.head import EagleHead, HeadConfig, attend_chain
from tools.eagle.head_files import load_head, save_head
from tools.eagle.report import acceptance_report, summary
from tools.eagle.target import Target
from tools.eagle.token_table import Batch, TokenTable, load_table
from tools.eagle.toy import add_model_arguments, open_model

STEP_DECAY = 0.8  # weight of unroll step j is 0.8 ** j, as in SafeAILab's and SpecForge's trainers

__all__ = ["choose_draft_ids", "loss_of_batch", "main"]


def choose_draft_ids(counts: np.ndarray[Any, np.dtype[np.int64]], size: int) -> Tensor:
    """[size] ascending ids of the tokens the target writes most; ties go to the lower id."""
    order = np.argsort(-counts, kind="stable")[:size]
    return torch.from_numpy(np.sort(order).astype(np.int64))


class _SoftCrossEntropy(torch.autograd.Function):
    """Cross entropy of rows [R, K] against soft targets, in float32.

    The gradient is computed at once and kept in the logits' dtype: half the memory traffic of autograd's way.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, teacher: Tensor) -> Tensor:
        losses, gradient = _losses_and_gradient(logits, teacher)
        ctx.save_for_backward(gradient)
        return losses

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * upstream[0][:, None].to(gradient.dtype), None


def _eager_losses_and_gradient(logits: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
    wide = logits.float()
    normaliser = torch.logsumexp(wide, -1)
    losses = normaliser - (teacher * wide).sum(-1)
    return losses, ((wide - normaliser[:, None]).exp_() - teacher).to(logits.dtype)


_losses_and_gradient = _eager_losses_and_gradient


def compile_hot_parts(target: Target, head: EagleHead) -> None:
    """Fuses the pointwise work of loss, head and target; a part that torch can't compile stays eager."""
    import torch._dynamo  # lazy: seconds to import, GPU runs only

    torch._dynamo.config.suppress_errors = True
    torch._dynamo.config.recompile_limit = 64
    parts = sys.modules[__name__], sys.modules[EagleHead.__module__]
    parts[0]._losses_and_gradient = torch.compile(_eager_losses_and_gradient)  # type: ignore[attr-defined]
    parts[1].attend_chain = torch.compile(attend_chain)  # type: ignore[attr-defined]
    layer: Any = head.midlayer
    layer.project, layer.finish = torch.compile(layer.project), torch.compile(layer.finish)
    whole: Any = target
    whole._block = torch.compile(whole._block)


def loss_of_batch(
    target: Target, head: EagleHead, batch: Batch, num_steps: int, step_weights: list[float]
) -> tuple[Tensor, Tensor]:
    """Training-time test on one batch.

    Returns:
        The loss, and [num_steps, 2]: per step the rows whose argmax equals the target's argmax, and all rows.
    """
    aux, final = target.forward(batch.ids)
    teacher_logits = target.logits(final[batch.rows, batch.ends - 1])  # what the target says token y should be
    best = teacher_logits.argmax(-1)
    teacher = teacher_logits[:, head.draft_ids].float().softmax(-1).to(teacher_logits.dtype)
    learnable = head.t2d[best]
    with torch.autocast(target.device.type, dtype=torch.bfloat16, enabled=target.device.type == "cuda"):
        states = head.unroll(aux, batch.ids, num_steps)
        total = aux.new_zeros((), dtype=torch.float32)
        counts = []
        for step, state in enumerate(states):
            in_answer = batch.offsets > step
            logits = head.logits(state[batch.rows, (batch.ends - 2 - step).clamp(min=0)])
            weights = (in_answer & learnable).float()
            losses: Tensor = _SoftCrossEntropy.apply(logits, teacher)  # type: ignore[no-untyped-call]
            total = total + step_weights[step] * (losses * weights).sum() / weights.sum().clamp(min=1.0)
            hits = (head.draft_ids[logits.detach().argmax(-1)] == best) & in_answer
            counts.append(torch.stack([hits.sum(), in_answer.sum()]))
    return total, torch.stack(counts)


@dataclass(slots=True)
class _Progress:
    step: int = 0
    tokens: int = 0
    elapsed_s: float = 0.0
    epoch: int = 0
    log: list[dict[str, Any]] = field(default_factory=list)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_arguments(parser)
    parser.add_argument("--tokens", type=Path, help="folder of training shards")
    parser.add_argument("--eval-tokens", type=Path, help="folder of held-out shards, measured at the end")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--copy-to", type=Path, help="also write the head here at every checkpoint")
    parser.add_argument("--draft-vocab", type=int, default=8_192)
    parser.add_argument("--train-lm-head", action="store_true")
    parser.add_argument("--init-head", type=Path, help="start from this head folder instead of from the target")
    parser.add_argument("--ttt", type=int, default=6, help="unroll steps")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--optimizer", choices=["adamw", "muon"], default="adamw")
    parser.add_argument("--step-decay", type=float, default=STEP_DECAY)
    parser.add_argument("--warmup", type=int, default=100, help="steps")
    parser.add_argument("--batch-tokens", type=int, default=32_768)
    parser.add_argument("--max-answer-tokens", type=int, help="use only this much data")
    parser.add_argument("--steps", type=int, help="end after this many steps (the schedule then runs over steps)")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--checkpoint-minutes", type=float, default=2.0)
    parser.add_argument("--compile", action="store_true", help="fuse the loss with torch.compile")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.smoke:
        args.device, args.draft_vocab, args.batch_tokens, args.steps, args.warmup = "cpu", 64, 512, args.steps or 6, 2
        args.minutes = min(args.minutes, 0.2)
    elif args.tokens is None:
        parser.error("--tokens is needed without --smoke")
    return args


class Trainer:
    """One training run: data, head, optimiser and the time box."""

    def __init__(self, args: argparse.Namespace, target: Target, table: TokenTable) -> None:
        self.args, self.target, self.table, self.progress = args, target, table, _Progress()
        counts = table.answer_counts(target.config.vocab_size)
        draft_ids = choose_draft_ids(counts, args.draft_vocab)
        if args.init_head:
            draft_ids = load_head(args.init_head, target.embed.cpu().float()).draft_ids
        self.coverage = float(counts[draft_ids.numpy()].sum() / max(1, counts.sum()))
        config = HeadConfig.for_target(target.config, args.draft_vocab)
        self.head = EagleHead(config, target.embed.cpu().float(), draft_ids)
        self.head.initialise(target.norm.cpu().float(), args.seed, self._feature_rms().cpu())
        if args.init_head:
            self.head.copy_weights(load_head(args.init_head, target.embed.cpu().float()))
        self.head.to(target.device)
        self.head.lm_head.weight.requires_grad_(args.train_lm_head)
        self.optimizers = self._optimizers()
        self.step_weights = [args.step_decay**step for step in range(args.ttt)]
        self.state_path = args.out / "state.pt"
        if self.state_path.exists():
            self._resume()

    def _feature_rms(self) -> Tensor:
        """[3H] root mean square of the target's features over one batch of answers."""
        index = next(bucketed_batches(self.table.lengths.tolist(), min(self.args.batch_tokens, 16_384), seed=0))
        batch = self.table.batch(index, self.target.device)
        aux, _ = self.target.forward(batch.ids)
        return aux[batch.rows, batch.ends - 1].float().pow(2).mean(0).sqrt().clamp(min=1e-4)

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        trained = [p for p in self.head.parameters() if p.requires_grad]
        fused = self.target.device.type == "cuda"
        adamw: dict[str, Any] = {"lr": self.args.lr, "betas": (0.9, 0.95), "weight_decay": 0.0, "fused": fused}
        if self.args.optimizer == "adamw":
            return [torch.optim.AdamW(trained, **adamw)]
        matrices = [
            p for n, p in self.head.named_parameters() if p.ndim == 2 and p.requires_grad and "lm_head" not in n
        ]
        rest = [p for p in trained if all(p is not m for m in matrices)]
        muon = torch.optim.Muon(matrices, lr=self.args.lr * 10, weight_decay=0.0, adjust_lr_fn="original")
        return [muon, torch.optim.AdamW(rest, **adamw)]

    def _resume(self) -> None:
        state = torch.load(self.state_path, map_location=self.target.device, weights_only=True)
        self.head.load_state_dict(state["head"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.progress = _Progress(**state["progress"])

    def save(self) -> None:
        """Head folder, resume state, and the head's copy."""
        save_head(self.head, self.args.out, with_lm_head=self.args.train_lm_head)
        state = {
            "head": self.head.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "progress": {name: getattr(self.progress, name) for name in _Progress.__dataclass_fields__},
        }
        torch.save(state, self.state_path.with_suffix(".tmp"))
        self.state_path.with_suffix(".tmp").replace(self.state_path)
        if self.args.copy_to:
            self.args.copy_to.mkdir(parents=True, exist_ok=True)
            for file in [*self.args.out.glob("model*"), self.args.out / "config.json"]:
                shutil.copy(file, self.args.copy_to / file.name)

    def _batches(self) -> Iterator[Batch]:
        while True:
            epoch = self.progress.epoch
            for index in bucketed_batches(
                self.table.lengths.tolist(), self.args.batch_tokens, seed=1_000 * self.args.seed + epoch
            ):
                yield self.table.batch(index, self.target.device)
            self.progress.epoch += 1

    def _learning_rate(self) -> float:
        p, args = self.progress, self.args
        done = p.step / args.steps if args.steps else p.elapsed_s / (60.0 * args.minutes)
        cosine = 0.05 + 0.95 * 0.5 * (1.0 + math.cos(math.pi * min(1.0, done)))
        return float(min(1.0, (p.step + 1) / max(1, args.warmup)) * cosine)

    def train(self) -> None:
        """Runs until the steps or the minutes are used up; checkpoints on the way."""
        args, p = self.args, self.progress
        base = [[group["lr"] for group in o.param_groups] for o in self.optimizers]
        if p.step:
            base = [
                [args.lr * (10 if isinstance(o, torch.optim.Muon) else 1)] * len(o.param_groups)
                for o in self.optimizers
            ]
        began_s = time.monotonic() - p.elapsed_s
        saved_s = p.elapsed_s
        recent = torch.zeros(args.ttt, 2, device=self.target.device, dtype=torch.int64)
        trained = [q for q in self.head.parameters() if q.requires_grad]
        bar = tqdm(self._batches(), desc="training", mininterval=5.0, total=args.steps)
        for batch in bar:
            factor = self._learning_rate()
            for optimizer, rates in zip(self.optimizers, base, strict=True):
                for group, rate in zip(optimizer.param_groups, rates, strict=True):
                    group["lr"] = rate * factor
            loss, counts = loss_of_batch(self.target, self.head, batch, args.ttt, self.step_weights)
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(trained, 0.5)
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            recent += counts
            p.step, p.tokens = p.step + 1, p.tokens + batch.num_tokens
            if p.step % 50 == 0 or args.smoke:
                # Reading the loss is the only point that waits for the device, so the clock below stays honest.
                rates_ = (recent[:, 0] / recent[:, 1].clamp(min=1)).tolist()
                p.log.append({"step": p.step, "tokens": p.tokens, "loss": loss.item(), "accuracy": rates_})
                bar.set_postfix(loss=f"{loss.item():.3f}", acc="/".join(f"{r:.3f}" for r in rates_), tokens=p.tokens)
                recent.zero_()
            p.elapsed_s = time.monotonic() - began_s
            if (args.steps and p.step >= args.steps) or p.elapsed_s > 60.0 * args.minutes:
                break
            if p.elapsed_s - saved_s > 60.0 * args.checkpoint_minutes:
                self.save()
                saved_s = p.elapsed_s
        bar.close()
        self.save()


def _smoke_shard(folder: Path) -> Path:
    """A few random conversations, so that --smoke needs no file."""
    generator = np.random.default_rng(0)
    rows = [
        Conversation(
            prompt_id=str(i), source="toy", split="train" if i < 12 else "heldout",
            ids=generator.integers(3, 60, 40).tolist(), spans=[(10, 40)], temperature=0.8 * (i % 2), seed=i,
        )
        for i in range(16)
    ]  # fmt: skip
    save_corpus(rows, folder / "smoke" / "tokens-000.npz")
    return folder / "smoke"


def main() -> None:
    """Command line."""
    args = _arguments()
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    dtype = torch.bfloat16 if args.device.startswith("cuda") else torch.float32
    target, _ = open_model(args.model, args.tokenizer, device=args.device, dtype=dtype, smoke=args.smoke)
    args.out.mkdir(parents=True, exist_ok=True)
    tokens = args.tokens or _smoke_shard(args.out)
    table = load_table(sorted(tokens.glob("tokens-*.npz")), max_answer_tokens=args.max_answer_tokens)
    trainer = Trainer(args, target, table)
    if args.compile:
        compile_hot_parts(target, trainer.head)
    print(
        f"{table.num_answer_tokens} answer tokens, draft vocabulary covers {trainer.coverage:.4f} of them", flush=True
    )
    trainer.train()
    report: dict[str, Any] = {
        "arguments": {name: str(value) for name, value in vars(args).items()},
        "answer_tokens": table.num_answer_tokens,
        "coverage": trainer.coverage,
        "steps": trainer.progress.step,
        "token_passes": trainer.progress.tokens,
        "epochs": trainer.progress.epoch,
        "seconds": trainer.progress.elapsed_s,
        "log": trainer.progress.log,
    }
    evaluation = args.eval_tokens or (tokens if args.smoke else None)
    if evaluation is not None:
        report["acceptance"] = acceptance_report(target, args.out, sorted(evaluation.glob("tokens-*.npz")))
        print(summary(report["acceptance"]))
    (args.out / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    if args.copy_to:
        shutil.copy(args.out / "report.json", args.copy_to / "report.json")


if __name__ == "__main__":
    main()
