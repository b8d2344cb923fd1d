import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import compose_config, made, refused, write_lines
from omegaconf import OmegaConf
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from selfspec.checkpoints.drafter_folder import load_drafter
from selfspec.checkpoints.load_target import load_target
from selfspec.checkpoints.weights_hash import weights_hash
from selfspec.cli.training_runs import run_check, run_distill, run_training
from selfspec.core.generate import autoregressive
from selfspec.core.options import Options
from selfspec.core.sampling import Sampling
from selfspec.core.target import Target
from selfspec.data.corpus import Document
from selfspec.data.store import joined, tokenize
from selfspec.drafters.medusa import Medusa
from selfspec.drafters.parts.losses import decayed, masked_mean
from selfspec.training import checkpoint as state_module
from selfspec.training import hidden as hidden_module
from selfspec.training import shard
from selfspec.training import train_drafter as drafter_module
from selfspec.training.checkpoint import Checkpoint
from selfspec.training.distill import DistillConfig, distill
from selfspec.training.draft_loss import DraftLoss
from selfspec.training.drafter_data import DrafterTraining, validation_rows
from selfspec.training.hidden import HiddenStates
from selfspec.training.loop_config import LoopConfig
from selfspec.training.resources import memory_line
from selfspec.utils.files import atomic

SMALL = ["drafter.heads=3", "drafter.rank=4", "train.length=48", "train.prompts=4", "train.prompt_tokens=8"]
SMALL += ["train.new_tokens=16", "train.validation_rows=4", "train.lr=0.01", "loop.batch_size=4", "loop.log_every=1"]
SMALL += ["loop.precision=no", "loop.warmup=1"]


def small(name: str, target: str, source: Path, *overrides: str) -> Any:
    """A short training. What SMALL says of Medusa or of the data's root goes where `overrides` name others."""
    other = {word.partition("=")[0] for word in overrides}
    settings = [f"data.root={source}", *SMALL]
    settings = [one for one in settings if one.partition(".")[0] not in other]
    return compose_config("train", f"name={name}", f"target.name={target}", *settings, *overrides)


@pytest.fixture
def train(tiny_folder, source_root, tmp_path) -> Any:
    """Runs a short training in a folder of this name."""

    def run(folder: str, *overrides: str) -> dict[str, Any]:
        return run_training(small("x", tiny_folder, source_root, *overrides), tmp_path / folder)

    return run


def logged(folder: Path, kind: str) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    return [record for record in records if kind in record]


def test_masked_mean_ignores_what_is_masked():
    values, mask = torch.tensor([[1.0, 5.0], [2.0, 9.0]]), torch.tensor([[True, True], [True, False]])
    means = masked_mean(values, mask)
    assert [part.tolist() for part in means] == [[3.0, 2.0], [2.0, 1.0]]
    empty = masked_mean(values, torch.tensor([[False, False], [True, False]]))
    assert [part.tolist() for part in empty] == [[0.0, 2.0], [0.0, 1.0]]
    loss, figures = decayed("kl", empty, 0.5)  # a depth without any position weighs nothing, and has no figure
    assert loss.item() == 2.0
    assert str(figures["kl"].tolist()) == "[nan, 2.0]"


def test_learning_rate_rises_stays_and_falls_to_zero():
    config = LoopConfig(steps=100, warmup=10, decay=0.5)
    factors = [config.lr_factor(step) for step in range(100)]
    assert factors[0] == 0.1
    assert factors[10:50] == [1.0] * 40
    assert factors[-1] == pytest.approx(0.02)
    assert factors[50:] == sorted(factors[50:], reverse=True)


