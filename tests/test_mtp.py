"""Shipped MTP modules: read by their published names, held to transformers' own layer, and lossless as drafters."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import VOCAB, Watch, made, randomize, refused, tiny_model
from families import FAMILIES, KDA, MLA, MOE, build
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpLayer, MtpModel

import selfspec
from selfspec.checkpoints.drafter_folder import load_drafter, save_drafter
from selfspec.checkpoints.formats import mtp
from selfspec.checkpoints.formats.files import weight_map
from selfspec.checkpoints.load_target import load_target
from selfspec.core.generate import autoregressive, speculative
from selfspec.core.options import Options
from selfspec.core.sampling import Sampling
from selfspec.core.target import Target
from selfspec.drafters.mtp import Mtp, MtpConfig
from selfspec.drafters.parts import feature_cache
from selfspec.drafters.parts.views import final_norm
from selfspec.integrations.export import export
from selfspec.training.checkpoint import warm_start

TEXT = torch.tensor([[5, 9, 2, 7, 11, 3, 8, 30, 1, 4]])
PROMPTS = [[5, 9, 2, 7, 7, 1], [3], [8, 1, 30, 4, 17, 22, 9, 40, 2, 11, 12]]
# Published names, written down apart from the reader's table: of the norms of embedding and state, the product, the
# final norm, and the decoder layer. {L} is the number of the target's layers, {k} that of the module.
DEEPSEEK = [f"model.layers.{{L}}.{n}" for n in ("enorm", "hnorm", "eh_proj", "shared_head.norm", "")]
QWEN = ["mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm", "mtp.layers.0."]
FINAL = [name.replace("shared_head.norm", "final_layernorm") for name in DEEPSEEK]
ERNIE = [f"model.mtp_{n}" for n in ("emb_norm.0", "hidden_norm.0", "linear_proj.0")] + ["", "model.mtp_block.0."]
MIMO = [f"model.mtp.layers.{{k}}.{n}" for n in ("enorm", "hnorm", "eh_proj", "final_layernorm", "")]
NEMOTRON = [f"mtp.layers.{n}" for n in ("0.enorm", "0.hnorm", "0.eh_proj", "1.final_layernorm", "")]
ROW, STATE = ["sliding_attention", "full_attention"], ["linear_attention", "full_attention", "linear_attention"]
BLOCKS, WINDOWED = ["mamba", "attention", "moe", "mlp"], {"sliding_window": 4, "layer_types": ROW}
EXPERTS = {**MOE, "head_dim": 8, "n_group": 1, "topk_group": 1, "num_shared_experts": 1}
TWO = {"num_hidden_layers": 4, "layers_block_type": BLOCKS, "n_routed_experts": 4, "num_nextn_predict_layers": 1}
TWO["moe_shared_expert_intermediate_size"] = 24
MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "GLM-4.5": ("glm4_moe", {k: v for k, v in MLA.items() if "lora" not in k and "head" not in k} | {"head_dim": 8}),
    "GLM-4.7-Flash": ("glm4_moe_lite", MLA),
    "EXAONE-MoE": ("exaone_moe", EXPERTS | WINDOWED),
    "Mellum": ("mellum", EXPERTS | {"mtp_layer_types": ["full_attention"]}),
    "HY-V3": ("hy_v3", EXPERTS),
    "Mellum (a window)": ("mellum", EXPERTS | WINDOWED | {"mtp_layer_types": [ROW[0]]}),
    "ERNIE 4.5 MoE": ("ernie4_5_moe", EXPERTS | {"moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1}),
    "MiMo-V2-Flash": ("mimo_v2_flash", EXPERTS | WINDOWED | {"v_head_dim": 12, "n_routed_experts": 4}),
    "Bailing (a state)": ("bailing_hybrid", KDA | {"num_hidden_layers": 3, "layer_types": STATE}),
    "Nemotron-H (two layers)": ("nemotron_h", FAMILIES["Nemotron-H"][1] | EXPERTS | TWO),
}
# What a model whose last layer is a module's would have in its config.
AS_LAST: dict[str, dict[str, Any]] = {
    "EXAONE-MoE": {"layer_types": [*ROW, ROW[0]][1:], "mlp_layer_types": ["dense", "dense"]},
    "Mellum (a window)": {"layer_types": [*ROW, ROW[0]][1:]},
    "ERNIE 4.5 MoE": {"moe_layer_end_index": 0},
    "MiMo-V2-Flash": {"layer_types": [*ROW, ROW[0]][1:], "mlp_layer_types": ["sparse", "dense"]},
    "Bailing (a state)": {"layer_types": [*STATE[:2], "full_attention"]},
    "Nemotron-H (two layers)": {"layers_block_type": [*BLOCKS[:2], "attention", "moe"]},
}
SHIPPED = {
    "DeepSeek-V3 (MLA)": DEEPSEEK,
    "GLM-4.5": DEEPSEEK,
    "GLM-4.7-Flash": DEEPSEEK,
    "Qwen3-Next": QWEN,
    "Qwen3.5": QWEN,
    "Qwen3.5-MoE": QWEN,
    "EXAONE-MoE": QWEN,
    "Mellum": QWEN,
    "HY-V3": FINAL,
    "ERNIE 4.5": ERNIE,
    "Mellum (a window)": QWEN,
    "ERNIE 4.5 MoE": ERNIE,
    "MiMo-V2-Flash": MIMO,
    "Bailing (a state)": FINAL,
    "Nemotron-H (two layers)": NEMOTRON,
}


def shipped(name: str, folder: Path, modules: int = 1) -> tuple[Any, list[MtpLayer]]:
    """A checkpoint with random modules under their published names, and the modules as transformers builds them."""
    changes: dict[str, Any] = {} if modules == 1 else {"num_nextn_predict_layers": modules}
    with pytest.MonkeyPatch.context() as patch:
        for more, row in MORE.items():
            patch.setitem(FAMILIES, more, row)
        model, twin = build(name, **changes), build(name, **changes, **AS_LAST.get(name, {}))
    model.save_pretrained(folder)
    path, made = folder / "model.safetensors", []
    names, count, two = SHIPPED[name], model.config.num_hidden_layers, SHIPPED[name] is NEMOTRON
    layers, config = twin.get_decoder().layers, twin.config
    layer, norm = type(layers[-1]), next(type(m) for n, m in layers[-1].named_modules() if "norm" in n)
    if two:
        config.rms_norm_eps = config.layer_norm_epsilon

    def block(config: Any, at: int) -> torch.nn.Module:
        return torch.nn.ModuleList([layer(config, at - 1), layer(config, at)]) if two else layer(config, at)

    for k in range(modules):
        module = MtpLayer(config, block, norm, count - 1, use_post_norm=bool(names[3]))
        torch.manual_seed(1 + k)
        with torch.no_grad():
            for key, part in (*module.named_parameters(), *module.named_buffers()):
                if part.is_floating_point():
                    part.normal_(std=0.1 if part.ndim > 1 else 0.3)
                    part += float("norm" in key)
        module.double().eval()
        (layers[-2:] if two else layers[-1]).load_state_dict(module.mtp_block.state_dict())
        twin.save_pretrained(folder / "as_last")  # which gives the layer's tensors their published names
        tensors = {}
        for key, tensor in load_file(folder / "as_last" / "model.safetensors").items():
            at, _, part_name = key.partition(".layers.")[2].partition(".")
            if at and int(at) >= count - 1 - two:
                own = f"{int(at) - count + 2}.{part_name}" if two else part_name
                own = own.replace("post_attention", "pre_mlp") if names is MIMO else own
                tensors[names[4].format(L=count + k, k=k) + own] = tensor
        for part_name, place in zip(("enorm", "hnorm", "eh_proj", "post_norm"), names, strict=False):
            if place:
                weight = module.get_submodule(part_name).state_dict()["weight"].clone()
                tensors[place.format(L=count + k, k=k) + ".weight"] = weight
        if names is DEEPSEEK:  # copies of the target's own, which are passed over
            tensors[names[3].replace("norm", "head").format(L=count + k) + ".weight"] = model.lm_head.weight.clone()
        save_file(load_file(path) | tensors, path, {"format": "pt"})
        made.append(module)
    return model, made


@torch.no_grad()
def judged(model: Any, module: MtpLayer, entries: Tensor) -> tuple[Tensor, Tensor]:
    """Logits and what is recycled [1, S, ...] of the module's layer over entries [1, S, H]."""
    n = entries.shape[1]
    places, decoder = torch.arange(n)[None], model.get_decoder()
    kind = (getattr(module.config, "layer_types", None) or ["full_attention"])[-1]
    behind = places[0, :, None] - places
    seen = (behind >= 0) & (behind < (module.config.sliding_window if kind == "sliding_attention" else n))
    mask = torch.where(seen, 0.0, -torch.inf).double()[None, None]
    rotary, per_kind = getattr(decoder, "rotary_emb", None), model.config.model_type in ("mellum", "mimo_v2_flash")
    turns = None if rotary is None else rotary(entries, places, *([kind] if per_kind else []))
    blocks: Any = module.mtp_block if isinstance(module.mtp_block, torch.nn.ModuleList) else [module.mtp_block]
    out: Any = entries
    for block in blocks:
        out = block(out, attention_mask=mask, position_embeddings=turns, position_ids=places)
        out = out[0] if isinstance(out, tuple) else out
    out = out if module.post_norm is None else module.post_norm(out)
    return model.lm_head(out), out


