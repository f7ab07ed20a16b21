"""The split depends on the text alone, and nothing held out leaks into training."""

from pathlib import Path

from tools.eagle.prompts import build_prompts, read_prompts, split_of, write_prompts
from tools.eagle.templates import template_prompts

LONG = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen"


def held_out_text(prefix: str = "") -> str:
    return next(t for i in range(1_000) if split_of(t := f"{prefix}{LONG} number {i}") == "heldout")


def test_split_ignores_case_and_punctuation_and_is_about_one_in_twenty() -> None:
    assert split_of("What is  TEA?") == split_of("what is tea")
    share = sum(split_of(f"question {i}") == "heldout" for i in range(4_000)) / 4_000
    assert 0.035 < share < 0.065
    assert split_of("anything", held_out_source=True) == "ood"


def test_building_is_deterministic_and_independent_of_order() -> None:
    rows = [(source, text, False) for source, text in template_prompts()][:400]
    once, again = build_prompts(rows), build_prompts(reversed(rows))
    assert {p.prompt_id: p for p in once} == {p.prompt_id: p for p in again}
    assert {p.split for p in once} == {"train", "heldout"}


def test_exact_duplicates_collapse_and_the_stricter_split_wins() -> None:
    rows = [("a", "What is tea", False), ("b", "what is TEA?", True)]
    prompts = build_prompts(rows)
    assert [(p.source, p.split) for p in prompts] == [("b", "ood")]


def test_training_prompts_sharing_a_12_gram_with_held_out_ones_are_dropped() -> None:
    held_out = held_out_text()
    near = next(t for i in range(1_000) if split_of(t := f"Please read: {LONG} again {i}") == "train")
    far = next(t for i in range(1_000) if split_of(t := f"eleven words only {i}") == "train")
    kept = {p.turns[0] for p in build_prompts([("x", held_out, False), ("x", near, False), ("x", far, False)])}
    assert kept == {held_out, far}


def test_prompt_files_round_trip_and_equal_prompts_give_equal_bytes(tmp_path: Path) -> None:
    prompts = build_prompts([("x", "Grüße, what is tea?", False), ("x", "Why?", False)])
    write_prompts(prompts, tmp_path / "a.jsonl.gz")
    write_prompts(prompts, tmp_path / "b.jsonl.gz")
    assert read_prompts(tmp_path / "a.jsonl.gz") == prompts
    assert (tmp_path / "a.jsonl.gz").read_bytes() == (tmp_path / "b.jsonl.gz").read_bytes()
