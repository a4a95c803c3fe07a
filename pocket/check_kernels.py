"""Compares the GPU kernels that training uses with the plain references, in loss and in every gradient.

    python pocket/check_kernels.py

Exits with an error if a gradient is further off than bf16 explains.
"""

from __future__ import annotations

import copy
import sys

import torch
from corpus import MODEL_DIR, TRAINED, Packer
from forward import PackedModel
from tokenizers import Tokenizer
from torch import Tensor
from train import new_model

LIMIT = 0.1


def main() -> int:
    torch.manual_seed(0)
    device = torch.device("cuda")
    model, predictor = new_model(device)
    packer = Packer(Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json")), 1024, 256, seed=0)
    batch = packer.pack([float(skill != "recall") for skill in TRAINED])
    losses, gradients = [], []
    for reference in (True, False):
        pair = copy.deepcopy(model), copy.deepcopy(predictor)
        packed = PackedModel(*pair, device, compiles=False, reference=reference)
        loss, other = packed.losses(packed.row(batch), with_predictor=True)
        (loss + other).backward()
        losses.append((loss.item(), other.item()))
        named = [*pair[0].named_parameters(), *pair[1].named_parameters()]
        gradients.append({n: p.grad for n, p in named if p.grad is not None})

    def error(name: str) -> float:
        expected, found = (g[name] for g in gradients)
        return float(distance(found, expected))

    errors = sorted(((error(n), n) for n in gradients[0]), reverse=True)
    print("losses, reference and kernels:", losses)
    for value, name in errors[:16]:
        print(f"{value:.4f} {name}")
    return int(not errors[0][0] < LIMIT)


def distance(found: Tensor, expected: Tensor) -> Tensor:
    """Norm of the difference over the norm of what is expected."""
    return (found - expected).norm() / expected.norm()


if __name__ == "__main__":
    sys.exit(main())
