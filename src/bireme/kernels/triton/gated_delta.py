"""Gated DeltaNet on CUDA: see the two modules."""

from bireme.kernels.triton.gated_delta_decode import gdn_decode
from bireme.kernels.triton.gated_delta_prefill import gdn_prefill

__all__ = ["gdn_decode", "gdn_prefill"]
