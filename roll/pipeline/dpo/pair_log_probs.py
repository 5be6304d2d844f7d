"""Log-probs of whole answers, for every pair of a data set: computed once, stored, and used again.

The stored file says which pairs and which model it belongs to, so that one that is out of date is
never used.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig

from roll.algorithms.preference_loss import (
    PreferenceLoss,
    completion_mask,
    pair_accuracy,
    sequence_log_probs,
)
from roll.configs.base import plain_values
from roll.configs.model_files import model_of_run, weight_files
from roll.configs.worker_config import WorkerConfig
from roll.datasets.collator import DataCollatorWithPaddingForDPO
from roll.datasets.preference import PreferenceDataset
from roll.distributed.executor.cluster import Cluster
from roll.distributed.scheduler.protocol import DataProto, pad_dataproto_to_divisor, unpad_dataproto
from roll.utils.logging import get_logger
from roll.utils.rollout_log import RolloutLog

logger = get_logger(__name__)

STORED_FILE = "reference_log_probs.safetensors"
NUM_SAMPLES = 16


class PairSamples:
    """A few validation pairs for the run's report, with the log-probs of every token.

    They are spread evenly over the data and the same each time, so that steps can be compared.
    """

    def __init__(
        self, dataset: PreferenceDataset, collator: DataCollatorWithPaddingForDPO, log: RolloutLog
    ) -> None:
        count = min(NUM_SAMPLES, len(dataset))
        self.pairs = [i * len(dataset) // count for i in range(count)]
        self.log = log
        batch = DataProto.from_single_dict(collator([dataset[i] for i in self.pairs]))
        mask_RT = completion_mask(batch["attention_mask"], batch["prompt_id_lens"])
        batch["response_mask"] = mask_RT.long()
        sides = [(pair, side) for pair in self.pairs for side in ("chosen", "rejected")]
        batch["prompt_id"] = np.array([f"pair {pair}" for pair, _ in sides], dtype=object)
        batch["sample_uuid"] = np.array([f"{pair} {side}" for pair, side in sides], dtype=object)
        batch["tag"] = np.array([side for _, side in sides], dtype=object)
        self.batch = batch

    def write(
        self, step: int, result: PreferenceLoss, tokens_RT: Tensor, reference_RT: Tensor | None
    ) -> None:
        """Write the pairs as the samples of a validation.

        Args:
            result: of all pairs of the validation data, in order.
            tokens_RT, reference_RT: (2P, S-1) log-probs of the sampled pairs under policy and
                reference; None where there is no reference.
        """
        rewards_P2 = torch.stack([result.chosen_rewards_P, result.rejected_rewards_P], dim=1)
        rewards_P2 = rewards_P2[self.pairs]
        accuracy_P = pair_accuracy(rewards_P2[:, 0] - rewards_P2[:, 1]).tolist()
        ranked = [{1.0: "right", 0.5: "tie"}.get(accuracy, "wrong") for accuracy in accuracy_P]
        self.batch["response_level_rewards"] = rewards_P2.flatten()
        self.batch["ranked"] = np.repeat(np.array(ranked, dtype=object), 2)
        self.batch["old_log_probs"] = tokens_RT
        # Stored ones may be of other samples.
        if reference_RT is not None and reference_RT.shape == tokens_RT.shape:
            self.batch["ref_log_probs"] = reference_RT
        self.log.write(step, self.batch, split="val")


def compute_pair_log_probs(
    cluster: Cluster,
    dataset: PreferenceDataset,
    collator: DataCollatorWithPaddingForDPO,
    *,
    without_adapter: bool = False,
    label: str | None = None,
    samples: PairSamples | None = None,
) -> tuple[Tensor, Tensor | None]:
    """(2N,) float32: the summed log-probs of every answer, rows as in `dataset`.

    And, (2P, S-1), those of every token of the `samples` among the pairs. Pairs of similar length
    go together, longest first: little padding, and what does not fit fails at once. With a `label`,
    a progress bar shows on a terminal.
    """
    longest_N = dataset.lengths.reshape(-1, 2).max(axis=1)
    order = np.argsort(-longest_N, kind="stable")
    size = cluster.dp_size * cluster.worker_config.infer_batch_size
    batches: Iterable[np.ndarray] = [
        order[start : start + size] for start in range(0, len(order), size)
    ]
    console = Console(stderr=True)
    if label is not None and console.is_terminal:
        batches = track(batches, label, console=console, transient=True)
    sums_R = torch.empty(2 * len(dataset))
    tokens_RT = None if samples is None else torch.zeros(samples.batch["response_mask"].shape)
    for pairs in batches:
        batch = DataProto.from_single_dict(
            collator([dataset[int(i)] for i in pairs]),
            meta_info={"completion_only": True, "disable_adapter": without_adapter},
        )
        log_probs_RT = compute_log_probs(cluster, batch).batch["log_probs"]
        rows = torch.from_numpy(np.stack([2 * pairs, 2 * pairs + 1], axis=1).reshape(-1))
        sums_R[rows], _ = sequence_log_probs(
            log_probs_RT, batch["attention_mask"], batch["prompt_id_lens"]
        )
        if samples is None or tokens_RT is None:
            continue
        width = min(tokens_RT.shape[1], log_probs_RT.shape[1])  # the padding may differ
        for i, pair in enumerate(pairs.tolist()):
            if pair in samples.pairs:
                row = 2 * samples.pairs.index(pair)
                tokens_RT[row : row + 2, :width] = log_probs_RT[2 * i : 2 * i + 2, :width]
    return sums_R, tokens_RT


def compute_log_probs(cluster: Cluster, batch: DataProto) -> Any:
    """`cluster.compute_log_probs` for any number of rows; ranks may split pairs."""
    padded, extra = pad_dataproto_to_divisor(batch, cluster.dp_size)
    return unpad_dataproto(cluster.execute_all_sync("compute_log_probs", padded), extra)


def save_log_probs(folder: Path, log_probs: Mapping[str, Tensor], fingerprint: str) -> None:
    temporary = folder / f".{STORED_FILE}.tmp"
    save_file(dict(log_probs), temporary, metadata={"fingerprint": fingerprint})
    temporary.replace(folder / STORED_FILE)


def load_log_probs(folders: Iterable[Path], fingerprint: str) -> dict[str, Tensor] | None:
    """What the first folder that has it for this fingerprint stores; None where there is none."""
    for folder in folders:
        path = folder / STORED_FILE
        if not path.is_file():
            continue
        try:
            with safe_open(path, framework="pt") as file:
                stored = (file.metadata() or {}).get("fingerprint")
                if stored == fingerprint:
                    return {name: file.get_tensor(name) for name in file.keys()}
        except SafetensorError as error:
            logger.warning("%s cannot be read (%s)", path, error)
            continue
        logger.info("%s belongs to other pairs or another model, and is not used", path)
    return None


def log_probs_fingerprint(
    datasets: Mapping[str, PreferenceDataset], role: WorkerConfig, seed: int
) -> str:
    """Changes with any token of the pairs, any weight of the role's model, and how it computes."""
    args = role.model_args
    settings = plain_values(args)
    settings.pop("model_name_or_path")
    strategy = [role.strategy_name, role.strategy_config]
    parts: dict[str, Any] = {"settings": settings, "strategy": strategy}
    if args.random_init:
        parts["seed"] = seed
    assert args.model_name_or_path is not None  # missing_for_training
    folder = Path(args.model_name_or_path).expanduser()
    if folder.is_dir():
        folder = model_of_run(folder)
        # All of the weights are read: sizes and dates would not notice another training of the
        # same model.
        parts["files"] = {}
        for path in [folder / "config.json", *weight_files(folder)]:
            with path.open("rb") as file:
                parts["files"][path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    else:
        config: Any = AutoConfig.from_pretrained(
            args.model_name_or_path, trust_remote_code=args.trust_remote_code
        )
        parts["hub"] = [args.model_name_or_path, getattr(config, "_commit_hash", None)]
    digest = hashlib.sha256()
    for name, dataset in datasets.items():
        digest.update(f"{name} {dataset.fingerprint()}".encode())
    model = hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()
    digest.update(model.encode())
    return digest.hexdigest()
