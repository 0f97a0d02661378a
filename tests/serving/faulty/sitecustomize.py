"""Put on a server's PYTHONPATH: engine steps fail as the file $FLEDGE_TEST_FAULT says, in whichever process the engine runs.

The file holds a number of steps and the name of a fault; each failing step takes one off, and without a file all is well.
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

        def load_and_spoil(module):
            load(module)
            step = module.Engine.step

            def spoiled(engine):
                try:
                    with open(os.environ["FLEDGE_TEST_FAULT"]) as file:
                        left, _, fault = file.read().partition(" ")
                except FileNotFoundError:
                    return step(engine)
                if int(left) > 1:
                    with open(os.environ["FLEDGE_TEST_FAULT"], "w") as file:
                        file.write(f"{int(left) - 1} {fault}")
                else:
                    os.unlink(os.environ["FLEDGE_TEST_FAULT"])
                return _fail(fault)

            module.Engine.step = spoiled

        spec.loader.exec_module = load_and_spoil
        return spec


if "FLEDGE_TEST_FAULT" in os.environ:
    sys.meta_path.insert(0, _Hook())
