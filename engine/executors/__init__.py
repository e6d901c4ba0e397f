"""Runs programs: in torch, in C, and in transformers for models that have no description."""
