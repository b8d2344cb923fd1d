"""A real vLLM serves MTP modules that were written under their family's names, and written block and P-EAGLE drafters:
the same tokens, the same acceptance.

Targets are tiny and random; a token of their text follows mostly from the one before, so that a drafter learns it in a
minute. `make serving` runs this; anywhere else it is skipped.
"""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from chains import Chain
from test_vllm import CLOSE, VLLM, judge
from transformers import AutoConfig, AutoModelForCausalLM

from selfspec.checkpoints.drafter_folder import load_drafter, save_drafter
from selfspec.checkpoints.load_target import load_target, load_tokenizer
from selfspec.core.generate import autoregressive, speculative
from selfspec.core.options import Options
from selfspec.core.sampling import Sampling
from selfspec.core.target import Target
from selfspec.drafters.base import Batch, DrafterConfig
from selfspec.drafters.block import BlockConfig, BlockDrafter
from selfspec.drafters.eagle3 import Eagle3, Eagle3Config
from selfspec.drafters.mtp import Mtp, MtpConfig
from selfspec.integrations.export import export

NEW = 48
ONE = {"n_group": 1, "topk_group": 1, "n_shared_experts": 1, "num_shared_experts": 1, "first_k_dense_replace": 1}
BLOCK = BlockConfig(predicts="own", correction=0, size=5, layers=[0, 1], loss="ce")
# The target's family, the drafter, steps of training, and lengths of chains
Kind = Mtp | BlockDrafter | Eagle3
CASES: dict[str, tuple[str, type[Kind], DrafterConfig, int, tuple[int, ...]]] = {
    "mtp": ("glm4_moe", Mtp, MtpConfig(), 100, (1, 3)),
    "exaone": ("exaone_moe", Mtp, MtpConfig(form=("sliding_attention", "dense")), 100, (1, 3)),
    "dflash": ("llama", BlockDrafter, BLOCK, 300, (4,)),
    "eagle3": ("llama", Eagle3, Eagle3Config(layers=[0, 1], parallel=True, depth=4, min_prob=0.0, loss="ce"), 300, (4,
        )),
}  # fmt: skip

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not VLLM.is_file(), reason=f"no vLLM at {VLLM}: make serving installs it"),
    pytest.mark.timeout(1800),
]


def tiny(folder: Path, kind: str) -> Target:
    """A random target on disk, with the embedded target's tokenizer."""
    tokenizer = load_tokenizer("tiny-target")
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    experts = dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4) | {"num_experts_per_tok": 2}
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 64}
    ends = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0) | {"tie_word_embeddings": False}
    config = AutoConfig.for_model(kind, max_position_embeddings=512, **heads, **experts, **sizes, **ends, **ONE)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, part in model.named_parameters():
            if part.ndim > 1:
                part.normal_(std=1.0 if "embed" in name else 0.3 if "lm_head" in name else 0.05)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return load_target(folder, "float32")[0]


def trained(target: Target, kind: type[Kind], config: Any, steps: int) -> Kind:
    """A drafter that learned from 512 texts of the target's own."""
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(1, target.vocab_size, (512, 2), generator=generator).split(64)
    options = Options(46, Sampling(0.0), 0, frozenset())
    texts = torch.cat(
        [torch.cat([p, torch.tensor(autoregressive(target, p.tolist(), options).token_ids)], 1) for p in prompts]
    )
    torch.manual_seed(0)
    drafter = kind(target, config).train()
    optimizer = torch.optim.AdamW(drafter.trained().values(), lr=2e-3)
    for _ in range(steps):
        tokens = texts[torch.randint(0, len(texts), (16,), generator=generator)]
        with torch.no_grad():
            out = target.text(tokens, reads=drafter.reads)
        features, mask = {at: states.clone() for at, states in out.features.items()}, torch.ones_like(tokens).bool()
        loss, _ = drafter.loss(Batch(tokens, mask, out.hidden.clone(), out.logits.clone(), features, None))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return drafter.eval()


@pytest.mark.parametrize("method", CASES)
def test_a_written_drafter_is_served(method, tmp_path):
    torch.set_num_threads(1)
    family, kind, config, steps, lengths = CASES[method]
    target = tiny(tmp_path / "target", family)
    save_drafter(trained(target, kind, config, steps), tmp_path / "drafter", target, str(tmp_path / "target"), None, "")
    export(str(tmp_path / "drafter"), "vllm", tmp_path / "served")
    whole = kind is Mtp  # a checkpoint with the module in it; else the drafter alone
    if whole:
        shutil.rmtree(tmp_path / "target")  # what is served needs nothing of it
    drafter = load_drafter(tmp_path / "drafter", target, None)
    assert isinstance(drafter, Kind)
    prompts = torch.randint(1, target.vocab_size, (8, 6), generator=torch.Generator().manual_seed(7)).tolist()
    options = Options(NEW, Sampling(0.0), 0, frozenset([0]))
    wanted = [autoregressive(target, [prompt], options).token_ids[0] for prompt in prompts]
    for length in lengths:
        speculation: dict[str, Any] = {"method": "mtp" if whole else method, "num_speculative_tokens": length}
        speculation |= {} if whole else {"model": str(tmp_path / "served")}
        speculation |= {"parallel_drafting": True} if kind is Eagle3 else {}
        folder = str(tmp_path / ("served" if whole else "target"))
        theirs = judge(tmp_path, folder, "float32", {"all": prompts}, speculation, NEW)["all"]
        assert theirs["tokens"] == wanted
        drafts, counts = 0, [0] * length
        on = Options(NEW + length + 1, Sampling(0.0), 0, frozenset())
        for prompt, text in zip(prompts, wanted, strict=True):
            chain = Chain(drafter, length)
            assert speculative(target, [prompt], options, chain, length + 1).token_ids[0] == text
            drafts += len(chain.drafted)
            found = chain.accepted(prompt + autoregressive(target, [prompt], on).token_ids[0])
            counts = [a + b for a, b in zip(counts, found, strict=True)]
        ours, served = [n / drafts for n in counts], [n / theirs["drafts"][0] for n in theirs["accepted"]]
        print(f"{length} drafted: ours {ours}, vLLM {served}")
        assert ours[0] > 0.2, "a drafter that is not accepted proves nothing"
        assert all(abs(a - b) <= CLOSE for a, b in zip(ours, served, strict=True)), (ours, served)
