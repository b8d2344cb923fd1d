"""What is written is what vLLM's own training package computes: its modules draw the same logits from our files.

`make test` installs it without what it needs to train (`pip install --no-deps speculators==0.9.0 hs-connectors`).
"""

import json
from typing import Any

import pytest
import torch
from conftest import random_drafter, tiny_model
from safetensors.torch import load_file

from selfspec.checkpoints.formats import block, eagle3
from selfspec.core.contract import Accepted, Context
from selfspec.core.target import Target
from selfspec.core.tree import chain
from selfspec.drafters.eagle3 import forecast
from selfspec.drafters.parts.draft_layers import LayersCache

dflash_core: Any = pytest.importorskip("speculators.models.dflash.core", reason="speculators is not installed")
dspark_core: Any = pytest.importorskip("speculators.models.dspark.core", reason="speculators is not installed")
peagle_core: Any = pytest.importorskip("speculators.models.peagle.core", reason="speculators is not installed")

TEXT = torch.tensor([[5, 9, 2, 7, 11, 3, 8, 30, 1, 4, 17, 40]])
P_EAGLES: dict[str, dict[str, Any]] = {
    "llama": {"stack": 2, "mask_token": 7},
    "qwen": {"stack": 3, "qk_norm": True, "embeddings": "own", "head": "own", "norm_before_fc": True},
    "one": {"stack": 1, "norm_before_residual": True, "fc_norm": True, "embeddings": "own"},
}


@pytest.mark.parametrize("form", P_EAGLES)
@torch.no_grad()
def test_p_eagle_drafts_as_speculators_trains_it(form, tmp_path, monkeypatch):
    target = Target(tiny_model(dtype=torch.float64, num_hidden_layers=4))
    drafter = random_drafter("eagle3", target, layers=[0, 2], depth=4, parallel=True, **P_EAGLES[form])
    drafter.eval()
    eagle3.write(drafter, target, tmp_path, "speculators", "target")
    found = json.loads((tmp_path / "config.json").read_text())
    inner = found.pop("transformer_layer_config")
    config = peagle_core.PEagleSpeculatorConfig(**found, transformer_layer_config=inner)
    config.transformer_layer_config._attn_implementation = "eager"
    model = peagle_core.PEagleDraftModel(config).double()
    tensors = load_file(tmp_path / "model.safetensors")
    tensors.setdefault("embed_tokens.weight", target.model.get_input_embeddings().weight)
    tensors.setdefault("lm_head.weight", target.lm_head.weight)
    loaded = model.load_state_dict(tensors, strict=False)
    assert not loaded.unexpected_keys
    assert all(name.startswith("verifier_") for name in loaded.missing_keys)
    hosts, n = torch.tensor([0, 3, 7]), TEXT.shape[1] - 1
    anchors = torch.cat([torch.arange(n), hosts.repeat(3)])
    depths = torch.cat([torch.zeros(n), torch.tensor([1, 2, 3]).repeat_interleave(3)]).long()
    monkeypatch.setattr(peagle_core, "generate_cod_sample_indices", lambda **kwargs: (anchors, depths))
    logits: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda module, given, out: logits.append(out))
    features = target.text(TEXT, False, reads=drafter.reads).features
    stacked = torch.cat([features[layer] for layer in drafter.reads], -1)[:, :n]
    given = stacked, TEXT[:, 1:], torch.zeros(1, n, dtype=torch.long)
    model.verifier_lm_head.weight.zero_()
    losses = {"kl_div": (lambda draft, wanted, **kwargs: torch.zeros(draft.shape[:-1]), 1.0)}
    model(*given, verifier_last_hidden_states=torch.zeros(1, n, 32).double(), loss_config=losses)
    theirs = torch.cat([logits[0][:, hosts, None], logits[0][:, n:].unflatten(1, (3, 3)).transpose(1, 2)], 2)
    ours = drafter.along(TEXT, features, hosts[None])
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


BLOCKS: dict[str, dict[str, Any]] = {
    "vanilla": {"correction": 4, "confidence": "parents"},
    "gated": {"correction": 4, "correction_form": "gated", "confidence": "rows"},
    "rnn": {"correction": 4, "correction_form": "rnn", "confidence": "parents", "draft_vocab": 20},
    # Windows that reach beyond the text: at their edges vLLM counts from each row, speculators from the block.
    "sliding": {"correction": 4, "sliding": [1], "window": 30, "confidence": "rows"},
    "sliding_both_ways": {"correction": 4, "sliding": [0], "window": 30, "sliding_causal": False},
}


