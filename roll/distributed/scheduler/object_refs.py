"""References to results that are still being computed: futures in this process, Ray ObjectRefs, or the value itself.

Ray is never imported: its references are known by their `future()` method.
"""

import time
from collections.abc import Sequence
from concurrent import futures
from dataclasses import dataclass
from typing import Any

from roll.exceptions import WorkerTimeoutError


@dataclass(frozen=True)
class ObjectRefWrap:
    """One rank's reference in the result of a call that was not waited for.

    `collected` says whether its value is part of the result; the others are waited for only to see their failures.
    """

    obj_ref: Any
    collected: bool


def is_ref(value: Any) -> bool:
    """Whether `value` stands for a result that may not be there yet."""
    return _is_ray_ref(value) or all(
        callable(getattr(type(value), name, None)) for name in ("result", "done")
    )


def wait_for_refs(refs: Sequence[Any], timeout: float | None = None) -> list[Any]:
    """The values of all references, in order; what is not a reference is its own value.

    The first failure is raised at once, even while others are still running. `timeout` is in seconds for all together.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    pending = [ref.future() if _is_ray_ref(ref) else ref for ref in refs]
    real = [future for future in pending if isinstance(future, futures.Future)]
    done, not_done = futures.wait(real, timeout, futures.FIRST_EXCEPTION)
    for future in real:
        if future in done:
            future.result()
    if not_done:
        raise _timed_out(
            [i for i, future in enumerate(pending) if future in not_done], len(refs), timeout
        )
    return [_value(future, i, len(refs), timeout, deadline) for i, future in enumerate(pending)]


def _is_ray_ref(value: Any) -> bool:
    return callable(getattr(type(value), "future", None))


def _value(
    future: Any, position: int, count: int, timeout: float | None, deadline: float | None
) -> Any:
    if not is_ref(future):
        return future
    try:
        return future.result(
            timeout=None if deadline is None else max(0.0, deadline - time.monotonic())
        )
    except TimeoutError as error:
        if deadline is None or time.monotonic() < deadline:
            raise  # the method's own
        raise _timed_out([position], count, timeout) from error


def _timed_out(positions: list[int], count: int, timeout: float | None) -> WorkerTimeoutError:
    return WorkerTimeoutError(
        f"waited {timeout} s for {count} results; still missing: {positions} (counted from 0)"
    )
