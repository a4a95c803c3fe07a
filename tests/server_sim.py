"""The simulated engine of the server's tests, and the process that serves it (kept light: many processes load it).

The simulated model is obedient: it says what stands between ``<|say|>`` and ``<|said|>`` in its prompt, then ends.
Without these it repeats its prompt for ever.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bireme.config import (
    FULL_ATTENTION,
    LINEAR_ATTENTION,
    CacheCapacity,
    EngineConfig,
    GenerationDefaults,
    ModelConfig,
    SchedulerConfig,
)
from bireme.errors import CheckpointError
from bireme.sim import SimExecutor, sim_capacity
from bireme.types import StepOutput

VOCAB_SIZE = 640
"""More than the tokenizer has, as in real checkpoints."""


@functools.cache
def _ids(folder: str) -> tuple[int, int, int]:
    added = json.loads((Path(folder) / "tokenizer.json").read_text())["added_tokens"]
    ids = {token["content"]: token["id"] for token in added}
    return ids["<|say|>"], ids["<|said|>"], ids["<|im_end|>"]


def obey(prompt: Sequence[int], position: int, *, say: int, said: int, eos: int) -> int:
    """The model's next token (see above)."""
    if say not in prompt:
        return prompt[position % len(prompt)]
    start = len(prompt) - 1 - prompt[::-1].index(say) + 1
    words = prompt[start : prompt.index(said, start)]
    return words[position] if position < len(words) else eos


class StoppableExecutor(SimExecutor):
    """Fails when the file ``trip`` appears, as an executor whose rank has died; ``exit`` in it ends the process."""

    def __init__(self, capacity: CacheCapacity, trip: str, **options: Any) -> None:
        super().__init__(capacity, **options)
        self._trip = Path(trip)

    def collect(self) -> StepOutput:
        self._look()
        return super().collect()

    def check(self) -> None:
        self._look()
        super().check()

    def _look(self) -> None:
        if not self._trip.exists():
            return
        how = self._trip.read_text()
        if how == "exit":
            os._exit(9)
        if how == "defect":
            raise RuntimeError("a defect in the loop")
        self._fail("rank 1 died")


def make_executor(
    config: EngineConfig,
    *,
    num_slots: int = 64,
    num_blocks: int = 4096,
    step_seconds: float = 0.0,
    depth: int = 1,
    trip: str = "/nonexistent",
    load_seconds: float = 0.0,
    failure: str = "",
) -> SimExecutor:
    """An executor factory; bind the options with ``functools.partial``."""
    time.sleep(load_seconds)
    if failure == "checkpoint":
        raise CheckpointError("model.safetensors: tensor 'norm.weight' is missing")
    if failure == "defect":
        raise ZeroDivisionError("a defect while loading")
    say, said, eos = _ids(config.model_path)
    return StoppableExecutor(
        sim_capacity(num_slots=num_slots, num_blocks=num_blocks, max_model_len=2048),
        trip,
        script=functools.partial(obey, say=say, said=said, eos=eos),
        step_seconds=step_seconds,
        depth=depth,
    )


def make_config(folder: Path, *, max_waiting: int = 4096, max_num_seqs: int = 64) -> EngineConfig:
    """An engine configuration whose model is only simulated."""
    eos = _ids(str(folder))[2]
    return EngineConfig(
        model_path=str(folder),
        model=ModelConfig(
            model_type="qwen3_5_text",
            vocab_size=VOCAB_SIZE,
            hidden_size=64,
            intermediate_size=64,
            layer_types=(LINEAR_ATTENTION, FULL_ATTENTION),
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=32,
            rotary_dim=8,
            rope_theta=10000.0,
            linear_num_key_heads=2,
            linear_num_value_heads=2,
            linear_key_head_dim=16,
            linear_value_head_dim=16,
            linear_conv_kernel_dim=4,
            rms_norm_eps=1e-6,
            tie_word_embeddings=True,
            max_position_embeddings=2048,
            eos_token_ids=(eos,),
        ),
        generation=GenerationDefaults(temperature=0.7, top_k=20),
        scheduler=SchedulerConfig(
            max_num_seqs=max_num_seqs, max_num_batched_tokens=512, max_model_len=2048, max_waiting=max_waiting
        ),
    )


def main() -> None:
    """The server process."""
    from bireme.server.serve import run_server
    from bireme.server.settings import ServerSettings

    folder, options, settings = Path(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3])
    limits = {name: options.pop(name) for name in ("max_waiting", "max_num_seqs") if name in options}
    names = tuple(settings.pop("served_model_names", ["tiny", "tiny-alias"]))
    sys.exit(
        run_server(
            make_config(folder, **limits),
            ServerSettings(served_model_names=names, port=0, **settings),
            executor_factory=functools.partial(make_executor, **options),
        )
    )


if __name__ == "__main__":
    # Spawned children import this module by name, so what is pickled must belong to that name.
    sys.path.insert(0, str(Path(__file__).parent))
    import server_sim

    server_sim.main()
