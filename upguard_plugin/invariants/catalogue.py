"""All invariants, in the order in which reports list them."""

from __future__ import annotations

from upguard_plugin.invariants.buffers import InputsUnchanged
from upguard_plugin.invariants.conservation import AloneUnchanged, DataConserved, SumsConserved
from upguard_plugin.invariants.findings import Invariant
from upguard_plugin.invariants.matching import CollectivesMatch, OutputsAgree, ReceivedIsSent
from upguard_plugin.invariants.replicas import ReplicasAgree


def every_invariant() -> list[Invariant]:
    """New ones, as each remembers what it saw of the steps before."""
    return [
        ReplicasAgree(),
        CollectivesMatch(),
        OutputsAgree(),
        ReceivedIsSent(),
        DataConserved(),
        SumsConserved(),
        AloneUnchanged(),
        InputsUnchanged(),
    ]
