"""Short event streams of one step, edited and compared, and the answer in one line."""

from __future__ import annotations

from tests.memory_run import MemoryRun, batch, events, run
from upguard_plugin.compare.runs import compare_runs


def answer(verdict) -> str:
    found = verdict.first_divergence
    if found is None:
        return verdict.verdict
    microbatch = "-" if found.microbatch is None else found.microbatch
    return f"{found.step} {microbatch} {found.phase} {found.boundary} {found.role} {found.kind}"


def compared(baseline: str, target: str, **options):
    return compare_runs(run(baseline), run(target, name="target"), **options)


def two_ranks(*texts: str, name: str = "run", **manifest) -> MemoryRun:
    ranks = {rank: [batch(0, events(text))] for rank, text in enumerate(texts)}
    return MemoryRun(ranks, name, **manifest)


MLP = """
start     -  param   fc1.weight/value     w1
start     -  buffer  rotary.inv_freq/value f
start     -  rng     rng.torch_cpu/value  r0       uint8  [16]
data      0  data    input_ids/value      ids      int64
forward   0  input   fc1/args.0           x        Linear
forward   0  output  fc1/out              a        Linear
forward   0  input   core/args.0          a        Core
forward   0  input   core/kwargs.mask     m        Core
forward   0  output  core/out             b        Core
forward   0  input   drop/args.0          b        Dropout
forward   0  output  drop/out             c        Dropout
loss      0  output  loss/out             l
backward  0  grad_output  drop/out        gc
backward  0  grad_input   drop/args.0     gb
backward  0  grad_output  core/out        gb
backward  0  grad_input   core/args.0     ga
backward  0  grad_input   core/kwargs.mask gm
backward  0  grad_output  fc1/out         ga
accumulate 0 grad    fc1.weight/grad      gw
optimizer -  optimizer_state fc1.weight/exp_avg  m1
optimizer -  param   fc1.weight/value     w2
"""


NEXT = """
start     -  param   fc1.weight/value     w2
start     -  rng     rng.torch_cpu/value  r1       uint8  [16]
"""


def behind(text: str, first: str) -> str:
    """The text with every value changed from the line that starts with `first` on."""
    lines = text.strip().splitlines()
    place = next(i for i, line in enumerate(lines) if line.split()[:4] == first.split())
    changed = [line.split() for line in lines[place:]]
    return "\n".join(
        lines[:place] + [" ".join([*words[:4], f"{words[4]}'", *words[5:]]) for words in changed]
    )
