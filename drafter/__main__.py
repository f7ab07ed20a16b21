"""``python -m drafter --profile configs/cpu-tiny.toml --endpoint ipc:///tmp/d.sock --head-dir DIR ...``."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
import sys
from pathlib import Path

from drafter.compose import run
from drafter.config import DrafterConfig
from wire.settings import build_section, load_profile


def main(argv: list[str] | None = None) -> None:
    """Read settings (profile < environment < flags) and serve."""
    parser = argparse.ArgumentParser(prog="python -m drafter", description="The EAGLE-3 drafter process.")
    parser.add_argument("--profile", type=Path, help="TOML profile; its [drafter] section is read.")
    for field in dataclasses.fields(DrafterConfig):
        parser.add_argument("--" + field.name.replace("_", "-"), dest=field.name, help=field.metadata["help"])
    flags = vars(parser.parse_args(argv))
    profile = flags.pop("profile")
    section = {} if profile is None else load_profile(profile).get("drafter", {})
    logging.basicConfig(
        stream=sys.stdout, level=logging.INFO, format="time=%(asctime)s level=%(levelname)s %(message)s"
    )
    run(build_section(DrafterConfig, "drafter", profile=section, environ=os.environ, flags=flags))


if __name__ == "__main__":
    main()
