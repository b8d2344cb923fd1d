"""What limits a pass here, and what drafters can bring: python eval/limits.py target=tiny-target"""

from selfspec.cli import start

if __name__ == "__main__":
    start("limits")
