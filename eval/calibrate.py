"""Calibrate a drafter that is not trained here: python eval/calibrate.py drafter=mtp target=... name=calibrated"""

from selfspec.cli.main import start

if __name__ == "__main__":
    start("calibrate")
