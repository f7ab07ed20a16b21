"""The doctor on a tiny target and head: healthy, and with each thing wrong that it looks for."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models
from typer.testing import CliRunner

from breakeven.cli import app
from breakeven.doctor_model import (
    OwnText,
    check_agreement,
    check_fit,
    check_lossless,
    check_template,
    check_tokenizer,
    own_text,
)
from breakeven.finding import Finding
from cpukernels.choose import choose_kernels
from drafter.head.loader import load_head
from drafter.selfcheck import AgreementCell, AgreementTable
from gateway.text.tokenizer import ModelTextCodec, load_text_codec
from tests.integration.stack import write_head, write_target
from verifier.embedded.model import TargetModel, load_target

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Bench:
    """A target and a head that fit, on disk and loaded."""

    root: Path
    model: TargetModel
    codec: ModelTextCodec

    @property
    def target(self) -> Path:
        return self.root / "target"


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    root = tmp_path_factory.mktemp("doctor")
    target = write_target(root / "target")
    write_head(root / "head", target)
    kernels = choose_kernels("auto", cache_dir=root / "kernels", warn=lambda _: None)
    model = load_target(target, kernels=kernels, aux_layer_ids=(), context_len=0, progress=lambda phase, share: None)
    return Bench(root=root, model=model, codec=load_text_codec(target))


def doctor(bench: Bench, *flags: str) -> tuple[int, str]:
    fixed = ["--verifier.model", str(bench.target), "--verifier.cache-dir", str(bench.root), "--gateway.port", "0"]
    fixed += ["--drafter.head-dir", str(bench.root / "head")]
    result = CliRunner().invoke(app, ["doctor", *fixed, *flags], env={"COLUMNS": "250"})
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def test_all_is_well(bench: Bench) -> None:
    status, output = doctor(bench)
    assert status == 0, output
    for subject in (
        "python",
        "packages",
        "port",
        "kernels",
        "target",
        "tokenizer",
        "chat template",
        "head fits target",
    ):
        assert subject in output
    assert "failed" not in output


def test_a_random_head_is_found_out_unless_it_is_forced(bench: Bench) -> None:
    status, output = doctor(bench, "--head")
    assert (status, "head agreement" in output, "--force" in output) == (1, True, True)
    assert "greedy equality" in output
    status, output = doctor(bench, "--head", "--force")
    assert (status, "warning" in output) == (0, True)


def test_a_head_with_other_layers(bench: Bench) -> None:
    status, output = doctor(bench, "--verifier.aux-layer-ids", "1,2,3")
    assert status == 1
    assert "set verifier.aux_layer_ids = [2, 3, 4]" in output


def test_a_target_that_is_not_there(bench: Bench) -> None:
    status, output = doctor(bench, "--verifier.model", str(bench.root / "none"))
    assert (status, "verifier.model" in output) == (1, True)


def test_a_head_that_is_not_there(bench: Bench) -> None:
    status, output = doctor(bench, "--drafter.head-dir", str(bench.root / "none"))
    assert (status, "docs/heads.md" in output) == (1, True)


def test_a_gpu_that_is_not_there(bench: Bench) -> None:
    status, output = doctor(bench, "--drafter.device", "cuda:99")
    assert (status, "is 'cuda:99', but" in output, "or set drafter.device" in output) == (1, True, True)


def failed_fit(findings: list[Finding]) -> list[str]:
    return [finding.remedy for finding in findings if finding.verdict == "failed"]


def test_a_head_of_another_target(bench: Bench, tmp_path: Path) -> None:
    head = load_head(bench.root / "head", target_model_dir=bench.target, overrides={})
    assert failed_fit(check_fit(bench.model, head)) == []
    wide = replace(head, target_ids=head.target_ids + 10_000)
    assert failed_fit(check_fit(bench.model, wide)) == ["this head belongs to another target"]


def test_a_tokenizer_of_another_model(bench: Bench) -> None:
    good = check_tokenizer(bench.codec, model_dir=bench.target, vocab_size=bench.codec.vocab_size)
    assert (good.verdict, "sha256" in good.detail) == ("ok", True)
    bad = check_tokenizer(bench.codec, model_dir=bench.target, vocab_size=100)
    assert (bad.verdict, "more ids than the target" in bad.detail) == ("failed", True)
    assert "tokenizer.json from the target's own directory" in bad.remedy


def changed_codec(bench: Bench, tmp_path: Path, **files: object) -> ModelTextCodec:
    shutil.copytree(bench.target, tmp_path / "m")
    for name, content in files.items():
        path = tmp_path / "m" / f"{name}.json"
        fields = {} if content is None else json.loads(path.read_text()) | content
        path.write_text(json.dumps(fields))
    return load_text_codec(tmp_path / "m")


def test_the_hash_of_a_tokenizer_changes_with_it(bench: Bench, tmp_path: Path) -> None:
    shutil.copytree(bench.target, tmp_path / "m")
    first = check_tokenizer(bench.codec, model_dir=bench.target, vocab_size=300).detail
    tokenizer = Tokenizer.from_file(str(tmp_path / "m" / "tokenizer.json"))
    tokenizer.add_tokens(["abc"])
    tokenizer.save(str(tmp_path / "m" / "tokenizer.json"))
    assert check_tokenizer(load_text_codec(tmp_path / "m"), model_dir=tmp_path / "m", vocab_size=300).detail != first


def test_a_tokenizer_that_loses_text(bench: Bench) -> None:
    vocab = {"<unk>": 0, "a": 1}
    tokenizer = Tokenizer.from_file(str(bench.target / "tokenizer.json"))
    tokenizer.model = models.BPE(vocab=vocab, merges=[])
    codec = ModelTextCodec(tokenizer, template=None, eos_ids=[0])
    finding = check_tokenizer(codec, model_dir=bench.target, vocab_size=300)
    assert (finding.verdict, "does not come back" in finding.detail) == ("failed", True)


def test_a_model_without_end_tokens(bench: Bench, tmp_path: Path) -> None:
    codec = changed_codec(bench, tmp_path, generation_config=None, config={"eos_token_id": None}, tokenizer_config=None)
    finding = check_tokenizer(codec, model_dir=bench.target, vocab_size=300)
    assert (finding.verdict, "eos_token_id" in finding.remedy) == ("warning", True)


def test_a_model_without_a_chat_template(bench: Bench, tmp_path: Path) -> None:
    assert check_template(bench.codec).verdict == "ok"
    codec = changed_codec(bench, tmp_path, tokenizer_config={"chat_template": None})
    finding = check_template(codec)
    assert (finding.verdict, "chat_template.jinja" in finding.remedy) == ("warning", True)


def test_a_chat_template_that_refuses(bench: Bench, tmp_path: Path) -> None:
    template = "{{ raise_exception('no chats') }}"
    finding = check_template(changed_codec(bench, tmp_path, tokenizer_config={"chat_template": template}))
    assert (finding.verdict, "no chats" in finding.detail) == ("failed", True)
    assert "authors" in finding.remedy


def test_the_hash_of_a_template_changes_with_it(bench: Bench, tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    codec = changed_codec(bench, tmp_path, tokenizer_config={"chat_template": template})
    assert check_template(codec).detail != check_template(bench.codec).detail


def test_own_text_ends_at_an_end_token(bench: Bench) -> None:
    for text in own_text(bench.model, bench.codec):
        output = text.ids[text.prompt_len :]
        assert 1 <= len(output) <= 90
        assert not set(output[:-1]) & bench.codec.eos_ids


def test_greedy_equality_and_what_breaks_it(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = own_text(bench.model, bench.codec)[:2]
    assert check_lossless(bench.model, texts).verdict == "ok"
    *ids, last = texts[0].ids
    wrong = OwnText(ids=(*ids, (last + 1) % 200), prompt_len=texts[0].prompt_len)
    finding = check_lossless(bench.model, [wrong])
    assert finding.verdict == "failed"
    assert "verifier.kernels = torch" in finding.remedy
    monkeypatch.setattr(bench.model.kernels, "is_row_invariant", False)
    finding = check_lossless(bench.model, [wrong])
    assert (finding.verdict, "C compiler" in finding.remedy) == ("warning", True)


def test_a_head_that_agrees_is_ok() -> None:
    cell = AgreementCell(aux_shift=0, norm_before_residual=False, rope_theta=1e4, agreement=0.7, is_configured=True)
    table = AgreementTable(cells=(cell,), num_positions=100, coverage=1.0)
    assert check_agreement(table, force=False).verdict == "ok"
    poor = replace(table, cells=(replace(cell, agreement=0.01),))
    finding = check_agreement(poor, force=False)
    assert (finding.verdict, "--force" in finding.remedy) == ("failed", True)
    assert check_agreement(poor, force=True).verdict == "warning"
