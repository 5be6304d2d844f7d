"""Fused operators behind plain functions. Import each from its own module; nothing here needs more than torch."""
