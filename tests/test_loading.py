"""Targets as people load them: already in memory, with adapters, tied, mapped to devices, quantized; and too large."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import made, random_drafter, refused, save_tiny, tiny_model
from families import build
from peft import LoraConfig, PeftModel, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import selfspec
from selfspec.api import Spec
from selfspec.checkpoints import load_target as target_file
from selfspec.checkpoints.cast import Stock
from selfspec.checkpoints.drafter_folder import save_drafter
from selfspec.checkpoints.find import member_names
from selfspec.checkpoints.load_target import load_target
from selfspec.cli.errors import clear_errors
from selfspec.core import probe as probe_file
from selfspec.core.generate import autoregressive
from selfspec.core.options import Options
from selfspec.core.target import Target
from selfspec.core.tree import chain
from selfspec.engine.keys import modes
from selfspec.utils.machine import default_device, device_type

PROMPTS = ["def main():", "import os\nclass"]


def with_heads(folder: Path, source: Any, name: str, **loading: Any) -> Path:
    target, tokenizer = load_target(source, **loading)
    drafter = random_drafter("medusa", target, heads=3, rank=4)
    save_drafter(drafter, folder, target, name, tokenizer, "For tests.")
    return folder


def check(spec: Spec) -> None:
    for temperature in (0.0, 1.0):
        settings: dict[str, Any] = {"max_new_tokens": 16, "temperature": temperature, "seed": 2}
        ours, plain = spec.generate(PROMPTS, **settings), spec.autoregressive(PROMPTS, **settings)
        assert ours.token_ids == plain.token_ids
        assert sum(map(len, ours.token_ids)) == 32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["Llama", "DeepSeek-V3 (MLA)", "Falcon-H1", "Apertus", "LFM2"])
def test_a_cast_is_transformers_own(name, dtype, tmp_path):
    """Rotary frequencies, routers and rates stay in float32 where transformers keeps them there."""
    build(name, dtype=torch.float32).save_pretrained(tmp_path)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    given = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    for model in (load_target(str(tmp_path), dtype)[0].model, load_target(given, dtype)[0].model):
        ours = dict((*model.named_parameters(), *model.named_buffers()))
        for part, tensor in (*stock.named_parameters(), *stock.named_buffers()):
            assert ours[part].dtype == tensor.dtype, part
            assert torch.equal(ours[part], tensor), part


def test_what_a_config_says_is_not_rounded_twice(tmp_path):
    """A scale of embeddings in bfloat16, cast to float32; and a body of another dtype than its head."""
    sizes = {"hidden_size": 72, "layer_types": ["sliding_attention", "full_attention"]}
    build("Gemma 3 (alternating windows)", dtype=torch.bfloat16, **sizes).save_pretrained(tmp_path)
    ours = load_target(str(tmp_path), "float32")[0].model.get_input_embeddings().embed_scale
    stock = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).get_input_embeddings().embed_scale
    assert torch.equal(ours, stock)
    assert ours.item() != ours.bfloat16().item()
    mixed = build("Llama", dtype=torch.bfloat16)
    mixed.lm_head.float()
    assert {p.dtype for p in load_target(mixed, "float32")[0].model.parameters()} == {torch.float32}
    assert load_target(build("Llama", dtype=torch.float32), "int8", "auto")[0].int8


def test_adapters_are_cast_with_their_model(tmp_path):
    model = get_peft_model(build("Llama", dtype=torch.float32), LoraConfig(r=2, target_modules=["q_proj"]))
    target = load_target(model, "bfloat16")[0]
    assert {p.dtype for p in target.model.parameters()} == {torch.bfloat16}
    assert {b.dtype for name, b in target.model.named_buffers() if "inv_freq" in name} == {torch.float32}
    routed = build("DeepSeek-V3 (MLA)", dtype=torch.float32)
    get_peft_model(routed, LoraConfig(r=2, target_modules=["o_proj"], modules_to_save=["gate"]))
    Stock(routed, torch.bfloat16).cast()
    assert {p.dtype for name, p in routed.named_parameters() if ".gate." in name} == {torch.float32}


def test_a_class_of_ones_own_is_cast_without_its_buffers(monkeypatch):
    model = build("Llama", dtype=torch.float32)
    monkeypatch.setattr(type(model), "_from_config", lambda config, dtype: model.no_such_thing)
    Stock(model, torch.bfloat16).cast()
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert {b.dtype for b in model.buffers()} == {torch.float32}


@pytest.mark.parametrize("loading", [{"device_map": "cpu"}, {"device_map": "auto"}, {"attn_implementation": "eager"}])
def test_loading_options_go_to_transformers(heads_folder, loading):
    spec = selfspec.load(str(heads_folder), torch_dtype=torch.float64, **loading)
    assert spec.target.dtype == torch.float64
    if "attn_implementation" in loading:
        assert spec.target.model.config._attn_implementation == "eager"
    check(spec)


def test_a_loaded_model_is_taken_as_it_is(heads_folder, tiny_folder):
    model = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)
    spec = selfspec.load(str(heads_folder), target=model)
    assert spec.target.model is model
    check(spec)
    with pytest.raises(ValueError, match="device_map can not be applied to a target that is loaded already"):
        selfspec.load(str(heads_folder), target=model, device_map="cpu")


def adapted(folder: str) -> PeftModel:
    torch.manual_seed(3)
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False),
    )
    return model.eval()


def test_adapters_on_the_target_belong_to_it(tmp_path, heads_folder, tiny_folder):
    model = adapted(tiny_folder)
    heads = with_heads(tmp_path / "drafter", model, tiny_folder)
    spec = selfspec.load(str(heads), target=adapted(tiny_folder))
    check(spec)
    ids = torch.tensor(spec.encode(PROMPTS[:1]))
    settings: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 16, "do_sample": False}
    reference = model.generate(input_ids=ids, **settings)[0, ids.shape[1] :].tolist()
    assert spec.generate(PROMPTS[:1], max_new_tokens=16).token_ids[0] == reference
    with model.disable_adapter():
        plain = model.generate(input_ids=ids, **settings)[0, ids.shape[1] :].tolist()
    assert plain != reference
    with pytest.raises(ValueError, match="target"):  # heads of the plain model
        selfspec.load(str(heads_folder), target=adapted(tiny_folder))


def test_adapters_outside_the_layers_are_refused(heads_folder, tiny_folder):
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32),
        PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    )
    refused("PROMPT_TUNING adapter, which lives outside", selfspec.load, str(heads_folder), target=model)


def test_switching_the_targets_adapters_is_followed(heads_folder, tiny_folder):
    plain = selfspec.load(str(heads_folder)).autoregressive(PROMPTS, 12).token_ids
    model = adapted(tiny_folder)
    target, tokenizer = load_target(model)
    spec = Spec(target, made("medusa", target, heads=2, rank=2), tokenizer)
    on = spec.generate(PROMPTS, 12).token_ids
    with model.disable_adapter():
        assert spec.generate(PROMPTS, 12).token_ids == plain != on
    assert spec.generate(PROMPTS, 12).token_ids == on


@pytest.mark.parametrize("config", [PromptTuningConfig, PrefixTuningConfig])
def test_soft_prompts_around_the_target_are_refused(heads_folder, config, tiny_folder):
    spec = selfspec.load(str(heads_folder))
    model = get_peft_model(spec.target.model, config(task_type="CAUSAL_LM", num_virtual_tokens=3)).eval()
    ids = torch.tensor(spec.encode(PROMPTS[:1]))
    settings: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 4, "do_sample": False}
    with pytest.raises(ValueError, match=r"soft prompts \(PEFT's prompt or prefix tuning\)"):
        model.generate(input_ids=ids, custom_generate=spec, **settings)
    out = spec.target.model.generate(input_ids=ids, custom_generate=spec, **settings)  # the model itself is served
    assert out[0, ids.shape[1] :].tolist() == spec.autoregressive(PROMPTS[:1], 4).token_ids[0]


def test_a_cache_grows_no_further_than_it_was_checked_for(heads_folder):
    target = selfspec.load(str(heads_folder)).target
    cache = target.cache(1, 10, limit=40)
    with torch.inference_mode():
        for _ in range(9):
            target.forward(chain(torch.tensor([[5, 9, 2, 7]])), cache, logits=False)
            cache.commit([[0, 1, 2, 3]])
    assert cache.lengths == [36]
    assert cache.capacity == 256


@pytest.mark.parametrize("tied", [True, False])
def test_tied_and_untied_embeddings(tmp_path, tokenizer, tied):
    folder = save_tiny(tmp_path / "target", tokenizer, tie_word_embeddings=tied)
    spec = selfspec.load(str(with_heads(tmp_path / "drafter", folder, folder)))
    same = spec.target.lm_head.weight is spec.target.model.get_input_embeddings().weight
    assert same == tied
    check(spec)


class _Quantized(nn.Parameter):
    """As libraries for quantization make them, with an inside of their own."""


@pytest.mark.parametrize("tiles", [True, False])
def test_weights_lie_where_kernels_read_them_best(tmp_path, tokenizer, monkeypatch, tiles):
    folder = save_tiny(tmp_path / "target", tokenizer, tie_word_embeddings=True)
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(folder)
    copied, copy = list[Tensor](), target_file.in_huge_pages
    monkeypatch.setattr(target_file, "has_tiles", lambda: tiles)
    monkeypatch.setattr(target_file, "in_huge_pages", lambda weight: copied.append(weight) or copy(weight))
    target, _ = load_target(folder, engine="compiled")
    theirs = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert target.model.state_dict().keys() == theirs.keys()
    assert all(torch.equal(weight, theirs[name]) for name, weight in target.model.state_dict().items())
    parameters = list(target.model.parameters())
    assert {parameter.data_ptr() % 64 for parameter in parameters} == {0}
    assert len(copied) == len(parameters) or not tiles
    assert target.lm_head.weight is target.model.get_input_embeddings().weight
    layer = target.layers[0].mlp.up_proj
    layer.weight = _Quantized(layer.weight.data, requires_grad=False)
    copied.clear()
    target_file._move(target.model)
    assert len(copied) == (len(parameters) - 1 if tiles else 0)


def test_a_cache_beyond_memory_is_refused_with_its_size(heads_folder, monkeypatch):
    spec = selfspec.load(str(heads_folder))
    monkeypatch.setattr("selfspec.core.memory.free_memory", lambda device: 200_000)
    with pytest.raises(MemoryError, match=r"cache of 2 rows of \d+ tokens needs 0\.0 GiB on cpu"):
        autoregressive(spec.target, spec.encode(PROMPTS), Options(200))
    autoregressive(spec.target, spec.encode(PROMPTS), Options(4))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"target": 5}, ValueError, "target is of type int"),
        ({"target": "/nowhere"}, FileNotFoundError, "there is no folder /nowhere"),
        ({"target": Path("/nowhere")}, FileNotFoundError, "there is no folder /nowhere"),
        ({"drafter": 5}, ValueError, "drafter=5"),
        ({"drafter": Path("/nowhere")}, FileNotFoundError, "no drafter at"),
        ({"dtype": torch.int16}, ValueError, "dtype='int16'"),
        ({"dtype": 32}, ValueError, "dtype='32'"),
        ({"dtype": "float8_e4m3fn"}, ValueError, "dtype='float8_e4m3fn'"),
        ({"dtype": "float32", "torch_dtype": "float16"}, ValueError, "both given"),
        ({"device": "gpu"}, ValueError, "device='gpu' can not be used here"),
        ({"device_map": "meta"}, ValueError, "on disk or on the meta device"),
    ],
)
def test_what_can_not_be_loaded_is_named(heads_folder, change, error, message):
    refused(message, selfspec.load, **{"drafter": str(heads_folder), **change}, error=error)


def test_a_broken_tokenizer_is_told_from_none(tmp_path, tiny_folder):
    folder = tmp_path / "target"
    shutil.copytree(tiny_folder, folder)
    (folder / "tokenizer.json").write_text('{"version": "1.0", "model": ')
    refused(r"tokenizer in .*target \(tokenizer.json, tokenizer_config.json\) can not", load_target, str(folder))
    for path in folder.glob("tokenizer*"):
        path.unlink()
    assert load_target(str(folder))[1] is None


def test_arguments_of_transformers_reach_config_and_tokenizer(tmp_path, tiny_folder, monkeypatch):
    shutil.copytree(tiny_folder, tmp_path / "repo" / "inner")
    target, tokenizer = load_target(str(tmp_path / "repo"), subfolder="inner")
    assert tokenizer is not None
    assert target.name == str(tmp_path / "repo" / "inner")
    seen: dict[str, dict[str, Any]] = {}

    def spied(name: str, kind: Any) -> None:
        real = kind.from_pretrained

        def call(*args: Any, **kwargs: Any) -> Any:
            seen[name] = kwargs
            return real(*args, **kwargs)

        monkeypatch.setattr(kind, "from_pretrained", call)

    for name, kind in (("config", AutoConfig), ("model", AutoModelForCausalLM), ("tokenizer", AutoTokenizer)):
        spied(name, kind)
    load_target(tiny_folder, trust_remote_code=True, local_files_only=True, attn_implementation="sdpa")
    assert all(arguments["trust_remote_code"] and arguments["local_files_only"] for arguments in seen.values())
    assert [name for name in seen if "attn_implementation" in seen[name]] == ["model"]
    load_target(tiny_folder)
    assert all(arguments["trust_remote_code"] is False for arguments in seen.values())  # None would ask on stdin


def test_a_target_whose_tokenizer_or_config_is_code_is_refused(tmp_path, tiny_folder):
    for name, entry in (("config.json", "AutoConfig"), ("tokenizer_config.json", "AutoTokenizer")):
        folder = tmp_path / entry
        shutil.copytree(tiny_folder, folder)
        config = json.loads((folder / name).read_text())
        code = "evil.Evil" if entry == "AutoConfig" else [None, "evil.Evil"]
        config |= {"auto_map": {entry: code}, "model_type": "evil", "tokenizer_class": "Evil"}
        (folder / name).write_text(json.dumps(config))
        (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
        refused("trust_remote_code", load_target, str(folder))
    assert not (tmp_path / "ran").exists()


def test_loading_draws_nothing_from_the_global_generator(heads_folder, tiny_folder):
    before = torch.get_rng_state()
    selfspec.load(str(heads_folder), target=tiny_folder, dtype="float32")
    assert torch.equal(torch.get_rng_state(), before)


def test_words_for_a_dtype_and_names_with_spaces(tiny_folder):
    spec = selfspec.load(" prompt_lookup ", tiny_folder, dtype="bf16")
    assert spec.target.dtype == torch.bfloat16
    assert member_names("runs/a + prompt_lookup") == ["runs/a", "prompt_lookup"]


@pytest.mark.parametrize("attention", ["flex_attention", "flash_attention_2", "flash_attention_3"])
def test_attention_without_tree_masks_is_replaced(attention, tmp_path, tiny_folder, tokenizer, capsys):
    """Whoever asks for it: the caller, the target's config, or a model that is loaded already."""
    target, _ = load_target(tiny_folder, attn_implementation=attention)
    line = f"attention by {attention!r} takes no tree masks; sdpa computes it"
    assert line in capsys.readouterr().err
    assert target.model.config._attn_implementation == "sdpa"
    folder = Path(shutil.copytree(tiny_folder, tmp_path / "theirs"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"attn_implementation": attention}))
    assert load_target(str(folder))[0].model.config._attn_implementation == "sdpa"
    model = AutoModelForCausalLM.from_pretrained(tiny_folder)
    model.config._attn_implementation = attention
    capsys.readouterr()
    assert load_target(model)[0].model.config._attn_implementation == "sdpa"
    assert line in capsys.readouterr().err


