"""Which trajectories make up a batch."""

from roll.pipeline.agentic.group_queue import MAX_REPLACEMENTS, Episode, GroupQueue, derive_seed
from roll.rollout.types import Trajectory


def episode(group_id=0, envs=(0, 1, 2), **options):
    return Episode(group_id, "Tag", 5, 77, envs, **options)


def trajectory(env_id):
    return Trajectory(f"t{env_id}", "g", "Tag", env_id, 0, [])


def test_a_group_is_complete_with_its_first_members():
    queue = GroupQueue([episode()], group_size=2)
    taken = [queue.next_episode(env_id) for env_id in (0, 1, 2)]
    assert taken[0] is taken[1] is taken[2] and queue.next_episode(0) is None
    queue.put(taken[0], 2, trajectory(2))
    assert not queue.is_done
    queue.put(taken[0], 0, trajectory(0))
    assert queue.is_done
    queue.put(taken[0], 1, trajectory(1))  # too late, not counted
    assert [item.env_id for item in queue.trajectories()] == [0, 2] and queue.num_spare == 1


def test_failing_members_make_a_group_smaller_never_late():
    queue = GroupQueue([episode(envs=(0, 1))], group_size=2)
    played = queue.next_episode(0)
    queue.put(played, 0, None)
    assert not queue.is_done
    queue.put(played, 1, trajectory(1))
    assert queue.is_done and queue.num_short == 1 and len(queue.trajectories()) == 1
    queue = GroupQueue([episode(envs=(0,))], group_size=1)
    queue.put(queue.next_episode(0), 0, None)
    assert queue.is_done and queue.num_empty == 1 and queue.trajectories() == []


def test_a_dropped_group_is_replaced_a_limited_number_of_times():
    queue = GroupQueue([episode(envs=(0,))], group_size=1, drop=lambda *_: True)
    ids = []
    while (played := queue.next_episode(0)) is not None:
        ids.append((played.traj_group_id, played.seed))
        queue.put(played, 0, trajectory(0))
    assert queue.is_done and len(ids) == 1 + MAX_REPLACEMENTS == len(set(ids)) == queue.num_filtered
    assert ids[0][0] == "Tag_0_5_77" and ids[1][0] == "Tag_0_5r1_77"


def test_seeds_depend_on_every_part():
    assert derive_seed(1, "train", "A", 0) == derive_seed(1, "train", "A", 0) < 2**31
    assert (
        len(
            {
                derive_seed(1, "train", "A", 0),
                derive_seed(2, "train", "A", 0),
                derive_seed(1, "val", "A", 0),
            }
        )
        == 3
    )
