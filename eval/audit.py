"""Check exactness on your own model: python eval/audit.py target=... drafter=... dtype=float32

Ends with exit status 1 where the verdict is BUG.
"""

from selfspec.cli.main import start

if __name__ == "__main__":
    start("audit")
