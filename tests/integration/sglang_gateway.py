"""Runs the gateway of a profile, with flags: ``python -m tests.integration.sglang_gateway PROFILE key=value ...``."""

from __future__ import annotations

import sys

import uvloop

from breakeven import __version__
from breakeven.logs import setup_logging
from breakeven.settings import load_settings
from drafter.config import DrafterConfig
from gateway.compose import GatewaySettings, serve
from gateway.config import GatewayConfig
from gateway.engine_config import EngineConfig, SpeculationConfig
from verifier.embedded.config import VerifierConfig
from verifier.sglang.config import SGLangConfig


def main() -> None:
    settings = load_settings(sys.argv[1], dict(argument.split("=", 1) for argument in sys.argv[2:]))
    setup_logging("console")
    uvloop.run(
        serve(
            GatewaySettings(
                gateway=settings.section("gateway", GatewayConfig),
                engine=settings.section("engine", EngineConfig),
                speculation=settings.section("speculation", SpeculationConfig),
                verifier=settings.section("verifier", VerifierConfig),
                drafter=settings.section("drafter", DrafterConfig),
                sglang=settings.section("sglang", SGLangConfig),
                version=__version__,
            )
        )
    )


if __name__ == "__main__":
    main()
