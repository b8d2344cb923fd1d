"""The pages of docs/: every command of own_model.md runs as it stands, and links lead somewhere."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from conftest import compose_config, save_tiny, typed, write_lines
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from selfspec.checkpoints.card import card
from selfspec.cli import main as cli
from selfspec.cli.arguments import renamed
from selfspec.cli.commands import COMMANDS
from selfspec.utils.exactness import EXACT, ROUNDED, STORY, TESTED

ROOT = Path(__file__).parents[1]
OWN_MODEL = (ROOT / "docs" / "own_model.md").read_text()
SMALLER = {
    "length: 1024": "length: 64",
    "steps: 2000": "steps: 6",
    "_every: 200": "_every: 3",
    "_every: 100": "_every: 3",
}
SMALLEST = ["logger=none", "train.prompts=4", "train.new_tokens=8", "train.validation_rows=2", "loop.batch_size=2"]


def test_one_story_of_exactness():
    """README, docs, --help, cards and the page say the same; a result says which of the three holds."""
    places = ("README.md", "docs/index.md", "docs/exactness.md", "selfspec/page/page.html")
    told = [(ROOT / name).read_text() for name in places] + [cli.overview()]
    told.append(card({"kind": "a", "config": {}, "parameters": 1, "target": {"name": "t", "weights_hash": "0"}}, ""))
    for text in told:
        assert STORY in " ".join(text.split())
    assert all(words in STORY for words in (EXACT, TESTED, ROUNDED))


def talks(count: int) -> list[object]:
    """ShareGPT, OpenAI and plain records, mixed."""
    forms = []
    for i in range(count):
        asked, said = f"Say {i} times {i}.", f"The number is {i * i}. " * 3
        forms.append({"conversations": [{"from": "human", "value": asked}, {"from": "gpt", "value": said}]})
        turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": said + "!"}]
        forms.append({"messages": turns})
        forms.append({"text": f"Number {i}: {said}"})
    return forms


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", OWN_MODEL, re.DOTALL)


@pytest.mark.slow
def test_every_command_of_own_model(tmp_path, tokenizer, monkeypatch, capsys):
    save_tiny(tmp_path / "my-qwen3", tokenizer, "qwen3")
    write_lines(tmp_path / "chat.jsonl", talks(30))
    (tmp_path / "conf" / "experiment").mkdir(parents=True)
    (experiment,) = blocks("yaml")
    for large, small in SMALLER.items():
        assert large in experiment
        experiment = experiment.replace(large, small)
    (tmp_path / "conf" / "experiment" / "mine.yaml").write_text(experiment)
    monkeypatch.chdir(tmp_path)
    said = {}
    lines = [line for block in blocks("bash") for line in block.replace("\\\n", " ").splitlines()]
    for line in lines:
        command = line.split()[1]
        if command == "train":
            line = " ".join([line, *SMALLEST, *(["train.length=64"] if "--check" in line else [])])
        if command == "decode":
            line += " logger=none"
        assert typed(*shlex.split(line.replace("loop.steps=3000", "loop.steps=9"))[1:]) == 0, line
        said[command] = capsys.readouterr().out
    assert {line.split()[1] for line in lines} == {"complete", "train", "decode", "audit", "push", "export"}
    assert "drafter.heads=2" in said["train"]
    (table,) = Path("runs/decode").glob("*/table.md")
    groups = {yaml.safe_load(path.read_text())["wandb"]["group"] for path in table.parent.glob("*/config.yaml")}
    assert groups == {f"decode-{table.parent.name}"}  # all points of a sweep
    labels = [row.split("|")[1].strip() for row in table.read_text().splitlines()[2:6]]
    assert labels == [f"{drafter} nodes={n}" for drafter in ("mine", "mine+prompt_lookup") for n in ("4", "auto")]
    assert "**identical**" in said["audit"]
    assert sorted(path.name for path in Path("runs/sizes").iterdir() if path.is_dir()) == [
        "drafter.heads=2",
        "drafter.heads=3",
    ]
    assert json.loads(Path("runs/mine/drafter/drafter.json").read_text())["target"]["name"] == str(
        tmp_path / "my-qwen3"
    )
    assert not Path("multirun").exists()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")  # the checkpoint knows its target by its place
    exec(compile(blocks("python")[0].replace("runs/mine", "../runs/mine"), "own_model.md", "exec"), {})
    assert "per pass" in capsys.readouterr().out


def test_a_target_that_is_gone_is_asked_for(tmp_path, tokenizer, heads_folder, tiny_folder):
    import shutil

    import selfspec
    from selfspec.checkpoints.drafter_folder import save_drafter
    from selfspec.checkpoints.load_target import load_target

    target, found = load_target(tiny_folder)
    drafter = selfspec.load(str(heads_folder)).drafter
    place = tmp_path / "run" / "target"
    shutil.copytree(tiny_folder, place)
    save_drafter(drafter, tmp_path / "run" / "drafter", target, str(place), found, "")
    meta = json.loads((tmp_path / "run" / "drafter" / "drafter.json").read_text())
    assert meta["target"]["name"] == "../target"
    (tmp_path / "run").rename(tmp_path / "moved")  # with the target inside
    assert selfspec.load(str(tmp_path / "moved")).generate([[5, 9]], 3).token_ids
    shutil.rmtree(tmp_path / "moved" / "target")
    with pytest.raises(FileNotFoundError, match=r"was trained for the target in .*, which is not there; .* target="):
        selfspec.load(str(tmp_path / "moved"))
    assert selfspec.load(str(tmp_path / "moved"), target=tiny_folder).generate([[5, 9]], 3).token_ids


def test_help_says_what_every_option_is():
    """Help is read from source; the dataclasses themselves are the judge of names and defaults."""
    from dataclasses import fields, is_dataclass
    from typing import get_type_hints

    from selfspec.cli import config, help
    from selfspec.cli.commands import COMMANDS
    from selfspec.drafters.registry import config_class, drafter_class, kinds

    def real(kind: type, prefix: str = "") -> dict[str, str]:
        found: dict[str, str] = {}
        for f in fields(kind):
            inner = get_type_hints(kind)[f.name]
            if is_dataclass(inner):
                found |= real(inner, f"{prefix}{f.name}.")
                continue
            value = f.default if callable(f.default_factory) is False else f.default_factory()
            text = {"None": "null", "True": "true", "False": "false"}.get(str(value), str(value))
            found[prefix + f.name] = text.replace("'", "").replace(", ", ",")
        return found

    pairs = [(help.schema_of(name), getattr(config, schema)) for name, schema in help.SCHEMAS.items()]
    pairs += [(schema, config_class(drafter_class(kind))) for kind, schema in help.drafter_schemas().items()]
    assert set(help.drafter_configs()) == set(kinds())
    for read, kind in pairs:
        rows = help.options(read)
        assert dict(head.split("=", 1) for head, _ in rows) == real(kind)
        assert [head for head, said in rows if not said] == []
    assert all(help.text(name).startswith(f"selfspec {name}: ") for name, c in COMMANDS.items() if c.config)
    train = help.text("train")
    assert "+experiment=tiny_medusa" in train
    assert "+experiment=tiny_target" not in train  # of another script


def test_the_light_commands_import_nothing_heavy():
    code = """
