"""Plan extensions: bytes that travel with every plan, and what they mean to an attention backend."""