@torch.no_grad()
def entries_of(model: Any, module: MtpLayer, states: Tensor, tokens: Tensor) -> Tensor:
    embedded = model.get_input_embeddings()(tokens)
    return module.eh_proj(torch.cat([module.enorm(embedded), module.hnorm(states)], -1))


@pytest.mark.parametrize("name", SHIPPED)
def test_drafts_are_those_of_transformers_layer(name, tmp_path):
    """In float64, behind verified text and iterated."""
    model, (module,) = shipped(name, tmp_path)
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64, experts_implementation="eager")
    target = Target(loaded.eval())
    drafter = mtp.read(target)
    with torch.no_grad():
        state = model.get_decoder()(TEXT).last_hidden_state
        features = {i: target.text(TEXT, reads=drafter.reads).features[i] for i in drafter.reads}
        found = drafter.unrolled(TEXT, features, 3)
    verified = entries_of(model, module, state[:, :-1], TEXT[:, 1:])
    logits, recycled = judged(model, module, verified)
    error = 1e-5 if "Bailing" in name or "Nemotron" in name else 1e-9  # routers and norms compute in float32 there
    assert torch.allclose(found[0].double(), logits, rtol=0, atol=error)
    t = 6
    drafted = verified[:, : t - 1]  # entries up to position t - 2
    own = recycled[:, t - 2 : t - 1]
    for step, place in ((1, t - 1), (2, t)):
        entry = entries_of(model, module, own, TEXT[:, place + 1 : place + 2])
        drafted = torch.cat([drafted, entry], 1)
        logits, outs = judged(model, module, drafted)
        own = outs[:, -1:]
        assert torch.allclose(found[step][:, place].double(), logits[:, -1], rtol=0, atol=error)


