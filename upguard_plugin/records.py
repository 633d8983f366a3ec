"""The frozen types that every part speaks: words, fingerprints, placements, event keys, layouts.

Capture turns tensors into these, the trace keeps them, compare reads them. Nothing here knows
torch, numpy or a file. One thing newcomers get wrong: an event is split in two. Its `EventKey`
(what and where: boundary, slot, dtype, ...) repeats every step and is interned; what changes
(fingerprint, micro-batch, call, ...) travels in columns, see `trace/batch.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

SCHEMA_VERSION = 1  # of the trace on disk; docs/trace-format.md describes it byte by byte
FINGERPRINT_VERSION = 1  # of the hash; fingerprints of two versions are never compared

# How a rank's note about a probe or a setting that saw no tensor begins.
NEVER_FIRED = "never fired: "

FINGERPRINT_PRIME = (1 << 61) - 1

PHASES = (
    "start",  # state found before the step's data
    "data",
    "forward",
    "loss",
    "backward",
    "recompute",
    "accumulate",  # a gradient added to its accumulator
    "grad_sync",  # gradient collectives and finalisation
    "clip",  # unscale, norm, clip
    "optimizer",
    "param_sync",  # parameter all-gather after the update
    "eval",
    "checkpoint",
)
ROLES = (
    "input",
    "output",
    "grad_input",
    "grad_output",
    "param",
    "grad",
    "main_grad",
    "master",
    "optimizer_state",
    "buffer",
    "rng",
    "data",
    "sample",
    "scalar",
)
MOMENTS = ("before", "after", "launch", "completion")
LEVELS = ("stage", "module", "op")
# What a checkpoint holds is recorded at this boundary, each value at its path in it. One of these
# slots begins a file, a folder that all ranks write into, a `load_state_dict`, and each part of a
# run's state.
CHECKPOINT = "checkpoint"
OF_FILE, OF_FOLDER, OF_RESTORE = "(file)", "(folder)", "(load_state_dict)"
OF_STATE = ("(weights)", "(optimizers)", "(generators)")
KINDS = (
    "data",
    "rng",
    "init",
    "forward",
    "backward",
    "collective",
    "optimizer",
    "structure",
    "nondeterminism",
)


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What a trace keeps of a tensor.

    Equal tensors always have equal fingerprints. Unequal tensors share one by accident only
    (probability about 2**-60), so "differs" is proof and "equal" is strong evidence.
    """

    h: int  # sum over 32-bit words, keyed by each word's place in the logical tensor, mod 2**61 - 1
    s: int  # sum of the elements' 64-bit patterns, mod 2**64, for dtypes of 8 bytes or more; else 0
    dtype: str  # "bfloat16": the bits alone do not tell the type
    shape: tuple[int, ...]  # of the logical tensor, before any rank took its part

    def __add__(self, other: Fingerprint) -> Fingerprint:
        """Merge two disjoint shards of one logical tensor. The order does not matter.

        Raises ValueError if dtypes or logical shapes differ.
        """
        if (self.dtype, self.shape) != (other.dtype, other.shape):
            raise ValueError(
                f"shards of different tensors do not add: {self.dtype} {list(self.shape)} and "
                f"{other.dtype} {list(other.shape)}"
            )
        return Fingerprint(
            (self.h + other.h) % FINGERPRINT_PRIME,
            (self.s + other.s) % (1 << 64),
            self.dtype,
            self.shape,
        )

    @property
    def hex(self) -> str:
        """`h` as 16 hexadecimal digits."""
        return f"{self.h:016x}"


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a rank's tensor and where it lies in the logical tensor, in elements.

    Element k = (k0, k1, ...) of the piece is number `local_start + sum(k * local_strides)` of the
    rank's tensor and number `logical_start + sum(k * logical_strides)` of the logical one, both
    counted in row-major order. This form is closed under slicing, fused dims and flattening.
    """

    sizes: tuple[int, ...]
    local_start: int
    local_strides: tuple[int, ...]
    logical_start: int
    logical_strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Placement:
    """Which part of a logical tensor a rank's tensor is."""

    spec: str  # the text it came from, in the grammar of docs/placements.md
    logical_shape: tuple[int, ...]  # without padding
    pieces: tuple[Piece, ...]  # together they cover the rank's tensor, less its padding
    sharded: tuple[str, ...] = ()  # mesh axes over which the tensor is split
    partial: tuple[str, ...] = ()  # mesh axes over which the values are partial sums
    mesh: str = "dense"  # or "expert": which axes the names above belong to


@dataclass(frozen=True, slots=True)
class Group:
    """A process group. Its identity is its rank list; the name stands beside it."""

    name: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Source:
    """A line of the user's code."""

    file: str
    line: int


@dataclass(frozen=True, slots=True)
class Stretch:
    """Elements of a flat buffer that are elements of a named tensor, in order."""

    start: int  # in the buffer
    stop: int
    name: str  # "head.weight.grad"
    offset: int = 0  # element of that tensor which lies at `start`


@dataclass(frozen=True, slots=True)
class EventKey:
    """What an event is, without what changes from step to step. Interned by the recorder."""

    boundary: str  # "blocks.1.mlp.fc1": normalised FQN, or the name of a collective, state, scalar
    phase: str  # one of PHASES
    role: str  # one of ROLES
    slot: str  # "args.0", "kwargs.mask", "out.h", "exp_avg"
    dtype: str
    shape: tuple[int, ...]  # of this rank's tensor
    operator: str | None = None  # "aten.addmm", "c10d.allreduce_", a module's class name
    moment: str | None = None  # one of MOMENTS
    placement: Placement | None = None  # None: not known, never "replica"
    group: Group | None = None  # of a collective
    op: str | None = None  # of a collective: "all_reduce sum", "all_gather", "send"
    source: Source | None = None
    holds: tuple[Stretch, ...] = ()  # whose elements lie in a flat buffer, as far as is known


@dataclass(frozen=True, slots=True)
class Axis:
    """One parallel axis, seen from one rank."""

    name: str  # tp, cp, ep, dp, pp, vpp, etp, edp
    size: int
    index: int  # this rank's coordinate
    ranks: tuple[int, ...]  # the global ranks of this rank's group, in order of coordinate
    mesh: str = "dense"  # or "expert"


@dataclass(frozen=True, slots=True)
class Layout:
    """How one rank sits in the parallel mesh."""

    axes: tuple[Axis, ...] = ()
    zero_stage: int | None = None

    def axis(self, name: str, mesh: str = "dense") -> Axis | None:
        """The axis of that name, or None where the layout has none."""
        return next((a for a in self.axes if (a.name, a.mesh) == (name, mesh)), None)
