"""Drafters trained without the target's layers: states of a server or of a folder, the target as three tensors."""

import json
import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import compose_config, losses, refused, save_tiny, typed, write_lines
from fake_server import FakeServer
from families import build as build_family
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerFast

from selfspec.checkpoints.drafter_folder import load_drafter, read_meta, save_drafter
from selfspec.checkpoints.load_target import load_target
from selfspec.checkpoints.target_files import Shards
from selfspec.checkpoints.target_parts import layer_by_layer, load_parts
from selfspec.checkpoints.weights_hash import parts_hash
from selfspec.cli import servers as commands
from selfspec.cli.training_runs import run_training
from selfspec.core.generate import autoregressive
from selfspec.core.options import Options
from selfspec.core.sampling import Sampling, gumbel, noise_bits
from selfspec.core.target import Target
from selfspec.data.packing import Packed
from selfspec.data.store import in_a_row, joined
from selfspec.drafters.base import Trained
from selfspec.drafters.registry import build, config_class, drafter_class
from selfspec.integrations import serve_target
from selfspec.integrations.export import export
from selfspec.integrations.serve_target import (
    described,
    probe,
    record,
    server_command,
    serves,
    shown_command,
    untrained,
)
from selfspec.training.draft_loss import DraftLoss
from selfspec.training.recorded import posterior_noise, recorded_samples
from selfspec.training.states import behind_layers, key_of, wanted_layers, write_about
from selfspec.training.states_folder import FromFolder
from selfspec.training.states_server import Ahead, FromServer
from selfspec.utils import openai_client as client
from selfspec.utils.files import cache_folder
from selfspec.utils.openai_client import Servers

