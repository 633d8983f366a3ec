"""Two or more real processes of one gloo job, started once and used for many small calls.

ranks = Ranks(2)
first, second = ranks.run(function, argument)    # function(argument), on each rank
ranks.close()
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

TIMEOUT_S = 180  # of one call, unless said otherwise; a rank that takes longer hangs


class Ranks:
    """Processes that wait for functions to call. A function must be importable by its name."""

    def __init__(self, num_ranks: int, timeout_s: int = TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._folder = tempfile.TemporaryDirectory()
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(num_ranks):
            ours, theirs = context.Pipe()
            store = str(Path(self._folder.name) / "store")
            process = context.Process(
                target=_serve, args=(theirs, rank, num_ranks, store, timeout_s), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        self.usable = True
        self.run(_is_ready)

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """What the function returned on each rank. Raises AssertionError where one failed."""
        assert self.usable, "an earlier call failed: answers could be those of that call"
        self.usable = False
        for pipe in self._pipes:
            pipe.send((function, args))
        results: dict[int, Any] = {}
        while len(results) < len(self._pipes):
            waiting = [p for rank, p in enumerate(self._pipes) if rank not in results]
            ready = wait(waiting, self._timeout_s)
            assert ready, f"ranks did not answer within {self._timeout_s} s; {list(results)} did"
            for pipe in ready:
                rank = self._pipes.index(pipe)
                done, results[rank] = pipe.recv()
                # The others may wait for this one for ever.
                assert done, f"rank {rank} failed:\n{results[rank]}"
        self.usable = True
        return [results[rank] for rank in range(len(self._pipes))]

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.kill()
        self._folder.cleanup()


class Pool:
    """Ranks for many tests: started when they are asked for, and anew after a call that failed."""

    def __init__(self, num_ranks: int, timeout_s: int = TIMEOUT_S) -> None:
        self._arguments = (num_ranks, timeout_s)
        self._ranks: Ranks | None = None

    def get(self) -> Ranks:
        if self._ranks is not None and not self._ranks.usable:
            self.close()
        if self._ranks is None:
            self._ranks = Ranks(*self._arguments)
        return self._ranks

    def close(self) -> None:
        if self._ranks is not None:
            self._ranks.close()
        self._ranks = None


def _is_ready() -> bool:
    return True


def _serve(pipe: Connection, rank: int, num_ranks: int, store: str, timeout_s: int) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    # After the variable is set: torch reads it when it is imported.
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        rank=rank,
        world_size=num_ranks,
        store=dist.FileStore(store, num_ranks),
        timeout=timedelta(seconds=timeout_s),
    )
    while True:
        try:
            function, args = pipe.recv()
        except (EOFError, ConnectionResetError):
            break
        torch.manual_seed(0)  # whatever was called before
        # A rank that hangs says where before its process is ended.
        faulthandler.dump_traceback_later(timeout_s - 10)
        try:
            answer = (True, function(*args))
        except Exception:
            answer = (False, traceback.format_exc())
        faulthandler.cancel_dump_traceback_later()
        pipe.send(answer)
    dist.destroy_process_group()
