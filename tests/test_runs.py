"""A run's folder and its logger, labels and plots of its points, and what is said of doubtful settings."""

import errno
import io
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.tracking import WandBTracker
from conftest import compose_config, refused, typed, write_lines
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf
from PIL import Image
from safetensors.torch import load_file, save_file
from test_training import SMALL, small

import selfspec
from selfspec.checkpoints.drafter_folder import save_drafter
from selfspec.checkpoints.find import member_names
from selfspec.cli import launch, origin
from selfspec.cli.arguments import constant, flags_first, paths_quoted, taken
from selfspec.cli.config import _folder_name
from selfspec.cli.launch import _again
from selfspec.cli.run_folders import run_folder
from selfspec.cli.run_folders import typed as typed_config
from selfspec.cli.training_runs import run_training
from selfspec.data.store import Corpus, joined
from selfspec.drafters.medusa import Medusa
from selfspec.evaluation.plots import plot_points
from selfspec.evaluation.points import labelled, rows_of
from selfspec.evaluation.tables import training_table
from selfspec.training import resources
from selfspec.training.check import config_warnings
from selfspec.training.checkpoint import State
from selfspec.training.distill import DistillConfig
from selfspec.training.drafter_data import DrafterTraining
from selfspec.training.loop_config import LoopConfig
from selfspec.utils import errors as log
from selfspec.utils import progress
from selfspec.utils.files import append_text, atomic, cache_folder, disk_room
from selfspec.utils.tracking import Logged, RunLog, WandbConfig, whole_lines

# -- the folder


def measured(drafter: str, source: Path, questions: str = "source") -> tuple[str, ...]:
    """A short measurement, as it is typed."""
    short = f"decode.questions={questions} decode.prompts=1 decode.max_new_tokens=4 decode.prompt_tokens=8"
    arms = ("decode.repeats=1", "decode.arms=[autoregressive,speculative]", "logger=none")
    return "decode", f"drafter={drafter}", f"data.root={source}", *short.split(), *arms


def test_one_process_at_a_time(tmp_path):
    config, folder = OmegaConf.create({"name": "x", "loop": {"steps": 3}}), tmp_path / "run"
    with run_folder(config, folder, folder / "begun"):
        (folder / "begun").touch()
        again = run_folder(config, folder, folder / "begun")
        refused(r"another process is writing to .*run; .* name=", again.__enter__)
    with run_folder(config, folder, folder / "begun") as plain:
        assert plain["loop"]["steps"] == 3


def test_keys_that_differ_are_named(tmp_path):
    first = {"name": "x", "loop": {"steps": 3, "seed": 1}, "wandb": {"tags": []}, "drafter": {"heads": 4}}
    with run_folder(OmegaConf.create(first), tmp_path, tmp_path / "begun"):
        (tmp_path / "begun").touch()
    other = {"name": "x", "loop": {"steps": 9, "seed": 2}, "wandb": {"tags": ["a"]}, "drafter": {"rank": 4}}
    message = "drafter.heads was 4, now not there; drafter.rank was not there, now 4; loop.seed was 1, now 2; give"
    refused(message, run_folder(OmegaConf.create(other), tmp_path, tmp_path / "begun").__enter__)


def test_a_run_that_fails_at_once_leaves_no_folder(tmp_path):
    with (
        pytest.raises(OSError, match="boom"),
        run_folder(OmegaConf.create({"name": "x"}), tmp_path / "run", tmp_path / "x"),
    ):
        raise OSError("boom")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("text", ["", "- 3", "{a: [b", "\udcff"])
def test_a_damaged_config_is_named(text, tmp_path):
    (tmp_path / "begun").touch()
    (tmp_path / "config.yaml").write_bytes(text.encode(errors="surrogateescape"))
    damaged = run_folder(OmegaConf.create({"name": "x"}), tmp_path, tmp_path / "begun")
    refused("config.yaml is damaged.*delete the folder", damaged.__enter__)


@pytest.mark.parametrize("name", [".", " ", "a/../b", "/a", "", "a "])
def test_names_are_folders_below_runs(name):
    refused("must name a folder below runs/", typed_config, Logged, OmegaConf.structured(Logged(name=name)))


def test_overrides_stand_where_hydra_reads_them():
    typed = ["a=1", "-m", "--config-dir", "conf", "+experiment=x", "b=2,3", "--cfg", "job", "~c"]
    assert flags_first(typed) == ["-m", "--config-dir", "conf", "--cfg", "job", "a=1", "+experiment=x", "b=2,3", "~c"]
    assert taken(["--info", "a=1", "-i", "config"]) == ["--info=all", "-i", "config", "a=1"]
    assert constant(["-m", "a=1", "b=2,3", "b=4"]) == ["a"]
    refused("name can not be swept", constant, ["name=a,b"])


