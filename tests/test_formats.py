"""Drafters in the forms of other engines: written, checked, read back."""

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import VOCAB, Watch, made, randomize, refused, tiny_model
from judges import check_eagle3, check_medusa
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import selfspec
from selfspec.checkpoints.drafter_folder import save_drafter
from selfspec.checkpoints.formats import eagle3
from selfspec.checkpoints.loading import find_drafter
from selfspec.core.generate import autoregressive, speculative
from selfspec.core.options import Options
from selfspec.core.pass_cache import TextCache
from selfspec.core.support import cache_name
from selfspec.core.target import Target
from selfspec.drafters.base import Drafter
from selfspec.drafters.eagle3 import Eagle3, Eagle3Config
from selfspec.drafters.feature import Feature, FeatureConfig
from selfspec.drafters.mask import Mask
from selfspec.drafters.medusa import Medusa, MedusaConfig
from selfspec.drafters.parts.views import lora_of
from selfspec.integrations import export as exporting
from selfspec.integrations.engines import FORMATS, refuse
from selfspec.integrations.export import export

IDS = eagle3.IDS
CASES: dict[str, Eagle3Config] = {
    "portable": Eagle3Config(layers=[0, 1]),
    "three": Eagle3Config(layers=[0, 1, 2], fc_norm=True, norm_output=True),
    "few": Eagle3Config(layers=[1], draft_vocab=20),
    "own": Eagle3Config(layers=[0, 2], head="own", draft_vocab=17, norm_before_residual=True, norm_before_fc=True,
        llama={"attention_bias": True, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}),
    "yarn": Eagle3Config(layers=[1], llama={"rope_parameters": {"rope_type": "yarn", "rope_theta": 500.0, "factor": 2.0,
        "original_max_position_embeddings": 32}}),
    "llama3": Eagle3Config(layers=[1], llama={"intermediate_size": 20, "rope_parameters": {"rope_type": "llama3",
        "rope_theta": 5000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64}}),
}  # fmt: skip
CASES["qwen"] = Eagle3Config(layers=[0, 2], qk_norm=True, embeddings="own")
CASES["parallel"] = Eagle3Config(layers=[0, 2], parallel=True, unroll=1, stack=2, depth=4, mask_token=7)
CASES["parallel_own"] = Eagle3Config(
    parallel=True,
    layers=[1, 2],
    stack=3,
    depth=3,
    qk_norm=True,
    embeddings="own",
    head="own",
    draft_vocab=17,
    norm_before_fc=True,
)
FLAGS = {"layers": [0, 1], "norm_before_fc": True}


def as_its_authors(folder: Path, form: str, **changes: Any) -> None:
    """An exported EAGLE-3 folder as its team publishes them: a plain Llama's name, weights as .bin or in shards."""
    config = json.loads((folder / "config.json").read_text()) | {"architectures": ["LlamaForCausalLM"], **changes}
    for name in (*eagle3.FLAGS, "eagle_config", "num_aux_hidden_states", "rope_parameters"):
        del config[name]
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    if form == "bin":
        torch.save(tensors, folder / "pytorch_model.bin")
        return
    names = sorted(tensors)
    halves = [{name: tensors[name] for name in part} for part in (names[::2], names[1::2])]
    end = {"shards": "model-{}.safetensors", "bin_shards": "pytorch_model-{}.bin"}[form]
    for i, half in enumerate(halves):
        place = folder / end.format(i)
        if form == "shards":
            save_file(half, place)
        else:
            torch.save(half, place)
    index = {name: end.format(i) for i, half in enumerate(halves) for name in half}
    whole = "model.safetensors" if form == "shards" else "pytorch_model.bin"
    (folder / f"{whole}.index.json").write_text(json.dumps({"weight_map": index}))


def written(config: Any, folder: Path, to: str = "vllm") -> tuple[Path, Target, Any]:
    """An exported drafter with random weights, its target and itself."""
    name, target, drafter = saved(config, folder)
    export(name, to, folder / "out", str(folder / "target"))
    return folder / "out", target, drafter


