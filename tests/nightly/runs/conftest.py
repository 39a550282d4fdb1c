"""The finished runs that the tests of this folder share."""

from documents_runs import odd_folder, over_documents  # noqa: F401
from finished_runs import finished, stale  # noqa: F401
from rooms.training.rsa_runs import calm  # noqa: F401