@pytest.mark.parametrize(("name", "error"), [("DeepSeek-V3 (MLA)", 1e-6), ("GLM-4.5", 1e-6)])
def test_modules_in_a_row_draft_as_in_transformers(name, error, tmp_path):
    """Logits of three greedy tokens behind several texts, each by a module of its own. Both route in float32."""
    model, made = shipped(name, tmp_path, 3)
    theirs = MtpModel(model, 3).double().eval()
    for own, module in zip(theirs.layers, made, strict=True):
        own.load_state_dict(module.state_dict())
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64, experts_implementation="eager")
    target = Target(loaded.eval())
    drafter = mtp.read(target)
    assert len(drafter.draft_layers) == 3
    for n in (4, 7, 9):
        text = TEXT[:, : n + 1]
        cache = MtpCache(config=model.config.get_mtp_config())
        places = torch.arange(n)[None]  # one less than theirs, as turns in float32 are not quite free of a shift
        with torch.no_grad():
            state = model.get_decoder()(text[:, :n]).last_hidden_state
            tokens, logits, _ = theirs(text[:, 1:], state, None, places, cache)
            whole = torch.cat([text, tokens], 1)
            features = {i: target.text(whole, reads=drafter.reads).features[i] for i in drafter.reads}
            found = drafter.unrolled(whole, features, 3)
        for k in range(3):
            assert torch.allclose(found[k][:, n - 1 + k], logits[:, k], rtol=0, atol=error)


LOSSLESS = [("DeepSeek-V3 (MLA)", 2), ("Qwen3.5", 1), ("Mellum (a window)", 1)]
LONGER = [("DeepSeek-V3 (MLA)", 1), ("MiMo-V2-Flash", 2), ("Nemotron-H (two layers)", 1)]
LOSSLESS += [pytest.param(*one, marks=pytest.mark.slow) for one in LONGER]


