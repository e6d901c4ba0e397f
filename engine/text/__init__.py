"""Tokenizing, chat templates, incremental detokenizing, stop strings and grammars."""
