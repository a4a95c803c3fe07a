"""Trains the pocket model on one GPU by wall-clock time, and writes the shipped checkpoint.

    python pocket/train.py --minutes 12

Generator processes stream the corpus while the GPU trains, so there is no data set to prepare. Every 40 seconds the
dev split is scored by one forward pass a case (an answer is right if every one of its tokens is the greedy choice),
progress is printed and logged as a JSON line, and skills that are not yet learned get a larger share of the corpus.
``--stop-after`` ends a call early with a state file from which ``--state`` resumes.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing as mp
import os
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import numpy as np
import torch
from corpus import BASE_WEIGHTS, MODEL_DIR, ROOT, TRAINED, Batch, Renderer, encode, lay_out, worker
from forward import MultiTokenPredictor, PackedModel
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from bireme.pocket.skills import SKILLS, eval_cases


def model_config() -> Qwen3_5TextConfig:
    """The shipped geometry: divides by 1, 2 and 4 ranks (the two kv heads replicate at 4)."""
    return Qwen3_5TextConfig(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=128,
        linear_conv_kernel_dim=4,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10_000_000,
            "partial_rotary_factor": 0.25,
            "mrope_section": [6, 5, 5],
            "mrope_interleaved": True,
        },
        pad_token_id=4087,
        eos_token_id=4089,
        mtp_num_hidden_layers=1,
        dtype="bfloat16",
    )


@torch.no_grad()
def new_model(device: torch.device) -> tuple[Qwen3_5ForCausalLM, MultiTokenPredictor]:
    """A fresh model and predictor in float32. Linear layers start with memories of ten to a thousand tokens."""
    model = Qwen3_5ForCausalLM(model_config()).float()
    for layer in model.model.layers:
        if hasattr(layer, "linear_attn"):
            m = layer.linear_attn
            m.A_log.uniform_(1, 16).log_()
            step = torch.empty_like(m.dt_bias).uniform_(math.log(0.001), math.log(0.1)).exp()
            m.dt_bias.copy_(step.expm1().log())  # the inverse of softplus
    return model.to(device), MultiTokenPredictor(model.config).float().to(device)


class Muon:
    """Momentum with orthogonalised updates for matrices; matrices of one shape are updated together."""

    def __init__(self, matrices: list[nn.Parameter], momentum: float = 0.95, decay: float = 0.01) -> None:
        self.momentum, self.decay = momentum, decay
        groups: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
        for matrix in matrices:
            groups[matrix.shape].append(matrix)
        self.groups = list(groups.values())
        self.buffers = [torch.zeros(len(g), *g[0].shape, device=g[0].device) for g in self.groups]

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """One update; matrices without a gradient stay as they are."""
        for group, buffer in zip(self.groups, self.buffers, strict=True):
            zero = torch.zeros_like(group[0])
            grads = torch.stack([zero if p.grad is None else p.grad for p in group])
            buffer.lerp_(grads, 1 - self.momentum)
            update = _orthogonal(grads.lerp_(buffer, self.momentum))
            rows, columns = group[0].shape
            scale = rate * max(1.0, rows / columns) ** 0.5
            idle = [p.grad is None for p in group]
            for p, u, skip in zip(group, update, idle, strict=True):
                if not skip:
                    p.mul_(1 - rate * self.decay).sub_(u, alpha=scale)


def _orthogonal(x: Tensor) -> Tensor:
    """Nearest semi-orthogonal matrices [B, R, C], roughly, by five Newton-Schulz steps of a quintic polynomial."""
    flip = x.shape[1] > x.shape[2]
    y = (x.mT if flip else x).to(torch.bfloat16 if x.is_cuda else torch.float32)
    y = y / (y.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = y @ y.mT
        y = 3.4445 * y + (-4.7750 * gram + 2.0315 * gram @ gram) @ y
    return (y.mT if flip else y).float()


class Trainer:
    """Model, predictor, optimisers and the time that has been spent."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        torch.manual_seed(args.seed)
        self.tokenizer = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
        self.model, self.predictor = new_model(self.device)
        config = self.model.config
        if (config.pad_token_id, config.eos_token_id) != tuple(
            self.tokenizer.token_to_id(t) for t in ("<|endoftext|>", "<|im_end|>")
        ):
            raise RuntimeError("the configuration's token ids are not the tokenizer's")
        self.packed = PackedModel(self.model, self.predictor, self.device)
        named = {**dict(self.model.named_parameters()), **{f"mtp.{n}": p for n, p in self.predictor.named_parameters()}}
        self.named = {n: p for n, p in named.items() if n != "lm_head.weight"}
        small = ("embed_tokens", "in_proj_a", "in_proj_b", "conv1d")
        matrices = [p for n, p in self.named.items() if p.ndim == 2 and not any(s in n for s in small)]
        taken = {id(p) for p in matrices}
        self.muon = Muon(matrices)
        self.adam = torch.optim.AdamW(
            [p for p in self.named.values() if id(p) not in taken],
            lr=args.adam_rate, betas=(0.9, 0.98), weight_decay=0.0, fused=self.device.type == "cuda",
        )  # fmt: skip
        self.step = self.tokens = 0
        self.elapsed = 0.0
        self.weights = mp.Array("d", [BASE_WEIGHTS[s] for s in TRAINED], lock=False)
        self.log: list[dict[str, Any]] = []
        cases = eval_cases(args.dev_cases, seed=1, split="dev")
        self.dev = self._pack_cases(cases)
        self.started = time.monotonic()

    def _pack_cases(self, cases: list) -> list[tuple[Batch, list]]:
        """Batches of dev cases, with the case of every document."""
        pairs = list(zip(cases, encode(self.tokenizer, Renderer(), cases), strict=True))
        pairs = [(c, d) for c, d in pairs if len(d[0]) + len(d[1]) <= self.args.tokens]
        cases, documents = [c for c, _ in pairs], [d for _, d in pairs]
        batches, noise = [], np.random.default_rng(0)
        while documents:
            batch = lay_out(documents, self.args.tokens, self.args.tokens // 4, self.model.config.pad_token_id, noise)
            batches.append((batch, cases[len(documents) : len(documents) + len(batch.spans)][::-1]))
        return batches

    def save_state(self) -> None:
        """Everything that resuming needs."""
        torch.save(
            {
                "named": {n: p.data for n, p in self.named.items()},
                "muon": self.muon.buffers,
                "adam": self.adam.state_dict(),
                "progress": (self.step, self.tokens, self.elapsed, list(self.weights), self.log),
            },
            self.args.state,
        )

    def load_state(self) -> None:
        state = torch.load(self.args.state, map_location=self.device, weights_only=False)
        for name, parameter in self.named.items():
            parameter.data.copy_(state["named"][name])
        self.muon.buffers = state["muon"]
        self.adam.load_state_dict(state["adam"])
        self.step, self.tokens, self.elapsed, self.weights[:], self.log = state["progress"]

    def score(self) -> dict[str, float]:
        """Share of dev cases whose whole answer is the greedy choice, by group; and the predictor's acceptance."""
        right: dict[str, list[bool]] = defaultdict(list)
        accepted = drafted = 0
        for batch, cases in self.dev:
            row = self.packed.row(batch)
            tokens = row.tokens.cpu()
            model, predictor = (t.cpu() for t in self.packed.choices(row))
            for (first, last), case in zip(batch.spans, cases, strict=True):
                right[case.group].append(bool((model[first:last] == tokens[first + 1 : last + 1]).all()))
                accepted += int((predictor[first - 1 : last - 1] == model[first:last]).sum())
                drafted += last - first
        return {**{g: round(sum(r) / len(r), 4) for g, r in right.items()}, "mtp": round(accepted / drafted, 4)}

    def rebalance(self, scores: dict[str, float]) -> None:
        """Gives skills that are not yet learned a larger share of the corpus."""
        for i, skill in enumerate(TRAINED):
            groups = [s for g, s in scores.items() if g.split("@")[0] == skill]
            if groups:
                mean = 0.5 * (sum(groups) / len(groups) + min(groups))
                self.weights[i] = BASE_WEIGHTS[skill] * (0.25 + 1.25 * min(1.0, 5 * (1 - mean)))

    def rate(self) -> float:
        """Share of the full learning rate: short warm-up, constant, then linear to zero."""
        done = self.elapsed / (60 * self.args.minutes)
        return min(1.0, (self.step + 1) / 200, max(0.0, (1 - done) / self.args.decay_share))

    def train(self) -> None:
        """Trains until the time is over, or ``--stop-after`` minutes of this call."""
        args = self.args
        context = mp.get_context("spawn")
        queue = context.Queue(maxsize=args.workers * 2)
        shared = context.Array("d", list(self.weights), lock=False)
        self.weights = shared
        processes = []
        for i in range(args.workers):
            seed = args.seed + 1000 * (self.step + 1) + i
            generator = (str(MODEL_DIR / "tokenizer.json"), args.tokens, args.tokens // 4, seed, shared, queue)
            process = context.Process(target=worker, args=generator, daemon=True)
            process.start()
            processes.append(process)
        last_score = mark = None
        losses: list[Tensor] = []
        while self.step < args.max_steps:
            row = self.packed.row(batch := queue.get())
            with_predictor = self.elapsed >= args.predictor_from * 60 * args.minutes
            loss, predictor_loss = self.packed.losses(row, with_predictor)
            (loss if predictor_loss is None else loss + predictor_loss).backward()
            rate = self.rate()
            for group in self.adam.param_groups:
                group["lr"] = args.adam_rate * rate
            self.adam.step()
            self.muon.step(args.muon_rate * rate)
            for parameter in self.named.values():
                parameter.grad = None
            losses.append(
                torch.stack([loss.detach(), loss.detach() * 0 if predictor_loss is None else predictor_loss.detach()])
            )
            self.step += 1
            self.tokens += batch.used
            if mark is None:  # the first step compiles; the clock of training starts after it
                torch.cuda.synchronize() if self.device.type == "cuda" else None
                mark = last_score = last_log = time.monotonic()
                print(f"first step after {mark - self.started:.0f} s", flush=True)
                spent, at_tokens = self.elapsed, self.tokens
            now = time.monotonic()
            self.elapsed = spent + now - mark
            over = self.elapsed >= 60 * args.minutes or now - self.started >= 60 * args.stop_after
            if self.step % args.log_every == 0 or over:
                mean = torch.stack(losses).mean(0).tolist()  # waits for the GPU
                losses.clear()
                now = time.monotonic()
                entry: dict[str, Any] = {
                    "step": self.step, "seconds": round(self.elapsed, 1), "tokens": self.tokens,
                    "loss": round(mean[0], 4), "rate": round(rate, 4), "waiting": queue.qsize(),
                    "tokens_per_s": round((self.tokens - at_tokens) / max(now - last_log, 1e-3)),
                }  # fmt: skip
                if with_predictor:
                    entry["mtp_loss"] = round(mean[1], 4)
                last_log, at_tokens = now, self.tokens
                if over or now - last_score >= args.score_every:
                    entry["dev"] = self.score()
                    self.rebalance(entry["dev"])
                    self.save(Path(args.out))
                    last_score = time.monotonic()
                self.log.append(entry)
                print(json.dumps(entry), flush=True)
            if over:
                break
        for process in processes:
            process.terminate()
        if args.state:
            self.save_state()
        self.save(Path(args.out))
        write_log(self.log, Path(args.log), Path(args.plot))

    def save(self, directory: Path) -> None:
        """Writes config and two bf16 shards with their index; A_log stays float32, as in the real checkpoints."""
        directory.mkdir(parents=True, exist_ok=True)
        tensors = {
            n: p.detach().to("cpu", torch.float32 if n.endswith("A_log") else torch.bfloat16).contiguous()
            for n, p in self.named.items()
        }
        save_shards(tensors, directory)
        self.model.config.architectures = ["Qwen3_5ForCausalLM"]
        self.model.config.save_pretrained(directory)
        generation = {"do_sample": False, "eos_token_id": [4089, 4087], "pad_token_id": 4087}
        (directory / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def save_shards(tensors: dict[str, Tensor], directory: Path, shards: int = 2) -> None:
    """Writes ``tensors`` in order as shards of about equal size, and the index that names the shard of each."""
    sizes = {n: t.numel() * t.element_size() for n, t in tensors.items()}
    total, seen = sum(sizes.values()), 0
    parts: list[dict[str, Tensor]] = [{} for _ in range(shards)]
    where = {}
    for name, tensor in tensors.items():
        part = min(shards - 1, seen * shards // total)
        parts[part][name] = tensor
        where[name] = f"model-{part + 1:05d}-of-{shards:05d}.safetensors"
        seen += sizes[name]
    for part, content in enumerate(parts):
        save_file(content, directory / f"model-{part + 1:05d}-of-{shards:05d}.safetensors", metadata={"format": "pt"})
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def write_log(log: list[dict[str, Any]], path: Path, plot: Path) -> None:
    """Writes the log as JSON lines, and a plot of it where matplotlib is installed."""
    path.write_text("".join(json.dumps(entry) + "\n" for entry in log))
    try:
        import matplotlib
    except ImportError:
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 5))
    minutes = [e["seconds"] / 60 for e in log]
    left.plot(minutes, [e["loss"] for e in log], label="model")
    drafted = [e for e in log if "mtp_loss" in e]
    left.plot([e["seconds"] / 60 for e in drafted], [e["mtp_loss"] for e in drafted], label="multi-token predictor")
    left.set(xlabel="minutes", ylabel="loss", yscale="log", title="Training loss")
    left.legend()
    scored = [e for e in log if "dev" in e]
    for i, group in enumerate(scored[-1]["dev"] if scored else []):
        points = [100 * e["dev"][group] for e in scored]
        right.plot([e["seconds"] / 60 for e in scored], points, "-" if i < 10 else "--", label=group)
    right.set(xlabel="minutes", ylabel="whole answers right, %", title="Dev split (mtp: drafts accepted)")
    right.legend(fontsize=7, ncols=2)
    figure.tight_layout()
    figure.savefig(plot, dpi=80)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--minutes", type=float, default=12.0, help="training time in all (after compilation)")
    add("--stop-after", type=float, default=float("inf"), help="end this call after so many minutes, start included")
    add("--state", default="", help="file to resume from if it exists, and to write at the end")
    add("--out", default=str(MODEL_DIR), help="directory of the checkpoint")
    add("--log", default=str(Path(__file__).parent / "training_log.jsonl"))
    add("--plot", default=str(ROOT / "docs" / "pocket-training.png"))
    add("--tokens", type=int, default=65536, help="tokens a step")
    add("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 3))
    add("--muon-rate", type=float, default=0.02)
    add("--adam-rate", type=float, default=0.002)
    add("--decay-share", type=float, default=0.5, help="share of the time in which the rate falls to zero")
    add("--predictor-from", type=float, default=0.5, help="share of the time after which the predictor is trained")
    add("--dev-cases", type=int, default=64, help="dev cases of each skill")
    add("--score-every", type=float, default=40.0, help="seconds between scorings")
    add("--log-every", type=int, default=50)
    add("--max-steps", type=int, default=1 << 40)
    add("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    trainer = Trainer(args)
    if args.state and Path(args.state).exists():
        trainer.load_state()
    trainer.train()
    final = next((e["dev"] for e in reversed(trainer.log) if "dev" in e), {})
    print(" ".join(f"{g} {final[g]:.3f}" for s in SKILLS for g in final if g.split("@")[0] == s), flush=True)
    os._exit(0)  # generators may be blocked on a full queue


if __name__ == "__main__":
    main()
