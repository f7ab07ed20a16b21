# ruff: noqa: RUF009 - setting() only wraps dataclasses.field
"""Settings: default < profile < environment < flag; whatever is unknown or does not fit is an error with its path."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wire.settings import SCHEMA_VERSION, ConfigError, build_section, env_name, load_profile, section_environ, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class ToyConfig:
    size: int = setting(1, "A number.")
    share: float = setting(0.5, "A share.")
    name: str = setting("toy", "A name.")
    is_fast: bool = setting(False, "A switch.")
    mode: Literal["auto", "on", "off"] = setting("auto", "One of three.")
    sizes: tuple[int, ...] = setting((1, 2), "Some numbers.")
    names: tuple[str, ...] = setting((), "Some names.")
    limit: int | None = setting(None, "A number or nothing.")
    place: Path = setting(Path("here"), "A place.")
    other: Path | None = setting(None, "A place or nothing.")
    maybe_sizes: tuple[int, ...] | None = setting(None, "Numbers or nothing.")

    def validate(self) -> None:
        if self.size < 1:
            raise ConfigError("toy.size", "must be at least 1")


def build(profile: dict[str, Any] | None = None, environ: dict[str, str] | None = None, **flags: Any) -> ToyConfig:
    return build_section(ToyConfig, "toy", profile=profile or {}, environ=environ or {}, flags=flags)


def test_defaults() -> None:
    assert build() == ToyConfig()


def test_precedence_is_default_profile_environment_flag() -> None:
    environ = {"BREAKEVEN_TOY_SIZE": "3"}
    assert build({"size": 2}).size == 2
    assert build({"size": 2}, environ).size == 3
    assert build({"size": 2}, environ, size="4").size == 4
    assert build({}, environ).size == 3
    assert build({"size": 2}, {}, size=4).size == 4


def test_a_flag_of_none_was_not_given() -> None:
    assert build({"size": 2}, {"BREAKEVEN_TOY_SIZE": "3"}, size=None).size == 3


@given(sources=st.lists(st.sampled_from(["profile", "environ", "flag"]), unique=True))
def test_the_strongest_source_wins_for_any_subset(sources: list[str]) -> None:
    values = {"profile": 10, "environ": 20, "flag": 30}
    got = build(
        {"size": 10} if "profile" in sources else {},
        {"BREAKEVEN_TOY_SIZE": "20"} if "environ" in sources else {},
        size=30 if "flag" in sources else None,
    )
    assert got.size == max((values[source] for source in sources), default=1)


def test_names_of_environment_variables() -> None:
    assert env_name("gateway", "max_body_bytes") == "BREAKEVEN_GATEWAY_MAX_BODY_BYTES"


def test_another_sections_environment_is_not_read() -> None:
    assert build({}, {"BREAKEVEN_OTHER_SIZE": "9", "TOY_SIZE": "9", "SIZE": "9", "breakeven_toy_size": "9"}).size == 1


def test_an_unknown_key_names_itself_and_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"toy\.sise: unknown setting; known are .*size") as caught:
        build({"sise": 1})
    assert caught.value.key_path == "toy.sise"


def test_an_unknown_flag_is_an_error() -> None:
    with pytest.raises(ConfigError, match="unknown"):
        build(sise="1")


TEXTS = [
    ("size", "7", 7),
    ("size", "-0", None),
    ("share", "0.25", 0.25),
    ("share", "1", 1.0),
    ("share", "1e-3", 0.001),
    ("name", "", ""),
    ("name", "7", "7"),
    ("is_fast", "true", True),
    ("is_fast", "1", True),
    ("is_fast", "false", False),
    ("is_fast", "0", False),
    ("mode", "on", "on"),
    ("sizes", "3", (3,)),
    ("sizes", "3,4, 5", (3, 4, 5)),
    ("sizes", "", ()),
    ("names", "a, b", ("a", "b")),
    ("limit", "5", 5),
    ("place", "/a/b", Path("/a/b")),
    ("other", "c", Path("c")),
    ("maybe_sizes", "1,2", (1, 2)),
]


@pytest.mark.parametrize(("key", "text", "value"), [row for row in TEXTS if row[2] is not None])
@pytest.mark.parametrize("source", ["environ", "flag"])
def test_text_is_converted(source: str, key: str, text: str, value: Any) -> None:
    got = build({}, {env_name("toy", key): text}) if source == "environ" else build(**{key: text})
    assert getattr(got, key) == value


BAD_TEXTS = [
    ("size", "x"),
    ("size", ""),
    ("size", "1.5"),
    ("share", "half"),
    ("is_fast", "maybe"),
    ("is_fast", "2"),
    ("mode", "sometimes"),
    ("mode", "ON"),
    ("sizes", "1,x"),
    ("sizes", "1;2"),
    ("limit", "x"),
]


@pytest.mark.parametrize(("key", "text"), BAD_TEXTS)
def test_text_that_does_not_fit_names_the_variable_or_flag(key: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build({}, {env_name("toy", key): text})
    assert caught.value.key_path == env_name("toy", key)
    with pytest.raises(ConfigError) as caught:
        build(**{key: text})
    assert caught.value.key_path == f"toy.{key}"


BAD_VALUES = [
    ("size", "7"),
    ("size", 1.5),
    ("size", True),
    ("share", "0.5"),
    ("is_fast", 1),
    ("is_fast", "true"),
    ("name", 3),
    ("mode", "sometimes"),
    ("sizes", 3),
    ("sizes", ["1"]),
    ("sizes", "1,2"),
    ("names", "a"),
    ("limit", "5"),
    ("place", 3),
]


@pytest.mark.parametrize(("key", "value"), BAD_VALUES)
def test_a_profile_is_typed(key: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        build({key: value})
    assert caught.value.key_path == f"toy.{key}"


def test_a_profile_may_write_a_whole_number_for_a_share_and_lists_for_tuples() -> None:
    got = build({"share": 1, "sizes": [4, 5], "place": "x", "other": "y"})
    assert (got.share, got.sizes, got.place, got.other) == (1.0, (4, 5), Path("x"), Path("y"))


@pytest.mark.parametrize("source", ["profile", "environ", "flag"])
def test_ranges_are_checked_whatever_the_source(source: str) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        build(
            {"size": 0} if source == "profile" else {},
            {"BREAKEVEN_TOY_SIZE": "0"} if source == "environ" else {},
            size="0" if source == "flag" else None,
        )


def test_a_section_without_validate_is_fine() -> None:
    @dataclass(frozen=True)
    class Plain:
        size: int = 1

    # Local classes can't be resolved from string annotations, so this one is given as it is.
    Plain.__annotations__["size"] = int
    assert build_section(Plain, "plain", profile={"size": 2}, environ={}).size == 2


configs = st.builds(
    ToyConfig,
    size=st.integers(1, 10**9),
    share=st.floats(allow_nan=False, allow_infinity=False),
    name=st.text(st.characters(exclude_characters="\0")),
    is_fast=st.booleans(),
    mode=st.sampled_from(["auto", "on", "off"]),
    sizes=st.lists(st.integers(), max_size=4).map(tuple),
    names=st.lists(st.text("abc-_.", min_size=1), max_size=3).map(tuple),
    limit=st.none() | st.integers(),
    place=st.just(Path("a b/c")),
    other=st.none() | st.just(Path("/d")),
    maybe_sizes=st.none() | st.lists(st.integers(), min_size=1).map(tuple),
)


@given(config=configs)
def test_another_process_reads_exactly_these_settings(config: ToyConfig) -> None:
    environ = section_environ("toy", config)
    assert all(isinstance(value, str) for value in environ.values())
    assert build({}, environ) == config


def test_a_profile_is_read(tmp_path: Path) -> None:
    path = tmp_path / "p.toml"
    path.write_text("[toy]\nsize = 4\n[other]\n")
    assert load_profile(path) == {"toy": {"size": 4}, "other": {}}


@pytest.mark.parametrize(
    ("text", "message"), [("size = 4", "section"), ("[toy", "is not TOML"), ("[toy]\nsize=1\nsize=2", "is not TOML")]
)
def test_a_broken_profile_is_an_error(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "p.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_profile(path)


def test_a_profile_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't be read"):
        load_profile(tmp_path / "none.toml")


def test_a_profile_that_is_not_text_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "p.toml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError):
        load_profile(path)


def test_every_profile_in_configs_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    from breakeven.settings import SECTIONS, find_profile, load_settings

    for name in list(__import__("os").environ):
        if name.startswith("BREAKEVEN_"):
            monkeypatch.delenv(name)
    profiles = sorted(find_profile("cpu-tiny").parent.glob("*.toml"))
    assert profiles
    for path in profiles:
        settings = load_settings(str(path), {})
        for section, cls in SECTIONS.items():
            assert isinstance(settings.section(section, cls), cls)


@pytest.mark.parametrize(
    ("version", "message"),
    [("2", "newer than this breakeven"), ("0", "must be 1"), ('"1"', "must be 1"), ("true", "must be 1")],
)
def test_a_profile_of_another_schema_version_is_refused(tmp_path: Path, version: str, message: str) -> None:
    path = tmp_path / "profile.toml"
    path.write_text(f"schema_version = {version}\n[toy]\nsize = 4\n")
    with pytest.raises(ConfigError, match=message) as caught:
        load_profile(path)
    assert caught.value.key_path == "schema_version"


def test_the_present_schema_version_is_no_table(tmp_path: Path) -> None:
    path = tmp_path / "profile.toml"
    path.write_text(f"schema_version = {SCHEMA_VERSION}\n[toy]\nsize = 4\n")
    assert load_profile(path) == {"toy": {"size": 4}}
