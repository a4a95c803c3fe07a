"""One function per operation of the model; this module is the only place that decides which implementation runs.

An implementation is a module (or any object) with the functions that ``bireme.kernels.reference`` lists in ``__all__``,
under the same signatures: tensors and host integers in, tensors out, caches updated in place. Layers ask once, when
they are built, and keep the answer, so that a call costs no look-up.
"""

from __future__ import annotations

from types import ModuleType

import torch

from bireme.kernels import reference


def for_device(device: torch.device | str) -> ModuleType:
    """The kernels that run on ``device``: its type decides, nothing else."""
    implementations: dict[str, ModuleType] = {"cpu": reference, "cuda": reference}
    kind = torch.device(device).type
    if kind not in implementations:
        raise ValueError(f"no kernels for device type {kind!r}: known types are {', '.join(implementations)}")
    return implementations[kind]
