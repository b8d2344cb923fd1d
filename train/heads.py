"""Train a drafter on a frozen target: python train/heads.py +experiment=tiny_medusa

With --check it only tells what would be read, how long it would take and what memory."""

from selfspec.cli.main import start

if __name__ == "__main__":
    start("train")
