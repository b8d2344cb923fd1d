"""Synthetic conversations as JSON lines, to try large data with: python tests/make_rows.py rows.jsonl 1000000"""

import json
import sys
from pathlib import Path
from random import Random

from selfspec.data.corpus import PythonSource


def write(path: Path, count: int) -> None:
    """`count` conversations of one to three turns; a row follows from its number alone."""
    words = sorted({word for d in PythonSource(max_files=20).train() for word in d.text.split() if word.isidentifier()})
    with path.open("w") as file:
        for i in range(count):
            rng, turns = Random(i), list[dict[str, str]]()
            for _ in range(rng.randint(1, 3)):
                asked, said = rng.choices(words, k=rng.randint(4, 20)), rng.choices(words, k=rng.randint(10, 60))
                turns.append({"role": "user", "content": f"What of {' '.join(asked)}?"})
                turns.append({"role": "assistant", "content": " ".join(said).capitalize() + "."})
            file.write(json.dumps({"messages": turns}) + "\n")


if __name__ == "__main__":
    write(Path(sys.argv[1]), int(sys.argv[2]))
