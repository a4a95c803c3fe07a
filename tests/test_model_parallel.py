"""Shards give what the whole model gives: ranks as threads of this process, exact collectives."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from model_tools import TOLERANCE, Driver, load_model, run_ranks, write_model
from torch import Tensor

from bireme.config import ModelConfig
from bireme.distributed import TpGroup


def play(folder: Path, config: ModelConfig, group: TpGroup | None) -> list[Tensor]:
    """A mixed history: two prompts in chunks, a third beside decode rows, then decode. Rank 0's logits."""
    model = load_model(folder, config, group=group)
    assert model.compute_logits(torch.zeros(1, config.hidden_size)) is None or model.group.rank == 0
    driver = Driver(model)
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, config.vocab_size, (3, 100), generator=generator).tolist()
    for slot in (1, 2, 3):
        driver.open(slot, 100)
    driver.fill_with_nan()
    results: list[Tensor] = []

    def run(**rows: list) -> None:
        decoded, chunks = driver.step(**rows)
        results.extend([decoded, *chunks])

    run(prefill=[(1, ids[0][:64]), (2, ids[1][:5])])
    run(decode=[(2, ids[1][5])], prefill=[(1, ids[0][64:70])])
    run(decode=[(1, ids[0][70]), (2, ids[1][6])], prefill=[(3, ids[2][:65])])
    for step in range(4):
        run(decode=[(1, ids[0][71 + step]), (2, ids[1][7 + step]), (3, ids[2][65 + step])])
    return results


@pytest.mark.parametrize(
    ("geometry", "tp_size"),
    [
        ("kv1_group2_ratio1_tied_4_layers", 2),
        ("kv2_group6_ratio3_untied_6_layers", 2),
        ("kv4_group1_ratio2_untied_9_layers", 2),
        ("kv4_group1_ratio2_untied_9_layers", 4),
        ("kv2_group4_ratio2_tied_7_layers", 4),
    ],
)
def test_ranks_together_give_the_logits_of_one_rank(tmp_path, geometry, tp_size):
    config = write_model(tmp_path, geometry, seed=1)
    expected = play(tmp_path, config, None)
    by_rank = run_ranks(tp_size, lambda group: play(tmp_path, config, group))
    for step, (whole, sharded) in enumerate(zip(expected, by_rank[0], strict=False)):
        assert whole.shape == sharded.shape
        if whole.numel():
            error = (whole - sharded).abs().max().item()
            assert error < TOLERANCE, f"result {step}: off by {error:.1e}"
    assert all(not len(piece) for results in by_rank[1:] for piece in results)


def test_each_rank_stores_only_its_heads(tmp_path):
    config = write_model(tmp_path, "kv2_group4_ratio2_tied_7_layers", seed=1)
    for tp_size, kv_heads in ((1, 2), (2, 1), (4, 1)):
        drivers = run_ranks(tp_size, lambda group: Driver(load_model(tmp_path, config, group=group)))
        for driver in drivers:
            assert driver.kv.k.shape[2] == kv_heads
            assert driver.state.recurrent.shape[2] == config.linear_num_value_heads // tp_size
            channels = 2 * config.linear_num_key_heads * config.linear_key_head_dim
            channels += config.linear_num_value_heads * config.linear_value_head_dim
            assert driver.state.conv.shape[3] == channels // tp_size
