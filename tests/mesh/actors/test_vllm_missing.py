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
        "from cartridge_forge.plugins.vllm import draws, kv_layout\n"
        "import cartridge_forge.plugins.decoding.engine_thread\n"
        "import cartridge_forge.actors.engine_generator\n"
        "import cartridge_forge.forge_run.cli, cartridge_forge.forge_run.launch\n"
        "import cartridge_forge.training.controller\n"
        "import cartridge_forge.services.mesh, cartridge_forge.training.training_run\n"
        "assert 'vllm' not in sys.modules"
    )
    subprocess.run([sys.executable, "-W", "error::ImportWarning", "-c", code], check=True)