def test_training_falls_and_the_target_stays(train, tiny_folder, tmp_path, plots, monkeypatch):
    monkeypatch.setattr("selfspec.evaluation.plots.plot_training", plots)
    before = weights_hash(load_target(tiny_folder)[0].model)
    figures = train(".", "loop.steps=40", "loop.validate_every=10")
    losses = [record["validation"]["loss"] for record in logged(tmp_path, "validation")]
    assert losses[-1] < losses[0]
    assert figures["target_hash"] == before == weights_hash(load_target(tiny_folder)[0].model)
    for kind in ("greedy", "sampled"):
        assert len(figures[kind]["top1"]) == 3
        assert all(a <= b for a, b in zip(figures[kind]["top1"], figures[kind]["top5"], strict=True))
        taus = list(figures[kind]["tau"].values())
        assert 1 <= taus[0] <= taus[1] <= taus[2] <= 4
    assert figures["step_over_forward"] > 1
    target, tokenizer = load_target(tiny_folder)
    assert load_drafter(tmp_path / "drafter", target, tokenizer).kind == "medusa"
    assert all((tmp_path / f"training_{name}.png").stat().st_size > 5000 for name in ("loss", "tau"))


def test_a_torn_write_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    path = tmp_path / "state.pt"
    state_module._save(path, {"step": 1})

    def torn(state: Any, scratch: Path) -> None:
        scratch.write_bytes(b"half")
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(state_module.torch, "save", torn)
        refused("disk full", state_module._save, path, {"step": 2}, error=OSError)
    assert torch.load(path) == {"step": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["state.pt"]


def test_a_file_does_not_take_a_folder_s_place(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "precious").touch()
    with pytest.raises(ValueError, match="is a folder, which is left as it is"), atomic(tmp_path / "folder") as scratch:
        scratch.touch()
    assert [path.name for path in tmp_path.rglob("*")] == ["folder", "precious"]


def test_a_folder_that_fails_leaves_the_old_one(tmp_path, monkeypatch):
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "old").write_text("")
    real = os.replace

    def fails(source: Path, goal: Path) -> None:
        if str(source).endswith(".tmp"):
            raise OSError("no")
        real(source, goal)

    monkeypatch.setattr("selfspec.utils.files.os.replace", fails)
    with pytest.raises(OSError, match="no"), atomic(tmp_path / "x") as scratch:
        scratch.mkdir()
    assert [p.name for p in (tmp_path / "x").iterdir()] == ["old"]
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


def test_a_damaged_checkpoint_is_named_and_a_torn_log_is_not_fatal(train, tmp_path):
    train(".", "loop.steps=1", "train.prompts=2")
    with (tmp_path / "train.jsonl").open("a") as f:
        f.write('{"tor')
    train(".", "loop.steps=2", "train.prompts=2")
    assert [record["step"] for record in logged(tmp_path, "train")] == [1, 2]
    state = tmp_path / "state.pt"
    state.write_bytes(state.read_bytes()[:500])
    refused(r"state\.pt is damaged.*delete it", train, ".", "loop.steps=3", "train.prompts=2")


def test_a_failed_start_does_not_block_the_name_and_another_run_is_refused(train, tmp_path):
    refused("too short", train, "a", "loop.steps=1", "train.length=4")
    train("a", "loop.steps=1")
    another = r"another configuration: train\.lr was 0\.01, now 0\.5; .* another name="
    refused(another, train, "a", "loop.steps=1", "train.lr=0.5")
    kept = tmp_path / "a/config.yaml"
    for value, fine in (("true", True), ("false", False)):  # of a run that an earlier version began
        kept.write_text(kept.read_text().replace("train:\n", f"train:\n  packed: {value}\n", 1))
        if fine:
            train("a", "loop.steps=2")
        else:
            refused("train.packed was False, now not there", train, "a", "loop.steps=3")


OWN = ("train.distill.rows=80", "train.distill.prompt_tokens=8", "train.distill.new_tokens=16")


RESUMED = {
    "ce": ["drafter.loss=ce"],
    "own text": [*OWN],
    "sequential": ["drafter=sequential", "drafter.rank=4", "drafter.heads=3"],
    "feature": ["drafter=feature", "drafter.draft_vocab=50"],
}
LONGER = {
    "markov": ["drafter=sequential", "drafter.form=markov", "drafter.prefix=false"],
    "early_exit": ["drafter=early_exit", "drafter.rank=4"],
    "medusa, few": ["drafter.draft_vocab=50"],
    "nothing to train": ["drafter=early_exit", "drafter.rank=0"],
}


