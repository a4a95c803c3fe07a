"""A step's result that is still on its way from the device: the loop goes on and reads it one step late."""

from __future__ import annotations

import torch
from torch import Tensor

from bireme.sampling.sampler import SampledRows
from bireme.types import StepOutput, TokenLogprobs


def to_host(values: Tensor) -> Tensor:
    """Start copying a CUDA tensor into pinned memory; whoever reads it waits for an event recorded afterwards."""
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return host.copy_(values, non_blocking=True)


class DeferredOutput:
    """What a CUDA step drew, its copies to the host under way.

    Args:
        seq: of the plan.
        sampled: token ids and the table of log-probabilities, on the device.
        started: recorded before the step's first kernel.
        num_padding_rows: rows of padding that ran with the step.
        prompt_logprobs, failed_slots: as in ``StepOutput``.
    """

    def __init__(
        self,
        seq: int,
        sampled: SampledRows,
        started: torch.cuda.Event,
        num_padding_rows: int,
        prompt_logprobs: dict[int, list[TokenLogprobs]] | None,
        failed_slots: dict[int, str] | None = None,
    ) -> None:
        self.seq = seq
        self._sampled = sampled
        self._started = started
        self._num_padding_rows = num_padding_rows
        self._prompt_logprobs = prompt_logprobs
        self._failed_slots = failed_slots
        self._token_ids = to_host(sampled.token_ids)
        table = sampled.logprob_table
        self._logprob_table = None if table is None else to_host(table)
        self._finished = torch.cuda.Event(enable_timing=True)
        self._finished.record()
        self._output: StepOutput | None = None

    @property
    def is_ready(self) -> bool:
        """Whether ``result`` would answer without waiting for the device."""
        return self._output is not None or self._finished.query()

    @property
    def is_answered(self) -> bool:
        """Whether somebody has had the result already."""
        return self._output is not None

    def seconds_until(self, later: DeferredOutput) -> float:
        """On the device, from the end of this step to the end of a later one; both have ended."""
        return self._finished.elapsed_time(later._finished) / 1000.0

    def result(self) -> StepOutput:
        """The output; waits for the device. Raises what CUDA raises when a kernel of the step failed."""
        if self._output is None:
            self._finished.synchronize()
            self._output = StepOutput(
                seq=self.seq,
                token_ids=self._token_ids.tolist(),
                logprobs=self._sampled.logprobs(self._logprob_table),
                prompt_logprobs=self._prompt_logprobs,
                model_seconds=self._started.elapsed_time(self._finished) / 1000.0,
                num_padding_rows=self._num_padding_rows,
                failed_slots=self._failed_slots,
            )
        return self._output
