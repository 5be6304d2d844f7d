"""Mathematics as an environment of one turn: a question, an answer, 1 or 0.

Answers are compared by value with math-verify, in a process that can be killed: a comparison that does not end, or
fails, is an error of the episode and not a wrong answer.
"""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Sequence

from roll.pipeline.agentic.env.answers import answer_with
from roll.pipeline.agentic.env.base import Env, Info, Reset, Step
from roll.pipeline.agentic.env.problems import Problem, Problems, dataset_file
from roll.utils.scoring.pool import ScorePool


@functools.lru_cache(maxsize=4)
def _pool(timeout_s: float) -> ScorePool:
    """One process for all environments of this one; it ends with it."""
    return ScorePool(
        "roll.utils.scoring.math_answers:score",
        num_processes=1,
        timeout_s=timeout_s,
        memory_mb=2048,
    )


class MathEnv(Env):
    """Mathematics.

    Args:
        file: problems, with columns `prompt` and `ground_truth`; sums are made up if left out.
        dataset_name: ROLL's name for `file`. What is on the Hugging Face hub has to be downloaded first.
        split: of a folder with files of several splits, the one to read.
        question_key, answer_key: columns with other names.
        digits, num_operands, operators: what sums look like.
        answer_pattern: where the answer stands; an answer that does not match gets `format_penalty`. If left out, it is
            looked for as math-verify does: in a box, or the last expression.
        timeout_s: seconds for comparing two answers.
        env_instruction: what stands in front of the question; "" leaves it out.
    """

    def __init__(
        self,
        *,
        file: str | None = None,
        dataset_name: str | None = None,
        split: str | None = None,
        question_key: str | None = None,
        answer_key: str | None = None,
        digits: int = 2,
        num_operands: int = 2,
        operators: Sequence[str] = ("+",),
        answer_pattern: str | None = None,
        format_penalty: float = 0.0,
        timeout_s: float = 10.0,
        env_instruction: str | None = None,
    ) -> None:
        if file is None and dataset_name is not None:
            file = dataset_file(dataset_name, split)
        self.problems = Problems(
            file=file,
            columns=(question_key, answer_key),
            digits=digits,
            num_operands=num_operands,
            operators=operators,
        )
        self.answer_pattern, self.format_penalty, self.timeout_s = (
            answer_pattern,
            format_penalty,
            timeout_s,
        )
        self.instruction = "Solve the problem." if env_instruction is None else env_instruction
        self._pool = _pool(timeout_s)
        self._problem = Problem("", "")
        self._random = random.Random(0)

    def reset(self, seed: int | None = None) -> Reset:
        self._problem = self.problems.draw(seed)
        self._random = random.Random(seed)
        return self._problem.question, {"env_instruction": self.instruction}

    def step(self, action: str) -> Step:
        answer: str | None = action
        if self.answer_pattern is not None:
            match = re.search(self.answer_pattern, action, re.DOTALL)
            answer = None if match is None else (match.groups() or (match.group(0),))[-1]
        reward, success = self.format_penalty, False
        if answer is not None:
            question, truth = self._problem.question, self._problem.answer
            [score] = self._pool.score(
                [{"prompt": question, "response": answer, "ground_truth": truth}]
            )
            if score.value is None:
                raise RuntimeError(
                    f"{question!r}: the answer could not be compared with {truth!r}: {score.reason}"
                )
            reward, success = score.value, score.value == 1.0
        metrics = {"success": success, "action_is_valid": answer is not None}
        info: Info = {"metrics": metrics, "metrics_agg_mode": {"success": "last"}}
        return "correct" if success else "wrong", reward, True, False, info

    def sample_random_action(self) -> str:
        """An answer of the right form, for the random proxy: now and then the right one."""
        guess = (
            self._problem.answer
            if self._random.random() < 0.1
            else str(self._random.randrange(100))
        )
        return answer_with(self.answer_pattern, guess) if self.answer_pattern else guess