@pytest.mark.parametrize(("name", "modules"), LOSSLESS)
def test_shipped_modules_draft_losslessly(name, modules, tmp_path):
    shipped(name, tmp_path, modules)
    spec = selfspec.load("mtp", target=tmp_path, dtype="float32")
    assert isinstance(spec.drafter, Mtp)
    for temperature in (0.0, 1.0):
        options = Options(24, Sampling(temperature), 3)
        for prompts in (PROMPTS[:1], PROMPTS):
            plain = autoregressive(spec.target, prompts, options)
            fast = speculative(spec.target, prompts, options, spec.drafter, 8)
            assert fast.token_ids == plain.token_ids
            assert fast.stats.calls <= plain.stats.calls


def test_a_module_is_trained_saved_and_read_again(tmp_path):
    """From the target's last layer; compiled code sees what was trained."""
    for config in (
        MtpConfig(),
        MtpConfig(hidden_first=True, fed="pre", recycled="pre"),
        MtpConfig(final_norm=False, modules=2),
    ):
        target = Target(tiny_model(dtype=torch.float32))
        torch.manual_seed(0)
        drafter = Mtp(target, config)
        assert any(n.startswith("layer.norm") for n in drafter.trained()) == config.final_norm
        randomize(drafter)
        drafter.eval()
        save_drafter(drafter, tmp_path / "drafter", target, "tiny", None, "")
        again = load_drafter(tmp_path / "drafter", target, None)
        plain = autoregressive(target, PROMPTS, Options(16))
        lengths = []
        for one in (drafter, again):
            fast = speculative(target, PROMPTS, Options(16), one, 8)
            assert fast.token_ids == plain.token_ids
            lengths.append(fast.stats.calls)
        assert lengths[0] == lengths[1]
    target.use_engine("compiled")
    target.engine.backend, target.engine.folder, target.engine.quiet = "aot_eager", None, True
    assert speculative(target, PROMPTS[:1], Options(6), again, 4).token_ids[0] == plain.token_ids[0][:6]


def test_a_shipped_module_is_trained_further_and_kept_whole(tmp_path):
    """Its router's bias too, which is no parameter; the target's own stays."""
    model, _ = shipped("DeepSeek-V3 (MLA)", tmp_path / "target")
    spec = selfspec.load("mtp", target=tmp_path / "target", dtype="float32")
    begun = made("mtp", spec.target)
    warm_start(begun, spec.drafter, "mtp")
    save_drafter(begun.eval(), tmp_path / "drafter", spec.target, "tiny", None, "")
    again = load_drafter(tmp_path / "drafter", spec.target, None)
    found = speculative(spec.target, PROMPTS, Options(16), spec.drafter, 8).stats.calls
    assert found == speculative(spec.target, PROMPTS, Options(16), again, 8).stats.calls
    name = "layer.tail.parts.0.mlp.gate.e_score_correction_bias"
    assert torch.equal(again.saved_buffers()[name], spec.drafter.saved_buffers()[name])
    spec.target.saved_dtype = torch.bfloat16  # in which weights are kept, not the bias
    save_drafter(spec.drafter, tmp_path / "half", spec.target, "tiny", None, "")
    kept_bias = load_file(tmp_path / "half" / "drafter.safetensors")[name]
    assert torch.equal(kept_bias, spec.drafter.saved_buffers()[name])
    bias = model.get_decoder().layers[-1].mlp.gate.e_score_correction_bias
    kept: Any = spec.target.layers[-1].get_submodule("mlp.gate")
    assert torch.equal(kept.e_score_correction_bias, bias.to(kept.e_score_correction_bias.dtype))
    assert not torch.equal(kept.e_score_correction_bias, again.saved_buffers()[name])


WRITTEN = [("DeepSeek-V3 (MLA)", 1), ("DeepSeek-V3 (MLA)", 2), ("Qwen3.5", 1), ("ERNIE 4.5", 1), ("HY-V3", 1)]
WRITTEN += [(name, 2 if name == "MiMo-V2-Flash" else 1) for name in AS_LAST]


