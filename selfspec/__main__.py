"""Complete a prompt in the terminal: python -m selfspec "def fib(n):" """

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

GREEN, DIM, RESET = "\033[32m", "\033[2m", "\033[0m"


def number_or_auto(text: str) -> int | str:
    return text if text == "auto" else int(text)


def export_main(arguments: list[str]) -> None:
    """python -m selfspec export DIR --to vllm --out DIR"""
    parser = argparse.ArgumentParser(
        prog="python -m selfspec export", description="Write a trained drafter in the form that another engine serves."
    )
    parser.add_argument("drafter", help="run folder, drafter's folder, embedded name or hub id")
    parser.add_argument("--to", required=True, help="vllm, sglang, speculators, medusa or transformers")
    parser.add_argument("--out", required=True, help="the folder to write, which must not exist")
    parser.add_argument("--target", help="instead of the one that the drafter names; its weights must be the same")
    parser.add_argument("--dtype", default="float32", help="in which it is checked (%(default)s)")
    parser.add_argument("--nodes", type=number_or_auto, help="of the draft tree, with --to transformers")
    args = parser.parse_args(arguments)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

    from selfspec.export import export
    from selfspec.log import one_line_errors

    with one_line_errors():
        print("\n".join(export(args.drafter, args.to, args.out, args.target, args.dtype, args.nodes)))


def push_main(arguments: list[str]) -> None:
    """python -m selfspec push DIR user/repo"""
    parser = argparse.ArgumentParser(prog="python -m selfspec push", description="Upload a trained drafter to the hub.")
    parser.add_argument("drafter", help="run folder or drafter's folder")
    parser.add_argument("repo", help="user/name; made where there is none")
    parser.add_argument("--results", nargs="*", default=[], help="run folders of eval/decode.py, for the card")
    parser.add_argument("--private", action="store_true", default=None)
    parser.add_argument("--revision", help="a branch")
    parser.add_argument("--dry-run", metavar="DIR", help="write what would be uploaded to this new folder instead")
    args = parser.parse_args(arguments)

    from selfspec.hub import measured, push
    from selfspec.loading import drafter_folder
    from selfspec.log import one_line_errors

    with one_line_errors():
        folder = drafter_folder(args.drafter)
        if not (folder / "drafter.json").is_file():
            raise ValueError(f"{args.drafter!r} is no drafter of selfspec's own form; push the folder as it is")
        points = measured([Path(place) for place in args.results], folder, drafter_folder)
        dry_run = None if args.dry_run is None else Path(args.dry_run)
        print(push(folder, args.repo, points, args.private, args.revision, dry_run=dry_run))


def main() -> None:
    if sys.argv[1:2] in (["export"], ["push"]):
        (export_main if sys.argv[1] == "export" else push_main)(sys.argv[2:])
        return
    parser = argparse.ArgumentParser(
        prog="python -m selfspec",
        description="Complete a prompt by speculative decoding. python -m selfspec export --help: drafters for other "
        "engines; python -m selfspec push --help: drafters to the hub.",
    )
    parser.add_argument("prompt")
    parser.add_argument(
        "--drafter",
        default="tiny-medusa",
        help="embedded name, run folder, hub id, prompt_lookup or lookahead; several joined by + (%(default)s)",
    )
    parser.add_argument("--target", help="for drafters that name none, and to override theirs")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-k", type=int)
    parser.add_argument("--top-p", type=float)
    parser.add_argument("--min-p", type=float)
    parser.add_argument("--seed", type=int, help="of the noise; drawn anew each time unless given")
    parser.add_argument("--nodes", type=number_or_auto, help="largest draft tree, root included, or auto")
    parser.add_argument("--engine", default="eager", help="eager, or compiled (%(default)s)")
    parser.add_argument("--color", action="store_true", help="drafted tokens green, the target's own plain")
    args = parser.parse_args()
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

    import selfspec
    from selfspec.log import one_line_errors

    with one_line_errors():
        spec = selfspec.load(args.drafter, args.target, engine=args.engine)
        options = {
            key: getattr(args, key)
            for key in ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "nodes")
        }
        if args.color:
            result = spec.generate([args.prompt], **options)
            told = "".join(f"{GREEN}{text}{RESET}" if drafted else text for text, drafted in spec.pieces(result))
            print(DIM + args.prompt + RESET + told)
            stats = result.stats
            print(
                f"{DIM}{stats.tokens} tokens in {stats.passes} passes: {stats.acceptance_length:.2f} per pass, "
                f"{stats.tokens / stats.seconds:.0f} per second; {GREEN}green{RESET}{DIM} came from the tree{RESET}",
                file=sys.stderr,
            )
            if result.forecast is not None:
                print(f"{DIM}{result.forecast}{RESET}", file=sys.stderr)
        else:
            print(args.prompt, end="", flush=True)
            for piece in spec.stream(args.prompt, **options):
                print(piece, end="", flush=True)
            print()


if __name__ == "__main__":
    main()
