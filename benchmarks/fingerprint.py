"""Speed of the CPU fingerprint beside torch.sum, clone, torch.hash_tensor and xxh3.

    python benchmarks/fingerprint.py [--threads 1 2] [--largest-mib 1024] [--seconds 0.4]

Every figure of a row comes from one interleaved run: the candidates take turns on the same tensor
and the fastest turn of each counts, so that other work on the machine slows all of them alike.
xxh3 sees order and bits as we do, but its hashes of shards do not add up.
"""

from __future__ import annotations

import argparse
import time
from math import prod

import torch

from upguard_plugin.fingerprint import FingerprintQueue
from upguard_plugin.fingerprint.parts import dtype_name

try:
    import xxhash
except ImportError:
    xxhash = None

DTYPES = (torch.float32, torch.bfloat16, torch.int64)


def make(dtype, shape):
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randint(-(2**15), 2**15, shape, generator=generator)
    return numbers.to(dtype) if dtype == torch.int64 else (numbers / 1000).to(dtype)


def candidates(tensor):
    """Name and action for everything that can take this tensor."""
    queue = FingerprintQueue()
    taken = {"fingerprint": lambda: queue.put(tensor), "sum": tensor.sum, "clone": tensor.clone}
    try:
        torch.hash_tensor(tensor)
        taken["hash_tensor"] = lambda: torch.hash_tensor(tensor)
    except (RuntimeError, AttributeError):
        pass
    if xxhash is not None and tensor.is_contiguous():
        raw = tensor.view(-1).view(torch.uint8).numpy()
        taken["xxh3"] = lambda: xxhash.xxh3_64_intdigest(raw)

    wide = FingerprintQueue(magnitudes=True, sketch_size=64)
    taken["measured"] = lambda: (wide.put(tensor, sketch=True), wide.take())
    return taken, queue


def fastest_turns(actions, queue, seconds):
    """Seconds per call of the fastest turn of each action, the actions taking turns."""
    best = dict.fromkeys(actions, float("inf"))
    repeats = {}
    for name, action in actions.items():  # the first call warms up and sizes a turn
        action()
        started = time.perf_counter()
        action()
        repeats[name] = max(1, int(1e-3 / (time.perf_counter() - started + 1e-9)))
    spent = dict.fromkeys(actions, 0.0)
    while any(used < seconds for used in spent.values()):
        for name, action in actions.items():
            if spent[name] >= seconds:  # slow candidates leave the turns to the fast ones
                continue
            started = time.perf_counter()
            for _ in range(repeats[name]):
                action()
            turn = time.perf_counter() - started
            spent[name] += turn
            best[name] = min(best[name], turn / repeats[name])
        queue.take()
    return best


def bandwidth_table(threads, seconds, largest_mib):
    print(f"\n{threads} thread(s), GB/s of the tensor's bytes")
    names = ("fingerprint", "sum", "clone", "hash_tensor", "xxh3", "measured")
    print(f"{'tensor':34}" + "".join(f"{name:>13}" for name in names) + f"{'of sum':>9}")
    for title, tensor in tensors(largest_mib):
        actions, queue = candidates(tensor)
        best = fastest_turns(actions, queue, seconds)
        num_bytes = prod(tensor.shape) * tensor.itemsize
        row = [num_bytes / best[name] / 1e9 if name in best else None for name in names]
        cells = "".join("            -" if v is None else f"{v:13.2f}" for v in row)
        print(f"{title:34}{cells}{best['sum'] / best['fingerprint']:8.2f}x", flush=True)


def tensors(largest_mib):
    for dtype in DTYPES:
        yield f"{dtype_name(dtype)} 16 Mi elements", make(dtype, (1 << 24,))
    square = make(torch.float32, (2048, 2048))
    yield "float32 16 MiB transposed", square.t()
    yield "float32 16 MiB, half the columns", make(torch.float32, (2048, 4096))[:, 2048:]
    yield "float32 16 MiB, 64 columns of 4096", make(torch.float32, (65536, 128))[:, :64]
    num_bytes = 1
    while num_bytes <= largest_mib << 20:
        yield f"uint8 {num_bytes} B", torch.randint(0, 256, (num_bytes,), dtype=torch.uint8)
        num_bytes *= 32


def call_table():
    """Time per call where the tensor is too small to matter."""
    print("\nsmall tensors, 1 thread, microseconds per tensor")
    tensors = [torch.randn(64) for _ in range(1000)]
    queue = FingerprintQueue()

    def one_by_one():
        for tensor in tensors:
            queue.put(tensor)

    def many():
        queue.put_many(tensors)

    def sums():
        for tensor in tensors:
            tensor.sum()

    best = fastest_turns({"put": one_by_one, "put_many": many, "torch.sum": sums}, queue, 1.0)
    for name, seconds in best.items():
        print(f"  {name:12}{seconds / len(tensors) * 1e6:8.2f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--largest-mib", type=int, default=1024)
    parser.add_argument("--seconds", type=float, default=0.4, help="per candidate and tensor")
    options = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}")
    for threads in options.threads:
        torch.set_num_threads(threads)
        bandwidth_table(threads, options.seconds, options.largest_mib)
    torch.set_num_threads(1)
    call_table()


if __name__ == "__main__":
    main()
