"""``breakeven doctor``: checks what usually goes wrong before it does, and says what to do about it.

A head with a wrong convention (aux layers, norm order, RoPE base, vocabulary map) never fails: lossless verification
hides it, and it is only never accepted. ``--head`` measures it on the target's own text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from rich.console import Console
from rich.table import Table

from breakeven.doctor_machine import (
    check_compiler,
    check_kernels,
    check_packages,
    check_port,
    check_python,
    required_packages,
)
from breakeven.doctor_model import (
    agreement_samples,
    check_agreement,
    check_fit,
    check_gpu,
    check_lossless,
    check_target,
    check_template,
    check_tokenizer,
    own_text,
)
from breakeven.finding import Finding
from cpukernels.choose import choose_kernels
from cpukernels.ports import Kernels
from drafter.compose import head_overrides
from drafter.config import DrafterConfig
from drafter.errors import HeadError
from drafter.head.loader import load_head
from drafter.selfcheck import AgreementTable, check_head
from gateway.config import GatewayConfig
from gateway.text.tokenizer import load_text_codec
from verifier.embedded.config import VerifierConfig
from verifier.embedded.errors import TargetError
from verifier.embedded.model import load_target
from verifier.embedded.weights import resolve_model_dir

__all__ = ["run_doctor"]


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
    findings = [check_python(), check_packages(required_packages()), check_compiler(), check_port(gateway)]
    warnings: list[str] = []
    kernels = choose_kernels(verifier.kernels, cache_dir=verifier.resolved_cache_dir / "kernels", warn=warnings.append)
    findings.append(check_kernels(kernels, warnings))
    try:
        findings += _model_findings(console, kernels, verifier, drafter, with_head=with_head, force=force)
    except (TargetError, HeadError, ValueError, FileNotFoundError) as error:
        remedy = "see docs/heads.md" if isinstance(error, HeadError) else "see verifier.model in docs/configuration.md"
        findings.append(Finding(subject="model files", verdict="failed", detail=str(error), remedy=remedy))
    console.print(_findings_table(findings))
    return 1 if any(finding.verdict == "failed" for finding in findings) else 0


def _model_findings(
    console: Console,
    kernels: Kernels,
    verifier: VerifierConfig,
    drafter: DrafterConfig,
    *,
    with_head: bool,
    force: bool,
) -> list[Finding]:
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
    tokenizer = check_tokenizer(codec, model_dir=model_dir, vocab_size=model.architecture.vocab_size)
    findings = [check_target(model), tokenizer, check_template(codec)]
    head = load_head(drafter.head_dir, target_model_dir=model_dir, overrides=head_overrides(drafter))
    findings += check_fit(model, head)
    if drafter.device != "cpu":
        findings.append(check_gpu(drafter.device, head))
    # Of a tokenizer or head that does not fit, nothing can be measured.
    if with_head and not any(finding.verdict == "failed" for finding in findings):
        with console.status("measuring the head on the target's own text"):
            texts = own_text(model, codec)
            table = check_head(head, agreement_samples(model, texts))
            findings.append(check_lossless(model, texts))
        console.print(_agreement_table(table))
        findings.append(check_agreement(table, force=force))
    return findings


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
