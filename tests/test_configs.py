"""Every committed experiment composes, and runs for a few steps on a tiny model of the same architecture."""

import json
from pathlib import Path

import pytest
from conftest import compose_config, save_tiny

from selfspec.api import load
from selfspec.checkpoints.load_target import load_target
from selfspec.checkpoints.weights_hash import weights_hash
from selfspec.cli.training_runs import run_pretrain, run_training
from selfspec.training import pretrain, synthetic

ROOT = Path(__file__).parents[1]
EXPERIMENTS = sorted(p.stem for p in (ROOT / "configs" / "experiment").glob("*.yaml"))
QUICK = ("loop.steps=2", "loop.batch_size=2", "loop.accumulate=1", "loop.validate_every=2", "loop.compile=false")
QUICK_OWN = ("train.distill.rows=8", "train.distill.prompt_tokens=8", "train.distill.new_tokens=16")
QUICK_TRAIN = ("train.length=48", "train.prompts=2", "train.prompt_tokens=8", "train.new_tokens=8", *QUICK_OWN)


def is_pretrain(name: str) -> bool:
    return "\npretrain:" in (ROOT / "configs" / "experiment" / f"{name}.yaml").read_text()


FAST = ("tiny_medusa", "tiny_mask", "tiny_target")  # one of each shape; the others are longer checks


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in FAST)) for n in EXPERIMENTS])
def test_experiment_runs(name, tmp_path, source_root, tokenizer, tiny_folder, monkeypatch):
    if is_pretrain(name):
        layers = 6 if "layer_types" in (ROOT / "configs" / "experiment" / f"{name}.yaml").read_text() else 2
        shape = ("hidden_size=32", "intermediate_size=48", f"num_hidden_layers={layers}", "num_attention_heads=2")
        model = [f"pretrain.model.{s}" for s in (*shape, "num_key_value_heads=2", "vocab_size=320")]
        if compose_config("target", f"+experiment={name}").pretrain.tokenizer is not None:
            model.append(f"pretrain.tokenizer={tiny_folder}")
        small = [f"pretrain.instruct.{s}" for s in ("count=40", "length=96", "steps=2", "batch_size=2")]
        asked = [f"+experiment={name}", f"data.root={source_root}", "pretrain.length=64", *QUICK, *model, *small]
        config = compose_config("target", *asked)
        figures = run_pretrain(config, tmp_path / "run")
        assert figures["bits_per_byte"] > 0
        assert figures["answer_nats_per_token"] > 0
        target, found = load_target(str(tmp_path / "run" / "target"))
        assert target.n_layers == layers
        assert found.chat_template
        assert target.end_tokens == {found.bos_token_id, found.eos_token_id}
        first = load_target(str(tmp_path / "run" / "source" / "target"))[0]  # the first stage, to go on from
        again = compose_config("target", *asked, f"pretrain.init={tmp_path / 'run' / 'source' / 'target'}")
        run_pretrain(again, tmp_path / "again")
        assert weights_hash(load_target(str(tmp_path / "again" / "target"))[0].model) == weights_hash(target.model)
        assert weights_hash(first.model) != weights_hash(target.model)
        monkeypatch.setattr(pretrain, "train_tokenizer", None)  # what is there goes on with its own, whatever the texts
        run_pretrain(config, tmp_path / "run")
        return
    family = "qwen3" if name.startswith("qwen3") else "llama"
    target = save_tiny(tmp_path / "target", tokenizer, family)
    overrides = [f"+experiment={name}", f"target.name={target}", *QUICK, *QUICK_TRAIN]
    text = (ROOT / "configs" / "experiment" / f"{name}.yaml").read_text()
    if "data: jsonl" in text:
        overrides.append("train.distill.new_tokens=120")
        talks = [
            [{"role": "user", "content": f"{i}"}, {"role": "assistant", "content": "word " * 90}] for i in range(20)
        ]
        (tmp_path / "chat.jsonl").write_text("\n".join(json.dumps({"messages": talk}) for talk in talks))
        overrides.append(f"data.path={tmp_path / 'chat.jsonl'}")
    elif "data: synthetic" in text:
        monkeypatch.setattr(synthetic, "usable", lambda question, tokenizer: len(question) > 0)
        monkeypatch.setattr(synthetic, "_writer", lambda target, int8: target)  # not compiled
        target = save_tiny(tmp_path / "target", tokenizer, max_position_embeddings=512, num_hidden_layers=4)
        overrides += [
            f"data.folder={tmp_path / 'texts'}",
            "data.conversations=32",
            "data.batch=32",
            "data.int8=false",
            "data.edits=0",
        ]
        overrides += ["data.question_tokens=64", "data.new_tokens=64", "data.validation_share=0.4", "train.length=96"]
        overrides += ["train.distill.rows=0", "drafter.draft_vocab=64"]
    else:
        if "data: instructions" in text:
            overrides += ["data.count=20", "data.held_out=8", "train.distill.new_tokens=120"]
        overrides.append(f"data.root={source_root}")
    run_training(compose_config("train", *overrides), tmp_path / "run")
    assert len(load(str(tmp_path / "run")).generate(["def f():"], 5).token_ids[0]) == 5


def test_debug_config_composes():
    for name in (p.stem for p in (ROOT / "configs" / "debug").glob("*.yaml")):
        assert compose_config("train", "+experiment=tiny_medusa", f"+debug={name}").loop.steps <= 10
