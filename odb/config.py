"""Every option of `odb`, once: its name, its default, its meaning, and what is wrong with a wrong value."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from typing import Any

from odb.errors import ConfigError
from odb.mesh import data_parallel_place
from odb.plan.cost import validate_cost_fn
from odb.plan.types import CostFn, PlanConfig

#: Option values by name, first the default.
CHOICES: dict[str, tuple[str, ...]] = {
    "layout": ("padded", "packed"),
    "balance": ("labels",),
    "policy": ("odb", "published"),
    "split_policy": ("even", "published"),
    "tail": ("filler", "skip", "drop"),
    "accum_tail": ("short", "fill"),
    "sharding": ("auto", "elastic", "static"),
    "loss_scaling": ("exact", "approx", "samples", "none"),
    "on_empty": ("error", "skip"),
    "on_sample_error": ("raise", "skip"),
    "on_oversize": ("alone", "error", "skip", "truncate", "split"),
}

_AUTO_BUDGETS_HELD = 64  # a window of 64 full groups: the gain of larger ones is small (docs/concepts.md)
_AUTO_WINDOW = 8192
_AUTO_HELD_BYTES = 1 << 30
_AUTO_STEPS = 256
_MIN_INT: dict[str, int] = {
    "token_budget": 1,
    "window": 1,
    "max_held_tokens": 1,
    "max_held_bytes": 1,
    "max_steps_per_round": 1,
    "max_samples": 1,
    "max_patches": 1,
    "pad_to_multiple_of": 1,
    "rows_multiple": 1,
    "rows_per_batch": 1,
    "grad_accum_steps": 1,
    "sample_quota": 1,
    "dp_rank": 0,
    "dp_world_size": 1,
    "seed": 0,
}
_MAX_INT = 2**48  # so that sums over a window and over all ranks stay far inside an int64
_OPTIONAL = {
    "window",
    "max_held_tokens",
    "max_held_bytes",
    "max_steps_per_round",
    "max_samples",
    "max_patches",
    "sample_quota",
    "dp_rank",
    "dp_world_size",
}
_OPTIONAL_CHOICES = ("balance", "on_oversize")
_BOOLS = ("join", "drop_last", "label_shift", "warmup_probe")
_CALLABLES = ("cost_fn", "length_fn", "loss_tokens_fn", "patches_fn", "filler_fn")


@dataclass(frozen=True, kw_only=True)
class ODBConfig:
    """The options of a loader, checked when it is made.

    Raises:
        ConfigError: a value is out of range or of the wrong type, or two options contradict each other. The text
            names the option, the value and what is possible.
    """

    token_budget: int  # cost of a group at most, in tokens: rows x padded length, or a packed row's length
    window: int | None = None  # samples a rank may hold; `buffer_size` is accepted for it
    max_held_tokens: int | None = None  # the same in tokens
    max_held_bytes: int | None = None  # the same in bytes
    max_steps_per_round: int | None = None  # most steps agreed on at once
    layout: str = "padded"
    rows_per_batch: int = 1  # packed rows of a group, each of token_budget / rows_per_batch tokens
    max_samples: int | None = None  # rows of a group at most; packed: samples of a row
    max_patches: int | None = None  # vision patches of a group at most
    pad_to_multiple_of: int = 1
    rows_multiple: int = 1
    cost_fn: CostFn | None = None  # (rows, padded_len) -> cost, or (intercept, b, alpha), see `polynomial_cost`
    policy: str = "odb"
    split_policy: str = "even"
    balance: str | None = None
    join: bool = True
    sample_quota: int | None = None
    tail: str = "filler"
    drop_last: bool = False
    accum_tail: str = "short"
    sharding: str = "auto"
    dp_rank: int | None = None
    dp_world_size: int | None = None
    loss_scaling: str = "exact"
    grad_accum_steps: int = 1
    ignore_index: int = -100
    label_shift: bool = True
    length_fn: Callable[[Any], int] | None = field(default=None)
    loss_tokens_fn: Callable[[Any], int] | None = field(default=None)
    patches_fn: Callable[[Any], int] | None = field(default=None)
    on_empty: str = "error"
    on_sample_error: str = "raise"
    on_oversize: str | None = None  # "alone", or "error" where the layout is packed
    warmup_probe: bool = False
    filler_fn: Callable[[], Any] | None = field(default=None)
    collate_workers: int | str = "auto"  # processes that share collate_fn; "auto": num_workers, once it proves slow
    seed: int = 0
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        self._check_ints()
        for name in _BOOLS:
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be True or False, got {getattr(self, name)!r}")
        for name, allowed in CHOICES.items():
            if not (name in _OPTIONAL_CHOICES and getattr(self, name) is None):
                _check_choice(name, getattr(self, name), allowed)
        if isinstance(self.cost_fn, (tuple, list)):
            if len(self.cost_fn) != 3:
                raise ConfigError(f"cost_fn takes three coefficients (intercept, b, alpha), got {self.cost_fn!r}")
            object.__setattr__(self, "cost_fn", polynomial_cost(*self.cost_fn))
        for name in _CALLABLES:
            value = getattr(self, name)
            if value is not None and not callable(value):
                raise ConfigError(f"{name} must be callable or None, got {value!r}")
        self._check_numbers()
        self._check_combinations()
        self._check_layout()
        validate_cost_fn(self.plan_config())

    def _check_ints(self) -> None:
        for name, least in _MIN_INT.items():
            value = getattr(self, name)
            if value is None and name in _OPTIONAL:
                continue
            if isinstance(value, bool) or not hasattr(value, "__index__"):
                raise ConfigError(f"{name} must be an integer >= {least}, got {value!r} ({type(value).__name__})")
            if not least <= value <= _MAX_INT:
                raise ConfigError(f"{name} must be an integer from {least} to {_MAX_INT}, got {value!r}")
            object.__setattr__(self, name, int(value))  # numpy integers become plain ones: they travel and are compared

    def _check_numbers(self) -> None:
        if isinstance(self.ignore_index, bool) or not isinstance(self.ignore_index, int):
            raise ConfigError(f"ignore_index must be an integer, got {self.ignore_index!r}")
        count = self.collate_workers
        if count != "auto" and (isinstance(count, (bool, str)) or not hasattr(count, "__index__") or count < 0):
            raise ConfigError(f"collate_workers must be 'auto' or an integer >= 0, got {count!r}")
        if isinstance(self.timeout_s, bool) or not isinstance(self.timeout_s, (int, float)) or not self.timeout_s > 0:
            raise ConfigError(f"timeout_s must be a number of seconds above 0, got {self.timeout_s!r}")

    def _check_combinations(self) -> None:
        if (self.dp_rank is None) != (self.dp_world_size is None):
            raise ConfigError(
                f"dp_rank and dp_world_size go together, got dp_rank={self.dp_rank}, dp_world_size={self.dp_world_size}"
            )
        if self.dp_rank is not None and self.dp_world_size is not None and self.dp_rank >= self.dp_world_size:
            raise ConfigError(f"dp_rank must be below dp_world_size={self.dp_world_size}, got {self.dp_rank}")
        if self.sample_quota is not None and self.join:
            raise ConfigError("sample_quota ends an epoch early, join=True drains it: give join=False with a quota")
        if self.drop_last and self.accum_tail == "fill":
            raise ConfigError("drop_last=True drops the tail, accum_tail='fill' completes it: choose one")
        if self.tail == "drop" and self.accum_tail == "fill":
            raise ConfigError("tail='drop' drops the tail, accum_tail='fill' completes it: choose one")
        if self.tail == "skip" and self.grad_accum_steps > 1:
            raise ConfigError(
                f"tail='skip' leaves out a rank's last micro-steps, so that its gradients of an optimizer step of "
                f"grad_accum_steps={self.grad_accum_steps} might never be reduced: use tail='filler'"
            )
        if self.window is not None and self.window < self.grad_accum_steps:
            raise ConfigError(
                f"window={self.window} samples can't fill grad_accum_steps={self.grad_accum_steps} micro-steps: "
                "make the window at least as large"
            )

    def _check_layout(self) -> None:
        if self.layout == "packed":
            self._check_packed()
        elif self.rows_per_batch > 1:
            raise ConfigError(
                f"rows_per_batch={self.rows_per_batch} is for layout='packed': a padded batch has as many as fit"
            )
        elif self.on_oversize in ("truncate", "split"):
            raise ConfigError(
                f"on_oversize={self.on_oversize!r} is for layout='packed': use 'alone', 'error' or 'skip'"
            )
        if self.balance is None:
            return
        for name in ("cost_fn", "max_patches"):
            if getattr(self, name) is not None:
                raise ConfigError(f"balance='labels' exchanges samples by their tokens: it can't be used with {name}")
        if self.policy == "published":
            raise ConfigError("policy='published' is the paper's rule as it is: it can't be used with balance='labels'")

    def _check_packed(self) -> None:
        for name, only in (("policy", "odb"), ("split_policy", "even"), ("rows_multiple", 1)):
            if getattr(self, name) != only:
                raise ConfigError(
                    f"{name}={getattr(self, name)!r} is for layout='padded': packed rows need {name}={only!r}"
                )
        if self.rows_per_batch > 1 and self.on_oversize == "alone":
            raise ConfigError(
                "on_oversize='alone' needs rows_per_batch=1: beside a longer row all rows of a batch widen"
            )
        if self.rows_per_batch > 1 and self.cost_fn is not None:
            raise ConfigError("rows_per_batch > 1 fixes what a row holds in tokens: it can't be used with cost_fn")
        if self.pad_to_multiple_of > self.token_budget // self.rows_per_batch:
            raise ConfigError(
                f"token_budget={self.token_budget} / rows_per_batch={self.rows_per_batch} is less than "
                f"pad_to_multiple_of={self.pad_to_multiple_of}: no row fits"
            )
        if self.on_oversize in ("truncate", "split") and self.cost_fn is not None:
            raise ConfigError(f"on_oversize={self.on_oversize!r} cuts by tokens: it can't be used with cost_fn")

    @property
    def oversize_policy(self) -> str:
        """`on_oversize`, or what the layout makes of None."""
        return self.on_oversize or ("error" if self.layout == "packed" else "alone")

    def plan_config(self) -> PlanConfig:
        """What planning needs of these options, with automatic values filled in."""
        accum = self.grad_accum_steps
        cap = self.max_steps_per_round or _AUTO_STEPS
        held = self.max_held_tokens or max(_AUTO_BUDGETS_HELD, 2 * accum) * self.token_budget
        return PlanConfig(
            token_budget=self.token_budget,
            window=self.window or _AUTO_WINDOW,
            max_held_tokens=held,
            max_held_bytes=self.max_held_bytes or _AUTO_HELD_BYTES,
            max_steps_per_round=-(-cap // accum) * accum,
            max_samples=self.max_samples,
            max_patches=self.max_patches,
            pad_to_multiple_of=self.pad_to_multiple_of,
            rows_multiple=self.rows_multiple,
            cost_fn=self.cost_fn,
            policy=self.policy,
            split_policy="published" if self.policy == "published" else self.split_policy,
            join=self.join,
            sample_quota=self.sample_quota,
            tail=self.tail,
            drop_last=self.drop_last,
            accum_tail=self.accum_tail,
            on_oversize=self.oversize_policy,
            layout=self.layout,
            rows_per_batch=self.rows_per_batch,
            balance=self.balance,
            loss_scaling=self.scaling,
            grad_accum_steps=accum,
            seed=self.seed,
        )

    @property
    def scaling(self) -> str:
        """`loss_scaling` as it is done: "approx" is a name of the paper's package, and exact here."""
        return "exact" if self.loss_scaling == "approx" else self.loss_scaling