@pytest.mark.parametrize(("name", "modules"), WRITTEN)
def test_trained_modules_are_written_under_their_family_s_names(name, modules, tmp_path):
    """In place of those that were shipped; transformers reads the target beside them, and the reader the modules."""
    model, _ = shipped(name, tmp_path / "target", modules)
    names = set(load_file(tmp_path / "target" / "model.safetensors"))
    spec = selfspec.load("mtp", target=tmp_path / "target", dtype="float32")
    drafter = Mtp(spec.target, spec.drafter.config)
    randomize(drafter)
    save_drafter(drafter.eval(), tmp_path / "drafter", spec.target, str(tmp_path / "target"), None, "")
    (tmp_path / "target" / "generation_config.json").write_text('{"eos_token_id": [0, 1]}')
    (tmp_path / "target" / "model.safetensors").rename(tmp_path / "target" / "model-mtp.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, "model-mtp.safetensors")}
    (tmp_path / "target" / "model.safetensors.index.json").write_text(json.dumps(index))
    lines = export(str(tmp_path / "drafter"), "vllm", tmp_path / "out")
    assert (tmp_path / "out" / "generation_config.json").read_text() == '{"eos_token_id": [0, 1]}'
    assert "checked: read back" in lines[1]
    assert lines[-1].startswith("vllm serve ")
    files = weight_map(tmp_path / "out" / "model.safetensors.index.json")
    assert {key for key in names if "shared_head.head" not in key} == set(files)
    for file in set(files.values()):
        assert set(load_file(tmp_path / "out" / file)) == {key for key in files if files[key] == file}
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float64)
    assert torch.equal(plain.lm_head.weight, model.lm_head.weight)
    again = selfspec.load("mtp", target=tmp_path / "out", dtype="float32")
    features = spec.target.text(TEXT, reads=drafter.reads).features
    written, own, before = (
        torch.stack(one.unrolled(TEXT, features, 3)) for one in (again.drafter, drafter, spec.drafter)
    )
    assert torch.equal(written, own)
    assert not torch.allclose(written, before)


def test_modules_that_no_engine_would_run_alike_are_not_written(tmp_path):
    shipped("Qwen3.5", tmp_path / "target")
    target, _ = load_target(tmp_path / "target", "float32")
    for config, why in ((MtpConfig(recycled="pre"), "recycled='pre': modules of"), (MtpConfig(draft_vocab=8), "vocab")):
        place = tmp_path / config.recycled
        save_drafter(Mtp(target, config).eval(), place, target, str(tmp_path / "target"), None, "")
        refused(why, export, str(place), "vllm", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match=r"'llama' ships no MTP module that is known here, only deepseek_v3"):
        mtp.write(Mtp(Target(tiny_model()), MtpConfig()), Target(tiny_model()), tmp_path / "target", tmp_path / "out")


def test_modules_that_do_not_fit_are_refused(tmp_path):
    name = "Qwen3.5"
    model, _ = shipped(name, tmp_path)
    path = tmp_path / "model.safetensors"
    whole = load_file(path)

    def changed(tensors: dict[str, Tensor], message: str) -> None:
        save_file(tensors, path, {"format": "pt"})
        refused(message, mtp.read, Target(model), tmp_path)

    changed({k: t for k, t in whole.items() if "mtp." not in k}, "holds no MTP weights: no tensor of model.safetensors")
    changed({k: t for k, t in whole.items() if k != "mtp.fc.weight"}, r"missing tensors \['fc.weight'\]")
    changed(whole | {"mtp.layers.1.x": torch.zeros(1)}, r"unknown tensors \['layers\.1\.x'\]")
    changed(
        whole | {"mtp.fc.weight": torch.ones_like(whole["mtp.fc.weight"], dtype=torch.int32)}, "is torch.int32; quant"
    )
    changed(whole | {"mtp.fc.weight": whole["mtp.fc.weight"].to(torch.float8_e4m3fn)}, "quantized modules are not read")
    changed(whole | {"mtp.fc.weight_scale_inv": torch.zeros(1)}, "is quantized")
    changed(whole | {"mtp.fc.weight": torch.full_like(whole["mtp.fc.weight"], torch.nan)}, "not finite")
    changed(whole | {"mtp.fc.weight": torch.zeros(3, 3)}, r"its MTP module: fc.weight is \[3, 3\]")
    other = Target(tiny_model())
    save_file(whole, path, {"format": "pt"})
    refused(r"no MTP module is known of 'llama'.*it holds mtp\.", mtp.read, other, tmp_path)
    refused("has neither", mtp.read, Target(model), tmp_path / "none", error=FileNotFoundError)
    refused("at least two layers", Mtp, Target(build("Llama", num_hidden_layers=1)), MtpConfig())
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(whole, "old.safetensors")}))
    assert isinstance(mtp.read(Target(model), tmp_path), Mtp)  # the whole file comes first, as in transformers
    path.rename(tmp_path / "shard.safetensors")
    with pytest.raises(FileNotFoundError, match=r"old.safetensors is missing, which .*index.json names"):
        mtp.read(Target(model), tmp_path)
    index.write_text(json.dumps({"weight_map": dict.fromkeys([*whole, "mtp.ghost"], "shard.safetensors")}))
    refused(r"shard.safetensors lacks mtp\.ghost, which", mtp.read, Target(model), tmp_path)
    index.write_text(json.dumps({"weight_map": dict.fromkeys(whole, "shard.safetensors")}))
    assert isinstance(mtp.read(Target(model), tmp_path), Mtp)
    for damaged in ("{", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}'):
        index.write_text(damaged)
        for read in (lambda: mtp.read(Target(model), tmp_path), lambda: load_target(tmp_path)):
            refused(r"index\.json is damaged .*copy it again", read)
    index.write_text(json.dumps({"weight_map": dict.fromkeys(whole, "gone.safetensors")}))
    refused(r"gone\.safetensors is missing, which .*index\.json names", load_target, tmp_path, error=FileNotFoundError)


