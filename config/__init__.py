"""Configuration: what an operator says, what is known of model and machine, and what every process receives."""