@pytest.mark.parametrize("name", [*RESUMED, *(pytest.param(name, marks=pytest.mark.slow) for name in LONGER)])
def test_an_interruption_changes_nothing(name, train, tiny_folder, tmp_path, monkeypatch):
    """Not a bit of what is saved, nor a step of the log."""
    own, every = (RESUMED | LONGER)[name], ("loop.checkpoint_every=2", "loop.validate_every=2", "train.prompts=2")
    settings = ("loop.steps=6", *every, *own)
    whole, real = train("whole", *settings), state_module._save
    target, tokenizer = load_target(tiny_folder)
    assert whole["target_hash"] == weights_hash(target.model)
    built = load_drafter(tmp_path / "whole/drafter", target, tokenizer)
    if not built.trained():
        assert "step_over_forward" not in whole
        return

    def crash(path: Path, state: dict[str, Any]) -> None:
        real(path, state)
        if state["step"] == 4:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(state_module, "_save", crash)
        refused("", train, "parts", *settings, error=KeyboardInterrupt)
    assert not (tmp_path / "parts/drafter").exists()
    with (tmp_path / "parts/train.jsonl").open("a") as f:  # a step that was logged and lost with the crash
        f.write(json.dumps({"step": 5, "train": {"loss": 0.0}}) + "\n")
    train("parts", *settings)
    assert [record["step"] for record in logged(tmp_path / "parts", "train")] == [1, 2, 3, 4, 5, 6]
    losses = [[r["train"]["loss"] for r in logged(tmp_path / run, "train")] for run in ("whole", "parts")]
    assert losses[0] == losses[1]
    told = json.loads((tmp_path / "whole/drafter/training.json").read_text())
    assert told["tokens"] > 0 < told["seconds"]
    files = [p.relative_to(tmp_path / "whole") for p in (tmp_path / "whole/drafter").rglob("*.safetensors")]
    for file in (*files, "drafter/drafter.json"):
        assert (tmp_path / "whole" / file).read_bytes() == (tmp_path / "parts" / file).read_bytes()
    if name == "feature":
        assert built.vocabulary.tolist() != list(range(50))


def test_own_text_is_the_targets_and_an_interrupted_writing_goes_on(tmp_path, tiny_folder, monkeypatch):
    target, _ = load_target(tiny_folder)
    text = torch.arange(300) % 50
    stream = joined(text, text % 7 > 0, torch.tensor([0, 120, 300]), torch.zeros(2, dtype=torch.bool))
    config = DistillConfig(rows=80, prompt_tokens=8, new_tokens=16)
    whole, _ = distill(target, stream, config, 3, tmp_path / "a")
    assert len(whole.tokens) == len(whole.mask) == 80 * 24
    rows, masks = whole.tokens.view(80, 24), whole.mask.view(80, 24)
    eos = target.end_tokens
    for row, temperature in ((0, 1.0), (31, 1.0), (32, 0.0), (79, 0.0)):
        prompt = rows[row, :8].tolist()
        assert masks[row, :8].tolist() == [t % 7 > 0 for t in prompt]
        options = Options(16, Sampling(temperature), [3 + row], eos)
        own = autoregressive(target, [prompt], options).token_ids[0]
        assert rows[row, 8 : 8 + len(own)].tolist() == own
        assert masks[row, 8:].sum() == len(own)
    files = sorted((tmp_path / "a").rglob("*.safetensors"))
    assert len(files) == 2
    files[1].unlink()
    again, _ = distill(target, stream, config, 3, tmp_path / "a")
    assert torch.equal(again.tokens, whole.tokens)
    files[0].write_bytes(files[0].read_bytes()[:100])  # damaged: written anew
    assert torch.equal(distill(target, stream, config, 3, tmp_path / "a")[0].tokens, whole.tokens)
    for part in range(2):  # two processes write it together
        monkeypatch.setattr(shard, "share", lambda part=part: (part, 2))
        distill(target, stream, config, 3, tmp_path / "c")
    assert torch.equal(distill(target, stream, config, 3, tmp_path / "c")[0].tokens, whole.tokens)
    other, _ = distill(target, stream, config, 4, tmp_path / "a")  # not what lies there
    assert not torch.equal(other.tokens, whole.tokens)
    short = joined(text[:8], text[:8] > 0, torch.tensor([0, 8]), torch.zeros(1, dtype=torch.bool))
    refused("too few for prompts", distill, target, short, config, 3, tmp_path / "b")


