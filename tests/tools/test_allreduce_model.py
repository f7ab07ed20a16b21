"""The protocol has no fault in any interleaving; each way of breaking it is found."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tools.allreduce_model import NEGATIVE_CONTROLS, ONE_SHOT, PROTOCOL, Model, check, main


@pytest.mark.parametrize("model", PROTOCOL, ids=lambda model: model.name)
def test_the_protocol_has_no_fault(model: Model) -> None:
    verdict = check(model)
    assert verdict.fault is None, verdict.trace
    assert verdict.num_states > 50


@pytest.mark.parametrize("model", NEGATIVE_CONTROLS, ids=lambda model: model.name)
def test_every_broken_variant_is_found(model: Model) -> None:
    verdict = check(model)
    assert verdict.fault is not None
    assert verdict.trace


@pytest.mark.parametrize(
    ("model", "cure"),
    [
        (NEGATIVE_CONTROLS[0], {"buffers": 3}),
        (NEGATIVE_CONTROLS[1], {"buffers": 3}),
        (NEGATIVE_CONTROLS[2], {"has_release": True}),
        (NEGATIVE_CONTROLS[3], {"sweep_period": 4}),
    ],
    ids=lambda value: value.name if isinstance(value, Model) else "",
)
def test_the_cure_and_nothing_else_makes_it_whole(model: Model, cure: dict[str, object]) -> None:
    assert check(replace(model, **cure)).fault is None  # type: ignore[arg-type]


def test_a_search_that_grows_too_large_says_so() -> None:
    with pytest.raises(MemoryError, match="more than 100 states"):
        check(Model(name="large", ranks=3, calls=(ONE_SHOT,) * 5), max_states=100)


def test_the_command_prints_every_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main() == 0
    printed = capsys.readouterr().out
    assert all(model.name in printed for model in (*PROTOCOL, *NEGATIVE_CONTROLS))
