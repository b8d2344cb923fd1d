"""Bad input, through every entry point: one line that names the value and the fix, exit code 2, no traceback."""

import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from selfspec.cli.arguments import taken
from selfspec.cli.commands import COMMANDS
from selfspec.cli.help import drafter_schemas
from selfspec.cli.precheck import check_composed, miscomposed, misplaced
from selfspec.cli.source import NeedsImport

ROOT = Path(__file__).parents[1]
SCRIPTS = {
    "heads": "train/heads.py",
    "target": "train/target.py",
    "decode": "eval/decode.py",
    "compare": "eval/compare.py",
    "audit": "eval/audit.py",
    "report": "eval/report.py",
    "limits": "eval/limits.py",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory, tiny_folder, heads_folder) -> Path:
    """A folder of things that are wrong."""
    place = tmp_path_factory.mktemp("wrong")
    (place / "target").symlink_to(tiny_folder)
    (place / "heads").symlink_to(heads_folder)
    (place / "empty").mkdir()
    (place / "text").mkdir()
    for name in ("a", "b"):
        (place / "text" / f"{name}.txt").write_text(f"{name} word " * 250)
    (place / "broken.jsonl").write_text('{"text": "fine"}\n{"text": \n')
    (place / "file").write_text("x")
    (place / "t5").mkdir()
    (place / "t5" / "config.json").write_text('{"model_type": "t5"}')
    meta = json.loads((heads_folder / "drafter.json").read_text())
    shutil.copytree(heads_folder, place / "types")
    meta["target"]["weights_hash"] = 5
    (place / "types" / "drafter.json").write_text(json.dumps(meta))
    shutil.copytree(tiny_folder, place / "cut")
    weights = (place / "cut" / "model.safetensors").read_bytes()
    (place / "cut" / "model.safetensors").write_bytes(weights[:1000])
    (place / "bytes").write_bytes(b"\xff\x80")
    twice = '{"question_id": 1, "prompt": "word"}\n{"question_id": 1, "prompt": "word word"}\n'
    (place / "twice.jsonl").write_text(twice)
    for name, point in {"half": "{}", "other_run": '{"rows": [{"arm": "x"}]}'}.items():
        (place / name).mkdir()
        (place / name / "compare.json").write_text(point)
    damaged = {"label": "x", "config": {"tree": {"nodes": 4}}, "arms": None, "speedup": {}, "identical": {}}
    (place / "damaged").mkdir()
    (place / "damaged" / "summary.json").write_text(json.dumps(damaged))
    (place / "no_tokenizer").mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(Path(tiny_folder) / name, place / "no_tokenizer" / name)
    return place


