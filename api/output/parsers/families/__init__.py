"""How families of models write tool calls and reasoning: one file each, named in the table of `config.families`."""
