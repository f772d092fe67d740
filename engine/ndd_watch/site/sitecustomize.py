"""Loads the observer into a Python process that imports torch, then runs the sitecustomize that this one hides.

Python imports it at its start, because the folder is first on PYTHONPATH. What the script does outside its folder is
heard from then on. Nothing here may raise or import torch, and every Python must be able to read it, also 2.7, which
only runs the other sitecustomize.
"""


def _begin():
    import os
    import sys

    here = os.path.dirname(os.path.abspath(__file__))
    # Child processes find it through the environment, which stays as it is.
    sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder or ".") != here]
    try:
        if sys.version_info >= (3, 9) and os.environ.get("NDD_WATCH") and not _is_helper(sys):
            # A script may replace functions of the library before it imports torch.
            kept = {name: dict(vars(sys.modules[name])) for name in ("os", "time") if name in sys.modules}
            _put(here, kept)
            _when_imported("torch", _load)
    except Exception:
        pass  # this process is not observed
    ours = sys.modules.pop("sitecustomize", None)
    try:
        import sitecustomize  # noqa: F401  the user's or the system's
    except ImportError as error:
        # Python 2 names the module in the text only.
        if getattr(error, "name", None) != "sitecustomize" and str(error) != "No module named sitecustomize":
            raise
    finally:
        if ours is not None:
            sys.modules.setdefault("sitecustomize", ours)


def _is_helper(sys):
    """Whether this is a process that Python or torch start for themselves and that never trains."""
    words = getattr(sys, "orig_argv", None) or sys.argv
    return any(
        "multiprocessing.resource_tracker" in word
        or word.endswith("torch/_inductor/compile_worker/__main__.py")
        for word in words
    )


def _when_imported(wanted, then):
    """Call then(module) once the module has been imported."""
    import sys

    class Finder(object):
        @staticmethod
        def find_spec(name, path=None, target=None):
            if name != wanted:
                return None
            spec = None
            # Those before it were asked. The one of an editable installation is the last one.
            after = sys.meta_path.index(finder) + 1 if finder in sys.meta_path else 0
            for other in sys.meta_path[after:]:
                if spec is None and hasattr(other, "find_spec"):
                    spec = other.find_spec(name, path, target)
            if spec is None or not hasattr(spec.loader, "exec_module"):
                return spec
            execute = spec.loader.exec_module

            def exec_module(module):
                execute(module)
                if finder in sys.meta_path:
                    sys.meta_path.remove(finder)
                    del spec.loader.exec_module
                    try:
                        then(module)
                    except Exception as error:
                        # This process is not observed, or a signal handler of the script has raised it.
                        telling = sys.modules.get("_ndd_watch.apart")
                        if telling is not None and not telling.ours(error):
                            raise

            spec.loader.exec_module = exec_module
            return spec

    finder = Finder()
    sys.meta_path.insert(0, finder)


def _put(here, kept):
    """Make the observer's folder a package, and hear what the process does. Every Python process waits for this."""
    import os
    import sys

    # Those of `importlib.util`, which would import more.
    find = sys.modules["_frozen_importlib_external"].spec_from_file_location
    folder = os.path.dirname(here)
    spec = find("_ndd_watch", os.path.join(folder, "__init__.py"), submodule_search_locations=[folder])
    module = sys.modules["_ndd_watch"] = sys.modules["_frozen_importlib"].module_from_spec(spec)
    module.AT_START = kept
    spec.loader.exec_module(module)
    import _ndd_watch.outside

    _ndd_watch.outside.begin()


def _load(torch):
    from importlib import import_module

    # Somebody's own file may have the name.
    if {"_C", "autograd", "__path__"} <= set(vars(torch)):
        import_module("_ndd_watch.install").install()


_begin()
