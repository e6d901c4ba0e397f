"""Configuration: what the user says, facts about model and machine, and what each process is given."""
