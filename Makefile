# Everything sets itself up: a virtual environment, torch first (a CPU build where that is what the index offers), then
# the project. `make demo PYTHON=python3.12` picks another interpreter; VENV= another place.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
TORCH = 2.13.0

.PHONY: demo test slow gpu lint clean
.DELETE_ON_ERROR:

$(VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q "torch==$(TORCH)"
	$(BIN)/python -m pip install -q -e ".[dev]"
	touch $@

# Trains heads live on the embedded target, answers five held-out instructions with them, and measures: the main job, small.
demo: $(VENV)/.ready
	$(BIN)/python train/heads.py +experiment=demo name=demo
	$(BIN)/python eval/show.py drafter=runs/demo+prompt_lookup tree.nodes=8 show.prompts=5
	$(BIN)/python eval/decode.py -m name=demo_decode drafter=runs/demo,runs/demo+prompt_lookup tree.nodes=8 \
		decode.temperature=0,0.7,1 decode.prompts=5

test: $(VENV)/.ready
	$(BIN)/python -m pytest

slow: $(VENV)/.ready
	$(BIN)/python -m pytest -m slow

# Everything that needs a GPU, in ten minutes, with its results in notebooks/RESULTS.md.
gpu: $(VENV)/.ready
	$(BIN)/python eval/gpu.py

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build *.egg-info