@pytest.mark.parametrize("form", ["bin", "shards", "bin_shards"])
def test_folders_by_the_authors_themselves(form, folder):
    out, target, drafter = written(Eagle3Config(layers=[0, 1], draft_vocab=20), folder)
    as_its_authors(out, form, rope_scaling={"type": "linear", "factor": 2.0}, **{IDS: [1, 2]})  # the older key
    again = find_drafter(str(out), target)
    assert again.config.llama["rope_parameters"] == {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    assert torch.equal(again.vocabulary, drafter.vocabulary)
    assert torch.equal(again.trained()["layer.fc.weight"], drafter.trained()["layer.fc.weight"])
    if form == "bin":
        altered(out, num_key_value_heads=3)
        message = "out can not be read: drafter.llama.num_key_value_heads=3 must divide"
        refused(message, find_drafter, str(out), target)
    if form == "shards":
        index = json.loads((out / "model.safetensors.index.json").read_text())
        shutil.copy(out / "model-0.safetensors", out / "model-2.safetensors")
        for name, message in {
            "../../secret.safetensors": "names the file '../../secret.safetensors', which does not lie in",
            "a" * 5000: "names the file 'aaa",
            "model-2.safetensors": "index.json: two files hold ",
        }.items():
            index["weight_map"]["norm.weight"] = name
            (out / "model.safetensors.index.json").write_text(json.dumps(index))
            refused(message, find_drafter, str(out), target)


def test_a_map_of_the_whole_vocabulary_and_one_that_was_not_written(folder):
    out, target, _ = written(Eagle3Config(layers=[0, 1], head="own"), folder)
    config, tensors = json.loads((out / "config.json").read_text()), load_file(out / "model.safetensors")

    def changed(few: int, **maps: Tensor) -> str:
        (out / "config.json").write_text(json.dumps({**config, "draft_vocab_size": few}))
        head = {"lm_head.weight": tensors["lm_head.weight"][:few].contiguous()}
        save_file({**tensors, **head, **maps}, out / "model.safetensors")
        return str(out)

    whole = torch.zeros(VOCAB, dtype=torch.long)
    every = changed(VOCAB, d2t=whole, t2d=torch.ones(VOCAB, dtype=torch.bool))  # as SpecForge writes them
    assert find_drafter(every, target).vocabulary is None
    with pytest.raises(ValueError, match="d2t leads to other tokens, though draft_vocab_size=61 is the whole"):
        find_drafter(changed(VOCAB, d2t=whole + torch.arange(VOCAB).flip(0) - torch.arange(VOCAB)), target)
    others = (torch.arange(VOCAB) >= 40) & (torch.arange(VOCAB) < 60)
    with pytest.raises(ValueError, match="d2t is all zero, so that only the first 20 of 61 tokens"):
        find_drafter(changed(20, d2t=whole[:20], t2d=others), target)
    both = find_drafter(changed(20, d2t=whole[:20], t2d=torch.arange(VOCAB) < 20), target)  # the two say the same
    assert both.vocabulary.tolist() == list(range(20))


def test_medusa_heads_that_the_config_does_not_count(folder, capsys):
    out, target, _ = written(MedusaConfig(heads=4, rank=4), folder)
    (out / "config.json").write_text(json.dumps({"medusa_num_heads": 2, "medusa_num_layers": 1}))
    assert find_drafter(str(out), target).depth == 4
    assert "medusa_num_heads is 2, the file holds 4 heads, which are read" in capsys.readouterr().err
    (out / "config.json").write_text(json.dumps({"medusa_num_heads": 4, "medusa_num_layers": 2**20}))
    refused("4 heads of 1048576 layers can not lie in its file", find_drafter, str(out), target)


def test_medusa_heads_that_share_one_lm_head(folder):
    out, target, _ = written(MedusaConfig(heads=2, projection="full"), folder)
    path = next(out.glob("*.safetensors"))
    tensors = load_file(path)
    heads = {name for name in tensors if name.startswith("lm_heads.")}
    shared = tensors["lm_heads.0.weight"]
    rest = {name: tensor for name, tensor in tensors.items() if name not in heads}
    altered(out, original_lm_head=True)
    save_file({**rest, "lm_head.weight": shared}, path)
    found = find_drafter(str(out), target)
    assert isinstance(found, Medusa)
    assert torch.equal(found.full[0], found.full[1])
    assert torch.equal(found.full[0], shared.to(found.full))
    biases = {name: torch.ones_like(tensor) for name, tensor in rest.items() if name.endswith(".bias")}
    save_file({**rest, **biases, "lm_head.weight": shared}, path)
    altered(out, medusa_fc_bias=False)  # vLLM passes over them
    assert not find_drafter(str(out), target).bias.any()
    altered(out, hidden_size=64)
    refused("hidden_size is 64, the target's is 32", find_drafter, str(out), target)


HALF: dict[str, Any] = {"partial_rotary_factor": 0.5}


@pytest.mark.parametrize("config", [HALF, {"rope_parameters": {"rope_type": "default", **HALF}}])
def test_a_head_that_turns_in_part_is_refused(config, folder):
    out, target, _ = written(Eagle3Config(), folder)
    altered(out, **config)
    refused("partial_rotary_factor", find_drafter, str(out), target)


def test_a_folder_of_another_architecture_names_few_tensors(folder):
    out, target, _ = written(Eagle3Config(layers=[0, 1]), folder)
    save_file({f"model.layers.0.experts.{i}.weight": torch.zeros(2) for i in range(200)}, out / "model.safetensors")
    with pytest.raises(ValueError, match=r"model\.safetensors: missing tensors") as error:
        find_drafter(str(out), target)
    assert "and 195 more" in str(error.value)
    assert len(str(error.value)) < 900


def test_a_drafter_of_which_nothing_is_accepted_says_so():
    target, prompt = Target(tiny_model()), [[5, 9, 2, 7]]
    plain = autoregressive(target, prompt, Options(60)).token_ids
    drafter = made("eagle3", target, layers=[0, 1], draft_vocab=20)
    drafter.drafts_only(torch.tensor([t for t in range(VOCAB) if t not in plain[0]][:20]))  # of another target, say
    with pytest.warns(UserWarning, match=r"0 of \d+ drafted tokens accepted: does this drafter belong") as found:
        results = [speculative(target, prompt, Options(60), drafter.eval(), 16) for _ in range(2)]
    assert len(found) == 1
    assert all(result.token_ids == plain for result in results)
    assert re.search(r"; 0 of \d+ drafted tokens accepted", repr(results[0].stats))


def of(config: Any, target: Target) -> Any:
    """A drafter with random weights."""
    torch.manual_seed(3)
    kind = {Eagle3Config: Eagle3, MedusaConfig: Medusa, FeatureConfig: Feature}[type(config)]
    drafter: Any = kind(target, config)
    randomize(drafter)
    if getattr(drafter, "vocabulary", None) is not None:
        drafter.vocabulary.copy_(torch.randperm(VOCAB)[: len(drafter.vocabulary)])
    return drafter.eval()


def tokens() -> Tensor:
    return torch.randint(VOCAB, (1, 40), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def folder(tmp_path) -> Path:
    """A target on disk, beside which drafters are saved."""
    model = tiny_model("llama", torch.float32)
    model.save_pretrained(tmp_path / "target")
    return tmp_path


def saved(config: Any, folder: Path) -> tuple[str, Target, Drafter]:
    model = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32)
    target = Target(model)
    drafter = of(config, target)
    save_drafter(drafter, folder / "drafter", target, str(folder / "target"), None, "")
    return str(folder / "drafter"), target, drafter


def draft(drafter: Drafter, target: Target) -> Any:
    """Every tree that a drafter proposes behind one prompt."""
    watch = Watch(drafter)
    speculative(target, [tokens()[0, :9].tolist()], Options(12), watch, 8)
    return [(tree.tokens.tolist(), tree.parents.tolist()) for _, tree in watch.seen]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("to", ["vllm", "sglang", "speculators"])
def test_an_export_computes_what_the_drafter_does_and_reads_back(name, to, folder):
    source, target, drafter = saved(CASES[name], folder)
    if to == "sglang" and name in ("own", "three", "qwen", "parallel", "parallel_own"):
        refused("SGLang", export, source, to, folder / "out")
        assert not (folder / "out").exists()
        return
    told = export(source, to, folder / "out")
    assert "checked: read back" in told[1]
    check_eagle3(folder / "out", drafter, target, tokens(), to)
    assert str(folder / "out") in told[-1]
    again = find_drafter(str(folder / "out"), target)
    assert isinstance(again, Eagle3)
    features = {layer: torch.randn(1, 12, target.hidden_size) for layer in drafter.reads}
    if again.config.parallel:
        hosts = torch.tensor([[0, 3, 8]])
        ours, theirs = ([d.along(tokens()[:, :12], features, hosts)] for d in (drafter, again))
    else:
        ours, theirs = (d.unrolled(tokens()[:, :12], features, 3) for d in (drafter, again))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(drafter.of_vocabulary(one), again.of_vocabulary(other))
    assert draft(again, target) == draft(drafter, target)


def test_names_of_a_published_file(folder):
    """Exactly the keys of the plain form, both lists of layers, and nothing of the target's."""
    source, _, _ = saved(CASES["portable"], folder)
    export(source, "vllm", folder / "out")
    found, config = load_file(folder / "out/model.safetensors"), json.loads((folder / "out/config.json").read_text())
    assert sorted(found) == sorted(
        [
            "fc.weight",
            *(f"midlayer.self_attn.{p}_proj.weight" for p in "qkvo"),
            *(f"midlayer.mlp.{p}_proj.weight" for p in ("gate", "up", "down")),
            *(f"midlayer.{p}.weight" for p in ("hidden_norm", "input_layernorm", "post_attention_layernorm")),
            "norm.weight",
        ]
    )
    assert found["midlayer.self_attn.q_proj.weight"].shape == (32, 64)
    assert config[IDS] == [1, 2]
    assert config["eagle_config"][IDS] == [0, 1]
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert "draft_vocab_size" in config
    assert config["draft_vocab_size"] is None


def altered(path: Path, **changes: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **changes}))


