"""Instructions that look something up or pick something out."""

from __future__ import annotations

import ast
from random import Random

from selfspec.data.tasks.base import Pool, Turn, concludes, exactly, fenced


def look_up(pool: Pool, rng: Random) -> list[Turn]:
    count = rng.randint(4, 7)
    what, *words = pool.some(rng, 1 + 2 * count)
    names = words[:count]
    values = [str(rng.randint(1, 999)) if rng.random() < 0.5 else word for word in words[count:]]
    listed = "\n".join(f"- {name}: {value}" for name, value in zip(names, values, strict=True))
    asked = rng.sample(range(len(names)), rng.choice([1, 2, 2, 3]))
    turns: list[Turn] = []
    for i in asked:
        ask = f"What is the {what} of {names[i]}?" if not turns else f"And the {what} of {names[i]}?"
        if not turns:
            ask = f"Here is a list of each {what}:\n{listed}\n{ask}"
        answer = f"The {what} of {names[i]} is {values[i]}."
        turns.append(Turn(ask, answer, concludes(values[i])))
    return turns


def list_signatures(pool: Pool, rng: Random) -> list[Turn]:
    functions = rng.sample(pool.functions, 2)
    lines = []
    for name, source in functions:
        given = ast.parse(source).body[0].args  # type: ignore[attr-defined]
        arguments = [*given.posonlyargs, *given.args, given.vararg, *given.kwonlyargs, given.kwarg]
        lines.append(f"- {name}: {', '.join(a.arg for a in arguments if a) or 'none'}")
    ask = rng.choice(
        ["List the functions below with their parameters:", "Which functions are these, and what do they take?"]
    )
    code = "\n\n".join(source for _, source in functions)
    return [Turn(f"{ask}\n{fenced('python', code)}", "\n".join(lines), exactly("\n".join(lines)))]
