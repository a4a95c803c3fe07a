"""What every layer is: a set of named weights that it takes one by one, in the form that its kernels read."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor


class Layer:
    """A named tree of weights without ``torch.nn`` machinery: attributes on the hot path are plain attributes.

    A leaf declares each weight with ``declare``; a composite names its parts with ``adopt``. ``forward`` methods get
    all context (tensors, row layout, caches) as arguments.
    """

    def __init__(self) -> None:
        self._declared: dict[str, tuple[tuple[int, ...], str, Callable[[Tensor], Tensor]]] = {}
        self._parts: dict[str, Layer] = {}

    def declare(
        self, name: str, shape: tuple[int, ...], prepare: Callable[[Tensor], Tensor], attribute: str = "weight"
    ) -> None:
        """Expect weight ``name`` of rank-local ``shape``; ``prepare`` turns it into what ``self.<attribute>`` holds."""
        self._declared[name] = (shape, attribute, prepare)

    def adopt(self, **parts: Layer) -> None:
        """Make ``parts`` this layer's parts, under their names in the checkpoint."""
        self._parts.update(parts)

    def expected(self, prefix: str = "") -> Iterator[tuple[str, tuple[int, ...], Callable[[Tensor], None]]]:
        """Every weight of the tree: (full name, rank-local shape, the function that takes it)."""
        for name, (shape, attribute, prepare) in self._declared.items():
            yield prefix + name, shape, lambda tensor, a=attribute, p=prepare: setattr(self, a, p(tensor))  # type: ignore[misc]
        for name, part in self._parts.items():
            yield from part.expected(f"{prefix}{name}.")

    def weights(self) -> Iterator[Tensor]:
        """The tensors that the tree holds, as stored."""
        for _, attribute, _ in self._declared.values():
            yield getattr(self, attribute)
        for part in self._parts.values():
            yield from part.weights()


def one_plus(weight: Tensor) -> Tensor:
    """A zero-centred norm weight as the factor that kernels multiply by: 1 + w, in float32."""
    return weight.to(torch.float32) + 1.0


def in_float32(weight: Tensor) -> Tensor:
    return weight.to(torch.float32)
