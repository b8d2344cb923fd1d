"""The embedded models of selfspec, as the package `selfspec_models`; see selfspec/embedded.py."""
