"""All drafters and transformers' own methods on equal terms: python eval/compare.py name=compare compare.prompts=6"""

from selfspec.cli.main import start

if __name__ == "__main__":
    start("compare")
