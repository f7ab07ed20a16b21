"""One change of a profile's launch settings."""

from __future__ import annotations

import pytest

from verifier.sglang.config import SGLangConfig
from verifier.tuning.change import Change, apply_changes, change_from_json, settings_of

CONFIG = SGLangConfig(
    args=("--tp-size", "8", "--trust-remote-code", "--cuda-graph-bs-decode", "1", "2", "4", "--page-size=1"),
    env=("NCCL_P2P_LEVEL=SYS", "A=x=y"),
)


def arg(key: str, *values: str) -> Change:
    return Change(kind="arg", key=key, values=values)


@pytest.mark.parametrize(
    ("change", "args"),
    [
        (arg("--tp-size", "4"), ("--tp-size", "4", *CONFIG.args[2:])),
        (arg("--page-size", "16"), (*CONFIG.args[:-1], "--page-size", "16")),
        (arg("--cuda-graph-bs-decode", "8"), (*CONFIG.args[:3], "--cuda-graph-bs-decode", "8", "--page-size=1")),
        (arg("--enable-mscclpp"), (*CONFIG.args, "--enable-mscclpp")),
        (Change(kind="arg", key="--trust-remote-code", values=None), (*CONFIG.args[:2], *CONFIG.args[3:])),
        (Change(kind="arg", key="--nowhere", values=None), CONFIG.args),
    ],
)
def test_arguments(change: Change, args: tuple[str, ...]) -> None:
    changed = apply_changes(CONFIG, [change])
    assert changed.args == args
    assert changed.env == CONFIG.env


def test_environment() -> None:
    changed = apply_changes(
        CONFIG,
        [
            Change(kind="env", key="NCCL_P2P_LEVEL", values=("PHB",)),
            Change(kind="env", key="A", values=None),
            Change(kind="env", key="B", values=("1",)),
        ],
    )
    assert changed.env == ("NCCL_P2P_LEVEL=PHB", "B=1")
    assert changed.args == CONFIG.args


def test_what_was_there_before() -> None:
    assert settings_of(CONFIG, arg("--tp-size", "4")) == ("8",)
    assert settings_of(CONFIG, arg("--page-size", "4")) == ("1",)
    assert settings_of(CONFIG, arg("--trust-remote-code")) == ()
    assert settings_of(CONFIG, arg("--nowhere")) is None
    assert settings_of(CONFIG, Change(kind="env", key="A", values=None)) == ("x=y",)
    assert settings_of(CONFIG, Change(kind="env", key="C", values=None)) is None


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (arg("--tp-size", "4"), "--tp-size 4"),
        (Change(kind="env", key="A", values=("1",)), "A=1"),
        (Change(kind="env", key="A", values=None), "without A"),
    ],
)
def test_text_and_json(change: Change, text: str) -> None:
    assert change.text == text
    assert change_from_json(change.as_json()) == change
