"""Environments in a process that can be killed: every way to fail is a reply, and nothing is left
behind."""

import bad_envs
import pytest

from roll.exceptions import ConfigError
from roll.pipeline.agentic.env_host import EnvCall, EnvHost, EnvSpec, LocalEnvs

pytestmark = pytest.mark.usefixtures("nothing_is_left")

TIMEOUT = 2.0  # as long as a test likes to wait; longer than a busy machine holds up a call


def host(*names, timeout_s=TIMEOUT, **options):
    specs = [EnvSpec(i, f"bad_envs:{name}", **options) for i, name in enumerate(names)]
    return EnvHost(specs, timeout_s=timeout_s)


def ask(envs, *calls, wait_s=60.0):
    envs.submit(calls)
    return {reply.env_id: reply for reply in envs.collect(wait_s)}


def test_an_episode():
    with host("GoodEnv", config={"turns": 2}) as envs:
        first = ask(envs, EnvCall(0, seed=7))[0]
        assert (first.observation, first.info) == ("start 7", {"env_instruction": "say a"})
        second = ask(envs, EnvCall(0, action="a"))[0]
        assert (second.observation, second.reward, second.terminated) == ("turn 1", 1.0, False)
        assert ask(envs, EnvCall(0, action="b"))[0].terminated
        assert ask(envs, EnvCall(0, seed=8))[0].observation == "start 8"


def test_a_reply_that_waited_for_its_reader_is_a_sign_of_life():
    with host("GoodEnv") as envs:
        ask(envs, EnvCall(0, seed=1))
        envs.submit([EnvCall(0, action="a")])
        assert envs._pipe.poll(60)
        envs._heard -= 1e6  # as if the policy had answered for long
        assert [reply.reason for reply in envs.collect(60.0)] == [None]


@pytest.mark.parametrize(
    ("name", "reason", "says"),
    [
        ("RaisingEnv", "exception", "the floor is lava"),
        ("HangingEnv", "timeout", f"no answer within {TIMEOUT:.1f} s"),
        ("NaNEnv", "nan_reward", "nan"),
        ("NoneRewardEnv", "nan_reward", "None"),
        ("NoneStepEnv", "no_observation", "step() returned None"),
        ("NumberObservationEnv", "protocol", "an observation of int"),
        ("CrashingEnv", "killed", "exit status 3"),
    ],
)
def test_a_step_that_fails(name, reason, says):
    with host(name, "GoodEnv") as envs:
        ask(envs, EnvCall(0, seed=1), EnvCall(1, seed=1))
        replies = ask(envs, EnvCall(0, action="a"), EnvCall(1, action="a"))
        assert replies[0].reason == reason and says in replies[0].detail
        # The other environment goes on, unless the process that both live in is gone.
        assert replies[1].reason == ("lost" if reason == "killed" else None)
        again = ask(envs, EnvCall(0, seed=2), EnvCall(1, seed=2))
        assert [again[i].observation for i in (0, 1)] == ["start 2", "start 2"]


FAILED_RESETS = [
    ("NoneEnv", "no_observation"),
    ("UnbuildableEnv", "exception"),
    ("HangingResetEnv", "timeout"),
]


@pytest.mark.parametrize(("name", "reason"), FAILED_RESETS)
def test_a_reset_that_fails(name, reason):
    with host(name) as envs:
        assert ask(envs, EnvCall(0, seed=1))[0].reason == reason


@pytest.mark.slow
def test_an_environment_that_cannot_be_interrupted_is_killed():
    with host("GoodEnv", "StubbornEnv", "GoodEnv") as envs:
        ask(envs, *(EnvCall(i, seed=1) for i in range(3)))
        replies = ask(envs, *(EnvCall(i, action="a") for i in range(3)))
        assert [replies[i].reason for i in range(3)] == [None, "killed", "lost"]
        # Environment 0 had answered, but its episode went with the process.
        assert ask(envs, EnvCall(0, action="a"))[0].reason == "lost"


def test_the_last_observation_may_be_missing():
    with host("EndsAtOnceEnv") as envs:
        ask(envs, EnvCall(0, seed=1))
        reply = ask(envs, EnvCall(0, action="x"))[0]
        assert reply.terminated and reply.reason is None and reply.observation == ""


def test_slow_environments_are_not_waited_for(tmp_path):
    gate = tmp_path / "gate"
    with host("GoodEnv", "GatedEnv", timeout_s=1000.0, config={"gate": str(gate)}) as envs:
        ask(envs, EnvCall(0, seed=1), EnvCall(1, seed=1))
        envs.submit([EnvCall(0, action="a"), EnvCall(1, action="a")])
        replies = []
        while not replies:
            replies = envs.collect(0.05)
        assert [reply.env_id for reply in replies] == [0]
        gate.touch()
        assert [(reply.env_id, reply.reason) for reply in envs.collect(1000.0)] == [(1, None)]


def test_closing_does_not_wait_for_a_hanging_environment():
    envs = host("GoodEnv", "StubbornEnv", timeout_s=1e6)
    ask(envs, EnvCall(0, seed=1), EnvCall(1, seed=1))
    envs.submit([EnvCall(0, action="a"), EnvCall(1, action="a")])
    while not envs.collect(0.05):
        pass  # until the first has answered, and the second is at work
    envs.close()


def test_what_environments_start_ends_with_them():
    with host("LeavingThingsBehindEnv", timeout_s=1000.0) as envs:
        assert ask(envs, EnvCall(0, seed=1))[0].reason is None


def test_an_environment_that_does_not_exist_ends_the_run():
    missing = pytest.raises(ConfigError, match="module bad_envs has no 'Nowhere'")
    with host("Nowhere") as envs, missing:
        ask(envs, EnvCall(0, seed=1))


def test_calls_that_come_while_others_are_worked_on_wait_for_them(tmp_path):
    """Large actions, and more replies than a pipe holds: neither side waits for the other."""
    gate = tmp_path / "gate"
    names = ["GatedEnv", *["GoodEnv"] * 400]
    with host(*names, timeout_s=1000.0, config={"gate": str(gate), "turns": 9}) as envs:
        assert len(ask(envs, *(EnvCall(i, seed=1) for i in range(401)))) == 401
        envs.submit([EnvCall(0, action="a"), *(EnvCall(i, action="a") for i in range(1, 200))])
        assert envs.collect(0.05) == []
        envs.submit([EnvCall(i, action="a" * 10_000) for i in range(200, 401)])
        gate.touch()
        replies = envs.collect(1000.0)
    assert [reply.env_id for reply in replies] == list(range(401))
    assert {reply.reason for reply in replies} == {None}


def test_classes_have_to_be_importable():
    class Inside(bad_envs.GoodEnv): ...

    message = "move the class to a module, or set env_isolation: false"
    with pytest.raises(ConfigError, match=message):
        EnvHost([EnvSpec(0, Inside)], timeout_s=1.0)
    envs = EnvHost([EnvSpec(0, bad_envs.GoodEnv)], timeout_s=1.0)
    assert envs.specs[0].entry_point == "bad_envs:GoodEnv"


def test_in_this_process():
    class Inside(bad_envs.GoodEnv): ...

    envs = LocalEnvs([EnvSpec(0, Inside), EnvSpec(1, bad_envs.RaisingEnv, random_actions=True)])
    replies = ask(envs, EnvCall(0, seed=3), EnvCall(1, seed=3))
    assert replies[0].observation == "start 3" and replies[1].random_action == "a"
    assert ask(envs, EnvCall(1, action="a"))[1].reason == "exception"
    envs.close()
