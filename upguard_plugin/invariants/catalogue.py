"""All invariants, in the order in which reports list them."""

from __future__ import annotations

from upguard_plugin.invariants.buffers import InputsUnchanged, OutputsAwaited
from upguard_plugin.invariants.checkpoints import SavedIsLoaded
from upguard_plugin.invariants.conservation import AloneUnchanged, DataConserved, SumsConserved
from upguard_plugin.invariants.copies import MastersRound, TiedAgree
from upguard_plugin.invariants.findings import Invariant
from upguard_plugin.invariants.gathered import GatheredAsKept
from upguard_plugin.invariants.marks import MarksFit
from upguard_plugin.invariants.matching import CollectivesMatch, OutputsAgree, ReceivedIsSent
from upguard_plugin.invariants.parts import PartsDiffer
from upguard_plugin.invariants.peers import BatchesAgree, BatchesDiffer, StreamsDiffer
from upguard_plugin.invariants.repeats import ConsumedAsProduced, RecomputeRepeats
from upguard_plugin.invariants.replicas import ReplicasAgree
from upguard_plugin.invariants.updates import (
    EvalLeavesWeights,
    FrozenStay,
    WeightsInUse,
    WeightsMove,
)


def every_invariant() -> list[Invariant]:
    """New ones, as each remembers what it saw of the steps before."""
    return [
        ReplicasAgree(),
        MarksFit(),
        PartsDiffer(),
        CollectivesMatch(),
        OutputsAgree(),
        ReceivedIsSent(),
        DataConserved(),
        SumsConserved(),
        AloneUnchanged(),
        InputsUnchanged(),
        OutputsAwaited(),
        RecomputeRepeats(),
        ConsumedAsProduced(),
        WeightsInUse(),
        GatheredAsKept(),
        WeightsMove(),
        EvalLeavesWeights(),
        FrozenStay(),
        SavedIsLoaded(),
        MastersRound(),
        TiedAgree(),
        BatchesDiffer(),
        BatchesAgree(),
        StreamsDiffer(),
    ]
