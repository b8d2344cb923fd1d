"""Whether random positions should be others in every epoch: python notebooks/experiments/epochs.py [block|mask]

Trains the same drafter twice on the same 60 rows of 256 tokens, with the positions of the first epoch for ever and with
others in each, and prints the loss on held-out rows and what a tree of 16 nodes promises.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from selfspec.checkpoints.load_target import load_target
from selfspec.core.options import end_tokens
from selfspec.data.cut_prompts import sample_prompts
from selfspec.data.instructions import Instructions
from selfspec.data.store import tokenize
from selfspec.data.windows import Packed
from selfspec.drafters.registry import build, config_class, drafter_class
from selfspec.training.calibrate import calibrate, write_samples
from selfspec.training.draft_loss import DraftLoss

ROWS, LENGTH, SIZE, STEPS = 60, 256, 4, 200
SETTINGS: dict[str, dict[str, Any]] = {"block": {"anchors": 16, "stack": 1}, "mask": {"anchors": 12}}


def main(kind: str) -> None:
    target, tokenizer = load_target("tiny-target", "float32", "cpu")
    assert tokenizer is not None
    data = Instructions(tokenizer=tokenizer, count=2500, held_out=200, ends=end_tokens(target))
    texts = [tokenize(part, tokenizer, data.template.prompt_end) for part in (data.train(), data.validation())]
    rows, held_out = Packed(texts[0], LENGTH, SIZE, 1), Packed(texts[1], LENGTH, 1, 0)
    rows.per_epoch = ROWS
    prompts = sample_prompts(texts[1], tokenizer, 24, 64, 64, target.max_positions)
    for fresh in (False, True):
        torch.manual_seed(1)
        cls = drafter_class(kind)
        drafter: Any = build(cls, target, config_class(cls)(**SETTINGS[kind]))
        module, optimizer = DraftLoss(drafter, target), torch.optim.AdamW(drafter.trained().values(), 1e-3)
        samples = write_samples(target, prompts, 64, 0.0, range(len(prompts)), drafter.reads, True)
        for step in range(STEPS):
            batch = rows.batch(step)
            module.train()(batch if fresh else {**batch, "epochs": 0 * batch["epochs"]})[0].backward()
            optimizer.step()
            optimizer.zero_grad()
            if (step + 1) % 50 == 0:
                module.eval()
                with torch.no_grad():
                    losses = [float(module(held_out.rows([i]))[0]) for i in range(min(24, held_out.per_epoch))]
                    tau = calibrate(target, drafter, "greedy", samples)["tau"]["16"]
                epochs = (step + 1) * SIZE / ROWS
                print(f"{kind}, fresh={fresh}, {epochs:.1f} epochs: {sum(losses) / len(losses):.2f}, τ {tau:.2f}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "block")
