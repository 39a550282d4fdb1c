"""control.proto: what is generated from it is what is committed, and `buf` has nothing to say."""

import subprocess
import sys
from pathlib import Path

import pytest
from grpc_tools import protoc

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["control_pb2.py", "control_pb2.pyi", "control_pb2_grpc.py"])
def test_the_committed_code_is_what_make_proto_writes(name: str, tmp_path: Path) -> None:
    known = Path(protoc.__file__).with_name("_proto")  # google's own, which ours imports
    written = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    sources = [f"-I{REPOSITORY}", f"-I{known}", "protocols/control.proto"]
    assert protoc.main(["protoc", *written, *sources]) == 0
    fresh, committed = (root / "protocols" / name for root in (tmp_path, REPOSITORY))
    assert fresh.read_bytes() == committed.read_bytes(), "run `make proto`"


def test_buf_finds_no_fault() -> None:
    buf = Path(sys.executable).with_name("buf")
    done = subprocess.run([buf, "lint"], cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
