"""What is written is what vLLM's own training package computes: its modules draw the same logits from our files.

`make test` installs it without what it needs to train (`pip install --no-deps speculators==0.9.0 hs-connectors`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import randomize, tiny_model
from safetensors.torch import load_file

from selfspec.checkpoints.formats import eagle3
from selfspec.core.contract import Accepted, Context
from selfspec.core.target import Target
from selfspec.core.tree import chain
from selfspec.drafters.eagle3 import Eagle3, Eagle3Config
from selfspec.drafters.parts.feature_layer import DraftLayerCache
from selfspec.drafters.parts.parallel import forecast

peagle_core: Any = pytest.importorskip("speculators.models.peagle.core", reason="speculators is not installed")

TEXT = torch.tensor([[5, 9, 2, 7, 11, 3, 8, 30, 1, 4, 17, 40]])
P_EAGLES: dict[str, dict[str, Any]] = {
    "llama": {"stack": 2, "mask_token": 7},
    "qwen": {"stack": 3, "qk_norm": True, "embeddings": "own", "head": "own", "norm_before_fc": True},
    "one": {"stack": 1, "norm_before_residual": True, "fc_norm": True, "embeddings": "own"},
}


@pytest.mark.parametrize("form", P_EAGLES)
@torch.no_grad()
def test_p_eagle_drafts_as_speculators_trains_it(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target(tiny_model(dtype=torch.float64, num_hidden_layers=4))
    drafter = Eagle3(target, Eagle3Config(layers=[0, 2], depth=4, parallel=True, **P_EAGLES[form]))
    randomize(drafter)
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
    told = model.load_state_dict(tensors, strict=False)
    assert not told.unexpected_keys
    assert all(name.startswith("verifier_") for name in told.missing_keys)
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


@pytest.mark.parametrize("form", P_EAGLES)
@torch.no_grad()
def test_p_eagle_decodes_what_it_was_trained_for(form: str) -> None:
    target = Target(tiny_model(dtype=torch.float64, num_hidden_layers=4))
    drafter = Eagle3(target, Eagle3Config(layers=[0, 2], depth=4, parallel=True, **P_EAGLES[form]))
    randomize(drafter)
    drafter.eval()
    features = target.text(TEXT, False, reads=drafter.reads).features
    for at in (1, 5, 10):
        cache, read = target.cache(1, 64, 64), DraftLayerCache(drafter.layer)
        rows = target.forward(chain(TEXT[:, :at]), cache, False, reads=drafter.reads, prompt=True)
        cache.commit([list(range(at))])
        read.observe(Accepted(rows.hidden, rows.features, [0], [list(range(at))]))
        context = Context(TEXT[:, at], [at], [TEXT[0, : at + 1].tolist()], 8, 0.0, None, target, cache)
        ours = forecast(drafter, drafter.layer, read.rows(context, True, drafter.depth, drafter.depth))
        torch.testing.assert_close(ours, drafter.along(TEXT, features, torch.tensor([[at - 1]]))[0])
