"""roll: train language models by reinforcement and from preferences. Importing it costs nothing."""

from roll import roll_paths

__version__ = "0.1.0"

roll_paths.install()
