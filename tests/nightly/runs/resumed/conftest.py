"""A finished run over documents, to compare with."""

from documents_runs import odd_folder, over_documents  # noqa: F401
from rooms.training.rsa_runs import calm  # noqa: F401
