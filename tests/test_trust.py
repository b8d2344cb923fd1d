"""What loading trusts: files from elsewhere end in one line that names file and field, and reach nothing outside."""

import gzip
import io
import json
import logging
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import refused, tiny_model
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file

from selfspec.checkpoints.card import card
from selfspec.checkpoints.formats import eagle3
from selfspec.checkpoints.formats.files import read_tensors, renamed
from selfspec.checkpoints.hub import push
from selfspec.checkpoints.load_target import load_target
from selfspec.checkpoints.loading import find_drafter, load_pair
from selfspec.core.target import Target
from selfspec.data.records import JsonLines
from selfspec.engine import disk
from selfspec.evaluation.points import read_points
from selfspec.integrations.hf_serve import generate
from selfspec.page.build import PageConfig, page_data
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
    "a number of 400 digits": (lambda m: m["config"].update(heads=10**400), "is no JSON: an integer of 401 digits"),
    "a truth value": (lambda m: m["config"].update(heads=True), "heads=True must be an integer"),
    "a float": (lambda m: m["config"].update(rank=1.5), "rank=1.5 must be an integer"),
    "no head": (lambda m: m["config"].update(heads=0), "heads=0 must be between"),
    "a huge rank": (lambda m: m["config"].update(rank=2**70), "must be between 1 and 16384"),
    "a list of files": (lambda m: m.update(files=[]), "was altered"),
    "a target above": (lambda m: m["target"].update(name="../../../etc"), "which does not lie in"),
}


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_hostile_drafter(name, heads_folder, tmp_path, tiny_folder):
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
        refused("does not lie in", push, path.parent, "user/repo", dry_run=tmp_path / "card")
        assert not (tmp_path / "x").exists()


def test_hostile_json(heads_folder, tmp_path):
    shutil.copytree(heads_folder, tmp_path / "drafter")
    deep(tmp_path / "drafter")
    target = Target(tiny_model())
    refused(r"drafter.json is no JSON", find_drafter, str(tmp_path), target)
    for text in ("[]", "3", "null", "\xff", '{"a": ' + "9" * 5000 + "}"):
        (tmp_path / "x.json").write_text(text, encoding="latin-1")
        refused(r"x.json (is no JSON|must hold an object)", read_json, tmp_path / "x.json")
    with (tmp_path / "x.json").open("wb") as file:
        file.truncate(2**26 + 1)  # sparse
    refused("at most 67108864 are read", read_json, tmp_path / "x.json")


@pytest.mark.parametrize(("key", "value"), [("medusa_num_layers", 10**9), ("medusa_num_layers", 10**8),
                                            ("medusa_num_heads", 2**70), ("medusa_num_layers", -1)])  # fmt: skip
def test_hostile_heads_of_others(key, value, tmp_path):
    config = {"medusa_num_heads": 1, "medusa_num_layers": 1, key: value}
    (tmp_path / "config.json").write_text(json.dumps(config))
    torch.save({"0.0.linear.weight": torch.zeros(32, 32)}, tmp_path / "medusa_lm_head.pt")
    refused(r"config.json|missing tensors", find_drafter, str(tmp_path), Target(tiny_model()))


def sparse_of(n: int) -> torch.Tensor:
    return torch.ones(1).expand(n)


TENSORS: dict[str, tuple[Callable[[], Any], str]] = {  # of a file of torch's that should hold a few numbers
    "a count without bytes": (lambda: sparse_of(2**33), "has 34359738368 bytes, the file"),
    "a sparse layout": (lambda: torch.eye(4).to_sparse(), "is no plain tensor"),
    "no place": (lambda: torch.zeros(4, device="meta"), "is no plain tensor"),
    "float8": (lambda: torch.zeros(4).to(torch.float8_e4m3fn), "is no plain tensor of a dtype"),
    "complex": (lambda: torch.zeros(4, dtype=torch.complex64), "is no plain tensor of a dtype"),
    "no tensor": (lambda: [1, 2], "is no plain tensor"),
}


