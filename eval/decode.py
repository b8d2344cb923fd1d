"""Measure speculative against plain decoding: python eval/decode.py -m tree.nodes=8,16 decode.temperature=0,1"""

from selfspec.cli.main import start

if __name__ == "__main__":
    start("decode")
