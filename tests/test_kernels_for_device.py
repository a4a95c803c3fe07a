"""Which kernels run where, and that both sets are one interface."""

from __future__ import annotations

import inspect

import pytest
import torch

from bireme import kernels
from bireme.kernels import reference


def test_cpus_get_the_reference_and_cuda_the_triton_kernels(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.delenv("BIREME_KERNELS", raising=False)
    assert kernels.for_device("cpu") is reference
    assert kernels.for_device("cuda:1").__name__ == "bireme.kernels.triton"


def test_the_environment_puts_the_reference_on_every_device(monkeypatch):
    monkeypatch.setenv("BIREME_KERNELS", "reference")
    assert kernels.for_device("cuda") is reference
    assert kernels.for_device("cpu") is reference


def test_an_unknown_choice_is_refused_by_name(monkeypatch):
    monkeypatch.setenv("BIREME_KERNELS", "fast")
    with pytest.raises(ValueError, match=r"BIREME_KERNELS='fast'.*reference"):
        kernels.for_device("cpu")


def test_both_sets_have_the_same_functions_which_take_the_same_arguments(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.delenv("BIREME_KERNELS", raising=False)
    compiled = kernels.for_device("cuda")
    assert sorted(reference.__all__) == sorted(compiled.__all__)
    for name in reference.__all__:
        expected = list(inspect.signature(getattr(reference, name)).parameters)
        found = inspect.signature(getattr(compiled, name)).parameters
        assert list(found)[: len(expected)] == expected, name
        assert all(found[extra].default is not inspect.Parameter.empty for extra in list(found)[len(expected) :]), name


def test_the_reference_finishes_a_block_in_one_piece():
    torch.manual_seed(0)
    x, weight = torch.randn(5, 12), torch.randn(8, 12)
    packed = reference.pack_linear_weight(weight)
    assert torch.equal(reference.linear_partials(x, packed), reference.linear(x, packed))