@pytest.mark.parametrize("name", TENSORS)
def test_hostile_tensors(name, tmp_path):
    value, message = TENSORS[name]
    torch.save({"a": value()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=f"pytorch_model.bin.*{message}") as error:
        read_tensors(tmp_path / "pytorch_model.bin")
    assert len(str(error.value)) < 600


def test_a_file_that_grows_when_it_is_read(tmp_path):
    torch.save({"a": torch.zeros(2**20)}, tmp_path / "plain.bin")
    with zipfile.ZipFile(tmp_path / "plain.bin") as plain, zipfile.ZipFile(tmp_path / "x.bin", "w", 8) as small:
        for entry in plain.namelist():
            small.writestr(entry, plain.read(entry))
    assert (tmp_path / "x.bin").stat().st_size < 2e4
    refused(r"x.bin is no file of tensors alone: its parts are compressed", read_tensors, tmp_path / "x.bin")


def test_two_tensors_of_one_name():
    with pytest.raises(ValueError, match=r"two tensors are called 'fc.weight', one of them as 'model.fc.weight'"):
        renamed({"fc.weight": torch.zeros(1), "model.fc.weight": torch.ones(1)}, eagle3._ours, "x")


class Evil:
    def __reduce__(self) -> Any:
        return (open, ("ran", "w"))


def test_weights_run_no_code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"a": Evil()}, tmp_path / "pytorch_model.bin")
    refused("is no file of tensors alone", read_tensors, tmp_path / "pytorch_model.bin")
    assert not (tmp_path / "ran").exists()


def outside(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder.parent / "w.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../w.safetensors"}}))


def outside_bin(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": {"a": "/dev/zero"}}))


def without(folder: Path, name: str, **changes: torch.Tensor) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors[name]
    save_file({**tensors, **changes}, folder / "model.safetensors", {"format": "pt"})


def config_of(folder: Path, **changes: Any) -> None:
    text = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**text, **changes}))


TARGETS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a shard above": (outside, "index.json names the file '../w.safetensors', which does not lie in"),
    "a shard that is a device": (outside_bin, "index.json names the file '/dev/zero', which does not lie in"),
    "a million layers": (lambda f: config_of(f, num_hidden_layers=10**6), "num_hidden_layers=1000000; models of up"),
    "code of a repository": (lambda f: config_of(f, _attn_implementation="evil/kernel"), "is code of a repository"),
    "a number of 400 digits": (lambda f: config_of(f, vocab_size=10**400), "an integer of 401 digits"),
    "no norm": (lambda f: without(f, "model.norm.weight"), "hold no weights for 'model.norm.weight' of Llama"),
    "no head": (lambda f: without(f, "lm_head.weight"), "hold no weights for 'lm_head.weight' of Llama"),
    "another shape": (
        lambda f: without(f, "model.norm.weight", **{"model.norm.weight": torch.ones(3)}), "weights make no model"
    ),
    "a pickle": (lambda f: outside_bin(f) or (f / "pytorch_model.bin").write_bytes(b"x" * 99), "index.json|no model"),
}  # fmt: skip


@pytest.mark.parametrize("name", TARGETS)
def test_a_hostile_target(name, tiny_folder, tmp_path):
    change, message = TARGETS[name]
    shutil.copytree(tiny_folder, tmp_path / "t")
    change(tmp_path / "t")
    with pytest.raises(ValueError, match=message) as error:
        load_target(str(tmp_path / "t"))
    assert "/t" in str(error.value)
    assert len(str(error.value)) < 700


def test_attention_that_the_caller_names_is_taken(tiny_folder, tmp_path):
    shutil.copytree(tiny_folder, tmp_path / "t")
    config_of(tmp_path / "t", _attn_implementation="evil/kernel")
    target, _ = load_target(str(tmp_path / "t"), attn_implementation="sdpa")
    assert target.model.config._attn_implementation == "sdpa"


