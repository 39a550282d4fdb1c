"""Where vLLM is not installed everything else imports, and asking for it names the remedy."""

from __future__ import annotations

import subprocess
import sys

HIDE = """
import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "vllm":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Hidden())
"""


def test_everything_else_imports_without_it() -> None:
    code = HIDE + (
        "import actors.vllm.draws, actors.engine_thread, actors.vllm.kv_layout\n"
        "import actors.engine_generator\n"
        "import forge_run.cli, forge_run.launch, training.controller\n"
        "import services.mesh, training.training_run\n"
        "assert 'vllm' not in sys.modules"
    )
    subprocess.run([sys.executable, "-W", "error::ImportWarning", "-c", code], check=True)
