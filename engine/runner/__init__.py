"""Runs the steps of one model on one device."""
