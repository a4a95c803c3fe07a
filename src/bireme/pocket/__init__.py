"""The pocket model: a small Qwen3.5 shipped with the package, and the skills its answers are checked by."""

from pathlib import Path

MODEL_DIR = Path(__file__).parent / "model"
"""Directory of the shipped checkpoint (config, tokenizer, chat template, two bf16 shards and their index)."""

NAME = "pocket"
"""What stands for the shipped checkpoint wherever a model is asked for."""


def model_path() -> Path:
    """The folder of the shipped checkpoint."""
    return MODEL_DIR


def resolve(model: str | Path) -> str:
    """The checkpoint folder that ``model`` means: a string ``pocket`` is the shipped one, anything else itself.

    A folder of one's own that is called so is reached as ``./pocket``.
    """
    return str(MODEL_DIR) if model == NAME else str(model)
