"""One of the demo's two ranks: all jobs in one process, because importing Megatron takes longer.

    python -m upguard_plugin.launch.demo.worker RANK FOLDER

FOLDER holds `jobs.json`; the ranks meet through a file in it, and each writes `outcomes-RANK.json`.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

from upguard_plugin.launch.cpu_emulation import emulate_cuda
from upguard_plugin.launch.demo.jobs import NUM_RANKS, read_jobs, write_outcomes


def run_rank(rank: int, folder: Path) -> None:
    """Run the jobs of `folder` as that rank; returns when the other rank is done too."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(NUM_RANKS))
    warnings.simplefilter("ignore")  # Megatron says at length which of its GPU packages are absent
    with emulate_cuda():
        import torch  # slow to load

        torch.set_num_threads(1)
        torch.distributed.init_process_group(
            "nccl", init_method=f"file://{folder / 'store'}", rank=rank, world_size=NUM_RANKS
        )
        try:
            from upguard_plugin.launch.demo.capture import start_capture  # optional package
            from upguard_plugin.launch.demo.training import run_job

            outcomes = [run_job(job, start_capture) for job in read_jobs(folder / "jobs.json")]
            torch.distributed.barrier()
        finally:
            torch.distributed.destroy_process_group()
    write_outcomes(folder / f"outcomes-{rank}.json", outcomes)


if __name__ == "__main__":
    run_rank(int(sys.argv[1]), Path(sys.argv[2]))