def test_a_point_of_a_sweep_has_a_folder_name():
    assert _folder_name("drafter=runs/a,tree.nodes=8") == "drafter=runs_a,tree.nodes=8"
    assert len(_folder_name("ü" * 300).encode()) <= 200
    assert _folder_name("ü" * 300) != _folder_name("ü" * 301)


def test_nothing_is_written_beside_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for words in (("train", "drafter=medusa"), ("decode", "drafter=runs/none"), ("compare", "compare.drafters=[]")):
        assert typed(*words) == 2
    assert typed("audit", "-m", "drafter=a,b") == 2
    assert list(tmp_path.iterdir()) == []


def test_a_failing_point_does_not_end_a_sweep(tmp_path, monkeypatch, heads_folder, source_root, capsys):
    monkeypatch.chdir(tmp_path)
    assert typed(*measured(f"{heads_folder},{tmp_path}", source_root), "-m") == 2
    told = capsys.readouterr()
    assert "1 of 2 points of runs/decode/" in told.err.splitlines()[-1]
    assert f"no drafter at '{tmp_path}'" in told.err.splitlines()[-1]
    (table,) = tmp_path.glob("runs/decode/*/table.md")
    assert table.read_text().splitlines()[2].split("|")[1].strip() == "drafter"  # the name of its folder


def test_a_drafter_is_calibrated_and_saved(tmp_path, monkeypatch, heads_folder, source_root, capsys):
    """Its weights stay; one that trains nothing is saved with what was measured too."""
    monkeypatch.chdir(tmp_path)
    small = "calibrate.prompts=2 calibrate.prompt_tokens=8 calibrate.max_new_tokens=12 calibrate.questions=source"
    given = (f"data.root={source_root}", *small.split())
    heads_folder = shutil.copytree(heads_folder, tmp_path / "copied")
    (heads_folder / "training.json").write_text('{"seconds": 60, "tokens": 5}')
    assert typed("calibrate", f"drafter={heads_folder}", "name=heads", *given) == 0
    assert json.loads(Path("runs/heads/drafter/training.json").read_text()) == {"seconds": 60, "tokens": 5}
    told = capsys.readouterr().out.splitlines()
    assert "expected acceptance length" in told[0]
    assert told[-1].endswith("runs/heads")
    before, after = selfspec.load(str(heads_folder)), selfspec.load("runs/heads")
    assert before.drafter.calibration != after.drafter.calibration
    for name, part in before.drafter.trained().items():
        assert torch.equal(part, after.drafter.trained()[name])
    target = after.target.name
    assert typed("calibrate", "drafter=prompt_lookup", f"target={target}", "name=copies", *given) == 0
    assert selfspec.load("runs/copies").drafter.kind == "prompt_lookup"
    capsys.readouterr()
    assert typed("calibrate", f"drafter={heads_folder}", "name=heads", *given) == 2
    assert "runs/heads/drafter exists; choose another name=" in capsys.readouterr().err
    joined = f"drafter={heads_folder}+prompt_lookup"
    assert typed("calibrate", joined, "name=both", *given) == 2
    assert "members of a tree are calibrated one by one" in capsys.readouterr().err
    assert typed("calibrate", f"drafter={heads_folder}", "name=x", "calibrate.prompts=0", *given[:1]) == 2
    short = [*given, "calibrate.max_new_tokens=1"]
    assert typed("calibrate", f"drafter={heads_folder}", "name=short", *short) == 2
    assert "no position could be measured: the answers to 2 questions" in capsys.readouterr().err
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["copies", "heads"]


# -- the logger


def logged(folder: Path, name: str = "x", **settings: Any) -> Logged:
    return Logged(name, settings.pop("logger", "wandb"), WandbConfig(**settings))


def test_a_run_begins_in_its_logger_with_its_first_record(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    with pytest.raises(ValueError, match="refused"), RunLog(tmp_path, logged(tmp_path), {}, "a.jsonl"):
        raise ValueError("refused")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "wandb_id").write_bytes(b"a/b \xff")  # damaged: a new one is made
    ids, sent = set(), list[Any]()
    real = WandBTracker.log
    monkeypatch.setattr(WandBTracker, "log", lambda *a, step, **k: (sent.append(step), real(*a, step=step, **k)))
    for i in range(2):  # a run, and the same one resumed
        run = logged(tmp_path, tags=["chat"], notes="first try")
        with RunLog(tmp_path, run, {"loop": {"steps": 1}}, "a.jsonl") as log:
            log.rewind(1)
            log.write({"train": {"loss": 1.0, "kl": [0.5, 0.25]}}, 1 + i)
            log.write({"train": {"loss": 1.0, "kl": [0.5, 0.25]}}, 2 + i)
            assert log.tracker.run.tags == ("chat",)
            assert log.tracker.run.notes == "first try"
            ids.add(log.tracker.run.id)
    assert ids == {(tmp_path / "wandb_id").read_text()}
    assert sent == [1, 2, 1, 2, 3]  # an offline run begins a file of its own: the last one is whole
    assert list((tmp_path / "wandb").glob(f"offline-run-*-{ids.pop()}"))


