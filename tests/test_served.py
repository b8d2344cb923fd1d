"""Exported folders inside transformers: its generate, and its own server over HTTP."""

import copy
import json
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import made, random_drafter, refused
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel

import selfspec
from selfspec.checkpoints.drafter_folder import load_drafter, save_drafter
from selfspec.checkpoints.load_target import load_target
from selfspec.integrations.export import export
from selfspec.integrations.hf_serve import _own_stops, generate

ASKED = [{"role": "user", "content": "import os"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, heads_folder) -> Path:
    out = tmp_path_factory.mktemp("exported") / "served"
    told = export(f"{heads_folder}+prompt_lookup", "transformers", out)
    assert any("transformers serve" in line for line in told)
    return out


@pytest.fixture(scope="module")
def plain(tiny_folder) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(tiny_folder)


def inputs(folder: Path) -> dict[str, torch.Tensor]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    found = tokenizer.apply_chat_template(ASKED, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    return {name: found[name] for name in ("input_ids", "attention_mask")}


def test_generate_with_the_folder_speculates(folder, plain):
    asked = inputs(folder)
    wanted = plain.generate(**asked, max_new_tokens=24, do_sample=False)
    by_name = AutoModelForCausalLM.from_pretrained(folder)
    trusted = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    told = {"max_new_tokens": 24, "do_sample": False, "return_dict_in_generate": True}
    for out in (
        by_name.generate(**asked, **told, custom_generate=str(folder), trust_remote_code=True),
        trusted.generate(**asked, **told),
        trusted.generate(asked["input_ids"], **told, nodes=4),
        trusted.generate(**asked, **told, custom_generate=str(folder), trust_remote_code=True),
        copy.deepcopy(trusted).generate(**asked, **told, custom_generate=str(folder), trust_remote_code=True),
    ):
        assert torch.equal(out.sequences, wanted)
        assert out.stats.passes < out.stats.tokens
    one, other = (trusted.generate(**asked, max_new_tokens=24, do_sample=True, seed=5, nodes=n) for n in (1, 8))
    assert torch.equal(one, other)


KINDS = {
    "medusa": {"heads": 3, "rank": 4},
    "sequential": {"heads": 3, "rank": 4, "correction": 8},
    "feature": {},
    "early_exit": {"rank": 4},
    "mask": {"masks": 3, "rank": 4, "correction": 8},
    "eagle3": {},
    "mtp": {},
    "block": {"size": 4},
}
FRESH = """
import sys, torch
from transformers import AutoModelForCausalLM
ids = torch.tensor([[5, 9, 2, 7, 7, 1]])
asked = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 12, "pad_token_id": 0}
plain = AutoModelForCausalLM.from_pretrained(sys.argv[1]).generate(ids, **asked, do_sample=False)
assert plain.shape[1] > ids.shape[1]
for folder in sys.argv[1:]:
    model = AutoModelForCausalLM.from_pretrained(folder)
    ours = {"custom_generate": folder, "trust_remote_code": True}
    assert torch.equal(model.generate(ids, **asked, do_sample=False, **ours), plain), folder
    sampled = [model.generate(ids, **asked, do_sample=True, top_k=0, seed=3, nodes=n, **ours) for n in (1, 8)]
    assert torch.equal(*sampled), folder
    assert all(p.requires_grad for p in model.parameters())
"""


def test_every_kind_loads_in_a_fresh_process(tmp_path, tiny_folder):
    """Stock transformers, whose parameters require gradients while the drafter is loaded."""
    target, tokenizer = load_target(tiny_folder)
    folders = []
    for kind, settings in KINDS.items():
        drafter = random_drafter(kind, target, **settings)
        save_drafter(drafter, tmp_path / kind / "drafter", target, tiny_folder, tokenizer, "")
        folders.append(str(tmp_path / f"{kind}-exported"))
        export(str(tmp_path / kind), "transformers", folders[-1])
    done = subprocess.run([sys.executable, "-c", FRESH, *folders], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_saved_depends_on_no_flag(kind, tmp_path, tiny_folder):
    target, tokenizer = load_target(tiny_folder)
    drafter = made(kind, target, **KINDS[kind])
    parameters = set(drafter.trained())
    target.model.requires_grad_(True)  # its user's own flags
    assert set(drafter.trained()) == parameters
    save_drafter(drafter, tmp_path / "drafter", target, tiny_folder, tokenizer, "")
    target.model.requires_grad_(False)
    load_drafter(tmp_path / "drafter", target, tokenizer)


def test_the_example_of_the_docs_runs(folder, monkeypatch):
    text = (Path(__file__).parents[1] / "docs/serving.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    monkeypatch.chdir(folder.parent)
    names: dict[str, Any] = {}
    exec(example, names)
    assert names["out"].shape[1] > names["inputs"]["input_ids"].shape[1]


def test_the_model_stays_as_it_was(folder):
    """Its flags are its user's own, and it may be cast between two calls."""
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    asked = inputs(folder)
    model.train()
    model.model.layers[0].eval()
    model.lm_head.weight.requires_grad_(False)
    before = [(m.training, [p.requires_grad for p in m.parameters()]) for m in model.modules()]
    model.generate(**asked, max_new_tokens=4, do_sample=False)
    assert [(m.training, [p.requires_grad for p in m.parameters()]) for m in model.modules()] == before
    model.double()
    out = model.generate(**asked, max_new_tokens=8, do_sample=False, return_dict_in_generate=True)
    assert out.stats.tokens == 8


def test_stop_strings_of_the_generation_config(folder):
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    asked = inputs(folder)
    whole = model.generate(**asked, max_new_tokens=24, do_sample=False)[0, asked["input_ids"].shape[1] :]
    pairs = [tokenizer.decode(whole[i : i + 2]) for i in range(len(whole) - 1)]
    early, *_, late = [text for text in pairs if "\ufffd" not in text]  # half a character is no text to stop at
    model.generation_config.stop_strings = [late]
    told = {"max_new_tokens": 24, "do_sample": False, "tokenizer": tokenizer}
    wanted = model.generate(**asked, **told)
    found = model.generate(**asked, **told, custom_generate=str(folder), trust_remote_code=True)
    assert torch.equal(found, wanted)
    first = model.generation_config.stop_strings
    with _own_stops(model.generation_config) as one, _own_stops(model.generation_config) as two:  # two threads
        assert one == two == first
    assert model.generation_config.stop_strings == first
    # What a call says counts more than what its config does
    later = GenerationConfig(stop_strings=[early], max_new_tokens=24, do_sample=False)
    told = {"generation_config": later, "stop_strings": first, "tokenizer": tokenizer}
    wanted = model.generate(**asked, **told)
    found = model.generate(**asked, **told, custom_generate=str(folder), trust_remote_code=True)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("text", ["{", "[]", '{"drafter": "drafter"}'])
def test_a_damaged_note_is_named(text, folder, tmp_path):
    shutil.copytree(folder, tmp_path / "f")
    (tmp_path / "f/selfspec.json").write_text(text)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "f")
    refused(r"selfspec.json is not what was written", generate, model, torch.tensor([[1, 2]]))


def test_the_callers_config_stays_as_it_is(folder):
    """Whatever else is imported: only of a request of transformers' server the length is lowered to what can be."""
    pytest.importorskip("starlette")
    model, asked = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True), inputs(folder)
    config = GenerationConfig(max_new_tokens=4000, do_sample=False)
    model.generate(**asked, generation_config=config)
    assert config.max_new_tokens == 4000
    short = GenerationConfig(max_length=asked["input_ids"].shape[1] + 3, do_sample=False)
    assert model.generate(**asked, generation_config=short).shape[1] <= short.max_length
    assert model.generate(asked["input_ids"], GenerationConfig(max_new_tokens=2, do_sample=False)).shape[1] > 2


def test_a_moved_folder_is_its_own_target(folder, tmp_path, plain):
    shutil.copytree(folder, tmp_path / "moved")
    spec = selfspec.load(str(tmp_path / "moved"))
    assert Path(spec.target.name) == tmp_path / "moved"
    prompt = [[5, 9, 2, 7]]
    assert spec.generate(prompt, 8).token_ids == spec.autoregressive(prompt, 8).token_ids


def test_a_model_from_elsewhere_is_refused(plain):
    refused(r"selfspec.json is missing", generate, plain, torch.tensor([[1, 2]]))


def test_an_exported_folder_can_be_exported_from(folder, tmp_path):
    before = (folder / "selfspec.json").read_text()
    export(str(folder), "transformers", tmp_path / "again", nodes=4)
    assert json.loads((tmp_path / "again/selfspec.json").read_text()) == {
        "drafter": "drafter+prompt_lookup",
        "nodes": 4,
    }
    assert selfspec.load(str(folder)).drafter.sources == ("prompt_lookup", str(folder))
    assert (folder / "selfspec.json").read_text() == before


def test_a_target_without_safetensors_is_refused(heads_folder, tiny_folder, tmp_path):
    shutil.copytree(tiny_folder, tmp_path / "t")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "t")
    (tmp_path / "t/model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "t/pytorch_model.bin")
    with pytest.raises(ValueError, match=r"has no config.json and safetensors files"):
        export(str(heads_folder), "transformers", tmp_path / "out", str(tmp_path / "t"))
    assert not (tmp_path / "out").exists()


def test_an_altered_target_is_refused(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "f")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "f")
    model.lm_head.weight.data += 1
    with pytest.raises(ValueError, match="was made for target"):
        model.generate(**inputs(folder), max_new_tokens=4, custom_generate=str(tmp_path / "f"), trust_remote_code=True)


class Server:
    """`transformers serve FOLDER`, on a free port."""

    def __init__(self, folder: Path, log: Path) -> None:
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            self.port = found.getsockname()[1]
        command = [str(Path(sys.executable).with_name("transformers")), "serve", str(folder), "--trust-remote-code"]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--device", "cpu"]
        self.folder, self.log = folder, log
        self.process = subprocess.Popen(command, stdout=log.open("w"), stderr=subprocess.STDOUT)
        for _ in range(600):
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=1):
                    return
            except OSError:
                assert self.process.poll() is None, log.read_text()
                time.sleep(0.1)
        raise TimeoutError(log.read_text())

    def ask(self, **body: Any) -> Any:
        told = {"model": str(self.folder), "messages": ASKED, "temperature": 0.0, "max_tokens": 24, **body}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/chat/completions",
            json.dumps(told).encode(),
            {"Content-Type": "application/json"},
        )
        return urllib.request.urlopen(request, timeout=60)

    def text(self, **body: Any) -> str:
        with self.ask(**body) as answer:
            return str(json.load(answer)["choices"][0]["message"]["content"])

    def streamed(self, **body: Any) -> str:
        with self.ask(stream=True, **body) as answer:
            lines = [line.decode().removeprefix("data: ").strip() for line in answer]
        chunks = [json.loads(line) for line in lines if line.startswith("{")]
        return "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c.get("choices"))


