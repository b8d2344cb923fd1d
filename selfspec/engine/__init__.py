"""How functions on tensors run: as they are, compiled once for each shape, captured as CUDA graphs."""
