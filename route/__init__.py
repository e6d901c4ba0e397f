"""A router in front of several engines: one door, and nothing lost when an engine behind it goes."""
