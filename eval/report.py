"""One table and the plots of all runs of a sweep folder: python eval/report.py sweep=runs/decode/<date>"""

from selfspec.cli.main import start

if __name__ == "__main__":
    start("report")
