"""The command line. Every setting of every section is a flag, generated from its dataclass."""

from __future__ import annotations

import dataclasses
import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from breakeven import __version__
from breakeven.load_bar import LoadBar
from breakeven.logs import setup_logging
from breakeven.settings import DEFAULT_PROFILE, SECTIONS, Settings, load_settings
from drafter.config import DrafterConfig
from gateway.config import GatewayConfig
from gateway.engine_config import EngineConfig, SpeculationConfig
from verifier.embedded.config import VerifierConfig
from wire.process import die_with_parent
from wire.settings import ConfigError

__all__ = ["app", "main"]

app = typer.Typer(
    name="breakeven",
    help="A speculative decoding gateway that speculates only while speculation measurably pays.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


_SWITCHES = {
    "head": "Measure the head on the target's own text.",
    "force": "Only warn about a head that fails its check.",
}


def main() -> None:
    """Entry point of the console script."""
    try:
        app()
    except ConfigError as error:
        typer.echo(f"breakeven: {error}", err=True)
        sys.exit(2)


def _with_settings(
    *sections: str, switches: tuple[str, ...] = ()
) -> Callable[[Callable[[Settings], None]], Callable[..., None]]:
    """Give a command --profile, one flag per setting of ``sections``, and on/off ``switches`` of its own."""

    def decorate(command: Callable[[Settings], None]) -> Callable[..., None]:
        def run(**values: Any) -> None:
            profile = values.pop("profile")
            flags = {name.replace("__", ".", 1): value for name, value in values.items()}
            command(load_settings(profile, flags))

        parameters = [_parameter("profile", str, DEFAULT_PROFILE, "--profile", "Name in configs/, or a .toml file.")]
        for section in sections:
            for field in dataclasses.fields(SECTIONS[section]):
                flag = f"--{section}.{field.name.replace('_', '-')}"
                help_text = field.metadata.get("help", "")
                parameters.append(_parameter(f"{section}__{field.name}", str | None, None, flag, help_text, section))
        for switch in switches:
            option = typer.Option(f"--{switch}", help=_SWITCHES[switch])
            kind = inspect.Parameter.KEYWORD_ONLY
            parameters.append(inspect.Parameter(switch, kind, default=False, annotation=Annotated[bool, option]))
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        return run

    return decorate


def _parameter(
    name: str, kind: Any, default: Any, flag: str, help_text: str, panel: str | None = None
) -> inspect.Parameter:
    option = typer.Option(flag, help=help_text, show_default=False, metavar="VALUE", rich_help_panel=panel)
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option])


@app.command()
@_with_settings(*SECTIONS)
def serve(settings: Settings) -> None:
    """Start the gateway, and the verifier and drafter it needs."""
    # Lazy: everything below the edge is loaded only by the command that needs it.
    import uvloop

    from gateway.compose import GatewaySettings
    from gateway.compose import serve as serve_gateway

    engine = settings.section("engine", EngineConfig)
    setup_logging(engine.log_format)
    resolved = GatewaySettings(
        gateway=settings.section("gateway", GatewayConfig),
        engine=engine,
        speculation=settings.section("speculation", SpeculationConfig),
        verifier=settings.section("verifier", VerifierConfig),
        drafter=settings.section("drafter", DrafterConfig),
        version=__version__,
    )
    with LoadBar() as bar:
        uvloop.run(serve_gateway(resolved, on_phase=bar.show))


@app.command()
@_with_settings("verifier")
def verifier(settings: Settings) -> None:
    """Run the embedded verifier process by itself."""
    from verifier.embedded.compose import run

    setup_logging("console")
    config = settings.section("verifier", VerifierConfig)
    die_with_parent(config.parent_pid or os.getppid())
    for key in ("endpoint", "ring_path"):
        if getattr(config, key) == "auto":
            raise ConfigError(f"verifier.{key}", "must be given when the verifier runs by itself")
    run(config, endpoint=config.endpoint, ring_path=Path(config.ring_path))


@app.command()
@_with_settings("drafter")
def drafter(settings: Settings) -> None:
    """Run the drafter process by itself."""
    from drafter.compose import run

    setup_logging("console")
    run(settings.section("drafter", DrafterConfig))


@app.command()
@_with_settings("gateway", "verifier", "drafter", switches=("head", "force"))
def doctor(settings: Settings) -> None:
    """Check ports, versions, model and head; --head measures the head on the target's own text."""
    from breakeven.doctor import run_doctor

    status = run_doctor(
        settings.section("gateway", GatewayConfig),
        settings.section("verifier", VerifierConfig),
        settings.section("drafter", DrafterConfig),
        with_head=settings.switch("head"),
        force=settings.switch("force"),
    )
    raise typer.Exit(status)


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)
