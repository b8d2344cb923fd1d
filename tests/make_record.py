"""Write record.json anew: python tests/make_record.py. Only where the embedded models or what they are asked changed.

tokens and passes of every embedded drafter and some hybrids on questions and stretches of source, alone and as one
batch, and the losses of fifty steps of each trained kind. Made in float32 on two threads.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from test_record import RECORD_FILE, TRAINED, losses_of, settings_of

import selfspec
from selfspec.data.corpus import PythonSource
from selfspec.data.questions import Asking, read_questions

NAMES = (
    "tiny-medusa",
    "tiny-early-exit",
    "tiny-eagle3",
    "prompt_lookup",
    "lookahead",
    "tiny-medusa+prompt_lookup",
    "tiny-eagle3+prompt_lookup",
)
TEMPERATURES, NODES, NEW_TOKENS, SEED = (0.0, 0.7, 1.0), (8, 16), 40, 11


def main() -> None:
    torch.set_num_threads(2)
    spec = selfspec.load(NAMES[0], target="tiny-target", dtype="float32")
    source = PythonSource()
    asked = [
        read_questions(Asking(name, None, 8, 48), spec.tokenizer, source.evaluation)
        for name in ("instructions", "source")
    ]
    prompts = [question.opening(0, [], spec.tokenizer) for questions in asked for question in questions]
    record: dict[str, Any] = {"new_tokens": NEW_TOKENS, "dtype": "float32", "seed": SEED, "prompts": prompts}
    record |= {"tokens": {}, "passes": {}, "batch_passes": {}, "training": {}}
    for t in TEMPERATURES:
        alone = [
            spec.autoregressive([prompt], NEW_TOKENS, t, seed=SEED + i).token_ids[0] for i, prompt in enumerate(prompts)
        ]
        record["tokens"][str(t)] = alone
    for name in NAMES:
        spec = selfspec.load(name, target="tiny-target", dtype="float32")
        for t in TEMPERATURES:
            for nodes in NODES:
                results = [
                    spec.generate([prompt], NEW_TOKENS, **settings_of(t, SEED + i, nodes))
                    for i, prompt in enumerate(prompts)
                ]
                assert [r.token_ids[0] for r in results] == record["tokens"][str(t)], (name, t, nodes)
                seeds = [SEED + i for i in range(len(prompts))]
                together = spec.generate(prompts, NEW_TOKENS, t, seed=seeds, nodes=nodes).stats
                record["passes"][f"{name} {t} {nodes}"] = [r.stats.passes for r in results]
                record["batch_passes"][f"{name} {t} {nodes}"] = [together.passes, together.calls]
                print(name, t, nodes, sum(record["passes"][f"{name} {t} {nodes}"]), flush=True)
    for name in TRAINED:
        with tempfile.TemporaryDirectory() as folder:
            record["training"][name] = losses_of(name, Path(folder))
        print(name, record["training"][name][-1], flush=True)
    RECORD_FILE.write_text(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
