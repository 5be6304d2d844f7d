"""Which folder a run gets, and what it continues from."""

import pytest

from roll.exceptions import ConfigError
from roll.models.checkpoint import checkpoint_folder, save_pipeline_state
from roll.utils.run_folder import RunFolder, open_run, runs_of


def make_run(output_dir, name="exp", *, steps=(), status="finished"):
    folder = open_run(output_dir, name).path
    RunFolder(folder).update_info(status=status)
    (folder / "metrics.jsonl").write_text('{"step": 0}\n')
    for step in steps:
        save_pipeline_state(folder, step, {})
    return folder


def test_every_new_run_gets_a_folder_of_its_own(tmp_path):
    assert [make_run(tmp_path).name for _ in range(3)] == ["exp", "exp-2", "exp-3"]
    assert [folder.name for folder in runs_of(tmp_path, "exp")] == ["exp", "exp-2", "exp-3"]
    assert make_run(tmp_path, "exp-2x").name == "exp-2x"
    assert len(runs_of(tmp_path, "exp")) == 3


def test_runs_are_ordered_by_number(tmp_path):
    for number in (10, 9, 2):
        (tmp_path / f"exp-{number}").mkdir()
        (tmp_path / f"exp-{number}" / "run.json").write_text("{}")
    assert [folder.name for folder in runs_of(tmp_path, "exp")] == ["exp-2", "exp-9", "exp-10"]


def test_a_run_that_failed_before_its_first_step_gives_its_name_back(tmp_path):
    folder = open_run(tmp_path, "exp").path
    RunFolder(folder).update_info(status="failed")
    assert open_run(tmp_path, "exp").path == folder
    (folder / "metrics.jsonl").write_text('{"step": 0}\n')
    assert open_run(tmp_path, "exp").path.name == "exp-2"


def test_true_continues_the_newest_run_that_has_a_complete_checkpoint(tmp_path):
    assert open_run(tmp_path, "exp", True).checkpoint is None  # nothing to continue: a new run
    for steps in ((2, 4), (1, 3), ()):  # the first one takes the empty folder again
        run = make_run(tmp_path, steps=steps)
    assert run.name == "exp-3"
    found = open_run(tmp_path, "exp", True)
    assert (found.path.name, found.checkpoint) == ("exp-2", checkpoint_folder(found.path, 3))


def test_a_path_names_a_run_or_a_checkpoint(tmp_path):
    run = make_run(tmp_path, steps=(2, 4))
    for given in (run, checkpoint_folder(run, 4)):
        assert open_run(tmp_path, "exp", str(given)) == RunFolder(run, checkpoint_folder(run, 4))
    # From an older checkpoint the later ones must not be overwritten.
    older = open_run(tmp_path, "exp", str(checkpoint_folder(run, 2)))
    assert (older.path.name, older.checkpoint) == ("exp-2", checkpoint_folder(run, 2))


def test_what_cannot_be_continued_is_explained(tmp_path):
    run = make_run(tmp_path, steps=(2,))
    with pytest.raises(
        ConfigError, match=r"nowhere is not a complete checkpoint of a run.*checkpoint-2"
    ):
        open_run(tmp_path, "exp", str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match=r"exp_name: found .*a name without slashes"):
        open_run(tmp_path, "a/b")
    assert run.is_dir()


def test_run_json_is_replaced_as_a_whole_and_survives_damage(tmp_path):
    folder = RunFolder(tmp_path)
    assert folder.info() == {}
    folder.update_info(status="running", last_step=1)
    folder.update_info(last_step=2)
    assert folder.info() == {"status": "running", "last_step": 2}
    (tmp_path / "run.json").write_text('{"status": ')
    assert folder.info() == {}
