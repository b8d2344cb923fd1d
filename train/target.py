"""Train a small target and its tokenizer from scratch: python train/target.py +experiment=tiny_target"""

from selfspec.cli.main import start

if __name__ == "__main__":
    start("target")
