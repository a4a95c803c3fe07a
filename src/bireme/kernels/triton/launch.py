"""How the kernels of this package are launched: programmatic dependent launch (PDL), and small host-side sums.

With PDL a kernel may start while the one before it in the stream still runs, which hides launch latency and lets a
kernel fetch its weights early. The rules, for every kernel that is launched with ``**pdl(device)``:

- it takes a constexpr argument ``PDL`` and, when it is set, calls ``tl.extra.cuda.gdc_launch_dependents()`` at its
  start and ``tl.extra.cuda.gdc_wait()`` before it first touches anything that an earlier kernel reads or writes;
- every program calls ``gdc_wait`` (a kernel that skips it breaks the order of all that follow);
- only constants of the model (weights) may be touched before the wait.

::

    @triton.jit
    def scale_kernel(x, y, weight, n, BLOCK: tl.constexpr, PDL: tl.constexpr):
        if PDL:
            tl.extra.cuda.gdc_launch_dependents()
        offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        factor = tl.load(weight + offsets, offsets < n)  # a weight: before the wait
        if PDL:
            tl.extra.cuda.gdc_wait()
        tl.store(y + offsets, tl.load(x + offsets, offsets < n) * factor, offsets < n)

    scale_kernel[grid](x, y, weight, n, BLOCK=1024, num_warps=4, **pdl(x.device))
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from typing import Any

import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
"""Whether kernels run in Triton's interpreter (tests on CPUs)."""

_ON: dict[str, Any] = {"PDL": True, "launch_pdl": True}
_OFF: dict[str, Any] = {"PDL": False}
_allowed = os.environ.get("BIREME_PDL", "1") != "0"


@functools.lru_cache(maxsize=16)
def pdl_supported(device: torch.device) -> bool:
    """Whether ``device`` knows programmatic dependent launch: CUDA, capability 9.0 or above, not interpreted."""
    return not INTERPRETED and device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def pdl(device: torch.device) -> dict[str, Any]:
    """Keyword arguments of a launch: ``PDL=True, launch_pdl=True`` where the device knows it, else ``PDL=False``.

    ``BIREME_PDL=0`` in the environment turns it off everywhere, for comparisons.
    """
    return _ON if _allowed and pdl_supported(device) else _OFF


@contextlib.contextmanager
def pdl_off(active: bool = True) -> Iterator[None]:
    """Launches within the block (graph captures included) go without PDL; with ``active`` False, nothing changes."""
    global _allowed
    before = _allowed
    _allowed = before and not active
    try:
        yield
    finally:
        _allowed = before


@functools.lru_cache(maxsize=16)
def num_sms(device: torch.device) -> int:
    """Streaming multiprocessors of ``device`` (a small number under the interpreter)."""
    if device.type != "cuda":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count


def next_power_of_two(n: int) -> int:
    """The smallest power of two that is at least ``n`` (n ≥ 1)."""
    return 1 << (n - 1).bit_length()