def swap_fc(path: Path) -> None:
    found = load_file(path / "model.safetensors")
    found["fc.weight"] = torch.cat(found["fc.weight"].chunk(2, 1)[::-1], 1)
    save_file(found, path / "model.safetensors")


ROPE = {"rope_type": "default", "rope_theta": 99.0}
PLANTED = {
    "nested ids counted as states": (lambda p: altered(p, eagle_config={IDS: [1, 2]}), "one less throughout"),
    "all ids one layer up": (lambda p: altered(p, eagle_config={IDS: [1, 2]}, **{IDS: [2, 3]}), "logits differ"),
    "ids out of range": (lambda p: altered(p, eagle_config={IDS: [0, 3]}, **{IDS: [1, 4]}), "numbers from 1 to 3"),
    "ids not ascending": (lambda p: altered(p, eagle_config={IDS: [1, 0]}, **{IDS: [2, 1]}), "ascending"),
    "norm before residual": (lambda p: altered(p, norm_before_residual=True), "logits differ"),
    "norm of the output": (lambda p: altered(p, norm_output=True), "logits differ"),
    "norm before fc left out": (lambda p: altered(p, norm_before_fc=False), r"unknown tensors \['input_norm.weight'\]"),
    "norms of features": (lambda p: altered(p, fc_norm=True), r"missing tensors \['fc_norm.0.weight'"),
    "order of fc": (swap_fc, "logits differ"),
    "biases": (lambda p: altered(p, attention_bias=True), "missing tensors"),
    "heads": (lambda p: altered(p, num_attention_heads=2, num_key_value_heads=1, head_dim=16), "logits differ"),
    "eps": (lambda p: altered(p, rms_norm_eps=0.1), "logits differ"),
    "theta": (
        lambda p: altered(p, rope_theta=99.0, rope_parameters={"rope_type": "default", "rope_theta": 99.0}),
        "logits differ",
    ),
    "inner size": (lambda p: altered(p, intermediate_size=47), "the config and the target ask for"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_the_export_catches_a_planted_error(name, folder, monkeypatch):
    plant, message = PLANTED[name]
    source, _, _ = saved(Eagle3Config(**FLAGS), folder)
    write = eagle3.write

    def wrong(drafter: Eagle3, target: Target, out: Path, *rest: Any) -> None:
        write(drafter, target, out, *rest)
        plant(out)

    export(source, "vllm", folder / "right")
    monkeypatch.setattr(exporting.eagle3, "write", wrong)
    refused(message, export, source, "vllm", folder / "out")
    assert sorted(p.name for p in folder.iterdir()) == ["drafter", "right", "target"]


@pytest.mark.parametrize(
    "config", [MedusaConfig(heads=3, rank=4, blocks=2), MedusaConfig(heads=2, projection="full")], ids=["lora", "full"]
)
@pytest.mark.parametrize("to", ["vllm", "medusa"])
def test_medusa_exports_and_reads_back(config, to, folder):
    source, target, drafter = saved(config, folder)
    told = export(source, to, folder / "out")
    assert any('"method": "medusa"' in line for line in told)
    parts = [folder / "out"] if to == "vllm" else [folder / "out/vllm", folder / "out/tgi"]
    if to == "medusa":
        assert "architectures" not in json.loads((folder / "out/tgi/config.json").read_text())
    for part in parts:
        check_medusa(part, drafter, target, tokens())
        again = find_drafter(str(part), target)
        hidden = torch.randn(5, target.hidden_size)
        torch.testing.assert_close(again(hidden), drafter(hidden), rtol=1e-4, atol=1e-4)
        assert draft(again, target) == draft(drafter, target)


def test_medusa_as_first_published(folder):
    """FasterDecoding's pickle of tensors, with projections of its own and without, by its own names."""
    _, target, drafter = saved(MedusaConfig(heads=2, projection="full"), folder)
    for own in (True, False):
        state = {}
        for i in range(2):
            state[f"{i}.0.linear.weight"] = drafter.weight[0, i].detach().clone()
            state[f"{i}.0.linear.bias"] = drafter.bias[0, i, 0].detach().clone()
            if own:
                state[f"{i}.1.weight"] = drafter.full[i].detach().clone()
        out = folder / f"old{own}"
        out.mkdir()
        torch.save(state, out / "medusa_lm_head.pt")
        config = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": str(folder / "target")}
        (out / "config.json").write_text(json.dumps(config))
        again = selfspec.load(str(out)).drafter
        hidden = torch.randn(4, target.hidden_size)
        assert isinstance(again, Medusa)
        torch.testing.assert_close(again.weight, drafter.weight)
        if own:
            torch.testing.assert_close(again(hidden), drafter(hidden))


def published(folder: Path, config: Eagle3Config) -> tuple[Path, Target]:
    """An EAGLE-3 folder as SpecForge and others leave it: `layers.0.`, int32 d2t, no t2d, embeddings beside."""
    source, target, _ = saved(config, folder)
    export(source, "vllm", folder / "out")
    found = load_file(folder / "out/model.safetensors")
    found = {name.replace("midlayer.", "layers.0."): t for name, t in found.items()}
    found["embed_tokens.weight"] = target.model.get_input_embeddings().weight.detach().clone()
    if "d2t" in found:
        found["d2t"] = found["d2t"].int()
        del found["t2d"]
    save_file(found, folder / "out/model.safetensors")
    return folder / "out", target


@pytest.mark.parametrize("name", ["portable", "few", "own", "parallel_own"])
def test_a_published_eagle3_folder_loads(name, folder):
    out, _ = published(folder, CASES[name])
    spec = selfspec.load(str(out), target=str(folder / "target"))
    assert isinstance(spec.drafter, Eagle3)
    prompt = [tokens()[0, :9].tolist()]
    assert spec.generate(prompt, 16).token_ids == spec.autoregressive(prompt, 16).token_ids
    refused("names no target; give one", selfspec.load, str(out))
    eagle3.write(spec.drafter, spec.target, out.parent / "again", "plain", "target")
    check_eagle3(out.parent / "again", spec.drafter, spec.target, tokens())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: altered(p, hidden_size=64), "hidden_size is 64, the target's is 32"),
        (lambda p: altered(p, vocab_size=60), "vocab_size is 60"),
        (lambda p: altered(p, target_hidden_size=64), "target_hidden_size is 64, the target's is 32"),
        (lambda p: altered(p, num_aux_hidden_states=7), "num_aux_hidden_states=7 can not be read here"),
        (lambda p: altered(p, logit_scale=0.5), "logit_scale=0.5 can not be read here, 1 can"),
        (lambda p: altered(p, num_hidden_layers=0), "layers with silu"),
        (lambda p: altered(p, num_hidden_layers=10**9), "1 to 64 layers with silu"),
        (
            lambda p: altered(p, speculative_tokens=10**6),
            "speculative_tokens=1000000 must be a whole number from 1 to 64",
        ),
        (lambda p: altered(p, layer_types=["foo"]), r"layer_types=\['foo'\] can not be read"),
        (lambda p: altered(p, hidden_act="gelu"), "layers with silu"),
        (lambda p: altered(p, **{IDS: ["a"]}), "must be a list of whole numbers"),
        (lambda p: altered(p, norm_before_residual="false"), "norm_before_residual='false' must be true or false"),
        (lambda p: altered(p, draft_vocab_size=99), "draft_vocab_size=99 must lie between 1 and 61"),
        (lambda p: altered(p, **{IDS: [True, 2]}), "must be a list of whole numbers"),
        (lambda p: altered(p, eagle_config="x"), "eagle_config='x' must be a mapping"),
        (lambda p: altered(p, eagle_config={"use_aux_hidden_state": False}), "use_aux_hidden_state=False can not be"),
        (lambda p: altered(p, rope_parameters={"rope_type": "linear", "rope_theta": 1e4}), "makes no layer"),
        (lambda p: altered(p, rope_parameters={"rope_type": "odd", "rope_theta": 1e4}), "rope_type must be one of def"),
        (
            lambda p: altered(p, rope_scaling={"type": "linear", "rope_type": "llama3", "factor": 2.0}),
            "has type='linear' and rope_type='llama3'",
        ),
        (lambda p: altered(p, rope_theta=99.0), "differ in rope_theta from rope_scaling="),
        (lambda p: altered(p, rope_scaling={"type": "linear", "factor": 2.0}), "differ in rope_type from rope_scaling"),
        (lambda p: altered(p, rope_parameters={**ROPE, "factor": math.nan}, rope_theta=99.0), "factor=nan must be a"),
        (lambda p: altered(p, rms_norm_eps=1e308), r"rms_norm_eps=1e\+308 must be a number above 0, below 1"),
        (lambda p: altered(p, num_attention_heads="4"), "num_attention_heads='4' must be a whole number"),
        (lambda p: altered(p, **{IDS: [1, 9]}), "one less throughout"),
        (lambda p: (p / "config.json").write_text("{"), "is no JSON"),
        (lambda p: (p / "model.safetensors").write_bytes(b"1234"), "not a whole safetensors file"),
        (lambda p: (p / "model.safetensors").unlink(), "is missing"),
    ],
)
def test_a_damaged_folder_is_refused(change, message, folder):
    out, target = published(folder, CASES["portable"])
    change(out)
    refused(message, find_drafter, str(out), target, error=(ValueError, FileNotFoundError))


