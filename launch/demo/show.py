"""`upguard demo` itself: record a baseline and targets, compare them, and tell what it means.

In:  names of faults, a folder for the runs.
Out: one `Finding` per fault, and a text for people.
"""

from __future__ import annotations

import importlib.util
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from upguard_plugin.compare.runs import compare_runs
from upguard_plugin.errors import RunDirectoryError, UsageError
from upguard_plugin.launch.demo.faults import FAULTS, Expected
from upguard_plugin.launch.demo.jobs import NUM_STEPS, Job, Outcome
from upguard_plugin.launch.demo.ranks import train
from upguard_plugin.report.text import verdict_text
from upguard_plugin.trace.reader import open_trace
from upguard_plugin.verdict import Verdict


@dataclass(frozen=True, slots=True)
class Finding:
    """What the comparison says of one fault."""

    fault: str
    verdict: Verdict
    baseline_loss: float  # of the last step, on rank 0
    target_loss: float

    @property
    def expected(self) -> Expected | None:
        """The right answer."""
        return FAULTS[self.fault].expected

    @property
    def is_right(self) -> bool:
        """Whether the verdict is the expected one."""
        found = self.verdict.first_divergence
        if found is None or self.expected is None:
            return self.expected is None and self.verdict.verdict == "identical"
        return Expected(found.step, found.boundary, found.kind) == self.expected


def run_demo(
    faults: Sequence[str], output: Path | None, say: Callable[[str], None] = print
) -> list[Finding]:
    """Train once per fault, and once per layout without a fault, and compare.

    faults: names from FAULTS. output: a folder for the runs, new or empty; None: a new temporary
    one. say: receives one line for people before the minute that the training takes.
    Raises UsageError without Megatron-Core, RunDirectoryError for a folder that holds files.
    """
    _require_megatron()
    folder = _folder(output)
    layouts = list(dict.fromkeys(FAULTS[name].layout for name in faults))
    jobs = [Job("none", layout, str(_baseline(folder, layout))) for layout in layouts]
    jobs += [Job(name, FAULTS[name].layout, str(_target(folder, name))) for name in faults]
    say(f"{len(jobs)} trainings of {NUM_STEPS} steps on 2 processes, runs in {folder}")
    with tempfile.TemporaryDirectory(prefix="upguard-demo-ranks-") as meeting_point:
        outcomes = train(jobs, Path(meeting_point))
    by_job = {(job.fault, job.output): ranks[0] for job, ranks in zip(jobs, outcomes, strict=True)}
    return [_finding(folder, name, by_job) for name in faults]


def findings_json(findings: Sequence[Finding]) -> str:
    """A list of {"fault", "expected", "found"}; null where nothing is or should be found."""
    entries = []
    for finding in findings:
        found = finding.verdict.first_divergence
        entries.append(
            {
                "fault": finding.fault,
                "expected": None if finding.expected is None else asdict(finding.expected),
                "found": None if found is None else found.model_dump(mode="json", by_alias=True),
            }
        )
    return json.dumps(entries, indent=2)


def finding_text(finding: Finding) -> str:
    """The verdict on one fault, and what it means."""
    return "\n\n".join(
        [
            f"planted   {finding.fault}: {FAULTS[finding.fault].story}",
            verdict_text(finding.verdict),
            _meaning(finding),
        ]
    )


def _meaning(finding: Finding) -> str:
    losses = (
        f"The losses of the last step are {finding.baseline_loss:.6f} and {finding.target_loss:.6f}"
    )
    if finding.expected is None:
        return f"{losses}: two runs of one program, equal bit by bit on both ranks."
    if not finding.is_right:
        return f"{losses}. This is not the expected answer: {finding.expected}."
    difference = abs(finding.target_loss - finding.baseline_loss) / finding.baseline_loss
    hidden = "no curve would show it" if difference < 1e-3 else "it would show late, and nowhere"
    return (
        f"{losses}: {hidden}. Everything before the divergence is equal bit by bit, so this is "
        f"where to look; what differs later follows from it."
    )


def _finding(folder: Path, fault: str, outcomes: dict[tuple[str, str | None], Outcome]) -> Finding:
    baseline, target = _baseline(folder, FAULTS[fault].layout), _target(folder, fault)
    return Finding(
        fault,
        compare_runs(open_trace(baseline), open_trace(target)),
        outcomes["none", str(baseline)].losses[-1],
        outcomes[fault, str(target)].losses[-1],
    )


def _baseline(folder: Path, layout: str) -> Path:
    return folder / f"baseline-{layout}"


def _target(folder: Path, fault: str) -> Path:
    return folder / f"target-{fault}"


def _folder(output: Path | None) -> Path:
    if output is None:
        return Path(tempfile.mkdtemp(prefix="upguard-demo-"))
    output = output.absolute()
    try:
        output.mkdir(parents=True, exist_ok=True)
        taken = any(output.iterdir())
    except OSError as error:
        raise RunDirectoryError(
            f"cannot write the demo's runs to {output}: {error.strerror}"
        ) from error
    if taken:
        raise RunDirectoryError(
            f"cannot write the demo's runs to {output}: it holds files already",
            remedy="give a folder that is new or empty",
        )
    return output


def _require_megatron() -> None:
    try:
        missing = importlib.util.find_spec("megatron.core") is None
    except ModuleNotFoundError:
        missing = True
    if missing:
        raise UsageError(
            "upguard demo trains a Megatron-Core model, and megatron-core is not installed",
            remedy="pip install 'upguard-plugin[megatron]'",
        )
