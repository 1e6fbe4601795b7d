"""Run benchmarks by name, or all of them.

Each module of this package that has `def run(quick: bool) -> None` is a benchmark; its docstring's first line says
what it measures. A benchmark prints what it measured and keeps nothing.
"""

from __future__ import annotations

import argparse
import importlib
import os
import pkgutil
from types import ModuleType

import benchmarks

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
"""As `streamsched` does: a cost on one core is that of one thread."""


def discover() -> dict[str, ModuleType]:
    """Benchmark modules by name."""
    names = sorted(m.name for m in pkgutil.iter_modules(benchmarks.__path__) if not m.name.startswith("_"))
    modules = {name: importlib.import_module(f"benchmarks.{name}") for name in names}
    return {name: module for name, module in modules.items() if hasattr(module, "run")}


def main() -> None:
    found = discover()
    what = "\n".join(f"  {name:<12} {(module.__doc__ or '').splitlines()[0]}" for name, module in found.items())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", epilog=what, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="name", help="benchmarks to run; all when none is named")
    parser.add_argument("--quick", action="store_true", help="few and small cases, to see that it works")
    chosen = parser.parse_args()
    if unknown := sorted(set(chosen.names) - set(found)):
        parser.error(f"no benchmark {', '.join(unknown)}; there are {', '.join(found)}")
    for name in chosen.names or found:
        found[name].run(chosen.quick)


if __name__ == "__main__":
    main()