@pytest.fixture(scope="module")
def server(folder, tmp_path_factory) -> Iterator[Server]:
    pytest.importorskip("fastapi", reason="transformers serve needs transformers[serving]")
    found = Server(folder, tmp_path_factory.mktemp("log") / "server.txt")
    yield found
    found.process.terminate()
    found.process.wait(20)


@pytest.mark.timeout(180)
def test_transformers_own_server_speculates(server, folder, plain):
    """A chat completion, the same streamed, a stop string, two clients at once, one that hangs up: always the text of
    plain decoding."""
    tokenizer, asked = AutoTokenizer.from_pretrained(folder), inputs(folder)
    ids = plain.generate(**asked, max_new_tokens=24, do_sample=False)[0, asked["input_ids"].shape[1] :]
    wanted = tokenizer.decode(ids, skip_special_tokens=True)
    assert server.text() == wanted
    assert server.streamed() == wanted
    stop = wanted[len(wanted) // 2 :][:2]
    stopped = server.text(stop=[stop])
    assert wanted.startswith(stopped)
    assert stop in stopped
    assert len(stopped) < len(wanted)

    found: list[str] = []
    clients = [threading.Thread(target=lambda: found.append(server.streamed())) for _ in range(2)]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    assert found == [wanted] * 2

    with server.ask(stream=True, max_tokens=120) as answer:
        answer.readline()  # and no more
    assert server.text() == wanted
    with server.ask(max_tokens=4000) as answer:
        whole = json.load(answer)
    cut = whole["usage"]["total_tokens"] >= 255  # the target's positions
    assert whole["choices"][0]["finish_reason"] == ("length" if cut else "stop")

    long = [{"role": "user", "content": "word " * 3000}]
    for body, reason in (
        ({"generation_config": json.dumps({"num_beams": 2, "max_new_tokens": 4})}, "beam_search"),
        ({"max_tokens": 0}, "max_new_tokens"),
        ({"messages": long}, "255"),
    ):
        with pytest.raises(urllib.error.HTTPError, match="400") as refused:
            server.text(**body)
        assert reason in json.load(refused.value)["detail"]
    assert server.text() == wanted, "a refused request leaves the server as it was"
