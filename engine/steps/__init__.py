"""What runs one plan: rows, inputs, sampling, results."""
