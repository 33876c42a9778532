"""Which data-parallel rank a device mesh says this process is."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from odb.config import make_config
from odb.errors import ConfigError
from odb.mesh import data_parallel_place


@dataclass
class Mesh:
    """What `data_parallel_place` reads of a `DeviceMesh`; tests/cases/test_cases_a.py has the real one."""

    shape: tuple[int, ...]
    mesh_dim_names: tuple[str, ...] | None
    coordinate: list[int] | None

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def get_coordinate(self) -> list[int] | None:
        return self.coordinate


@pytest.mark.parametrize(
    ("mesh", "place"),
    [
        (Mesh((4,), None, [3]), (3, 4)),
        (Mesh((4,), ("anything",), [1]), (1, 4)),
        (Mesh((2, 4), ("dp", "tp"), [1, 2]), (1, 2)),
        (Mesh((3, 2, 2), ("pp", "dp_replicate", "dp_shard"), [2, 1, 0]), (2, 4)),
        (Mesh((2, 3, 4), ("dp_replicate", "tp", "dp_shard"), [1, 2, 3]), (7, 8)),
    ],
)
def test_place(mesh: Mesh, place: tuple[int, int]) -> None:
    assert data_parallel_place(mesh) == place


@pytest.mark.parametrize(
    ("mesh", "said"),
    [
        (Mesh((2, 2), ("tp", "pp"), [0, 0]), r"\('tp', 'pp'\).*mesh\['dp'\]"),
        (Mesh((2, 2), None, [0, 0]), "have no names"),
        (Mesh((2,), ("dp",), None), "not in the device mesh"),
        ("cpu", "must be a .*DeviceMesh, got str"),
    ],
)
def test_refused(mesh: object, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        data_parallel_place(mesh)


def test_as_an_option() -> None:
    config = make_config({"token_budget": 8, "device_mesh": Mesh((2, 2), ("dp", "tp"), [1, 0])})
    assert (config.dp_rank, config.dp_world_size) == (1, 2)
    with pytest.raises(ConfigError, match="mesh alone"):
        make_config({"token_budget": 8, "device_mesh": Mesh((2,), None, [1]), "dp_rank": 0})
