"""Runners without a model, for tests of groups and executors; rank processes import them from here."""

from __future__ import annotations

import os
import time

import torch

from bireme.config import CacheCapacity, EngineConfig, ModelConfig, ParallelConfig
from bireme.distributed import TpGroup, sum_in_rank_order
from bireme.errors import CheckpointError
from bireme.types import StepOutput, StepPlan

NOTHING, SUM, HANG, RAISE, WAIT_FOR_RANK0 = range(5)
"""What a plan of ``make_plan`` makes the ranks do."""


def make_config(tp_size: int, backend: str = "auto", *, model_path: str = "/nowhere", seed: int = 0) -> EngineConfig:
    model = ModelConfig(
        model_type="qwen3_5_text",
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        layer_types=("linear_attention", "full_attention"),
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=16,
        rotary_dim=4,
        rope_theta=10000.0,
        linear_num_key_heads=4,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        linear_conv_kernel_dim=4,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        max_position_embeddings=1024,
    )
    parallel = ParallelConfig(tp_size=tp_size, backend=backend)
    return EngineConfig(model_path=model_path, model=model, parallel=parallel, dtype="float32", seed=seed)


def make_capacity(num_slots: int) -> CacheCapacity:
    return CacheCapacity(
        num_slots=num_slots, num_blocks=16, block_size=64, max_model_len=1024, bytes_per_slot=8, bytes_per_block=8
    )


def make_plan(seq: int, operation: int = NOTHING, rank: int = 0) -> StepPlan:
    return StepPlan(seq, [], [operation, rank], [])


class FakeRunner:
    """Does what a plan's ``decode_slots`` (operation, rank) say. Rank r has room for 10 - r slots."""

    depth = 1
    step_seconds = 0.25

    def __init__(self, config: EngineConfig, group: TpGroup, device: torch.device) -> None:
        self.group = group
        self.capacity: CacheCapacity | None = None

    def load(self) -> CacheCapacity:
        return make_capacity(10 - self.group.rank)

    def allocate(self, capacity: CacheCapacity) -> None:
        self.capacity = capacity

    def execute(self, plan: StepPlan) -> StepOutput | None:
        operation, rank = plan.decode_slots
        total = 0
        if operation == HANG and rank == self.group.rank:
            time.sleep(1000)
        if operation == RAISE and rank == self.group.rank:
            raise ValueError("the mast broke")
        if operation == WAIT_FOR_RANK0 and self.group.rank == 0:
            return StepOutput(plan.seq, [])
        if operation != NOTHING:
            total = int(self.group.all_reduce(torch.tensor([self.group.rank + 1])))
        return StepOutput(plan.seq, [total, os.getpid()]) if self.group.rank == 0 else None

    def close(self) -> None:
        return None


class BrokenCheckpointRunner(FakeRunner):
    """Rank 1 cannot load."""

    def load(self) -> CacheCapacity:
        if self.group.rank == 1:
            raise CheckpointError("tensor 'norm.weight' of shard 2 is truncated: 10 bytes of 256")
        return super().load()


class LostRunner(FakeRunner):
    """Rank 1 waits for the others while they load, and rank 2 of them is killed."""

    def load(self) -> CacheCapacity:
        if self.group.rank == 2:
            os.kill(os.getpid(), 9)
        self.group.barrier()
        return super().load()


class CollectivesRunner(FakeRunner):
    """Loading runs collectives of random sizes and dtypes and compares every result with sums made locally, bit by bit.

    Every rank can draw every rank's input, so each one knows what each must hold.
    """

    def __init__(self, config: EngineConfig, group: TpGroup, device: torch.device) -> None:
        super().__init__(config, group, device)
        self.seed = config.seed
        self.num_rounds = 25 if config.parallel.backend == "shm" else 15

    def load(self) -> CacheCapacity:
        with torch.inference_mode():
            for number in range(self.num_rounds):
                check_collectives(self.group, self.seed * 1000 + number)
        return super().load()


def check_collectives(group: TpGroup, seed: int, largest: int = 300_000) -> None:
    """One all_reduce, all_gather, broadcast and barrier of random shape and dtype, compared with their definitions."""
    chooser = torch.Generator().manual_seed(seed)

    def choose(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=chooser))

    numel = choose(1, largest) if seed % 10 == 3 else choose(1, 5000)
    dtype = (torch.float32, torch.bfloat16, torch.float16, torch.int64)[choose(0, 4)]
    width = choose(1, 40)
    source = choose(0, group.size)
    shape = (-(-numel // width), width)

    def draw(rank: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed * 8 + rank)
        return (torch.randn(shape, generator=generator) * 100).to(dtype)

    inputs = [draw(rank) for rank in range(group.size)]
    expected = torch.empty_like(inputs[0])
    sum_in_rank_order(inputs, expected)
    case = f"{dtype} {shape} on rank {group.rank} of {group.size}, seed {seed}"
    assert torch.equal(group.all_reduce(inputs[group.rank].clone()), expected), f"all_reduce of {case}"
    transposed = inputs[group.rank].t().clone(memory_format=torch.contiguous_format).t()
    assert torch.equal(group.all_reduce(transposed), expected), f"all_reduce, not contiguous, of {case}"
    assert torch.equal(group.all_gather(inputs[group.rank]), torch.cat(inputs, dim=-1)), f"all_gather of {case}"
    assert torch.equal(group.broadcast(inputs[group.rank].clone(), source), inputs[source]), f"broadcast of {case}"
    group.barrier()