def test_texts_are_written_by_a_job_of_their_own(tmp_path, tiny_folder, source_root):
    texts = tmp_path / "texts"
    config = small("texts", tiny_folder, source_root, *OWN, f"train.distill.folder={texts}")
    figures = run_distill(config, tmp_path / "job")
    assert figures["rows"] == 80
    assert float(figures["tau"]) >= 1
    written = {path: path.stat().st_mtime_ns for path in texts.rglob("*.safetensors")}
    assert len(written) == 2
    config = small("texts", tiny_folder, source_root, *OWN, "loop.steps=1", f"train.distill.folder={texts}")
    run_training(config, tmp_path / "run")  # reads them
    assert {path: path.stat().st_mtime_ns for path in texts.rglob("*.safetensors")} == written
    with pytest.raises(ValueError, match=r"train.distill.rows=0: there is nothing to write"):
        run_distill(small("none", tiny_folder, source_root), tmp_path / "none")


def test_the_best_weights_are_kept_and_a_flat_run_ends(train, tiny_folder, tmp_path, monkeypatch, capsys):
    real, told = drafter_module.calibrate, [1.5, 1.9, 1.7, 1.6, 1.8]
    count = [0]

    def fixed(*args: Any) -> Any:
        figures = real(*args)
        figures["tau"]["16"] = told[min(count[0] // 2, 4)]
        count[0] += 1
        return figures

    monkeypatch.setattr(drafter_module, "calibrate", fixed)
    settings = ("loop.steps=12", "loop.validate_every=2", "loop.patience=2", "train.prompts=2")
    figures = train("a", *settings)
    assert figures["steps"] == 8
    assert figures["kept_step"] == 4
    monkeypatch.undo()
    target, tokenizer = load_target(tiny_folder)
    saved = load_drafter(tmp_path / "a" / "drafter", target, tokenizer).trained()
    state = torch.load(tmp_path / "a" / "state.pt", weights_only=True)
    best, last = state["state"]["best"][2], state["parameters"]
    for name, kept in saved.items():
        assert torch.equal(kept, best[f"drafter.{name}"])
    assert any(not torch.equal(best[name], p) for name, p in last.items())
    monkeypatch.setattr(drafter_module, "calibrate", fixed)
    again = train("a", *settings)  # finished: nothing is run
    assert again["kept_step"] == 4
    assert len(logged(tmp_path / "a", "train")) == 8
    assert "loop.patience=2 validations brought nothing better" in capsys.readouterr().out
    assert train("a", *settings, "loop.patience=3")["steps"] == 10


def test_a_run_that_ends_by_the_clock(train, tmp_path, monkeypatch, capsys):
    """Each step takes a second of this clock; the learning rate falls to nearly nothing, and more minutes go on."""
    ticks = iter(range(10_000))
    monkeypatch.setattr("selfspec.training.loop.time.perf_counter", lambda: next(ticks))
    settings = ("loop.steps=500", "train.prompts=2", "loop.log_every=1")
    figures = train("a", *settings, "loop.minutes=0.2")
    assert figures["steps"] == 12
    factors = [record["train"]["lr_factor"] for record in logged(tmp_path / "a", "train")]
    assert factors[-1] == pytest.approx(1 / 6)
    train("a", *settings, "loop.minutes=0.2")
    assert "is finished, with 12 steps; a higher loop.minutes= trains it further" in capsys.readouterr().out
    assert train("a", *settings, "loop.minutes=0.3")["steps"] == 18
    refused(r"loop.minutes=0.0 must be above 0", LoopConfig, minutes=0.0)


def test_a_checkpoint_is_written_by_the_clock(train, monkeypatch):
    """Each look at this clock takes 40 seconds, so that one minute is over in every second step."""
    ticks, steps, write = iter(range(0, 10**6, 40)), list[int](), Checkpoint.write
    monkeypatch.setattr("selfspec.training.loop.time.monotonic", lambda: next(ticks))
    monkeypatch.setattr(Checkpoint, "write", lambda self, state: steps.append(state.step) or write(self, state))
    train("a", "loop.steps=6", "train.prompts=2", "loop.checkpoint_every=500", "loop.checkpoint_minutes=1")
    assert steps == [2, 4, 6]
    refused(r"loop.checkpoint_minutes=0 must be above 0", LoopConfig, checkpoint_minutes=0)


def test_training_begins_with_the_weights_of_another(train, tmp_path):
    begin, short = f"train.init_from={tmp_path / 'first'}", ("loop.steps=3", "train.prompts=2", "loop.validate_every=3")
    first, more = train("first", *short), train("more", *short, begin)
    one, other = (logged(tmp_path / run, "train")[0]["train"]["loss"] for run in ("more", "first"))
    assert one < other
    assert more["loss"] < first["loss"]
    refused("init_from=.* is a medusa drafter that does not fit this medusa", train, "odd", "drafter.heads=2", begin)
    shutil.rmtree(tmp_path / "first")  # its weights are in the run's own checkpoint by now
    assert train("more", *short, begin) == more
    assert train("more", "loop.steps=4", *short[1:], begin)["steps"] == 4


def test_of_validations_that_are_alike_the_lowest_loss_is_kept(train, monkeypatch):
    """As long as no draft is accepted the figure is 1 at each of them."""
    losses = iter((3.0, 2.0, 2.5, 1.0))
    real = drafter_module._validated
    monkeypatch.setattr(
        drafter_module, "_validated", lambda *args: {**real(*args), "tau16": 1.0, "loss": next(losses, 9.0)}
    )
    settings = ("loop.steps=3", "loop.validate_every=1", "train.prompts=2")
    assert train("a", *settings)["kept_step"] == 2
    assert train("a", "loop.steps=4", *settings[1:])["kept_step"] == 2  # a validation was made of the weights kept


def test_a_draft_vocabulary_stays_when_data_change(train, tmp_path, capsys):
    """A run that goes on after its data grew keeps the tokens that its head has rows for, and says what changed."""
    path = tmp_path / "d.jsonl"
    settings = ["drafter=medusa", "drafter.draft_vocab=20", "drafter.rank=4", "data=jsonl", f"data.path={path}"]

    def run(steps: int, words: tuple[str, ...]) -> list[int]:
        write_lines(path, [{"text": f"{word} {i} {word}\n" * 20} for i in range(20) for word in words])
        train("x", *settings, f"loop.steps={steps}")
        return load_file(tmp_path / "x/drafter/drafter.safetensors")["vocabulary"].tolist()

    first = run(2, ("import", "return"))
    capsys.readouterr()
    assert run(4, ("import", "return")) == first
    assert "are not those" not in capsys.readouterr().out
    assert run(6, ("self", "def", "class")) == first
    said = capsys.readouterr().out
    assert "the training data are not those of the steps before" in said
    assert "the validation data are not those of the steps before: the best weights are found anew" in said
    shutil.rmtree(tmp_path / "x")
    assert run(2, ("self", "def", "class")) != first


def test_validation_rows_in_which_nothing_counts_are_not_drawn(tmp_path, tiny_folder, monkeypatch):
    """The loss is over tokens, not over rows: empty rows made it smaller."""
    target, tokenizer = load_target(tiny_folder)
    answer = Document("d", (("word " * 40, False), ("yes and no and yes and no ", True)))
    silent = [Document("s", (("word " * 60, False), ("", True))) for _ in range(30)]
    config = DrafterTraining(length=48, validation_rows=8)
    rows = validation_rows(tokenize([*silent, answer, *silent], tokenizer), config)
    assert 1 <= len(rows["tokens"]) <= 2
    assert bool(rows["mask"][:, 1:].any(1).all())
    refused("none of the validation tokens counts in the loss", validation_rows, tokenize(silent, tokenizer), config)
    module = DraftLoss(made("medusa", target, heads=2, rank=4), target).eval()
    rows = [{name: values[i : i + 1] for name, values in batch_of_unequal_rows(target).items()} for i in range(3)]
    counts = sum(module.counts(row) for row in rows)
    whole = module(batch_of_unequal_rows(target))[0]
    assert float(sum(module(row, counts)[0] for row in rows)) == pytest.approx(float(whole), rel=1e-5)


def batch_of_unequal_rows(target: Any) -> dict[str, torch.Tensor]:
    tokens = torch.randint(target.vocab_size, (3, 20), generator=torch.Generator().manual_seed(0))
    mask = torch.zeros(3, 20, dtype=torch.bool)
    mask[0, 3:19], mask[1, 17] = True, True
    return {"tokens": tokens, "mask": mask}


@pytest.mark.parametrize(("kind", "few"), [("medusa", False), ("feature", True)])
def test_kept_hidden_states_give_the_same_losses(kind, few, train, tmp_path, source_root, monkeypatch, capsys):
    monkeypatch.setenv("SELFSPEC_CACHE", str(tmp_path / "cache"))
    source = tmp_path / "source"
    source.mkdir()
    for name in ("abc.py", "queue.py"):  # few rows, so that they are read again
        (source / name).write_text((source_root / name).read_text()[:2500])

    def losses(name: str, *more: str) -> list[float]:
        more += ("drafter.draft_vocab=64",) if few else ()
        train(name, f"drafter={kind}", f"data.root={source}", "loop.steps=10", *more)
        return [record["train"]["loss"] for record in logged(tmp_path / name, "train")]

    plain = losses("plain")
    assert losses("disk", "train.cache=disk") == plain
    folder = next((tmp_path / "cache/hidden").iterdir())
    assert len(list(folder.glob("*.done"))) == (1 if kind == "medusa" else 2)
    capsys.readouterr()
    runs = []
    kept = Target.text
    monkeypatch.setattr(Target, "text", lambda self, *a, **k: runs.append(k.get("layers")) or kept(self, *a, **k))
    assert losses("again", "train.cache=disk") == plain
    assert "0.00 GiB of them new" in capsys.readouterr().out
    passes = [layers for layers in runs if layers is not None and layers[0] == layers[1]]
    assert len(passes) >= 10  # norm and lm_head alone


def test_all_logits_of_a_kept_row_are_computed_once(llama, monkeypatch, tmp_path):
    tokens = torch.randint(llama.vocab_size, (2, 24), generator=torch.Generator().manual_seed(0))
    batch = {"tokens": tokens, "documents": torch.zeros_like(tokens), "rows": torch.tensor([3, 1])}
    few = torch.randperm(llama.vocab_size, generator=torch.Generator().manual_seed(1))[:20]
    kept = HiddenStates(llama, (), 4, 24, torch.float64, tmp_path)
    whole = llama.text(tokens)
    sizes = list[int]()
    text = Target.text

    def counted(self: Target, *given: Any, **more: Any) -> Any:
        out = text(self, *given, **more)
        sizes.append(0 if out.logits is None else out.logits.shape[-1])
        return out

    monkeypatch.setattr(Target, "text", counted)
    for read in range(2):
        (logits, inside, share), hidden, _ = kept.drafted(batch, few, True)
        torch.testing.assert_close(logits, whole.logits[..., few])
        assert torch.equal(inside, torch.isin(whole.logits.argmax(-1), few))
        torch.testing.assert_close(share, whole.logits.softmax(-1)[..., few].sum(-1).float())
        torch.testing.assert_close(hidden, whole.hidden)
        assert (llama.vocab_size in sizes) == (read == 0)
        sizes.clear()
    other = few.flip(0)[:10]
    assert torch.equal(kept.drafted(batch, other, True)[0][1], torch.isin(whole.logits.argmax(-1), other))


REFUSED = [
    ("drafter=feature target.dtype=bfloat16", "loop.precision=no: a layer trained in full"),
    ("drafter=feature target.dtype=float16", "can not be trained in full in float16"),
    ("target.dtype=float16", r"target\.dtype=float16: gradients .*target\.dtype=float32"),
    ("drafter=mask train.cache=disk", "mask tokens read the target's keys and values"),
    ("train.cache=ram", "train.cache='ram' must be one of none, disk"),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED)
def test_what_can_not_train_is_refused_before_any_step(settings, message, train, tmp_path):
    refused(message, train, "x", *settings.split())
    assert not (tmp_path / "x/state.pt").exists()


def test_a_cache_that_does_not_fit_is_refused(train, monkeypatch):
    monkeypatch.setattr(hidden_module, "_free_disk", lambda folder: 1000)
    refused(r"GiB of them new, but 0\.00 GiB are free", train, "x", "train.cache=disk")


def test_the_memory_of_a_run_is_told_before_it(tiny_folder):
    target, _ = load_target(tiny_folder)
    drafter = made("medusa", target, heads=2, rank=4)
    line = memory_line(target, drafter, 10)
    trained = sum(p.numel() for p in drafter.trained().values())
    assert f"trains {trained / 1e6:.2f}M parameters" in line
    assert f"{4 * 4 * trained / 2**20:.1f} MB, beside" in line
    assert f"logits of 10 tokens at once {10 * 5 * target.vocab_size * target.dtype.itemsize / 2**20:.1f} MB" in line


@pytest.mark.parametrize(
    ("sizes", "overrides", "parts", "free"),
    [((32, 4096, 14336, 32), ("train.length=1024",), 1, 24), ((80, 8192, 28672, 64), ("loop.batch_size=64",), 8, 80)],
    ids=["8B on one card of 24 GB", "70B divided over eight of 80 GB"],
)
def test_memory_of_large_targets_is_planned_on_no_device(sizes, overrides, parts, free):
    names = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads")
    shape = dict(zip(names, sizes, strict=True))
    config = LlamaConfig(**shape, num_key_value_heads=8, vocab_size=128256)
    run = compose_config("train", "+experiment=llama3_8b_medusa", "data.path=x", *overrides)
    with torch.device("meta"):
        target = Target(LlamaForCausalLM(config).bfloat16())
        drafter = Medusa(target, OmegaConf.to_object(run.drafter))
    tokens = run.loop.batch_size * run.train.length // parts // run.loop.accumulate
    line = memory_line(target, drafter, tokens, parts)
    needed = float(line.split("process holds ")[1].split(" GiB")[0]) * 2**30
    assert sum(p.numel() for p in target.model.parameters()) * 2 / parts < needed < 0.95 * free * 1e9, line
    assert all(p.device.type == "meta" for p in drafter.parameters())


def test_a_check_tells_what_training_would_read(tmp_path, tiny_folder, source_root, monkeypatch):
    said = "\n".join(run_check(small("check", tiny_folder, source_root, "loop.steps=100"), tmp_path))
    assert "training: " in said
    assert re.search(r"\d+ rows of \d+ tokens, (9\d|100)\.\d% filled", said)
    assert "example 3:" in said
    assert "⟦" in said
    assert "trains 0." in said
    assert "100 steps" in said
    assert "memory of this process" in said
    with pytest.raises(ValueError, match=r"train\.length=999999 exceeds"):
        list(run_check(small("check", tiny_folder, source_root, "train.length=999999"), tmp_path))


def test_a_check_of_synthetic_data_writes_nothing(tiny_folder, tmp_path, monkeypatch):
    monkeypatch.setattr("selfspec.training.synthetic.write", lambda *_: pytest.fail("written"))
    data = ("data=synthetic", f"data.folder={tmp_path / 'd'}", "data.question_tokens=8", "data.new_tokens=8")
    small_run = [word for word in SMALL if not word.startswith("data")]
    words = ("name=x", f"target.name={tiny_folder}", *small_run, *data, "data.conversations=3", "data.turns=1")
    said = "\n".join(run_check(compose_config("train", *words), tmp_path))
    assert "3 conversations of at most 16 tokens are written first" in said
    assert re.search(r"a step of \d+ x \d+ tokens takes about [\d.]+ s here, one row timed", said)
    assert not (tmp_path / "d").exists()


def test_seeds_of_training_change_no_validation(train, tmp_path):
    """A drafter that is not moved: the same loss and acceptance length whatever orders the rows."""
    held = []
    train("start", "loop.steps=1")
    for seed in (1, 2):
        still = f"train.init_from={tmp_path / 'start'}", "train.lr=1e-12", "loop.steps=1", f"loop.seed={seed}"
        train(f"s{seed}", *still)
        held.append(logged(tmp_path / f"s{seed}", "validation")[0]["validation"])
    assert held[0]["loss"] == pytest.approx(held[1]["loss"], rel=1e-6)
    assert held[0]["sampled"]["tau"] == held[1]["sampled"]["tau"]
