"""The commands with options of their own: complete, compile, export, push."""

from __future__ import annotations

import argparse
import difflib
import itertools
import sys
from pathlib import Path
from typing import NoReturn

from selfspec import __version__
from selfspec.cli.commands import COMMANDS
from selfspec.cli.source import names_of

DIM, RESET = "\033[2m", "\033[0m"
COLORS = ("\033[32m", "\033[36m", "\033[35m", "\033[33m")  # green, cyan, magenta, yellow


class _Parser(argparse.ArgumentParser):
    """Bad arguments end in one line."""

    def error(self, message: str) -> NoReturn:
        unknown = message.removeprefix("unrecognized arguments: ").split(" ")[0].partition("=")[0]
        near = difflib.get_close_matches(unknown, self._option_string_actions, 1) if unknown.startswith("-") else []
        self.exit(2, f"{self.prog}: {message}; {f'did you mean {near[0]}' if near else '--help lists the options'}\n")


def _nodes(text: str) -> int | str:
    if text == "auto" or (text.isdigit() and 1 <= int(text) <= 1024):
        return text if text == "auto" else int(text)
    raise argparse.ArgumentTypeError(f"{text} must be auto, or lie between 1 and 1024")


def positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} must be a whole number of at least 1")
    return int(text)


def as_temperature(text: str) -> float:
    try:
        if (value := float(text)) == 0 or 1e-30 <= value < float("inf"):
            return value
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text} must be 0 (greedy) or at least 1e-30, and finite")


def _named(drafter: str, target: str | None, dtype: str, device: str | None = None, engine: str = "auto") -> None:
    """Raises ValueError and FileNotFoundError for names that can not be meant, before anything slow is imported."""
    from selfspec.checkpoints.find import check_drafter_name, check_target_name

    check_drafter_name(drafter)
    if target is not None:
        check_target_name(target)
    names_of("selfspec.utils.machine")["dtype_name"](dtype)
    names_of("selfspec.utils.machine")["check_device_name"](device)
    names_of("selfspec.engine.choose")["check_engine"](engine)


class _Formatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows the defaults that say something."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        nothing = action.required or action.default is None or action.default is False or action.default == []
        return action.help if nothing else super()._get_help_string(action)


def new_parser(name: str, what: str) -> argparse.ArgumentParser:
    parser = _Parser(
        prog=f"selfspec {name}",
        description=what,
        epilog=f"Example: selfspec {name} {COMMANDS[name].example}",
        formatter_class=_Formatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"selfspec {__version__}")
    return parser


def _trusting(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--trust-code", action="store_true", help="let the checkpoint name a drafter of another package"
    )


def export(arguments: list[str]) -> None:
    """selfspec export DIR --to vllm --out DIR"""
    parser = new_parser("export", "Write a trained drafter in the form that another engine serves.")
    parser.add_argument("drafter", help="run folder, drafter's folder, embedded name or hub id")
    parser.add_argument("--to", required=True, choices=("vllm", "sglang", "speculators", "medusa", "transformers"))
    parser.add_argument("--out", required=True, help="the folder to write, which must not exist")
    parser.add_argument("--target", help="instead of the one that the drafter names; its weights must be the same")
    parser.add_argument("--dtype", default="float32", help="in which it is checked")
    parser.add_argument("--nodes", type=_nodes, help="of the draft tree, with --to transformers")
    _trusting(parser)
    args = parser.parse_args(arguments)
    _named(args.drafter, args.target, args.dtype)
    if Path(args.out).exists():
        raise ValueError(f"--out {args.out} exists; give a folder that does not")

    from transformers.utils import logging

    from selfspec.integrations.export import export

    logging.disable_progress_bar()  # of loading weights
    print("\n".join(export(args.drafter, args.to, args.out, args.target, args.dtype, args.nodes, args.trust_code)))


