"""Prompts of the observations so far, one after the other."""

from agentic_setup import EchoProxy, env_config, scheduler_of

from roll.models.tiny import character_tokenizer


def test_a_prompt_has_the_observations_before_it_and_the_suffix():
    template = {
        "env_type": "bad_envs:SuffixEnv",
        "env_manager_cls": "roll.pipeline.agentic.env_manager.step_concat_env_manager.StepConcatEnvManager",
        "agent_template": "{history}|{current_observation}",
        "history_length": 2,
        "env_config": {"turns": 4},
        "max_steps": 5,
    }
    proxy = EchoProxy(character_tokenizer())
    with scheduler_of(env_config({"Good": template}), proxy) as scheduler:
        rollout = scheduler.rollout(0, 4)
    asked = [turns[0].messages[0]["content"] for turns in proxy.asked]
    start = asked[0].removeprefix("|").removesuffix("\n")
    assert asked == [
        f"|{start}\n",
        f"{start}|turn 1\nnext?",
        f"{start}\nturn 1|turn 2\nnext?",
        "turn 1\nturn 2|turn 3\nnext?",
    ]
    played = rollout.trajectories[0]
    assert played.prompts_are_whole and len(played.turns) == 4