def test_a_target_goes_where_it_is_fast(tiny_folder, monkeypatch, capsys):
    """To CUDA where that works; a device that is there and does not work is left out with a line."""
    assert str(load_target(tiny_folder, device="auto")[0].device) == "cpu"
    monkeypatch.setattr(target_file, "default_device", lambda: "meta")
    moved: list[str] = []
    monkeypatch.setattr(PreTrainedModel, "to", lambda self, device: moved.append(str(device)))
    load_target(tiny_folder)
    load_target(tiny_folder, device="cpu")
    load_target(AutoModelForCausalLM.from_pretrained(tiny_folder))  # stays where it is
    assert moved == ["meta", "cpu"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert default_device() == "cpu"
    assert "cuda:0 is there and does not work" in capsys.readouterr().err
    assert device_type(None) == device_type("auto") == "cpu"
    refused(r"device='cuda:1' can not be used here: torch .* finds none of this name", device_type, "cuda:1")


def test_revisions_are_of_what_lies_on_the_hub(tmp_path, heads_folder, tiny_folder):
    """A drafter's record of its target's revision asks nothing of a folder; the caller's goes to the target where no
    drafter is on the hub."""
    place = tmp_path / "drafter"
    shutil.copytree(heads_folder, place)
    path = next(place.rglob("drafter.json"))
    meta = json.loads(path.read_text())
    meta["target"] |= {"name": tiny_folder, "revision": "a" * 40}
    path.write_text(json.dumps(meta))
    assert selfspec.load(str(place)).target.name == tiny_folder
    with pytest.raises(FileNotFoundError, match=r"'nobody/none' at revision 'abc'"):
        selfspec.load("prompt_lookup", target="nobody/none", revision="abc")
    refused("is not on the hub; leave revision out", selfspec.load, "prompt_lookup", target=tiny_folder, revision="abc")


def test_a_full_gpu_is_said(tmp_path, monkeypatch, capsys, tokenizer):
    """It says nothing of the model, which would be served by chains; nor is the CPU taken in its place."""
    folder = save_tiny(tmp_path / "target", tokenizer)

    def full(*args: object, **kwargs: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(probe_file, "probe", full)
    refused("no room for a pass of target", load_target, folder, error=MemoryError)
    monkeypatch.setattr(PreTrainedModel, "to", full)
    refused("no room for target", load_target, folder, device="cpu", error=MemoryError)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(torch, "zeros", full)
    refused("cuda:1 is full", default_device, error=MemoryError)
    with pytest.raises(SystemExit), clear_errors():
        full()
    assert "out of memory" in capsys.readouterr().err


@pytest.mark.parametrize("backend", [torch.backends.cuda.matmul, torch.backends.mkldnn.matmul])
def test_float32_that_is_rounded_is_said_by_either_switch(backend):
    target = Target(tiny_model().to(torch.float32))
    assert target.exact == "in every test"
    before = backend.fp32_precision
    try:
        backend.fp32_precision = "tf32"
        assert target.exact == "up to rounding"
        assert modes() != ()
    finally:
        backend.fp32_precision = before
    assert target.exact == "in every test"
