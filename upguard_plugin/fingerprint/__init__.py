"""The fingerprint of a tensor: definition, kernels, sketch. Loads nothing until a name is used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

_PUBLIC = {
    "FINGERPRINT_VERSION": "upguard_plugin.records",
    "Fingerprint": "upguard_plugin.records",
    "FingerprintQueue": "upguard_plugin.fingerprint.queue",
    "Hashes": "upguard_plugin.fingerprint.queue",
    "estimate_distance": "upguard_plugin.fingerprint.sketch",
    "fingerprint": "upguard_plugin.fingerprint.tensors",
    "fingerprint_array": "upguard_plugin.fingerprint.reference",
    "fingerprint_many": "upguard_plugin.fingerprint.tensors",
    "placement_of": "upguard_plugin.fingerprint.dtensors",
}

__all__ = [
    "FINGERPRINT_VERSION",
    "Fingerprint",
    "FingerprintQueue",
    "Hashes",
    "estimate_distance",
    "fingerprint",
    "fingerprint_array",
    "fingerprint_many",
    "placement_of",
]

if TYPE_CHECKING:
    from upguard_plugin.fingerprint.dtensors import placement_of
    from upguard_plugin.fingerprint.queue import FingerprintQueue, Hashes
    from upguard_plugin.fingerprint.reference import fingerprint_array
    from upguard_plugin.fingerprint.sketch import estimate_distance
    from upguard_plugin.fingerprint.tensors import fingerprint, fingerprint_many
    from upguard_plugin.records import FINGERPRINT_VERSION, Fingerprint


def __getattr__(name: str) -> object:
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
