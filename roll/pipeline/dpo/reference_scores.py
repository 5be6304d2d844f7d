"""Log-probabilities of whole completions, for every pair of a data set: made once, stored, and used again.

The stored file says which pairs and which model it belongs to, so that one that is out of date is never used.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
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

from roll.algorithms.preference_loss import sequence_log_probs
from roll.configs.config_model import plain_values
from roll.configs.model_files import weight_files
from roll.configs.worker_config import WorkerConfig
from roll.datasets.collator import DataCollatorWithPaddingForDPO
from roll.datasets.preference import PreferenceDataset
from roll.distributed.executor.cluster import Cluster
from roll.distributed.scheduler.protocol import DataProto, pad_dataproto_to_divisor, unpad_dataproto
from roll.utils.logging import get_logger

logger = get_logger(__name__)

SCORES_FILE = "reference_log_probs.safetensors"


def score_pairs(
    cluster: Cluster,
    dataset: PreferenceDataset,
    collator: DataCollatorWithPaddingForDPO,
    meta_info: Mapping[str, Any],
    *,
    label: str | None = None,
    keep: Callable[[np.ndarray, Tensor], None] | None = None,
) -> Tensor:
    """(2N,) float32: the summed log-probability of every completion under the cluster's model, rows as in `dataset`.

    Pairs of similar length go together, longest first: little padding, and what does not fit fails at once. With a
    `label`, a progress bar shows on a terminal. `keep` sees the log-probs of every token before they are summed: it is
    called with the pairs of each batch, (P,), and their log-probs, (2P, S-1).
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
    for pairs in batches:
        batch = DataProto.from_single_dict(
            collator([dataset[int(i)] for i in pairs]), meta_info=dict(meta_info)
        )
        log_probs_RT = compute_log_probs(cluster, batch).batch["log_probs"]
        if keep is not None:
            keep(pairs, log_probs_RT)
        rows = torch.from_numpy(np.stack([2 * pairs, 2 * pairs + 1], axis=1).reshape(-1))
        sums_R[rows], _ = sequence_log_probs(
            log_probs_RT, batch["attention_mask"], batch["prompt_id_lens"]
        )
    return sums_R


def compute_log_probs(cluster: Cluster, batch: DataProto) -> Any:
    """`cluster.compute_log_probs` for any number of rows: each row stands alone, so ranks may split a pair."""
    padded, extra = pad_dataproto_to_divisor(batch, cluster.dp_size)
    return unpad_dataproto(cluster.execute_all_sync("compute_log_probs", padded), extra)


# ---------------------------------------------------------------------------------------------------------------------
# Storing


def save_scores(folder: Path, scores: Mapping[str, Tensor], fingerprint: str) -> None:
    temporary = folder / f".{SCORES_FILE}.tmp"
    save_file(dict(scores), temporary, metadata={"fingerprint": fingerprint})
    temporary.replace(folder / SCORES_FILE)


def load_scores(folders: Iterable[Path], fingerprint: str) -> dict[str, Tensor] | None:
    """The stored scores of the first folder that has them for this fingerprint; None where there are none."""
    for folder in folders:
        path = folder / SCORES_FILE
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


def scores_fingerprint(
    datasets: Mapping[str, PreferenceDataset], role: WorkerConfig, seed: int
) -> str:
    """Changes with any token of the pairs, any weight of the role's model, and how the model computes."""
    digest = hashlib.sha256()
    for name, dataset in datasets.items():
        digest.update(f"{name} {dataset.fingerprint()}".encode())
    digest.update(_model_fingerprint(role, seed).encode())
    return digest.hexdigest()


def _model_fingerprint(role: WorkerConfig, seed: int) -> str:
    args = role.model_args
    settings = {
        name: value for name, value in plain_values(args).items() if name != "model_name_or_path"
    }
    parts: dict[str, Any] = {
        "settings": settings,
        "strategy": [role.strategy_name, role.strategy_config],
    }
    if args.random_init:
        parts["seed"] = seed
    assert args.model_name_or_path is not None  # missing_for_training
    folder = Path(args.model_name_or_path).expanduser()
    if folder.is_dir():
        # All of the weights are read: sizes and dates would not notice another training of the same model.
        parts["files"] = {
            file.name: _file_digest(file)
            for file in [folder / "config.json", *weight_files(folder)]
        }
    else:
        config: Any = AutoConfig.from_pretrained(
            args.model_name_or_path, trust_remote_code=args.trust_remote_code
        )
        parts["hub"] = [args.model_name_or_path, getattr(config, "_commit_hash", None)]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