def test_masks_that_were_lost_are_missed(folder):
    out, target = published(folder, CASES["parallel"])
    found = load_file(out / "model.safetensors")
    save_file({name: t for name, t in found.items() if name != "mask_hidden"}, out / "model.safetensors")
    refused("mask_hidden is missing", find_drafter, str(out), target)
    save_file(found, out / "model.safetensors")
    altered(out, pard_token=3)
    refused("are different tokens; engines read any of them", find_drafter, str(out), target)


def test_a_map_that_leads_nowhere_is_refused(folder):
    out, target = published(folder, CASES["few"])
    found = load_file(out / "model.safetensors")
    save_file({**found, "d2t": found["d2t"] + VOCAB}, out / "model.safetensors")
    refused(r"d2t leads to tokens from \d+ to \d+; it must hold", find_drafter, str(out), target)


def test_keys_that_a_llama_may_leave_out(folder):
    sizes = {"num_key_value_heads": 4, "head_dim": 8, "rms_norm_eps": 1e-6}
    out, target = published(folder, Eagle3Config(layers=[1], llama=sizes))
    config = json.loads((out / "config.json").read_text())
    for name in sizes:
        del config[name]
    (out / "config.json").write_text(json.dumps(config))
    again = find_drafter(str(out), target)
    assert isinstance(again, Eagle3)
    assert {name: again.config.llama[name] for name in sizes} == sizes