def push(arguments: list[str]) -> None:
    """selfspec push DIR user/repo"""
    parser = new_parser("push", "Upload a trained drafter to the hub.")
    parser.add_argument("drafter", help="run folder or drafter's folder")
    parser.add_argument("repo", help="user/name; made where there is none")
    parser.add_argument("--results", nargs="*", default=[], help="run folders of selfspec decode, for the card")
    parser.add_argument("--private", action="store_true", default=None, help="a private repository")
    parser.add_argument("--revision", help="a branch")
    parser.add_argument("--dry-run", metavar="DIR", help="write what would be uploaded to this new folder instead")
    args = parser.parse_args(arguments)
    _named(args.drafter, None, "auto")
    if missing := [place for place in args.results if not Path(place).exists()]:
        raise FileNotFoundError(f"--results {missing[0]}: there is no such file or folder")

    from selfspec.checkpoints.find import UNTRAINED, drafter_folder
    from selfspec.checkpoints.hub import measured, push

    if "+" in args.drafter and not Path(args.drafter).exists():
        raise ValueError(f"{args.drafter!r} joins several drafters; push one that was trained")
    if args.drafter in (*UNTRAINED, "mtp") and not Path(args.drafter).exists():
        raise ValueError(f"{args.drafter} has no weights of its own to push; whoever needs it loads it by this name")
    folder = drafter_folder(args.drafter)
    if not (folder / "drafter.json").is_file():
        raise ValueError(f"{args.drafter!r} is no drafter of selfspec's own form; push the folder as it is")
    points = measured([Path(place) for place in args.results], folder, drafter_folder)
    dry_run = None if args.dry_run is None else Path(args.dry_run)
    print(push(folder, args.repo, points, args.private, args.revision, dry_run=dry_run))


def compile(arguments: list[str]) -> None:
    """selfspec compile --target smollm2 --drafter prompt_lookup"""
    parser = new_parser(
        "compile",
        "Compile what a drafter and its target need for texts of up to 900 tokens, and keep it on disk: later "
        "processes read it in a second.",
    )
    parser.add_argument("--drafter", default="tiny-medusa", help="as selfspec.load takes it")
    parser.add_argument("--target", help="for drafters that name none, and to override theirs")
    parser.add_argument("--dtype", default="auto", help="of the target: auto, int8, bfloat16, float32 or float64")
    parser.add_argument("--nodes", type=positive, nargs="+", default=[16], help="sizes of draft trees")
    parser.add_argument("--temperatures", type=as_temperature, nargs="+", default=[0.0, 1.0], help="0 is greedy")
    parser.add_argument("--rows", type=positive, default=1, help="prompts of a batch, at most")
    _trusting(parser)
    args = parser.parse_args(arguments)
    _named(args.drafter, args.target, args.dtype)

    import time

    from transformers.utils import logging

    import selfspec
    from selfspec.core.generate import autoregressive, speculative
    from selfspec.core.options import Options
    from selfspec.core.sampling import Sampling
    from selfspec.utils.progress import progress

    logging.disable_progress_bar()
    spec = selfspec.load(args.drafter, args.target, args.dtype, engine="compiled", trust_code=args.trust_code)
    target, start, most = spec.target, time.perf_counter(), 2 * max(args.nodes)
    room = (target.max_positions or 2**62) - 2
    batches = [2**i for i in range((args.rows - 1).bit_length() + 1)]  # rows that ended leave sizes of these
    settings = [*itertools.product(batches, args.temperatures, args.nodes)]
    for rows, temperature, nodes in (bar := progress(settings, desc="compile")):
        bar.set_postfix(rows=rows, T=temperature, nodes=nodes)
        options = Options(min(most, room), Sampling(temperature), 0, frozenset())  # no end token
        prompts = [[row % target.vocab_size, (row + 1) % target.vocab_size] for row in range(rows)]
        autoregressive(target, prompts, options)
        speculative(target, prompts, options, spec.drafter, nodes)
    for how in ("compiled", "read", "not compiled"):
        seconds = [took for _, took, done in target.engine.made if done == how]
        if seconds:
            print(f"{how}: {len(seconds)} functions, {sum(seconds):.1f} s")
    place = "not kept" if target.engine.folder is None else f"kept in {target.engine.folder}"
    print(f"{time.perf_counter() - start:.0f} s in all; {place}")


