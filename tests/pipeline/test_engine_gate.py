"""One thread generates, another one pauses it: nothing runs inside a pause, and nothing is lost."""

import threading

import pytest

from roll.pipeline.engine_gate import EngineGate


class Engine:
    """Each call lasts until it is aborted. The first abort comes too early and is lost."""

    backend_name = "ray"

    def __init__(self):
        self.began, self.aborted, self.num_aborts = threading.Event(), threading.Event(), 0

    def generate_requests(self, requests):
        self.began.set()
        assert self.aborted.wait(200)
        return requests

    def abort_requests(self):
        self.num_aborts += 1
        if self.num_aborts > 1:
            self.aborted.set()


def in_thread(function):
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread


def test_a_pause_aborts_what_runs_and_holds_back_what_comes():
    engine, outputs = Engine(), []
    gate = EngineGate(engine)

    def generate():
        for number in range(2):
            outputs.append(gate.generate_requests([number]))

    thread = in_thread(generate)
    assert engine.began.wait(200)
    with gate.paused():
        assert not gate.is_busy and not gate.is_open and engine.num_aborts == 2
        assert outputs in ([], [[0]])  # the thread may not have got that far
    thread.join(200)
    assert outputs == [[0], [1]] and gate.is_open and not gate.is_busy


def test_after_close_nothing_is_generated():
    engine = Engine()
    gate = EngineGate(engine)
    thread = in_thread(lambda: gate.generate_requests([]))
    assert engine.began.wait(200)
    gate.close()
    thread.join(200)
    assert not thread.is_alive()
    with pytest.raises(RuntimeError, match="closed"):
        gate.generate_requests([])


def test_close_ends_a_call_that_waits_at_the_gate():
    gate = EngineGate(Engine())
    errors = []

    def generate():
        with pytest.raises(RuntimeError, match="closed") as caught:
            gate.generate_requests([])
        errors.append(caught.value)

    with gate.paused():
        thread = in_thread(generate)
        gate.close()
        thread.join(200)
    assert len(errors) == 1
