"""Runs examples of the documentation (`docs_runner.py FILE...`) in the setting that the prose takes for granted.

Several files run one after another, each in a process and folder of its own; what it printed, and its exit status in the
last line, goes into a file beside it with `.out` behind its name.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from pathlib import Path
from types import SimpleNamespace

import torch


class Dataset(torch.utils.data.Dataset):
    """60 processed samples of 3 to 122 tokens; the first fifth of each bears no loss."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        length = 3 + (index * 37) % 120
        ids = torch.arange(length) % 16
        labels = ids.clone()
        labels[: length // 5] = -100
        return {"input_ids": ids, "labels": labels}


def collate(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    pad = torch.nn.utils.rnn.pad_sequence
    return {
        "input_ids": pad([s["input_ids"] for s in samples], batch_first=True),
        "labels": pad([s["labels"] for s in samples], batch_first=True, padding_value=-100),
    }


class Model(torch.nn.Module):
    """Predicts the next token of 16; gives `.loss`, the mean over its labels."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(16, 8)
        self.head = torch.nn.Linear(8, 16)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        logits = self.head(self.embed(input_ids))
        # (rows, length - 1, 16) against (rows, length - 1)
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return SimpleNamespace(loss=loss)


def main(path: str) -> None:
    dataset, model = Dataset(), Model()
    setting = {
        "__name__": "__main__",
        "dataset": dataset,
        "collate": collate,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "existing_dataloader": torch.utils.data.DataLoader(dataset, batch_size=4, shuffle=True, collate_fn=collate),
    }
    exec(compile(Path(path).read_text(encoding="utf-8"), path, "exec"), setting)


def in_a_child(path: Path) -> None:
    """Forked, so that the next one needs no import of its own."""
    pid = os.fork()
    if pid:
        os.waitpid(pid, 0)
        return
    signal.alarm(60)
    out = os.open(path.with_suffix(".py.out"), os.O_WRONLY | os.O_CREAT)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.chdir(path.parent)
    status = 0
    try:
        main(str(path))
    except BaseException:
        traceback.print_exc()
        status = 1
    print(f"\nexit status {status}", flush=True)
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    if len(sys.argv) == 2:
        main(sys.argv[1])
    for name in sys.argv[1:] if len(sys.argv) > 2 else ():
        in_a_child(Path(name))
