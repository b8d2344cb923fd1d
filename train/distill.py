"""Write the self-distillation data of a training, and train nothing: python train/distill.py +experiment=tiny_medusa"""

from selfspec.cli.main import start

if __name__ == "__main__":
    start("distill")
