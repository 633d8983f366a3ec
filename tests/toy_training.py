"""A training in which every value is a hash of what it was computed from.

So one wrong value makes everything behind it wrong, as in a real training, and nothing else. Events
come in the order in which real hooks run. A fault is a function that may change a value where it is
made: it gets the place as `step/microbatch/phase/boundary/role` (micro-batch `-` outside) and the
rank, and returns the value.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tests.memory_run import Event, MemoryRun, batch, hash_of
from upguard_plugin.records import EventKey, Group

Fault = Callable[[str, int, int], int]


def no_fault(place: str, rank: int, value: int) -> int:
    return value


def flip(place: str, rank: int | None = None) -> Fault:
    """Flip a bit of the value made at this place (on one rank only)."""
    return lambda at, on, value: (
        value ^ 1 if at == place and on in (rank, on if rank is None else rank) else value
    )


def mix(*values: object) -> int:
    return hash_of(values)


@dataclass
class Toy:
    """One rank of a two-block GPT with dropout and AdamW."""

    rank: int = 0
    world: int = 1
    fault: Fault = no_fault
    num_blocks: int = 2
    num_microbatches: int = 2
    collectives: bool = False
    dropout: bool = True
    events: list[Event] = field(default_factory=list)
    step: int = 0
    group_seq: int = 0

    def __post_init__(self) -> None:
        blocks = [f"blocks.{i}" for i in range(self.num_blocks)]
        inside = ("ln1", "attn.qkv", "attn.proj", "drop", "ln2", "mlp.fc1", "mlp.fc2")
        self.leaves = ["embed", *(f"{b}.{leaf}" for b in blocks for leaf in inside), "ln_f", "head"]
        self.params = [f"{leaf}.weight" for leaf in self.leaves if not leaf.endswith("drop")]
        self.weights = {p: self._make("-/-/init", p, "param", mix("init", p)) for p in self.params}
        self.moments = dict.fromkeys(self.params, mix("zero"))
        self.masters = {p: mix("master", w) for p, w in self.weights.items()}
        self.rng = mix("seed", self.rank)
        self.lr = mix("lr")

    def _make(self, prefix: str, boundary: str, role: str, value: int) -> int:
        return self.fault(f"{prefix}/{boundary}/{role}", self.rank, value)

    def emit(self, phase, boundary, role, slot, value, mb=-1, operator=None, **more) -> None:
        group = more.pop("group", None)
        key = EventKey(boundary, phase, role, slot, "float32", (4, 8), operator, group=group,
                       op=more.pop("op", None), moment=more.pop("moment", None))  # fmt: skip
        self.events.append(Event(key, mb, 0, value, **more))

    def made(self, phase, boundary, role, slot, value, mb=-1, operator=None) -> int:
        micro = "-" if mb < 0 else mb
        value = self._make(f"{self.step}/{micro}/{phase}", boundary, role, value)
        self.emit(phase, boundary, role, slot, value, mb, operator)
        return value

    def start(self) -> None:
        for p in self.params:
            self.weights[p] = self.made("start", p, "param", "value", self.weights[p])
        for p in self.params:
            self.masters[p] = self.made("start", p, "master", "master", self.masters[p])
            self.moments[p] = self.made("start", p, "optimizer_state", "exp_avg", self.moments[p])
        self.lr = self.made("start", "optimizer.group0.lr", "scalar", "value", self.lr)
        self.rng = self.made("start", "rng.torch_cpu", "rng", "value", self.rng)

    def draw(self) -> int:
        self.rng = mix("draw", self.rng)
        return self.rng

    def leaf_forward(self, leaf: str, x: int, mb: int) -> int:
        if leaf.endswith("drop"):
            kind, y = "Dropout", mix("drop", x, self.draw() if self.dropout else 0)
        else:
            kind, y = "Linear", mix(leaf, x, self.weights[f"{leaf}.weight"])
        self.emit("forward", leaf, "input", "args.0", x, mb, kind)
        y = self.made("forward", leaf, "output", "out", y, mb, kind)
        self.saved[leaf] = x, y
        return y

    def forward(self, mb: int) -> int:
        self.saved: dict[str, tuple[int, int]] = {}
        x = self.made(
            "data", "input_ids", "data", "value", mix("tokens", self.rank, self.step, mb), mb
        )
        self.emit("data", "input_ids", "sample", "0", mix("sample", x), mb)
        x = self.leaf_forward("embed", x, mb)
        for b in (f"blocks.{i}" for i in range(self.num_blocks)):
            self.emit("forward", b, "input", "args.0", x, mb, "Block")
            block_input = x
            for leaf in (leaf for leaf in self.leaves if leaf.startswith(f"{b}.")):
                if leaf.endswith("ln2"):
                    x = mix("residual", x, block_input)  # an operation that is no boundary
                    x = self._make(f"{self.step}/{mb}/forward", f"{b}.residual", "output", x)
                x = self.leaf_forward(leaf, x, mb)
            self.emit("forward", b, "output", "out", x, mb, "Block")
            self.saved[b] = block_input, x
        x = self.leaf_forward("head", self.leaf_forward("ln_f", x, mb), mb)
        return self.made("loss", "loss", "output", "out", mix("loss", x), mb)

    def backward(self, loss: int, mb: int) -> None:
        g = self._make(f"{self.step}/{mb}/backward", "loss", "grad", mix("dloss", loss))
        order = self.leaves[::-1]
        for place, leaf in enumerate(order):
            # The hook of the output runs before those of the inputs that are the same tensor: the
            # gradient that the leaf behind made is seen here first.
            self.emit("backward", leaf, "grad_output", "out", g, mb)
            block = leaf.rpartition(".")[0].partition(".attn")[0].partition(".mlp")[0]
            if leaf.endswith("mlp.fc2"):
                self.emit("backward", block, "grad_output", "out", g, mb)
            if place and not leaf.endswith("mlp.fc2"):
                self.emit("backward", order[place - 1], "grad_input", "args.0", g, mb)
            elif place:  # the output of a block: the leaf behind it lies in another one
                behind = order[place - 1]
                if behind.endswith("ln1"):
                    self.emit("backward", behind.rpartition(".")[0], "grad_input", "args.0", g, mb)
                self.emit("backward", behind, "grad_input", "args.0", g, mb)
            if not leaf.endswith("drop"):
                p = f"{leaf}.weight"
                grad = mix("wgrad", leaf, g, self.saved[leaf], self.grads.get(p))
                self.grads[p] = self.made("accumulate", p, "grad", "grad", grad, mb)
            g = mix("dgrad", leaf, g, self.saved[leaf])
            g = self._make(f"{self.step}/{mb}/backward", leaf, "grad_input", g)

    def optimize(self) -> None:
        norm = self.made("clip", "grad_norm", "scalar", "value", mix("norm", *self.grads.values()))
        for p in self.params:
            state = mix("exp_avg", self.moments[p], self.grads[p], norm)
            self.moments[p] = self.made("optimizer", p, "optimizer_state", "exp_avg", state)
            master = mix("adamw", self.masters[p], self.moments[p], self.lr)
            self.masters[p] = self.made("optimizer", p, "master", "master", master)
            self.weights[p] = self.made(
                "optimizer", p, "param", "value", mix("cast", self.masters[p])
            )
        self.lr = self._make(f"{self.step}/-/schedule", "lr", "scalar", mix("lr", self.step))


def train(
    num_steps: int = 3, world: int = 1, fault: Fault = no_fault, name: str = "run",
    collectives: bool = False, manifest: dict | None = None, **settings,
) -> MemoryRun:  # fmt: skip
    """Record a data-parallel training of `world` ranks."""
    ranks = [Toy(r, world, fault, collectives=collectives, **settings) for r in range(world)]
    batches: dict[int, list] = {rank: [] for rank in range(world)}
    for step in range(num_steps):
        for toy in ranks:
            toy.step, toy.events, toy.grads = step, [], {}
            toy.start()
            for mb in range(toy.num_microbatches):
                toy.backward(toy.forward(mb), mb)
        if world > 1:
            _all_reduce(ranks)
        for toy in ranks:
            toy.optimize()
            batches[toy.rank].append(batch(step, toy.events))
    return MemoryRun(batches, name, **(manifest or {}))


def _all_reduce(ranks: list[Toy]) -> None:
    group = Group("dp", tuple(toy.rank for toy in ranks))
    for p in ranks[0].params[::-1]:
        call = {"operator": "c10d.allreduce_", "group": group, "op": "all_reduce sum"}
        for toy in ranks:
            toy.grads[p] = toy._make(f"{toy.step}/-/grad_sync", p, "input", toy.grads[p])
        total = mix("sum", *(toy.grads[p] for toy in ranks))
        for toy in ranks:
            seen = {**call, "group_seq": toy.group_seq}
            if toy.collectives:
                toy.emit(
                    "grad_sync",
                    "dp.all_reduce",
                    "input",
                    "0",
                    toy.grads[p],
                    **seen,
                    moment="launch",
                )
            reduced = toy._make(f"{toy.step}/-/grad_sync", p, "output", total)
            if toy.collectives:
                toy.emit("grad_sync", "dp.all_reduce", "output", "0", reduced, **seen,
                         moment="completion")  # fmt: skip
            toy.grads[p] = reduced
            toy.group_seq += 1
    for toy in ranks:
        for p in toy.params:
            toy.emit("grad_sync", p, "grad", "grad", toy.grads[p])
