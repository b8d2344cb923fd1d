"""lm-evaluation-harness over selfspec's decoding: its command, with one more model.

python -m selfspec.integrations.lm_harness run --model selfspec \\
    --model_args drafter=runs/mine,dtype=float32 --tasks gsm8k --output_path out/spec --log_samples
python -m selfspec.integrations.lm_harness compare out/plain out/spec      # equal texts, time saved; plain: nodes=1
"""

from __future__ import annotations

import inspect
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from selfspec.api import NODES, load
from selfspec.hf_generate import stopping
from selfspec.utils.errors import did_you_mean, one_line_errors
from selfspec.utils.files import Figures, markdown, read_json

try:
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.registry import register_model
    from lm_eval.models.huggingface import HFLM
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f'{error}; pip install "selfspec[lm-eval]"') from error


# Arguments of how the harness's own `hf` loads a model
_OF_LOADING = (
    *("peft", "delta", "autogptq", "gptqmodel", "gguf_file", "parallelize", "mixed_precision_dtype", "subfolder"),
    *("max_memory_per_gpu", "tp_plan", "revision", "pretrained", "tokenizer"),
)


@register_model("selfspec")
class Harness(HFLM):
    """A drafter on its target: generates by speculative decoding, scores by the target itself. nodes: of the draft
    tree, 1 for plain decoding, or auto; other arguments are those of the harness's own `hf` model."""

    def __init__(
        self,
        drafter: str,
        target: str | None = None,
        dtype: str = "auto",
        device: str | None = None,
        nodes: int | str = NODES,
        engine: str = "auto",
        trust_code: bool = False,
        **arguments: Any,
    ) -> None:
        known = inspect.signature(HFLM.__init__).parameters
        for name, value in arguments.items():
            if name not in known:
                raise ValueError(f"--model_args {name}={value}: there is none{did_you_mean(name, ('nodes', *known))}")
            if name in _OF_LOADING and value != known[name].default:
                raise ValueError(f"--model_args {name}={value} is of loading a model; give target=... instead")
        # cuda is the command's own default
        if device is not None and device.startswith("cuda") and not torch.cuda.is_available():
            device = None
        loading = {name: arguments[name] for name in ("trust_remote_code",) if name in arguments}
        self.spec = load(drafter, target, dtype, device, engine, trust_code=trust_code, **loading)
        model, tokenizer = self.spec.target.model, self.spec.tokenizer
        if tokenizer is None:
            raise ValueError(f"target {self.spec.target.name!r} has no tokenizer, which the harness needs")
        self.nodes, self.drafter = nodes, drafter
        self.counted = {"tokens": 0, "passes": 0, "seconds": 0.0}
        super().__init__(pretrained=model, tokenizer=tokenizer, **arguments)

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **arguments: Any) -> Tensor:
        temperature = arguments.pop("temperature", 0.0)
        if arguments.get("do_sample") is None:
            arguments["do_sample"] = temperature > 0
        if arguments["do_sample"]:
            arguments["temperature"] = temperature
        if strings := [text for text in stop if text]:  # it cuts at all afterwards
            prompts = [context.shape[1]] * len(context)  # which may end in what a stop string begins with
            arguments["stopping_criteria"] = [stopping("until", self.tokenizer, strings, prompts)]
        out = self.model.generate(
            context,
            max_length=max_length,
            pad_token_id=self.tokenizer.pad_token_id,
            custom_generate=self.spec,
            nodes=self.nodes,
            return_dict_in_generate=True,
            **arguments,
        )
        self.counted["seconds"] += out.stats.seconds  # of decoding: without the measuring of pass costs
        self.counted["tokens"] += out.stats.tokens
        self.counted["passes"] += out.stats.passes
        sequences: Tensor = out.sequences
        return sequences

    def get_model_info(self) -> Figures:
        counts = {"drafter": self.drafter, "nodes": self.nodes, **self.counted}
        return {"selfspec": counts, "model_dtype": f"torch.{self.spec.target.dtype_name}", "model_source": "selfspec"}


def _read(place: Path) -> tuple[Figures, dict[str, list[tuple[str, str]]]]:
    """What a run counted, and by task which questions it answered and how, from the harness's output folder.

    Raises ValueError for a folder without a run of this model with its samples.
    """
    files = sorted(place.rglob("results_*.json"))
    samples = sorted(place.rglob("samples_*.jsonl"))
    if not files or not samples:
        raise ValueError(f"{place} holds no results with samples; run with --output_path {place} --log_samples")
    counted = read_json(files[-1])["config"].get("selfspec")
    if counted is None:
        raise ValueError(f"{files[-1]} is of another model; run with --model selfspec")
    if not counted["tokens"]:
        raise ValueError(f"{files[-1]} holds no task that generates; give one, such as --tasks gsm8k")
    answers: dict[str, list[tuple[str, str]]] = {}
    stamp = files[-1].stem.removeprefix("results_")
    for path in samples:
        if path.stem.endswith(stamp):
            with path.open(encoding="utf-8") as file:  # once for each of a task's filters
                rows = {row["doc_id"]: row for row in map(json.loads, file)}
            task = path.stem.removeprefix("samples_").removesuffix(f"_{stamp}")
            answers[task] = [
                (f"{i} {row.get('prompt_hash')}", text)
                for i, row in sorted(rows.items())
                for part in row["resps"]
                for text in part
            ]
    return counted, answers


def compare(one: Path, other: Path) -> str:
    """A table of two runs: equal texts, passes, tokens per second. Raises ValueError for runs of different tasks."""
    (first, ours), (second, theirs) = _read(one), _read(other)
    if ours.keys() != theirs.keys() or any(len(ours[task]) != len(theirs[task]) for task in ours):
        raise ValueError(f"{one} and {other} hold different tasks: {sorted(ours)} and {sorted(theirs)}")
    pairs = [pair for task in ours for pair in zip(ours[task], theirs[task], strict=True)]
    if odd := [(a[0], b[0]) for a, b in pairs if a[0] != b[0]]:
        raise ValueError(f"{one} and {other} answer different questions: {odd[0][0]} and {odd[0][1]} (doc_id, prompt)")
    rows = []
    for place, counts in ((one, first), (other, second)):
        figures = f"{counts['seconds']:.1f}", f"{counts['tokens'] / counts['seconds']:.0f}"
        rows.append([place.name, str(counts["nodes"]), str(counts["tokens"]), str(counts["passes"]), *figures])
    table = markdown(["run", "nodes", "tokens", "passes", "seconds", "tokens/s"], rows)
    same, saved = sum(a == b for a, b in pairs), first["seconds"] - second["seconds"]
    return f"{table}\n\n{same} of {len(pairs)} texts equal; {saved:.1f} s saved ({saved / first['seconds']:.0%})"


def main() -> None:
    if sys.argv[1:2] != ["compare"]:
        with one_line_errors():
            cli_evaluate()
        return
    if len(sys.argv) != 4:
        print(
            "usage: python -m selfspec.integrations.lm_harness compare PLAIN SPECULATIVE   (output folders)",
            file=sys.stderr,
        )
        sys.exit(2)
    with one_line_errors():
        print(compare(Path(sys.argv[2]), Path(sys.argv[3])))


if __name__ == "__main__":
    main()
