"""Loads diagnosd's probe when, and only when, this process imports PyTorch as a rank of an observed job.

This folder is what `diagnosd run` puts in front of PYTHONPATH. Python imports this file as it starts, in every child of
the job; all it does then is to look out for `torch`. Another sitecustomize that it hides is run as if it were alone.

One module everywhere: `diagnosd` is answered for from here, by the place of this file, so that the training process
needs nothing installed, and `from diagnosd import probe` in the script is what PyTorch was instrumented with.
`python -I` and `-E` ignore PYTHONPATH: there the probe is absent.
"""
# ruff: noqa: ANN001, ANN202, ANN204 - typing takes longer to import than all of this, in every Python that the job starts

import importlib.machinery
import importlib.util
import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))
_PACKAGE = os.path.dirname(os.path.dirname(_HERE))
_OFF = ("off", "0", "no", "false")  # as in identity.py: the package is not loaded where it is off


class _Loader:
    """Runs `act` after the module's own code; then nothing of ours is left on the module."""

    def __init__(self, spec, act):
        self._spec, self._own, self._act = spec, spec.loader, act

    def create_module(self, spec):
        return self._own.create_module(spec)

    def exec_module(self, module):
        self._spec.loader = module.__loader__ = self._own
        self._own.exec_module(module)
        self._act(module)

    def __getattr__(self, name):
        return getattr(self._own, name)


class _LookOut:
    """Finds no module itself but `diagnosd`. `after[name]` is called with the module once its code has run."""

    def __init__(self):
        self.after = {"torch": _instrument}

    def find_spec(self, name, path=None, target=None):
        if name == "diagnosd":
            file = os.path.join(_PACKAGE, "__init__.py")
            return importlib.util.spec_from_file_location(name, file, submodule_search_locations=[_PACKAGE])
        act = self.after.get(name)
        if act is None:
            return None
        finders = (finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec"))
        spec = next((found for found in (finder.find_spec(name, path, target) for finder in finders) if found), None)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            spec.loader = _Loader(spec, act)
        return spec


def _instrument(torch):
    if not any(os.environ.get(key) for key in ("RANK", "SLURM_PROCID", "DIAGNOSD_JOB")):
        return
    try:
        from diagnosd.probe import pytorch

        pytorch.instrument(torch, _look_out.after)
    except Exception as error:  # whatever is wrong with us, the job goes on
        sys.stderr.write("diagnosd: PyTorch is not observed: %r\n" % (error,))


def _run_hidden():
    """The sitecustomize that would have been found without this folder; its errors are its own."""
    folders = [folder for folder in sys.path if os.path.abspath(folder or ".") != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", folders)
    if spec is not None and spec.loader is not None:
        module = sys.modules["sitecustomize"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


if os.environ.get("DIAGNOSD", "").lower() not in _OFF and not any(
    type(finder).__name__ == "_LookOut" for finder in sys.meta_path
):
    _look_out = _LookOut()
    sys.meta_path.insert(0, _look_out)
_run_hidden()