import sys, runpy
for command in (["--help"], ["--version"], ["train", "--help"], ["complete", "--help"], ["decod"]):
    sys.argv = ["selfspec", *command]
    try:
        runpy.run_module("selfspec", run_name="__main__")
    except SystemExit:
        pass
heavy = {"torch", "transformers", "hydra", "wandb", "numpy"} & sys.modules.keys()
assert not heavy, heavy
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "there is no command 'decod'; did you mean: selfspec decode" in done.stderr


def test_links_between_pages_lead_somewhere():
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]:
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page}: {link}"


CODE = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "selfspec").rglob("*.py")]
CODE += [*(ROOT / "configs").rglob("*.yaml"), *(ROOT / "train").glob("*.py"), *(ROOT / "eval").glob("*.py")]
SCRIPTS = {command.script: name for name, command in COMMANDS.items() if command.script}
COMMAND = re.compile(r"(?:python ((?:train|eval)/\w+\.py)|selfspec (train|distill|target|decode|compare|show|audit|"
                     r"calibrate|limits|page|report))((?: +[^\n`|;]*)?)")  # fmt: skip
ELSEWHERE = ("eval/gpu.py",)  # no command of the package


def commands() -> list[tuple[str, str]]:
    """Every command whose options are Hydra's, as it stands in comments, docstrings, help and docs: (name, words)."""
    found = [(name, command.example) for name, command in COMMANDS.items() if command.config]
    for path in CODE:
        text = re.sub(r"\\\n\s*#?\s*", "", path.read_text())  # of several lines
        for match in COMMAND.finditer(text):
            name = SCRIPTS.get(match[1], match[2])
            words = re.split(r"  +#| #|[).,:]$|\. |, which|, then|\)|\{| \(|\"\"\"| \.\.\.$", match[3].strip())[0]
            if match[1] not in ELSEWHERE and "=" in words:
                words = words.strip(" .,:")
                found.append((name, words[:-1] if words[-1] in "\"'" and words.count(words[-1]) % 2 else words))
    return sorted(set(found))


@pytest.mark.parametrize(("name", "words"), commands())
def test_every_command_that_stands_somewhere_is_taken(name, words, monkeypatch):
    """Its keys exist, and its values have their types; what it names need not be here."""
    words = words.replace("<date>", "2026-01-31_12-00-00")
    arguments = [word for word in shlex.split(words) if word not in ("-m", "--check") and not word.endswith("=")]
    if "--config-dir" in arguments or any("_target_" in word for word in arguments):
        pytest.skip("with files of its user's own: the other tests of the docs run it")
    for override in OverridesParser.create().parse_overrides(arguments):
        assert override.key_or_group
    first = [re.sub(r"=([^\[{\"']*?),.*", r"=\1", word) for word in renamed(arguments)]  # the first point of a sweep
    named = [] if name in ("report", "page") or any(word.startswith("name=") for word in first) else ["name=x"]
    assert OmegaConf.to_container(compose_config(COMMANDS[name].config, *first, *named), resolve=False)
