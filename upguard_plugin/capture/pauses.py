"""What is no part of a training and differs from run to run: clocks, and writing checkpoints."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from upguard_plugin.capture.recorder import Recorder


@contextmanager
def paused(recorder: Recorder) -> Iterator[None]:
    """Inside, nothing is recorded; collectives are numbered all the same."""
    was_active, recorder.active = recorder.active, False
    try:
        yield
    finally:
        recorder.active = was_active and not recorder.failure
        if recorder.storages is not None:  # writes inside were out of sight
            recorder.storages.forget_hashes()


@contextmanager
def aside(recorder: Recorder) -> Iterator[None]:
    """Inside, this thread works beside the training: its collectives are not even numbered.

    On each rank they fall between others of the training's.
    """
    recorder.threads_aside.add(threading.get_ident())
    try:
        yield
    finally:
        recorder.threads_aside.discard(threading.get_ident())


@contextmanager
def inside_kernel(recorder: Recorder) -> Iterator[None]:
    """Inside, the operators of this thread are the own work of what it called, and no events."""
    thread, inside = threading.get_ident(), recorder.threads_inside
    if thread in inside:
        yield
        return
    inside.add(thread)
    try:
        yield
    finally:
        inside.discard(thread)
