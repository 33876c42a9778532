"""Which data-parallel rank this is, read off a `torch.distributed.device_mesh.DeviceMesh`.

Only the mesh's public face is used (`ndim`, `mesh_dim_names`, `shape`, `get_coordinate`), so that nothing of torch is
imported here.
"""

from __future__ import annotations

from math import prod
from typing import Any

from odb.errors import ConfigError

#: Names by which dimensions that see different data go in FSDP2, HSDP, torchtitan and Accelerate.
DATA_PARALLEL_NAMES = frozenset(
    ("dp", "ddp", "fsdp", "hsdp", "data", "data_parallel", "dp_replicate", "dp_shard", "replicate", "shard", "batch")
)


def data_parallel_place(mesh: Any) -> tuple[int, int]:
    """`(dp_rank, dp_world_size)` of this process.

    Ranks whose coordinates along the data-parallel dimensions are equal get the same batches. Of a mesh with several
    dimensions those named as in `DATA_PARALLEL_NAMES` count, in the mesh's order, the last one fastest; of a mesh with
    one dimension, that one, whatever its name.

    Raises:
        ConfigError: no `DeviceMesh`, this rank isn't in it, or its data-parallel dimensions can't be told by name.
    """
    missing = [name for name in ("ndim", "shape", "get_coordinate", "mesh_dim_names") if not hasattr(mesh, name)]
    if missing:
        raise ConfigError(
            f"device_mesh must be a torch.distributed.device_mesh.DeviceMesh, got {type(mesh).__name__}; "
            "or give dp_rank and dp_world_size"
        )
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ConfigError(f"this rank is not in the device mesh {mesh}: only its members may build the loader")
    dims = _data_parallel_dims(mesh)
    sizes = [int(mesh.shape[dim]) for dim in dims]
    rank = 0
    for dim, size in zip(dims, sizes, strict=True):
        rank = rank * size + int(coordinate[dim])
    return rank, prod(sizes)


def _data_parallel_dims(mesh: Any) -> list[int]:
    if mesh.ndim == 1:
        return [0]
    names = mesh.mesh_dim_names or ()
    dims = [dim for dim, name in enumerate(names) if name in DATA_PARALLEL_NAMES]
    if not dims:
        said = f"its dimensions are named {tuple(names)}" if names else "its dimensions have no names"
        raise ConfigError(
            f"which of the {mesh.ndim} dimensions of device_mesh are data-parallel can't be told ({said}): give the "
            "part that is, such as device_mesh=mesh['dp'], or dp_rank and dp_world_size"
        )
    return dims
