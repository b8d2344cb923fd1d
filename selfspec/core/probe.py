"""Probes at load time: do passes over trees of this model, or over chains, give what plain passes give?"""

from __future__ import annotations

import hashlib
import sys
from contextlib import suppress
from pathlib import Path

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from selfspec.core.chains import ChainTarget
from selfspec.core.target import Target
from selfspec.core.tree import DraftTree, chain
from selfspec.utils.errors import one_line
from selfspec.utils.files import cache_folder, code_hash
from selfspec.utils.machine import device_name, processor

_OF_DEVICE = torch.OutOfMemoryError, torch.AcceleratorError  # which say nothing of a model
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


def served(model: PreTrainedModel, stock: bool = False) -> Target:
    """The model as a target of trees, or with a line that says why not, of chains. Raises ValueError, with the reasons,
    for one that can be neither.

    stock: whether it came from a checkpoint, unchanged. The probe's success is then kept on disk, and later processes
    skip it."""
    passed = passed_before(model) if stock else None
    try:
        target = Target(model)
        if passed is None or not passed.is_file():
            probe(target)
        if passed is not None:
            with suppress(OSError):  # of a folder that can not be written to: probed again by the next process
                passed.parent.mkdir(parents=True, exist_ok=True)
                passed.touch()
        return target
    except _OF_DEVICE:
        raise
    except Exception as error:  # of a model of unfamiliar form
        why = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {one_line(error)}"
    try:
        chains = ChainTarget(model, why)
        _probe_chains(chains)
    except _OF_DEVICE:
        raise
    except Exception as error:
        reason = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {one_line(error)}"
        raise ValueError(why if reason == why else f"{why}; nor are chains served: {reason}") from error
    print(f"served by chains alone, not trees: {why}", file=sys.stderr)
    return chains


@torch.inference_mode()
def _probe_chains(target: ChainTarget) -> None:
    """Raises ValueError where the model does not go on from its cache, over several tokens and over one, as over the
    whole text."""
    text = [(1 + 7 * i) % target.vocab_size for i in range(14)]
    whole = target.text(torch.tensor([text], device=target.device)).logits
    assert whole is not None
    state, at = None, 0
    for width in (6, 4, 1, 3):
        target.run([2] * width, at, state)  # gone back from
        outputs, state = target.run(text[at : at + width], at, state)
        target.state_size = outputs[-1].shape[-1]
        parts = [deviation(a, b) for a, b in zip(outputs[-2], whole[0, at : at + width], strict=True)]
        at += width
        if not sorted(parts)[width // 2] < tolerance(target.dtype, True):
            raise ValueError(f"{type(target.model).__name__} does not go on from its cache as over the whole text")
