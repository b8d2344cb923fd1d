"""One HTML file that explains, predicts and replays: python eval/page.py "page.runs=[runs/traces,runs/compare]" """

from selfspec.cli.main import start

if __name__ == "__main__":
    start("page")