TRAIN = "name=x target.name=target data=text data.root=text loop.steps=1"
EVAL = "drafter=heads data=text data.root=text"
CASES = [
    ("heads", "name=x", "target.name"),
    ("heads", f"{TRAIN} drafter.headz=3", "headz"),
    ("heads",
        f"{TRAIN} train.length=48 train.distill.rows=4 train.distill.new_tokens=8 train.distill.folder=/dev/null/x",
        "train.distill.folder"),
    ("heads", f"{TRAIN} target.name=no_tokenizer", "has no tokenizer"),
    ("heads", f"{TRAIN} train.length=48 data.root=empty", "no file with text matches"),
    ("heads", "name=x target.name=target train.length=48 data=jsonl data.path=broken.jsonl",
        "broken.jsonl, line 2: not JSON"),
    ("heads", f"{TRAIN} hydra.run.dir=file/x", "file must be a folder"),
    ("target", "name=x pretrain.model.hidden=5", "hidden"),
    ("target", "name=x data=text data.root=text pretrain.tokenizer=nowhere/at/all", "no tokenizer at 'nowhere/at/all'"),
    ("decode", "drafter=runs/nothing", "no drafter at 'runs/nothing': there is no such folder"),
    ("decode", "drafter=.", "no drafter at '.': the folder holds no drafter"),
    ("decode", "drafter=medusa target=target", "has to be trained first"),
    ("decode", "width=4", "tree.nodes=16: every pass runs width=4 nodes"),
    ("decode", "drafter=types", "was altered: weights_hash is not what was written"),
    ("decode", "drafter=prompt_lookup target=cut", "weights make no model: Error while deserializing"),
    ("decode", f"{EVAL} decode.top_k=-1", "top_k=-1.0 must be an integer of at least 1"),
    ("target", "name=x data=text data.root=text pretrain.length=0", "pretrain.length=0 must be at least 1"),
    ("target", "name=x data=text data.root=text pretrain.model.hidden_size=7", "pretrain.model makes no model"),
    ("decode", f"{EVAL} decode.questions=source decode.groups=[poems]", "no group ['poems']; it has continuation"),
    ("decode", f"{EVAL} decode.questions=instructions", "are too few to make instructions of"),
    ("decode", f"{EVAL} decode.answers=/dev/null", "decode.answers: /dev/null exists; choose another file"),
    ("report", "sweep=empty against=text", "empty holds no finished run with a speedup"),
    ("report", "sweep=empty against=empty", "are the same folder, empty"),
    ("report", "sweep=half against=other_run", "half/compare.json is no whole comparison (KeyError('rows'))"),
    ("report", "sweep=other_run against=half", "compare.json is no whole comparison (KeyError('nodes'))"),
    ("report", "sweep=damaged", "holds no finished run"),
    ("decode", f"{EVAL} decode.answers=records.jsonl", "the run writes its own records.jsonl"),
    ("decode", f"{EVAL} decode.answers=/dev/null/x/a.jsonl", "choose another folder"),
    ("decode", f"{EVAL} decode.answers=new/", "decode.answers='new/' must name a file"),
    ("decode", f"{EVAL} decode.questions=twice.jsonl decode.chat=false decode.answers=a.jsonl", "have the id 1"),
    ("compare", "target=target compare.results=bytes", "bytes is no text"),
    ("compare", "target=target compare.results=empty", "'empty' is no file"),
    ("limits", "target=target limits.rounds=1", "limits.rounds=1 must be at least 3"),
    ("limits", "limits.config=nothing.json", "limits.config='nothing.json' is not a file"),
    ("limits", "limits.config=t5", "a model of type 't5' is no causal LM"),
    ("limits", "target=target limits.drafters=[runs/nothing]", "no drafter at 'runs/nothing'"),
    ("decode", f"{EVAL} decode.prompt_tokens=100000", "prompts of 100000 tokens fit into the documents"),
    ("audit", f"{EVAL} audit.nodes=[]", "audit.nodes is empty"),
    ("compare", "target=target compare.results=file", "has no lines <!-- compare --> and <!-- end -->"),
    ("report", "", "sweep"),
]  # fmt: skip


def run(
    script: str, arguments: list[str], capsys: pytest.CaptureFixture[str], patch: pytest.MonkeyPatch
) -> tuple[int, str]:
    """A script in this process, as `python script arguments` would run it: exit code and what it says of errors."""
    path = str(ROOT / SCRIPTS[script]) if script in SCRIPTS else ""
    patch.setattr(sys, "argv", [path or "selfspec", *arguments])
    with pytest.raises(SystemExit) as left:
        runpy.run_path(path, run_name="__main__") if path else runpy.run_module("selfspec", run_name="__main__")
    return int(left.value.code or 0), capsys.readouterr().err


CASES += [
    ("", "complete --drafter runs/nothing x", "no drafter at 'runs/nothing'"),
    ("", "complete --drafter heads --temperature -1 x", "--temperature: -1 must be 0"),
    ("", "complete --drafter heads --nodes -4 x", "--nodes: -4 must be auto, or lie between"),
    ("", "complete --drafter heads ''", "prompt 0 is empty"),
    ("", "complete --drafter heads --top-p 3 x", "top_p=3.0"),
]


