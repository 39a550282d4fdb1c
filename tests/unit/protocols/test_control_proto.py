"""control.proto: what is generated from it is what is committed, and `buf` has nothing to say."""

import subprocess
import sys
from pathlib import Path

import pytest
from grpc_tools import protoc

REPOSITORY = Path(__file__).parents[3]


@pytest.mark.parametrize("name", ["control_pb2.py", "control_pb2.pyi", "control_pb2_grpc.py"])
def test_the_committed_code_is_what_make_proto_writes(name: str, tmp_path: Path) -> None:
    known = Path(protoc.__file__).with_name("_proto")  # google's own, which ours imports
    written = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    sources = [f"-I{REPOSITORY}", f"-I{known}", "cartridge_forge/protocols/wire/control.proto"]
    assert protoc.main(["protoc", *written, *sources]) == 0
    folder = Path("cartridge_forge/protocols/wire")
    fresh, committed = (root / folder / name for root in (tmp_path, REPOSITORY))
    assert fresh.read_bytes() == committed.read_bytes(), "run `make proto`"


def test_buf_finds_no_fault() -> None:
    buf = Path(sys.executable).with_name("buf")
    done = subprocess.run([buf, "lint"], cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("before", "after", "fault"),
    [
        ("", "", ""),
        # A field and a call that are new: whoever does not know them goes on.
        ("message PauseRequest {}", "message PauseRequest {\n  bool at_once = 1;\n}", ""),
        (
            "  uint32 replicas = 2;\n",
            "",
            'field "2" with name "replicas" on message "ScaleRequest"',
        ),
        ("uint32 replicas = 2;", "string replicas = 2;", 'from "uint32" to "string"'),
        ("  rpc Stop(StopRequest) returns (StopResponse);", "", 'RPC "Stop" on service "Control"'),
    ],
    ids=["as it is", "a new field", "a field removed", "another type", "a call removed"],
)
def test_a_change_that_breaks_released_clients_is_found(
    before: str, after: str, fault: str, tmp_path: Path
) -> None:
    buf = Path(sys.executable).with_name("buf")
    text = (REPOSITORY / "protocols/wire/control.proto").read_text()
    assert before in text
    (tmp_path / "protocols/wire").mkdir(parents=True)
    (tmp_path / "buf.yaml").write_text((REPOSITORY / "buf.yaml").read_text())
    (tmp_path / "protocols/wire/control.proto").write_text(text.replace(before, after, 1))
    against = ["--against", REPOSITORY / "protocols/wire/control.binpb"]
    done = subprocess.run(
        [buf, "breaking", *against], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode != 0) == bool(fault), done.stdout + done.stderr
    assert fault in done.stdout
