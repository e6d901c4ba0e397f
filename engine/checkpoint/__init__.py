"""What a checkpoint says of itself, read without torch: config.json, tensor headers, quantization."""
