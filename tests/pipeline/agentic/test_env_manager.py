"""Real chat templates over several turns: ids are only appended, and they spell the
conversation."""

import logging

import pytest
from agentic_setup import EchoProxy, env_config, source_of
from tiny_tokenizer import CHATML, bpe_tokenizer

from roll.datasets.chat_template import get_chat_template
from roll.engines.request import SamplingParams
from roll.models.tiny import character_tokenizer
from roll.pipeline.agentic.agentic_config import EnvTemplate
from roll.pipeline.agentic.env_manager import (
    Conversation,
    DriftMonitor,
    EnvEntry,
    TrajEnvManager,
    first_difference,
    with_answers,
)
from roll.rollout.collate import collate
from roll.rollout.types import Trajectory, Turn

SYSTEM = {"role": "system", "content": "Answer 10 or 4."}
ANSWERS = ["a 10", "add\n", " 4?", "=4 10", "10"]
QUESTIONS = ["add 4?", "=4", " 1 4\n\n", "add", "? 10"]


def chatml(**options):
    return Conversation(get_chat_template("native", bpe_tokenizer(**options)))


def ids_of(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def play(conversation, answers=ANSWERS, *, with_end=True, system=SYSTEM):
    """Five turns, as a manager plays them: (messages, turns)."""
    tokenizer = conversation.tokenizer
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    messages = [SYSTEM] if system else []
    turns = []
    for question, answer in zip(QUESTIONS, answers, strict=True):
        message = {"role": "user", "content": question}
        messages.append(message)
        text = conversation.template(messages)
        if turns:
            text = conversation.next_prompt(message, system=system)
        previous = turns[-1].response_ids if turns else []
        (prompt,) = conversation.tokenize([text], [previous])
        response = ids_of(tokenizer, answer) + ([end] if with_end else [])
        finish_reason = "stop" if with_end else "length"
        turns.append(Turn(prompt, response, None, finish_reason=finish_reason))
    return messages, turns


@pytest.mark.parametrize(
    "with_end", [True, False], ids=["answers end themselves", "answers are cut off"]
)
@pytest.mark.parametrize("system", [SYSTEM, None], ids=["system", "no system"])
def test_five_turns(with_end, system):
    conversation = chatml()
    messages, turns = play(conversation, with_end=with_end, system=system)
    batch = collate([Trajectory("t", "g", "Tag", 0, 0, turns)], pad_token_id=0)
    ids, mask = batch["input_ids"][0], batch["response_mask"][0].bool()
    # The mask is 1 exactly on the sampled tokens ...
    assert ids[mask].tolist() == [token for turn in turns for token in turn.response_ids]
    runs = (mask.int().diff() == 1).sum().item()
    assert runs == 5
    # ... and all tokens together spell the conversation, once.
    whole = with_answers(messages, ANSWERS)
    whole = conversation.template(whole, add_generation_prompt=False)
    text = conversation.tokenizer.decode(ids, skip_special_tokens=False)
    assert whole.startswith(text) and whole[len(text) :] in ("\n", "<|im_end|>\n")
    assert DriftMonitor(conversation).check(messages, turns)


def test_ids_are_those_of_sampling_not_of_tokenising_again():
    """` 1` and `0` sampled as two tokens stay two, although the tokenizer would merge them."""
    conversation = chatml()
    tokenizer = conversation.tokenizer
    apart = ids_of(tokenizer, " 1") + ids_of(tokenizer, "0")
    assert apart != ids_of(tokenizer, " 10")
    messages, turns = play(conversation)
    end = turns[0].response_ids[-1]
    turns[0] = Turn(turns[0].prompt_ids, [*apart, end], None)
    batch = collate([Trajectory("t", "g", "Tag", 0, 0, turns)], pad_token_id=0)
    start = len(turns[0].prompt_ids)
    assert batch["input_ids"][0, start : start + 3].tolist() == [*apart, end]
    assert DriftMonitor(conversation).check(messages, turns)  # the text is the same


def test_a_template_that_rewrites_history_is_reported_with_a_difference(caplog):
    """Like Qwen3: thoughts of answers before the last user message are removed."""
    forgetful = CHATML.replace(
        "{{ message['content'] }}",
        "{% if message['role'] == 'assistant' and not loop.last %}"
        "{{ message['content'].split('?')[-1] }}"
        "{% else %}{{ message['content'] }}{% endif %}",
    )
    conversation = chatml(chat_template=forgetful)
    answers = ["add?10", *ANSWERS[1:]]
    messages, turns = play(conversation, answers)
    monitor = DriftMonitor(conversation)
    with caplog.at_level(logging.WARNING, "roll"):
        assert not monitor.check(messages, turns)
        assert not monitor.check(messages, turns)
    assert (monitor.checked, monitor.different) == (2, 2)
    (message,) = [text for text in caplog.messages if "a finished conversation differ" in text]
    assert "'add?10" in message and "rendered at once" in message
    # The tokens stay what was read and written.
    assert conversation.text(turns[0].response_ids) == "add?10"


def test_first_difference_is_readable():
    assert first_difference("abc<think>x</think>y", "abcy") == (
        "  read and written: 'abc' >>> '<think>x</think>y'\n  rendered at once: 'abc' >>> 'y'"
    )
    long = first_difference("a" * 50 + "b" * 50, "a" * 50)
    assert "..." + repr("a" * 40) in long and repr("b" * 40) + "..." in long


def test_half_a_character_cannot_be_compared():
    conversation = chatml()
    messages, turns = play(conversation)
    half = ids_of(conversation.tokenizer, "é")[:1]
    turns[0] = Turn(turns[0].prompt_ids, half, None, finish_reason="length")
    assert DriftMonitor(conversation).check(messages, turns)


def test_an_answer_gets_the_room_that_is_left():
    entry = EnvEntry(0, 0, "A", EnvTemplate(max_tokens_per_step=3))
    sampling = SamplingParams(max_new_tokens=5)
    for length, room in ((1, 3), (3, 3), (5, 1), (6, None)):
        manager = TrajEnvManager(entry, chatml(), sampling=sampling, sequence_length=6)
        request = manager.request([7] * length)
        assert (request and request.sampling.max_new_tokens) == room


CONCAT = "roll.pipeline.agentic.env_manager.step_concat_env_manager.StepConcatEnvManager"


def test_step_concat_prompts_have_the_observations_before_and_the_suffix():
    template = {
        "env_type": "bad_envs:SuffixEnv",
        "env_manager_cls": CONCAT,
        "agent_template": "{history}|{current_observation}",
        "history_length": 2,
        "env_config": {"turns": 4},
        "max_steps": 5,
    }
    proxy = EchoProxy(character_tokenizer())
    with source_of(env_config({"Good": template}), proxy) as scheduler:
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
