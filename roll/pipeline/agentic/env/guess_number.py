"""Guess the number: a secret number, and after each guess whether it is higher or lower.

    1-10          the range
    -> 5          the answer
    higher        or, with `show_range`, what is left of it: 6-10

The right number gives 1 and ends the episode. A malformed answer gives `format_penalty` and costs a
turn.
"""

import random
from dataclasses import dataclass

from roll.exceptions import ConfigError
from roll.pipeline.agentic.env import (
    ANSWER,
    Env,
    Reset,
    Step,
    answer_with,
    parse_action,
    step_info,
)


@dataclass(kw_only=True, eq=False)
class GuessNumberEnv(Env):
    """Guess the number. Halving finds any of 2**n - 1 numbers in n guesses."""

    low: int = 1  # the range of the secret number, both included
    high: int = 10
    max_steps: int = 5  # guesses, after which the episode is truncated
    show_range: bool = False  # say what is left of the range instead of `higher` and `lower`
    wrong_penalty: float = 0.0  # reward of a wrong guess
    format_penalty: float = 0.0  # reward of an answer that is no number in the range
    action_pattern: str = ANSWER  # where the number stands in the answer
    env_instruction: str | None = None  # the rules as the policy reads them; "" leaves them out

    def __post_init__(self) -> None:
        if self.low >= self.high:
            expected = f"more than low = {self.low}"
            raise ConfigError(f"guess_number: high: found {self.high}, expected {expected}")
        if self.env_instruction is None:
            numbers = f"Guess a whole number from {self.low} to {self.high}."
            self.env_instruction = f"{numbers} You have {self.max_steps} guesses."
        self.reset(0)

    def reset(self, seed: int | None = None) -> Reset:
        self._random = random.Random(seed)
        self._secret = self._random.randint(self.low, self.high)
        self._steps, self._left = 0, (self.low, self.high)
        return f"{self.low}-{self.high}", {"env_instruction": self.env_instruction}

    def step(self, action: str) -> Step:
        self._steps += 1
        names = map(str, range(self.low, self.high + 1))
        name = parse_action(action, self.action_pattern, names).name
        guess = None if name is None else int(name)
        success = guess == self._secret
        low, high = self._left
        if guess is None:
            reward, observation = self.format_penalty, "invalid"
        elif success:
            reward, observation = 1.0, "correct"
        elif guess < self._secret:
            reward, observation = self.wrong_penalty, "higher"
            self._left = (max(low, guess + 1), high)
        else:
            reward, observation = self.wrong_penalty, "lower"
            self._left = (low, min(high, guess - 1))
        if self.show_range and not success:
            observation = f"{self._left[0]}-{self._left[1]}"
        truncated = not success and self._steps >= self.max_steps
        info = step_info(success=success, action_is_valid=guess is not None)
        return observation, reward, success, truncated, info

    def sample_random_action(self) -> str:
        """A number in the range, for the random proxy."""
        return answer_with(self.action_pattern, str(self._random.randint(self.low, self.high)))