@pytest.mark.parametrize("why", ["API key must have 40+ characters, has 7", "Failed to authenticate with http://x:9"])
def test_a_key_that_does_not_open_wandb_is_told_before_the_first_step(why, tmp_path, monkeypatch, capsys):
    """Malformed, or of a host that can not be reached: the run is recorded offline and goes on."""
    from wandb.errors import AuthenticationError

    def no_key(**arguments: Any) -> bool:
        raise AuthenticationError(why)

    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.setattr("wandb.login", no_key)
    with RunLog(tmp_path, logged(tmp_path), {}, "a.jsonl") as log:
        log.begin()
        said = capsys.readouterr().out
        assert f"wandb did not start ({why})" in said
        assert "WANDB_MODE=offline" in said
        for step in (1, 2):
            log.write({"train": {"loss": 1.0}}, step)
    assert len((tmp_path / "a.jsonl").read_text().splitlines()) == 2
    assert list((tmp_path / "wandb").glob("offline-run-*"))


def test_a_logger_that_fails_later_stops_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WANDB_MODE", "offline")

    def full(*arguments: Any, **more: Any) -> None:
        raise OSError(28, "No space left on device")

    with RunLog(tmp_path, logged(tmp_path), {}, "a.jsonl") as log:
        log.write({"train": {"loss": 1.0}}, 1)
        run = log.tracker
        monkeypatch.setattr(log.tracker, "log", full)
        for step in (2, 3):
            log.write({"train": {"loss": float("nan")}}, step)
    run.finish()
    assert capsys.readouterr().err.count("warning: wandb failed ([Errno 28] No space left on device)") == 1
    lines = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert [line["train"]["loss"] for line in lines] == [1.0, None, None]  # of nothing: null, never 0


def test_tensorboard(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    Image.new("RGB", (4, 4)).save(tmp_path / "plot.png")
    with RunLog(tmp_path, logged(tmp_path, logger="tensorboard"), {"a": [1, None]}, "a.jsonl") as log:
        for step in (1, 2):
            log.write({"train": {"loss": 3.0 - step}}, step)
        log.images({"plot": tmp_path / "plot.png"})
    found = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in found.Scalars("train/loss")] == [(1, 2.0), (2, 1.0)]
    assert found.Tags()["images"] == ["plot"]
    with RunLog(tmp_path, logged(tmp_path, logger="tensorboard"), {}, "a.jsonl") as log:
        log.begin()
        assert log.rewind(1) == 1  # resumed from a checkpoint of step 1
        for step in (2, 3):
            log.write({"train": {"loss": 5.0 - step}}, step)
    found = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in found.Scalars("train/loss")] == [(1, 2.0), (2, 3.0), (3, 2.0)]
    with RunLog(tmp_path, logged(tmp_path, logger="tensorboard"), {}, "a.jsonl") as log:
        assert log.rewind(0) == 0  # killed before its first checkpoint
        log.write({"train": {"loss": 9.0}}, 1)
    found = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in found.Scalars("train/loss")] == [(1, 9.0)]


def test_a_validation_that_comes_again_is_recorded_once(tmp_path):
    with RunLog(tmp_path, logged(tmp_path, logger="none"), {}, "a.jsonl") as log:
        for step in (1, 2):
            log.write({"train": {"loss": 1.0}}, step)
        log.write({"validation": {"loss": 2.0}}, 2)
        assert log.rewind(2) == 2
        assert len(log.path.read_text().splitlines()) == 3
        assert log.rewind(2, pending=True) == 2
        assert "validation" not in log.path.read_text()


