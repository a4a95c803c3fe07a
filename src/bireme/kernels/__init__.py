"""One function per operation of the model; this module is the only place that decides which implementation runs.

An implementation is a module (or any object) with the functions that ``bireme.kernels.reference`` lists in ``__all__``,
under the same signatures: tensors and host integers in, tensors out, caches updated in place. Layers ask once, when
they are built, and keep the answer, so that a call costs no look-up.
"""

from __future__ import annotations

import importlib
import os
from types import ModuleType

import torch

from bireme.kernels import reference

OVERRIDE = "BIREME_KERNELS"
"""Environment variable: ``reference`` runs the plain torch kernels on every device, for comparisons."""

KNOWN = ("cpu", "cuda")


def for_device(device: torch.device | str) -> ModuleType:
    """The kernels that run on ``device``: its type decides, unless ``BIREME_KERNELS=reference`` is set.

    Raises:
        ValueError: a device type without kernels, or another value of ``BIREME_KERNELS``.
        RuntimeError: kernels for CUDA without the triton package.
    """
    kind = torch.device(device).type
    if kind not in KNOWN:
        raise ValueError(f"no kernels for device type {kind!r}: known types are {', '.join(KNOWN)}")
    override = os.environ.get(OVERRIDE, "")
    if override not in ("", "reference"):
        raise ValueError(f"choosing kernels: {OVERRIDE}={override!r} is unknown; it may be 'reference' or unset")
    if kind == "cpu" or override:
        return reference
    try:
        return importlib.import_module("bireme.kernels.triton")
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise RuntimeError(
            f"choosing kernels for {device}: the package triton is missing; install it or set {OVERRIDE}=reference"
        ) from error