def test_a_count_that_disagrees_is_refused(tmp_path):
    model, _ = shipped("GLM-4.5", tmp_path, 2)
    model.config.num_nextn_predict_layers = 1  # of a target, beside which an export with two lies
    assert mtp.read(Target(model), tmp_path).config.modules == 2
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 3}))
    refused(r"num_nextn_predict_layers is 3, but it holds 2 MTP modules", mtp.read, Target(model), tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    refused(r"drafter\.modules=4 .*unroll is 3, and trains no more", MtpConfig, modules=4)
    index, path = load_file(tmp_path / "model.safetensors"), tmp_path / "model.safetensors"
    model.config.num_nextn_predict_layers = 2
    own = index["model.layers.2.shared_head.head.weight"] + 1
    save_file(index | {"model.layers.2.embed_tokens.weight": own}, path, {"format": "pt"})
    refused("layers.2.embed_tokens.weight differs from the target's own", mtp.read, Target(model), tmp_path)
    behind = {name.replace("layers.3.", "layers.4."): part for name, part in index.items()}
    save_file(behind, path, {"format": "pt"})
    refused("a gap: it holds tensors of model.layers.4. but none of model.layers.3.", mtp.read, Target(model), tmp_path)
    save_file(index, path, {"format": "pt"})
    model.config.mtp_hidden_states_first = True
    assert mtp.read(Target(model), tmp_path).config.hidden_first
    target = Target(build("Qwen3.5"))
    with pytest.raises(ValueError, match=r"'qwen3_5_text' has one module; train with drafter.modules=1"):
        mtp.write(made("mtp", target, modules=2), target, tmp_path, tmp_path / "out")


def test_a_tensor_under_two_names_is_refused(tmp_path):
    model, _ = shipped("HY-V3", tmp_path)
    path = tmp_path / "model.safetensors"
    whole, bias = load_file(path), "model.layers.2.mlp.expert_bias"
    save_file(whole | {bias.replace("expert", "e_score_correction"): whole[bias] + 1}, path, {"format": "pt"})
    refused(r"two tensors are called 'mlp.e_score_correction_bias'", mtp.read, Target(model), tmp_path)


def test_a_config_of_wrong_types_is_one_line(tmp_path):
    shipped("Mellum", tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"mtp_layer_types": 5}))
    refused(r"its config\.json is not read: .*mtp_layer_types", load_target, tmp_path)
    model, _ = shipped("GLM-4.5", tmp_path / "second")
    model.config.mtp_mlp_layer_types = -1
    refused(r"mtp_mlp_layer_types=-1 must list kinds of layers", mtp.read, Target(model), tmp_path / "second")


