"""Linear layers that own their shard, and the two ends of the vocabulary.

A rank holds its rows (column parallel: outputs are split) or its columns (row parallel: inputs are split, and one
all-reduce sums the partial outputs). All sizes here are rank-local.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bireme import kernels
from bireme.distributed import TpGroup
from bireme.layers.base import Layer


class ColumnParallelLinear(Layer):
    """x [N, in_size] → this rank's [N, out_size] outputs. The weight arrives as [out_size, in_size]."""

    weight: Tensor

    def __init__(self, in_size: int, out_size: int, *, device: torch.device) -> None:
        super().__init__()
        self.kernels = kernels.for_device(device)
        self.declare("weight", (out_size, in_size), self.kernels.pack_linear_weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.kernels.linear(x, self.weight)


class RowParallelLinear(Layer):
    """This rank's part of the input, [N, in_size] → the whole output, summed over the group.

    The output goes to ``RMSNorm.add_forward`` and nowhere else: it is [N, out_size], or on one rank whatever the
    device's ``linear_partials`` leaves for its ``add_rms_norm`` to finish.
    """

    weight: Tensor

    def __init__(self, in_size: int, out_size: int, group: TpGroup, *, device: torch.device) -> None:
        super().__init__()
        self.group = group
        self.kernels = kernels.for_device(device)
        self.declare("weight", (out_size, in_size), self.kernels.pack_linear_weight)

    def forward(self, x: Tensor) -> Tensor:
        if self.group.size == 1:
            return self.kernels.linear_partials(x, self.weight)
        return self.group.all_reduce(self.kernels.linear(x, self.weight))


class VocabParallelEmbedding(Layer):
    """Rank r holds rows [r·Vr, (r + 1)·Vr) of the table; a token's row comes from its owner through one all-reduce."""

    weight: Tensor

    def __init__(self, rows: int, hidden_size: int, group: TpGroup, *, device: torch.device) -> None:
        super().__init__()
        self.group = group
        self.first_id = group.rank * rows if group.size > 1 else None
        self.kernels = kernels.for_device(device)
        self.declare("weight", (rows, hidden_size), lambda weight: weight)

    def forward(self, token_ids: Tensor) -> Tensor:
        """[N] int64 → [N, H]."""
        return self.group.all_reduce(self.kernels.embed(token_ids, self.weight, self.first_id))


class LMHead(Layer):
    """Hidden rows → float32 logits over the whole vocabulary, on rank 0.

    Args:
        rows: vocabulary rows of this rank; the last rank's may end in padding.
        vocab_size: of the whole vocabulary; what lies past it is cut.
        tied: the embedding whose table this is, or None when the checkpoint has its own ``lm_head.weight``.
    """

    weight: Tensor

    def __init__(
        self,
        rows: int,
        hidden_size: int,
        vocab_size: int,
        group: TpGroup,
        *,
        tied: VocabParallelEmbedding | None,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.group = group
        self.tied = tied
        self.kernels = kernels.for_device(device)
        if tied is None:
            self.declare("weight", (rows, hidden_size), lambda weight: weight)

    def forward(self, hidden: Tensor) -> Tensor | None:
        """[R, H] → [R, V] float32 on rank 0; None on the others, which only contribute their shard."""
        weight = self.weight if self.tied is None else self.tied.weight
        logits = self.group.all_gather(self.kernels.vocab_logits(hidden, weight))
        # The sampler edits rows in place and wants them contiguous; the copy is only made where padding was cut.
        return logits[:, : self.vocab_size].contiguous() if self.group.rank == 0 else None
