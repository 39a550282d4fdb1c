"""The errors a user can meet, as one tree.

    ForgeError
    ├── SpecError        the mesh or config file, or --set: rule, place, remedy   (exit code 2)
    ├── DataError        documents or questions that cannot be used               (exit code 2)
    ├── CheckpointError  a checkpoint that is missing, torn or of another run     (exit code 2)
    ├── StaleTokenError  tokens older than the staleness bound reached the trainer (exit code 1)
    ├── PublishError     a cartridge version that cannot be published or loaded   (exit code 1)
    ├── PlaneError       the tensor plane: a missing key, a failed transport      (exit code 1)
    ├── ControlError     a run that cannot be reached, or refuses what is asked   (exit code 1)
    └── RunError         anything else that ends a run                            (exit code 1)
        └── RanksLostError   one of several ranks that lost the others

All are ValueError or RuntimeError as well, so that callers who know nothing of us still catch
them by the standard names. An `assert` marks our own bugs, never a user's mistake.
"""

from __future__ import annotations


class ForgeError(Exception):
    """Base of every error that Cartridge Forge raises on purpose."""

    exit_code = 1


class SpecError(ForgeError, ValueError):
    """A mesh or config file, or an override, breaks a rule; the message names place and remedy."""

    exit_code = 2


class DataError(ForgeError, ValueError):
    """Documents or questions that cannot be used as given."""

    exit_code = 2


class CheckpointError(ForgeError, ValueError):
    """A checkpoint that is missing, damaged, or belongs to another run."""

    exit_code = 2


class StaleTokenError(ForgeError, RuntimeError):
    """Sampled tokens older than the staleness bound were about to be trained on."""


class PublishError(ForgeError, RuntimeError):
    """A cartridge version could not be published, or a version id was used twice."""


class PlaneError(ForgeError, RuntimeError):
    """The tensor plane failed: a key that is not there, or a transport that broke."""


class ControlError(ForgeError, RuntimeError):
    """A run cannot be reached from outside, or refuses what it is asked."""


class RunError(ForgeError, RuntimeError):
    """A run cannot go on."""


class RanksLostError(RunError):
    """One of several ranks lost the others: another failed, died or was silent for too long."""
