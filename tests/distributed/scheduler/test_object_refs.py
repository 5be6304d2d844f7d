"""Waiting for references: futures, Ray's references, and values that are already there."""

import threading
from concurrent.futures import Future

import pytest
import torch
from protocol_batches import ids, make

from roll.distributed.scheduler.protocol import DataProto, ObjectRefWrap, is_ref
from roll.exceptions import WorkerTimeoutError


class FakeRayRef:
    """A Ray ObjectRef as far as DataProto can tell."""

    def __init__(self, value):
        self._future = Future()
        self._future.set_result(value)

    def future(self) -> Future:
        return self._future


def finished(value) -> Future:
    future = Future()
    future.set_result(value)
    return future


def test_materialize_concat_takes_every_kind_of_reference():
    refs = [
        make(1),
        finished(make(2)),
        FakeRayRef(make(3)),
        ObjectRefWrap(finished(make(1)), True),
    ]
    assert ids(DataProto.materialize_concat(refs)) == [0, 0, 1, 0, 1, 2, 0]


def test_materialize_concat_keeps_only_what_is_collected():
    refs = [ObjectRefWrap(finished(make(2)), True), ObjectRefWrap(finished(None), False)]
    refs.append(ObjectRefWrap(FakeRayRef(make(1)), True))
    joined = DataProto.materialize_concat(refs, global_keys={"global_step"})
    assert ids(joined) == [0, 1, 0] and joined.meta_info["global_step"] == [3, 3]


def test_materialize_concat_waits():
    late = Future()
    timer = threading.Timer(0.1, late.set_result, [make(1)])
    timer.start()
    assert ids(DataProto.materialize_concat([finished(make(2)), late], timeout=1e6)) == [0, 1, 0]


def test_materialize_concat_raises_a_failure_at_once_even_of_an_uncollected_rank():
    failed = Future()
    failed.set_exception(RuntimeError("rank 1 broke"))
    with pytest.raises(RuntimeError, match="rank 1 broke"):
        DataProto.materialize_concat(
            [ObjectRefWrap(Future(), True), ObjectRefWrap(failed, False)], timeout=1e6
        )


def test_materialize_concat_timeout_says_which():
    with pytest.raises(
        WorkerTimeoutError, match=r"waited 0.05 s for 3 results; still missing: \[1, 2\]"
    ):
        DataProto.materialize_concat([finished(make(1)), Future(), Future()], timeout=0.05)
    own = Future()
    own.set_exception(TimeoutError("the worker's own"))
    with pytest.raises(TimeoutError, match="the worker's own") as caught:
        DataProto.materialize_concat([own], timeout=60)
    assert not isinstance(caught.value, WorkerTimeoutError)


def test_materialize_concat_refuses_other_values():
    with pytest.raises(TypeError, match="a reference gave a NoneType; expected a DataProto"):
        DataProto.materialize_concat([finished(make(1)), finished(None)])
    with pytest.raises(ValueError, match="empty list"):
        DataProto.materialize_concat([ObjectRefWrap(finished(make(1)), False)])


@pytest.mark.parametrize("value", [None, 1, [], {}, make(1), make(1).batch, torch.ones(1), Future])
def test_values_are_not_references(value):
    assert not is_ref(value)


@pytest.mark.parametrize("ref", [Future(), FakeRayRef(1)])
def test_references_are(ref):
    assert is_ref(ref)
