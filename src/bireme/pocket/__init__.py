"""The pocket model: a small Qwen3.5 shipped with the package, and the skills its answers are checked by."""

from pathlib import Path

MODEL_DIR = Path(__file__).parent / "model"
"""Directory of the shipped checkpoint (config, tokenizer, chat template, two bf16 shards and their index)."""
