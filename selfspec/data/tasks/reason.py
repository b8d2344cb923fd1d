"""Instructions that need several steps, which the answer shows."""

from __future__ import annotations

from random import Random

from selfspec.data.tasks.base import Pool, Turn, concludes


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
    listed = _listed(names, numbers)
    check = concludes(names[best], numbers[best], asked=listed)
    return [Turn(f"{ask}\n{listed}", "\n".join([*steps, last]), check)]
