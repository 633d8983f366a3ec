"""Functions that round, and their exact twins: of the same shape, and without a rounding.

In:  calls of torch's functions, inside of `exact_functions()` or of a model made exact.
Out: what the twin gives, and its gradient. All other functions are left alone.

A twin is linear or works on each element alone, and gives dyadic numbers for dyadic numbers. It is
no approximation: a model made of twins trains, but learns something else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

_STEPS = 2  # a norm keeps multiples of 1/2 of the power of two above the largest in a row


class _PowerOfTwoNorm(torch.autograd.Function):
    """Each row times a power of two, so that its largest element lies in [1/2, 1], and rounded.

    This bounds the bits of what flows on, at any depth. The gradient is rounded in the same way, at
    the size of its own rows, and divided as the input was: twice the loss has twice the gradient.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, num_dims: int) -> Tensor:
        ctx.num_dims, size = num_dims, _size_of_rows(x, num_dims)
        ctx.save_for_backward(size)
        return _rounded(x / size)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (divisor,) = ctx.saved_tensors
        size = _size_of_rows(grad, ctx.num_dims)
        return _rounded(grad / size) * size / divisor, None


def _size_of_rows(x: Tensor, num_dims: int) -> Tensor:
    """The power of two above the largest element of each row; 1 for a row of zeros."""
    largest = x.abs().amax(tuple(range(-num_dims, 0)), keepdim=True)
    mantissa, _ = torch.frexp(largest)
    return torch.where(largest > 0, largest / mantissa, torch.ones_like(largest))


def _normed(x: Tensor, num_dims: int) -> Tensor:
    normed: Tensor = _PowerOfTwoNorm.apply(x, num_dims)  # type: ignore[no-untyped-call]
    return normed


def _rounded(x: Tensor) -> Tensor:
    return (x * _STEPS).round() / _STEPS


def _layer_norm(
    input: Tensor, normalized_shape: Iterable[int], weight: Any = None, bias: Any = None,
    eps: float | None = None,
) -> Tensor:  # fmt: skip
    x = _normed(input, len(tuple(normalized_shape)))
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def _rms_norm(
    input: Tensor, normalized_shape: Iterable[int], weight: Any = None, eps: float | None = None
) -> Tensor:
    return _layer_norm(input, normalized_shape, weight)


def _relu(input: Tensor, *_: Any, **__: Any) -> Tensor:
    return torch.relu(input)


def _tanh(input: Tensor, *_: Any, **__: Any) -> Tensor:
    return input.clamp(-1, 1)


def _sigmoid(input: Tensor, *_: Any, **__: Any) -> Tensor:
    return input.clamp(0, 1)


def _same(input: Tensor, *_: Any, **__: Any) -> Tensor:
    return input


def _softmax(input: Tensor, dim: int = -1, *_: Any, dtype: Any = None, **__: Any) -> Tensor:
    """The scores, 0 where a mask hides them, in rows that a norm has rounded."""
    scores = input if dtype is None else input.to(dtype)
    scores = scores.masked_fill(scores == float("-inf"), 0).transpose(dim, -1)
    return _normed(scores, 1).transpose(dim, -1)


def _attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """The visible scores, in rows that a norm has rounded, times the values."""
    if enable_gqa:
        times = query.shape[-3] // key.shape[-3]
        key, value = (part.repeat_interleave(times, -3) for part in (key, value))
    scores = query @ key.transpose(-2, -1)
    if is_causal:
        scores = scores.tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, 0)
    elif attn_mask is not None:
        scores = scores + attn_mask
    return _softmax(scores) @ value


def _cross_entropy(
    input: Tensor, target: Tensor, weight: Any = None, size_average: Any = None,
    ignore_index: int = -100, reduce: Any = None, reduction: str = "mean", **_: Any,
) -> Tensor:  # fmt: skip
    """A weighted sum of each sample's scores, lowest at its label.

    The mean divides by the power of two that is not less than the number of labels.
    """
    classes = torch.arange(input.shape[1], device=input.device)
    classes = classes.view(1, -1, *[1] * (target.dim() - 1))
    labels = target.unsqueeze(1)
    factors = ((classes + labels) % 3 - 1) / 2 - 2.0 * (classes == labels)
    counts = target != ignore_index
    losses: Tensor = (input * factors.to(input.dtype)).sum(1) * counts
    if reduction == "none":
        return losses
    power = (int(counts.sum()) - 1).bit_length() if reduction == "mean" else 0
    return losses.sum() / (1 << power)


def _twins() -> dict[Callable[..., Any], Callable[..., Any]]:
    listed: list[tuple[Callable[..., Any], str]] = [
        (_relu, "gelu silu elu celu selu softplus mish hardswish leaky_relu logsigmoid relu6"),
        (_tanh, "tanh hardtanh softsign"),
        (_sigmoid, "sigmoid hardsigmoid"),
        (_same, "dropout dropout1d dropout2d dropout3d alpha_dropout feature_dropout log_softmax"),
        (_softmax, "softmax"),
        (_layer_norm, "layer_norm"),
        (_rms_norm, "rms_norm"),
        (_attention, "scaled_dot_product_attention"),
        (_cross_entropy, "cross_entropy"),
    ]
    # A function has a twin wherever it lives: F.softmax, torch.softmax, Tensor.softmax.
    return {
        getattr(home, name): twin
        for twin, names in listed
        for name in names.split()
        for home in (F, torch, torch.Tensor)
        if hasattr(home, name) and not (home is torch and name in ("layer_norm", "rms_norm"))
    }


class exact_functions(TorchFunctionMode):
    """A `with` block in which torch's functions that round are replaced by their exact twins.

    twins: further functions and theirs. A model made exact needs no such block; a loss that is
    computed outside of it does.
    """

    def __init__(
        self, twins: Mapping[Callable[..., Any], Callable[..., Any]] | None = None
    ) -> None:
        super().__init__()
        self._twins = _twins() | dict(twins or {})

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        # Inside of this call the mode is off: a twin may use any function.
        return self._twins.get(func, func)(*args, **(kwargs or {}))
