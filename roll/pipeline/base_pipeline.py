"""What all pipelines share: the run's folder, clusters, steps, checkpoints, resume and the end.

A pipeline is a subclass whose `run()` reads like the algorithm:

    class MyPipeline(BasePipeline):
        progress_metrics = {"loss": "actor/loss"}

        def __init__(self, pipeline_config, *, progress=None):
            super().__init__(pipeline_config, progress=progress)
            self.actor_train = self.make_cluster("actor_train")
            self.initialize(self.actor_train)
            self.set_checkpoint_clusters(self.actor_train)
            self.restore()

        def run(self):
            for step in self.steps():
                metrics = self.validate() if self.should_eval(step) else {}
                ...
                self.end_step(step, metrics)
            self.finish("what validation says")

Steps are counted from 0, and `checkpoint-N` is the state after N of them, so a resumed run begins
with step N. Ctrl-C finishes the step, saves and says how to go on; a second one stops at once.
"""

from __future__ import annotations

import importlib.util
import math
import shlex
import signal
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar, Self

from rich.console import Console

from roll import __version__
from roll.configs.load import dump_yaml
from roll.configs.pipeline_config import BaseConfig
from roll.distributed.executor.cluster import Cluster
from roll.distributed.scheduler.resource_manager import ResourceManager
from roll.distributed.weight_sync import ModelUpdateGroup
from roll.exceptions import ConfigError
from roll.models.checkpoint import (
    PIPELINE,
    checkpoint_folder,
    load_pipeline_state,
    read_global_step,
    save_pipeline_state,
    seed_everything,
)
from roll.utils.logging import get_logger
from roll.utils.metrics.reduction import reduce_metrics, reduce_metrics_list
from roll.utils.progress import StepProgress
from roll.utils.run_folder import CONFIG_FILE, METRICS_FILE, RunFolder, Status, now, open_run
from roll.utils.tracking import RunLog, untagged

logger = get_logger(__name__)

INTERRUPTED = "interrupted"
_INFO_INTERVAL = 5.0  # seconds between two updates of run.json