@pytest.mark.parametrize(("script", "arguments", "message"), CASES, ids=lambda x: str(x).replace("/", "|")[:60])
def test_scripts(script, arguments, message, place, capsys, monkeypatch):
    monkeypatch.chdir(place)
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    code, said = run(script, shlex.split(arguments) if not script else arguments.split(), capsys, monkeypatch)
    begins = Path(SCRIPTS[script]).name if script else ("selfspec: ", "selfspec complete: ")
    lines = [line for line in said.splitlines() if line.startswith(begins)]
    assert (code, len(lines)) == (2, 1), said
    assert message in lines[0]
    assert "Traceback" not in said
    assert "HYDRA_FULL_ERROR" not in said


AT_ONCE = "name=x target.name=tiny-target"  # of a training
REFUSED = [
    ("decode", "decode.tempreature=1", "there is no decode.tempreature; did you mean decode.temperature"),
    ("decode", "temperature=1", "there is no temperature; did you mean decode.temperature"),
    ("decode", "--foo", "there is no --foo; options are given as key=VALUE"),
    ("train", "--target X", "there is no --target; options are given as target.name=VALUE"),
    ("train", "--chek", "there is no --chek; did you mean --check"),
    ("train", "--config_dir=x", "there is no --config_dir; did you mean --config-dir"),
    ("train", "--config-dir", "--config-dir needs a value behind it"),
    ("train", "--config-dir nowhere", "--config-dir nowhere: there is no such folder"),
    ("train", "-experiment=x", "there is no -experiment"),
    ("report", "runs/x", "'runs/x' is no option; options are given as key=VALUE: selfspec report sweep="),
    ("train", "=3", "'=3' is no option; options are given as key=VALUE"),
    ("train", "experiment=demo", "experiment is added: +experiment=demo"),
    ("train", f"{AT_ONCE} lop.steps=3", "there is no lop; did you mean loop"),
    ("train", f"{AT_ONCE} +drafter.hedas=3", "there is no drafter.hedas; did you mean drafter.heads"),
    ("train", f"{AT_ONCE} ++loop.step=5", "there is no loop.step; did you mean loop.steps"),
    ("train", f"{AT_ONCE} +tain.lr=3", "there is no tain.lr; did you mean train.lr"),
    ("train", f"{AT_ONCE} +experiments=demo", "there is no experiments; did you mean +experiment"),
    ("train", f"{AT_ONCE} +experiment=dmeo", "there is no +experiment=dmeo (did you mean 'demo'?); there are demo, "),
    ("train", f"{AT_ONCE} drafter=eagle", "there is no drafter=eagle (did you mean 'eagle3'?); there are block, "),
    ("train", f"{AT_ONCE} data=json", "there is no data=json (did you mean 'jsonl'?)"),
    ("train", f"{AT_ONCE} data.path=a.jsonl", "there is no data.path here; add data=jsonl or data=parquet"),
    ("train", f"{AT_ONCE} data.pth=a.jsonl", "there is no data.pth; did you mean data.path (add data=jsonl"),
    ("train", f"{AT_ONCE} data=jsonl data.path=x +data.tolerates=1",
        "there is no data.tolerates; did you mean data.tol"),
    ("train", f"{AT_ONCE} drafter=medusa,mtp", "drafter=medusa,mtp: several values make a sweep, which -m begins"),
    ("train", f"{AT_ONCE} -m loop.steps=1,0", "loop.steps=0 must be at least 1"),
    ("train", "-m name=a,b target.name=tiny-target", "name can not be swept"),
    ("train", f"{AT_ONCE} loop=[1]", "loop holds keys; give loop.KEY="),
    ("train", f"{AT_ONCE} loop.steps=null", "loop.steps can not be null"),
    ("train", f"{AT_ONCE} loop.steps=many", "loop.steps=many must be of type "),
    ("train", f"{AT_ONCE} wandb.tags=3", "wandb.tags must be a list; give wandb.tags=[...]"),
    ("train", f"{AT_ONCE} ~loop.stepz", "~loop.stepz: there is no loop.stepz"),
    ("train", f"{AT_ONCE} drafter.rank=[", "drafter.rank=[ is not in Hydra's grammar; if it is text, quote it twice"),
    ("train", f"{AT_ONCE} loop.warmup=-1", "loop.warmup=-1 must be at least 0"),
    ("train", f"{AT_ONCE} loop.accumulate=7 loop.batch_size=2", "loop.accumulate=7 must be at most loop.batch_size=2"),
    ("train", f"{AT_ONCE} loop.seed={10**20}", "loop.seed=100000000000000000000 does not fit into 64 bits"),
    ("train", f"{AT_ONCE} train.packed=false", "there is no train.packed"),
    ("train", f"{AT_ONCE} train.init_from=", "train.init_from is empty"),
    ("train", f"{AT_ONCE} target.dtype=int4", "dtype='int4' must be auto, int8, "),
    ("train", f"{AT_ONCE} target.device=nowhere", "device='nowhere' can not be used here"),
    ("decode", "target.name=tiny-target", "target.name= is for training; here give target=NAME"),
    ("decode", "decode.questions=nothing.jsonl", "questions='nothing.jsonl': there is no such file"),
    ("compare", "compare.questions=[edit]", "questions='edit': there is no such file or folder of JSON lines"),
    ("compare", "compare.methods=[hf_assisted]", "compare.methods holds hf_assisted, but compare.draft_model is null"),
    ("train", f"{AT_ONCE} data=synthetic_code data.edits=2", "data.edits=2 must lie in [0, 1]"),
    ("train", f"{AT_ONCE} data=synthetic_code data.paragraph=maybe", "data.paragraph='maybe' must be true or false"),
    ("decode", "drafter=tiny-meduza", "no drafter at 'tiny-meduza' (did you mean 'tiny-medusa'?)"),
    ("decode", "drafter=tiny-medusa/", "no drafter at 'tiny-medusa/' (did you mean 'tiny-medusa'?)"),
    ("decode", "drafter=[a]", "drafter=['a'] must be a text"),
    ("decode", "drafter=prompt_lookup target=nothing", "target 'nothing': there is no folder nothing"),
    ("decode", "drafter=prompt_lookup target=", "target is empty"),
    ("decode", "drafter=prompt_lookup target=nothing.gguf", "target 'nothing.gguf' is not a file"),
    ("decode", "device=gpu", "device='gpu' can not be used here: there is no such kind"),
    ("decode", "decode.seed=" + "9" * 20, "decode.seed=99999999999999999999 does not fit into 64 bits"),
    ("train", f"{AT_ONCE} train.lr=inf", "train.lr=inf must be above 0, finite"),
    ("train", f"{AT_ONCE} data=text data.root=", "data.root is empty"),
    ("train", f"{AT_ONCE} data=jsonl data.path=nothing*.jsonl", "data.path='nothing*.jsonl' is not a file"),
    ("train", f"{AT_ONCE} data.chat_template_kwargs={{a:1}} data=jsonl data.path={__file__}",
        "there is no data.chat_templ"),
    ("train", f"{AT_ONCE} data=text data.root=nowhere", "data.root='nowhere' is not a folder"),
    ("train", f"{AT_ONCE} data=text data.root=. data.validation_share=half", "data.validation_share='half' must lie"),
    ("train", f"{AT_ONCE} data.max_files=0", "data.max_files=0 must be at least 1"),
    ("train", f"{AT_ONCE} data=jsonl data.path={__file__} data.tolerate=-1", "data.tolerate=-1 must be at least 0"),
    ("train", f"{AT_ONCE} data=jsonl data.path={__file__} data.tolerate=1.5", "data.tolerate=1.5 must be an integer"),
    ("train", f"{AT_ONCE} data=jsonl data.path={__file__} data.record_mb=x", "data.record_mb='x' must be at least 1"),
    ("train", f"{AT_ONCE} data=synthetic data.sampled=7", "data.sampled=7 must lie in [0, 1]"),
    ("train", f"{AT_ONCE} wandb.tags=[[a],b]", "wandb.tags holds ['a']; give texts"),
    ("train", f"{AT_ONCE} -m drafter=mtp drafter.heads=2,3", "there is no drafter.heads; did you mean drafter.head ("),
    ("train", f"{AT_ONCE} +experiment=tiny_target", "experiment/tiny_target.yaml: there is no pretrain"),
    ("train", f"{AT_ONCE} drafter=null", "data and drafter can not be null"),
    ("train", f"{AT_ONCE} ~loop.seed", "~loop.seed: a key of the schema can not be removed"),
    ("train", f"{AT_ONCE} +data=text", "data is chosen, not added: data=text"),
    ("train", f"{AT_ONCE} hydra/launcher=nope", "there is no hydra/launcher=nope"),
    ("train", "target.name=tiny-target name=..", "name='..' must name a folder below runs/"),
    ("decode", "drafter=tiny-medusa+", "drafter='tiny-medusa+' holds an empty name"),
    ("decode", "drafter=tiny-medusa+tiny-medusa", "drafter='tiny-medusa+tiny-medusa' names a drafter twice"),
    ("decode", f"drafter={__file__}", f"no drafter at '{__file__}': it is a file"),
    ("report", "sweep=nowhere", "sweep=nowhere: there is no such folder"),
    ("compare", "compare.drafters=[tiny-meduza]", "no drafter at 'tiny-meduza'"),
    ("train", f"{AT_ONCE} drafter.heads=0", "drafter.heads=0 must be between 1 and 256"),
    ("train", f"{AT_ONCE} drafter.heads=many", "drafter.heads=many must be of type Integer"),
    ("train", f"{AT_ONCE} drafter.loss=mse", "drafter.loss='mse' must be one of kl, ce"),
    ("train", f"{AT_ONCE} loop.precision=fp8", "loop.precision='fp8'"),
    ("train", f"{AT_ONCE} train.lr=-1", "train.lr=-1"),
    ("train", f"{AT_ONCE} wandb.mode=sometimes", "wandb.mode='sometimes'"),
    ("report", "sweep=", "sweep=: there is no such folder"),
    ("decode", "tree.nodes=many", "tree.nodes='many' must be auto"),
    ("decode", "decode.prompts=0", "decode.prompts=0 must be at least 1"),
    ("decode", "decode.temperature=-1", "temperature=-1"),
    ("decode", "decode.metrics=[sglang]", "decode.metrics holds ['sglang']"),
    ("target", "name=x pretrain.init=target", "pretrain.init='target' skips the first stage"),
    ("report", "sweep=. against=nowhere", "against=nowhere: there is no such folder"),
    ("decode", "decode.questions=", "decode.questions is empty"),
    ("decode", "decode.groups=[]", "decode.groups is empty"),
    ("target", "name=x pretrain.model.hidden_size=0", "pretrain.model.hidden_size=0 must be at least 1"),
    ("target", "name=x pretrain.instruct.source_share=1", "pretrain.instruct.source_share=1.0 must lie in [0, 1)"),
    ("decode", "decode.lossy=rather", "lossy='rather' must be"),
    ("decode", "engine=fast", "engine='fast' must be one of auto, eager, compiled"),
    ("limits", "limits.sizes=[1,-3]", "limits.sizes=[1, -3] must hold 1"),
    ("limits", "limits.temperatures=[]", "limits.temperatures is empty"),
    ("limits", "limits.temperatures=[-1]", "temperature=-1"),
    ("audit", "audit.prompts=0", "audit.prompts=0 must be at least 1"),
    ("audit", "audit.batch_sizes=[0]", "audit.batch_sizes holds 0"),
    ("audit", "audit.temperatures=[-1]", "temperature=-1"),
    ("audit", "audit.distribution_samples=20", "audit.distribution_samples=20 is too few for the test"),
    ("audit", "audit.distribution_samples=-5", "audit.distribution_samples=-5 is too few for the test"),
    ("audit", "audit.nodes=[8,5000]", "audit.nodes holds 5000"),
    ("limits", "limits.sizes=[1,2000]", "limits.sizes=[1, 2000] must hold 1, to which costs are related, from 1 to at"),
    ("compare", "compare.nodes=[]", "compare.nodes is empty"),
    ("compare", "compare.nodes=[0]", "compare.nodes holds 0"),
    ("compare", "compare.nodes=[8,most]", "compare.nodes holds 'most'"),
    ("compare", "compare.groups=[poems]", "compare.groups holds ['poems']"),
    ("compare", "compare.prompts=0", "compare.prompts=0"),
    ("compare", "compare.prompts=[1,2]",
        "compare.prompts=[1, 2] must be a number of at least 1, or a list with one for"),
    ("decode", "decode.arms=[vllm]", "decode.arms holds ['vllm']"),
    ("decode", "tree.nodes=0", "tree.nodes=0 must be auto"),
    ("decode", "tree.nodes=2000", "tree.nodes=2000 must be auto"),
    ("decode", "tree.nodes=1.5", "tree.nodes=1.5 must be auto"),
    ("audit", "audit.seeds=[1180591620717411303424]", "seed=1180591620717411303424 does not fit into 64 bits"),
]  # fmt: skip
TAKEN = [
    ("decode", "--multi --info defaults -cnfoo -i all drafter=a"),
    ("decode", "-m drafter=a/b,c/d tree.nodes=8 data=hub data.name=x hydra/launcher=basic wandb.tags=[a] --cfg job"),
    ("train", f"{AT_ONCE} +experiment=demo drafter=medusa drafter.heads=2 --check"),
    ("train", f"{AT_ONCE} data=jsonl data.path={__file__} +data.chat_template_kwargs.thinking=true"),
    ("train", f"{AT_ONCE} drafter._target_=mine.Own drafter.any=3 +drafter.other=2"),
    ("target", "name=x +pretrain.model.more.x=3 loop.minutes=2 pretrain.instruct.steps=1"),
    ("decode", "decode.seed=-1,2 -m"),
    ("train", "--cfg job +experiment=llama3_8b_medusa"),
    ("train", f"{AT_ONCE} -m drafter=glob(m*) loop.steps=range(1,3)"),
    ("train", f"{AT_ONCE} drafter=eagle3 ++drafter.llama.rope_parameters.rope_theta=1e4"),
    ("train", f"{AT_ONCE} +debug=quick --info"),
]