def test_a_logger_that_is_not_there(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    log = RunLog(tmp_path / "run", logged(tmp_path, logger="tensorboard"), {}, "a.jsonl")
    refused("logger=tensorboard needs pip install tensorboard", log.__enter__)
    monkeypatch.setenv("WANDB_MODE", "nonsense")
    log = RunLog(tmp_path / "run", logged(tmp_path), {}, "a.jsonl")
    refused("WANDB_MODE='nonsense' must be one of", log.__enter__)
    assert list(tmp_path.iterdir()) == []


def test_no_logger(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    with RunLog(tmp_path, logged(tmp_path, logger="none"), {}, "a.jsonl") as log:
        log.write({"loss": 1.0}, 1)
    assert [p.name for p in tmp_path.iterdir()] == ["a.jsonl"]
    refused("logger='mlflow' must be one of wandb, tensorboard, none", Logged, "x", "mlflow")


def test_a_torn_last_line_is_left_out(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert [record["step"] for _, record in whole_lines(path)] == [1, 2]
    for second in ('{"st', "3", '{"step": "2"}'):
        path.write_text(f'{{"step": 1}}\n{second}\n{{"step": 3}}\n')
        refused("line 2: no record in JSON", list, whole_lines(path))
    for torn in ('{"st', '{"st\n'):  # what follows begins a line of its own
        path.write_text('{"step": 1}\n' + torn)
        with RunLog(tmp_path, Logged("x", "none"), {}, "a.jsonl") as log:
            log.write({"loss": 1.0}, 2)
        assert [record["step"] for _, record in whole_lines(path)] == [1, 2]


# -- labels and plots


def points(drafters: list[str], sizes: list[object], temperatures: list[float]) -> list[dict[str, Any]]:
    made = []
    for drafter, nodes, temperature in itertools.product(drafters, sizes, temperatures):
        full = [0.8**depth for depth in range(1, 7)]
        part = {"acceptance_length": 2.5, "full_acceptance": full, "conditional_acceptance": full}
        part |= {"milliseconds_per_pass": 6.0, "share_of_step": {"target": 0.6, "draft": 0.3, "other": 0.1}}
        if nodes == "auto":
            part["forecast"] = {"nodes": 700, "passes": 60}
        ratio = {"ratio": 1.3, "low": 1.2, "high": 1.4}
        config = {"name": "x", "drafter": drafter, "tree": {"nodes": nodes}, "decode": {"temperature": temperature}}
        speedup = {"autoregressive": ratio}
        made.append({"config": config, "arms": {}, "identical": {}, "speculative": part, "speedup": speedup})
    labelled(made)
    return made


def test_labels_hold_what_varies():
    assert [p["label"] for p in points(["runs/a"], [8], [0.0])] == ["a"]
    assert [p["label"] for p in points(["runs/a"], [8, "auto"], [0.0])] == ["nodes=8", "nodes=auto"]
    found = points(["runs/sizes/drafter.heads=2/", "runs/b+prompt_lookup"], [8], [0.0, 0.7])
    assert found[0]["label"] == "drafter.heads=2 temperature=0"
    assert found[-1]["label"] == "b+prompt_lookup temperature=0.7"
    assert [p["label"] for p in points(["runs/a", "old/a"], [8], [0.0])] == ["runs/a", "old/a"]
    same = points(["x"], [8], [0.0, 0.7])
    same[0]["config"]["other"] = {"temperature": 1}  # two keys of one name are told apart
    labelled(same)
    assert same[1]["label"] == "decode.temperature=0.7 other.temperature=null"


@pytest.mark.parametrize("count", [1, 6, 40])
def test_plots_of_many_points(count, tmp_path):
    """No warning of the layout, and room for every label."""
    names = [f"runs/experiments/a_rather_long_name_of_an_experiment_{i}+prompt_lookup" for i in range(5)]
    grids = {1: (["runs/a"], [8], [0.0]), 6: (["a", "b"], [8, 16, "auto"], [0.0])}
    made = points(*grids.get(count, (names, [4, 8, 16, "auto"], [0.0, 0.7])))
    assert len(made) == count
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        drawn = plot_points(rows_of(made), tmp_path)
    assert ("tau_by_nodes" in drawn) == (count > 1)
    height = {name: Image.open(path).height for name, path in drawn.items()}
    assert height["speedup"] >= 24 * count
    for path in drawn.values():
        grey = Image.open(path).convert("L")
        inked = grey.point(lambda v: 255 if v < 250 else 0).getbbox()
        assert inked[2] - inked[0] > 0.8 * grey.width  # not in a corner


# -- what is said


def test_a_bar_in_a_log_is_a_line_per_interval(monkeypatch):
    out = io.StringIO()
    monkeypatch.setattr(progress, "_SECONDS", 0.05)
    monkeypatch.setattr(sys, "stderr", out)
    for _ in (bar := progress.progress(range(20), desc="work", file=out)):
        time.sleep(0.01)
        bar.set_postfix(loss="1.0")
    lines = out.getvalue().splitlines()
    assert 2 <= len(lines) <= 8
    assert all(line.startswith("work: ") and "\r" not in line and "\x1b" not in line for line in lines)
    assert "20/20" in lines[-1]
    assert "loss=1.0" in lines[-1]


def test_short_work_says_nothing_in_a_log():
    out = io.StringIO()
    for _ in progress.progress(range(3), desc="work", leave=False, file=out):
        pass
    assert out.getvalue() == ""


def test_programs_that_share_the_processors_are_told(monkeypatch):
    processors = os.cpu_count() or 1
    monkeypatch.setattr(os, "getloadavg", lambda: (1.2 * processors, 0.0, 0.0))
    assert resources.crowd() is None
    monkeypatch.setattr(os, "getloadavg", lambda: (4.0 * processors, 0.0, 0.0))
    assert f"{4 * processors} threads compete for {processors} processors" in str(resources.crowd())


def corpus(counted: int) -> Corpus:
    mask = torch.arange(1000) < counted
    return joined(torch.zeros(1000, dtype=torch.int64), mask, torch.tensor([0, 1000]), torch.zeros(1, dtype=torch.bool))


@pytest.mark.parametrize(
    ("loop", "prompts", "counted", "message"),
    [
        ({}, 64, 1000, None),
        ({"steps": 50, "warmup": 200}, 64, 1000, "loop.warmup=200 reaches beyond loop.steps=50: .* set loop.warmup=2"),
        ({"steps": 50, "warmup": 45, "decay": 1.0}, 64, 1000, "gets to .*% of train.lr=0.001: it falls before it has"),
        ({}, 5, 1000, "train.prompts=64, but the validation text has 5, which are used"),
        ({}, 64, 10, "only 1.0% of the training tokens count in the loss"),
        ({"steps": 1000, "batch_size": 64}, 64, 1000, "loop.steps=1000 reads each text 64 times"),
    ],
)
def test_doubtful_settings_are_told(loop, prompts, counted, message):
    said = list(
        config_warnings(DrafterTraining(), LoopConfig(**{"steps": 100, **loop}), corpus(counted), 1000, prompts)
    )
    assert len(said) == (message is not None)
    if message is not None:
        import re

        assert re.search(message, said[0])


def test_few_counted_tokens_are_no_doubt_where_answers_are_written_anew():
    config = DrafterTraining(distill=DistillConfig(rows=8))
    assert not list(config_warnings(config, LoopConfig(steps=100), corpus(10), 1000, 64))


def test_a_corpus_without_a_counted_token_is_refused():
    with pytest.raises(ValueError, match="none of the training tokens counts"):
        list(config_warnings(DrafterTraining(), LoopConfig(), corpus(0), 1000, 64))


def test_what_was_typed_is_told(monkeypatch):
    for given, told in (
        (["python", "train/heads.py", "name=a b"], "python train/heads.py 'name=a b'"),
        (["/x/python", "-u", "/x/bin/selfspec", "train", "name=a"], "selfspec train name=a"),
        (["python", "-m", "selfspec", "train"], "selfspec train"),
        (["python", "-m", "joblib.externals.loky"], "the same command"),
    ):
        monkeypatch.setattr(sys, "orig_argv", given)
        assert log.command_line() == told


# -- folders of sweeps


NAMES = ["drafter.heads=2", "decode.temperature=0,tree.nodes=8", "my runs", "with++", "it's (one)"]


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_is_typed_as_it_is_printed(name, heads_folder, tmp_path):
    """As Hydra names the folders of a sweep; a drafter there is given back, alone and joined with others."""
    place = tmp_path / name / "x"
    shutil.copytree(heads_folder, place / "drafter")
    parser = OverridesParser.create()
    for text, members in ((f"{place}", [str(place)]), (f"{place}+prompt_lookup", [str(place), "prompt_lookup"])):
        (argument,) = paths_quoted([f"drafter={text}"])
        parsed = parser.parse_override(argument)
        assert (parsed.key_or_group, parsed.value()) == ("drafter", text)
        assert member_names(text) == members
        assert len(selfspec.load(text).drafter.sources) == len(members)
    (argument,) = paths_quoted([f"drafter={place},{place}+prompt_lookup,prompt_lookup"])
    swept = [str(value) for value in parser.parse_override(argument).sweep_string_iterator()]
    assert [value.strip("'").replace("\\'", "'").replace("\\ ", " ") for value in swept] == [
        str(place), f"{place}+prompt_lookup", "prompt_lookup"
    ]  # fmt: skip
    assert paths_quoted(["loop.steps=3", "-m", "decode.temperature=0,1", "data.path=[a,b]"]) == [
        "loop.steps=3", "-m", "decode.temperature=0,1", "data.path=[a,b]"
    ]  # fmt: skip


def test_words_that_hydra_does_not_take_are_quoted():
    parser = OverridesParser.create()
    for text in ("grün", "a=b", "runs/none/drafter.heads=2"):
        (argument,) = paths_quoted([f"name={text}"])
        assert parser.parse_override(argument).value() == text
    assert paths_quoted(["data.path=[a", "x=${y", "a=1"]) == ["data.path=[a", "x=${y", "a=1"]


# -- what a disk does


def test_a_full_disk_names_the_file():
    if not Path("/dev/full").exists():
        pytest.skip("there is no /dev/full here")
    refused(r"no room to write /dev/full .*make room and start", append_text, Path("/dev/full"), "a", error=OSError)
    with pytest.raises(OSError, match=r"no room to write x.safetensors .*make room"), disk_room(Path("x.safetensors")):
        raise RuntimeError("I/O error: No space left on device (os error 28)")  # as safetensors has it


def test_what_can_not_be_written_is_named_without_its_scratch_path(tmp_path):
    said = r"t\.json can not be written .*name another place"
    with pytest.raises(OSError, match=said), atomic(tmp_path / "t.json") as at:
        raise OSError(errno.EROFS, "Read-only file system", str(at))


@pytest.mark.parametrize("what", ["file", "link"])
def test_a_file_where_a_run_is_to_be(what, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
    Path("runs/x").write_text("mine") if what == "file" else Path("runs/x").symlink_to("nowhere")
    assert typed("train", "+experiment=tiny_medusa", "name=x") == 2
    assert "runs/x must be a folder, but it is a file or a link that leads nowhere" in capsys.readouterr().err
    assert os.path.lexists("runs/x")


def test_a_folder_that_was_deleted(tmp_path):
    code = f"rmdir {tmp_path}/here && {sys.executable} -m selfspec decode"
    (tmp_path / "here").mkdir()
    env = {**os.environ, "PYTHONPATH": str(Path(selfspec.__file__).parents[1])}
    done = subprocess.run(["sh", "-c", code], cwd=tmp_path / "here", capture_output=True, text=True, env=env)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "the working directory can not be read" in done.stderr


def test_what_is_finished_stays(heads_folder, tiny_folder, source_root, tmp_path, monkeypatch, capsys):
    """A training on a disk that can only be read, under another name; a measurement that is started again."""
    monkeypatch.chdir(tmp_path)
    more = ("loop.steps=2", "train.prompts=2", "logger=none")
    words = ("train", *SMALL, f"target.name={tiny_folder}", f"data.root={source_root}", *more)
    assert typed(*words, "name=x") == 0
    Path("runs/x").rename("runs/y")

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    with monkeypatch.context() as patch:
        for name in ("unlink", "write_text", "write_bytes", "rmdir"):
            patch.setattr(Path, name, refuse)
        assert typed(*words, "name=y") == 0
    assert "runs/y is finished, with 2 steps" in capsys.readouterr().out
    weights = Path("runs/y/drafter/drafter.safetensors")
    whole = weights.read_bytes()
    weights.write_bytes(whole[:1000])
    assert typed(*words, "name=y") == 0
    assert "is truncated or was altered" in capsys.readouterr().err
    assert weights.read_bytes() == whole
    assert typed(*words, "name=y", "loop.steps=3") == 0
    said = capsys.readouterr().out
    assert "goes on from step 2" in said
    assert (
        "saved to runs/y/drafter; try it: selfspec complete 'Which is larger, 9 or 7?' --chat --drafter runs/y --color"
        in said
    )

    again = measured(str(heads_folder), source_root)
    for said in (False, True):
        assert typed(*again, "hydra.run.dir=runs/point") == 0
        assert ("runs/point is finished" in capsys.readouterr().out) == said
    for more in (["decode.metrics=[vllm]"], []):
        assert typed(*again, "decode.answers=a.jsonl", *more, "hydra.run.dir=runs/point") == 0
        assert "runs/point is finished" not in capsys.readouterr().out  # written anew, from its records
        assert Path("runs/point/a.jsonl").is_file()
    assert typed(*again, "hydra.run.dir=runs/point", "decode.seed=9") == 2
    assert "decode.seed was" in capsys.readouterr().err


def test_a_finished_measurement_is_of_these_questions(heads_folder, source_root, tmp_path, monkeypatch, capsys):
    """It is shown for no others, nor without its settings; a damaged summary is made anew from the records."""
    monkeypatch.chdir(tmp_path)
    Path("mine.jsonl").write_text('{"text": "def one(a, b):"}\n')
    again = (*measured(str(heads_folder), source_root, "mine.jsonl"), "hydra.run.dir=runs/point")
    assert typed(*again) == 0
    whole = Path("runs/point/summary.json").read_text()
    for damaged in ("{}", whole[:50], whole.replace('"arms"', '"arm"')):
        Path("runs/point/summary.json").write_text(damaged)
        assert typed(*again) == 0
        assert json.loads(Path("runs/point/summary.json").read_text())["arms"] == json.loads(whole)["arms"]
    capsys.readouterr()
    for name in ("config.yaml", "records.jsonl"):
        kept = Path("runs/point", name).rename(tmp_path / "kept")
        assert typed(*again) == 2
        assert f"is there, but no {name}; delete the folder" in capsys.readouterr().err
        kept.rename(f"runs/point/{name}")
    Path("mine.jsonl").write_text('{"text": "def other(a, b):"}\n')
    assert typed(*again) == 2
    assert "holds records of another text for" in capsys.readouterr().err


def test_what_was_measured_of_another_drafter_is_no_result_of_this_one(
    heads_folder, source_root, tmp_path, monkeypatch, capsys
):
    """Finished or killed: a drafter that was trained anew under its name, and another machine."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(heads_folder, "mine")
    again = measured("mine+prompt_lookup", source_root)
    assert typed(*again, "hydra.run.dir=runs/point") == 0
    Path("mine").rename("before")
    spec = selfspec.load("before")
    torch.nn.init.normal_(next(iter(spec.drafter.trained().values())))
    save_drafter(spec.drafter, Path("mine"), spec.target, spec.target.name, spec.tokenizer, "")
    for _ in range(2):
        assert typed(*again, "hydra.run.dir=runs/point") == 2
        assert "was measured with another drafter mine+prompt_lookup (" in capsys.readouterr().err
        Path("runs/point/summary.json").unlink(missing_ok=True)  # as if it had been killed
    shutil.rmtree("mine")
    Path("before").rename("mine")
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(origin, "device_name", lambda device: "another processor")
        assert typed(*again, "hydra.run.dir=runs/point") == 2
    assert "was measured with another device (" in capsys.readouterr().err
    assert typed(*again, "hydra.run.dir=runs/point") == 0


# -- what a command did not make, it does not remove


def test_a_users_own_empty_folder_stays(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for place in ("emptydir", "runs/mine"):
        (tmp_path / place).mkdir(parents=True)
    for name in ("../emptydir/x", "a/../../evil", "/abs", "runs/.."):
        assert typed("decode", "drafter=tiny-medusa", f"name={name}") == 2
        assert "must name a folder below runs/" in capsys.readouterr().err
    assert typed("audit", "drafter=nothing/here/at/all", "name=mine") == 2
    assert sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")) == [
        "emptydir", "runs", "runs/mine"
    ]  # fmt: skip


# -- what lies on the disk


def flip(path: Path, *places: int) -> None:
    """Change a bit of a file at each of some places."""
    data = bytearray(path.read_bytes())
    for at in places:
        data[at] ^= 1
    path.write_bytes(bytes(data))


def test_a_training_does_not_go_on_with_another_target(tiny_folder, source_root, tmp_path):
    weights = shutil.copytree(tiny_folder, tmp_path / "target") / "model.safetensors"
    run_training(small("x", weights.parent, source_root, "loop.steps=2"), tmp_path / "x")
    tensors = load_file(weights)
    save_file({**tensors, "model.norm.weight": 2 * tensors["model.norm.weight"]}, weights, {"format": "pt"})
    again = small("x", weights.parent, source_root, "loop.steps=4")
    refused("state.pt: the target's weights are not those of the steps before", run_training, again, tmp_path / "x")
    save_file(tensors, weights, {"format": "pt"})
    path = weights.with_name("config.json")  # the same weights as another model
    path.write_text(json.dumps({**json.loads(path.read_text()), "rms_norm_eps": 0.01}))
    message = r"the target's settings \(rms_norm_eps was the default, now 0.01\) are not those of the steps before"
    refused(message, run_training, again, tmp_path / "x")


def test_damage_of_the_same_size_is_noticed(tiny_folder, source_root, tmp_path, capsys, monkeypatch):
    few = ["loop.steps=4", "loop.checkpoint_every=2", "train.distill.rows=4", "train.distill.prompt_tokens=8"]
    few += ["train.distill.new_tokens=40", f"train.distill.folder={tmp_path / 'texts'}"]
    run_training(small("x", tiny_folder, source_root, *few), tmp_path / "x")
    weights = load_file(tmp_path / "x/drafter/drafter.safetensors")
    state = torch.load(tmp_path / "x/state.pt", weights_only=True)
    state["parameters"]["drafter.bias"].view(-1)[0] += 1e-3
    torch.save(state, tmp_path / "x/state.pt")
    with monkeypatch.context() as patch:  # before a target is loaded
        patch.setattr("selfspec.cli.training_runs._opened", None)
        again = small("x", tiny_folder, source_root, *few, "loop.steps=6")
        refused("state.pt was changed on the disk: its hash differs", run_training, again, tmp_path / "x")
    torch.save({"state": vars(State()), "config": state["config"]}, tmp_path / "x/state.pt")
    refused(r"state.pt is damaged \(KeyError\('parameters'\)\)", run_training, again, tmp_path / "x")
    (tmp_path / "x/config.yaml").write_text("- 1")
    again = small("x", tiny_folder, source_root, *few, "loop.precision=auto")
    refused("config.yaml is damaged or empty", run_training, again, tmp_path / "x")
    (chunk,) = (tmp_path / "texts").rglob("*.safetensors")
    flip(chunk, chunk.stat().st_size - 200)
    capsys.readouterr()
    run_training(small("y", tiny_folder, source_root, *few), tmp_path / "y")  # written anew
    assert "was changed on the disk and is written anew" in capsys.readouterr().err
    written = load_file(tmp_path / "y/drafter/drafter.safetensors")
    assert all(torch.equal(weights[name], written[name]) for name in weights)


def test_kept_texts_and_states_that_the_disk_changed_are_made_again(tiny_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SELFSPEC_CACHE", str(tmp_path / "cache"))
    path = write_lines(tmp_path / "d.jsonl", [{"text": f"import os {i}\n" * 30} for i in range(12)])
    settings = ["data=jsonl", f"data.path={path}", "loop.steps=3", "train.cache=disk"]

    def run(name: str) -> dict[str, torch.Tensor]:
        few = [one for one in SMALL if "data.root" not in one]
        config = compose_config("train", f"name={name}", f"target.name={tiny_folder}", *few, *settings)
        run_training(config, tmp_path / name)
        return load_file(tmp_path / name / "drafter/drafter.safetensors")

    first = run("a")
    flip(next((tmp_path / "cache/texts").rglob("train.tokens")), 40)
    states = next((tmp_path / "cache/hidden").rglob("*.states"))
    flip(states, *range(41, states.stat().st_size, 512))
    capsys.readouterr()
    again = run("b")
    said = "".join(capsys.readouterr())
    assert "train.tokens was changed on the disk; the texts are tokenized anew" in said
    assert "were changed on the disk; the target runs on it again" in said
    assert all(torch.equal(first[name], again[name]) for name in first)


def test_the_checkpoint_keeps_its_config(tiny_folder, source_root, tmp_path, capsys):
    few = ["loop.steps=2", "loop.checkpoint_every=2"]
    run_training(small("x", tiny_folder, source_root, *few), tmp_path / "x")
    (tmp_path / "x/config.yaml").unlink()
    (tmp_path / "x/train.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"train.lr was 0.01, now 0.5"):
        run_training(small("x", tiny_folder, source_root, "loop.steps=4", "train.lr=0.5"), tmp_path / "x")
    run_training(small("x", tiny_folder, source_root, "loop.steps=4", "loop.checkpoint_every=2"), tmp_path / "x")
    assert "lacks the figures of steps 1 to 2; they are lost" in capsys.readouterr().out


def test_a_loss_that_is_no_number_keeps_the_checkpoint(tiny_folder, source_root, tmp_path, monkeypatch):
    run_training(small("x", tiny_folder, source_root, "loop.steps=2", "loop.checkpoint_every=2"), tmp_path / "x")
    before = (tmp_path / "x/state.pt").read_bytes()
    real = Medusa.loss
    monkeypatch.setattr(Medusa, "loss", lambda self, batch: (real(self, batch)[0] * torch.nan, {}))
    with pytest.raises(
        FloatingPointError, match=r"gradient norm nan at step 2.*state.pt keeps what was trained before"
    ):
        run_training(small("x", tiny_folder, source_root, "loop.steps=4", "loop.checkpoint_every=2"), tmp_path / "x")
    assert (tmp_path / "x/state.pt").read_bytes() == before


def test_a_user_without_a_home_has_a_cache(monkeypatch):
    def none(*_: object) -> None:
        raise RuntimeError("Could not determine home directory.")

    for name in ("SELFSPEC_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", none)
    assert cache_folder().is_relative_to(tempfile.gettempdir())
    monkeypatch.setattr(Path, "expanduser", none)
    monkeypatch.setenv("SELFSPEC_CACHE", "~nobody/x")
    refused("SELFSPEC_CACHE=~nobody/x: Could not determine", cache_folder)


def test_an_interrupted_command_says_how_it_goes_on(monkeypatch):
    monkeypatch.setattr("sys.orig_argv", ["python", "bin/selfspec", "decode", "drafter=runs/a b"])
    typed = "selfspec decode 'drafter=runs/a b'"
    assert _again("decode", "runs/decode/d", False) == f"{typed} hydra.run.dir=runs/decode/d"
    assert _again("decode", "runs/decode/d", True) == f"{typed} hydra.sweep.dir=runs/decode/d"
    assert _again("train", "runs/a", False) == typed  # its folder has a name
    assert _again("audit", "runs/audit/d", False) == ""
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert _again("train", "runs/a", False) == ""  # what launched the processes is not known


def test_figures_of_nothing_are_shown(capsys):
    """JSON has null for them where a finished run is read again."""
    nothing = {"tau": {"16": None}, "top1": [], "decoded": None}
    figures = {"greedy": nothing, "sampled": {**nothing, "decoded": 1.5}, "loss": None, "seconds": 3.0}
    assert "|a|n/a|n/a|-|-|-|-|3|" in training_table({"a": figures}).replace(" ", "")
    launch._acceptance(figures)
    assert "(nothing was accepted); expected acceptance length n/a at 16 nodes" in capsys.readouterr().out
