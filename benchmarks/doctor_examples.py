"""Runs `fledge doctor` on the shipped drafter, unchanged and with one mistake each: the examples of docs/low-acceptance.md.

python benchmarks/doctor_examples.py --json benchmarks/results/doctor-examples.json
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fledge.bench.doctor import diagnose
from fledge.bench.prompts import DEMO
from fledge.bench.provenance import provenance, write_json
from fledge.checkpoints.drafter_config import LAYER_IDS
from fledge.checkpoints.drafter_files import find_drafter

DRAFTER, MODEL = "smollm2-135m-eagle3.1", "smollm2-135m"
MISTAKES: dict[str, dict[str, Any]] = {
    "as it is": {},
    "wrong layers": {LAYER_IDS: [9, 12, 20]},
    "layers off by one": {LAYER_IDS: [3, 16, 28]},
    "wrong flag": {"norm_output": False},
}


def with_mistake(folder: Path, changes: dict[str, Any]) -> None:
    """Changes keys of config.json, at top level and in `eagle_config`, because drafters have them in both places."""
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config |= changes
    config["eagle_config"] |= {key: value for key, value in changes.items() if key in config["eagle_config"]}
    path.write_text(json.dumps(config), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    found = {}
    for name, changes in MISTAKES.items():
        with TemporaryDirectory() as place:
            folder = Path(place) / "drafter"
            shutil.copytree(find_drafter(DRAFTER), folder)
            with_mistake(folder, changes)
            found[name] = {"changes": changes, **diagnose(folder, MODEL).as_dict()}
        print(f"{name}: {found[name]['fault']}: {found[name]['explanation']}", flush=True)
    content = {"drafter": DRAFTER, "model": MODEL, "runs": found}
    write_json(args.json, content | {"provenance": provenance([prompt.text for prompt in DEMO])})


if __name__ == "__main__":
    main()