@pytest.mark.parametrize("form", BLOCKS)
@torch.no_grad()
def test_dspark_drafts_as_speculators_trains_it(form, tmp_path, monkeypatch):
    target = Target(tiny_model(dtype=torch.float64, num_hidden_layers=4))
    drafter = random_drafter("block", target, size=5, layers=[0, 2], **BLOCKS[form])
    if drafter.vocabulary is not None:
        drafter.drafts_only(torch.arange(3, 43, 2))
    block.write(drafter.eval(), target, tmp_path)
    found = json.loads((tmp_path / "config.json").read_text())
    keys = ("block_size", "markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
    config = dspark_core.DSparkSpeculatorConfig(
        **{key: found[key] for key in (*keys, "mask_token_id", "sample_from_anchor")},
        draft_vocab_size=found["draft_vocab_size"] or found["vocab_size"],
        aux_hidden_state_layer_ids=[layer + 1 for layer in found["target_layer_ids"]],
        sliding_window_non_causal=not drafter.config.sliding_causal,
        transformer_layer_config={**found, "use_sliding_window": True},
    )
    config.transformer_layer_config._attn_implementation = "eager"
    model = dspark_core.DSparkDraftModel(config).double()
    tensors = load_file(tmp_path / "model.safetensors")
    embeddings = target.model.get_input_embeddings().weight.detach().clone()
    embeddings[found["mask_token_id"]] = torch.load(tmp_path / "mask_embedding.pt")
    tensors = {"embed_tokens.weight": embeddings, "lm_head.weight": target.lm_head.weight, **tensors}
    loaded = model.load_state_dict(tensors, strict=False)
    assert not loaded.unexpected_keys
    assert all(name.startswith("verifier_") or name == "t2d" for name in loaded.missing_keys)
    anchors, n = torch.tensor([1, 4, 6]), TEXT.shape[1]
    monkeypatch.setattr(dflash_core, "select_anchors", lambda *given: (anchors, torch.ones(3).bool()))
    seen: list[Any] = []
    monkeypatch.setattr(
        dspark_core,
        "compute_metrics",
        lambda logits, wanted, odds, *given, **more: seen.extend([logits, odds]) or (0, {}),
    )
    features = target.text(TEXT, False, reads=drafter.reads).features
    stacked = drafter.stack.stacked(features)
    model.verifier_lm_head.weight.zero_()
    given = stacked, TEXT, torch.ones(1, n), torch.zeros(1, n, 32).double(), torch.zeros(1, n, dtype=torch.long)
    model(*given, max_anchors=3)
    logits, odds = seen[0].view(1, 3, 5, -1), seen[1]
    parents = TEXT[0, anchors[:, None] + torch.arange(5)][None]
    ours, sure = drafter.behind(drafter.along(TEXT, anchors[None], stacked), parents)
    torch.testing.assert_close(ours, logits, rtol=1e-5, atol=1e-5)
    assert (odds is None) == (not sure)
    if sure:
        torch.testing.assert_close(torch.stack(sure, -1), odds.view(1, 3, 5), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", P_EAGLES)
@torch.no_grad()
def test_p_eagle_decodes_what_it_was_trained_for(form):
    target = Target(tiny_model(dtype=torch.float64, num_hidden_layers=4))
    drafter = random_drafter("eagle3", target, layers=[0, 2], depth=4, parallel=True, **P_EAGLES[form])
    drafter.eval()
    features = target.text(TEXT, False, reads=drafter.reads).features
    for at in (1, 5, 10):
        cache, read = target.cache(1, 64, 64), LayersCache([drafter.layer])
        rows = target.forward(chain(TEXT[:, :at]), cache, False, reads=drafter.reads, prompt=True)
        cache.commit([list(range(at))])
        read.observe(Accepted(rows.hidden, rows.features, [0], [list(range(at))]))
        context = Context(TEXT[:, at], [at], [TEXT[0, : at + 1].tolist()], 8, 0.0, None, target, cache)
        pending = read.rows(context, True, drafter.depth, drafter.depth)
        ours = forecast(drafter, pending)
        torch.testing.assert_close(ours, drafter.along(TEXT, features, torch.tensor([[at - 1]]))[0])
