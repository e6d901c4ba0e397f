"""What models write between their words: tool calls and reasoning. One lexer for streams and plain answers."""
