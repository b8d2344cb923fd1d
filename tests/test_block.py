"""Block drafters: held to transformers' own DFlash layers, read and written in the forms of others."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import random_drafter, refused, tiny_model
from judges import check_block
from safetensors.torch import load_file, save_file
from torch import Tensor

import selfspec
from selfspec.checkpoints.drafter_folder import save_drafter
from selfspec.checkpoints.formats import block
from selfspec.core.contract import Accepted, Context
from selfspec.core.generate import autoregressive, speculative
from selfspec.core.options import Options
from selfspec.core.sampling import Sampling
from selfspec.core.target import Target
from selfspec.core.tree import chain
from selfspec.drafters.block import BlockDrafter
from selfspec.drafters.parts import block_masks
from selfspec.integrations.export import export

TEXT = torch.tensor([[5, 9, 2, 7, 11, 3, 8, 30, 1, 4, 17, 40]])
PROMPTS = [[5, 9, 2, 7, 7, 1], [3], [8, 1, 30, 4, 17, 22, 9, 40, 2, 11, 12]]
FORMS: dict[str, dict[str, Any]] = {
    "dflash": {"predicts": "own", "correction": 0},
    "dspark": {"correction": 4, "draft_vocab": 20},
    "causal": {"causal": True, "correction": 0},
    "gated": {"correction": 4, "correction_form": "gated", "confidence": "parents"},
    "rnn": {"correction": 4, "correction_form": "rnn", "confidence": "rows", "draft_vocab": 20},
    "sliding": {"predicts": "own", "correction": 0, "sliding": [1], "window": 6},
    "sliding_both_ways": {"correction": 4, "sliding": [0, 1], "window": 5, "sliding_causal": False},
}


def target_of(dtype: torch.dtype = torch.float64) -> Target:
    return Target(tiny_model(dtype=dtype, num_hidden_layers=4))


def drafter_of(target: Target, **settings: Any) -> BlockDrafter:
    drafter = random_drafter("block", target, size=5, layers=[0, 2], **settings)
    if drafter.vocabulary is not None:
        drafter.drafts_only(torch.arange(3, 43, 2))
    return drafter.eval()


def by_transformers(folder: Path, target: Target, features: Tensor, root: int) -> Tensor:
    """Outputs [size, H] of a written drafter on features [1, n, F*H] and a root behind them, by transformers' layers,
    under names that are written down apart from the writer's."""
    assistant = pytest.importorskip("transformers.models.muse_glimmer_assistant.modeling_muse_glimmer_assistant")
    from transformers import MuseGlimmerAssistantConfig

    found = json.loads((folder / "config.json").read_text())
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    config = MuseGlimmerAssistantConfig(
        **{name: found[name] for name in (*names, "num_hidden_layers", "rms_norm_eps", "rope_parameters")},
        layer_types=["full_attention"] * found["num_hidden_layers"],
        block_size=found["block_size"],
        target_layer_ids=found["dflash_config"]["target_layer_ids"],
        mask_token_id=found["dflash_config"]["mask_token_id"],
    )
    config._attn_implementation = "eager"
    model = assistant.MuseGlimmerAssistantModel(config).double().eval()
    renamed = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    tensors = {renamed.get(k, k): v.double() for k, v in load_file(folder / "model.safetensors").items()}
    model.load_state_dict(tensors)
    embedded = target.model.get_input_embeddings()(torch.tensor([[root]])).double()
    masks = torch.load(folder / "mask_embedding.pt").double().expand(1, found["block_size"] - 1, -1)
    with torch.no_grad():
        given = {"noise_embeds": torch.cat([embedded, masks], 1), "context_hidden_states": features}
        return model(**given).last_hidden_state[0]


