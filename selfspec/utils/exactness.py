"""What holds of speculative output, in one story for README, docs, --help, cards, the page and every result."""

EXACT, TESTED, ROUNDED, LOSSY = "by construction", "in every test", "up to rounding", "no: by a lossy rule"
STORY = (
    "The same seed gives the tokens of plain decoding: by construction in bfloat16 on CPUs with AVX2 or AVX-512, a C++ "
    "compiler and torch 2.13 for targets whose layers are all attention, in every test in float32, elsewhere up to "
    "rounding of near-ties."
)


def exactness(how: str, exact: str, waits: bool = False) -> str:
    """What holds, as a line for users. how: dtype and engine; exact: EXACT, TESTED or ROUNDED; waits: whether that is
    so because passes are not compiled yet."""
    more = "until passes are compiled (engine=eager: by construction)"
    ties = f" of near-ties {more if waits else '(float32: in every test)'}" if exact == ROUNDED else ""
    return f"{how}: the tokens of plain decoding, {exact}{ties}"