def test_a_draft_goes_beyond_its_own_positions(folder):
    """A draft model's short limit does not move what it drafts for a long text."""
    _, target, drafter = saved(Eagle3Config(layers=[1], llama={"max_position_embeddings": 16}), folder)
    _, _, wide = saved(Eagle3Config(layers=[1]), folder)
    watch = [Watch(drafter), Watch(wide)]
    for one in watch:
        speculative(target, [tokens()[0].tolist()], Options(8), one, 8)
    first, second = ([tree.tokens.tolist() for _, tree in one.seen] for one in watch)
    assert first == second


def test_a_head_with_a_bias(folder):
    model = tiny_model("llama", torch.float32)
    model.lm_head = torch.nn.Linear(32, VOCAB, bias=True)
    target = Target(model)
    refused("scales, caps or shifts its logits", made, "eagle3", target, layers=[1], draft_vocab=20)
    for kind, message in (
        (made("eagle3", target, layers=[1]), "no draft model has"),
        (of(MedusaConfig(), target), "has a bias"),
    ):
        refused(message, refuse, kind, target, "vllm")
    refuse(made("eagle3", target, layers=[1], head="own"), target, "vllm")


def test_embeddings_of_its_own_are_kept(folder):
    out, target = published(folder, CASES["portable"])
    found = load_file(out / "model.safetensors")
    save_file({**found, "embed_tokens.weight": found["embed_tokens.weight"] + 1}, out / "model.safetensors")
    drafter: Any = find_drafter(str(out), target)
    assert drafter.config.embeddings == "own"
    torch.testing.assert_close(drafter.layer.embedding, found["embed_tokens.weight"] + 1)


