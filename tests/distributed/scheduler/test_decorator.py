"""`register` and what a cluster makes of it, with a cluster of ten lines."""

import asyncio
import functools
import inspect

import pytest
import torch

from roll.distributed.scheduler import decorator
from roll.distributed.scheduler.decorator import (
    BIND_WORKER_METHOD_FLAG,
    Dispatch,
    Execute,
    MethodSpec,
    bind_method,
    collect_all_to_all,
    collect_dp_mp_compute,
    dispatch_dp_mp_dispatch_first,
    dispatch_one_to_all,
    func_generator,
    get_predefined_dispatch_fn,
    get_predefined_execute_fn,
    method_spec,
    register,
    registered_methods,
)
from roll.distributed.scheduler.protocol import DataProto


class DataParallelRank:
    tp_rank = pp_rank = cp_rank = 0
    is_pipeline_last_stage = True

    def __init__(self, dp_rank: int):
        self.dp_rank = dp_rank


class Ref:
    """A reference whose value is known."""

    def __init__(self, value):
        self.value = value

    def done(self):
        return True

    def result(self, timeout=None):
        return self.value


class TinyCluster:
    """Data parallel workers in this process, with the methods that `func_generator` relies on."""

    def __init__(self, worker_cls, world_size):
        self.workers = [worker_cls(rank) for rank in range(world_size)]
        self.world_size = self.dp_size = world_size
        self.gathered = []
        for name, spec in registered_methods(worker_cls).items():
            setattr(self, name, bind_method(self, name, spec))

    def get_rank_info(self, rank):
        return DataParallelRank(rank)

    def execute_all(self, name, *args, **kwargs):
        return [
            Ref(
                getattr(worker, name)(
                    *(a[rank] for a in args), **{k: v[rank] for k, v in kwargs.items()}
                )
            )
            for rank, worker in enumerate(self.workers)
        ]

    def execute_rank_zero(self, name, *args, **kwargs):
        return Ref(getattr(self.workers[0], name)(*args, **kwargs))

    def gather(self, refs, method_name):
        self.gathered.append(method_name)
        return [ref.result() for ref in refs]


class Worker:
    def __init__(self, rank):
        self.rank = rank

    @register(dispatch_mode=Dispatch.DP_MP_COMPUTE, clear_cache=False)
    def double(self, data, factor=None):
        return DataProto.from_dict(
            {"out": data.batch["x"] * 2, "rank": torch.full((len(data),), self.rank)}
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def add(self, value, offset=0):
        return self.rank + value + offset

    @register(dispatch_mode=Dispatch.ONE_TO_ALL_ONE)
    def first(self, value):
        return (self.rank, value)

    @register()
    def scatter(self, value):
        return (self.rank, value)

    @register(execute_mode=Execute.RANK_ZERO)
    def only_zero(self, data, flag=False):
        return (self.rank, len(data), flag)

    @register(
        dispatch_mode={
            "dispatch_fn": lambda cluster, text: (
                ([text[rank] for rank in range(cluster.world_size)],),
                {},
            ),
            "collect_fn": lambda cluster, output: "".join(output),
        }
    )
    def shout(self, letter):
        return letter.upper()

    @register(dispatch_mode=Dispatch.DP_MP_COMPUTE)
    def fail_to_join(self, data):
        return {"a": 1}

    def plain(self):
        return "plain"

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def _private(self):
        return None


@pytest.fixture
def cluster() -> TinyCluster:
    return TinyCluster(Worker, 3)


def batch(rows: int) -> DataProto:
    return DataProto.from_dict({"x": torch.arange(rows)})


# The decorator


def test_a_decorated_function_is_the_same_function():
    def method(self, x: int, *, y: int = 2) -> int:
        """Doc."""
        return x + y

    async def coroutine(self):
        return 5

    decorated = register(dispatch_mode=Dispatch.ONE_TO_ALL)(method)
    assert decorated is method and decorated(None, 1) == 3 and decorated.__doc__ == "Doc."
    assert list(inspect.signature(decorated).parameters) == ["self", "x", "y"]
    assert register()(coroutine) is coroutine and inspect.iscoroutinefunction(coroutine)
    assert asyncio.run(coroutine(None)) == 5


def test_a_plain_object_sees_no_difference():
    worker = Worker(7)
    assert worker.add(1) == 8 and worker.add(1, offset=2) == 10
    assert worker.double(batch(2)).batch["out"].tolist() == [0, 2]
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        worker.add()


def test_the_spec_can_be_read_as_attributes_and_as_a_dict():
    spec = getattr(Worker.double, BIND_WORKER_METHOD_FLAG)
    assert spec == MethodSpec(Dispatch.DP_MP_COMPUTE, Execute.ALL, clear_cache=False)
    assert spec["dispatch_mode"] is Dispatch.DP_MP_COMPUTE and spec["execute_mode"] is Execute.ALL
    with pytest.raises(KeyError):
        spec["nope"]
    assert method_spec(Worker, "scatter") == MethodSpec(
        Dispatch.ALL_TO_ALL, Execute.ALL, clear_cache=True
    )


def test_arguments_of_roll_without_effect_here_are_accepted():
    register(Dispatch.ONE_TO_ALL, Execute.ALL, True, trace=True, prefetch=True, to_remote=True)


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        (
            {"dispatch_mode": "ONE_TO_ALL"},
            TypeError,
            "dispatch_mode is a str; expected a Dispatch member or a dict",
        ),
        (
            {"dispatch_mode": {"dispatch_fn": print}},
            ValueError,
            r"dispatch_fn and collect_fn.*found \['dispatch_fn'\]",
        ),
        (
            {"dispatch_mode": {"dispatch_fn": print, "collect_fn": 3}},
            TypeError,
            r"dispatch_mode\['collect_fn'\] is a int; expected a function",
        ),
        ({"execute_mode": "ALL"}, TypeError, "execute_mode is a str; expected a member of Execute"),
        (
            {"dispatch_mode": Dispatch.DP_MP_COMPUTE, "execute_mode": Execute.RANK_ZERO},
            ValueError,
            "worker 0 alone, so dispatch_mode=DP_MP_COMPUTE has nothing to split",
        ),
        (
            {
                "dispatch_mode": {
                    "dispatch_fn": dispatch_one_to_all,
                    "collect_fn": collect_all_to_all,
                },
                "execute_mode": Execute.RANK_ZERO,
            },
            ValueError,
            "dispatch_mode=a dict of functions has nothing to split",
        ),
    ],
)
def test_bad_arguments_fail_where_the_class_is_written(arguments, error, message):
    with pytest.raises(error, match=message):
        register(**arguments)


