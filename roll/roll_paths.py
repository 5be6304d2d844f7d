"""Where the modules of ROLL live here, for code that imports them by ROLL's paths.

A module that ROLL has and this project keeps at another place is a row of MOVED: importing the old
path gives the module at the new one. Our own code imports from the new place. A ROLL path that is
still a file here needs no row. `tests/roll_imports.txt` lists what ROLL's users import.
"""

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

MOVED: dict[str, str] = {
    "roll.configs.base_config": "roll.configs.ppo_config",
    "roll.configs.data_args": "roll.configs.arguments",
    "roll.configs.generating_args": "roll.configs.arguments",
    "roll.configs.model_args": "roll.configs.arguments",
    "roll.configs.training_args": "roll.configs.arguments",
    "roll.utils.kl_controller": "roll.algorithms.kl",
    "roll.pipeline.rlvr.rewards": "roll.rewards",
    **{
        f"roll.pipeline.rlvr.rewards.{name}_worker": "roll.rewards.workers"
        for name in (
            "code_sandbox_reward",
            "crossthinkqa_rule_reward",
            "function_reward",
            "general_val_rule_reward",
            "ifeval_rule_reward",
            "llm_judge_reward",
            "math_rule_reward",
            "multiple_choice_boxed_rule_reward",
            "pool_reward",
            "reward_model",
        )
    },
    "roll.distributed.executor.model_update_group": "roll.distributed.weight_sync",
    "roll.distributed.scheduler.generate_scheduler": "roll.distributed.scheduler.protocol",
    "roll.distributed.scheduler.initialize": "roll.distributed.scheduler.resource_manager",
    "roll.distributed.strategy.factory": "roll.distributed.strategy.strategy",
    "roll.pipeline.agentic.agentic_actor_pg_worker": "roll.pipeline.base_worker",
    "roll.pipeline.agentic.agentic_actor_worker": "roll.pipeline.base_worker",
    "roll.pipeline.agentic.env.base": "roll.pipeline.agentic.env",
    "roll.pipeline.agentic.env.registry": "roll.pipeline.agentic.env",
    **{
        f"roll.pipeline.agentic.env_manager.{name}_env_manager": "roll.pipeline.agentic.env_manager"
        for name in ("base", "step_concat", "step", "traj")
    },
    "roll.pipeline.agentic.llm_proxy.base_llm_proxy": "roll.pipeline.agentic.llm_proxy",
    "roll.pipeline.agentic.llm_proxy.openai_proxy": "roll.pipeline.agentic.llm_proxy",
    "roll.pipeline.agentic.llm_proxy.policy_proxy": "roll.pipeline.agentic.llm_proxy",
    "roll.pipeline.agentic.llm_proxy.random_proxy": "roll.pipeline.agentic.llm_proxy",
    "roll.pipeline.rlvr.actor_pg_worker": "roll.pipeline.rlvr.actor_worker",
    "roll.utils.checkpoint_manager": "roll.models.checkpoint",
    "roll.utils.constants": "roll.distributed.executor.backend",
    "roll.utils.offload_states": "roll.distributed.strategy.strategy",
    "roll.utils.sequence_packing": "roll.utils.dynamic_batching",
}


class _Moved(MetaPathFinder, Loader):
    """Answers `import OLD` with the module at the new path, which is loaded once under both
    names."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname in MOVED else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(MOVED[spec.name])
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # The import system has just given the module the spec of its old name; reloading and
        # pickling want that of the file.
        spec = module.__spec__
        assert spec is not None
        module.__spec__ = spec.loader_state


def install() -> None:
    """Make the old paths importable; asked for by `roll/__init__.py`, once."""
    if not any(isinstance(finder, _Moved) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Moved())
