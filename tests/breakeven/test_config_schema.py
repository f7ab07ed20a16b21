from __future__ import annotations

import copy
import tomllib
from importlib import resources
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator, ValidationError
from typer.testing import CliRunner

from breakeven.cli import app
from breakeven.config_schema import profile_schema, render_schema
from wire.settings import SCHEMA_VERSION

CONFIGS = Path(str(resources.files("configs")))
PROFILES = sorted(CONFIGS.glob("*.toml"))
SCHEMA = Draft202012Validator(profile_schema())


def test_it_is_a_schema_and_the_shipped_file_is_up_to_date() -> None:
    Draft202012Validator.check_schema(profile_schema())
    written = (CONFIGS / "profile.schema.json").read_text(encoding="utf-8")
    assert written == render_schema(), "run: python -m tools.configuration_docs"
    assert CliRunner().invoke(app, ["config", "schema"]).output == written


@pytest.mark.parametrize("path", PROFILES, ids=lambda path: path.stem)
def test_every_profile_states_its_version_points_at_the_schema_and_fits_it(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.startswith("#:schema ./profile.schema.json\n")
    profile = tomllib.loads(text)
    assert profile["schema_version"] == SCHEMA_VERSION
    SCHEMA.validate(profile)


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("gateway", "prot", 1),
        ("gateway", "port", "8000"),
        ("speculation", "mode", "sometimes"),
        ("speculation", "candidates", [1.5]),
        ("drafter", "head_dir", 5),
    ],
)
def test_mistakes_are_marked(section: str, key: str, value: object) -> None:
    profile = {"schema_version": SCHEMA_VERSION, section: {key: value}}
    with pytest.raises(ValidationError):
        SCHEMA.validate(copy.deepcopy(profile))
    with pytest.raises(ValidationError):
        SCHEMA.validate({"schema_version": SCHEMA_VERSION + 1})
    SCHEMA.validate({})
