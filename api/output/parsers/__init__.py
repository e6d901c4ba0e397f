"""Tool calls and reasoning in what models write: how they are read, and how they are forced."""
