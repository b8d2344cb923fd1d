"""Complete a prompt in the terminal: python -m selfspec "def fib(n):" """

from __future__ import annotations

import argparse
import os
import sys

GREEN, DIM, RESET = "\033[32m", "\033[2m", "\033[0m"


def number_or_auto(text: str) -> int | str:
    return text if text == "auto" else int(text)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m selfspec", description="Complete a prompt by speculative decoding."
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
    from selfspec.log import one_line

    try:
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
    except (ValueError, OSError, MemoryError) as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        print(f"selfspec: {one_line(error)}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
