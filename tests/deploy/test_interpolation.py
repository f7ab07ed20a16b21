from __future__ import annotations

import pytest

from tests.deploy.interpolation import InterpolationError, interpolate, interpolate_tree, read_env_file, variables

ENVIRON = {"SET": "value", "EMPTY": "", "OTHER": "x"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("$SET/${SET}", "value/value"),
        ("${GONE}-$GONE.", "-."),
        ("${GONE:-default}", "default"),
        ("${GONE-default}", "default"),
        ("${EMPTY:-default}", "default"),
        ("${EMPTY-default}", ""),
        ("${SET:-default}", "value"),
        ("${SET:+yes}${EMPTY:+yes}${EMPTY+set}${GONE+no}", "yesset"),
        ("${GONE:-${EMPTY:-${OTHER}}}", "x"),
        ("${GONE:-}", ""),
        ("${GONE:-./models}:/srv:ro", "./models:/srv:ro"),
        ("size=${GONE:-1g},mode=0700", "size=1g,mode=0700"),
        ("$$SET and $${SET}", "$SET and ${SET}"),
        ("${SET:?must be there}", "value"),
        ("${EMPTY?must be there}", ""),
        ("torch==${GONE:-2.13.0+cpu}", "torch==2.13.0+cpu"),
        ("nothing", "nothing"),
    ],
)
def test_an_expression_is_what_compose_makes_of_it(text: str, expected: str) -> None:
    assert interpolate(text, ENVIRON) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("${GONE:?set it}", "GONE: set it"),
        ("${EMPTY:?}", "EMPTY: must be set"),
        ("${GONE?}", "GONE"),
        ("5$", "invalid"),
        ("$-x", "invalid"),
        ("${SET", "brace"),
        ("${}", "no name"),
        ("${SET%x}", "operator"),
    ],
)
def test_what_compose_refuses_is_refused(text: str, message: str) -> None:
    with pytest.raises(InterpolationError, match=message):
        interpolate(text, ENVIRON)


def test_a_tree_keeps_its_shape_and_what_is_no_text() -> None:
    tree = {"$SET": ["${SET}", 1, None, {"a": True}]}
    assert interpolate_tree(tree, ENVIRON) == {"$SET": ["value", 1, None, {"a": True}]}


def test_variables_are_found_with_their_defaults() -> None:
    assert variables({"a": ["${X:-1} $Y", {"b": "${Z-}"}]}) == {"X": "1", "Y": None, "Z": ""}


def test_an_env_file_is_read_as_compose_reads_it() -> None:
    text = "# comment\n\nA=1\nexport B = two words # why\nC='# kept'\nD=\nE=a#b\n"
    assert read_env_file(text) == {"A": "1", "B": "two words", "C": "# kept", "D": "", "E": "a#b"}
    with pytest.raises(InterpolationError, match="NAME=VALUE"):
        read_env_file("just text")
