"""How two whole tensors differ, element by element.

In:  two arrays as a dump holds them, with the dtype and shape of their event.
Out: an `ElementDiff`: how many elements differ and in which pattern, how far they are apart, how
     many are NaN, infinite or a negative zero.

Two elements are equal if their bits are: NaN equals itself, 0.0 and -0.0 differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from upguard_plugin.compare.float8 import FLOAT8, values_of
from upguard_plugin.records import Stretch
from upguard_plugin.verdict_parts import ElementDiff, Held, Specials

Array = npt.NDArray[Any]

# Upper ends of the classes of the histogram, in units of the last place.
ULP_CLASSES = (1, 2, 4, 16, 256, 1 << 16)
MAX_PLACES = 3  # places of differing elements that are given


def compare_elements(
    baseline: Array,
    target: Array,
    dtype: str,
    shape: Sequence[int],
    holds: Sequence[Stretch] = (),
) -> ElementDiff:
    """Compare the elements of two dumped tensors that share dtype and shape.

    holds: whose elements they are, of a flat buffer.
    """
    bits = [_bits(array, shape) for array in (baseline, target)]
    differs = bits[0] != bits[1]
    if differs.ndim > len(shape):  # real and imaginary parts
        differs = differs.any(axis=-1)
    values = [_values(array, dtype).reshape(-1) for array in bits]
    flat = (bits[0] != bits[1]).reshape(-1)
    apart = values[0][flat], values[1][flat]
    finite = np.isfinite(apart[0]) & np.isfinite(apart[1])
    with np.errstate(over="ignore"):
        gaps = np.abs(apart[0][finite] - apart[1][finite])
    sizes = np.maximum(np.abs(apart[0]), np.abs(apart[1]))[finite]
    places = np.argwhere(differs)[:MAX_PLACES]
    return ElementDiff(
        differing=int(differs.sum()),
        total=int(differs.size),
        pattern=pattern_of(differs),
        first=places.tolist(),
        max_abs=float(gaps.max()) if len(gaps) else None,
        max_rel=float((gaps / np.where(sizes > 0, sizes, 1)).max()) if len(gaps) else None,
        ulps=_histogram(bits[0].reshape(-1)[flat], bits[1].reshape(-1)[flat], finite, dtype),
        baseline=_specials(values[0], dtype),
        target=_specials(values[1], dtype),
        of=_owners(np.flatnonzero(differs.reshape(-1)), holds),
    )


def _owners(places: npt.NDArray[np.intp], holds: Sequence[Stretch]) -> list[Held]:
    """Whose elements the places are, each owner with its first to its last of them."""
    found = []
    for stretch in holds:
        inside = places[(places >= stretch.start) & (places < stretch.stop)]
        if len(inside):
            first, last = int(inside[0]), int(inside[-1])
            offset = stretch.offset + first - stretch.start
            found.append(Held(start=first, stop=last + 1, name=stretch.name, offset=offset))
    return found


def pattern_of(differs: npt.NDArray[np.bool_]) -> str:
    """In words, where the true elements lie: a row, a stripe, a tile, every k-th, the tail."""
    flat = differs.reshape(-1)
    places = np.flatnonzero(flat)
    if not len(places):
        return "none"
    if len(places) == len(flat):
        return "all elements"
    if len(places) == 1:
        return "one element"
    shaped = _pattern_in_dims(differs)
    if shaped is not None:
        return shaped
    steps = np.diff(places)
    first, last = int(places[0]), int(places[-1])
    if (steps == 1).all():
        end = last == len(flat) - 1
        return f"the tail, from element {first} on" if end else f"elements {first} to {last}"
    if (steps == steps[0]).all() and len(places) > 2:
        return f"every {_ordinal(int(steps[0]))} element from {first} to {last}"
    block = np.zeros_like(differs)
    block[tuple(slice(at.min(), at.max() + 1) for at in np.nonzero(differs))] = True
    if len(places) < block.sum() <= 2 * len(places) and not block.all():
        return f"most of {pattern_of(block)}"  # what was equal there may be so by chance
    return f"scattered over {differs.size} elements"


def _pattern_in_dims(differs: npt.NDArray[np.bool_]) -> str | None:
    """A full block of some dims, as a row (the last dim is whole), a column stripe or a tile."""
    if differs.ndim < 2:
        return None
    spans = []
    for dim in range(differs.ndim):
        others = tuple(d for d in range(differs.ndim) if d != dim)
        spans.append(np.flatnonzero(differs.any(axis=others)))
    if not differs[np.ix_(*spans)].all():
        return None
    whole = [len(span) == size for span, size in zip(spans, differs.shape, strict=True)]
    if not all(_is_regular(span) for span in spans):
        return None
    if all(whole[1:]) and len(spans[0]) < differs.shape[0]:
        is_tail = spans[0][-1] == differs.shape[0] - 1 and (np.diff(spans[0]) == 1).all()
        if len(spans[0]) > 1 and is_tail:
            return f"the tail, from row {spans[0][0]} on"
        return f"row {_span(spans[0])}" if len(spans[0]) == 1 else f"rows {_span(spans[0])}"
    single = [len(span) == 1 for span in spans]
    inner = single.index(False)
    if all(whole[inner:]):
        return f"row [{', '.join(_span(span) for span in spans[:inner])}]"
    if all(whole[:-1]):
        return f"stripe: column{'' if len(spans[-1]) == 1 else 's'} {_span(spans[-1])}"
    return f"tile [{', '.join(_span(span) for span in spans)}]"


def _ordinal(number: int) -> str:
    endings = {1: "st", 2: "nd", 3: "rd"}
    return f"{number}{'th' if 10 < number % 100 < 14 else endings.get(number % 10, 'th')}"


def _is_regular(span: npt.NDArray[np.intp]) -> bool:
    steps = np.diff(span)
    return not len(steps) or bool((steps == steps[0]).all())


def _span(span: npt.NDArray[np.intp]) -> str:
    if len(span) == 1:
        return str(span[0])
    step = int(span[1] - span[0])
    return f"{span[0]}-{span[-1]}" + ("" if step == 1 else f" in steps of {step}")


def _bits(array: Array, shape: Sequence[int]) -> Array:
    """The elements as unsigned integers; complex ones as two in a last dim."""
    contiguous = np.asarray(array, order="C")
    bits = contiguous.view(np.dtype(f"u{contiguous.itemsize}"))
    is_complex = bits.ndim == len(shape) + 1
    return bits.reshape((*shape, 2) if is_complex else tuple(shape))


def _values(bits: Array, dtype: str) -> npt.NDArray[np.float64]:
    """The numbers behind the bits, as float64; NaN for elements that are several numbers."""
    if dtype == "bfloat16":
        return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    if dtype in FLOAT8:
        return values_of(dtype)[bits]
    if dtype.startswith("float4"):
        return np.full(bits.shape, np.nan)
    plain = {"complex64": "float32", "complex128": "float64", "bool": "uint8"}.get(dtype, dtype)
    with np.errstate(invalid="ignore"):
        return bits.view(np.dtype(plain)).astype(np.float64)


def _specials(values: npt.NDArray[np.float64], dtype: str) -> Specials:
    if dtype.startswith("float4"):  # it has none
        return Specials(nan=0, infinite=0, negative_zero=0)
    return Specials(
        nan=int(np.isnan(values).sum()),
        infinite=int(np.isinf(values).sum()),
        negative_zero=int(((values == 0) & np.signbit(values)).sum()),
    )


def _histogram(
    baseline: Array, target: Array, finite: npt.NDArray[np.bool_], dtype: str
) -> dict[str, int]:
    """How many units of the last place lie between the elements of finite pairs that differ."""
    if not dtype.startswith(("float", "bfloat", "complex")) or not finite.any():
        return {}
    steps = _units_between(baseline[finite], target[finite])
    found: dict[str, int] = {}
    low = 0
    for high in (*ULP_CLASSES, None):
        inside = (steps > low) if high is None else (steps > low) & (steps <= high)
        if inside.any():
            name = f"{low + 1}-{high}" if high is not None else f"over {low}"
            found[str(high) if high == low + 1 else name] = int(inside.sum())
        low = high or low
    return found


def _units_between(baseline: Array, target: Array) -> npt.NDArray[np.float64]:
    """How many floats lie between two, by their bits; both zeros are one."""
    sign = baseline.dtype.type(1 << (8 * baseline.itemsize - 1))
    sizes = [(bits & ~sign).astype(np.uint64) for bits in (baseline, target)]
    across = ((baseline ^ target) & sign) != 0
    apart = np.maximum(*sizes) - np.minimum(*sizes)
    units: npt.NDArray[np.float64] = np.where(across, sizes[0] + sizes[1], apart).astype(np.float64)
    return units
