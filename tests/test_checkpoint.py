import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import made, refused, save_tiny, tiny_model
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from selfspec.checkpoints.drafter_folder import load_drafter, read_meta, save_drafter
from selfspec.checkpoints.load_target import load_target
from selfspec.checkpoints.weights_hash import model_hash, settings_of, target_hash, tokenizer_hash, weights_hash
from selfspec.core.target import Target
from selfspec.drafters.registry import drafter_class
from selfspec.training.pretrain import train_tokenizer
from selfspec.utils.files import differences


@pytest.fixture
def folder(heads_folder, tmp_path) -> Path:
    return Path(shutil.copytree(heads_folder, tmp_path / "copy"))


def rewrite(folder: Path, **changes: Any) -> None:
    meta = json.loads((folder / "drafter.json").read_text())
    (folder / "drafter.json").write_text(json.dumps({**meta, **changes}))


def test_the_folder_says_what_it_is(folder, tiny_folder):
    meta = read_meta(folder)
    target, tokenizer = load_target(tiny_folder)
    assert meta["kind"] == "medusa"
    assert meta["target"]["name"] == tiny_folder
    assert meta["target"]["weights_hash"] == weights_hash(target.model, torch.bfloat16)
    assert meta["tokenizer"] == tokenizer_hash(tokenizer)
    assert meta["parameters"] == 3 * (32 * 32 + 32) + 3 * 4 * (32 + len(tokenizer))
    assert {"torch", "transformers", "peft"} <= meta["versions"].keys()
    assert "selfspec.load" in (folder / "README.md").read_text()


def test_lora_folders_are_stock_peft(folder, tiny_folder):
    """PEFT itself loads a head's folder onto the stock model and computes the head's projection."""
    target, tokenizer = load_target(tiny_folder)
    drafter = load_drafter(folder, target, tokenizer)
    hidden = torch.randn(5, 32)
    with torch.no_grad():
        drafter.weight.zero_()
        drafter.bias.zero_()
        ours = drafter.eval()(hidden)
        for k in range(3):
            stock = PeftModel.from_pretrained(
                AutoModelForCausalLM.from_pretrained(tiny_folder), str(folder / "lora" / f"head_{k}")
            )
            torch.testing.assert_close(ours[k], stock.get_output_embeddings()(hidden))


def test_heads_of_another_target_are_refused_by_both_names(folder, tokenizer, tiny_folder, tmp_path):
    other = save_tiny(tmp_path / "other", tokenizer, hidden_size=64)
    refused(f"{tiny_folder}.*{other}", load_drafter, folder, load_target(other)[0])


def test_another_tokenizer_is_refused(folder, tiny_folder):
    target, _ = load_target(tiny_folder)
    refused("another tokenizer", load_drafter, folder, target, train_tokenizer(["a b c d"], 300))


@pytest.mark.parametrize("name", ["drafter.safetensors", "lora/head_1/adapter_model.safetensors"])
def test_damaged_files_are_named(folder, tiny_folder, name):
    target, _ = load_target(tiny_folder)
    path = folder / name
    whole = path.read_bytes()
    path.write_bytes(whole[:-10])
    refused(f"{path}.*truncated or was altered", load_drafter, folder, target)
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    refused("altered", load_drafter, folder, target)
    path.unlink()
    refused(str(path), load_drafter, folder, target, error=FileNotFoundError)


def test_truncated_file_is_named_even_where_its_hash_was_rewritten(folder, tiny_folder):
    path = folder / "drafter.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    rewrite(folder, files={})
    refused("not a whole safetensors file", load_drafter, folder, load_target(tiny_folder)[0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: {k: v for k, v in s.items() if k != "bias"}, r"missing tensors \['bias'\]"),
        (lambda s: {**s, "extra": torch.zeros(1)}, r"unknown tensors \['extra'\]"),
        (
            lambda s: {**s, "bias": s["bias"][:, :1].clone()},
            r"bias is \[1, 1, 1, 32\], the config and the target ask for \[1, 3, 1, 32\]",
        ),
    ],
)
def test_wrong_tensors_are_named(folder, tiny_folder, change, message):
    path = folder / "drafter.safetensors"
    save_file(change(load_file(path)), path)
    rewrite(folder, files={})
    refused(message, load_drafter, folder, load_target(tiny_folder)[0])


def test_broken_json_and_missing_folder(folder, tmp_path):
    (folder / "drafter.json").write_text("{")
    refused(r"drafter\.json is no JSON", read_meta, folder)
    (folder / "drafter.json").write_text('{"format": 1}')
    refused(r"of format 1, this version reads format 3: train the drafter again", read_meta, folder)
    refused(r"drafter\.json is missing", read_meta, tmp_path / "nowhere", error=FileNotFoundError)


def test_unknown_and_missing_keys_of_a_config_are_named_beside_those_that_exist(folder, tiny_folder):
    config = read_meta(folder)["config"]
    for wrong, message in [
        ({**config, "head": 3}, r"unknown keys \['head'\], missing keys \[\]; MedusaConfig has \['blocks', .*'rank'\]"),
        ({k: v for k, v in config.items() if k != "rank"}, r"missing keys \['rank'\]"),
    ]:
        rewrite(folder, config=wrong)
        refused(message, load_drafter, folder, load_target(tiny_folder)[0])


@pytest.mark.parametrize("kind", ["eagle9", "base", "../medusa", "Medusa", ""])
def test_unknown_kinds_are_refused(kind):
    refused("unknown drafter kind", drafter_class, kind)


def test_saving_over_an_old_folder_replaces_it_whole(folder, tiny_folder):
    target, tokenizer = load_target(tiny_folder)
    (folder / "stale").write_text("x")
    save_drafter(made("medusa", target, heads=2, rank=2), folder, target, tiny_folder, tokenizer, "")
    assert read_meta(folder)["config"]["heads"] == 2
    assert not (folder / "stale").exists()
    assert [p.name for p in folder.parent.iterdir()] == ["copy"]


def test_a_target_is_known_by_its_settings_too():
    """The same weights with another config or other end tokens compute something else; a default that is written out
    does not count, nor what changes no output."""
    eps = {"rms_norm_eps": 0.25}
    targets = [Target(tiny_model(dtype=torch.float32, **more)) for more in ({}, {"attention_bias": False}, eps)]
    targets[1].model.config.initializer_range = 0.5
    targets.append(Target(tiny_model(dtype=torch.float32)))
    targets[3].model.generation_config.eos_token_id = [0, 7]
    assert len({target_hash(target) for target in targets}) == 1
    assert model_hash(targets[0]) == model_hash(targets[1])
    assert len({model_hash(target) for target in targets}) == 3
    odd = differences(*(settings_of(target) for target in targets[::2]))
    assert odd == ["rms_norm_eps was the default, now 0.25"]