def precheck(name: str, typed: str) -> str | None:
    arguments = typed.split()
    return misplaced(name, arguments) or miscomposed(name, taken(arguments))


@pytest.mark.parametrize(("name", "typed", "message"), REFUSED)
def test_options_are_refused(name, typed, message):
    said = precheck(name, typed)
    assert said.startswith(message)
    assert "\n" not in said


def test_options_are_refused_before_anything_slow_is_imported():
    """A whole process, in which nothing that takes seconds can be imported."""
    code = "import sys; sys.modules.update(torch=None, peft=None); from selfspec.cli.main import main"
    typed = ["train", "name=x", "target.name=tiny-target", "loop.steps=0"]
    done = subprocess.run([sys.executable, "-c", f"{code}; main()", *typed], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, "selfspec train: loop.steps=0 must be at least 1\n")
    typed = ["complete", "x", "--dtype", "int3"]
    done = subprocess.run([sys.executable, "-c", f"{code}; main()", *typed], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("selfspec: dtype='int3' must be auto, int8, ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("complete x --temprature 1", "did you mean --temperature"),
        ("complete x --min-p 2", "min_p=2.0 must lie in [0, 1]"),
        ("complete x --drafter tiny-meduza", "(did you mean 'tiny-medusa'?)"),
        ("complete x --target nothing", "there is no folder nothing"),
        ("complete x --device gpu", "device='gpu' can not be used here"),
        ("export tiny-medusa --to vlm --out o", "invalid choice: 'vlm'"),
        ("push tiny-medusa a/b --results nothing", "--results nothing: there is no such file or folder"),
        ("push prompt_lookup a/b", "prompt_lookup has no weights of its own to push"),
        ("push tiny-medusa+prompt_lookup a/b", "joins several drafters; push one that was trained"),
    ],
)
def test_commands_with_options_of_their_own_refuse_them_at_once(typed, message, capsys, monkeypatch):
    code, said = run("", typed.split(), capsys, monkeypatch)
    assert code == 2
    assert message in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(("name", "typed"), TAKEN)
