"""The commands around a served target: serve-target, states, acceptance."""

from __future__ import annotations

import argparse
import os
import shlex
from pathlib import Path

from selfspec.cli.source import names_of
from selfspec.cli.terminal import as_temperature, new_parser, positive
from selfspec.utils.files import parse_json
from selfspec.utils.openai_client import server_urls

_KINDS = names_of("selfspec.integrations.serve_target")["KINDS"]


def _vllm_python() -> str:
    """The Python of vLLM's environment: of SELFSPEC_VLLM, of `make serving`, else the one on the path."""
    places = [Path(os.environ[name]) for name in ("SELFSPEC_VLLM",) if os.environ.get(name)] + [Path(".venv-vllm")]
    return next((str(place / "bin/python") for place in places if (place / "bin/python").is_file()), "python")


def _layers(text: str) -> list[int]:
    return [int(part) for part in text.replace(",", " ").split()]


def _server_parser() -> argparse.ArgumentParser:
    parser = new_parser(
        "serve-target",
        "Print the command of a vLLM that hands out a target's hidden states to a trainer (train.states=server).",
    )
    parser.add_argument("target", help="folder or hub id")
    parser.add_argument("--drafter", default="eagle3", choices=_KINDS, help="the kind to be trained")
    parser.add_argument("--layers", type=_layers, help="that it reads, as drafter.layers (unset: its own choice)")
    parser.add_argument("--folder", default="states", help="where the server writes states; both need to reach it")
    parser.add_argument("--port", type=positive, default=8000, help="of the server")
    parser.add_argument("--length", type=positive, default=4096, help="tokens of a request, at most")
    parser.add_argument("--dtype", default="auto", help="auto, bfloat16, float16 or float32")
    parser.add_argument("--python", default=_vllm_python(), help="of the environment in which vLLM is installed")
    parser.add_argument("--plain", action="store_true", help="a server for text (data=server), without hidden states")
    parser.add_argument(
        "--dry-run",
        metavar="DIR",
        help="write an untrained drafter's files to this new folder, and print the server that loads them",
    )
    parser.add_argument("--draft-vocab", type=positive, help="of the untrained drafter, as drafter.draft_vocab")
    parser.add_argument(
        "--serve", metavar="JSON", help="a drafter's --speculative-config, as selfspec export prints it"
    )
    parser.add_argument("--run", action="store_true", help="start the server instead of only printing its command")
    return parser


def serve_target(arguments: list[str]) -> None:
    """selfspec serve-target TARGET --drafter eagle3 --folder states"""
    args = _server_parser().parse_args(arguments)
    names_of("selfspec.utils.machine")["dtype_name"](args.dtype)
    if args.dry_run is not None and Path(args.dry_run).exists():
        raise ValueError(f"--dry-run {args.dry_run} exists; give a new folder")

    from selfspec.checkpoints.find import check_target_name

    check_target_name(args.target)

    from selfspec.core.target import Target
    from selfspec.integrations import serve_target as server
    from selfspec.integrations.engines import spoken
    from selfspec.integrations.export import write_engine_files
    from selfspec.training.states import wanted_layers, write_about

    given = args.target, Path(args.folder), args.python, args.port, args.length, args.dtype
    if args.plain or args.serve is not None:
        drafter = None if args.serve is None else parse_json(args.serve)
        environment, words = server.server_command(*given, drafter=drafter)
    else:
        target, _, drafter = server.untrained(args.target, args.drafter, args.layers, args.draft_vocab)
        assert isinstance(target, Target)
        layers = wanted_layers(drafter.reads, target.n_layers)
        environment, words = server.server_command(*given, layers)
        if args.dry_run is not None:
            written = write_engine_files(drafter.eval(), target, None, "vllm", Path(args.dry_run))
            print("\n".join(written[:-1]))
            environment, words = server.server_command(*given, drafter=spoken(drafter, Path(args.dry_run)))
        else:
            if args.run:
                write_about(Path(args.folder), layers, args.target)
            print(f"states of layers {layers} (0 is the embeddings) go to {args.folder}; train with")
            training = [f"drafter={args.drafter}", f"target.name={args.target}", "data=jsonl", "data.path=chat.jsonl"]
            training += [f"drafter.layers=[{','.join(map(str, args.layers))}]"] if args.layers else []
            training += [f"drafter.draft_vocab={args.draft_vocab}"] if args.draft_vocab else []
            training += ["train.states=server", f"train.states_url=http://localhost:{args.port}", "name=mine"]
            print(f"  selfspec train {shlex.join(training)}")
    print(server.shown_command(environment, words), flush=True)
    if args.run:
        server.start(environment, words)


