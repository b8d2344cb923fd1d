"""The probe at load time: do tree passes of this model give what plain passes give?"""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from selfspec.core.target import Target
from selfspec.core.tree import DraftTree, chain
from selfspec.utils.files import cache_folder, code_hash
from selfspec.utils.machine import device_name, processor

# Largest deviation of a tree pass from a plain one, over the spread of the logits: rounding stays far below, a node
# that sees what it should not lies far above.
_TOLERANCE = {torch.bfloat16: 0.15, torch.float16: 0.03, torch.float32: 1e-3, torch.float64: 1e-6}


def passed_before(model: PreTrainedModel) -> Path | None:
    """A file that is there where the probe passed for such a checkpoint: of the same config, dtypes and device, under
    the same code, and not written since. None where nothing tells that: classes that are not transformers' own, and
    models without a folder."""
    if any(not type(part).__module__.startswith(("torch.", "transformers.", "selfspec.")) for part in model.modules()):
        return None
    tensors = *model.parameters(), *model.buffers()
    placements = sorted({(str(tensor.dtype), str(tensor.device)) for tensor in tensors})
    machine = processor(), [device_name(device) for device in {tensor.device for tensor in tensors}]
    versions = torch.__version__, transformers.__version__, code_hash("core", "engine")
    implementations = model.config._attn_implementation, getattr(model.config, "_experts_implementation", None)
    try:
        files = [path.stat() for path in sorted(Path(str(model.config.name_or_path)).glob("*.safetensors"))]
        written = [(file.st_size, file.st_mtime_ns) for file in files]
        form = model.config.to_json_string(use_diff=False), implementations, placements, written, machine, versions
        folder = cache_folder()
    except (OSError, TypeError, ValueError, RuntimeError):  # of a config that is no JSON; without a home folder
        return None
    return folder / "probed" / hashlib.sha256(repr(form).encode()).hexdigest()[:24] if written else None


@torch.inference_mode()
def probe(target: Target) -> None:
    """Run a small tree behind a short prompt and compare every node with the plain model on its path.

    Raises ValueError where they differ by more than rounding: the model does not obey the tree's mask or positions.
    """
    vocab, device = target.vocab_size, target.device
    prompt = torch.arange(1, 8, device=device)[None] * 7 % vocab
    tree = DraftTree(
        torch.arange(8, 16, device=device)[None] * 11 % vocab, torch.tensor([[-1, 0, 0, 1, 1, 2, 3, 6]], device=device)
    )
    cache = target.cache(1, 16)
    target.forward(chain(prompt), cache, logits=False)
    cache.commit([list(range(prompt.shape[1]))])
    drafted = target.forward(tree, cache).logits
    assert drafted is not None
    deviations = []
    for node in range(tree.tokens.shape[1]):
        path = torch.cat([prompt[0], tree.tokens[0][tree.mask[0, node]]])[None]
        plain = target.text(path).logits
        assert plain is not None
        deviations.append(deviation(drafted[0, node], plain[0, -1]))
    middle = sorted(deviations)[len(deviations) // 2]  # the median: a router of experts may flip at one node
    name, limit = type(target.model).__name__, tolerance(target.dtype, target.recurrent)
    if not middle < limit:
        raise ValueError(
            f"no tree can run over {name}: a pass over one gave other logits than plain passes over its branches "
            f"(relative deviation {middle:.2g}), so it does not follow the tree's mask and positions"
        )
    _probe_rows(target, prompt, limit)


def _probe_rows(target: Target, prompt: Tensor, limit: float) -> None:
    """A row's logits must not depend on how far another row of the pass has come, as length-dependent rotary embeddings
    would make them."""
    if target.max_positions is None:
        return
    count = prompt.shape[1]
    near = torch.arange(count, device=prompt.device)
    far = near + max(0, target.max_positions - count)
    alone = target.text(prompt, positions=near[None]).logits
    beside = target.text(prompt.expand(2, -1), positions=torch.stack([near, far])).logits
    assert alone is not None
    assert beside is not None
    apart = sorted(deviation(b, a) for a, b in zip(alone[0], beside[0], strict=True))[count // 2]
    if not apart < limit:
        raise ValueError(
            f"{type(target.model).__name__} can not be served: a row's logits depend on the largest position of the "
            f"pass (relative deviation {apart:.2g}), so trees and batches would change the output"
        )


def tolerance(dtype: torch.dtype, recurrent: bool) -> float:
    """What rounding may make of logits; layers with a state compute in float32 at most."""
    return _TOLERANCE.get(torch.float32 if recurrent and dtype == torch.float64 else dtype, 0.15)


def deviation(found: Tensor, wanted: Tensor) -> float:
    """Of logits [V], relative to their spread."""
    wanted = wanted.double()
    return float((found.double() - wanted).norm() / (wanted - wanted.mean()).norm().clamp(min=1e-30))