def test_names_of_tensors_are_text(tiny_folder, tmp_path, capsys):
    """Weights that the model has no place for are named in one line, whatever transformers would say of them."""
    shutil.copytree(tiny_folder, tmp_path / "t")
    tensors = load_file(tmp_path / "t/model.safetensors")
    odd = {**tensors, "\x1b]0;evil\x07": torch.zeros(2)}
    save_file(odd, tmp_path / "t/model.safetensors", {"format": "pt"})
    log, before, said = logging.getLogger("transformers"), transformers.logging.get_verbosity(), io.StringIO()
    log.addHandler(handler := logging.StreamHandler(said))
    transformers.logging.set_verbosity_warning()
    try:
        load_target(str(tmp_path / "t"))
    finally:
        transformers.logging.set_verbosity(before)
        log.removeHandler(handler)
    told = capsys.readouterr().err
    assert "has no place for: '\\x1b]0;evil\\x07'" in told
    assert "\x1b" not in told + said.getvalue()
    assert "LOAD REPORT" not in said.getvalue()


@pytest.mark.parametrize("name", ["summary.json", "compare.json", "limits.json", "traces.jsonl"])
def test_hostile_results(name, tmp_path):
    for text in ("[" * 200_000, "[]", '{"rows": 1' + "0" * 500 + "}", '{"config": 3}', ""):
        (tmp_path / name).write_text(text)
        if name == "summary.json":
            points, broken = read_points(tmp_path)
            assert (points, len(broken)) == ([], 1)
        else:
            refused(name, page_data, PageConfig(runs=[str(tmp_path)], data=None))


@pytest.mark.parametrize("change", [{"hidden_size": 2**70}, {"num_attention_heads": 0}, {"vocab_size": "x"},
                                    {"num_hidden_layers": 1.5}, {"hidden_act": "evil"}])  # fmt: skip
def test_a_hostile_targets_config(change, tiny_folder, tmp_path):
    shutil.copytree(tiny_folder, tmp_path / "t")
    path = tmp_path / "t/config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises((ValueError, OSError)) as error:
        load_target(str(tmp_path / "t"))
    assert "\n" not in one_line(error.value)


def test_an_exported_folder_names_no_other_drafter(tmp_path):
    model = tiny_model()
    model.save_pretrained(tmp_path / "f")
    model.config._name_or_path = str(tmp_path / "f")
    (tmp_path / "f/selfspec.json").write_text(json.dumps({"drafter": str(tmp_path), "nodes": None}))
    refused(r"selfspec.json is not what was written \(drafter names", generate, model, torch.tensor([[1, 2]]))


def test_a_line_that_takes_all_memory_is_refused(tmp_path, tokenizer):
    with gzip.open(tmp_path / "d.jsonl.gz", "wb") as file:
        for _ in range(3):
            file.write(b" " * 2**20)
    source = JsonLines(path=str(tmp_path / "d.jsonl.gz"), tokenizer=tokenizer, record_mb=2)
    refused(r"line 1: more than data.record_mb=2 MB", source.train)


def test_a_card_is_text():
    meta = {"kind": "medusa", "config": {"head|s": "<script>\n# x"}, "parameters": 3}
    text = card({**meta, "target": {"name": "a/b\nlicense: mit", "weights_hash": "0"}}, "note")
    assert "license" not in ModelCard(text).data.to_dict()
    assert "base_model" not in ModelCard(text).data.to_dict()
    assert "- head&#124;s: &lt;script&gt; # x\n" in text
    named = ModelCard(card({**meta, "target": {"name": "a/b", "weights_hash": "0"}}, "note"))
    assert named.data.to_dict()["base_model"] == "a/b"


def test_shown_text_is_text():
    assert visible("a\x1b]0;evil\x07b\tc\n\u202ed") == "a\\x1b]0;evil\\x07b\tc\n\\x202ed"
    assert "\x1b" not in one_line(ValueError("prompt \x1b[31m"))


def test_compiled_code_of_others_is_not_loaded(tmp_path, capsys):
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
