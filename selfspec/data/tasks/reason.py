"""Instructions that need several steps, which the answer shows."""

from __future__ import annotations

from random import Random

from selfspec.data.tasks.base import Pool, Turn, concludes, fenced


def _listed(names: list[str], numbers: list[int]) -> str:
    return "\n".join(f"- {name}: {number}" for name, number in zip(names, numbers, strict=True))


def add_up(pool: Pool, rng: Random) -> list[Turn]:
    names = pool.some(rng, rng.randint(3, 5))
    numbers = [rng.randint(1, 20) for _ in names]
    total, steps = 0, []
    for name, number in zip(names, numbers, strict=True):
        steps.append(f"{name}: {total} + {number} = {total + number}")
        total += number
    last = f"The sum is {total}."
    ask = rng.choice(["Add these up, step by step:", "What is the sum of these? Work it out step by step."])
    return [Turn(f"{ask}\n{_listed(names, numbers)}", "\n".join([*steps, last]), concludes(total))]


def largest(pool: Pool, rng: Random) -> list[Turn]:
    names = pool.some(rng, rng.randint(3, 6))
    numbers = rng.sample(range(1, 100), len(names))
    best, steps = 0, []
    for i, (name, number) in enumerate(zip(names, numbers, strict=True)):
        if number > numbers[best]:
            best = i
        steps.append(f"{name}: {number}, largest so far {names[best]} with {numbers[best]}")
    last = f"The largest is {names[best]} with {numbers[best]}."
    ask = rng.choice(["Which of these is the largest? Go through them one by one.", "Find the largest, step by step:"])
    return [Turn(f"{ask}\n{_listed(names, numbers)}", "\n".join([*steps, last]), concludes(names[best], numbers[best]))]


def trace(pool: Pool, rng: Random) -> list[Turn]:
    names = pool.some(rng, rng.randint(3, 4))
    values = {names[0]: rng.randint(1, 20)}
    code, steps = [f"{names[0]} = {values[names[0]]}"], [f"{names[0]} = {values[names[0]]}"]
    for name in names[1:]:
        other = rng.choice(list(values))
        sign, number = rng.choice("+-"), rng.randint(1, 9)
        if sign == "-" and values[other] < number:
            sign = "+"
        values[name] = values[other] + number if sign == "+" else values[other] - number
        code.append(f"{name} = {other} {sign} {number}")
        steps.append(f"{name} = {values[other]} {sign} {number} = {values[name]}")
    shown = rng.choice(names[1:])
    last = f"It prints {values[shown]}."
    source = fenced("python", "\n".join([*code, f"print({shown})"]))
    ask = rng.choice(["What does this program print? Trace it line by line.", "Trace this program:"])
    return [Turn(f"{ask}\n{source}", "\n".join([*steps, last]), concludes(values[shown]))]


def count(pool: Pool, rng: Random) -> list[Turn]:
    wanted, *others = pool.some(rng, rng.randint(3, 4))
    items = [rng.choice([wanted, *others]) for _ in range(rng.randint(5, 9))]
    seen, steps = 0, []
    for item in items:
        seen += item == wanted
        steps.append(f"{item}: {'yes' if item == wanted else 'no'}, {seen}")
    last = f"The word {wanted} stands there {seen} times."
    ask = rng.choice([f"How often does the word {wanted} stand here? Count step by step.", f"Count the word {wanted}:"])
    return [Turn(f"{ask}\n{' '.join(items)}", "\n".join([*steps, last]), concludes(seen))]
