"""Text in, text out: tokenizing, chat templates, incremental detokenizing, stop strings."""