@pytest.mark.parametrize("to", [form for form in FORMATS if form != "transformers"])
def test_drafters_that_no_engine_serves_are_refused(to, folder):
    source, _, _ = saved(FeatureConfig(layers=[0, 1]), folder)
    refused(r"feature can not be exported .* train drafter=eagle3", export, source, to, folder / "out")
    assert not (folder / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"to": "onnx"}, "--to 'onnx' must be one of vllm"),
        ({"out": "."}, "exists; give a new folder"),
        ({"nodes": 8}, "--nodes 8: a number above 0 or auto, with --to transformers"),
        ({"out": "no/where"}, "does not exist"),
        ({"to": "medusa"}, "is no Medusa head"),
        ({"name": "nothing/at/all"}, "no drafter at 'nothing/at/all'"),
        ({"target": "other"}, "was made for target"),
    ],
)
def test_bad_input(arguments, message, folder, monkeypatch):
    source, _, _ = saved(CASES["portable"], folder)
    other = tiny_model("llama")
    other.lm_head.weight.data += 1
    other.save_pretrained(folder / "other")
    monkeypatch.chdir(folder)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        export(**{"name": source, "to": "vllm", "out": str(folder / "out"), **arguments})
    assert not (folder / "out").exists()


UNO = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def uno_folder(folder: Path, prefix: str = "base_model.model.", **changes: Any) -> tuple[Path, Target]:
    """A PEFT adapter over all projections, as UNO publishes its own."""
    target = Target(AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32))
    out = folder / "uno"
    out.mkdir()
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 64, "target_modules": list(UNO), "bias": "none"}
    config["base_model_name_or_path"] = str(folder / "target")
    (out / "adapter_config.json").write_text(json.dumps({**config, **changes}))
    state, g = {}, torch.Generator().manual_seed(4)
    for name, module in target.model.named_modules():
        if name.rsplit(".", 1)[-1] in UNO:
            assert isinstance(module, torch.nn.Linear)
            state[f"{prefix}{name}.lora_A.weight"] = torch.randn(4, module.in_features, generator=g) * 0.1
            state[f"{prefix}{name}.lora_B.weight"] = torch.randn(module.out_features, 4, generator=g) * 0.1
    save_file(state, out / "adapter_model.safetensors")
    return out, target


