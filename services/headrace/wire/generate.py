"""Regenerate `wire/v1` from `proto/` (`make proto`). The generated code is committed, so users never need protoc."""

import tempfile
from pathlib import Path

from grpc_tools import protoc

REPOSITORY = Path(__file__).resolve().parents[3]
COMMITTED = Path(__file__).resolve().parent / "v1"


def generate(target: Path) -> None:
    """Write `*_pb2.py`, `*_pb2.pyi` and `*_pb2_grpc.py` for every file under `proto/headrace/v1` into `target`."""
    source = REPOSITORY / "proto"
    protos = sorted((source / "headrace" / "v1").glob("*.proto"))
    with tempfile.TemporaryDirectory() as scratch:
        outputs = [f"--{kind}_out={scratch}" for kind in ("python", "pyi", "grpc_python")]
        failed = protoc.main(["protoc", f"-I{source}", *outputs, *map(str, protos)])
        if failed:
            raise SystemExit(f"protoc failed with exit code {failed}")
        for made in sorted(Path(scratch, "headrace", "v1").iterdir()):
            # protoc derives Python packages from proto paths; ours live one level deeper. The second place is the
            # messages' __module__, without which they cannot be pickled (Ray Serve's gRPC proxy pickles them).
            text = made.read_text(encoding="utf-8")
            for found in ("from headrace.v1 import", "Messages(DESCRIPTOR, 'headrace.v1."):
                text = text.replace(found, found.replace("headrace.v1", "headrace.wire.v1"))
            (target / made.name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    generate(COMMITTED)