def _complete_parser() -> argparse.ArgumentParser:
    parser = new_parser("complete", "Complete a prompt by speculative decoding.")
    parser.add_argument("prompt", help="text to go on from")
    parser.add_argument(
        "--drafter",
        default="tiny-medusa",
        help="embedded name, run folder, hub id, prompt_lookup or lookahead; several joined by +",
    )
    parser.add_argument("--target", help="for drafters that name none, and to override theirs")
    dtypes = "auto, int8, bfloat16, float16, float32 or float64"
    parser.add_argument("--dtype", default="auto", help=f"of the target: {dtypes}")
    parser.add_argument("--device", help="cpu, cuda, cuda:1, ... (auto: CUDA where it works, else the CPU)")
    parser.add_argument("--chat", action="store_true", help="answer the prompt, through the target's chat template")
    parser.add_argument("--max-new-tokens", type=positive, default=128, help="at most so many")
    parser.add_argument("--temperature", type=as_temperature, default=0.0, help="0 is greedy")
    parser.add_argument("--top-k", type=positive, help="draw among the k likeliest tokens")
    parser.add_argument("--top-p", type=float, help="draw among the likeliest tokens of this probability together")
    parser.add_argument("--min-p", type=float, help="draw among tokens of at least this share of the likeliest's")
    parser.add_argument("--stop", action="append", help="text behind which it ends; may be given several times")
    parser.add_argument("--seed", type=int, help="of the noise; drawn anew each time unless given")
    parser.add_argument("--nodes", type=_nodes, help="largest draft tree, root included, or auto (unset: 16)")
    parser.add_argument("--engine", default="auto", help="eager or compiled (auto: where a compiler is found)")
    parser.add_argument("--color", action="store_true", help="drafted tokens in colour, one for each drafter")
    parser.add_argument("--trace", metavar="FILE", help="write what every pass did to this file, as lines of JSON")
    _trusting(parser)
    return parser


def _check_complete(args: argparse.Namespace) -> None:
    """Raises ValueError for what is refused before torch is imported."""
    _named(args.drafter, args.target, args.dtype, args.device, args.engine)
    names_of("selfspec.core.sampling")["Sampling"](args.temperature, args.top_k, args.top_p, args.min_p)
    if args.seed is not None:
        names_of("selfspec.core.options")["as_seed"](args.seed)
    if args.trace is not None and not Path(args.trace).resolve().parent.is_dir():
        raise ValueError(f"--trace={args.trace}: there is no folder {Path(args.trace).parent}; make it")
    if args.trace is not None and Path(args.trace).is_dir():
        raise ValueError(f"--trace={args.trace} is a folder; give the name of a file")


def _dimmed(text: str, colored: bool) -> str:
    return f"{DIM}{text}{RESET}" if colored else text


def complete(arguments: list[str]) -> None:
    """selfspec complete "def fib(n):\""""
    args = _complete_parser().parse_args(arguments)
    _check_complete(args)

    from transformers.utils import logging

    import selfspec
    from selfspec.utils.errors import visible

    logging.disable_progress_bar()  # of loading weights
    spec = selfspec.load(
        args.drafter, args.target, args.dtype, args.device, engine=args.engine, trust_code=args.trust_code
    )
    names = ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "stop", "seed", "nodes")
    options = {key: getattr(args, key) for key in names}
    prompt = [{"role": "user", "content": args.prompt}] if args.chat else args.prompt
    shown = "" if args.chat else _dimmed(visible(args.prompt), sys.stdout.isatty() or args.color)
    if not args.color and args.trace is None:
        pieces = spec.stream(prompt, **options)
        first = next(pieces, "")  # messages of compiling come before the prompt
        print(shown + visible(first), end="", flush=True)
        for piece in pieces:
            print(visible(piece), end="", flush=True)
        print(flush=True)
        print(_dimmed(spec.target.exactness, sys.stderr.isatty()), file=sys.stderr)
        return
    result = spec.generate(prompt, **options, trace=True)
    assert result.trace is not None
    if not args.color:
        print(f"{shown}{visible(result.text)}")
    if args.trace is not None:
        result.trace.write(args.trace)
    if not args.color:
        return
    colors = dict(zip(result.trace.header["sources"], itertools.cycle(COLORS)))
    parts = [
        (visible(token.text), colors[token.sources[0]] if token.sources else "") for token in result.trace.tokens()
    ]
    print(shown + "".join(f"{color}{text}{RESET}" if color else text for text, color in parts))
    legend = ", ".join(f"{color}{name}{RESET}{DIM}" for name, color in colors.items())
    print(f"{DIM}{result.stats}; drafted by {legend}\n{spec.target.exactness}{RESET}", file=sys.stderr)
    if result.forecast is not None:
        print(f"{DIM}{result.forecast}{RESET}", file=sys.stderr)
