"""The command line. Every setting of every section is a flag, generated from its dataclass."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from breakeven import __version__
from breakeven.logs import setup_logging
from breakeven.manual import ManualApp
from breakeven.settings import DEFAULT_PROFILE, SECTIONS, Settings, load_settings, profile_names
from drafter.config import DrafterConfig
from gateway.config import GatewayConfig
from gateway.engine_config import EngineConfig, SpeculationConfig
from verifier.embedded.config import VerifierConfig
from verifier.sglang.config import SGLangConfig
from verifier.tuning.config import TuneConfig
from wire.process import die_with_parent
from wire.settings import ConfigError

__all__ = ["app", "main"]

app = ManualApp(
    name="breakeven",
    help="A speculative decoding gateway that speculates only while speculation measurably pays.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
config_app = ManualApp(help="About settings and profiles.", no_args_is_help=True)
app.add_typer(config_app, name="config")


_HEALTH_TIMEOUT_S = 3.0
_SWITCHES = {
    "head": "Measure the head on the target's own text.",
    "force": "Only warn about a head that fails its check.",
    "probe": "Only look at the machine: GPUs, links, and which all-reduce is possible.",
    "allreduce": "Choose the all-reduce of this machine by measurement instead.",
    "report": "Only write report and best profile from the ledger.",
    "check_gateway": "Ask the gateway.",
    "check_verifier": "Ask the verifier.",
    "check_drafter": "Ask the drafter.",
    "check_sglang": "Ask SGLang.",
}


def main() -> None:
    """Entry point of the console script."""
    try:
        app(prog_name="breakeven")
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

        parameters = [_profile_parameter()]
        for section in sections:
            for field in dataclasses.fields(SECTIONS[section]):
                flag = f"--{section}.{field.name.replace('_', '-')}"
                help_text = field.metadata.get("help", "")
                parameters.append(_parameter(f"{section}__{field.name}", str | None, None, flag, help_text, section))
        for switch in switches:
            option = typer.Option(f"--{switch.removeprefix('check_')}", help=_SWITCHES[switch])
            kind = inspect.Parameter.KEYWORD_ONLY
            parameters.append(inspect.Parameter(switch, kind, default=False, annotation=Annotated[bool, option]))
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        return run

    return decorate


def _profile_parameter() -> inspect.Parameter:
    option = typer.Option(
        "--profile",
        envvar="BREAKEVEN_PROFILE",
        help="Name in configs/, or a .toml file.",
        metavar="NAME",
        autocompletion=profile_names,
    )
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter("profile", kind, default=DEFAULT_PROFILE, annotation=Annotated[str, option])


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

    from breakeven.load_bar import LoadBar
    from gateway.compose import GatewaySettings
    from gateway.compose import serve as serve_gateway

    engine = settings.section("engine", EngineConfig)
    resolved = GatewaySettings(
        gateway=settings.section("gateway", GatewayConfig),
        engine=engine,
        speculation=settings.section("speculation", SpeculationConfig),
        verifier=settings.section("verifier", VerifierConfig),
        drafter=settings.section("drafter", DrafterConfig),
        sglang=settings.section("sglang", SGLangConfig),
        version=__version__,
    )
    setup_logging(engine.log_format)
    with LoadBar() as bar:
        uvloop.run(serve_gateway(resolved, on_phase=bar.show))


@app.command()
@_with_settings("verifier")
def verifier(settings: Settings) -> None:
    """Run the embedded verifier process by itself."""
    from verifier.embedded.compose import run

    setup_logging(settings.section("engine", EngineConfig).log_format)
    config = settings.section("verifier", VerifierConfig)
    die_with_parent(config.parent_pid or os.getppid())
    for key in ("endpoint", "ring_path"):
        if getattr(config, key) == "auto":
            raise ConfigError(f"verifier.{key}", "must be given when the verifier runs by itself")
    run(config, endpoint=config.endpoint, ring_path=Path(config.ring_path))


@app.command()
@_with_settings("drafter")
def drafter(settings: Settings) -> None:
    """Run the drafter process by itself; drafter.target-model-dir may name a bundled model."""
    from drafter.compose import run
    from verifier.embedded.weights import BUNDLED_MODELS, resolve_model_dir

    setup_logging(settings.section("engine", EngineConfig).log_format)
    config = settings.section("drafter", DrafterConfig)
    target = config.target_model_dir
    if target is not None and str(target) in BUNDLED_MODELS:
        cache_dir = settings.section("verifier", VerifierConfig).resolved_cache_dir
        model_dir = resolve_model_dir(str(target), cache_dir=cache_dir, progress=lambda phase, share: None)
        config = dataclasses.replace(config, target_model_dir=model_dir)
    run(config)


@app.command()
@_with_settings("sglang")
def launch(settings: Settings) -> None:
    """Start SGLang as a profile says, watch it load, explain a crash."""
    from verifier.sglang.launch import launch as launch_sglang

    setup_logging(settings.section("engine", EngineConfig).log_format)
    cache_dir = settings.section("verifier", VerifierConfig).resolved_cache_dir
    launch_sglang(settings.section("sglang", SGLangConfig), cache_dir=cache_dir)


@app.command()
@_with_settings("tune", "sglang", switches=("probe", "allreduce", "report"))
def tune(settings: Settings) -> None:
    """Try launch settings one at a time against the profile's own, and write down what each is worth."""
    from verifier.tuning.tune import tune as run_tune
    from verifier.tuning.tune_allreduce import probe, tune_machine

    setup_logging("console")
    sglang, config = settings.section("sglang", SGLangConfig), settings.section("tune", TuneConfig)
    if settings.switch("probe"):
        raise typer.Exit(probe(sglang, write=typer.echo))
    if settings.switch("allreduce"):
        raise typer.Exit(tune_machine(sglang, cache_dir=config.resolved_state_dir, write=typer.echo))
    only_report = settings.switch("report")
    raise typer.Exit(
        run_tune(sglang, config, profile=settings.profile, tables=settings.tables, only_report=only_report)
    )


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
@_with_settings(
    *("gateway", "verifier", "drafter", "sglang"),
    switches=("check_gateway", "check_verifier", "check_drafter", "check_sglang"),
)
def health(settings: Settings) -> None:
    """Exit with 0 if the named process is ready, with 1 if not; for container healthchecks."""
    from breakeven.health import gateway_is_ready, peer_phase, sglang_is_healthy

    endpoints = {
        "check_verifier": settings.section("verifier", VerifierConfig).endpoint,
        "check_drafter": settings.section("drafter", DrafterConfig).endpoint,
    }
    is_ready = True
    if settings.switch("check_gateway"):
        gateway = settings.section("gateway", GatewayConfig)
        is_ready = gateway_is_ready(gateway.host, gateway.port, timeout_s=_HEALTH_TIMEOUT_S)
        typer.echo(f"gateway: {'ready' if is_ready else 'not ready'}")
    if settings.switch("check_sglang"):
        is_healthy = sglang_is_healthy(settings.section("sglang", SGLangConfig).url, timeout_s=_HEALTH_TIMEOUT_S)
        typer.echo(f"sglang: {'healthy' if is_healthy else 'not healthy'}")
        is_ready = is_ready and is_healthy
    for switch, endpoint in endpoints.items():
        if settings.switch(switch):
            answered, phase = asyncio.run(peer_phase(endpoint, timeout_s=_HEALTH_TIMEOUT_S))
            typer.echo(f"{switch.removeprefix('check_')}: {phase}")
            is_ready = is_ready and answered
    raise typer.Exit(0 if is_ready else 1)