# Finding registered methods


def test_registered_methods_are_the_public_ones():
    names = {"double", "add", "first", "scatter", "only_zero", "shout", "fail_to_join"}
    assert set(registered_methods(Worker)) == names
    assert method_spec(Worker, "plain") is None and method_spec(Worker, "absent") is None


def test_an_override_inherits_the_nearest_spec():
    class Child(Worker):
        def double(self, data, factor=None):
            return super().double(data, factor)

        @register(dispatch_mode=Dispatch.ONE_TO_ALL_ONE)
        def add(self, value, offset=0):
            return -1

        first = None

    class GrandChild(Child):
        def add(self, value, offset=0):
            return -2

    assert method_spec(GrandChild, "double") == method_spec(Worker, "double")
    assert method_spec(GrandChild, "add").dispatch_mode is Dispatch.ONE_TO_ALL_ONE
    assert method_spec(GrandChild, "first") is None and "first" not in registered_methods(
        GrandChild
    )
    assert TinyCluster(GrandChild, 2).add(1) == -2


def test_a_second_decorator_keeps_the_spec():
    def logged(function):
        @functools.wraps(function)
        def wrapper(*args, **kwargs):
            return function(*args, **kwargs)

        return wrapper

    class Logged(Worker):
        add = logged(Worker.add)

    assert method_spec(Logged, "add") == method_spec(Worker, "add")


# Through a cluster


def test_dp_methods_join_in_input_order(cluster):
    result = cluster.double(batch(7))
    assert result.batch["out"].tolist() == [0, 2, 4, 6, 8, 10, 12]
    assert result.batch["rank"].tolist() == [0, 0, 0, 1, 1, 2, 2]
    assert cluster.gathered == ["double"] and cluster.double.__name__ == "double"


def test_the_other_modes(cluster):
    assert cluster.add(10) == [10, 11, 12]
    assert cluster.add(10, offset=5) == [15, 16, 17]
    assert cluster.first("x") == (0, "x")
    assert cluster.scatter(["a", "b", "c"]) == [(0, "a"), (1, "b"), (2, "c")]
    assert cluster.shout("abc") == "ABC"


def test_rank_zero_gets_the_arguments_as_they_are(cluster):
    data = batch(2)  # fewer rows than workers, and not a list
    assert cluster.only_zero(data, flag=True) == (0, 2, True)
    assert cluster.only_zero(data, blocking=False).result() == (0, 2, False)


def test_without_blocking_nothing_is_gathered(cluster):
    wraps = cluster.double(batch(7), blocking=False)
    refs = cluster.add(1, blocking=False)
    one = cluster.first("x", blocking=False)
    assert cluster.gathered == []
    assert DataProto.materialize_concat(wraps).batch["out"].tolist() == [0, 2, 4, 6, 8, 10, 12]
    assert [wrap.collected for wrap in wraps] == [True, True, True]
    assert [ref.result() for ref in refs] == [1, 2, 3]
    assert [wrap.collected for wrap in one] == [True, False, False]


def test_errors_say_which_method(cluster):
    with pytest.raises(
        ValueError, match="positional argument 0 is a DataProto of 2 rows"
    ) as caught:
        cluster.double(batch(2))
    assert caught.value.__notes__ == ["while splitting the arguments of double() over the workers"]
    with pytest.raises(TypeError, match="cannot join worker outputs") as caught:
        cluster.fail_to_join(batch(3))
    assert caught.value.__notes__ == ["while joining the outputs of fail_to_join()"]


def test_func_generator_alone():
    cluster = TinyCluster(Worker, 2)
    call = func_generator(
        cluster, "add", dispatch_one_to_all, collect_all_to_all, cluster.execute_all
    )
    assert call(1) == [1, 2]


def test_predefined_functions():
    functions = get_predefined_dispatch_fn(Dispatch.DP_MP_DISPATCH_FIRST)
    assert functions == {
        "dispatch_fn": dispatch_dp_mp_dispatch_first,
        "collect_fn": collect_dp_mp_compute,
    }
    functions = get_predefined_dispatch_fn(Dispatch.DP_MP_DISPATCH_FIRST_COLLECT_ALL)
    assert functions == {
        "dispatch_fn": dispatch_dp_mp_dispatch_first,
        "collect_fn": collect_all_to_all,
    }
    assert all(get_predefined_dispatch_fn(mode) for mode in Dispatch)
    assert get_predefined_execute_fn(Execute.ALL) == {"execute_fn_name": "execute_all"}
    assert get_predefined_execute_fn(Execute.RANK_ZERO) == {"execute_fn_name": "execute_rank_zero"}


def test_every_public_name_imports_from_here():
    assert all(hasattr(decorator, name) for name in decorator.__all__)
