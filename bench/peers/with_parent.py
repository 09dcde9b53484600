"""Runs a Python module as a program that ends when its supervisor does: with_parent.py MODULE ARGUMENT..."""

import os
import runpy
import sys
import threading


def _end_with(descriptor: int) -> None:
    os.read(descriptor, 1)  # returns at the end of the parent, which alone could write
    os._exit(1)


threading.Thread(target=_end_with, args=(int(os.environ["KVTIDE_PARENT_FD"]),), daemon=True).start()
del sys.argv[0]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
