"""The hot operators on one GPU: time, extra memory, error against float64, and ratios to floors,
bounds and peers.

    PYTHONPATH=. python benchmarks/gpu.py                 # prints the table, writes benchmarks/results/h200.json
    PYTHONPATH=. python benchmarks/gpu.py --readme        # writes the table of that file into benchmarks/README.md
    PYTHONPATH=. python benchmarks/gpu.py --quick         # smaller shapes, nothing is written

Floors are what no version can beat: the matrix products themselves, or the bytes at the bandwidth
of a large copy. Peers take part if they are installed: TRL, cut-cross-entropy, Liger, verl. "plain
torch" is the way of ROLL: linear, float32 log_softmax, gather. "torch version" is roll's own
operator without kernels.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import gpu_scans
import torch
import torch.nn.functional as F
from gpu_harness import (
    RESULTS,
    Bound,
    Row,
    Turns,
    Way,
    copy_bandwidth,
    environment,
    load,
    measure,
    relative_error,
    save,
    table,
)
from gpu_peers import linear_peers, logits_peers, torch_version, without_graph
from torch import Tensor

from roll.ops.linear_log_probs import linear_log_probs, loss_in_parts
from roll.ops.linear_logits import LinearLogits
from roll.ops.log_probs import log_probs_and_entropy, next_token_log_probs

GIB = 2**30
README = Path(__file__).parent / "README.md"
MARKS = ("<!-- gpu table: written by benchmarks/gpu.py --readme -->", "<!-- end of gpu table -->")
KEEP_ALL = 1 << 40


@dataclass
class Head:
    """Hidden states, a head and labels, as a model of 7B parameters has them; gradients that arrive
    at the results."""

    hidden: Tensor
    weight: Tensor
    labels: Tensor
    grad_log_probs: Tensor
    grad_entropy: Tensor
    half: Tensor  # selects every second position on average

    @classmethod
    def random(cls, tokens: int, hidden: int, vocab: int) -> Head:
        half = torch.zeros(tokens, dtype=torch.bool, device="cuda")
        half[torch.randperm(tokens, device="cuda")[: tokens // 2]] = True
        return cls(
            hidden=torch.randn(
                tokens, hidden, device="cuda", dtype=torch.bfloat16
            ).requires_grad_(),
            weight=(
                torch.randn(vocab, hidden, device="cuda", dtype=torch.bfloat16) * hidden**-0.5
            ).requires_grad_(),
            labels=torch.randint(0, vocab, (tokens,), device="cuda"),
            grad_log_probs=torch.randn(tokens, device="cuda"),
            grad_entropy=0.01 * torch.randn(tokens, device="cuda"),
            half=half,
        )

    @property
    def shape(self) -> str:
        return (
            f"{self.hidden.shape[0]:,} x {self.hidden.shape[1]:,} x {self.weight.shape[0]:,} bf16"
        )

    @property
    def gradient_bytes(self) -> int:
        return self.hidden.nbytes + self.weight.nbytes

    def clear(self) -> None:
        self.hidden.grad = self.weight.grad = None

    def gradients(self) -> list[Tensor]:
        grads = [leaf.grad for leaf in (self.hidden, self.weight)]
        self.clear()
        return [grad for grad in grads if grad is not None]


# -- log-probs from hidden states
# --------------------------------------------------------------------------------------


def exact_linear(head: Head) -> tuple[list[Tensor], list[Tensor]]:
    """([log-probs, entropy], [gradient of hidden, of weight] for the gradient of the log-probs),
    all in float64."""
    hidden, weight = head.hidden.detach().double(), head.weight.detach().double()
    results: list[list[Tensor]] = [[], []]
    grad_hidden, grad_weight = torch.empty_like(hidden), torch.zeros_like(weight)
    for start in range(0, hidden.shape[0], 1024):
        rows = slice(start, start + 1024)
        logs = torch.log_softmax(hidden[rows] @ weight.t(), -1)
        labels = head.labels[rows].unsqueeze(-1)
        results[0].append(logs.gather(-1, labels).squeeze(-1))
        results[1].append(-(logs.exp() * logs).sum(-1))
        grad = logs.exp_().neg_()
        grad.scatter_add_(1, labels, torch.ones_like(labels, dtype=grad.dtype))
        grad *= head.grad_log_probs[rows].double().unsqueeze(-1)
        grad_hidden[rows] = grad @ weight
        grad_weight.addmm_(grad.t(), hidden[rows])
    return [torch.cat(parts) for parts in results], [grad_hidden, grad_weight]


def linear_errors(head: Head) -> dict[str, tuple[float, float]]:
    """(ours, plain torch): the larger relative error of the results and of the gradients."""
    exact_results, exact_grads = exact_linear(head)

    def worst(found: list[Tensor], exact: list[Tensor]) -> float:
        return max(relative_error(a, b) for a, b in zip(found, exact, strict=True))

    log_probs, entropy = linear_log_probs(head.hidden, head.weight, head.labels, with_entropy=True)
    assert entropy is not None
    log_probs.backward(head.grad_log_probs)
    ours = (
        worst([log_probs.detach(), entropy.detach()], exact_results),
        worst(head.gradients(), exact_grads),
    )
    linear_log_probs(head.hidden, head.weight, head.labels, keep_bytes=KEEP_ALL)[0].backward(
        head.grad_log_probs
    )
    one_pass = worst(head.gradients(), exact_grads)
    rows = torch.log_softmax(F.linear(head.hidden, head.weight).float(), -1)
    log_probs = rows.gather(-1, head.labels.unsqueeze(-1)).squeeze(-1)
    with torch.no_grad():
        entropy = -(rows.exp() * rows).sum(-1)
    log_probs.backward(head.grad_log_probs)
    plain = (
        worst([log_probs.detach(), entropy], exact_results),
        worst(head.gradients(), exact_grads),
    )
    return {
        "forward": (ours[0], plain[0]),
        "backward": (ours[1], plain[1]),
        "one pass": (one_pass, plain[1]),
    }


def linear_rows(head: Head, rounds: int) -> list[Row]:
    hidden, weight, labels = head.hidden, head.weight, head.labels
    errors = linear_errors(head)
    torch.cuda.empty_cache()
    logits = torch.empty(hidden.shape[0], weight.shape[0], device="cuda", dtype=torch.bfloat16)
    grad_hidden, grad_weight = torch.empty_like(hidden), torch.empty_like(weight)

    def products(number: int) -> None:
        """One for the logits, two for the gradients; the fourth makes the logits again."""
        with torch.no_grad():
            for _ in range(2 if number == 4 else 1):
                torch.mm(hidden, weight.t(), out=logits)
            if number >= 3:
                torch.mm(logits, weight, out=grad_hidden)
                torch.mm(logits.t(), hidden, out=grad_weight)

    def ours(
        backward: bool, mask: Tensor | None = None, with_entropy: bool = False, keep_bytes: int = 0
    ) -> None:
        with torch.set_grad_enabled(backward):
            log_probs, entropy = linear_log_probs(
                hidden, weight, labels, mask=mask, with_entropy=with_entropy, keep_bytes=keep_bytes
            )
        if backward:
            results = [log_probs] if entropy is None else [log_probs, entropy]
            torch.autograd.backward(
                results, [head.grad_log_probs, head.grad_entropy][: len(results)]
            )
            head.clear()

    def trained(way: Callable[[], Tensor]) -> Way:
        def train() -> None:
            result = way()
            result.backward(head.grad_log_probs.view_as(result) if result.ndim else None)
            head.clear()

        return train

    def reference(backward: bool) -> None:
        with torch_version():
            ours(backward, with_entropy=not backward)

    peers = linear_peers(hidden, weight, labels)
    forward = measure(
        {
            "one GEMM": lambda: products(1),
            "ours": lambda: ours(False, with_entropy=True),
            "torch version": lambda: reference(False),
            **{name: without_graph(way) for name, way in peers.items()},
        },
        rounds=rounds,
    )
    training = measure(
        {
            "three GEMMs": lambda: products(3),
            "four GEMMs": lambda: products(4),
            "ours": lambda: ours(True),
            "with entropy": lambda: ours(True, with_entropy=True),
            "one pass": lambda: ours(True, keep_bytes=KEEP_ALL),
            "half": lambda: ours(True, mask=head.half),
            "half, one pass": lambda: ours(True, mask=head.half, keep_bytes=KEEP_ALL),
            "torch version": lambda: reference(True),
            **{name: trained(way) for name, way in peers.items()},
        },
        rounds=rounds,
    )
    names = {"torch version": None, **peers}

    def row(
        operator: str,
        turns: dict[str, Turns],
        name: str,
        floor: str,
        error: str | None,
        bounds: list[Bound],
        subtract: int = 0,
        with_peers: bool = False,
    ) -> Row:
        mine = turns[name]
        shown = names if with_peers else {}
        return Row(
            operator=operator,
            shape=head.shape,
            ms=mine.ms,
            extra_bytes=mine.extra_bytes - subtract,
            error=errors[error][0] if error else None,
            reference_error=errors[error][1] if error else None,
            floor=floor,
            of_floor=mine.of(turns[floor]),
            peers={other: turns[other].of(mine) for other in shown},
            peer_bytes={other: turns[other].extra_bytes - subtract for other in shown},
            bounds=bounds,
        )

    def time_bound(turns: dict[str, Turns], name: str, floor: str, at_most: float = 1.15) -> Bound:
        return Bound(f"of {floor}", turns[name].of(turns[floor]), at_most=at_most)

    gradients = head.gradient_bytes
    extra = (training["ours"].extra_bytes - gradients) / GIB
    return [
        row(
            "linear_log_probs + entropy, forward", forward, "ours", "one GEMM", "forward",
            [time_bound(forward, "ours", "one GEMM"), Bound("extra GiB", forward["ours"].extra_bytes / GIB, 0.35)],
            with_peers=True,
        ),
        row(
            "linear_log_probs, forward + backward", training, "ours", "four GEMMs", "backward",
            [time_bound(training, "ours", "four GEMMs"), Bound("extra GiB", extra, 0.4)],
            subtract=gradients, with_peers=True,
        ),
        row("the same with entropy", training, "with entropy", "four GEMMs", None, [], subtract=gradients),
        row(
            "the same, one pass (logits kept)", training, "one pass", "three GEMMs", "one pass",
            [time_bound(training, "one pass", "three GEMMs")],
            subtract=gradients, with_peers=True,
        ),
        row(
            "the same, half of the positions masked", training, "half", "four GEMMs", None,
            [time_bound(training, "half", "ours", 0.55)], subtract=gradients,
        ),
        row(
            "half masked, one pass", training, "half, one pass", "three GEMMs", None,
            [time_bound(training, "half, one pass", "one pass", 0.55)], subtract=gradients,
        ),
    ]  # fmt: skip


def parts_row(head: Head, rounds: int) -> Row:
    """One pass over many tokens, a quarter of them at a time, as `train_step` does it: a quarter is
    a row of a batch; the loss is the sum of its log-probs times their gradients."""
    num_parts, length = 4, head.hidden.shape[0] // 4
    ids = torch.cat([head.labels[:1], head.labels[:-1]]).view(num_parts, length)
    mask = torch.ones_like(ids)
    # What follows the last token of a row is not in the batch.
    head.grad_log_probs.view(num_parts, length)[:, -1] = 0.0
    slopes = head.grad_log_probs.view(num_parts, length)[:, :-1]
    products_out = torch.empty(
        head.hidden.shape[0], head.weight.shape[0], device="cuda", dtype=torch.bfloat16
    )
    grads_out = [torch.empty_like(head.hidden), torch.empty_like(head.weight)]

    def products() -> None:
        with torch.no_grad():
            torch.mm(head.hidden, head.weight.t(), out=products_out)
            torch.mm(products_out, head.weight, out=grads_out[0])
            torch.mm(products_out.t(), head.hidden, out=grads_out[1])

    def loss_of_rows(part: LinearLogits, rows: slice) -> Tensor:
        log_probs, _ = next_token_log_probs(part, ids[rows], mask[rows], keep_bytes=KEEP_ALL)
        return (log_probs * slopes[rows]).sum()

    def train() -> None:
        output = LinearLogits(head.hidden.view(num_parts, length, -1), head.weight)
        loss_in_parts(output, [slice(i, i + 1) for i in range(num_parts)], loss_of_rows).backward()

    def ours() -> None:
        train()
        head.clear()

    turns = measure({"three GEMMs": products, "ours": ours}, rounds=rounds)
    train()
    found, plain, exact = (
        head.gradients(),
        plain_gradients(head, products_out),
        exact_linear(head)[1],
    )
    ratio = turns["ours"].of(turns["three GEMMs"])
    return Row(
        operator="one pass over more tokens, a quarter at a time",
        shape=head.shape,
        ms=turns["ours"].ms,
        extra_bytes=turns["ours"].extra_bytes - head.gradient_bytes,
        error=max(relative_error(one, other) for one, other in zip(found, exact, strict=True)),
        reference_error=max(
            relative_error(one, other) for one, other in zip(plain, exact, strict=True)
        ),
        floor="three GEMMs",
        of_floor=ratio,
        bounds=[Bound("of three GEMMs", ratio, at_most=1.15)],
    )


def plain_gradients(head: Head, logits: Tensor) -> list[Tensor]:
    """By bfloat16 products of whole matrices, float32 in between, with the logits in the memory of
    `logits`."""
    with torch.no_grad():
        torch.mm(head.hidden, head.weight.t(), out=logits)
        for start in range(0, logits.shape[0], 1024):
            rows = slice(start, start + 1024)
            part = torch.softmax(logits[rows].float(), -1).neg_()
            labels = head.labels[rows].unsqueeze(-1)
            part.scatter_add_(1, labels, torch.ones_like(labels, dtype=part.dtype))
            logits[rows] = part.mul_(head.grad_log_probs[rows].unsqueeze(-1))
        return [logits @ head.weight, logits.t() @ head.hidden]


# -- log-probs from logits that exist
# ----------------------------------------------------------------------------------


def logits_rows(head: Head, rounds: int, bandwidth: float) -> list[Row]:
    labels = head.labels
    with torch.no_grad():
        logits = F.linear(head.hidden, head.weight)
    leaf = logits.clone().requires_grad_()
    grads = [head.grad_log_probs, head.grad_entropy]
    pass_ms = logits.nbytes / bandwidth * 1000

    def ours(backward: bool, source: Tensor = leaf, overwrite: bool = False) -> None:
        with torch.set_grad_enabled(backward):
            log_probs, entropy = log_probs_and_entropy(source, labels, overwrite_logits=overwrite)
        assert entropy is not None
        if backward:
            torch.autograd.backward([log_probs, entropy], grads)
            leaf.grad = None

    def in_place() -> None:
        scratch = leaf.detach().requires_grad_()  # the same memory, whose values no longer matter
        ours(True, scratch, overwrite=True)

    def trained(way: Callable[[], Tensor]) -> Way:
        def train() -> None:
            way().backward(head.grad_log_probs)
            leaf.grad = None

        return train

    def reference(backward: bool) -> None:
        with torch_version():
            ours(backward)

    peers = logits_peers(leaf, labels)
    errors = logits_errors(head, leaf)
    forward = measure(
        {
            "ours": lambda: ours(False),
            "torch version": lambda: reference(False),
            **{name: without_graph(way) for name, way in peers.items()},
        },
        rounds=rounds,
    )
    training = measure(
        {
            "ours": lambda: ours(True),
            "torch version": lambda: reference(True),
            **{name: trained(way) for name, way in peers.items()},
        },
        rounds=rounds,
    )
    overwriting = measure({"in place": in_place}, rounds=rounds)
    names = ["torch version", *peers]
    shape = f"{logits.shape[0]:,} x {logits.shape[1]:,} bf16"

    def row(
        operator: str,
        turns: dict[str, Turns],
        name: str,
        passes: int,
        at_most: float | None,
        error: int,
    ) -> Row:
        floor = "one read" if passes == 1 else "two reads and one write"
        ratio = turns[name].ms / (passes * pass_ms)
        others = names if name == "ours" else []
        return Row(
            operator=operator,
            shape=shape,
            ms=turns[name].ms,
            extra_bytes=turns[name].extra_bytes,
            error=errors[0][error],
            reference_error=errors[1][error],
            floor=f"{floor} at copy bandwidth",
            of_floor=ratio,
            peers={other: turns[other].of(turns[name]) for other in others},
            peer_bytes={other: turns[other].extra_bytes for other in others},
            bounds=[] if at_most is None else [Bound(f"of {floor}", ratio, at_most=at_most)],
        )

    return [
        row("log-probs + entropy from logits, forward", forward, "ours", 1, 1.3, 0),
        row("log-probs + entropy from logits, forward + backward", training, "ours", 3, 1.4, 1),
        row("the same, gradient in place", overwriting, "in place", 3, 1.4, 1),
    ]


def logits_errors(head: Head, leaf: Tensor, rows: int = 512) -> list[tuple[float, float]]:
    """[ours, plain torch]: relative error of the results and of the gradient, on the first rows."""
    part = leaf.detach()[:rows]
    labels = head.labels[:rows]
    grads = [head.grad_log_probs[:rows], head.grad_entropy[:rows]]
    found: list[list[Tensor]] = []
    for way in ("exact", "ours", "plain"):
        source = (part.double() if way == "exact" else part.clone()).requires_grad_()
        if way == "ours":
            log_probs, entropy = log_probs_and_entropy(source, labels)
            assert entropy is not None
        else:
            logs = torch.log_softmax(source if way == "exact" else source.float(), -1)
            log_probs = logs.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
            entropy = -(logs.exp() * logs).sum(-1)
        torch.autograd.backward([log_probs, entropy], [grad.to(log_probs.dtype) for grad in grads])
        assert source.grad is not None
        found.append([log_probs.detach(), entropy.detach(), source.grad])
    exact = found[0]
    return [
        (
            max(relative_error(results[0], exact[0]), relative_error(results[1], exact[1])),
            relative_error(results[2], exact[2]),
        )
        for results in found[1:]
    ]


# -- the whole
# ---------------------------------------------------------------------------------------------------------


def log_prob_rows(quick: bool, bandwidth: float) -> list[Row]:
    rounds = 3 if quick else 10
    head = Head.random(1024, 512, 32_001) if quick else Head.random(8192, 3584, 151_936)
    rows = linear_rows(head, rounds)
    torch.cuda.empty_cache()
    rows += logits_rows(head, rounds, bandwidth)
    del head
    torch.cuda.empty_cache()
    rows.append(
        parts_row(
            Head.random(4096, 512, 32_001) if quick else Head.random(32_768, 3584, 151_936), rounds
        )
    )
    torch.cuda.empty_cache()
    return rows


def write_readme() -> None:
    """Puts the table of the results file between the marks of benchmarks/README.md."""
    facts, rows = load()
    packages = ", ".join(f"{name} {number}" for name, number in facts["packages"].items())
    where = f"{facts['device']}, CUDA {facts['cuda']}, copy {facts['copy_tb_per_s']:.2f} TB/s, {facts['date'][:10]}"
    text = f"{where}; {packages}"
    readme = README.read_text()
    before, rest = readme.split(MARKS[0])
    after = rest.split(MARKS[1])[1]
    README.write_text(f"{before}{MARKS[0]}\n{text}\n\n{table(rows)}\n{MARKS[1]}{after}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="small shapes, to see that everything runs"
    )
    parser.add_argument(
        "--only", choices=("log_probs", "scans"), help="one half of the table; nothing is written"
    )
    parser.add_argument(
        "--readme", action="store_true", help="copy the table of the results file into README.md"
    )
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if arguments.readme:
        write_readme()
        return 0
    if not torch.cuda.is_available():
        print("benchmarks/gpu.py needs an NVIDIA GPU")
        return 2
    torch.manual_seed(0)
    bandwidth = copy_bandwidth()
    rows: list[Row] = []
    if arguments.only != "scans":
        rows += log_prob_rows(arguments.quick, bandwidth)
    if arguments.only != "log_probs":
        rows += gpu_scans.rows(torch.device("cuda"))
    facts = environment()
    print(f"{facts['device']}, {facts['packages']}, copy {bandwidth / 1e12:.2f} TB/s\n")
    print(table(rows))
    if not arguments.quick and arguments.only is None:
        save(rows, {"copy_tb_per_s": bandwidth / 1e12}, arguments.output)
        print(f"\nwritten to {arguments.output}")
    return 0 if arguments.quick or all(row.holds for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
