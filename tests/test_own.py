"""Drafters, losses and columns of other packages: trained, saved, loaded, measured, mixed, and refused by name."""

import importlib
import json
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from conftest import compose_config, losses, refused
from transformers import AutoModelForCausalLM

import selfspec
from selfspec.checkpoints.load_target import load_target
from selfspec.checkpoints.loading import find_drafter
from selfspec.cli.config import drafter_of, register
from selfspec.cli.evaluation_runs import run_decode
from selfspec.cli.terminal import export
from selfspec.cli.training_runs import run_training
from selfspec.core.contract import Accepted, Context
from selfspec.drafters.base import Batch, Sample
from selfspec.drafters.registry import Untrusted, build, config_class, drafter_class, try_out
from selfspec.evaluation.points import read_points, rows_of
from selfspec.evaluation.tables import table
from selfspec.training.draft_loss import try_training
from selfspec.training.loop_config import LoopConfig

ROOT = Path(__file__).parents[1]
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "own_drafter.md").read_text(), re.DOTALL)
BIGRAM = next(block for block in BLOCKS if "class Bigram(" in block)
SMALL = """train.length=48 train.prompts=2 train.prompt_tokens=8 train.new_tokens=16 train.validation_rows=4 logger=none
train.lr=0.05 loop.steps=30 loop.batch_size=4 loop.precision=no loop.validate_every=10 loop.log_every=1"""
LOSS = '''
def squared(log_q, log_p):
    """Log probabilities [N, V] of the draft and the target; nats [N]."""
    return 4 * (log_q.exp() - log_p.exp()).square().sum(-1)


def mean(log_q, log_p):
    return squared(log_q, log_p).mean()


def detached(log_q, log_p):
    return squared(log_q, log_p).detach()


def few(log_q):
    return log_q
'''
COLUMN = """
def slowest(point, records):
    return f"{max(r.seconds for r in records):.3f} s | of {len(records)}"


def failing(point, records):
    point.clear()
    raise KeyError("boom")
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory) -> Iterator[Path]:
    """An importable package with the drafter of docs/own_drafter.md."""
    home = tmp_path_factory.mktemp("place") / "ownpkg"
    home.mkdir()
    for name, text in (("__init__", ""), ("mine", BIGRAM), ("losses", LOSS), ("columns", COLUMN)):
        (home / f"{name}.py").write_text(text)
    sys.path.insert(0, str(home.parent))
    importlib.invalidate_caches()
    yield home
    sys.path.remove(str(home.parent))
    for name in [name for name in sys.modules if name.partition(".")[0] == "ownpkg"]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def trained(package, tiny_folder, source_root, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("own") / "run"
    names = [f"target.name={tiny_folder}", f"data.root={source_root}"]
    own = ["name=x", "drafter._target_=ownpkg.mine.Bigram", "drafter.rank=8"]
    run_training(compose_config("train", *own, *names, *SMALL.split()), folder)
    return folder


def test_a_drafter_of_another_package(trained, source_root, tmp_path, package, monkeypatch):
    assert len(BIGRAM.splitlines()) <= 40
    meta = json.loads((trained / "drafter" / "drafter.json").read_text())
    assert (meta["kind"], meta["config"]) == ("ownpkg.mine.Bigram", {"rank": 8, "depth": 3})
    falling = losses(trained)
    assert sum(falling[-5:]) < 0.9 * sum(falling[:5])

    why = r"'ownpkg\.mine\.Bigram' is code of the package 'ownpkg'; .*trust_code=True"
    with monkeypatch.context() as unloaded:
        unloaded.setattr("selfspec.checkpoints.loading.load_target", None)  # refused before
        refused(why, selfspec.load, str(trained), error=Untrusted)
    card = (trained / "drafter" / "README.md").read_text()
    assert ", trust_code=True)" in card
    assert "It needs the Python package `ownpkg`" in card
    spec = selfspec.load(str(trained), dtype="float32", trust_code=True)
    for temperature in (0.0, 1.0):
        fast = spec.generate(["def f():", "import os"], 24, temperature, seed=1)
        assert fast.token_ids == spec.autoregressive(["def f():", "import os"], 24, temperature, seed=1).token_ids
    both = selfspec.load(f"{trained}+prompt_lookup", trust_code=True)
    assert len(both.generate([[5, 9, 2]], 8).token_ids[0]) == 8

    measured = "decode.prompts=2 decode.prompt_tokens=8 decode.max_new_tokens=8 dtype=float32 tree.nodes=6 logger=none"
    own = [
        f"drafter={trained}",
        "trust_code=true",
        "decode.columns=[ownpkg.columns.slowest]",
        f"data.root={source_root}",
    ]
    point = run_decode(compose_config("eval", *own, *measured.split()), tmp_path / "point")
    to = tmp_path / "dry"
    spec.push_to_hub("a/b", tmp_path / "point", dry_run=to)  # figures of these very weights
    assert re.search(r"\| 0.0 +\| 6 +\|", (to / "README.md").read_text())
    assert json.loads((tmp_path / "point" / "origin.json").read_text())[f"files {trained}"] == spec.drafter.saved_hash
    assert point["identical"]["autoregressive"] == {"rows": 2, "of": 2}
    head, _, row = table(rows_of([point])).splitlines()
    assert head.split("|")[-2].strip() == "slowest"
    assert row.split("|")[-2].strip() == "of 6"  # its own | is escaped
    assert row.split("|")[-3].endswith(" s \\")
    with monkeypatch.context() as mended:  # a finished point shows what the function says now
        mended.setattr("ownpkg.columns.slowest", lambda point, records: "mended")
        again = run_decode(compose_config("eval", *own, *measured.split()), tmp_path / "point")
    assert {**again, "label": point["label"]} == {**point, "columns": {"slowest": "mended"}}
    own = [*own[:2], "decode.columns=[ownpkg.columns.failing]", own[3]]
    with pytest.raises(
        ValueError, match=r"decode.columns: failing failed \(KeyError\('boom'\)\); what was measured is"
    ):
        run_decode(compose_config("eval", *own, *measured.split()), tmp_path / "kept")
    (kept,), broken = read_points(tmp_path / "kept")
    assert not broken
    assert kept["identical"] == point["identical"]


def test_code_is_never_taken_from_the_checkpoint(trained, tmp_path, monkeypatch):
    copied = tmp_path / "drafter"
    shutil.copytree(trained / "drafter", copied)
    (copied / "evil.py").write_text("raise SystemExit('this ran')")
    meta = json.loads((copied / "drafter.json").read_text())
    (copied / "drafter.json").write_text(json.dumps({**meta, "kind": "evil.Evil"}))
    refused("there is no package 'evil'", selfspec.load, str(copied), trust_code=True)
    monkeypatch.syspath_prepend(str(copied))
    refused("never taken from the checkpoint's own folder", selfspec.load, str(copied), trust_code=True)


def test_commands_take_trust(trained, tmp_path):
    at = str(trained), "--to", "transformers", "--out", str(tmp_path / "served")
    refused("--trust-code", export, [*at], error=Untrusted)
    export([*at, "--trust-code"])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "served")
    ids = torch.tensor([[5, 9, 2]])
    plain, fast = (
        model.generate(ids, max_new_tokens=8, do_sample=False, **more)
        for more in ({}, {"custom_generate": str(tmp_path / "served"), "trust_remote_code": True})
    )
    assert plain.tolist() == fast.tolist()


def test_an_installed_entry_point_is_trusted(trained, package, tiny_folder, source_root):
    info = package.parent / "ownpkg-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ownpkg\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[selfspec.drafters]\nbigram = ownpkg.mine:Bigram\n")
    importlib.invalidate_caches()
    assert selfspec.load(str(trained)).drafter.kind == "ownpkg.mine.Bigram"
    register(drafters=True)  # as a command does when it begins
    config = compose_config("train", "name=y", "drafter=bigram", "drafter.rank=4", f"target.name={tiny_folder}")
    kind, found = drafter_of(dict(config.drafter))
    assert (kind.__qualname__, found.rank) == ("Bigram", 4)
    refused(r"is a kind that has to be trained first", find_drafter, "bigram", load_target(tiny_folder)[0])
    shutil.rmtree(info)


def test_a_loss_of_another_package(package, tiny_folder, source_root, tmp_path):
    names = [f"target.name={tiny_folder}", f"data.root={source_root}", "drafter.heads=2", "drafter.rank=4"]
    short = "loop.steps=2", "loop.validate_every=2"
    own = "drafter.loss=ownpkg.losses.squared"
    config = compose_config("train", "name=x", own, *names, *SMALL.split(), *short)
    run_training(config, tmp_path / "run")
    records = [json.loads(line) for line in (tmp_path / "run" / "train.jsonl").read_text().splitlines()]
    assert len(records[0]["train"]["squared"]) == 2
    spec = selfspec.load(str(tmp_path / "run"))  # decoding needs no loss
    assert spec.drafter.config.loss == "ownpkg.losses.squared"
    for loss, message in (
        ("ownpkg.losses.cubed", "ownpkg.losses' has no function cubed"),
        ("nopkg.f", "nopkg can not be imported"),
        ("ownpkg.losses.mean", r"gave \[\] of torch.float32 for .*; expected finite nats \[3\]"),
        ("ownpkg.losses.detached", "does not require grad"),
        ("ownpkg.losses.few", r"fails on log probabilities \[3, 7\]: TypeError"),
        ("squared", "must be one of kl, ce, ce_tv, tv, lk, accept, or package.module.function"),
    ):
        with pytest.raises(ValueError, match=message):
            run_training(
                compose_config("train", "name=x", f"drafter.loss={loss}", *names, *SMALL.split()), tmp_path / "other"
            )


FLAT = (
    "DraftTree(torch.zeros(len(context.roots), 2).long() + context.roots[:, None], "
    "torch.tensor([[-1, 0]]).repeat(len(context.roots), 1))"
)
BROKEN = {  # message: what of the drafter of docs/own_drafter.md is replaced by what
    "lacks session": ("    def session(self, target, rows): return BigramSession(self)", "    pass #"),
    "lacks loss": ("    def loss(self, batch):", "    def losses(self, batch):"),
    "has no config; its __init__ has to call": (
        "        super().__init__(config, depth=config.depth)",
        "        nn.Module.__init__(self)",
    ),
    "reads=(99,) must be a tuple of layers, 0 to 2": (
        "    config: BigramConfig\n",
        "    config: BigramConfig\n    reads = (99,)\n",
    ),
    "lacks observe": ("    def observe(self, accepted): pass", "    def observed(self, accepted): pass"),
    "returned a list; it has to return a DraftTree": (
        "        return grown(",
        "        return [1]\n        return grown(",
    ),
    "returned a tree without scores": (
        "        return grown(",
        f"        from selfspec.core.tree import DraftTree\n        return {FLAT}\n        return grown(",
    ),
    "tokens or parents of torch.float32; they have to be int64": (
        "        return grown(",
        f"        from selfspec.core.tree import DraftTree\n        t = {FLAT}\n"
        "        return DraftTree(t.tokens.float(), t.parents, torch.ones(t.tokens.shape))\n        return grown(",
    ),
    "propose or observe fails: TypeError": ("    def propose(self, context):", "    def propose(self):"),
    "so its fields are not saved; put @dataclass above it": ("@dataclass\n", ""),
    "loss has to return what `decayed` gives, a scalar with a gradient and a dict of figures, not 1.0": (
        "        return decayed(",
        "        return 1.0\n        return decayed(",
    ),
    "not (a tensor [2, 27], {})": ("        return decayed(", "        return losses, {}\n        return decayed("),
    "not (a tensor [] without a gradient, {})": (
        "        return decayed(",
        "        return losses.detach().mean(), {}\n        return decayed(",
    ),
    "loss fails: RuntimeError": ("batch.logits[:, :-1]", "batch.logits"),
    "scores has to return logits [3, 4, 320] [depth, n, V], not a tensor [4, 320]": (
        "        return torch.stack([self(sample.tokens.to(self.read.device)[at + 1 + d]) for d in range(self.depth)])",
        "        return self(sample.tokens[at + 1])",
    ),
    "can not be built": ("    def __init__(self, target, config):", "    def __init__(self, target):"),
    "can not be imported": ("import torch\n", "import torch\nraise KeyError('boom')\n"),
    "must be annotated with a dataclass": ("    config: BigramConfig\n", "    config: int\n"),
    "depth=0 must be a whole number from 1 to 256": ("depth=config.depth)", "depth=0)"),
}


@pytest.mark.parametrize("message", BROKEN)
def test_what_the_contract_lacks_is_told_when_it_is_built(package, message, tiny_folder):
    old, new = BROKEN[message]
    assert old in BIGRAM
    name = f"broken{list(BROKEN).index(message)}"
    (package / f"{name}.py").write_text(BIGRAM.replace(old, new, 1))
    importlib.invalidate_caches()
    target = load_target(tiny_folder)[0]
    with pytest.raises(ValueError, match=re.escape(message)) as error:  # noqa: PT012
        kind = drafter_class(f"ownpkg.{name}.Bigram", trust=True)
        drafter = build(kind, target, config_class(kind)())
        try_out(drafter, target)
        try_training(drafter, target, LoopConfig())
    if "fails: " in message:
        assert re.search(r", in \S+\.py, line \d+$", str(error.value))


def test_settings_of_an_own_drafter_are_checked(package):
    config = compose_config("train", "name=x", "drafter._target_=ownpkg.mine.Bigram")
    for given, message in (
        ({"rank": "many"}, r"drafter\.rank=many must be of type Integer"),
        ({"rang": 3}, "there is no drafter.rang"),
    ):
        refused(message, drafter_of, {**config.drafter, **given})


def test_the_fields_that_the_docs_list_are_there():
    """docs/own_drafter.md: a table of what a drafter is given."""
    page = Path(__file__).parents[1].joinpath("docs", "own_drafter.md").read_text()
    given = {"`context` of `propose`": Context, "`accepted` of `observe`": Accepted}
    for what, kind in {**given, "`batch` of `loss`": Batch, "`sample` of `scores`": Sample}.items():
        row = next(line for line in page.splitlines() if line.startswith(f"| {what}"))
        listed = set(re.findall(r"`(\w+)(?:\(\w+\))?`", row.split("|")[2])) - {"reads", "at"}
        assert len(listed) > 4
        assert listed <= {field.name for field in fields(kind)} | set(vars(kind)), kind


def test_a_loss_on_hidden_states_is_tried_as_a_training_runs_it(package, tiny_folder):
    """Weights of float32 beside a target of bfloat16 multiply under autocast."""
    reads = "        nn.functional.linear(batch.hidden, torch.zeros(4, batch.hidden.shape[-1]))\n"
    (package / "hidden.py").write_text(BIGRAM.replace("        losses = ", f"{reads}        losses = ", 1))
    importlib.invalidate_caches()
    target, kind = load_target(tiny_folder, dtype="bfloat16")[0], drafter_class("ownpkg.hidden.Bigram", trust=True)
    drafter = build(kind, target, config_class(kind)())
    try_training(drafter, target, LoopConfig(precision="bf16"))
    refused("loss fails: RuntimeError", try_training, drafter, target, LoopConfig(precision="no"))
