"""For folders that `selfspec export --to transformers` wrote before version 0.4: their code imports this name."""

from selfspec.integrations.hf_serve import generate as generate
