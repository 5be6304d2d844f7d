"""roll: train language models by reinforcement and from preferences. Importing it costs nothing."""

__version__ = "0.1.0"
