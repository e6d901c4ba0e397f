"""Gives the workers of a server the path of a GPU on a CPU: a folder for PYTHONPATH (see `e2e/test_kept_weights.py`).

The kernels run in Triton's interpreter, and the memory of keepers is the host's. Everything else is the server's own.
Python imports this module when it starts; processes other than workers are left alone.
"""

import sys


def _be_a_gpu() -> None:
    from pagewire.tools.triton_interpreter import interpret

    interpret()
    from keepers import KeptDevice

    from pagewire.engine.device import base

    device = KeptDevice()
    base.choose_device = lambda config, *, rank_info: device
    # Their trial takes minutes in the interpreter, and has tests of its own.
    from pagewire.engine.runner import loading
    from pagewire.engine.runner.kernel_checks import Checked

    vars(loading)["check_kernels"] = lambda config, spec, served, *rest: Checked(served, config)


if "pagewire.procs.child" in sys.orig_argv and "worker" in sys.orig_argv:
    _be_a_gpu()
