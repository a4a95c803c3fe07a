"""The whole model on the Triton kernels, in Triton's interpreter and float32, against the reference kernels."""

from __future__ import annotations

import importlib

import pytest
import torch
from model_tools import TOLERANCE, Driver, load_model, write_model
from triton_tools import INTERPRETED, mend_interpreter

from bireme import kernels
from bireme.kernels import reference

if not INTERPRETED:
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)
pytest.importorskip("triton")
mend_interpreter()
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("geometry", ["kv2_group4_ratio2_tied_7_layers", "kv4_group1_ratio2_untied_9_layers"])
def test_prefill_mixed_and_decode_steps_give_the_reference_s_logits(geometry, tmp_path, monkeypatch):
    config = write_model(tmp_path, geometry, seed=1)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, config.vocab_size, (70,), generator=generator).tolist()
    runs = []
    for chosen in (reference, importlib.import_module("bireme.kernels.triton")):
        monkeypatch.setattr(kernels, "for_device", lambda device, chosen=chosen: chosen)
        driver = Driver(load_model(tmp_path, config))
        driver.open(1, 90)
        driver.open(2, 20)
        driver.fill_with_nan()
        steps = [
            driver.step(prefill=[(1, ids[:67])]),
            driver.step(decode=[(1, ids[67])], prefill=[(2, ids[:9])]),
            driver.step(decode=[(1, ids[68]), (2, ids[9])]),
        ]
        runs.append([logits for decoded, prefilled in steps for logits in (decoded, *prefilled)])
    for expected, found in zip(*runs, strict=True):
        torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)
