"""Collectives: right, the same bits on every rank, over every wire that this machine has."""

from __future__ import annotations

import os
import platform
import threading
import time
from collections.abc import Callable

import pytest
import torch
from executor_fakes import CollectivesRunner, check_collectives, make_config

from bireme.distributed import (
    GroupAborted,
    NullGroup,
    SharedMemoryGroup,
    StagedGroup,
    choose_backend,
    create_shared_memory,
    rank_device,
    sum_in_rank_order,
)
from bireme.errors import ConfigError, ExecutorError
from bireme.executor.launcher import create_executor


def run_as_threads(size: int, work: Callable[[SharedMemoryGroup], None], chunk_bytes: int = 4096) -> None:
    """Run ``work`` on ``size`` shared-memory ranks that are threads of this process; re-raise what fails."""
    fd = create_shared_memory(SharedMemoryGroup.segment_bytes(size, chunk_bytes))
    groups = [SharedMemoryGroup(fd, rank, size, chunk_bytes=chunk_bytes) for rank in range(size)]
    os.close(fd)
    failures: list[BaseException] = []

    def run(group: SharedMemoryGroup) -> None:
        try:
            work(group)
        except BaseException as error:
            failures.append(error)
            group.abort()

    threads = [threading.Thread(target=run, args=(group,)) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for group in groups:
        group.close()
    if failures:
        raise failures[0]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_every_rank_process_holds_the_sums_of_rank_order_bit_for_bit(backend: str, size: int) -> None:
    executor = create_executor(make_config(size, backend, seed=size), CollectivesRunner, start_timeout=120)
    executor.shutdown()


@pytest.mark.parametrize("size", [2, 3, 4])
def test_tensors_larger_than_the_shared_buffers_go_in_chunks(size: int) -> None:
    def work(group: SharedMemoryGroup) -> None:
        for seed in range(12):
            check_collectives(group, seed, largest=20_000)

    run_as_threads(size, work, chunk_bytes=256)


def test_a_half_precision_sum_of_four_is_rounded_once() -> None:
    parts = [torch.tensor([value], dtype=torch.bfloat16) for value in (256.0, 1.0, 1.0, 1.0)]
    out = torch.empty(1, dtype=torch.bfloat16)
    sum_in_rank_order(parts, out)
    # bfloat16 has 8 bits: 256 + 1 rounds back to 256 at each step, 259 once to 260.
    assert out.item() == 260.0


def test_empty_tensors_pass_without_a_round() -> None:
    def work(group: SharedMemoryGroup) -> None:
        assert group.all_reduce(torch.empty(0, 8)).shape == (0, 8)
        assert group.all_gather(torch.empty(0, 8)).shape == (0, 16)
        assert group.broadcast(torch.empty(0)).shape == (0,)
        assert group.all_reduce(torch.tensor(1.5)).item() == 3.0

    run_as_threads(2, work)


def test_inference_tensors_and_ordinary_ones_take_turns_in_one_group() -> None:
    def work(group: SharedMemoryGroup) -> None:
        for _ in range(3):
            with torch.inference_mode():
                assert group.all_reduce(torch.ones(5)).tolist() == [2.0] * 5
            assert group.all_reduce(torch.ones(5)).tolist() == [2.0] * 5

    run_as_threads(2, work)


def test_a_rank_that_waits_raises_when_another_aborts() -> None:
    waited = []

    def work(group: SharedMemoryGroup) -> None:
        if group.rank == 0:
            time.sleep(0.2)
            group.abort()
            return
        started = time.monotonic()
        with pytest.raises(GroupAborted, match="rank 1"):
            group.barrier()
        waited.append(time.monotonic() - started)

    run_as_threads(2, work)
    assert waited[0] < 2


def test_a_closed_group_can_be_closed_and_aborted_again() -> None:
    fd = create_shared_memory(SharedMemoryGroup.segment_bytes(2))
    group = SharedMemoryGroup(fd, 0, 2)
    os.close(fd)
    group.close()
    group.close()
    group.abort()


def test_shared_memory_has_no_name_and_goes_with_its_group() -> None:
    fd = create_shared_memory(SharedMemoryGroup.segment_bytes(2))
    group = SharedMemoryGroup(fd, 0, 2)
    os.close(fd)
    group.close()
    assert not [name for name in os.listdir("/dev/shm") if "bireme" in name]
    with open("/proc/self/maps") as maps:
        assert "memfd:bireme" not in maps.read()


def test_a_single_rank_changes_nothing() -> None:
    group = NullGroup()
    x = torch.randn(3, 4)
    assert group.all_reduce(x) is x and group.all_gather(x) is x and group.broadcast(x) is x
    group.barrier()
    group.abort()
    group.close()


@pytest.mark.gpu
def test_gpu_tensors_of_ranks_that_share_a_gpu_are_summed_through_host_memory() -> None:
    def work(group: SharedMemoryGroup) -> None:
        staged = StagedGroup(group)
        x = torch.full((16, 1024), float(group.rank + 1), device="cuda")
        assert staged.all_reduce(x.clone()).cpu().eq(3).all()
        assert staged.all_gather(x)[0, ::1024].tolist() == [1.0, 2.0]
        assert staged.broadcast(x, 1).cpu().eq(2).all()
        staged.barrier()

    run_as_threads(2, work)


def test_the_backend_follows_the_machine_and_the_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    assert choose_backend(make_config(1)) == "none"
    assert choose_backend(make_config(2)) == "shm"
    assert choose_backend(make_config(2, "gloo")) == "gloo"
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert choose_backend(make_config(2)) == "gloo"
    with pytest.raises(ConfigError, match="'shm' on a aarch64"):
        choose_backend(make_config(2, "shm"))
    with pytest.raises(ConfigError, match="needs 2 GPUs, one for each rank, and has 0"):
        choose_backend(make_config(2, "nccl"))
    with pytest.raises(ConfigError, match="'smoke'"):
        choose_backend(make_config(2, "smoke"))


def test_cpu_ranks_live_on_the_cpu() -> None:
    assert rank_device(make_config(2), 1) == torch.device("cpu")


def test_an_aborted_group_is_an_executor_error() -> None:
    assert issubclass(GroupAborted, ExecutorError)
