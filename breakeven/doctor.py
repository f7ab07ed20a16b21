"""``breakeven doctor``: checks what usually goes wrong before it does, and says what to do about it.

A head with a wrong convention (aux layers, norm order, RoPE base, vocabulary map) never fails: lossless verification
hides it, and it is only never accepted. ``--head`` measures it on the target's own text.
"""

from __future__ import annotations

import hashlib
import platform
import shutil
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from cpukernels.choose import choose_kernels
from cpukernels.ports import ragged_rows
from drafter.compose import head_overrides
from drafter.config import DrafterConfig
from drafter.errors import HeadError
from drafter.head.loader import load_head
from drafter.head.weights import HeadWeights
from drafter.selfcheck import AgreementTable, CheckSample, check_head, judge
from gateway.config import GatewayConfig
from gateway.ports import ChatMessage
from gateway.text.tokenizer import ModelTextCodec, load_text_codec
from verifier.embedded.config import VerifierConfig
from verifier.embedded.errors import TargetError
from verifier.embedded.model import TargetModel, load_target
from verifier.embedded.weights import resolve_model_dir

__all__ = ["Finding", "OwnText", "own_text", "run_doctor"]

_QUESTIONS = (
    "What is the capital of France, and what is it known for?",
    "Explain how a bicycle stays upright.",
    "Write three sentences about the sea.",
    "How do I make a cup of tea?",
    "List five animals and where they live.",
    "Why do leaves change colour in autumn?",
    "Write a short story about a fox.",
    "What should I pack for a week in the mountains?",
)
_TOKENS_EACH = 90


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnText:
    """A prompt and the target's own greedy answer to it, up to its end."""

    ids: tuple[int, ...]
    prompt_len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One check: what was looked at, how it stands, and the remedy where it is not "ok"."""

    subject: str
    verdict: Literal["ok", "warning", "failed"]
    detail: str
    remedy: str = ""


def run_doctor(
    gateway: GatewayConfig, verifier: VerifierConfig, drafter: DrafterConfig, *, with_head: bool, force: bool
) -> int:
    """Run all checks and print them.

    Args:
        with_head: also measure the head on the target's own text (about half a minute on a CPU).
        force: a head that fails its check is a warning, not a failure.

    Returns:
        The exit status: 0, or 1 if anything failed.
    """
    console = Console()
    torch.set_num_threads(verifier.num_threads)
    findings = [_python(), _compiler(), _port(gateway)]
    warnings: list[str] = []
    kernels = choose_kernels(verifier.kernels, cache_dir=verifier.resolved_cache_dir / "kernels", warn=warnings.append)
    findings.append(
        Finding(
            subject="kernels",
            verdict="ok" if kernels.is_row_invariant else "warning",
            detail=warnings[0] if warnings else f"{kernels.name}, row-invariant: lossless bit for bit",
            remedy="" if kernels.is_row_invariant else "install a C compiler",
        )
    )
    try:
        with console.status("loading the target"):
            model_dir = resolve_model_dir(
                verifier.model, cache_dir=verifier.resolved_cache_dir, progress=lambda phase, share: None
            )
            model = load_target(
                model_dir,
                kernels=kernels,
                aux_layer_ids=verifier.aux_layer_ids,
                context_len=verifier.context_len,
                progress=lambda phase, share: None,
            )
            codec = load_text_codec(model_dir)
        findings.append(_target(model, codec))
        head = load_head(drafter.head_dir, target_model_dir=model_dir, overrides=head_overrides(drafter))
        findings += _fit(model, head)
        if with_head:
            with console.status("measuring the head on the target's own text"):
                texts = own_text(model, codec)
                table = check_head(head, _samples(model, texts))
                findings.append(_lossless(model, texts))
            console.print(_agreement_table(table))
            findings.append(_head_verdict(table, force=force))
    except (TargetError, HeadError) as error:
        findings.append(Finding(subject="model files", verdict="failed", detail=str(error), remedy="see docs/heads.md"))
    console.print(_findings_table(findings))
    return 1 if any(finding.verdict == "failed" for finding in findings) else 0


def own_text(model: TargetModel, codec: ModelTextCodec) -> list[OwnText]:
    """The target's own greedy answers to a few questions; all questions in one batch."""
    texts = [codec.render_chat([ChatMessage(role="user", content=question)]) for question in _QUESTIONS]
    caches = [model.new_cache() for _ in texts]
    inputs = [list(text) for text in texts]
    prompt_lens = [len(text) for text in texts]
    for _ in range(_TOKENS_EACH):
        rows = ragged_rows(caches, [len(ids) for ids in inputs])
        hidden, _ = model.forward(np.array([i for ids in inputs for i in ids], dtype=np.int64), rows)
        chosen = model.logits(hidden[[stop - 1 for stop in rows.starts[1:]]]).argmax(axis=1)
        for cache, ids, text, token_id in zip(caches, inputs, texts, chosen, strict=True):
            cache.length += len(ids)
            ids[:] = [int(token_id)]
            text.append(int(token_id))
    return [
        OwnText(ids=tuple(_until_end(text, prompt_len, codec.eos_ids)), prompt_len=prompt_len)
        for text, prompt_len in zip(texts, prompt_lens, strict=True)
    ]


def _until_end(text: list[int], prompt_len: int, eos_ids: frozenset[int]) -> list[int]:
    ends = (index for index in range(prompt_len, len(text)) if text[index] in eos_ids)
    return text[: next(ends, len(text) - 1) + 1]


