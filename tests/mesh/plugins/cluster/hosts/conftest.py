"""The fixtures that the tests of this folder share."""

from rooms.services.kubernetes_setup import cluster, server  # noqa: F401
from rooms.services.slurm_setup import slurm  # noqa: F401
