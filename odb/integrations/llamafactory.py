"""LLaMA-Factory: a key in its YAML file, and this module in place of its command.

    # train.yaml, as ever, and
    odb:
      token_budget: 8192

    torchrun --standalone --nproc-per-node 8 -m odb.integrations.llamafactory train.yaml

or, in a program, `run_exp({..., "odb": {"token_budget": 8192}})`. Stages `sft` and `pt`. Templates, datasets, collators,
adapters and quantization stay LLaMA-Factory's: its trainer class gets `odb.integrations.hf.ODBTrainerMixin` while it runs.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from odb.errors import ConfigError
from odb.integrations.hf import ODBTrainerMixin

#: Stage -> where LLaMA-Factory makes the stage's trainer, and its class's name there.
TRAINERS = {
    "sft": ("llamafactory.train.sft.workflow", "CustomSeq2SeqTrainer"),
    "pt": ("llamafactory.train.pt.workflow", "CustomTrainer"),
}
#: LLaMA-Factory's collator of stage `sft` pads to a multiple of this.
_SFT_MULTIPLE = 8


def run_exp(args: Mapping[str, Any], callbacks: list[Any] | None = None) -> None:
    """`llamafactory.train.tuner.run_exp` with `odb`'s loader.

    Args:
        args: LLaMA-Factory's, and under "odb" the arguments of `odb.integrations.hf.enable_odb`.
        callbacks: handed on.

    Raises:
        ConfigError: no "odb" among the arguments, a stage without plain samples, or packing.
    """
    plain = dict(args)
    options = plain.pop("odb", None)
    if not isinstance(options, Mapping) or "token_budget" not in options:
        raise ConfigError(
            f"the configuration needs a key odb with at least a token_budget, got odb={options!r}; without odb, run "
            "llamafactory-cli train"
        )
    stage = plain.get("stage", "sft")
    _check(stage, plain)
    tuner = importlib.import_module("llamafactory.train.tuner")
    with trainer_of(stage, options):
        tuner.run_exp(plain, callbacks)


@contextmanager
def trainer_of(stage: str, options: Mapping[str, Any]) -> Iterator[type]:
    """As long as it lasts, trainers that LLaMA-Factory makes for this stage have `odb` enabled."""
    place, name = TRAINERS[stage]
    workflow = importlib.import_module(place)
    parent = getattr(workflow, name)
    setattr(workflow, name, with_odb(parent, stage, options))
    try:
        yield getattr(workflow, name)
    finally:
        setattr(workflow, name, parent)


def with_odb(parent: type, stage: str, options: Mapping[str, Any]) -> type:
    """A trainer class of LLaMA-Factory's with the mixin, its options given."""
    given = dict({"pad_to_multiple_of": _SFT_MULTIPLE} if stage == "sft" else {}) | dict(options)

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        finetuning = kwargs.get("finetuning_args")
        # That loss is a mean per batch, which nothing in the trainer's attributes tells.
        loss = {"trainer_loss": "mean"} if getattr(finetuning, "use_asft_loss", False) else {}
        ODBTrainerMixin.__init__(self, *args, odb=loss | given, **kwargs)

    return type(f"ODB{parent.__name__}", (ODBTrainerMixin, parent), {"__init__": init, "__module__": parent.__module__})


def _check(stage: str, args: Mapping[str, Any]) -> None:
    if stage not in TRAINERS:
        raise ConfigError(
            f"stage {stage!r} can't be used with odb: its collator makes several rows of a sample. Possible: "
            f"{', '.join(TRAINERS)}"
        )
    packing = [name for name in ("packing", "neat_packing") if args.get(name)]
    if packing:
        raise ConfigError(
            f"{' and '.join(packing)} cut samples into rows of equal length before odb sees them: leave it out"
        )


def main() -> None:
    """`[train] FILE.yaml [key=value ...]`, as `llamafactory-cli train` takes them."""
    if sys.argv[1:2] == ["train"]:
        del sys.argv[1]
    if len(sys.argv) < 2 or not sys.argv[1].endswith((".yaml", ".yml", ".json")):
        raise SystemExit("usage: python -m odb.integrations.llamafactory [train] FILE.yaml [key=value ...]")
    parser = importlib.import_module("llamafactory.hparams.parser")
    run_exp(parser.read_args())


if __name__ == "__main__":
    main()