def _samples(model: TargetModel, texts: Sequence[OwnText]) -> list[CheckSample]:
    samples = []
    layers = model.architecture.num_layers
    for text in texts:
        ids = np.array(text.ids, dtype=np.int64)
        features, argmax = {}, None
        for shift in (-1, 0, 1):
            shifted = tuple(layer + shift for layer in model.aux_layer_ids)
            if all(0 <= layer < layers for layer in shifted):
                hidden, states = model.with_aux_layers(shifted).forward(
                    ids, ragged_rows([model.new_cache()], [len(ids)])
                )
                features[shift] = torch.from_numpy(states)
                if argmax is None:
                    argmax = torch.from_numpy(model.logits(hidden).argmax(axis=1))
        assert argmax is not None
        samples.append(
            CheckSample(
                token_ids=torch.from_numpy(ids),
                features=features,
                target_argmax=argmax,
                prompt_len=text.prompt_len,
            )
        )
    return samples


def _lossless(model: TargetModel, texts: Sequence[OwnText]) -> Finding:
    """Decode steps of one row gave these texts; does one pass over many rows choose the same ids?"""
    differing = 0
    for text in texts:
        ids = np.array(text.ids, dtype=np.int64)
        hidden, _ = model.forward(ids, ragged_rows([model.new_cache()], [len(ids)]))
        again = model.logits(hidden[text.prompt_len - 1 : -1]).argmax(axis=1)
        differing += int((again != ids[text.prompt_len :]).sum())
    total = sum(len(text.ids) - text.prompt_len for text in texts)
    exact = differing == 0
    return Finding(
        subject="greedy equality",
        verdict="ok" if exact else ("failed" if model.kernels.is_row_invariant else "warning"),
        detail=f"{total - differing} of {total} ids are the same in one pass and in single steps",
        remedy="" if exact else "without row-invariant kernels near ties may flip",
    )


def _python() -> Finding:
    return Finding(subject="python", verdict="ok", detail=f"{platform.python_version()}, torch {torch.__version__}")


def _compiler() -> Finding:
    found = next((path for name in ("cc", "gcc", "clang") if (path := shutil.which(name))), None)
    return Finding(
        subject="C compiler",
        verdict="ok" if found else "warning",
        detail=Path(found).name if found else "none found",
        remedy="" if found else "install gcc or clang for the fast, row-invariant kernels",
    )


def _port(config: GatewayConfig) -> Finding:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((config.host, config.port))
        except OSError as error:
            return Finding(
                subject="port",
                verdict="failed",
                detail=f"{config.host}:{config.port}: {error.strerror}",
                remedy="stop what listens there, or set gateway.port",
            )
    return Finding(subject="port", verdict="ok", detail=f"{config.host}:{config.port} is free")


def _target(model: TargetModel, codec: ModelTextCodec) -> Finding:
    rendered = codec.render_chat([ChatMessage(role="user", content="ping")])
    digest = hashlib.sha256(" ".join(map(str, rendered)).encode()).hexdigest()[:12]
    architecture = model.architecture
    return Finding(
        subject="target",
        verdict="ok",
        detail=f"{architecture.model_type}, {architecture.num_layers} layers, hidden {architecture.hidden_size}, "
        f"context {model.context_len}, aux layers {model.aux_layer_ids}, chat template {digest}, "
        f"EOS {sorted(codec.eos_ids)}",
    )


def _fit(model: TargetModel, head: HeadWeights) -> list[Finding]:
    def finding(is_ok: bool, detail: str, remedy: str) -> Finding:
        return Finding(
            subject="head fits target",
            verdict="ok" if is_ok else "failed",
            detail=detail,
            remedy="" if is_ok else remedy,
        )

    wanted, given = head.config.aux_layer_ids, model.aux_layer_ids
    return [
        finding(
            not wanted or tuple(wanted) == tuple(given),
            f"{head.head_format}: wants the inputs of layers {tuple(wanted)}, the target gives {tuple(given)}",
            f"set verifier.aux_layer_ids = {list(wanted)}",
        ),
        finding(
            head.feature_size == model.feature_size,
            f"features of {head.feature_size} numbers, the target gives {model.feature_size}",
            "this head belongs to another target",
        ),
        finding(
            int(head.target_ids.max()) < model.architecture.vocab_size,
            f"{len(head.target_ids)} draft ids of {model.architecture.vocab_size}",
            "this head belongs to another target",
        ),
    ]


def _head_verdict(table: AgreementTable, *, force: bool) -> Finding:
    verdict = judge(table)
    if verdict.kind == "ok":
        return Finding(subject="head agreement", verdict="ok", detail=verdict.message)
    return Finding(
        subject="head agreement",
        verdict="warning" if force else "failed",
        detail=verdict.message,
        remedy="" if force else "fix the setting, or pass --force to serve it all the same",
    )


def _agreement_table(table: AgreementTable) -> Table:
    out = Table(
        title=f"draft = target on {table.num_positions} positions, draft vocabulary covers {table.coverage:.1%}"
    )
    for name in ("aux shift", "norm_before_residual", "rope theta", "agreement", ""):
        out.add_column(name, justify="right")
    for cell in table.cells:
        out.add_row(
            f"{cell.aux_shift:+d}",
            str(cell.norm_before_residual),
            f"{cell.rope_theta:g}",
            f"{cell.agreement:.3f}",
            "configured" if cell.is_configured else "",
        )
    return out


def _findings_table(findings: Sequence[Finding]) -> Table:
    colours: dict[str, Callable[[str], str]] = {
        "ok": lambda text: f"[green]{text}[/]",
        "warning": lambda text: f"[yellow]{text}[/]",
        "failed": lambda text: f"[red]{text}[/]",
    }
    out = Table(title="breakeven doctor")
    for name in ("check", "verdict", "detail", "remedy"):
        out.add_column(name)
    for finding in findings:
        out.add_row(finding.subject, colours[finding.verdict](finding.verdict), finding.detail, finding.remedy)
    return out
