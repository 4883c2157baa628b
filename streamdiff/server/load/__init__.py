"""Capacity of an engine, and load limits of sessions that demand more."""
