"""Other engines: which drafters each has a form for, and the commands that serve a folder."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from selfspec.core.target import Target
from selfspec.drafters.base import Drafter, Trained
from selfspec.drafters.block import BlockDrafter
from selfspec.drafters.eagle3 import Eagle3
from selfspec.drafters.medusa import Medusa
from selfspec.drafters.mtp import Mtp
from selfspec.utils.files import Figures

FORMATS = ("vllm", "sglang", "speculators", "medusa", "transformers")
_WHY = {  # of kinds that no form has a place for
    "feature": "its layer mixes the next token's embedding into the residual, which no engine's draft layer does",
    "sequential": "no engine reads heads that see the tokens drafted before them",
    "early_exit": "it runs the target's own layers, which engines do not give to drafters",
    "mask": "its mask slots stand in the target's pass, which engines do not offer",
    "hybrid": "engines take one drafter, so export one of its members alone",
    "prompt_lookup": "it has no weights; vLLM and SGLang have n-gram drafting of their own (method ngram)",
    "lookahead": "it has no weights; vLLM and SGLang have n-gram drafting of their own (method ngram)",
}


def transformers_commands(folder: Path) -> list[str]:
    return [
        f"transformers serve {shlex.quote(str(folder))} --trust-remote-code   # without --continuous-batching",
        f"model = AutoModelForCausalLM.from_pretrained({str(folder)!r})",
        f"model.generate(**inputs, custom_generate={str(folder)!r}, trust_remote_code=True)",
    ]


def refuse(drafter: Drafter, target: Target, to: str) -> None:
    """Raises ValueError where a drafter has no such form, with the reason and what to train instead."""
    kind = drafter.kind
    if isinstance(drafter, Medusa):
        if to not in ("vllm", "medusa"):
            raise ValueError(
                f"{to} serves no Medusa heads (vLLM up to 0.32 and TGI do: --to medusa); train drafter=eagle3"
            )
        if target.lm_head.bias is not None:
            raise ValueError("the target's lm_head has a bias, which Medusa's files do not hold; train drafter=eagle3")
    elif isinstance(drafter, Eagle3):
        if target.lm_head.bias is not None and drafter.layer.lm_head is None:
            raise ValueError("the target's lm_head has a bias, which no draft model has; train with drafter.head=own")
        if to == "medusa":
            raise ValueError("an EAGLE-3 layer is no Medusa head; take --to vllm, sglang or speculators")
        if to == "sglang" and (drafter.config.parallel or drafter.config.qk_norm):
            what = "drafts with masks" if drafter.config.parallel else "has norms of queries and keys"
            raise ValueError(f"SGLang reads no EAGLE-3 layer that {what}; take --to vllm")
        if to == "sglang" and drafter.config.norm_before_residual:
            raise ValueError(
                "SGLang adds the state as it is, whatever norm_before_residual says; train with "
                "drafter.norm_before_residual=false, or take --to vllm"
            )
        if to == "sglang" and target.n_layers - 1 in drafter.reads:
            raise ValueError(
                f"drafter.layers={list(drafter.reads)}: SGLang reads states where they enter a layer, so never that of "
                f"the last, {target.n_layers - 1}; train with lower drafter.layers, or take --to vllm"
            )
    elif isinstance(drafter, Mtp):
        if to != "vllm":
            raise ValueError(
                f"{to}: a module is written into its target's checkpoint, which vLLM reads; take --to vllm"
            )
        if drafter.config.draft_vocab is not None:
            raise ValueError("engines give MTP modules the target's whole lm_head; train with drafter.draft_vocab=null")
    elif isinstance(drafter, BlockDrafter):
        if to != "vllm":
            raise ValueError(f"{to}: block drafters are written as vLLM reads them; take --to vllm")
        if target.lm_head.bias is not None:
            raise ValueError("the target's lm_head has a bias, which no draft model has; train drafter=eagle3")
        if drafter.config.predicts == "next" and not drafter.config.correction:
            raise ValueError("rows that predict the next token are DSpark's, with a drafter.correction above 0")
    else:
        raise ValueError(
            f"{kind} can not be exported to {to}: {_WHY.get(kind, 'no engine has a form for it')}; train drafter=eagle3"
        )


def spoken(drafter: Drafter, folder: Path) -> Figures:
    """vLLM's speculative config of a drafter's files. A chain is drafted as deep as the drafter was trained for."""
    assert isinstance(drafter, Trained)
    kind = ("dspark" if drafter.config.correction else "dflash") if isinstance(drafter, BlockDrafter) else drafter.kind
    method: Figures = {"method": kind, "model": str(folder.absolute()), "num_speculative_tokens": drafter.depth}
    if isinstance(drafter, Eagle3) and drafter.config.parallel:
        method["parallel_drafting"] = True
    return method


def commands(drafter: Drafter, to: str, folder: Path, target: str) -> list[str]:
    """What serves the folder."""
    assert isinstance(drafter, (BlockDrafter, Eagle3, Medusa, Mtp))
    at, name = folder.absolute(), shlex.quote(target)
    if isinstance(drafter, Mtp):
        modules = len(drafter.draft_layers)  # of which vLLM takes a multiple
        whole = {"method": "mtp", "num_speculative_tokens": max(1, drafter.depth // modules) * modules}
        return [f"vllm serve {shlex.quote(str(at))} --speculative-config {shlex.quote(json.dumps(whole))}"]
    method = spoken(drafter, at / "vllm" if to == "medusa" else at)
    vllm = f"vllm serve {name} --speculative-config {shlex.quote(json.dumps(method))}"
    if isinstance(drafter, Medusa):
        lines = [f"{vllm}   # vLLM up to 0.32"]
        return lines + (
            [f"text-generation-launcher --model-id {shlex.quote(str(at / 'tgi'))}"] if to == "medusa" else []
        )
    if to == "speculators":
        return [f"vllm serve {shlex.quote(str(at))}"]
    if to == "sglang":
        width, steps = drafter.config.width, drafter.depth
        tokens = min(16, 1 + width + (steps - 1) * width**2)  # it takes no more than there are candidates
        return [
            f"python -m sglang.launch_server --model-path {name} --speculative-algorithm EAGLE3 "
            f"--speculative-draft-model-path {shlex.quote(str(at))} --speculative-num-steps {steps} "
            f"--speculative-eagle-topk {width} --speculative-num-draft-tokens {tokens}"
        ]
    return [vllm]
