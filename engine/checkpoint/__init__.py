"""A checkpoint's description of itself, read without torch: config.json, tensor headers, quantization."""
