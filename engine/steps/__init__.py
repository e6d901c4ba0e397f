"""Runs one plan: rows, inputs, sampling, results."""
