"""What loading trusts: files from elsewhere end in one line that names file and field, and reach nothing outside."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import tiny_model
from huggingface_hub import ModelCard

from selfspec.checkpoints.card import card
from selfspec.checkpoints.formats.files import read_tensors
from selfspec.checkpoints.hub import push
from selfspec.checkpoints.loading import find_drafter, load_pair, load_target
from selfspec.core.target import Target
from selfspec.data.records import JsonLines
from selfspec.engine import disk
from selfspec.integrations.hf_serve import generate
from selfspec.utils.errors import one_line, visible
from selfspec.utils.files import digest, only_mine, private_folder, read_json

Change = Callable[[dict[str, Any]], object]


def deep(folder: Path) -> None:
    (folder / "drafter.json").write_text('{"format": ' + "[" * 200_000)


DRAFTERS: dict[str, tuple[Change, str]] = {  # of drafter.json
    "a name above": (lambda m: m["files"].update({"../../x": "0"}), r"names the file '../../x', which does not lie in"),
    "an absolute name": (lambda m: m["files"].update({"/etc/passwd": "0"}), "names the file '/etc/passwd', which"),
    "a name of Windows": (lambda m: m["files"].update({"..\\x": "0"}), "which does not lie in"),
    "a billion heads": (lambda m: m["config"].update(heads=10**9), "heads=1000000000 must be between 1 and 256"),
    "a number of 400 digits": (lambda m: m["config"].update(heads=10**400), "must be between 1 and 256"),
    "a truth value": (lambda m: m["config"].update(heads=True), "heads=True must be an integer"),
    "a float": (lambda m: m["config"].update(rank=1.5), "rank=1.5 must be an integer"),
    "no head": (lambda m: m["config"].update(heads=0), "heads=0 must be between"),
    "a huge rank": (lambda m: m["config"].update(rank=2**70), "must be between 1 and 16384"),
    "a list of files": (lambda m: m.update(files=[]), "was altered"),
    "a target above": (lambda m: m["target"].update(name="../../../etc"), "which does not lie in"),
}


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_hostile_drafter(name: str, heads_folder: Path, tmp_path: Path, tiny_folder: str) -> None:
    change, message = DRAFTERS[name]
    shutil.copytree(heads_folder, tmp_path / "a/b/drafter")
    path = tmp_path / "a/b/drafter/drafter.json"
    meta = json.loads(path.read_text())
    change(meta)
    path.write_text(json.dumps(meta))
    given = None if name == "a target above" else tiny_folder
    with pytest.raises(ValueError, match=message) as error:
        load_pair(str(tmp_path / "a/b"), given, "auto", None)
    assert len(str(error.value)) < 600
    if "name" in name:
        with pytest.raises(ValueError, match="does not lie in"):
            push(path.parent, "user/repo", dry_run=tmp_path / "card")
        assert not (tmp_path / "x").exists()


def test_hostile_json(heads_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(heads_folder, tmp_path / "drafter")
    deep(tmp_path / "drafter")
    target = Target(tiny_model())
    with pytest.raises(ValueError, match=r"drafter.json is no JSON"):
        find_drafter(str(tmp_path), target)
    for text in ("[]", "3", "null", "\xff", '{"a": ' + "9" * 5000 + "}"):
        (tmp_path / "x.json").write_text(text, encoding="latin-1")
        with pytest.raises(ValueError, match=r"x.json (is no JSON|must hold an object)"):
            read_json(tmp_path / "x.json")
    with (tmp_path / "x.json").open("wb") as file:
        file.truncate(2**26 + 1)  # sparse
    with pytest.raises(ValueError, match="at most 67108864 are read"):
        read_json(tmp_path / "x.json")


@pytest.mark.parametrize(("key", "value"), [("medusa_num_layers", 10**9), ("medusa_num_layers", 10**8),
                                            ("medusa_num_heads", 2**70), ("medusa_num_layers", -1)])  # fmt: skip
def test_hostile_heads_of_others(key: str, value: int, tmp_path: Path) -> None:
    config = {"medusa_num_heads": 1, "medusa_num_layers": 1, key: value}
    (tmp_path / "config.json").write_text(json.dumps(config))
    torch.save({"0.0.linear.weight": torch.zeros(32, 32)}, tmp_path / "medusa_lm_head.pt")
    with pytest.raises(ValueError, match=r"config.json|missing tensors"):
        find_drafter(str(tmp_path), Target(tiny_model()))


class Evil:
    def __reduce__(self) -> Any:
        return (open, ("ran", "w"))


def test_weights_run_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"a": Evil()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="is no file of tensors alone"):
        read_tensors(tmp_path / "pytorch_model.bin")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("change", [{"hidden_size": 2**70}, {"num_attention_heads": 0}, {"vocab_size": "x"},
                                    {"num_hidden_layers": 1.5}, {"hidden_act": "evil"}])  # fmt: skip
def test_a_hostile_targets_config(change: dict[str, Any], tiny_folder: str, tmp_path: Path) -> None:
    shutil.copytree(tiny_folder, tmp_path / "t")
    path = tmp_path / "t/config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises((ValueError, OSError)) as error:
        load_target(str(tmp_path / "t"))
    assert "\n" not in one_line(error.value)


def test_an_exported_folder_names_no_other_drafter(tmp_path: Path) -> None:
    model = tiny_model()
    model.save_pretrained(tmp_path / "f")
    model.config._name_or_path = str(tmp_path / "f")
    (tmp_path / "f/selfspec.json").write_text(json.dumps({"drafter": str(tmp_path), "nodes": None}))
    with pytest.raises(ValueError, match=r"selfspec.json is not what was written \(drafter names"):
        generate(model, torch.tensor([[1, 2]]))


def test_a_line_that_takes_all_memory_is_refused(tmp_path: Path, tokenizer: Any) -> None:
    with gzip.open(tmp_path / "d.jsonl.gz", "wb") as file:
        for _ in range(3):
            file.write(b" " * 2**20)
    source = JsonLines(path=str(tmp_path / "d.jsonl.gz"), tokenizer=tokenizer, record_mb=2)
    with pytest.raises(ValueError, match=r"line 1: more than data.record_mb=2 MB"):
        source.train()


def test_a_card_is_text() -> None:
    meta = {"kind": "medusa", "config": {"head|s": "<script>\n# x"}, "parameters": 3}
    text = card({**meta, "target": {"name": "a/b\nlicense: mit", "weights_hash": "0"}}, "note")
    assert "license" not in ModelCard(text).data.to_dict()
    assert "base_model" not in ModelCard(text).data.to_dict()
    assert "- head&#124;s: &lt;script&gt; # x\n" in text
    named = ModelCard(card({**meta, "target": {"name": "a/b", "weights_hash": "0"}}, "note"))
    assert named.data.to_dict()["base_model"] == "a/b"


def test_shown_text_is_text() -> None:
    assert visible("a\x1b]0;evil\x07b\tc\n\u202ed") == "a\\x1b]0;evil\\x07b\tc\n\\x202ed"
    assert "\x1b" not in one_line(ValueError("prompt \x1b[31m"))


def test_compiled_code_of_others_is_not_loaded(tmp_path: Path, capsys: Any) -> None:
    private_folder(tmp_path / "compiled")
    path = tmp_path / "compiled" / "x.bin"
    assert (tmp_path / "compiled").stat().st_mode & 0o777 == 0o700
    path.write_bytes(b"pickle")
    path.chmod(0o600)
    assert only_mine(path)
    path.chmod(0o666)
    assert not only_mine(path)
    assert disk.read(path) is None
    assert capsys.readouterr().err.count("is not used: others may write there") == 1
    assert digest(b"a") != digest(b"b")
