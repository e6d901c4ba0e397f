"""One step of one model on one device."""
