"""Model families: a page each."""
