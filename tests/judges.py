"""Judges of written files: an independent reading of each format is held against the drafter, on real text."""

from pathlib import Path

import reference_formats as reference
import torch
from torch import Tensor

from selfspec.core.target import Target
from selfspec.drafters.block import BlockDrafter
from selfspec.drafters.eagle3 import Eagle3
from selfspec.drafters.medusa import Medusa
from selfspec.integrations.export import _EXACT, _FOLDED, _ROUGH


@torch.no_grad()
def check_eagle3(folder: Path, drafter: Eagle3, target: Target, tokens: Tensor, to: str = "vllm") -> None:
    """Hold a written EAGLE-3 folder against the drafter. Raises ValueError naming what differs."""
    tokens, steps = tokens.to(target.device), max(1, min(drafter.depth, tokens.shape[1] - 3))
    out = target.text(tokens, False, reads=drafter.reads)
    root = tokens.shape[1] - steps - 2
    if drafter.config.parallel:
        ours = list(drafter.along(tokens, out.features, torch.tensor([[root]], device=tokens.device))[0, 0])
    else:
        ours = [one[0, root + step] for step, one in enumerate(drafter.unrolled(tokens, out.features, steps))]
    vllm_alone = to == "speculators" or drafter.config.norm_before_residual or drafter.config.qk_norm
    readers = ["vllm"] if vllm_alone or drafter.config.parallel else ["vllm", "sglang"]
    for reader in readers:
        theirs = reference.eagle3(folder, target.model, tokens.cpu(), reader, root, steps)
        for step, (own_logits, read_logits) in enumerate(zip(ours, theirs, strict=False)):
            mine = drafter.of_vocabulary(own_logits).float().cpu()
            full = read_logits if drafter.vocabulary is None else read_logits[drafter.vocabulary.cpu()]
            what = f"{folder} as {reader} reads it, draft step {step + 1}"
            _hold(mine, full, _EXACT if target.dtype.itemsize > 2 else _ROUGH, what)


@torch.no_grad()
def check_block(folder: Path, drafter: BlockDrafter, target: Target, tokens: Tensor) -> None:
    """Hold a written DFlash or DSpark folder against the drafter. Raises ValueError naming what differs."""
    tokens, root = tokens.to(target.device), tokens.shape[1] - drafter.depth - 1
    stacked = drafter.stack.stacked(target.text(tokens, False, reads=drafter.reads).features)
    ours = drafter.along(
        tokens, torch.tensor([[root]], device=tokens.device), stacked.to(drafter.stack.trained_stack.fc.weight.dtype)
    )
    theirs = reference.block(folder, target.model, tokens.cpu(), root)
    logits, _ = drafter.behind(ours, tokens[:, None, root : root + drafter.depth])
    for depth, full in enumerate(theirs):
        mine = logits[0, 0, depth].float().cpu()
        few = full if drafter.vocabulary is None else full[drafter.vocabulary.cpu()]
        _hold(mine, few, _EXACT if target.dtype.itemsize > 2 else _ROUGH, f"{folder}, depth {depth}")


@torch.no_grad()
def check_medusa(folder: Path, drafter: Medusa, target: Target, tokens: Tensor) -> None:
    """Hold a written Medusa folder against the drafter. Raises ValueError naming what differs."""
    root = tokens.shape[1] - 1
    hidden = target.text(tokens.to(target.device), False).hidden[0, root:]
    ours, theirs = drafter(hidden)[:, 0].float().cpu(), reference.medusa(folder, target.model, tokens, root)
    folded = drafter.shared is not None and target.saved_dtype.itemsize < 4
    tolerance = _ROUGH if target.dtype.itemsize < 4 else _FOLDED if folded else _EXACT
    for i, (mine, read) in enumerate(zip(ours, theirs, strict=True)):
        _hold(mine, read, tolerance, f"{folder}, head {i}")


def _hold(ours: Tensor, theirs: Tensor, tolerance: float, what: str) -> None:
    """Raises ValueError where the relative error of logits as they were read is beyond what rounding does."""
    error = float((ours - theirs).norm() / ours.norm())
    if not error <= tolerance:
        raise ValueError(
            f"{what}: logits differ from the drafter's by {error:.2g} of their norm; the file does not say what the "
            "drafter computes"
        )