@dataclass(frozen=True)
class polynomial_cost:  # used like a function
    """Cost `intercept + b*L + alpha*b*L**2` of `b` rows padded to `L` tokens, as attention grows with L squared."""

    intercept: float
    b: float
    alpha: float

    def __call__(self, rows: Any, padded_len: Any) -> Any:
        """Elementwise over int64 arrays."""
        return self.intercept + self.b * rows * padded_len + self.alpha * rows * padded_len * padded_len


def _check_choice(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value in allowed:
        return
    hint = _closest(str(value), allowed)
    raise ConfigError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}{hint}")


def _closest(word: str, known: Iterable[str]) -> str:
    match = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean {match[0]!r}?" if match else ""


OPTION_NAMES = tuple(f.name for f in fields(ODBConfig))


def make_config(options: dict[str, Any], other_names: Iterable[str] = ()) -> ODBConfig:
    """`ODBConfig(**options)` with aliases resolved and unknown names refused.

    Args:
        options: option name -> value; `buffer_size` stands for `window`, `device_mesh` for `dp_rank` and
            `dp_world_size`, and `config=ODBConfig(...)` may be given instead of options (not both).
        other_names: further names that the caller knows, for "did you mean".

    Raises:
        ConfigError: an unknown name (the text names the nearest known one), or a wrong value.
    """
    options = dict(options)
    config = options.pop("config", None)
    if config is not None:
        if not isinstance(config, ODBConfig):
            raise ConfigError(f"config must be an ODBConfig, got {type(config).__name__}")
        if options:
            raise ConfigError(f"give config=... or single options, not both; got both config and {sorted(options)}")
        return config
    if "buffer_size" in options:
        if options.get("window") is not None:
            raise ConfigError("buffer_size and window are one option: give window alone")
        options["window"] = options.pop("buffer_size")
    mesh = options.pop("device_mesh", None)
    if mesh is not None:
        if options.get("dp_rank") is not None or options.get("dp_world_size") is not None:
            raise ConfigError("device_mesh says dp_rank and dp_world_size: give the mesh alone, or the two numbers")
        options["dp_rank"], options["dp_world_size"] = data_parallel_place(mesh)
    if options.get("max_patches") == 0:  # 0 means "no bound" in the paper's package
        options["max_patches"] = None
    unknown = [name for name in options if name not in OPTION_NAMES]
    if unknown:
        known = (*OPTION_NAMES, "buffer_size", "device_mesh", *other_names)
        raise ConfigError("; ".join(f"unknown option {name!r}{_closest(name, known)}" for name in unknown))
    if "token_budget" not in options:
        raise ConfigError("token_budget is required: the most tokens (rows x padded length) that one batch may cost")
    return ODBConfig(**options)
