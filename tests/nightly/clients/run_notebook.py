"""Run a notebook from its first cell to its last in a folder, and write it with what it shows:
`python run_notebook.py NOTEBOOK FOLDER`, in an environment that has nbclient and ipykernel."""

import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

source, folder = Path(sys.argv[1]), Path(sys.argv[2])
notebook = nbformat.read(source, as_version=4)
NotebookClient(notebook, timeout=3600, resources={"metadata": {"path": str(folder)}}).execute()
nbformat.write(notebook, folder / source.name)
