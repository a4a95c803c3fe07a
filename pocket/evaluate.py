"""Evaluates a pocket checkpoint with transformers: greedy answers to unseen cases, checked exactly.

    python pocket/evaluate.py [--per-skill 40] [--model DIR]

The bf16 checkpoint is loaded in float32. Prints a table by skill (recall by distance), and the share of drafts of the
multi-token predictor that the model would accept.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import torch
from corpus import MODEL_DIR
from forward import MultiTokenPredictor
from safetensors.torch import load_file
from transformers import AutoTokenizer, Qwen3_5ForCausalLM
from transformers.masking_utils import create_causal_mask

from bireme.pocket.skills import Case, eval_cases


def batches(cases: list[Case], lengths: list[int], size: int, tokens: int) -> Iterator[list[int]]:
    """Indices of cases in batches of similar prompt length: at most ``size`` rows and ``tokens`` padded tokens."""
    order = sorted(range(len(cases)), key=lengths.__getitem__)
    batch: list[int] = []
    for i in order:
        if batch and (len(batch) == size or (len(batch) + 1) * lengths[i] > tokens):
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


def load_predictor(model: Qwen3_5ForCausalLM, directory: Path) -> MultiTokenPredictor:
    """The checkpoint's ``mtp.*`` tensors as a module; none may be missing or left over."""
    tensors = {}
    for shard in sorted(directory.glob("model-*.safetensors")):
        tensors.update(load_file(shard))
    predictor = MultiTokenPredictor(model.config).float().to(model.device)
    predictor.load_state_dict({n.removeprefix("mtp."): t.float() for n, t in tensors.items() if n.startswith("mtp.")})
    return predictor


@torch.no_grad()
def drafts_accepted(
    model: Qwen3_5ForCausalLM, predictor: MultiTokenPredictor, ids: list[int], prompt: int
) -> tuple[int, int]:
    """How many of the generated tokens of ``ids`` the predictor drafts as the model chooses them, and of how many."""
    tokens = torch.tensor([ids], device=model.device)
    hidden = model.model(input_ids=tokens, use_cache=False).last_hidden_state
    following = model.model.embed_tokens(tokens[:, 1:])
    x = torch.cat([predictor.pre_fc_norm_embedding(following), predictor.pre_fc_norm_hidden(hidden[:, :-1])], dim=-1)
    x = predictor.fc(x)
    places = torch.arange(x.shape[1], device=x.device)[None]
    mask = create_causal_mask(
        config=model.config, inputs_embeds=x, attention_mask=None, past_key_values=None, position_ids=places
    )
    angles = model.model.rotary_emb(x, places.expand(3, 1, -1))
    x = predictor.layers[0](x, position_embeddings=angles, attention_mask=mask)
    drafts = model.lm_head(predictor.norm(x)).argmax(-1)[0]  # drafts[t] is about ids[t + 2]
    chosen = model.lm_head(hidden[0, 1:]).argmax(-1)  # chosen[t] is the model's token for ids[t + 2]
    first = max(prompt - 2, 0)
    return int((drafts[first:-1] == chosen[first:-1]).sum()), len(drafts[first:-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default=str(MODEL_DIR))
    parser.add_argument("--per-skill", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--batch-tokens", type=int, default=32768)
    parser.add_argument("--drafts", type=int, default=5, help="cases of each skill whose drafts are compared")
    parser.add_argument("--skills", nargs="*", help="only these")
    parser.add_argument("--show", type=int, default=3, help="wrong answers to print for each skill")
    parser.add_argument("--json", help="also write the results here")
    args = parser.parse_args()

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    model = Qwen3_5ForCausalLM.from_pretrained(args.model, dtype=torch.float32).to(device).eval()
    predictor = load_predictor(model, Path(args.model))
    cases = eval_cases(args.per_skill, args.seed, **({"skills": args.skills} if args.skills else {}))
    prompts = [
        tokenizer.apply_chat_template(
            c.messages, tools=c.tools, enable_thinking=c.enable_thinking, add_generation_prompt=True, tokenize=False
        )
        for c in cases
    ]
    lengths = [len(ids) for ids in tokenizer(prompts, add_special_tokens=False).input_ids]
    rows: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    wrong: dict[str, list[tuple[Case, str]]] = defaultdict(list)
    drafted: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for batch in batches(cases, lengths, args.batch, args.batch_tokens):
        start = time.monotonic()
        inputs = tokenizer([prompts[i] for i in batch], padding=True, add_special_tokens=False, return_tensors="pt")
        inputs = inputs.to(device)
        limit = max(cases[i].max_tokens for i in batch)
        out = model.generate(**inputs, max_new_tokens=limit, do_sample=False)[:, inputs.input_ids.shape[1] :].tolist()
        seconds = (time.monotonic() - start) / len(batch)
        for i, ids in zip(batch, out, strict=True):
            case = cases[i]
            stop = next((n for n, t in enumerate(ids) if t == tokenizer.eos_token_id), None)
            text = tokenizer.decode(ids[:stop], skip_special_tokens=False)
            right = stop is not None and case.check(text)
            row = rows[case.group]
            row["cases"] += 1
            row["right"] += right
            row["tokens"] += len(ids[:stop])
            row["seconds"] += seconds
            if not right:
                wrong[case.group].append((case, text))
            if drafted[case.group][0] < args.drafts and stop is not None:
                prompt = tokenizer(prompts[i], add_special_tokens=False).input_ids
                hit, total = drafts_accepted(model, predictor, prompt + ids[: stop + 1], len(prompt))
                counts = drafted[case.group]
                drafted[case.group] = [counts[0] + 1, counts[1] + hit, counts[2] + total]

    print(f"{'skill':<14} {'right':>7} {'cases':>6} {'%':>6} {'tokens':>7} {'s/case':>7} {'drafts %':>9}")
    for group in dict.fromkeys(c.group for c in cases):
        row = rows[group]
        _, hit, total = drafted[group]
        row["drafts"], row["accepted"] = total, hit
        count = row["cases"]
        print(
            f"{group:<14} {row['right']:>7.0f} {count:>6.0f} {100 * row['right'] / count:>6.1f}"
            f" {row['tokens'] / count:>7.1f} {row['seconds'] / count:>7.2f} {100 * hit / max(total, 1):>9.1f}"
        )
    right, count = (sum(r[k] for r in rows.values()) for k in ("right", "cases"))
    hit, total = (sum(r[k] for r in rows.values()) for k in ("accepted", "drafts"))
    print(f"{'overall':<14} {right:>7.0f} {count:>6.0f} {100 * right / count:>6.1f} {'':>15} {100 * hit / total:>9.1f}")
    for items in wrong.values():
        for case, text in items[: args.show]:
            print(
                f"--- {case.group}: {case.messages[-1]['content'][-300:]!r}\n  want {case.expected!r}\n  got  {text!r}"
            )
    if args.json:
        Path(args.json).write_text(json.dumps({g: dict(r) for g, r in rows.items()}, indent=2) + "\n")


if __name__ == "__main__":
    main()
