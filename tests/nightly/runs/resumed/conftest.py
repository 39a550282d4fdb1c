"""A finished run over documents, to compare with."""

from documents_runs import odd_folder, over_documents  # noqa: F401
