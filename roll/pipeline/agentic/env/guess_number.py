"""Guess the number: a secret number, and after each guess whether it is higher or lower.

    1-10          the range
    -> 5          the answer
    higher        or, with `show_range`, what is left of it: 6-10

The right number gives 1 and ends the episode. A malformed answer gives `format_penalty` and costs a turn.
"""

from __future__ import annotations

import random

from roll.exceptions import ConfigError
from roll.pipeline.agentic.env.answers import answer_with
from roll.pipeline.agentic.env.base import Env, Info, Reset, Step, parse_action


class GuessNumberEnv(Env):
    """Guess the number.

    Args:
        low, high: the range of the secret number, both included.
        max_steps: guesses, after which the episode is truncated. Halving finds any of 2**n - 1 numbers in n guesses.
        show_range: say what is left of the range instead of `higher` and `lower`.
        wrong_penalty: reward of a wrong guess.
        format_penalty: reward of an answer that is no number in the range.
        action_pattern: where the number stands in the answer.
        env_instruction: the rules as the policy reads them; "" leaves them out.
    """

    def __init__(
        self,
        *,
        low: int = 1,
        high: int = 10,
        max_steps: int = 5,
        show_range: bool = False,
        wrong_penalty: float = 0.0,
        format_penalty: float = 0.0,
        action_pattern: str = r"<answer>(.*?)</answer>",
        env_instruction: str | None = None,
    ) -> None:
        if low >= high:
            raise ConfigError(f"guess_number: high: found {high}, expected more than low = {low}")
        self.low, self.high, self.max_steps, self.show_range = low, high, max_steps, show_range
        self.wrong_penalty, self.format_penalty, self.action_pattern = (
            wrong_penalty,
            format_penalty,
            action_pattern,
        )
        rules = f"Guess a whole number from {low} to {high}. You have {max_steps} guesses."
        self.instruction = rules if env_instruction is None else env_instruction
        self._names = {str(number): number for number in range(low, high + 1)}
        self._secret = self._steps = 0
        self._left = (low, high)
        self._random = random.Random(0)

    def reset(self, seed: int | None = None) -> Reset:
        self._random = random.Random(seed)
        self._secret = self._random.randint(self.low, self.high)
        self._steps, self._left = 0, (self.low, self.high)
        return f"{self.low}-{self.high}", {"env_instruction": self.instruction}

    def step(self, action: str) -> Step:
        self._steps += 1
        parsed = parse_action(action, self.action_pattern, self._names)
        guess = None if parsed.name is None else self._names[parsed.name]
        success = guess == self._secret
        if guess is None:
            reward, observation = self.format_penalty, "invalid"
        elif success:
            reward, observation = 1.0, "correct"
        else:
            reward, observation = self.wrong_penalty, "higher" if guess < self._secret else "lower"
            low, high = self._left
            self._left = (
                (max(low, guess + 1), high) if guess < self._secret else (low, min(high, guess - 1))
            )
        if self.show_range and not success:
            observation = f"{self._left[0]}-{self._left[1]}"
        truncated = not success and self._steps >= self.max_steps
        metrics = {"success": success, "action_is_valid": guess is not None}
        info: Info = {
            "metrics": metrics,
            "metrics_agg_mode": {"success": "last"},
            "action_content": parsed.content,
        }
        return observation, reward, success, truncated, info

    def sample_random_action(self) -> str:
        """A number in the range, for the random proxy."""
        return answer_with(self.action_pattern, str(self._random.randint(self.low, self.high)))
