"""What `--help` says beyond the options, as a manual page would: examples, exit status, environment."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import typer
from typer.core import TyperCommand

__all__ = ["MANUAL", "Manual", "ManualApp", "ManualCommand", "render_manual"]

_SETTINGS = (
    ("BREAKEVEN_PROFILE", "the profile, as --profile"),
    ("BREAKEVEN_SECTION_KEY", "any setting: BREAKEVEN_GATEWAY_PORT=9000 is --gateway.port 9000; a flag wins"),
)
_STARTED = ((0, "stopped by SIGTERM or SIGINT"), (1, "it failed; the log says why"), (2, "a flag or setting is wrong"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Manual:
    """Of one command.

    Fields:
        examples: (command line, what it does). exit_status: (number, meaning). environment: (variable, meaning).
    """

    examples: tuple[tuple[str, str], ...]
    exit_status: tuple[tuple[int, str], ...]
    environment: tuple[tuple[str, str], ...] = _SETTINGS


MANUAL: Final[dict[str, Manual]] = {
    "serve": Manual(
        examples=(
            ("breakeven serve", "SmolLM2-135M-Instruct on http://127.0.0.1:8000"),
            ("breakeven serve --profile cpu-smollm2", "in front of the SGLang that `breakeven launch` started"),
            ("breakeven serve --verifier.model DIR --drafter.head-dir HEAD", "another model on the CPU engine"),
            ("breakeven serve --speculation.mode off", "plain decode, to compare"),
        ),
        exit_status=_STARTED,
    ),
    "verifier": Manual(
        examples=(
            (
                "breakeven verifier --verifier.endpoint ipc:///run/v.sock --verifier.ring-path /dev/shm/ring",
                "by itself, for a gateway with --engine.spawn-verifier false",
            ),
        ),
        exit_status=_STARTED,
    ),
    "drafter": Manual(
        examples=(
            (
                "breakeven drafter --drafter.head-dir smollm2-135m-instruct --drafter.ring-path /dev/shm/ring"
                " --drafter.target-model-dir smollm2-135m-instruct",
                "by itself, for a gateway with --engine.spawn-drafter false",
            ),
        ),
        exit_status=_STARTED,
    ),
    "launch": Manual(
        examples=(
            ("breakeven launch --profile kimi-k2.5-8x-rtx-pro-6000", "SGLang on eight GPUs, as the profile says"),
            ("breakeven launch --profile cpu-smollm2 --sglang.python VENV/bin/python", "SGLang of another environment"),
        ),
        exit_status=(*_STARTED[:1], (1, "SGLang did not start, or ended; the log has the diagnosis"), _STARTED[2]),
    ),
    "tune": Manual(
        examples=(("breakeven tune --profile my-profile.toml", "what each launch setting is worth on this machine"),),
        exit_status=((0, "done"), (1, "the profile's own settings did not come up"), _STARTED[2]),
    ),
    "doctor": Manual(
        examples=(
            ("breakeven doctor", "compiler, port, kernels, target and head, in half a minute"),
            ("breakeven doctor --head --drafter.head-dir HEAD --verifier.model DIR", "does this head fit this target?"),
        ),
        exit_status=((0, "nothing failed; there may be warnings"), (1, "a check failed"), _STARTED[2]),
    ),
    "health": Manual(
        examples=(
            ("breakeven health --gateway", "is the gateway on the configured port ready for requests?"),
            ("breakeven health --verifier --verifier.endpoint ipc:///run/v.sock", "has that verifier loaded?"),
        ),
        exit_status=((0, "all that were asked are ready"), (1, "one is not, or does not answer"), _STARTED[2]),
    ),
    "torture": Manual(
        examples=(
            ("breakeven torture http://127.0.0.1:8000 --model smollm2-135m-instruct", "all checks"),
            ("breakeven torture http://127.0.0.1:8000 --model m --only usage", "those about usage"),
        ),
        exit_status=((0, "every required rule holds"), (1, "one is broken"), (2, "the server can't be reached")),
        environment=(("OPENAI_API_KEY", "the key to send, as --api-key"),),
    ),
    "bench": Manual(
        examples=(
            ("breakeven bench http://127.0.0.1:8000", "one stream at a time, 16 answers of 128 tokens"),
            ("breakeven bench http://127.0.0.1:8000 --concurrency 1,4,16", "at three loads"),
            ("breakeven bench http://127.0.0.1:8000 --speculation off,auto --repeats 5", "is speculation worth it?"),
            (
                "breakeven bench http://127.0.0.1:30000 --json > sglang.json",
                "any OpenAI-compatible server, for a script",
            ),
        ),
        exit_status=(
            (0, "every request was answered"),
            (1, "one failed"),
            (2, "the server can't be reached, or a flag is wrong"),
        ),
        environment=(("OPENAI_API_KEY", "the key to send, as --api-key"),),
    ),
    "config schema": Manual(
        examples=(
            ("breakeven config schema > profile.schema.json", "then `#:schema ./profile.schema.json` in a profile"),
        ),
        exit_status=((0, "always"),),
        environment=(),
    ),
    "version": Manual(
        examples=(("breakeven version", "as in --version of other programs"),),
        exit_status=((0, "always"),),
        environment=(),
    ),
}


def render_manual(manual: Manual) -> str:
    """As text for a terminal, indented like the rest of --help."""
    sections = [
        ("Examples", [line for command, what in manual.examples for line in (f"$ {command}", f"      {what}")]),
        ("Exit status", [f"{number}  {meaning}" for number, meaning in manual.exit_status]),
        ("Environment", [f"{name}  {meaning}" for name, meaning in manual.environment]),
    ]
    return "\n\n".join(
        "\n".join([f" {title}", *(f"   {line}" for line in lines)]) for title, lines in sections if lines
    )


class ManualCommand(TyperCommand):
    """A command whose --help ends with its manual."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """See the base class; rich writes to stdout itself, so this does too."""
        super().format_help(ctx, formatter)
        manual = MANUAL.get(_path(ctx))
        if manual is not None:
            typer.echo(render_manual(manual) + "\n")


class ManualApp(typer.Typer):
    """Makes every command a ManualCommand."""

    def command(self, name: str | None = None, **options: Any) -> Callable[[Any], Any]:
        """See the base class."""
        return super().command(name, **{"cls": ManualCommand, **options})


def _path(ctx: Any) -> str:
    """Names from below the program's own, which may be "python -m breakeven", to the command's."""
    names: list[str] = []
    while ctx.parent is not None:
        names.insert(0, ctx.info_name)
        ctx = ctx.parent
    return " ".join(names)
