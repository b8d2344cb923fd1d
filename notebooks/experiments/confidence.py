"""What DSpark's confidence head brings a tree: `tiny-block` with a head that is trained alone, beside itself.

    python notebooks/experiments/confidence.py     # fifteen minutes on one core

The head learns from the target's own answers to 384 questions at T=0 and T=1, for 150 steps; the stack stays as it is,
so that only the order differs in which nodes are taken. Both arms then draft for the same 60 questions that nobody
trained on, up to 96 tokens each; tokens a pass, pooled, with and without the head's factor.
"""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch

import selfspec
from selfspec.api import Spec
from selfspec.core.generate import autoregressive, speculative
from selfspec.core.options import Options, end_tokens
from selfspec.core.sampling import Sampling
from selfspec.data.corpus import PythonSource
from selfspec.data.instructions import instructions
from selfspec.data.tasks import TASKS, pool
from selfspec.drafters.base import Batch
from selfspec.drafters.block import BlockDrafter

TRAINED, STEPS, ROWS, ASKED, NEW = 384, 150, 16, 60, 96


def questions(spec: Spec, split: str, count: int) -> list[list[int]]:
    source = PythonSource(None)
    documents = source.train() if split == "train" else source.evaluation()
    asked = instructions(pool(documents, split), list(TASKS), count, seed=11)
    turns = [[{"role": "user", "content": one.turns[0].question}] for one in asked]
    return [spec.tokenizer.apply_chat_template(turn, add_generation_prompt=True)["input_ids"] for turn in turns]


def rows(spec: Spec, prompts: list[list[int]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(tokens, mask) of conversations, half of them greedy, answers counted."""
    found = []
    for i in range(0, len(prompts), ROWS):
        part = prompts[i : i + ROWS]
        options = Options(NEW, Sampling(float(i // ROWS % 2)), i, end_tokens(spec.target))
        for prompt, answer in zip(part, autoregressive(spec.target, part, options).token_ids, strict=True):
            counted = [False] * len(prompt) + [True] * len(answer)
            found.append((torch.tensor(prompt + answer), torch.tensor(counted)))
    return found


def with_head(spec: Spec) -> BlockDrafter:
    """The same drafter with a head that was trained on the target's answers."""
    plain = cast(BlockDrafter, spec.drafter)
    drafter = BlockDrafter(spec.target, replace(plain.config, confidence="parents"))
    saved = plain.trained()
    with torch.no_grad():
        for name, p in drafter.trained().items():
            if name in saved:
                p.copy_(saved[name])
    drafter.calibration = plain.calibration
    data = rows(spec, questions(spec, "train", TRAINED))
    optimizer = torch.optim.AdamW(drafter.confidence.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(0)
    drafter.train()
    for step in range(STEPS):
        chosen = [data[int(i)] for i in torch.randint(0, len(data), (ROWS,), generator=generator)]
        tokens, mask = (
            torch.nn.utils.rnn.pad_sequence(list(part), batch_first=True) for part in zip(*chosen, strict=True)
        )
        with torch.no_grad():
            out = spec.target.text(tokens, reads=drafter.reads)
        features = {layer: states.clone() for layer, states in out.features.items()}
        assert out.logits is not None
        batch = Batch(tokens, mask, out.hidden.clone(), out.logits.clone(), features, None)
        loss, told = drafter.loss(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 25 == 0:
            print(f"step {step}: {', '.join(f'{value:.3f}' for value in told['confidence'].tolist())} nats", flush=True)
    return drafter.eval()


def main() -> None:
    spec = selfspec.load("tiny-block", dtype="float32", engine="eager")
    arms = {"without": cast(BlockDrafter, spec.drafter), "with": with_head(spec)}
    asked = questions(spec, "evaluation", ASKED)
    print("| T | nodes | without | with the head |\n|---|---|---|---|")
    for temperature in (0.0, 0.7, 1.0):
        for nodes in (8, 16, 32):
            columns = []
            for drafter in arms.values():
                tokens = calls = 0
                for seed, prompt in enumerate(asked):
                    options = Options(NEW, Sampling(temperature), seed, end_tokens(spec.target))
                    result = speculative(spec.target, [prompt], options, drafter, nodes)
                    tokens, calls = tokens + len(result.token_ids[0]), calls + result.stats.calls
                columns.append(f"{tokens / calls:.3f}")
            print(f"| {temperature:g} | {nodes} | {' | '.join(columns)} |", flush=True)


if __name__ == "__main__":
    main()
