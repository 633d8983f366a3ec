"""From observed tensors to rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from upguard_plugin.capture.recorder import Recorder, Wire
from upguard_plugin.fingerprint.queue import FingerprintQueue
from upguard_plugin.fingerprint.reference import fingerprint_array
from upguard_plugin.records import EventKey
from upguard_plugin.trace.batch import NONE


class MemoryWriter:
    """Keeps batches; can be told to be full or to break."""

    def __init__(self):
        self.batches, self.notes, self.reason = [], [], None
        self.stopped = None
        self.error = None

    def write(self, batch):
        if self.error is not None:
            raise self.error
        self.batches.append(batch)

    def note(self, sentence):
        self.notes.append(sentence)

    def close(self, reason=""):
        self.reason = reason


@pytest.fixture
def recorder():
    recorder = Recorder(MemoryWriter(), FingerprintQueue())
    yield recorder
    if recorder._writer.reason is None:
        recorder.close()


def finished(recorder):
    recorder.close()
    return recorder._writer.batches


def test_a_row_holds_the_fingerprint_of_the_tensor_at_the_call(recorder):
    tensor = torch.arange(6.0)
    expected = fingerprint_array(tensor.numpy()).h
    recorder.record("fc1", tensor, role="output")
    tensor.zero_()
    recorder.finish_step()

    (batch,) = finished(recorder)
    assert batch.h[0] == expected
    assert batch.key_of(0) == EventKey("fc1", "start", "output", "0", "float32", (6,))


def test_keys_are_interned_and_seq_runs_on_over_steps(recorder):
    for _ in range(2):
        for _ in range(3):
            recorder.record("fc1", torch.ones(2), role="output")
        recorder.finish_step()

    first, second = finished(recorder)
    assert set(first.key) == set(second.key) == {0}
    assert list(first.seq) + list(second.seq) == list(range(6))
    assert (first.step, second.step) == (0, 1)


def test_an_event_can_take_the_fingerprint_of_another(recorder):
    one = recorder.record("fc1", torch.ones(2), role="grad_input")
    recorder.record("x", torch.zeros(2), role="output")
    recorder.record("ln", torch.ones(2), role="grad_output", same_as=one)
    recorder.record("y", torch.full((2,), 3.0), role="output")
    recorder.finish_step()

    (batch,) = finished(recorder)
    assert batch.h[2] == batch.h[0]
    assert batch.h[3] == fingerprint_array(np.full(2, 3.0, np.float32)).h


@pytest.mark.parametrize(
    "value, dtype, array",
    [
        (True, "bool", np.array(True)),
        (7, "int64", np.array(7)),
        (-0.0, "float64", np.array(-0.0)),
        (np.float32(0.5), "float64", np.array(0.5)),
    ],
)
def test_a_number_is_recorded_as_the_tensor_that_holds_it(recorder, value, dtype, array):
    recorder.record_number("lr", value)
    recorder.finish_step()

    (batch,) = finished(recorder)
    assert batch.key_of(0).dtype == dtype
    assert batch.fingerprint(0) == fingerprint_array(array)
    assert batch.value[0] == float(value)


def test_a_number_that_no_tensor_holds_is_recorded_as_its_text(recorder):
    recorder.record_number("seed", 1 << 70)
    recorder.finish_step()
    (batch,) = finished(recorder)
    assert batch.key_of(0).dtype == "int"


def test_roles_that_are_not_selected_leave_no_row():
    recorder = Recorder(MemoryWriter(), FingerprintQueue(), roles=["output"])
    assert recorder.record("fc1", torch.ones(2), role="input") == NONE
    recorder.record_many([("w", torch.ones(2), None)], role="param", slot="value")
    recorder.record_bytes("rng", b"1", role="rng")
    recorder.record_number("lr", 1.0)
    recorder.record("fc1", torch.ones(2), role="output")
    recorder.finish_step()
    (batch,) = finished(recorder)
    assert len(batch) == 1


def test_a_tensor_without_bytes_is_noted_and_the_rest_of_its_batch_is_recorded(recorder):
    tensors = [torch.ones(2), torch.ones(2, device="meta"), torch.zeros(2)]
    entries = [(f"w{i}", tensor, None) for i, tensor in enumerate(tensors)]
    recorder.record_many(entries, role="param", slot="value")
    recorder.finish_step()

    (batch,) = finished(recorder)
    assert [batch.key_of(i).boundary for i in range(len(batch))] == ["w0", "w2"]
    assert batch.h[0] == fingerprint_array(np.ones(2, np.float32)).h
    (note,) = recorder._writer.notes
    assert note.startswith("a tensor of w1 was not recorded: ")


def test_a_note_is_written_once(recorder):
    recorder.note("this and that")
    recorder.note("this and that")
    assert recorder._writer.notes == ["this and that"]


def test_wires_stand_in_their_rows_only(recorder):
    recorder.record("a", torch.ones(1), role="input", wire=Wire(group_seq=4))
    recorder.record("b", torch.ones(1), role="input")
    recorder.finish_step()
    (batch,) = finished(recorder)
    assert list(batch.group_seq) == [4, NONE]
    assert batch.peer is None


def test_a_writer_that_breaks_ends_the_recording_with_the_reason(recorder):
    recorder._writer.error = OSError("no space left on device")
    recorder.record("a", torch.ones(1), role="input")
    recorder.finish_step()
    recorder.close()
    assert not recorder.active
    assert recorder._writer.reason == "the trace could not be written: no space left on device"


def test_a_writer_that_stops_ends_the_recording_with_its_reason(recorder):
    recorder._writer.stopped = "max_bytes reached"
    recorder.record("a", torch.ones(1), role="input")
    recorder.finish_step()
    recorder.close()
    assert recorder._writer.reason == "max_bytes reached"


def test_after_a_failure_no_further_step_is_written(recorder):
    recorder.record("a", torch.ones(1), role="input")
    recorder.finish_step()
    recorder.fail("broken")
    recorder.record("a", torch.ones(1), role="input")
    recorder.finish_step()
    recorder.select(True)
    assert not recorder.active
    assert len(finished(recorder)) == 1
    assert recorder._writer.reason == "broken"