@pytest.mark.parametrize("prefix", ["base_model.model.", ""])
def test_uno_adapters_draft(prefix, folder):
    """Noise rows behind the root forecast what a copy of the target with the adapter merged into it says of the same
    tokens, over keys and values of the target itself."""
    out, _ = uno_folder(folder, prefix)
    spec = selfspec.load(str(out))
    assert isinstance(spec.drafter, Mask)
    prompt = [tokens()[0, :9].tolist()]
    assert spec.generate(prompt, 16).token_ids == spec.autoregressive(prompt, 16).token_ids
    state = load_file(out / "adapter_model.safetensors")
    maps = dict(zip(spec.drafter.gated.paths, spec.drafter.gated.maps, strict=True))
    path = next(path for path in maps if path.endswith("layers.1.mlp.down_proj"))
    a, b, scale = lora_of(maps[path], spec.drafter.gated.adapter)
    wanted = state[f"{prefix}{path}.lora_B.weight"] @ state[f"{prefix}{path}.lora_A.weight"] * (64 / 4)
    torch.testing.assert_close(b @ a * scale, wanted)
    model = spec.target.model
    embeddings, known = model.get_input_embeddings().weight, tokens()[:, :9]
    noise = torch.tensor([[int((embeddings == mask).all(1).nonzero()) for mask in spec.drafter.gated.masks]])
    merged = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32)
    for name, module in merged.named_modules():
        if name in maps:
            a, b = (state[f"{prefix}{name}.lora_{part}.weight"] for part in "AB")
            module.weight.data += b @ a * (64 / 4)
    with torch.no_grad():
        name = cache_name(model)
        past = model(known, use_cache=True)[name]
        expected = merged(noise, **{name: past}).logits
        cache = TextCache(spec.target.n_layers, kept=True)
        spec.target.text(known, False, cache=cache)
        found = spec.drafter.along(known, torch.tensor([[8]]), cache)
    torch.testing.assert_close(found[0, 0], expected[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type='IA3'"),
        ({"use_dora": True}, "use_dora=True can not be read"),
        ({"layers_to_transform": [0]}, r"layers_to_transform=\[0\] can not be read"),
        ({"init_lora_weights": "lora_ga"}, "it was trained on other weights; convert it"),
        ({"r": 8}, "r=8, its tensors are of rank 4"),
        ({"r": 2}, "the config and the target ask for"),
        ({"lora_alpha": None}, "lora_alpha=None must be a finite number"),
        ({"use_rslora": "false"}, "use_rslora='false' must be true or false"),
        ({"lora_alpha": 1e300}, r"lora_alpha=1e\+300 is too large for torch.float32"),
        ({"r": 0}, "r=0 must be a whole number"),
        ({"target_modules": "all-linear"}, "must be a list of names"),
        ({"target_modules": ["q_proj"]}, "unknown tensors"),
        ({"target_modules": [*UNO, "lm"]}, "no layer of LlamaForCausalLM has a linear map lm"),
    ],
)
def test_adapters_that_are_not_uno_s(changes, message, folder):
    out, target = uno_folder(folder, **changes)
    refused(message, find_drafter, str(out), target)