KINDS = ("eagle3", "medusa", "sequential", "mtp", "block")
LAYERS = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tokenizer) -> str:
    return save_tiny(tmp_path_factory.mktemp("states") / "tiny", tokenizer, num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def whole(folder) -> tuple[Target, PreTrainedTokenizerFast]:
    target, tokenizer = load_target(folder)
    return target, tokenizer


@pytest.fixture(scope="module")
def parts(folder) -> Target:
    return load_parts(folder, device="cpu")[0]


@pytest.fixture
def fake(whole, tmp_path) -> Any:
    made = FakeServer(*whole, tmp_path / "states", list(range(1, LAYERS + 1)))
    yield made
    made.close()


@pytest.fixture(autouse=True)
def quick(monkeypatch) -> None:
    monkeypatch.setattr(client, "_FIRST", 0.01)


def drafter_on(target: Target, kind: str, **settings: Any) -> Trained:
    torch.manual_seed(3)
    return build(drafter_class(kind), target, config_class(drafter_class(kind))(**settings))


def lines(tmp_path: Path, count: int = 24) -> str:
    talk = [
        {
            "messages": [
                {"role": "user", "content": f"say {i}"},
                {"role": "assistant", "content": f"answer {i} is {i * i}"},
            ]
        }
        for i in range(count)
    ]
    return write_lines(tmp_path / "chat.jsonl", talk)


# -- the target as three tensors


def test_parts_are_the_targets_own(whole, parts, folder):
    target, tokens = whole[0], torch.tensor([[3, 7, 11, 2, 9]])
    full = target.text(tokens, reads=tuple(range(LAYERS)))
    out = behind_layers(parts, tokens, {LAYERS - 1: full.features[LAYERS - 1]})
    assert torch.equal(out.logits, full.logits)
    assert torch.equal(out.hidden, full.hidden)
    assert parts.partial
    assert parts.end_tokens == target.end_tokens
    assert not target.partial
    assert parts_hash(parts) == parts_hash(target)
    in_memory = sum(p.numel() for p in {id(p): p for p in parts.model.parameters()}.values() if not p.is_meta)
    assert in_memory == 2 * target.vocab_size * target.hidden_size + target.hidden_size
    for layer, states in layer_by_layer(parts, tokens, Shards(folder)):
        assert torch.allclose(states, full.features[layer], atol=1e-5)
    assert all(p.is_meta for p in parts.layers.parameters())


@pytest.mark.parametrize("family", ["qwen3", "granite", "gpt2"])
def test_parts_of_other_families(family, tmp_path, tokenizer):
    """Logits scaled, embeddings scaled or tied, learned positions."""
    place = save_tiny(tmp_path / family, tokenizer, family)
    target, parts, tokens = load_target(place)[0], load_parts(place, device="cpu")[0], torch.tensor([[3, 7, 11, 2]])
    last = target.n_layers - 1
    full = target.text(tokens, reads=(last,))
    assert torch.allclose(behind_layers(parts, tokens, full.features).logits, full.logits, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab", [None, 40])
def test_losses_are_those_of_the_whole_target(kind, vocab, whole, parts, monkeypatch):
    monkeypatch.setattr("selfspec.training.states._PIECE", 30)  # tokens of which all logits are held: not all of them
    tokens = torch.randint(whole[0].vocab_size, (2, 40), generator=torch.Generator().manual_seed(0))
    batch = {"tokens": tokens, "mask": torch.ones_like(tokens, dtype=torch.bool), "documents": torch.zeros_like(tokens)}
    ours, theirs = (drafter_on(target, kind, draft_vocab=vocab) for target in (parts, whole[0]))
    with torch.no_grad():
        for name, p in theirs.trained().items():
            p.copy_(ours.trained()[name])

    class Known(FromServer):
        def __init__(self) -> None:
            super(FromServer, self).__init__(parts, ours.reads, None)

        def of(self, piece: torch.Tensor) -> torch.Tensor:
            found = whole[0].text(piece[None], False, reads=tuple(self.columns)).features
            return torch.stack([found[layer][0] for layer in self.columns], 1)

    losses = []
    for module in (DraftLoss(ours, parts, states=Known()), DraftLoss(theirs, whole[0])):
        torch.manual_seed(0)
        losses.append(float(module(batch)[0]))
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


@pytest.mark.parametrize("kind", ["early_exit", "mask"])
def test_kinds_that_run_the_targets_layers_are_refused(kind, folder, tmp_path, fake):
    config = training(tmp_path, folder, fake.url, kind)
    refused(rf"drafter={kind}.*eagle3, medusa", run_training, config, tmp_path / "run")


def test_a_checkpoint_without_its_parts(folder, tmp_path, tokenizer):
    place = Path(save_tiny(tmp_path / "odd", tokenizer))
    weights = load_file(place / "model.safetensors")
    save_file({k: v for k, v in weights.items() if "norm.weight" not in k}, place / "model.safetensors")
    refused(r"hold no model\.norm\.weight", load_parts, str(place))
    (place / "model.safetensors").write_bytes(b"cut")
    refused("no whole safetensors file", load_parts, str(place))
    (place / "model.safetensors").unlink()
    refused("no safetensors files", load_parts, str(place), error=FileNotFoundError)


# -- training


def training(tmp_path: Path, folder: str, states: str | None, kind: str = "eagle3", *more: str) -> Any:
    url = [f"train.states_url={states}"] if states is not None and states.startswith("http") else []
    source = "server" if url else states
    given = [] if states is None else [f"train.states={source}", *url]
    few = "train.prompts=4 train.new_tokens=8 train.prompt_tokens=4 train.validation_rows=2 train.length=48"
    loop = "loop.steps=20 loop.batch_size=2 loop.validate_every=20 loop.log_every=1 loop.precision=no loop.warmup=2"
    return compose_config(
        "train",
        *[f"drafter={kind}", "name=states", f"target.name={folder}", "target.dtype=float32", "target.device=cpu"],
        *["data=jsonl", f"data.path={lines(tmp_path)}", "data.validation_share=0.3", *few.split(), *loop.split()],
        *["logger=none", *given, *more],
    )


@pytest.mark.parametrize("kind", ["eagle3", pytest.param("medusa", marks=pytest.mark.slow)])
def test_server_folder_and_target_train_alike(kind, folder, parts, whole, fake, tmp_path):
    first = tmp_path / "first"
    save_drafter(drafter_on(parts, kind), first / "drafter", parts, folder, whole[1], "untrained")
    begin = f"train.init_from={first}", "train.length=64"  # of whole texts
    runs = {name: tmp_path / name for name in ("server", "folder", "here")}
    fake.layers = wanted_layers(drafter_on(parts, kind).reads, LAYERS)
    figures = run_training(training(tmp_path, folder, fake.url, kind, *begin), runs["server"])
    assert not list(fake.folder.glob("*.safetensors*"))  # each was read and deleted
    kept = tmp_path / "kept"
    documents = texts_of(tmp_path, whole[1])
    source = FromServer(parts, drafter_on(parts, kind).reads, Servers((fake.url,)), None, 1.0)
    assert record(source, documents, kept) == len(documents)
    assert record(source, documents, kept) == 0
    fake.close()  # a folder needs no server
    run_training(training(tmp_path, folder, str(kept), kind, *begin), runs["folder"])
    run_training(training(tmp_path, folder, None, kind, *begin), runs["here"])
    found = [losses(run) for run in runs.values()]
    assert len(found[0]) == 20
    assert found[0] == pytest.approx(found[2], abs=1e-3)
    assert found[1] == pytest.approx(found[2], abs=1e-3)
    assert found[0][-1] < found[0][0]
    assert math.isfinite(figures["greedy"]["tau"]["16"])
    drafter = load_drafter(runs["server"] / "drafter", whole[0], whole[1])  # serves on the whole target
    assert drafter.kind == kind
    assert read_meta(runs["server"] / "drafter")["target"]["weights_hash"].startswith("parts:")


def test_texts_that_end_alike_are_told_apart_or_left_out(parts, tmp_path):
    """Of a text that rows cut, the states behind the cut belong to what stands before it."""
    ends = torch.tensor([20, 21])
    texts = [torch.cat([torch.arange(8) + first, ends]) for first in (0, 8, 0)]
    for i, text in enumerate(texts):
        states = torch.full((len(text), LAYERS + 1, parts.hidden_size), float(i))
        save_file({"token_ids": text, "hidden_states": states}, tmp_path / f"{i}.safetensors")
    folder = FromFolder(parts, (LAYERS - 1,), tmp_path, range(LAYERS + 1), 8)
    assert folder.of(texts[1][:8]).unique().tolist() == [1.0]
    refused("holds no states", folder.of, ends)
    alike = torch.cat([ends, torch.arange(6)])  # the shortest text is the end of another
    for name, text in (("3", alike), ("4", torch.cat([texts[1][:8], alike]))):
        states = torch.ones(len(text), LAYERS + 1, parts.hidden_size)
        save_file({"token_ids": text, "hidden_states": states}, tmp_path / f"{name}.safetensors")
    assert len(FromFolder(parts, (LAYERS - 1,), tmp_path, range(LAYERS + 1), 8).of(texts[0][:8])) == 8
    for name in ("1", "3", "4"):
        (tmp_path / f"{name}.safetensors").unlink()
    assert len(FromFolder(parts, (LAYERS - 1,), tmp_path, range(LAYERS + 1), 8).of(ends)) == 2


def test_states_of_another_model_are_not_mixed_in(parts, whole, fake, folder, tmp_path):
    fake.layers = wanted_layers((1,), LAYERS)
    source, documents = FromServer(parts, (1,), Servers((fake.url,)), None, 1.0), texts_of(tmp_path, whole[1])[:2]
    record(source, documents, tmp_path / "kept")
    write_about(tmp_path / "kept", source.layers, "another")
    refused("holds states of model another, not", record, source, documents, tmp_path / "kept")


def texts_of(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> list[torch.Tensor]:
    from selfspec.data.records import JsonLines
    from selfspec.data.store import tokenize

    data = JsonLines(path=lines(tmp_path), tokenizer=tokenizer)
    corpus = tokenize([document for document, _ in data.documents()], tokenizer)
    return [corpus.document(i).tokens for i in range(len(corpus.is_chat))]


def test_a_server_that_dies_loses_nothing(folder, whole, fake, tmp_path, monkeypatch):
    monkeypatch.setattr("selfspec.training.drafter_data.Servers", lambda urls: Servers(urls, patience=0.1))
    fake.layers = wanted_layers((1, 2), LAYERS)
    more = "drafter.layers=[1,2]", "train.states_gb=0.00001", "loop.steps=10", "loop.validate_every=10"
    whole_run, broken = tmp_path / "whole", tmp_path / "broken"
    run_training(training(tmp_path, folder, fake.url, "eagle3", *more), whole_run)
    fake.dies_after = len(fake.asked) + 20
    config = training(tmp_path, folder, fake.url, "eagle3", *more)
    refused(r"saved at step \d+, it goes on", run_training, config, broken, error=ConnectionError)
    assert 0 < len(losses(broken)) < 10
    fake.dies_after = None
    run_training(config, broken)
    assert losses(broken) == losses(whole_run)
    one, two = (load_file(run / "drafter" / "drafter.safetensors") for run in (whole_run, broken))
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_export_reads_parts_alone(folder, parts, whole, tmp_path):
    save_drafter(drafter_on(parts, "eagle3"), tmp_path / "run/drafter", parts, folder, whole[1], "untrained")
    said = export(str(tmp_path / "run"), "vllm", tmp_path / "out")
    assert any("read back" in line for line in said)
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 3]


def test_another_checkpoint_of_the_same_shape(parts, folder, tmp_path, tokenizer):
    save_drafter(drafter_on(parts, "medusa"), tmp_path / "drafter", parts, folder, tokenizer, "untrained")
    place = Path(save_tiny(tmp_path / "other", tokenizer, num_hidden_layers=LAYERS))
    weights = load_file(place / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"] * 1.5
    save_file(weights, place / "model.safetensors", {"format": "pt"})
    for load in (load_target, load_parts):
        refused("not for", load_drafter, tmp_path / "drafter", load(str(place))[0], tokenizer)


@pytest.mark.parametrize("family", ["Gemma 3 (alternating windows)", "gpt-oss (attention sinks)"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_parts_are_cast_as_the_whole_target_is(family, dtype, tmp_path, tokenizer):
    build_family(family, dtype=torch.bfloat16, hidden_size=40).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    whole, parts = load_target(str(tmp_path), dtype)[0].model, load_parts(str(tmp_path), dtype, "cpu")[0].model
    tokens = torch.arange(9)[None]
    ours, theirs = (model.get_input_embeddings()(tokens) for model in (parts, whole))
    assert torch.equal(ours, theirs)
    assert parts.get_decoder().norm.weight.dtype == whole.get_decoder().norm.weight.dtype


def test_parts_beside_other_modules_of_the_same_names(whole, tmp_path, tokenizer):
    """As checkpoints of several models have them: nested, with a module of another norm beside; its head differs,
    though the config ties it."""
    place = Path(save_tiny(tmp_path / "nested", tokenizer, num_hidden_layers=LAYERS, tie_word_embeddings=False))
    weights = load_file(place / "model.safetensors")
    nested = {k.replace("model.", "model.language_model.", 1): t for k, t in weights.items()}
    nested |= {k.replace("model.", "mtp."): t + 1 for k, t in weights.items() if "layers.0." in k or ".norm." in k}
    nested |= {"model.language_model.layers.0.attn.norm.weight": torch.ones(3)}
    save_file(nested, place / "model.safetensors", {"format": "pt"})
    config = json.loads((place / "config.json").read_text()) | {"tie_word_embeddings": True}
    (place / "config.json").write_text(json.dumps(config))
    target = load_parts(str(place), device="cpu")[0]
    assert torch.equal(target.decoder.norm.weight, weights["model.norm.weight"])
    assert torch.equal(target.lm_head.weight, weights["lm_head.weight"])
    assert not torch.equal(target.lm_head.weight, weights["model.embed_tokens.weight"])


# -- states


def test_prefetching_is_bounded(parts, fake):
    tokens = torch.arange(400) % 50
    corpus = joined(
        tokens, torch.ones(400, dtype=torch.bool), torch.arange(0, 401, 20), torch.ones(20, dtype=torch.bool)
    )
    fake.layers = wanted_layers((1,), LAYERS)
    one = 20 * 2 * parts.hidden_size * 4  # bytes of a document's states
    states = FromServer(parts, (1,), Servers((fake.url,)), None, 3.5 * one / 1e9)
    batches = Ahead(Packed(corpus, 20, 1, 0), states, 30, None)
    for step in range(30):
        batches.prepare(step)
        features = states.features(batches(step))
        assert states.held <= 3.5 * one
        assert set(features) == {1, LAYERS - 1}
        assert all(part.any() for part in features.values())
    states.close()
    assert len(fake.asked) <= 30  # none that no step reads
    assert states.summary.startswith("the trainer waited")


@pytest.mark.parametrize(("seconds", "slower"), [(0.02, "server"), (0.0, "trainer")])
def test_it_says_which_of_the_two_waits(parts, fake, seconds, slower):
    fake.layers, answer = wanted_layers((1,), LAYERS), fake.write
    fake.write = lambda prompt: (time.sleep(seconds), answer(prompt))[1]
    states = FromServer(parts, (1,), Servers((fake.url,)), None, 1.0)
    texts = [torch.arange(i, i + 6) for i in range(12)]
    for text in texts[: 2 if seconds else 12]:
        states.ask(text)
    for coming in () if seconds else [*states._coming.values()]:
        coming.result()
    for text in texts:
        states.wait([text])
        time.sleep(0.0 if seconds else 0.02)
    assert states.summary.endswith(f"the {slower} is slower than the {'trainer' if slower == 'server' else 'server'}")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda states: states[:, :1], r"\[\d+, 1, 32\] \(tokens, layers, width\)"),
        (lambda states: states[:, :, :8], r"\[\d+, 2, 8\] \(tokens, layers, width\)"),
        (lambda states: states * math.nan, "no finite numbers"),
        (lambda states: states.long(), "no finite numbers"),
    ],
)
def test_wrong_states_are_refused(parts, fake, change, said):
    fake.layers, fake.change = wanted_layers((1,), LAYERS), change
    states = FromServer(parts, (1,), Servers((fake.url,)), None, 1.0)
    refused(said, states.of, torch.arange(6))


def test_a_server_of_other_layers_is_refused(parts, fake):
    fake.layers = [1, 4]
    write_about(fake.folder, fake.layers, "tiny")
    states = FromServer(parts, (1,), Servers((fake.url,)), None, 1.0)
    refused(r"hands out layers \[1, 4\].*but layers \[2, 4\]", states.of, torch.arange(6))


def test_texts_that_were_recorded_cut_are_cut(parts, fake, tmp_path):
    fake.layers = wanted_layers((1,), LAYERS)
    source, text = FromServer(parts, (1,), Servers((fake.url,)), None, 1.0), torch.arange(40)
    assert record(source, [text[:25]], tmp_path / "cut") == 1
    states = FromFolder(parts, (1,), tmp_path / "cut", None, 10)
    corpus = joined(text, torch.ones(40, dtype=torch.bool), torch.tensor([0, 40]), torch.ones(1).bool())
    assert len(states.covered(corpus, 10, "training").tokens) == 20  # whole pieces
    other = FromServer(parts, (0,), Servers((fake.url,)), None, 1.0)
    refused("give another folder", record, other, [text], tmp_path / "cut")


def test_a_server_without_states(parts, fake):
    fake.layers = None
    states = FromServer(parts, (1,), Servers((fake.url,)), None, 1.0)
    refused("hands out no hidden states", states.of, torch.arange(6))


def test_states_on_a_disk_that_is_not_shared(parts, fake, tmp_path, monkeypatch):
    monkeypatch.setattr("selfspec.training.states_server.time.sleep", lambda seconds: None)
    monkeypatch.setattr(fake, "write", lambda prompt: tmp_path / "elsewhere.safetensors")
    states = FromServer(parts, (1,), Servers((fake.url,)), None, 1.0)
    refused("shares with it", states.of, torch.arange(6))


@pytest.fixture
def recorded(parts, fake, whole, tmp_path) -> Path:
    """Greedy and sampled texts of the target with their states."""
    fake.layers = wanted_layers((1, 2), LAYERS)
    texts = []
    for temperature in (0.0, 1.0):
        for i in range(4):
            prompt = [1 + i, 2 + i, 3]
            options = Options(20, Sampling(temperature), [i], frozenset())
            texts.append(torch.tensor(prompt + autoregressive(whole[0], [prompt], options).token_ids[0]))
    source = FromServer(parts, (1, 2), Servers((fake.url,)), None, 1.0)
    record(source, texts, tmp_path / "folder")
    return tmp_path / "folder"


def test_what_a_folder_holds(recorded, parts, folder, monkeypatch):
    said = "\n".join(described(recorded))
    assert "8 texts of 184 tokens" in said
    assert f"layers [2, 3, {LAYERS}]" in said
    assert set(serves([2, 3, LAYERS], parts)) >= {"medusa", "mtp", "sequential"}
    assert "eagle3" not in serves([LAYERS], parts)
    states = FromFolder(parts, (1, 2), recorded, None, 64)
    monkeypatch.setattr(serve_target, "_PROBED", 8)  # of a text of 23
    assert len(probe(states, states.first, Shards(folder))) == 3


def test_a_number_that_is_one_off_is_found(recorded, parts, folder):
    states = FromFolder(parts, (0, 2), recorded, [1, 3, LAYERS], 64)  # as one who counts layers from 0 says
    refused("column 0 should be layer 1, nearest is 2", probe, states, states.first, Shards(folder))


def test_folders_that_do_not_serve(recorded, parts, tmp_path):
    refused(r"reads \[1, 4\].*\[1\] are missing", FromFolder, parts, (0,), recorded, None, 64)
    write_about(tmp_path / "none", [LAYERS], "tiny")
    refused("no file here holds token_ids", FromFolder, parts, (), tmp_path / "none", None, 64)
    refused("holds no file", list, described(tmp_path / "none"))
    states = FromFolder(parts, (1,), recorded, None, 64)
    other = joined(torch.arange(30), torch.ones(30, dtype=torch.bool), torch.tensor([0, 30]), torch.ones(1).bool())
    refused("states of none of the 1 training documents", states.covered, other, 64, "training")
    path = next(recorded.glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:200])  # cut off: it is left out, and told
    again = FromFolder(parts, (1,), recorded, None, 64)
    assert again.unread == [path]
    assert "1 files are being written, cut off" in "\n".join(described(recorded))


def test_a_cut_document_is_found_by_its_pieces(recorded, parts):
    states = FromFolder(parts, (1,), recorded, None, 10)
    whole_text = load_file(next(recorded.glob("*.safetensors")))
    for start in (0, 10, 20):
        piece = whole_text["token_ids"][start : start + 10]
        assert torch.equal(states.of(piece), whole_text["hidden_states"][start : start + 10])


def test_states_that_a_run_has_kept(folder, whole, parts, tmp_path):
    """What train.cache=disk keeps serves as train.states."""
    run_training(training(tmp_path, folder, None, "eagle3", "train.cache=disk", "loop.steps=12"), tmp_path / "first")
    place = next(path.parent for path in (cache_folder() / "hidden").rglob("rows.safetensors"))
    reads = drafter_on(parts, "eagle3").reads
    states = FromFolder(parts, reads, place, None, 48)
    own = whole[0].text(states.first[None], False, reads=tuple(states.columns)).features
    for layer, column in states.columns.items():
        assert torch.allclose(states.of(states.first)[:, column], own[layer][0], atol=1e-5)
    # a second drafter's layers join those of the first, and a training reads them without the target
    run_training(training(tmp_path, folder, None, "medusa", "train.cache=disk", "loop.steps=12"), tmp_path / "second")
    assert json.loads((place / "states.json").read_text())["layers"] == [
        int(path.stem.removeprefix("layer_")) + 1 for path in sorted(place.glob("layer_*.states"))
    ]
    for path in place.glob("layer_*.done"):  # a second training that has only begun
        if int(path.stem.removeprefix("layer_")) not in states.columns:
            path.write_bytes(bytes(path.stat().st_size))
    run_training(training(tmp_path, folder, str(place), "eagle3"), tmp_path / "third")
    assert len(losses(tmp_path / "third")) == 20
    text = states.folder / f"layer_{states.layers[0] - 1}.states"
    with text.open("r+b") as file:
        file.seek(text.stat().st_size // len(states._hashes[0]) * int(states.places[key_of(states.first)][0].name))
        file.write(b"\x7f\x01\x02\x03")
    with pytest.raises(ValueError, match="were changed since they were kept; delete the folder"):
        FromFolder(parts, reads, place, None, 48).of(states.first)


def test_texts_that_stand_twice_validate_or_train(whole, parts):
    g = torch.Generator().manual_seed(0)
    texts = [torch.randint(100, (20,), generator=g) for _ in range(40)]
    mask = torch.arange(20) > 5
    corpus = in_a_row([(text, mask) for text in texts + texts], torch.zeros(80, dtype=torch.bool))
    states = object.__new__(FromFolder)
    states.folder = Path("kept")
    train, validation = states.held_out(corpus)
    sides = [{key_of(one.document(i).tokens) for i in range(len(one.is_chat))} for one in (train, validation)]
    assert min(map(len, sides)) >= 1
    assert not sides[0] & sides[1]


def test_samples_of_recorded_states(recorded, parts):
    states = FromFolder(parts, (1, 2), recorded, None, 64)
    texts = [load_file(path)["token_ids"] for path in sorted(recorded.glob("*.safetensors"))]
    starts = torch.tensor([0, *map(len, texts)]).cumsum(0)
    mask = torch.cat([torch.arange(len(text)) >= 3 for text in texts])
    corpus = joined(torch.cat(texts), mask, starts, torch.ones(len(texts), dtype=torch.bool))
    samples = recorded_samples(parts, corpus, states, 3, 12, 64)
    assert {mode: len(found) for mode, found in samples.items()} == {"greedy": 3, "sampled": 3}
    assert all(sample.noise is None for sample in samples["greedy"])
    for sample in samples["sampled"]:
        assert sample.start == 3
        assert len(sample.tokens) == 15
        at = torch.arange(sample.start, len(sample.tokens))
        logits = parts.lm_head(sample.hidden[at - 1]).double()
        assert torch.equal((logits + sample.noise(at)).argmax(-1), sample.tokens[at])  # the text is its pick


def test_posterior_noise_is_gumbel_noise(parts):
    """Over texts that are sampled, noise given the pick is noise: mean, variance and tails of a standard Gumbel."""
    torch.manual_seed(0)
    count, vocab = 4000, parts.vocab_size
    outputs = torch.randn(1, parts.hidden_size).expand(count + 1, -1)
    logits = (
        behind_layers(parts, torch.zeros(1, 1, dtype=torch.long), {LAYERS - 1: outputs[None, :1]}).logits[0, 0].double()
    )
    free = gumbel(noise_bits(torch.tensor(5), torch.tensor(0), torch.arange(count)[:, None], torch.arange(vocab)))
    tokens = torch.cat([torch.zeros(1, dtype=torch.long), (logits + free).argmax(-1)])
    noise = posterior_noise(parts, outputs, tokens, 9)(torch.arange(1, count + 1))
    assert torch.equal((logits + noise).argmax(-1), tokens[1:])
    for values in (noise.flatten(), noise[:, int(logits.argmax())]):
        assert float(values.mean()) == pytest.approx(0.5772, abs=0.08)
        assert float(values.var()) == pytest.approx(math.pi**2 / 6, rel=0.1)
        assert float((values > 3).double().mean()) == pytest.approx(1 - math.exp(-math.exp(-3)), abs=0.012)


# -- commands


def test_commands_of_a_server(folder, tmp_path, monkeypatch):
    plan = folder, tmp_path / "states", "python", 8001, 512, "float32"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    environment, words = server_command(*plan, [2, 3, 4])
    assert "selfspec_cpu_connector" in " ".join(words)
    assert (Path(environment["PYTHONPATH"]) / "selfspec_cpu_connector.py").is_file()
    assert json.loads(words[words.index("--speculative-config") + 1])["draft_model_config"]["hf_config"] == {
        "eagle_aux_hidden_state_layer_ids": [2, 3, 4]
    }
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    environment, words = server_command(*plan, [2, 3, 4])
    assert words[words.index("--tensor-parallel-size") + 1] == "4"  # one GPU is the trainer's
    assert "ExampleHiddenStatesConnector" in " ".join(words)
    assert "--no-enable-chunked-prefill" in words
    assert environment == {"CUDA_VISIBLE_DEVICES": "1,2,3,4"}
    assert shown_command({"PYTHONPATH": "/my path"}, ["python", "a b"]) == "PYTHONPATH='/my path' python 'a b'"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7,8,9,10,11")
    assert server_command(*plan, [2])[0] == {"CUDA_VISIBLE_DEVICES": "5,6,7,8"}
    environment, words = server_command(*plan)
    assert not environment
    assert words[words.index("--tensor-parallel-size") + 1] == "8"
    assert "--kv-transfer-config" not in words
    positions = json.loads((Path(folder) / "config.json").read_text())["max_position_embeddings"]
    words = server_command(folder, tmp_path, "python", 8001, positions, "float32")[1]
    assert words[words.index("--max-model-len") + 1] == str(positions)  # more is refused by vLLM
    refused("--drafter mask", untrained, folder, "mask")


def test_the_commands(recorded, fake, folder, tmp_path, capsys):
    commands.states(["--check", str(recorded), "--target", folder])
    said = capsys.readouterr().out
    assert "they train:" in said
    assert said.count("relative error") == 3
    fake.layers = wanted_layers((1, 2), LAYERS)
    asked = ["--url", fake.url, "--target", folder, "--path", lines(tmp_path)]
    commands.states(["--write", str(tmp_path / "written"), "--drafter", "medusa", "--layers", "2,3,4", *asked])
    assert "states of 24 texts were written" in capsys.readouterr().out
    commands.serve_target([folder, "--drafter", "medusa", "--dry-run", str(tmp_path / "dry")])
    assert "--speculative-config" in capsys.readouterr().out
    assert (tmp_path / "dry/config.json").is_file()
    questions = write_lines(tmp_path / "q.jsonl", [{"question": "what is it"}])
    commands.acceptance([fake.url, "--questions", questions, "--target", folder, "--max-new-tokens", "4"])
    said = capsys.readouterr().out
    assert "acceptance length 2.50 over 1 drafts; 1 answers" in said
    assert "accepted by position 1.000 0.500" in said


@pytest.mark.parametrize(
    ("command", "arguments", "said"),
    [
        ("states", ["--check", "nowhere"], "there is no such folder"),
        ("states", ["--write", "here"], "--write needs --target too"),
        ("acceptance", ["localhost", "--questions", "source", "--target", "tiny-target"], "no address"),
        ("serve-target", ["nowhere/at/all", "--plain"], "nowhere/at/all"),
        ("serve-target", ["tiny-target", "--dry-run", "."], "give a new folder"),
    ],
)
def test_wrong_arguments(command, arguments, said, capsys):
    assert typed(command, *arguments) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["train.states=nowhere"], "train.states=nowhere is no folder"),
        (["train.states=server"], "go together"),
        (["train.states_url=http://h"], "are read with train.states"),
        (["train.states=server", "train.states_url=http://a:b@h"], "OPENAI_API_KEY"),
        (["train.states=server", "train.states_url=http://h", "train.distill.rows=4"], "take data=server"),
        (["train.states=server", "train.states_url=http://h", "train.states_gb=0"], "above 0"),
    ],
)
def test_wrong_settings(settings, said, folder, tmp_path):
    refused(said, run_training, training(tmp_path, folder, None, "eagle3", *settings), tmp_path / "run")
