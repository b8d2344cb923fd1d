"""Shared noise against the published lossless verifiers: python eval/verifiers.py verifiers.nodes=16"""

from selfspec.cli.main import start

if __name__ == "__main__":
    start("verifiers")
