from __future__ import annotations

from pathlib import Path

import pytest

from gateway.speculation.trace import DrafterSet, replay
from gateway.trace_file import TraceFileError, TraceWriter, read_trace
from tests.gateway.speculation.test_trace import recorded


def test_a_file_reads_back_as_written_and_replays_bit_for_bit(tmp_path: Path):
    records, controller = recorded()
    with TraceWriter(tmp_path / "trace.jsonl") as writer:
        for record in records:
            writer.write(record)
    assert (writer.num_written, writer.num_dropped) == (len(records), 0)
    assert list(read_trace(tmp_path / "trace.jsonl")) == records
    assert replay(read_trace(tmp_path / "trace.jsonl")) == ([], controller.reports())


def test_what_cannot_be_written_is_counted_and_the_rest_dropped(tmp_path: Path):
    writer = TraceWriter(tmp_path / "trace.jsonl")
    writer.close()
    writer.write(DrafterSet(is_up=True, reason=""))
    writer.write(DrafterSet(is_up=True, reason=""))
    assert (writer.num_written, writer.num_dropped) == (0, 2)


@pytest.mark.parametrize(
    "line", ["{", "[]", "{}", '{"kind":"dance"}', '{"kind":"open"}', '{"kind":"open","request":[]}']
)
def test_a_line_that_is_no_record_names_its_place(tmp_path: Path, line: str):
    path = tmp_path / "trace.jsonl"
    path.write_text('{"kind":"open","request":1}\n' + line + "\n")
    with pytest.raises(TraceFileError, match=r"trace\.jsonl:2"):
        list(read_trace(path))
