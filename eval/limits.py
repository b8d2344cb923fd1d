"""What limits a pass here, and what drafters can bring: python eval/limits.py target=tiny-target"""

from selfspec.cli.main import start

if __name__ == "__main__":
    start("limits")
