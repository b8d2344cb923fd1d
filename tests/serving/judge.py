"""Runs inside the virtual environment that vLLM is installed in: decodes prompts and says what it counted.

python judge.py JOB.json OUT.json, where JOB holds target, dtype, prompts {group: [[ids]]}, new_tokens, and speculative
(vLLM's speculative_config, or null).
"""

import json
import sys
import time


def counted(llm) -> dict[str, list[float]]:
    """vLLM's counters of drafts since its start."""
    names = {"vllm:spec_decode_num_drafts": "drafts", "vllm:spec_decode_num_accepted_tokens_per_pos": "accepted"}
    found = {}
    for metric in llm.get_metrics():
        if metric.name in names:
            values = getattr(metric, "values", None)
            found[names[metric.name]] = [float(v) for v in (values if values is not None else [metric.value])]
    return found


def main() -> None:
    from vllm import LLM, SamplingParams

    with open(sys.argv[1]) as file:
        job = json.load(file)
    llm = LLM(
        model=job["target"],
        dtype=job["dtype"],
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=1,
        max_num_batched_tokens=512,
        enable_prefix_caching=False,
        disable_log_stats=False,
        seed=0,
        speculative_config=job["speculative"],
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=job["new_tokens"])
    warm = next(iter(job["prompts"].values()))[0]
    llm.generate([{"prompt_token_ids": warm}], sampling, use_tqdm=False)
    result, before = {}, counted(llm)
    for group, prompts in job["prompts"].items():
        start = time.perf_counter()
        # One by one: what a single user sees
        ids = [
            llm.generate([{"prompt_token_ids": p}], sampling, use_tqdm=False)[0].outputs[0].token_ids for p in prompts
        ]
        seconds, now = time.perf_counter() - start, counted(llm)
        change = {key: [a - b for a, b in zip(now[key], before[key], strict=True)] for key in now}
        result[group] = {"tokens": [list(row) for row in ids], "seconds": seconds, **change}
        before = now
    with open(sys.argv[2], "w") as file:
        json.dump(result, file)


if __name__ == "__main__":
    main()
