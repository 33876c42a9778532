"""What a Hugging Face Trainer iterates, and which collator it gets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

from transformers import default_data_collator

from odb.collators import FlattenCollator, PerSample
from odb.errors import ConfigError
from odb.integrations.common import Progress, mask_filler
from odb.loader import ODBDataLoader
from odb.resume import State
from odb.step import STEP_INFO_KEY


def collator_of(collate_fn: Any, options: Mapping[str, Any]) -> Any:
    """The Trainer's collator. Its default stacks samples of one length only: one of odb's takes its place."""
    inner = getattr(collate_fn, "data_collator", collate_fn)  # inside transformers' RemoveColumnsCollator
    if isinstance(inner, PerSample):
        return inner
    if inner is not default_data_collator:
        return collate_fn
    is_one_row = options.get("layout") == "packed" and options.get("rows_per_batch") in (None, 1)
    return FlattenCollator(transformers_names=True) if is_one_row else None


class TrainerLoader:
    """What the Trainer iterates: odb's loader, counted; fillers without labels; epochs as the run has them."""

    def __init__(self, loader: ODBDataLoader, progress: Progress, first_epoch: int) -> None:
        self.loader = loader
        self.progress = progress
        self.first_epoch = first_epoch  # a resumed Trainer counts its epochs from 0 again
        self.dataset = loader.dataset
        self.batch_size = None
        self.sampler = None
        self.batch_sampler = None

    def set_epoch(self, epoch: int) -> None:
        """The next pass is the Trainer's epoch `epoch`."""
        self.progress.begin_epoch(self.first_epoch + epoch)
        self.loader.set_epoch(self.first_epoch + epoch)

    def __iter__(self) -> Iterator[Any]:
        """One epoch; each batch carries its info."""
        for batch, info in self.loader.steps():
            if not isinstance(batch, MutableMapping):
                raise ConfigError(
                    f"a Trainer needs batches that are mappings, collate_fn gave a {type(batch).__name__}"
                )
            mask_filler(batch, info)
            self.progress.add(info)
            batch[STEP_INFO_KEY] = info
            yield batch

    def __len__(self) -> int:
        """Unknown: raises `TypeError`."""
        return len(self.loader)

    def state_dict(self) -> State:
        """See `ODBDataLoader.state_dict`."""
        return self.loader.state_dict()