@app.command()
def torture(
    url: Annotated[str, typer.Argument(help="Base of any OpenAI-compatible server, with or without /v1.")],
    model: Annotated[str, typer.Option(help="Model to ask for.")],
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="Key to send.")] = None,
    only: Annotated[str, typer.Option(help="Run the checks whose name or rule contains this.")] = "",
    timeout_s: Annotated[float, typer.Option(help="Longest time for one exchange.")] = 120.0,
) -> None:
    """Check a server's streams against the contract its clients rely on; exit 1 if a required rule is broken."""
    from breakeven.torture import torture as run_torture

    sys.exit(run_torture(url, model=model, api_key=api_key, only=only, timeout_s=timeout_s))


@app.command(name="bench")
def bench_server(
    url: Annotated[str, typer.Argument(help="Base of any OpenAI-compatible server, with or without /v1.")],
    model: Annotated[str, typer.Option(help="Model to ask for; the first one listed if left out.")] = "",
    concurrency: Annotated[str, typer.Option(help="Streams at a time; several with commas: 1,4,16.")] = "1",
    requests: Annotated[int, typer.Option(min=1, help="Answers of each setting in one repeat.")] = 16,
    warm_up: Annotated[int, typer.Option(min=0, help="Answers before each setting that are not measured.")] = 1,
    repeats: Annotated[int, typer.Option(min=1, help="How often all settings are run in turn.")] = 1,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Send ignore_eos: all answers equally long.")
    ] = False,
    speculation: Annotated[str, typer.Option(help="Send speculation.mode, ours alone; to compare: off,auto.")] = "",
    prompts: Annotated[
        Path | None, typer.Option(help="File with one prompt a line; 8 built-in ones if left out.")
    ] = None,
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="Key to send.")] = None,
    timeout_s: Annotated[float, typer.Option(min=0.1, help="Longest time for one answer.")] = 600.0,
    json_only: Annotated[bool, typer.Option("--json", help="Print only the JSON line to stdout.")] = False,
) -> None:
    """Measure a server: TTFT, TPOT, gaps between events, delivered tokens a second; acceptance if it is breakeven."""
    from breakeven.bench import BenchPlan, bench, read_prompts

    try:
        plan = BenchPlan(
            model=model,
            prompts=read_prompts(prompts),
            concurrencies=tuple(max(1, int(part)) for part in concurrency.split(",")),
            modes=tuple(part.strip() for part in speculation.split(",")),
            num_requests=requests,
            num_warm_up=warm_up,
            repeats=repeats,
            max_tokens=max_tokens,
            temperature=temperature,
            ignores_eos=ignore_eos,
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    sys.exit(bench(url, plan, api_key=api_key, timeout_s=timeout_s, json_only=json_only))


@config_app.command()
def schema() -> None:
    """Print the JSON schema of a profile."""
    from breakeven.config_schema import render_schema

    typer.echo(render_schema(), nl=False)


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)
