"""On a CUDA device: equality with the reference, then GB/s. Under 8 minutes, writes nothing.

    python benchmarks/gpu_fingerprint.py

Needs torch with CUDA and triton. Exits 1 if a fingerprint on the device differs from the CPU's.
"""

from __future__ import annotations

import sys
import time

import torch

from upguard_plugin.fingerprint import FingerprintQueue, fingerprint, fingerprint_many

DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e8m0fnu,
    torch.complex64, torch.complex128, torch.bool,
    torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16,
)  # fmt: skip
SIZES_MIB = (1, 16, 64, 256, 1024, 4096)


def random_bits(num_bytes, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (num_bytes,), generator=generator, dtype=torch.uint8)


def cases():
    for seed, dtype in enumerate(DTYPES):
        raw = random_bits(3 * 5001 * dtype.itemsize, seed)
        raw = raw & 1 if dtype == torch.bool else raw
        tensor = raw.view(dtype).reshape(3, 5001)
        yield f"{dtype} contiguous", tensor, lambda t: t
        yield f"{dtype} transposed", tensor, lambda t: t.t()
        yield f"{dtype} columns", tensor, lambda t: t[:, 7:4001]
        yield f"{dtype} unaligned", tensor, lambda t: t.reshape(-1)[1:]
        yield f"{dtype} one element", tensor, lambda t: t[1, 3]
    yield "bfloat16 64 MiB", random_bits(64 << 20, 99).view(torch.bfloat16), lambda t: t


def check_equality(device):
    """The number of fingerprints that differ between the device and the CPU."""
    wrong = 0
    for name, tensor, view in cases():
        if fingerprint(view(tensor.to(device))) != fingerprint(view(tensor)):
            print(f"DIFFERENT  {name}")
            wrong += 1
    tensors = [torch.randn(n) for n in range(1, 500)]
    if fingerprint_many([t.to(device) for t in tensors]) != fingerprint_many(tensors):
        print("DIFFERENT  500 small tensors")
        wrong += 1
    wrong += check_measures(device)
    wrong += check_streams(device)
    print(f"equality: {wrong} of {5 * len(DTYPES) + 4} cases differ")
    return wrong


def check_measures(device):
    """Measured tensors in whole blocks, strided, shifted and with bytes left over."""
    tensor = torch.randn(301, 1001)
    tensor[3, 4], tensor[5, 6] = torch.nan, torch.inf
    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2)
    views = (lambda t: t, lambda t: t.t(), lambda t: t[:, 7:900], lambda t: t.reshape(-1)[1:])
    found = []
    for place in (torch.device("cpu"), device):
        queue = FingerprintQueue(magnitudes=True, sketch_size=64)
        for dtype in dtypes:
            for view in views:
                queue.put(view(tensor.to(dtype).to(place)), sketch=True)
        found.append(queue.take())
    cpu, gpu = found
    same = all(
        (getattr(cpu, k) == getattr(gpu, k)).all() for k in ("h", "s", "nonfinite", "max_abs")
    )
    close = abs(cpu.sketch - gpu.sketch).max() <= 1e-9 * abs(cpu.sketch).max()
    if not (same and close):
        print("DIFFERENT  measures", cpu, gpu)
    return int(not (same and close))


def check_streams(device):
    """Tensors put on several streams, twice, without any wait between."""
    queue, streams = FingerprintQueue(), [torch.cuda.Stream(device) for _ in range(3)]
    tensors = [torch.randn(n, device=device) for n in range(1000, 1030)]
    torch.cuda.synchronize(device)
    expected = [f.h for f in fingerprint_many([t.cpu() for t in tensors])]
    for _ in range(2):
        for k, tensor in enumerate(tensors):
            with torch.cuda.stream(streams[k % 3]):
                queue.put(tensor)
        if queue.take().h.tolist() != expected:
            print("DIFFERENT  streams")
            return 1
    return 0


def device_seconds(action, repeats):
    """Seconds per call on the device, the fastest of five turns."""
    action()
    best = float("inf")
    for _ in range(5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(repeats):
            action()
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end) / 1e3 / repeats)
    return best


def actions_on(tensor):
    """What is timed on a tensor, by name; and the queues that hold slots until they are taken."""
    target = torch.empty_like(tensor)
    plain = FingerprintQueue()
    magnitudes = FingerprintQueue(magnitudes=True)
    sketch = FingerprintQueue(magnitudes=True, sketch_size=64)
    actions = {
        "fingerprint": lambda: plain.put(tensor),
        "+magnitudes": lambda: magnitudes.put(tensor),
        "+sketch": lambda: sketch.put(tensor, sketch=True),
        "sum": tensor.sum,
        "hash_tensor": lambda: torch.hash_tensor(tensor),
        "copy": lambda: target.copy_(tensor),
    }
    return actions, (plain, magnitudes, sketch)


def bandwidth(device):
    print("\nGB/s read (copy: read and written)")
    for mib in SIZES_MIB:
        for dtype in (torch.bfloat16, torch.float32):
            tensor = torch.randn((mib << 20) // dtype.itemsize, device=device).to(dtype)
            actions, queues = actions_on(tensor)
            if (mib, dtype) == (SIZES_MIB[0], torch.bfloat16):
                print(f"{'tensor':18}" + "".join(f"{name:>13}" for name in [*actions, "of copy"]))
            speed = {}
            for name, action in actions.items():
                times = 2 if name == "copy" else 1
                try:
                    seconds = device_seconds(action, max(3, 2048 // mib))
                    speed[name] = times * tensor.nbytes / seconds / 1e9
                except (RuntimeError, AttributeError):
                    speed[name] = float("nan")
                for queue in queues:
                    queue.take()
            title = f"{str(dtype).removeprefix('torch.')} {mib} MiB"
            cells = "".join(f"{value:13.0f}" for value in speed.values())
            print(f"{title:18}{cells}{speed['fingerprint'] / speed['copy']:12.2f}x", flush=True)


def launch_cost(device):
    tensors = [torch.randn(64, device=device) for _ in range(1000)]
    queue = FingerprintQueue()
    queue.put_many(tensors)
    queue.take()
    started = time.perf_counter()
    queue.put_many(tensors)
    print(f"\nlaunch: {(time.perf_counter() - started) * 1e3:.1f} us of host time per tensor")
    started = time.perf_counter()
    queue.take()
    print(f"take of 1000 slots: {(time.perf_counter() - started) * 1e3:.2f} ms")


def main():
    if not torch.cuda.is_available():
        print("no CUDA device: nothing was measured")
        return 2
    device = torch.device("cuda", torch.cuda.current_device())
    print(f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}")
    wrong = check_equality(device)
    launch_cost(device)
    bandwidth(device)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
