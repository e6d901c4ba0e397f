"""A router in front of several engines: one address, and requests continue when an engine behind it is lost."""
