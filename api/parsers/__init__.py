"""What models write between their words: tool calls, one incremental lexer a format for streams and plain answers."""