def test_odd_experts_are_refused(tmp_path):
    model, _ = shipped("DeepSeek-V3 (MLA)", tmp_path)
    path, name = tmp_path / "model.safetensors", "model.layers.2.mlp.experts.1.up_proj.weight"
    whole = load_file(path)
    for odd in (torch.zeros(3, 3), torch.tensor(1.0), None):
        tensors = {k: t for k, t in whole.items() if k != name} | ({} if odd is None else {name: odd})
        save_file(tensors, path, {"format": "pt"})
        refused(r"(missing tensors \['|: )mlp\.experts\.1\.up_proj\.weight", mtp.read, Target(model), tmp_path)


def test_settings_are_checked():
    forms: list[Any] = ["dense", ["dense"], ["window", "dense"], ["full_attention", 3], 7]
    for settings in ({"fed": "both"}, {"final_norm": 1}, {"layers": [0]}, *({"form": form} for form in forms)):
        refused(r"drafter\.(fed|final_norm|layers|form)=", MtpConfig, **settings)
    with pytest.raises(ValueError, match=r"drafter\.form=.*LlamaForCausalLM have no such form"):
        Mtp(Target(tiny_model()), MtpConfig(form=("full_attention", "dense")))


def test_a_module_of_another_form_is_trained_and_written(tmp_path):
    """Without it, its family's engines would run it otherwise."""
    shipped("ERNIE 4.5 MoE", tmp_path / "target")
    target, _ = load_target(tmp_path / "target", "float32")
    for config in (MtpConfig(final_norm=False), MtpConfig(final_norm=False, form=("full_attention", "dense"))):
        drafter = Mtp(target, config).eval()
        save_drafter(drafter, tmp_path / "drafter", target, str(tmp_path / "target"), None, "")
        again = load_drafter(tmp_path / "drafter", target, None)
        assert again.config == config
        plain = autoregressive(target, PROMPTS[:1], Options(12))
        assert speculative(target, PROMPTS[:1], Options(12), again, 8).token_ids == plain.token_ids
        if config.form is None:
            with pytest.raises(ValueError, match=r"drafter\.form=None: modules of 'ernie4_5_moe' have"):
                export(str(tmp_path / "drafter"), "vllm", tmp_path / "out")
    export(str(tmp_path / "drafter"), "vllm", tmp_path / "out")


def two_modules(target: Target) -> Mtp:
    drafter: Mtp = made("mtp", target, modules=2, depth=4, width=3, min_prob=0.0)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in drafter.trained().values():
            parameter.normal_(std=0.4)
    return drafter.eval()


def test_a_row_may_end_before_another_has_begun_to_draft(llama):
    prompts = [[1, 2, 3, 4, 5], [7]]
    first = autoregressive(llama, prompts[:1], Options(1)).token_ids[0]
    options = Options(8, eos=frozenset(first))
    plain = autoregressive(llama, prompts, options).token_ids
    assert len(plain[0]) == 1 < len(plain[1])
    assert speculative(llama, prompts, options, two_modules(llama), 8).token_ids == plain


def test_a_row_that_reads_nothing_keeps_what_its_layers_carry(llama, monkeypatch):
    """Trees beside a long prompt, which is read in pieces, are those of the short prompt alone."""
    monkeypatch.setattr(feature_cache, "PREFILL", 64)
    drafter, short = two_modules(llama), [3, 4, 5]
    long = torch.randint(1, VOCAB, (200,), generator=torch.Generator().manual_seed(1)).tolist()

    def trees(*prompts: list[int]) -> dict[int, list[int]]:
        watch = Watch(drafter)
        speculative(llama, prompts, Options(12), watch, 8)
        rows = [(text, tree.tokens[i].tolist()) for texts, tree in watch.seen for i, text in enumerate(texts)]
        return {len(text): tokens for text, tokens in rows if text[:3] == short}

    alone, beside = trees(short), trees(long, short)
    assert len(alone.keys() & beside.keys()) > 3
    assert all(alone[at] == beside[at] for at in alone.keys() & beside.keys())


@pytest.mark.parametrize("family", ["GPT-2", "Phi", "OPT", "LFM2"])
def test_a_module_on_targets_whose_final_norm_has_another_name(family):
    target, options = Target(build(family)), Options(8, Sampling(1.0), seed=3)
    drafter, norm = made("mtp", target), final_norm(target.decoder)
    assert torch.equal(drafter.draft_layers[0].norm.weight, norm.weight)  # begins as the target's
    randomize(drafter)
    plain = autoregressive(target, PROMPTS[:1], options).token_ids
    assert speculative(target, PROMPTS[:1], options, drafter.eval(), 4).token_ids == plain
