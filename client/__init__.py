"""A client of the core for programs that have token ids: `EngineClient`."""