def states(arguments: list[str]) -> None:
    """selfspec states --check FOLDER --target TARGET"""
    what = "Folders of hidden states: have a server write one, or say what it holds and whether they are a target's."
    parser = new_parser("states", what)
    does = parser.add_mutually_exclusive_group(required=True)
    does.add_argument("--check", metavar="FOLDER", help="of files as vLLM and speculators write them")
    does.add_argument("--write", metavar="FOLDER", help="have a server write it, for the texts of --path")
    parser.add_argument("--target", help="with --check: hold a text against its own layers, read one at a time")
    parser.add_argument("--layers", type=_layers, help="that they are of, 0 the embeddings (unset: as recorded there)")
    parser.add_argument("--drafter", default="eagle3", choices=_KINDS, help="with --write: the kind to be trained")
    parser.add_argument("--url", help="with --write: of the server of selfspec serve-target")
    parser.add_argument("--path", help="with --write: texts or conversations, as data=jsonl takes them")
    parser.add_argument("--length", type=positive, default=2048, help="with --write: tokens of a text, at most")
    args = parser.parse_args(arguments)
    if args.write is not None:
        _write_states(args)
    else:
        _check_states(args)


def _check_states(args: argparse.Namespace) -> None:
    folder = Path(args.check)
    if not folder.is_dir():
        raise FileNotFoundError(f"--check {args.check}: there is no such folder")

    from selfspec.integrations import serve_target as server

    for line in server.described(folder):
        print(line)
    if args.target is None:
        return

    from selfspec.checkpoints.find import check_target_name

    check_target_name(args.target)

    from selfspec.checkpoints.target_files import Shards
    from selfspec.checkpoints.target_parts import load_parts
    from selfspec.training.states import plausible
    from selfspec.training.states_folder import FromFolder

    target, _ = load_parts(args.target, server.dtype_of(folder), "cpu")
    known = FromFolder(target, (), folder, args.layers, 2**31)
    print(f"they train: {', '.join(server.serves(known.layers, target)) or 'no kind that is known here'}")
    loss = plausible(known, known.first)
    print(f"the target's loss on a text of {len(known.first)} tokens, by the last column: {loss:.2f} nats a token")
    if target.recurrent:
        print("its layers are not held against these states one by one: they keep a state of their own")
        return
    print("\n".join(server.probe(known, known.first, Shards(args.target))))


def _write_states(args: argparse.Namespace) -> None:
    if missing := [name for name in ("target", "url", "path") if getattr(args, name) is None]:
        raise ValueError(f"--write needs --{missing[0]} too")
    urls = server_urls("--url", args.url)
    names_of("selfspec.data.records")["files_of"](args.path)

    from selfspec.data.records import JsonLines
    from selfspec.data.store import tokenize
    from selfspec.integrations import serve_target as server
    from selfspec.training.states_server import FromServer
    from selfspec.utils.openai_client import Servers

    target, tokenizer, drafter = server.untrained(args.target, args.drafter)
    texts = JsonLines(path=args.path, tokenizer=tokenizer, ends=target.end_tokens)
    corpus = tokenize([document for document, _ in texts.documents()], tokenizer)
    documents = [corpus.document(i).tokens[: args.length] for i in range(len(corpus.is_chat))]
    source = FromServer(target, drafter.reads, Servers(urls), args.layers, 1.0)
    count = server.record(source, documents, Path(args.write))
    source.close()
    print(f"states of {count} texts were written to {args.write}, {len(documents)} are there")


def acceptance(arguments: list[str]) -> None:
    """selfspec acceptance http://localhost:8000 --questions questions.jsonl --target TARGET"""
    parser = new_parser("acceptance", "How many drafted tokens a vLLM server accepts, by its own counters.")
    parser.add_argument("url", help="of a server with a drafter")
    parser.add_argument("--questions", required=True, help="a file that selfspec decode takes, or human_eval")
    parser.add_argument("--target", required=True, help="whose tokenizer reads the questions")
    parser.add_argument("--prompts", type=positive, default=64, help="questions, at most")
    parser.add_argument("--max-new-tokens", type=positive, default=256, help="of each answer")
    parser.add_argument("--temperature", type=as_temperature, default=0.0, help="0 is greedy")
    parser.add_argument("--at-once", type=positive, default=1, help="requests at a time")
    args = parser.parse_args(arguments)
    url = server_urls("URL", args.url)[0]
    names_of("selfspec.data.questions")["file_of"](args.questions)

    from selfspec.checkpoints.load_target import load_tokenizer
    from selfspec.data.questions import Asking, read_questions
    from selfspec.integrations import serve_target as server

    asking = Asking(questions=args.questions, prompts=args.prompts)
    questions = read_questions(asking, load_tokenizer(args.target), list)
    figures = server.acceptance(url, questions, args.max_new_tokens, args.temperature, args.at_once)
    print("\n".join(server.acceptance_lines(figures)))