@torch.no_grad()
def test_drafts_are_those_of_transformers_layers(tmp_path):
    target = target_of()
    drafter = drafter_of(target, **FORMS["dflash"])
    block.write(drafter, target, tmp_path)
    out = target.text(TEXT, True, reads=drafter.reads)
    stacked = drafter.stack.stacked(out.features)
    for at in (1, 5, 11):
        wanted = target.lm_head(by_transformers(tmp_path, target, stacked[:, :at], int(TEXT[0, at]))[1:])
        logits = drafter.along(TEXT, torch.tensor([[at]]), stacked).logits[0, 0]
        assert torch.allclose(logits, wanted, atol=1e-5)


@pytest.mark.parametrize("form", FORMS)
@torch.no_grad()
def test_trees_are_scored_along_their_paths(form):
    """A node's probability is that of its path by the rows that a whole text gives."""
    target = target_of()
    drafter = drafter_of(target, min_prob=0.0, width=3, **FORMS[form])
    at = 7
    stacked = drafter.stack.stacked(target.text(TEXT, True, reads=drafter.reads).features)
    session, cache = drafter.session(target, 1), target.cache(1, 64, 64)
    rows = target.forward(chain(TEXT[:, :at]), cache, False, reads=drafter.reads, prompt=True)
    cache.commit([list(range(at))])
    session.observe(Accepted(rows.hidden, rows.features, [0], [list(range(at))]))
    context = Context(TEXT[:, at], [at], [TEXT[0, : at + 1].tolist()], 200, 0.0, None, target, cache)
    tree = session.propose(context)
    tokens, parents = tree.tokens[0].tolist(), tree.parents[0].tolist()
    vocabulary = list(range(61)) if drafter.vocabulary is None else drafter.vocabulary.tolist()
    forecast = drafter.along(TEXT, torch.tensor([[at]]), stacked)
    deepest = 0
    for node in range(1, len(tokens)):
        path, up = [tokens[node]], node
        while (up := parents[up]) >= 0:
            path.insert(0, tokens[up])
        deepest = max(deepest, len(path) - 1)
        above = torch.tensor([*path[:-1], *[0] * (drafter.depth - len(path) + 1)])[: drafter.depth]
        logits, _ = drafter.behind(forecast, above[None, None])
        wanted = 0.0
        for d, token in enumerate(path[1:]):
            wanted += float(torch.log_softmax(logits[0, 0, d].float(), -1)[vocabulary.index(token)])
        assert float(tree.scores[0, node].log()) == pytest.approx(wanted, abs=1e-3)
    assert deepest > 1


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_sparse_attention_trains_as_the_dense_mask_does(form, packed, monkeypatch):
    """What a GPU runs compiled, here by torch's definition of it, which can be differentiated on a CPU as well."""
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)
    drafter = drafter_of(target_of(torch.float32), **FORMS[form]).train()
    torch.manual_seed(0)
    tokens, anchors = torch.randint(0, 48, (2, 40)), torch.tensor([[3, 11, 20, 34], [1, 2, 25, 30]])
    stacked = torch.randn(2, 40, 2 * drafter.head.in_features)
    documents = torch.arange(40).expand(2, -1) // 17 if packed else None
    found = []
    for sparse in (False, True):
        monkeypatch.setattr(block_masks, "sparse", lambda device, sparse=sparse: sparse)
        drafter.zero_grad()
        hidden = drafter.along(tokens, anchors, stacked, documents).hidden
        (hidden * torch.linspace(-1, 1, hidden.shape[-1])).square().sum().backward()
        found.append([hidden.detach(), *(p.grad for p in drafter.parameters() if p.grad is not None)])
    assert len(found[0]) > 10
    assert len(found[0]) == len(found[1])
    for dense, other in zip(*found, strict=True):
        torch.testing.assert_close(dense, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form", FORMS)
def test_what_is_written_is_read_again(form, tmp_path):
    target = target_of(torch.float32)
    drafter = drafter_of(target, **FORMS[form])
    block.write(drafter, target, tmp_path)
    found = block.read(tmp_path, target)
    assert found.config.predicts == drafter.config.predicts
    options = Options(24, Sampling(0.0), 0, frozenset())
    plain = autoregressive(target, PROMPTS, options)
    one, two = (speculative(target, PROMPTS, options, each, 8) for each in (drafter, found))
    assert one.token_ids == two.token_ids == plain.token_ids
    assert one.stats.calls == two.stats.calls
    config = json.loads((tmp_path / "config.json").read_text())
    nested, inner = config.pop("dflash_config"), dict(config)
    states = [layer + 1 for layer in nested["target_layer_ids"]]
    outer = {"speculators_model_type": "dspark" if "markov_rank" in config else "dflash"}
    outer |= {"aux_hidden_state_layer_ids": states, "mask_token_id": nested["mask_token_id"]}
    outer |= {"sample_from_anchor": nested["sample_from_anchor"], "sliding_window_non_causal": True}
    keys = ("block_size", "markov_rank", "markov_head_type", "draft_vocab_size", "confidence_head_with_markov")
    outer |= {key: config[key] for key in keys if key in config}
    (tmp_path / "config.json").write_text(json.dumps({**outer, "transformer_layer_config": inner}))
    if form in ("causal", "sliding"):
        return  # which that form has no key for
    again = block.read(tmp_path, target)
    assert all(torch.equal(p, again.trained()[name]) for name, p in found.trained().items())
    assert again.config == found.config


def test_a_draft_vocabulary_of_the_first_tokens_is_read(tmp_path):
    target = target_of(torch.float32)
    drafter = drafter_of(target, **FORMS["dspark"])
    drafter.drafts_only(torch.arange(20))
    block.write(drafter, target, tmp_path)
    assert not load_file(tmp_path / "model.safetensors")["d2t"].any()  # and there is no t2d beside
    assert block.read(tmp_path, target).vocabulary.tolist() == list(range(20))
    other = torch.arange(61) >= 41
    save_file({**load_file(tmp_path / "model.safetensors"), "t2d": other}, tmp_path / "model.safetensors")
    refused("d2t is all zero", block.read, tmp_path, target)


def test_an_older_config_is_read_by_its_own_rotary_base(tmp_path):
    """Folders of older transformers have rope_theta and no rope_parameters, and may leave out what follows."""
    target = target_of(torch.float32)
    block.write(drafter_of(target, **FORMS["dflash"]), target, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for name in ("rope_parameters", "head_dim", "rms_norm_eps"):
        del config[name]
    (tmp_path / "config.json").write_text(json.dumps({**config, "rope_theta": 777.0, "rope_scaling": None}))
    found = block.read(tmp_path, target).stack.config
    assert (found.rope_parameters["rope_theta"], found.head_dim, found.rms_norm_eps) == (777.0, 8, 1e-6)


def test_a_published_folder_drafts(tmp_path):
    target = target_of(torch.float32)
    drafter = drafter_of(target, **FORMS["dspark"])
    block.write(drafter, target, tmp_path / "drafter")
    path = tmp_path / "drafter" / "model.safetensors"
    save_file({**load_file(path), "embed_tokens.weight": target.model.get_input_embeddings().weight}, path)
    target.model.save_pretrained(tmp_path / "target")
    spec = selfspec.load(tmp_path / "drafter", target=tmp_path / "target", dtype="float32")
    plain = spec.autoregressive(PROMPTS[0], max_new_tokens=20, temperature=0.7, seed=3)
    assert spec.generate(PROMPTS[0], max_new_tokens=20, temperature=0.7, seed=3).token_ids == plain.token_ids


@pytest.mark.parametrize("form", FORMS)
def test_an_export_is_held_to_a_reading_of_its_own(form, tmp_path):
    target = target_of(torch.float32)
    target.model.save_pretrained(tmp_path / "target")
    drafter = drafter_of(target, **FORMS[form])
    if form == "causal":
        drafter = drafter_of(target, predicts="own", **FORMS[form])
    save_drafter(drafter, tmp_path / "drafter", target, str(tmp_path / "target"), None, "")
    told = export(str(tmp_path / "drafter"), "vllm", tmp_path / "out")
    assert "checked: read back" in told[1]
    check_block(tmp_path / "out", drafter, target, torch.arange(2, 32)[None])
    assert f'"method": "{"dspark" if drafter.config.correction else "dflash"}"' in told[-1]
    for to in ("sglang", "speculators", "medusa"):
        refused("take --to vllm", export, str(tmp_path / "drafter"), to, tmp_path / "no")
    path, right = tmp_path / "out" / "config.json", json.loads((tmp_path / "out" / "config.json").read_text())
    for planted in ({"target_layer_ids": [0, 1]}, {"causal": not right["dflash_config"].get("causal", False)}):
        path.write_text(json.dumps({**right, "dflash_config": {**right["dflash_config"], **planted}}))
        with pytest.raises(ValueError, match="the file does not say what the drafter computes"):
            check_block(tmp_path / "out", drafter, target, torch.arange(2, 32)[None])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mask_token_id": 3}, "dflash_config and the config around it differ in mask_token_id"),
        ({"block_size": 0}, "block_size=0 must be a whole number above 0"),
        ({"hidden_size": 8}, "hidden_size is 8, the target's is 32"),
        ({"dflash_config": {"target_layer_ids": [0, 9]}}, r"target_layer_ids=\[0, 9\] must list layers of the target"),
        ({"dflash_config": {"target_layer_ids": [2, 0]}}, "must ascend"),
        ({"dflash_config": {"mask_token_id": 61}}, "mask_token_id=61 must be a token of the target, 0 to 60"),
        ({"dflash_config": {"causal": "false"}}, "causal='false' must be true or false"),
        ({"layer_types": "sliding_attention"}, "layer_types='sliding_attention' must list"),
        ({"layer_types": ["sliding_attention"]}, "must list full_attention or sliding_attention 2 times"),
        ({"layer_types": ["sliding_attention"] * 2}, "sliding_window is None; give positions"),
        ({"markov_rank": 4, "markov_head_type": "lstm"}, "markov_head_type='lstm' must be one of vanilla, gated, rnn"),
        ({"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}, "missing tensors"),
        ({"use_swa": "false"}, "use_swa='false' must be true or false"),
        ({"markov_rank": 2**20}, "a markov_rank of 1048576 can not lie in its file"),
        ({"num_attention_heads": "2"}, "config.json: num_attention_heads='2' must be a whole number above 0"),
        ({"draft_vocab_size": 900}, "draft_vocab_size=900 must lie between 1 and 61"),
        ({"num_target_layers": 36}, "num_target_layers is 36, the target's is 4"),
        ({"num_target_layers": 2, "target_num_hidden_layers": 93}, "target_num_hidden_layers is 93, the target's is 4"),
        ({"mask_embedding": "other.pt"}, "mask_embedding='other.pt' can not be read here"),
        ({"confidence_head_with_markov": "true"}, "confidence_head_with_markov='true' must be true or false"),
    ],
)
def test_folders_that_do_not_fit_are_refused(change, message, tmp_path):
    target = target_of(torch.float32)
    block.write(drafter_of(target, **FORMS["dflash"]), target, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    nested = change.pop("dflash_config", {})
    config |= change
    config["dflash_config"] |= nested
    (tmp_path / "config.json").write_text(json.dumps(config))
    refused(message, block.read, tmp_path, target)


@pytest.mark.parametrize("mask", [torch.full((32,), torch.nan), torch.zeros(32).long(), torch.zeros(8)])
def test_masks_that_are_none_are_refused(mask, tmp_path):
    target = target_of(torch.float32)
    block.write(drafter_of(target, **FORMS["dflash"]), target, tmp_path)
    torch.save(mask, tmp_path / "mask_embedding.pt")
    refused("must hold 32 finite numbers", block.read, tmp_path, target)
    (tmp_path / "mask_embedding.pt").unlink()
    refused("mask_embedding.pt is missing, which config.json names", block.read, tmp_path, target, error=OSError)