class BasePipeline:
    """A run: its folder, its clusters and its steps.

    Attributes that subclasses read:
        pipeline_config   the config as workers get it: `output_dir` is the run's folder
        run_dir           that folder
        global_step       steps that are done
        summary           what run.json says about the run; add to it
        kept_steps        checkpoints that `max_ckpt_to_keep` does not delete
    """

    progress_metrics: ClassVar[Mapping[str, str]] = {}
    """Label to metric: what the progress bar shows."""

    def __init__(self, pipeline_config: BaseConfig, *, progress: bool | None = None) -> None:
        config = pipeline_config
        self._folder = open_run(config.output_dir, config.exp_name, config.resume_from_checkpoint)
        self._started = self._info_written = time.monotonic()
        self._show_progress = progress
        self.run_dir: Path = self._folder.path
        self.checkpoint: Path | None = self._folder.checkpoint
        history: Path | None = None
        self.global_step, self._saved_step = 0, None
        if self.checkpoint is not None:
            self.global_step = self._saved_step = read_global_step(self.checkpoint)
            history = self.checkpoint.parent.parent / METRICS_FILE
            logger.info("continuing from %s with step %d", self.checkpoint, self.global_step)
        elif config.resume_from_checkpoint:
            where = (config.exp_name, config.output_dir)
            logger.info("there is no checkpoint of %s in %s yet: a new run", *where)
        resume = False if self.checkpoint is None else str(self.checkpoint)
        self.pipeline_config: Any = config.model_copy(
            update={"output_dir": str(self.run_dir), "resume_from_checkpoint": resume}
        )
        self.resource_manager = ResourceManager(
            config.num_gpus_per_node, config.num_nodes, backend=config.execution_backend
        )
        self.summary: dict[str, Any] = {}
        self._clusters: list[Cluster] = []
        self._checkpoint_clusters: list[Cluster] = []
        self._update_pairs: list[tuple[Cluster, Cluster, int]] = []
        self._update_groups: list[ModelUpdateGroup] | None = None
        self._stop_reason: str | None = None
        self.kept_steps: set[int] = set()
        self._pending: dict[str, Any] = {}
        self.logged: dict[str, float] = {}
        self._progress: StepProgress | None = None
        seed_everything(config.seed)
        # config.yaml is the user's, with every default: it starts a run like this one.
        text = dump_yaml(config.model_copy(update={"resume_from_checkpoint": False}))
        (self.run_dir / CONFIG_FILE).write_text(text, encoding="utf-8")
        overrides = []
        if sys.argv[1:2] == ["train"]:
            overrides = [word for word in sys.argv[2:] if "=" in word]
        self._folder.update_info(
            pipeline=getattr(config, "pipeline", type(self).__name__),
            started=self._folder.info().get("started", now()),
            roll=__version__,
            command=sys.argv,
            overrides=overrides,
            status="running",
            last_step=self.global_step,
            max_steps=config.max_steps,
            summary=self.summary,
        )
        # Also where a subclass's constructor fails, or an exception ends a program that never calls
        # `close`.
        weakref.finalize(self, _mark_failed, self._folder)
        self.run_log: RunLog | None = RunLog(
            self.run_dir, config, first_step=self.global_step, history=history
        )

    # -- clusters ----------------------------------------------------------------------------------

    def make_cluster(self, role_name: str) -> Cluster:
        """The workers of a role, not yet initialized. GPUs that do not exist are an error here."""
        roles = self.pipeline_config.active_roles()
        if role_name not in roles:
            raise ConfigError(
                f"{role_name} is no role of this run; its roles are {', '.join(roles)}"
            )
        role = roles[role_name]
        if role.worker_cls is None:
            key = self.pipeline_config.key_of(role_name)
            raise ConfigError(f"{key}.worker_cls: missing; name a worker class")
        cluster = Cluster(role_name, role.worker_cls, self.resource_manager, role)
        self._clusters.append(cluster)
        return cluster

    def initialize(self, *clusters: Cluster) -> None:
        """Build the models of these clusters at the same time; training roles load a checkpoint."""
        pending = [
            (cluster, cluster.execute_all_async("initialize", self.pipeline_config))
            for cluster in clusters
        ]
        for cluster, refs in pending:
            cluster.gather(refs, "initialize")

    def release(self, cluster: Cluster) -> None:
        """End a cluster; its memory is free once the caller lets go of it too."""
        cluster.shutdown()
        self._clusters.remove(cluster)

    def set_model_update_pair(
        self, src_cluster: Cluster, tgt_cluster: Cluster, frequency: int = 1
    ) -> None:
        """`model_update` brings the weights of one cluster to another, every `frequency` steps."""
        self._update_pairs.append((src_cluster, tgt_cluster, frequency))

    def model_update(self, global_step: int) -> dict[str, Any]:
        """Update the weights of every pair; returns the timings and a checksum as metrics."""
        if self._update_groups is None:  # the clusters have to be initialized
            megabytes = self.pipeline_config.model_update_buffer_size_mb
            self._update_groups = [
                ModelUpdateGroup(source, target, frequency=frequency, bucket_megabytes=megabytes)
                for source, target, frequency in self._update_pairs
            ]
        return reduce_metrics_list(
            [group.model_update(global_step) for group in self._update_groups]
        )

    def set_checkpoint_clusters(self, *clusters: Cluster) -> None:
        """What `save_checkpoint` saves; the first cluster holds the model that a run is about."""
        self._checkpoint_clusters = list(clusters)

    # -- state -------------------------------------------------------------------------------------

    def states(self) -> dict[str, dict[str, Any]]:
        """What the pipeline itself carries from step to step, as plain values by name."""
        return {}

    def load_states(self, states: dict[str, dict[str, Any]]) -> None:
        """Take back what `states` gave."""

    def restore(self) -> None:
        """On resume, load the pipeline's own state, once everything that has a state exists."""
        if self.checkpoint is not None:
            _, states = load_pipeline_state(self.checkpoint)
            self.load_states(states)

    def run(self) -> None:
        """Train. Subclasses say how."""
        raise NotImplementedError

    # -- steps -------------------------------------------------------------------------------------

    def steps(self) -> Iterator[int]:
        """The steps that are left, with a progress bar. Ends early after `stop` or Ctrl-C."""
        max_steps = self.pipeline_config.max_steps
        if self.global_step >= max_steps:
            logger.warning(
                "step %d of %d: there is nothing left to train", self.global_step, max_steps
            )
        progress = StepProgress(
            max_steps, self.global_step, self.progress_metrics, show=self._show_progress
        )
        with self._finishing_on_signals(), progress:
            self._progress = progress
            while self.global_step < max_steps and self._stop_reason is None:
                step = self.global_step
                yield step
                assert self.global_step == step + 1, f"end_step({step}) was not called"
            if self.is_interrupted:  # perhaps too late for `end_step` to see
                self.save_checkpoint()
            self._progress = None

    def end_step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Log what happened in this step, show it, and save a checkpoint if one is due."""
        self.global_step = done = step + 1
        config = self.pipeline_config
        is_due = done % config.save_steps == 0 or done == config.max_steps or self.is_stopping
        # Models come before the step's line, which has their times; what makes the checkpoint
        # complete comes after it, so that a run that goes on from there has the line.
        if is_due:
            self._save_models()
        self.log(step, {**metrics, "system/step": done})
        if self._progress is not None:
            shown = {untagged(name): value for name, value in self.logged.items()}
            self._progress.update(done, shown)
        if is_due:
            self._complete_checkpoint()
        if self._saved_step == done or time.monotonic() - self._info_written > _INFO_INTERVAL:
            self._folder.update_info(last_step=done)
            self._info_written = time.monotonic()

    def log(self, step: int, metrics: Mapping[str, Any]) -> dict[str, float]:
        """Write metrics, reduced to numbers, as the line of `step`, with a checkpoint's times."""
        reduced = reduce_metrics({**metrics, **self._pending})
        self._pending = {}
        self.logged = {
            name: value for name, value in reduced.items() if isinstance(value, float | int)
        }
        assert self.run_log is not None, "the run is closed"
        self.run_log.log(step, self.logged)
        return self.logged

    def should_eval(self, step: int) -> bool:
        """Before step 0 and every `eval_steps`; `run` validates once more at the end."""
        every = self.pipeline_config.eval_steps
        return every > 0 and step % every == 0

    def stop(self, reason: str) -> None:
        """End after the current step, with a checkpoint."""
        self._stop_reason = self._stop_reason or reason

    @property
    def is_stopping(self) -> bool:
        return self._stop_reason is not None

    @property
    def is_interrupted(self) -> bool:
        """Whether it was Ctrl-C (or SIGTERM) that ended the run."""
        return self._stop_reason == INTERRUPTED

    def say(self, line: str) -> None:
        """Tell the user something, without breaking the progress bar."""
        if self._progress is not None:
            self._progress.say(line)
        elif self._show_progress is not False:
            Console(stderr=True, highlight=False, soft_wrap=True).print(line, markup=False)

    def save_checkpoint(self, *, keep: bool = False) -> Path:
        """Save the state after `global_step` steps, unless it is saved already.

        `keep` protects this checkpoint, and no other one, from `max_ckpt_to_keep`.
        """
        if keep:
            self.kept_steps = {self.global_step}
        if self._saved_step != self.global_step:
            self._save_models()
            self._complete_checkpoint()
        return checkpoint_folder(self.run_dir, self.global_step)

    def _save_models(self) -> None:
        for cluster in self._checkpoint_clusters:
            for timings in cluster.do_checkpoint(self.global_step):
                self._pending |= timings

    def _complete_checkpoint(self) -> None:
        limit, done = self.pipeline_config.max_ckpt_to_keep, self.global_step
        save_pipeline_state(
            self.run_dir, done, self.states(), max_ckpt_to_keep=limit, keep_steps=self.kept_steps
        )
        self._saved_step = done

    # -- the end -----------------------------------------------------------------------------------

    def model_folder(self, step: int | None = None) -> Path | None:
        """The model of the newest checkpoint, or of that after `step` steps, if there is one."""
        step = self._saved_step if step is None else step
        if step is None or not self._checkpoint_clusters:
            return None
        role = self._checkpoint_clusters[0].cluster_name
        return checkpoint_folder(self.run_dir, step) / role

    def finish(self, result: str = "", *, model: Path | None = None) -> None:
        """End the run, write the report, and say what came of it or how to go on.

        Args:
            result: what validation says, in one sentence.
            model: the folder of the model to name, if it is not that of the newest checkpoint.
        """
        max_steps = self.pipeline_config.max_steps
        self.close("stopped" if self.is_interrupted else "finished")
        lines = []
        if self.global_step < max_steps:
            lines.append(
                f"Stopped after {self.global_step} of {max_steps} steps: {self._stop_reason}."
            )
        if self.is_interrupted and self._saved_step is not None:
            lines.append(f"To go on: {resume_command(self.run_dir)}")
        if result:
            lines.append(result)
        model = model or self.model_folder()
        if model is not None and (model.parent / PIPELINE).is_dir():
            lines.append(f"Model: {model}")
        report = self._write_report()
        if report is not None:
            lines.append(f"Report: {report}")
        if self._show_progress is not False:
            text = "\n".join(lines) or f"Run: {self.run_dir}"
            Console(highlight=False, soft_wrap=True).print(text, markup=False)

    def _write_report(self) -> Path | None:
        """report.html, where the viewer is installed. A run does not fail if its report does."""
        if importlib.util.find_spec("roll.viewer") is None:
            return None
        try:
            from roll.viewer import build_report

            return build_report([self.run_dir])
        except (OSError, ValueError, ImportError) as error:
            logger.warning("the report could not be written (%s: %s)", type(error).__name__, error)
            return None

    def close(self, status: Status = "stopped") -> None:
        """End workers and trackers and write `status`. Safe to call again; the first one counts."""
        if self.run_log is None:
            return
        self.run_log.close()
        self.run_log = None
        for cluster in self._clusters:
            cluster.shutdown()
        self._folder.update_info(
            status=status,
            last_step=self.global_step,
            ended=now(),
            seconds=round(time.monotonic() - self._started, 3),
            summary=_plain(self.summary),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        stopped = kind is None or issubclass(kind, KeyboardInterrupt)
        self.close("stopped" if stopped else "failed")

    @contextmanager
    def _finishing_on_signals(self) -> Iterator[None]:
        """The first SIGINT or SIGTERM ends the run after its step; the second at once."""
        # Python lets only the main thread handle signals.
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def on_signal(number: int, frame: FrameType | None) -> None:
            if self.is_interrupted:
                raise KeyboardInterrupt
            self._stop_reason = INTERRUPTED
            self.say("Finishing this step, then saving. Once more stops at once.")

        numbers = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, on_signal) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def resume_command(run_dir: Path) -> str:
    """What to type to continue a run."""
    folder = shlex.quote(str(run_dir))
    return f"roll train {shlex.quote(str(run_dir / CONFIG_FILE))} resume_from_checkpoint={folder}"


def _mark_failed(folder: RunFolder) -> None:
    if folder.info().get("status") == "running":
        folder.update_info(status="failed", ended=now())


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """A summary as JSON takes it: numbers that are not finite become None."""
    plain: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            plain[key] = _plain(value)
        else:
            is_finite = not isinstance(value, float) or math.isfinite(value)
            plain[key] = value if is_finite else None
    return plain