def test_options_that_may_be_right_go_on(name, typed):
    assert precheck(name, typed) is None
    with suppress(NeedsImport):  # nothing else was raised on the way, which would be passed over
        check_composed(COMMANDS[name], taken(typed.split()))


def test_every_kind_of_drafter_is_checked_before_imports():
    for schema in drafter_schemas().values():
        assert schema() is not None  # and its ranges are


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("loop:\n\tsteps: 3\n", r"found character '\\t' that cannot start any token in .*mine.yaml\", line 3"),
        ("lop:\n  steps: 3\n", "experiment/mine.yaml: there is no lop; did you mean loop"),
        ("loop:\n  stepz: 3\n", "experiment/mine.yaml: there is no loop.stepz; did you mean loop.steps"),
        ("train:\n  distill:\n    rowz: 3\n", "there is no train.distill.rowz; did you mean train.distill.rows"),
        ("drafter:\n  hedas: 3\n", "mine.yaml: there is no drafter.hedas; did you mean drafter.heads"),
        ("data:\n  pth: 3\n", "there is no data.pth; did you mean data.path"),
        ("loop:\n  steps: many\n", "mine.yaml: loop.steps=many must be of type"),
        ("loop:\n  steps:\n", "mine.yaml: loop.steps can not be null"),
        ("loop: 3\n", "mine.yaml: 3 stands where a section of keys belongs"),
    ],
)
def test_an_experiment_with_an_error_is_named(text, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conf/experiment").mkdir(parents=True)
    (tmp_path / "conf/experiment/mine.yaml").write_text(f"# @package _global_\n{text}")
    code, said = run("", ["train", "--config-dir", "conf", "+experiment=mine", "name=x"], capsys, monkeypatch)
    assert code == 2
    assert re.search(message, said)
    assert said.count("\n") == 1


def test_a_folder_of_configs_may_have_any_name(tmp_path):
    (place := tmp_path / "josé (1), 'b'" / "experiment").mkdir(parents=True)
    (place / "mine.yaml").write_text("# @package _global_\nloop:\n  stepz: 3\n")
    said = miscomposed("train", ["--config-dir", str(place.parent), "+experiment=mine", "name=x"])
    assert "mine.yaml: there is no loop.stepz; did you mean loop.steps" in said


@pytest.mark.slow
def test_the_traceback_is_there_for_those_who_ask(place):
    """And a whole process behaves as the scripts above do."""
    call = [sys.executable, str(ROOT / "eval" / "decode.py"), "drafter=runs/nothing"]
    asked = subprocess.run(call, capture_output=True, text=True, cwd=place, env={**os.environ, "HYDRA_FULL_ERROR": "1"})
    assert asked.returncode == 1
    assert "Traceback" in asked.stderr
    plain = subprocess.run(call, capture_output=True, text=True, cwd=place, env=os.environ)
    assert plain.returncode == 2
    assert plain.stderr.strip().splitlines()[-1].startswith("decode.py: no drafter at 'runs/nothing'")
    assert len(plain.stderr.strip().splitlines()) == 1
