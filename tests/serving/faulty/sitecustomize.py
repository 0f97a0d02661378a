"""Makes engine steps fail as the file $FLEDGE_TEST_FAULT says, in any process that has this folder on its PYTHONPATH.

The file contains the number of steps that succeed, the number that fail after them, and the name of a fault. Each step
decrements one of them. Without the file no step fails.
"""

import importlib.util
import os
import signal
import sys


def _fail(fault: str) -> None:
    import torch

    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise {
        "error": ZeroDivisionError("injected"),
        "memory": MemoryError("injected"),
        "device memory": torch.OutOfMemoryError("CUDA out of memory, injected"),
        "device": RuntimeError("CUDA error: an illegal memory access was encountered, injected"),
        "exit": SystemExit(0),
    }[fault]


class _Hook:
    def find_spec(self, name, path=None, target=None):
        if name != "fledge.engine.engine":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def load_and_patch(module):
            load(module)
            step = module.Engine.step

            def step_with_faults(engine):
                try:
                    with open(os.environ["FLEDGE_TEST_FAULT"]) as file:
                        good, bad, fault = file.read().split(" ", 2)
                except FileNotFoundError:
                    return step(engine)
                is_good = int(good) > 0
                good, bad = int(good) - is_good, int(bad) - (not is_good)
                if bad:
                    with open(os.environ["FLEDGE_TEST_FAULT"], "w") as file:
                        file.write(f"{good} {bad} {fault}")
                else:
                    os.unlink(os.environ["FLEDGE_TEST_FAULT"])
                return step(engine) if is_good else _fail(fault)

            module.Engine.step = step_with_faults

        spec.loader.exec_module = load_and_patch
        return spec


if "FLEDGE_TEST_FAULT" in os.environ:
    sys.meta_path.insert(0, _Hook())
