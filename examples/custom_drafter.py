"""Make a drafter for a model and serve it. The default target is a toy that is trained first; it takes about two minutes.

python examples/custom_drafter.py --model toy --out runs/toy-drafter
python examples/custom_drafter.py --model ORG/MODEL --out runs/my-drafter --hours 2
"""

import argparse
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx

from fledge.training.make import make

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default="toy", help="the target: a folder, a hub id or a built-in name; toy: a tiny one")
parser.add_argument("--out", type=Path, default=Path("runs/toy-drafter"))
parser.add_argument("--hours", type=float, default=0.02)
parser.add_argument("--device", default="auto")
options = parser.parse_args()

# The target answers prompts, a drafter is trained on the answers, and `doctor` checks it. After an interruption, run it again.
made = make(options.model, options.out, hours=options.hours, device=options.device)
assert made is not None  # only the other processes of torchrun get None
print(f"drafter: {made.folder}; acceptance length by depth: {made.acceptance_length}")

target = str(options.out / "toy" / "target") if options.model == "toy" else options.model
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
command = [sys.executable, "-m", "fledge", "serve", target, "--drafter", str(made.folder), "--port", str(port)]
command += ["--device", options.device, "--uvicorn-log-level", "warning"]
with subprocess.Popen(command) as server:
    try:
        url = f"http://127.0.0.1:{port}"
        while server.poll() is None:
            try:
                if httpx.get(f"{url}/health").status_code == 200:
                    break
            except httpx.TransportError:
                pass
            time.sleep(0.2)
        message = {"role": "user", "content": "count up from two to twelve"}
        body = {"messages": [message], "max_tokens": 32, "temperature": 0, "include_speculation": True}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).raise_for_status().json()
        print(answer["choices"][0]["message"]["content"])
        print(answer["usage"]["speculation"])
    finally:
        server.terminate()
