"""Define the errors that a user can meet, as one tree.

    ForgeError
    ├── SpecError        the mesh or config file, or --set: rule, location, remedy (exit code 2)
    ├── DataError        documents or questions that cannot be used               (exit code 2)
    ├── CheckpointError  a checkpoint that is missing, torn or of another run     (exit code 2)
    │   └── DamagedError     one that is torn or was changed, where another may be whole
    ├── StaleTokenError  tokens of an old version, or of other numbers than named (exit code 1)
    ├── PublishError     a cartridge version that cannot be published or loaded   (exit code 1)
    ├── PlaneError       the tensor plane: a missing key, a failed transport      (exit code 1)
    ├── ControlError     a run that cannot be reached, or refuses a request       (exit code 1)
    └── RunError         anything else that ends a run                            (exit code 1)
        ├── HostsEndedError  hosts that have ended, where no others will come
        ├── RanksLostError   one of several ranks that lost the others
        ├── EngineDied       an engine that failed in a step: its process is replaced
        └── EngineKilledError  a request during which two engines died in turn

Every class is a ValueError or RuntimeError as well, so that callers can catch it by the standard
name. An `assert` marks a bug of this project, never a user's mistake.
"""

from __future__ import annotations

import traceback
from pathlib import Path


class ForgeError(Exception):
    """Serve as the base of every error that Cartridge Forge raises on purpose."""

    exit_code = 1


class SpecError(ForgeError, ValueError):
    """Report a rule broken by a mesh or config file, or an override, with location and remedy."""

    exit_code = 2


class DataError(ForgeError, ValueError):
    """Report documents or questions that cannot be used as given."""

    exit_code = 2


class CheckpointError(ForgeError, ValueError):
    """Report a checkpoint that is missing, damaged, or belongs to another run."""

    exit_code = 2


class DamagedError(CheckpointError):
    """Report a checkpoint that does not match its own checksums."""


class StaleTokenError(ForgeError, RuntimeError):
    """Report tokens that were about to be trained on and are older than the staleness bound, or
    were not sampled over the cartridge that they name. `samples` are the ids of some of them."""

    samples: tuple[str, ...] = ()


class PublishError(ForgeError, RuntimeError):
    """Report a cartridge version that cannot be published, or a version id that is used twice."""


class PlaneError(ForgeError, RuntimeError):
    """Report a failure of the tensor plane: a missing key, or a broken transport."""


class ControlError(ForgeError, RuntimeError):
    """Report a run that cannot be reached from outside, or that refuses a request."""


class RunError(ForgeError, RuntimeError):
    """Report a failure that ends a run."""


class HostsEndedError(RunError):
    """Report that a run has no hosts any more, and that their source will provide no others."""


class RanksLostError(RunError):
    """Report that a rank lost the others: another rank failed, died or was silent for too long."""


class EngineDied(RunError):
    """Report that an engine failed in a step and serves no more: its process must be replaced.
    `suspect` says whether the step that failed was over the request that gets this error."""

    def __init__(self, reason: str, suspect: bool = True) -> None:
        super().__init__(reason)
        self.suspect = suspect

    @classmethod
    def of(cls, error: BaseException, suspect: bool = True) -> EngineDied:
        """Return the report of an engine's error, with the place that raised it."""
        raised = traceback.extract_tb(error.__traceback__)[-1:]
        locations = "".join(f" ({Path(at.filename).name}:{at.lineno})" for at in raised)
        died = cls(f"the engine died: {type(error).__name__}: {error}{locations}", suspect)
        died.__cause__ = error
        return died


class EngineKilledError(RunError):
    """Report a request that is not tried again, because two engines in turn died in a step that was
    over it."""


class StopRequested(Exception):
    """Report that a run was stopped by a command, between two steps. Not an error."""
