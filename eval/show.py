"""Answer questions plainly and speculatively, side by side: python eval/show.py drafter=tiny-medusa show.prompts=5"""

from selfspec.cli.main import start

if __name__ == "__main__":
    start("show")
